# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""TMA descriptors of caches: what they describe, as numbers, and their encoding by the driver.

`describe_*` computes dimensions, strides and boxes from a spec and a cache's fields, in pure Python, and checks
everything that the hardware asks; `encode` turns a description into the 128 opaque bytes that a kernel takes by
value (an argument of kind ``tensormap``), which needs a driver of a device from sm_90 on.

Descriptions list dimensions slow to fast, as shapes are written; the driver wants them fast to slow, and
`encode` turns them round. Rows are those of ``layout.num_rows``: the gaps between a view's own pages (other
layers, the other half) lie inside the bounds, so bounds do not keep layers apart. `describe_page_tile` has
no such gaps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from kvarn.dialect import dtypes, layout
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec, align_up

SWIZZLE_BYTES = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
_L2_PROMOTION = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}
_TYPES = {
    "f32": "FLOAT32", "f16": "FLOAT16", "bf16": "BFLOAT16", "f64": "FLOAT64", "i32": "INT32", "i64": "INT64",
    "u32": "UINT32", "u64": "UINT64", "u16": "UINT16", "i16": "UINT16", "u8": "UINT8", "i8": "UINT8",
    "f8e4m3": "UINT8", "f8e5m2": "UINT8", "f8e8m0": "UINT8",
}  # fmt: skip


def granule(dtype: DType, swizzle: str) -> int:
    """Elements of the innermost box dimension that a swizzle mode moves as one."""
    if swizzle not in SWIZZLE_BYTES:
        raise ValueError(f"swizzle must be one of {', '.join(SWIZZLE_BYTES)}, got {swizzle!r}")
    return SWIZZLE_BYTES[swizzle] // dtype.itemsize


def padded_depth(dtype: DType, swizzle: str, depth: int) -> int:
    """A row's depth rounded up to whole granules."""
    return align_up(depth, granule(dtype, swizzle))


