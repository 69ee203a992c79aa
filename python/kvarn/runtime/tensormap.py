# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""TMA descriptors of caches: their description as numbers, and their encoding by the driver.

``dialect.tma_layout`` defines the static part that kernels know; `describe` adds dimensions, strides and the address
from a cache's fields, in pure Python, and checks the hardware's requirements; `encode` turns a description into the 128
opaque bytes that a kernel takes by value (an argument of kind ``tensormap``), which needs the driver of a device from
sm_90 on.

Descriptions list dimensions from slow to fast, as shapes are written; `encode` reverses them for the driver. Rows are
those of ``layout.num_rows``: gaps between a view's pages (other layers, the other half) are within the bounds, so
bounds do not separate layers. Descriptors with pages, the default of tiles, have no such gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvarn.dialect import layout, tma_layout
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec
from kvarn.dialect.tma_layout import TmaSpec

from .copying import NoCopies
from .device import L2_PROMOTION, device

_COORDINATES = 2**31  # coordinates are signed 32-bit numbers


@dataclass(frozen=True)
class TensorMap:
    """The contents of a TMA descriptor.

    Attributes
    ----------
    dtype : DType
    dims, strides, box : tuple of int
        Slow to fast, in elements; the last stride is 1.
    base : int
        Address of the first element.
    tile : tuple of int
        The tile in shared memory that the boxes of one load fill.
    swizzle : {"none", "32B", "64B", "128B"}
    l2_promotion : {0, 64, 128, 256}
        Bytes that the L2 cache fetches around a miss.
    needs : str
        The first chip whose loads support it.
    form : str
        The constructor that made it (``tma_layout.FORMS``); empty if none of them did.
    """

    dtype: DType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    base: int
    tile: tuple[int, ...]
    swizzle: str = "none"
    l2_promotion: int = 0
    needs: str = "sm_90"
    form: str = ""

    def __post_init__(self) -> None:
        for problem in problems(self):
            raise ValueError(f"TMA descriptor: {problem}")

    @property
    def spec(self) -> TmaSpec | None:
        """The spec that a kernel is specialised for; None if no constructor of a cache made this descriptor."""
        return TmaSpec(self.form, self.dtype, self.box, self.tile, self.swizzle) if self.form else None

    @property
    def box_bytes(self) -> int:
        """Bytes of one box."""
        count = self.dtype.itemsize
        for extent in self.box:
            count *= extent
        return count


def problems(m: TensorMap) -> list[str]:
    """Violated requirements of the hardware; empty if there are none."""
    size, rank = m.dtype.itemsize, len(m.dims)
    if not 1 <= rank <= 5 or not rank == len(m.strides) == len(m.box):
        return [f"rank must be 1 to 5, the same for dims, strides and box, got {m.dims}, {m.strides}, {m.box}"]
    found = tma_layout.box_problems(m.dtype, m.box, m.swizzle)
    if m.l2_promotion not in L2_PROMOTION:
        found.append(f"l2_promotion must be one of {', '.join(map(str, L2_PROMOTION))}, got {m.l2_promotion}")
    if any(not 1 <= d <= 2**32 for d in m.dims):
        found.append(f"dims must be from 1 to 2**32, got {m.dims}")
    if m.strides[-1] != 1:
        found.append(f"the last dimension must be contiguous, got a stride of {m.strides[-1]}")
    for stride in m.strides[:-1]:
        if stride * size % 16 or not 0 <= stride * size < 2**40:
            found.append(f"strides must be multiples of 16 bytes below 2**40, got {stride} elements of {size} bytes")
    if m.base % 16:
        found.append(f"the address must be a multiple of 16, got {m.base:#x}")
    return found


# --- descriptors of caches -----------------------------------------------------------------------


def _at(spec: CacheSpec, fields: tuple[int, ...]) -> Mapping[str, int]:
    names = [f.name for f in layout.operand_fields(spec)]
    if len(fields) != len(names):
        raise ValueError(f"fields must be those of a cache ({', '.join(names)}), got {len(fields)} values")
    at = dict(zip(names, fields, strict=True))
    if at["num_blocks"] < 1:
        raise ValueError(f"a cache must have at least one block to be described, got {at['num_blocks']}")
    return at


def _rows(spec: CacheSpec, at: Mapping[str, int]) -> int:
    rows = layout.num_rows(spec, at["num_blocks"], at["capacity"], at["stride0"])
    if rows >= _COORDINATES:
        raise ValueError(f"rows must be below 2**31, which a coordinate can name, got {rows}: use pages (paged=True)")
    return rows


def _make(
    spec: TmaSpec, dims: tuple[int, ...], strides: tuple[int, ...], base: int, l2_promotion: int = 0
) -> TensorMap:
    needs = "sm_100" if spec.form in tma_layout.GATHERS else "sm_90"
    return TensorMap(spec.dtype, dims, strides, spec.box, base, spec.tile, spec.swizzle, l2_promotion, needs, spec.form)


def describe(made: TmaSpec, spec: CacheSpec, fields: tuple[int, ...], **options: int) -> TensorMap:
    """The description of a descriptor of a cache, by its form.

    Parameters
    ----------
    made : TmaSpec
        From a constructor of ``tma_layout`` for ``spec``.
    fields : tuple of int
        The cache's ``fields()``.
    **options
        As in `of_tile`.
    """
    return of_tile(made, spec, _at(spec, fields), **options)