@dataclass(frozen=True)
class TensorMap:
    """What a TMA descriptor says.

    Attributes
    ----------
    dtype : DType
    dims, strides, box : tuple of int
        Slow to fast, in elements; the last stride is 1.
    base : int
        Address of the first element.
    tile : tuple of int
        The tile in shared memory that the boxes of one load make up.
    swizzle : {"none", "32B", "64B", "128B"}
    l2_promotion : {0, 64, 128, 256}
        Bytes that the L2 cache fetches around a miss.
    needs : str
        The first chip whose loads can use it.
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

    def __post_init__(self) -> None:
        for problem in problems(self):
            raise ValueError(f"TMA descriptor: {problem}")

    @property
    def box_bytes(self) -> int:
        """Bytes that one load brings: what a barrier has to expect of it."""
        count = self.dtype.itemsize
        for extent in self.box:
            count *= extent
        return count


def problems(m: TensorMap) -> list[str]:
    """What the hardware refuses in a description; empty when it takes it."""
    size, rank, found = m.dtype.itemsize, len(m.dims), []
    if m.dtype.name not in _TYPES:
        found.append(f"dtype must be one of {', '.join(_TYPES)}, got {m.dtype.name}")
    if m.swizzle not in SWIZZLE_BYTES:
        found.append(f"swizzle must be one of {', '.join(SWIZZLE_BYTES)}, got {m.swizzle!r}")
        return found
    if m.l2_promotion not in _L2_PROMOTION:
        found.append(f"l2_promotion must be one of {', '.join(map(str, _L2_PROMOTION))}, got {m.l2_promotion}")
    if not 1 <= rank <= 5 or not rank == len(m.strides) == len(m.box):
        return [*found, f"rank must be 1 to 5, the same for dims, strides and box, got {m.dims}, {m.strides}, {m.box}"]
    if any(not 1 <= d <= 2**32 for d in m.dims):
        found.append(f"dims must be from 1 to 2**32, got {m.dims}")
    if m.strides[-1] != 1:
        found.append(f"the last dimension must be contiguous, got a stride of {m.strides[-1]}")
    for stride in m.strides[:-1]:
        if stride * size % 16 or not 0 <= stride * size < 2**40:
            found.append(f"strides must be multiples of 16 bytes below 2**40, got {stride} elements of {size} bytes")
    if any(not 1 <= b <= 256 for b in m.box):
        found.append(f"box must be 1 to 256 in each dimension, got {m.box}")
    inner = m.box[-1] * size
    if inner % 16:
        found.append(f"the box's last dimension must be a multiple of 16 bytes, got {m.box[-1]} x {size} bytes")
    if m.swizzle != "none" and inner > SWIZZLE_BYTES[m.swizzle]:
        found.append(f"the box's last dimension must be at most the {SWIZZLE_BYTES[m.swizzle]} bytes of swizzle "
                     f"{m.swizzle}, got {inner}")
    if m.base % 16:
        found.append(f"the address must be a multiple of 16, got {m.base:#x}")
    return found


# --- descriptors of caches -----------------------------------------------------------------------


def _at(spec: CacheSpec, fields: tuple[int, ...]) -> Mapping[str, int]:
    names = [f.name for f in layout.cache_fields(spec)]
    if len(fields) != len(names):
        raise ValueError(f"fields must be those of a cache ({', '.join(names)}), got {len(fields)} values")
    return dict(zip(names, fields, strict=True))


def _rows(spec: CacheSpec, at: Mapping[str, int]) -> int:
    if at["num_blocks"] < 1:
        raise ValueError(f"a cache must have at least one block to be described, got {at['num_blocks']}")
    return layout.num_rows(spec, at["num_blocks"], at["capacity"], at["stride0"])


def describe_tile(
    spec: CacheSpec, fields: tuple[int, ...], rows: int, *, depth: int | None = None, swizzle: str = "128B"
) -> TensorMap:
    """Rows of one head: dims (rows, H, D), box (rows of the tile, 1, one granule).

    Parameters
    ----------
    spec : CacheSpec
    fields : tuple of int
        The cache's ``fields()``.
    rows : int
        Tokens of a box; at most a page, so that a box does not cross one.
    depth : int, optional
        Elements of the head that the kernel loads, a multiple of the granule; by default the head size, padded.
    swizzle : {"none", "32B", "64B", "128B"}
        A tile takes depth / granule loads; column chunk j lies at element ``j * rows * granule`` of shared memory.
    """
    at, g = _at(spec, fields), granule(spec.dtype, swizzle)
    depth = padded_depth(spec.dtype, swizzle, spec.head_size) if depth is None else depth
    if depth < 1 or depth % g:
        raise ValueError(f"depth must be a multiple of {g} elements (swizzle {swizzle}), got {depth}")
    if spec.paged and rows > spec.page_size:
        raise ValueError(f"a box must not cross a page of {spec.page_size} tokens, got {rows} rows")
    return TensorMap(spec.dtype, (_rows(spec, at), spec.num_heads, spec.head_size),
                     (spec.token_stride, spec.head_size, 1), (rows, 1, g), at["base"], (rows, 1, depth), swizzle)


def describe_page_tile(
    spec: CacheSpec, fields: tuple[int, ...], rows: int, *, swizzle: str = "128B"
) -> TensorMap:
    """Rows of one head, pages apart: dims (pages, P, H, D). The default for paged caches.

    Coordinates are page and slot, which stay small in the largest pools, and nothing between the view's pages can be
    loaded.
    """
    at, g = _at(spec, fields), granule(spec.dtype, swizzle)
    if rows > at["capacity"]:
        raise ValueError(f"a box must not cross a page of {at['capacity']} tokens, got {rows} rows")
    return TensorMap(spec.dtype, (at["num_blocks"], at["capacity"], spec.num_heads, spec.head_size),
                     (at["stride0"], spec.token_stride, spec.head_size, 1), (1, rows, 1, g), at["base"],
                     (rows, 1, padded_depth(spec.dtype, swizzle, spec.head_size)), swizzle)


def describe_gather4(
    spec: CacheSpec,
    fields: tuple[int, ...],
    width: int,
    *,
    height: int = 4,
    row_pitch: int | None = None,
    dtype: DType | None = None,
    swizzle: str = "none",
    l2_promotion: int = 0,
) -> TensorMap:
    """Four arbitrary rows a load (sm_100): dims (rows, row pitch), box (1, width or one granule).

    Parameters
    ----------
    width : int
        Elements of a row to load; columns beyond ``row_pitch`` are zeros.
    height : int
        Rows of the tile, a multiple of 4.
    row_pitch : int, optional
        Elements from one row to the next, in ``dtype``; by default the cache's.
    dtype : DType, optional
        What to load the rows as: i64 over an fp8 row makes one linear box of it.
    """
    at = _at(spec, fields)
    dtype = spec.dtype if dtype is None else dtype
    row_bytes = spec.token_stride * spec.dtype.itemsize
    row_pitch = row_bytes // dtype.itemsize if row_pitch is None else row_pitch
    if row_pitch * dtype.itemsize != row_bytes:
        raise ValueError(f"row_pitch must be the cache's row of {row_bytes} bytes, got {row_pitch} elements of "
                         f"{dtype.itemsize}")
    if not 0 < width <= row_pitch:
        raise ValueError(f"width must be from 1 to the row pitch {row_pitch}, got {width}")
    if height < 4 or height % 4:
        raise ValueError(f"height must be a positive multiple of 4, got {height}")
    box = width if swizzle == "none" else granule(dtype, swizzle)
    return TensorMap(dtype, (_rows(spec, at), row_pitch), (row_pitch, 1), (1, box), at["base"], (height, box), swizzle,
                     l2_promotion, "sm_100")


def describe_ragged_tile(
    spec: CacheSpec, fields: tuple[int, ...], rows: int, *, depth: int | None = None, swizzle: str = "128B"
) -> TensorMap:
    """Rows of one head of which only the first n are moved: dims (rows + 1, H, BM, D), coordinates (BM - n, row + n).

    The base lies BM rows before the view, and those rows must be mapped memory: the caller vouches for it (in a pool,
    every page but the first has them).
    """
    at, g = _at(spec, fields), granule(spec.dtype, swizzle)
    depth = padded_depth(spec.dtype, swizzle, spec.head_size) if depth is None else depth
    if depth < 1 or depth % g:
        raise ValueError(f"depth must be a multiple of {g} elements (swizzle {swizzle}), got {depth}")
    base = at["base"] - rows * spec.token_stride * spec.dtype.itemsize
    if base < 0:
        raise ValueError(f"the {rows} rows before the cache must be mapped, got a cache at {at['base']:#x}")
    return TensorMap(spec.dtype, (_rows(spec, at) + 1, spec.num_heads, rows, spec.head_size),
                     (spec.token_stride, spec.head_size, spec.token_stride, 1), (1, 1, rows, g), base,
                     (rows, depth), swizzle)


def _rope_base(spec: CacheSpec, at: Mapping[str, int], content: int) -> int:
    if spec.dtype.bits != 8:
        raise ValueError(f"a rope part behind the content needs an 8-bit cache, got {spec.dtype.name}")
    if not 0 < content < spec.head_size:
        raise ValueError(f"the content must be from 1 to {spec.head_size - 1} bytes of a row, got {content}")
    return at["base"] + content


def describe_rope_tile(
    spec: CacheSpec, fields: tuple[int, ...], rows: int, content: int, rope: int, *, swizzle: str = "128B"
) -> TensorMap:
    """The bf16 rope part of rows whose 8-bit content comes first: dims (rows, H, row in bf16), base at the rope part.

    Parameters
    ----------
    content : int
        Bytes of content, its padding included, that come before the rope part.
    rope : int
        bf16 elements of the rope part.
    """
    at, g = _at(spec, fields), granule(dtypes.bf16, swizzle)
    base = _rope_base(spec, at, content)
    if spec.head_size != content + 2 * rope:
        raise ValueError(f"a row of {spec.head_size} bytes must be {content} of content and {rope} bf16 of rope, "
                         f"which makes {content + 2 * rope}")
    if rope % g:
        raise ValueError(f"rope must be a multiple of {g} elements (swizzle {swizzle}), got {rope}")
    width = spec.head_size // 2
    return TensorMap(dtypes.bf16, (_rows(spec, at), spec.num_heads, width), (spec.num_heads * width, width, 1),
                     (rows, 1, g), base, (rows, 1, rope), swizzle)


def describe_rope_gather4(
    spec: CacheSpec,
    fields: tuple[int, ...],
    content: int,
    rope: int,
    *,
    height: int = 4,
    swizzle: str = "none",
    l2_promotion: int = 0,
) -> TensorMap:
    """Four arbitrary rows of the rope part a load (sm_100): dims (rows, rope), strides (row pitch, 1)."""
    at = _at(spec, fields)
    base = _rope_base(spec, at, content)
    if not 0 < rope * 2 <= spec.head_size - content:
        raise ValueError(f"rope must be from 1 to {(spec.head_size - content) // 2} bf16 elements, got {rope}")
    if height < 4 or height % 4:
        raise ValueError(f"height must be a positive multiple of 4, got {height}")
    box = rope if swizzle == "none" else granule(dtypes.bf16, swizzle)
    pitch = spec.token_stride // 2
    return TensorMap(dtypes.bf16, (_rows(spec, at), rope), (pitch, 1), (1, box), base, (height, box), swizzle,
                     l2_promotion, "sm_100")


def describe_scales(dtype: DType, address: int, total: int, count: int) -> TensorMap:
    """A row of ``total`` scales, ``count`` a load."""
    if total % 4:
        raise ValueError(f"the count of scales must be a multiple of 4, got {total}")
    return TensorMap(dtype, (1, total), (total, 1), (1, count), address, (1, count))


# --- encoding ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedTensorMap:
    """A descriptor for a kernel's ``tensormap`` argument: 128 opaque bytes, and the device that it is for."""

    description: TensorMap
    encoded: bytes
    ordinal: int