def of_tile(
    made: TmaSpec, spec: CacheSpec, at: Mapping[str, int], *, content: int = 0, columns: int = 0, l2_promotion: int = 0
) -> TensorMap:
    """Like `describe`, from a cache's fields by name.

    - A tile with pages has dims (pages, P, H, D): coordinates stay small in the largest pools, and memory between the
      view's pages cannot be loaded. Without pages the dims are (rows, H, D). MLA has one head per token.
    - A ragged one has dims (rows + 1, H, BM, D) and coordinates (BM - n, row + n). Its base is BM rows before the view,
      and the caller guarantees that these rows are mapped (in a pool, all pages but the first have them).
    - A gather has dims (rows, row pitch): further columns are zeros.

    Parameters
    ----------
    at : mapping
        The cache's fields ``base``, ``stride0``, ``num_blocks`` and ``capacity``.
    content : int
        Bytes of 8-bit content, including padding, before the bf16 rope part of a row.
    columns : int
        Elements of a row that a gather may load; 0 for the row pitch.
    """
    size, wide = spec.dtype.itemsize, made.dtype.itemsize
    pitch, base = spec.token_stride * size // wide, at["base"] + content
    inner, strides = (spec.num_heads, spec.head_size), (spec.token_stride, spec.head_stride, 1)
    if made.form in tma_layout.GATHERS:
        return _make(made, (_rows(spec, at), columns or pitch), (pitch, 1), base, l2_promotion)
    if made.form == "ragged":
        base -= made.rows * pitch * wide
        if base < 0:
            raise ValueError(f"the {made.rows} rows before the cache must be mapped, got a cache at {at['base']:#x}")
        dims = (_rows(spec, at) + 1, spec.num_heads, made.rows, spec.head_size)
        return _make(made, dims, (pitch, spec.head_stride, pitch, 1), base, l2_promotion)
    if made.form == "token":
        inner, strides = (1, spec.row_size), (pitch, pitch, 1)
    if made.form == "rope":
        # With pages, columns end with the rope part: those of a whole row would extend past the last page.
        inner, strides = (1, made.tile[-1] if made.paged else pitch), (pitch, pitch, 1)
    if made.paged:
        dims = (at["num_blocks"], at["capacity"], *inner)
        return _make(made, dims, (at["stride0"] * size // wide, *strides), base, l2_promotion)
    return _make(made, (_rows(spec, at), *inner), strides, base, l2_promotion)


def describe_scales(dtype: DType, address: int, total: int, count: int) -> TensorMap:
    """A row of ``total`` scales, ``count`` per load."""
    if total % 4:
        raise ValueError(f"the count of scales must be a multiple of 4, got {total}")
    return _make(tma_layout.scale(dtype, count), (1, total), (total, 1), address)


# --- descriptors made at launch ------------------------------------------------------------------


class LaunchMap:
    """Makes the descriptor of a program's argument at each launch, with a cache.

    A descriptor depends on the device, the address (and so on the layer), and the pool's extents: a repeated launch
    costs one lookup. Nothing is allocated on the device, so launches can be captured.
    """

    _REMEMBER = 1024  # cached descriptors: layers times pools

    def __init__(self, made: TmaSpec, spec: CacheSpec, what: str, l2_promotion: int = 0) -> None:
        self._tile, self._spec, self._what, self._promotion = made, spec, what, l2_promotion
        self._known: dict[Any, Any] = {}

    def __call__(self, *key: Any) -> Any:
        """The encoded descriptor of ``(device, base, stride0, num_blocks, capacity)``, from ``device.encode``.

        All zeros for an empty buffer, which the hardware cannot describe and from which nothing is loaded.
        """
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._REMEMBER:
                self._known.clear()
            found = self._known[key] = self._encoded(*key)
        return found

    def _encoded(self, device: Any, base: int, stride0: int, num_blocks: int, capacity: int) -> Any:
        if num_blocks < 1 or capacity < 1:
            return bytes(128)
        at = {"base": base, "stride0": stride0, "num_blocks": num_blocks, "capacity": capacity}
        try:
            return device.encode(of_tile(self._tile, self._spec, at, l2_promotion=self._promotion))
        except ValueError as error:
            raise ValueError(f"{self._what} cannot be read through TMA: {error}") from None


# --- encoding ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedTensorMap(NoCopies):
    """A descriptor as a kernel's argument: 128 opaque bytes, and their device.

    Attributes
    ----------
    description : TensorMap
        Its contents as numbers.
    encoded : bytes
        Empty for host memory: such a descriptor can only be compiled with.
    ordinal : int
        The device; -1 for the host.
    owner : object
        The owner of the memory, kept alive; None if the caller keeps it.
    """

    description: TensorMap
    encoded: bytes
    ordinal: int
    owner: Any = field(default=None, repr=False, compare=False)
    copied_by: ClassVar[str] = "make the descriptor again, from the copied cache"

    @property
    def spec(self) -> TmaSpec | None:
        """The spec that a kernel is specialised for."""
        return self.description.spec

    @property
    def device(self) -> tuple[str, int]:
        return ("cpu", 0) if self.ordinal < 0 else ("cuda", self.ordinal)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """The owners of the memory, if known."""
        return tuple(getattr(self.owner, "buffers", ()))

    @property
    def readonly(self) -> bool:
        """Whether the memory must not be stored to."""
        return bool(getattr(self.owner, "readonly", False))


def of_owner(m: TensorMap, owner: Any) -> EncodedTensorMap:
    """The descriptor of a cache or operand, encoded for its device."""
    kind, ordinal = owner.device
    return EncodedTensorMap(m, b"", -1, owner) if kind == "cpu" else encode(m, ordinal, owner)


def encode(m: TensorMap, ordinal: int = 0, owner: Any = None) -> EncodedTensorMap:
    """Encode a description by the driver; ``owner`` is the owner of the memory.

    Raises
    ------
    ValueError
        If the device does not support it.
    DriverError
        If the driver refuses it.
    """
    return EncodedTensorMap(m, device(ordinal).encode(m), ordinal, owner)