def encode(m: TensorMap, ordinal: int = 0) -> EncodedTensorMap:
    """Let the driver encode a description.

    Raises
    ------
    ValueError
        If the device cannot use it.
    DriverError
        If the driver refuses it.
    """
    from . import device as devices
    from . import driver

    on = devices.device(ordinal)
    major, minor, _ = devices.parse_chip(m.needs)
    if on.capability < (major, minor):
        raise ValueError(f"this TMA descriptor needs {m.needs} or later, got {on!r}")
    b = driver.require()
    element = getattr(b.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[m.dtype.name]}")
    swizzle = getattr(b.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{m.swizzle.upper()}")
    promotion = getattr(b.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_L2_PROMOTION[m.l2_promotion]}")
    size = m.dtype.itemsize
    with on.active():
        found = driver.call(
            "cuTensorMapEncodeTiled",
            element,
            len(m.dims),
            m.base,
            [b.cuuint64_t(d) for d in reversed(m.dims)],
            [b.cuuint64_t(s * size) for s in reversed(m.strides[:-1])],
            [b.cuuint32_t(x) for x in reversed(m.box)],
            [b.cuuint32_t(1)] * len(m.dims),
            b.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            promotion,
            b.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    return EncodedTensorMap(m, ctypes.string_at(int(found.getPtr()), 128), ordinal)
