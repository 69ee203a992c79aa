# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a kernel knows of a TMA descriptor: box, tile, swizzle, coordinates, offsets in shared memory.

Pure Python, as ``layout``: the verifiers, the passes, the host code that builds descriptors and the tests' emulation
all read it. The formulas use ``+ - * // % ^ >> &`` only and take ints, arrays and values of a kernel alike.
Boxes and tiles are listed slowest dimension first, as shapes are written; coordinates fastest first, as in PTX.

A *copy* is one instruction, which moves one box. A box is at most one swizzle granule wide, so a tile takes one copy
per
column chunk; chunk j of a tile of r rows starts r * (granule bytes) * j bytes into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import dtypes
from .dtypes import DType
from .layout import FA3, PAGED, RAGGED, SCALES, CacheSpec, Field, align_up, cdiv
from .shared_layout import SharedLayout

FORMS = ("tiled", "token", "ragged", "rope", "gather4", "rope_gather4", "scale")
GATHERS = ("gather4", "rope_gather4")
SWIZZLE_BYTES = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
DTYPES = (
    "f32", "f16", "bf16", "f64", "i32", "i64", "u32", "u64", "i16", "u16", "i8", "u8", "f8e4m3", "f8e5m2", "f8e8m0",
)  # fmt: skip
FIELDS = (Field("value", "tensormap", "TMA descriptor, passed by value"),)  # the run-time parts of a descriptor
LARGEST_BOX = 256  # elements in each dimension
ROWS_A_GATHER = 4
# Coordinates of a load, by form and rank of the box; the barrier and the destination come besides.
_COORDINATES = {
    ("tiled", 4): ("page", "slot", "head", "column"),
    ("tiled", 3): ("row", "head", "column"),
    ("token", 4): ("page", "slot", "head", "column"),
    ("rope", 4): ("page", "slot", "head", "column"),
    ("rope", 3): ("row", "head", "column"),
    ("ragged", 4): ("row", "valid", "head", "column"),
    ("gather4", 2): ("row0", "row1", "row2", "row3", "column"),
    ("rope_gather4", 2): ("row0", "row1", "row2", "row3", "column"),
    ("scale", 2): ("line", "column"),
}


def granule(dtype: DType, swizzle: str) -> int:
    """Elements of the innermost box dimension that a swizzle mode moves as one; "none" counts as 16 bytes."""
    if swizzle not in SWIZZLE_BYTES:
        raise ValueError(f"swizzle must be one of {', '.join(SWIZZLE_BYTES)}, got {swizzle!r}")
    return SWIZZLE_BYTES[swizzle] // dtype.itemsize


def padded_depth(dtype: DType, swizzle: str, depth: int) -> int:
    """A row's depth rounded up to whole granules."""
    return align_up(depth, granule(dtype, swizzle))


@dataclass(frozen=True)
class TmaSpec:
    """The static parameters of a TMA descriptor: what a kernel that takes one is specialised for.

    Parameters
    ----------
    form : {"tiled", "token", "ragged", "rope", "gather4", "rope_gather4", "scale"}
        The constructor that made it.
    dtype : DType
    box : tuple of int
        What one copy moves (for the gathers, one row of it), slowest dimension first. A box of rank 4 of a "tiled" or
        "rope" descriptor has separate dimensions for pages and slots; one of rank 3 has rows.
    tile : tuple of int
        The tile in shared memory that the copies of one load fill: rows first, columns last.
    swizzle : {"none", "32B", "64B", "128B"}
    """

    form: str
    dtype: DType
    box: tuple[int, ...]
    tile: tuple[int, ...]
    swizzle: str = "none"

    def __post_init__(self) -> None:
        for name in ("box", "tile"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        # MLIR integers have no sign, and copies do not depend on it.
        object.__setattr__(self, "dtype", dtypes.by_mlir(self.dtype.mlir))
        for problem in spec_problems(self):
            raise ValueError(f"{problem}")

    @property
    def rows(self) -> int:
        """Rows that one copy moves."""
        if self.form in GATHERS:
            return ROWS_A_GATHER
        return self.box[-2] if self.form == "ragged" else math.prod(self.box[:-2]) if len(self.box) > 2 else 1

    @property
    def copies(self) -> int:
        """Copies of one load: the column chunks of the tile."""
        return self.tile[-1] // self.box[-1]

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row of a chunk in shared memory."""
        return self.box[-1] * self.dtype.itemsize

    @property
    def copy_bytes(self) -> int:
        """Bytes that one copy transfers, zero fill included, which is what the barrier must expect."""
        return self.rows * self.row_bytes

    @property
    def load_bytes(self) -> int:
        """Bytes that one load (all its copies) transfers."""
        return self.copies * self.copy_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of the tile in shared memory."""
        return self.tile[0] * self.tile[-1] * self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """Alignment in bytes of the tile's address in shared memory: the period of the swizzle, at least 128."""
        return shared_layout(self).alignment

    @property
    def paged(self) -> bool:
        """Whether the coordinates are page and slot instead of a row."""
        return self.form in ("tiled", "token", "rope") and len(self.box) == 4

    @property
    def coordinates(self) -> tuple[str, ...]:
        """Names of a load's coordinates, in order."""
        return _COORDINATES[self.form, len(self.box)]


def box_problems(dtype: DType, box: Sequence[int], swizzle: str) -> list[str]:
    """Why the hardware refuses a box, one sentence per problem."""
    found = []
    if dtype.name not in DTYPES:
        found.append(f"dtype must be one of {', '.join(DTYPES)}, got {dtype.name}")
    if swizzle not in SWIZZLE_BYTES:
        return [*found, f"swizzle must be one of {', '.join(SWIZZLE_BYTES)}, got {swizzle!r}"]
    if any(not 1 <= b <= LARGEST_BOX for b in box):
        found.append(f"box must be 1 to {LARGEST_BOX} in each dimension, got {tuple(box)}")
    inner = box[-1] * dtype.itemsize
    if inner % 16:
        found.append(f"the box's last dimension must be a multiple of 16 bytes, got {box[-1]} x {dtype.itemsize} bytes")
    if swizzle != "none" and inner > SWIZZLE_BYTES[swizzle]:
        found.append(
            f"the box's last dimension must be at most the {SWIZZLE_BYTES[swizzle]} bytes of swizzle {swizzle}, "
            f"got {inner}"
        )
    return found


def spec_problems(spec: TmaSpec) -> list[str]:
    """What is wrong with a spec, one sentence per problem; empty when it is legal."""
    if spec.form not in FORMS:
        return [f"form must be one of {', '.join(FORMS)}, got {spec.form}"]
    ranks = [rank for form, rank in _COORDINATES if form == spec.form]
    if len(spec.box) not in ranks:
        return [f"box of the form {spec.form} must have rank {' or '.join(map(str, ranks))}, got {spec.box}"]
    found = box_problems(spec.dtype, spec.box, spec.swizzle)
    if found:
        return found
    inner = dict.fromkeys(("tiled", "token", "rope"), spec.box[-2:-1])
    single = {"ragged": spec.box[:2], **inner}.get(spec.form, spec.box[:1])
    if spec.paged:
        single += spec.box[:1]
    if any(extent != 1 for extent in single):
        found.append(f"box of the form {spec.form} must be 1 in all dimensions but rows and columns, got {spec.box}")
    if len(spec.tile) < 2 or any(extent < 1 for extent in spec.tile) or math.prod(spec.tile[1:-1]) != 1:
        return [*found, f"tile must be rows and columns with nothing but 1 between, got {spec.tile}"]
    if spec.tile[0] % spec.rows or (spec.form not in GATHERS and spec.tile[0] != spec.rows):
        multiple = "a multiple of 4" if spec.form in GATHERS else "those of the box"
        found.append(f"the tile's rows must be {multiple}, got a tile {spec.tile} of boxes {spec.box}")
    if spec.tile[-1] % spec.box[-1]:
        found.append(f"the tile's columns must be whole boxes of {spec.box[-1]}, got {spec.tile[-1]}")
    if spec.swizzle != "none" and spec.row_bytes != SWIZZLE_BYTES[spec.swizzle]:
        found.append(
            f"a box's row must be the {SWIZZLE_BYTES[spec.swizzle]} bytes of swizzle {spec.swizzle}, "
            f"got {spec.row_bytes}"
        )
    if spec.copies > 1 and spec.tile[0] * spec.row_bytes % 128:
        found.append(f"chunks of a tile must be multiples of 128 bytes, got {spec.tile[0]} rows of {spec.row_bytes}")
    return found


# --- forms of caches -------------------------------------------------------------------------------


def _kind_problem(spec: CacheSpec, what: str, paged: bool = False) -> str | None:
    """Why a kind of cache or operand has no such tile; None when it has. ``paged``: coordinates are page and slot."""
    if what.startswith("a rope"):
        return None if spec.kind == PAGED else f"{what} needs a paged cache, got {spec.kind}"
    if spec.kind not in (FA3, SCALES) or (spec.kind == FA3 and paged):
        return None
    why = "a cache of that kind has no rows" if spec.kind == FA3 else "scales are read one by one"
    return f"{what} needs a paged or continuous cache, or a dense or ragged operand, got {spec.kind}: {why}"


def _refuse_kind(spec: CacheSpec, what: str, paged: bool = False) -> None:
    problem = _kind_problem(spec, what, paged)
    if problem is not None:
        raise ValueError(problem)


def _columns(dtype: DType, columns: int, swizzle: str, name: str) -> int:
    g = granule(dtype, swizzle)
    if columns < 1 or columns % g:
        raise ValueError(f"{name} must be a multiple of {g} elements (swizzle {swizzle}), got {columns}")
    return g


def _depth(spec: CacheSpec, depth: int | None, swizzle: str) -> tuple[int, int]:
    """(elements of a head that one load copies, by default the padded head size; elements per granule)."""
    depth = padded_depth(spec.dtype, swizzle, spec.head_size) if depth is None else depth
    return depth, _columns(spec.dtype, depth, swizzle, "depth")


def _rows_of_page(spec: CacheSpec, rows: int) -> None:
    if spec.paged and (rows > spec.page_size or spec.page_size % rows):
        raise ValueError(f"a box must not cross a page of {spec.page_size} tokens: its rows must divide it, got {rows}")


def tiled(
    spec: CacheSpec, rows: int, depth: int | None = None, swizzle: str = "128B", paged: bool | None = None
) -> TmaSpec:
    """Rows of one head: what ``create_tma_tile`` makes.

    Parameters
    ----------
    spec : CacheSpec
    rows : int
        Tokens per tile, a divisor of the page size, so that a box does not cross a page.
    depth : int, optional
        Elements of the head that one load copies, a multiple of the granule; by default the head size, padded.
    swizzle : {"none", "32B", "64B", "128B"}
    paged : bool, optional
        Whether pages and slots are separate dimensions (rank 4) instead of rows (rank 3); by default for caches. Only
        with separate dimensions are loads outside of the view's own pages impossible, and rows beyond 2**31 reachable.

    Raises
    ------
    ValueError
        If the cache or the hardware does not allow it.
    """
    paged = _is_paged(spec, paged)
    _refuse_kind(spec, "a TMA tile", paged)
    _rows_of_page(spec, rows)
    if spec.head_size * spec.dtype.itemsize % 16:
        raise ValueError(
            "the elements of a head must be a multiple of 16 bytes, as all strides of a TMA descriptor, "
            f"got {spec.head_size} of {spec.dtype.name}"
        )
    depth, g = _depth(spec, depth, swizzle)
    page = (1,) if paged else ()
    return TmaSpec("tiled", spec.dtype, (*page, rows, 1, g), (rows, 1, depth), swizzle)


def _is_paged(spec: CacheSpec, paged: bool | None) -> bool:
    if paged and spec.kind == RAGGED:
        raise ValueError("coordinates of page and slot need sequences of one length, got a ragged operand")
    return spec.of_cache if paged is None else paged


def joins_heads(spec: CacheSpec) -> bool:
    """Whether 8-bit tokens can be rows of a descriptor but single heads, of an odd multiple of 8 bytes, cannot."""
    packed = spec.of_cache and spec.strides is None and spec.dtype.bits == 8
    return packed and spec.head_size % 16 == 8 and spec.row_size % 16 == 0


def token(spec: CacheSpec, rows: int, depth: int | None = None, swizzle: str = "128B") -> TmaSpec:
    """Rows of whole tokens, for heads that do not start at a multiple of 16 bytes.

    Coordinates are page, slot, 0 and a column of the token, which the hardware requires to be a multiple of 16 bytes. A
    load of one head therefore includes up to 8 columns of its neighbours: a head of 72 8-bit elements may start at the
    ninth column of its tile.
    """
    _refuse_kind(spec, "a TMA tile", True)
    _rows_of_page(spec, rows)
    if not joins_heads(spec):
        raise ValueError(
            "a TMA tile of tokens needs packed heads of 8-bit elements, an odd multiple of 8 of them, and tokens of a "
            f"multiple of 16, got {spec.num_heads} heads of {spec.head_size} of {spec.dtype.name}"
        )
    depth, g = _depth(spec, depth, swizzle)
    return TmaSpec("token", spec.dtype, (1, rows, 1, g), (rows, 1, depth), swizzle)


def launch_tile(spec: CacheSpec, rows: int, columns: int | None = None, swizzle: str = "128B") -> TmaSpec:
    """The tile of a descriptor that the runtime makes at launch (``kv.tensor_map``): paged where the cache is.

    Heads that cannot be rows of a descriptor get a tile of whole tokens (:func:`token`).

    Every cache and operand satisfies a descriptor's other requirements: its address is a multiple of 16 bytes, and its
    strides are multiples of one token's elements. So if this tile exists, every launch can build its descriptor;
    ValueError says why there is none.
    """
    if joins_heads(spec):
        return token(spec, rows, columns, swizzle)
    return tiled(spec, rows, columns, swizzle, paged=spec.kind != RAGGED)


def ragged(spec: CacheSpec, rows: int, depth: int | None = None, swizzle: str = "128B") -> TmaSpec:
    """Rows of one head, of which a load copies the first n: what ``create_ragged_tma_tile`` makes."""
    _refuse_kind(spec, "a ragged TMA tile")
    depth, g = _depth(spec, depth, swizzle)
    return TmaSpec("ragged", spec.dtype, (1, 1, rows, g), (rows, depth), swizzle)


def rope_width(spec: CacheSpec, padded_depth: int) -> int:
    """bf16 elements after the 8-bit content of a row; ValueError for a cache that cannot have them."""
    _refuse_kind(spec, "a rope TMA tile")
    if spec.dtype.bits != 8:
        raise ValueError(f"a rope part behind the content needs an 8-bit cache, got {spec.dtype.name}")
    if spec.num_heads != 1:
        raise ValueError(f"a rope part behind the content needs one head, got {spec.num_heads}")
    if spec.strides is not None:
        raise ValueError(f"a rope part behind the content needs packed rows, got strides {spec.strides}")
    if not 0 < padded_depth < spec.head_size:
        raise ValueError(f"the content must be from 1 to {spec.head_size - 1} bytes of a row, got {padded_depth}")
    if padded_depth % 16 or (spec.head_size - padded_depth) % 2:
        raise ValueError(
            f"the content must be a multiple of 16 bytes and the rest of a row of {spec.head_size} whole "
            f"bf16 elements, got {padded_depth}"
        )
    return (spec.head_size - padded_depth) // 2


def rope(
    spec: CacheSpec, rows: int, padded_depth: int, rope: int, swizzle: str = "128B", paged: bool | None = None
) -> TmaSpec:
    """The bf16 rope part of rows whose 8-bit content comes first: what ``create_rope_tma_tile`` makes."""
    if rope_width(spec, padded_depth) != rope:
        raise ValueError(
            f"a row of {spec.head_size} bytes must be {padded_depth} of content and {rope} bf16 of rope, "
            f"which makes {padded_depth + 2 * rope}"
        )
    _rows_of_page(spec, rows)
    g = _columns(dtypes.bf16, rope, swizzle, "rope")
    page = (1,) if _is_paged(spec, paged) else ()
    return TmaSpec("rope", dtypes.bf16, (*page, rows, 1, g), (rows, 1, rope), swizzle)


def _gathered(form: str, dtype: DType, width: int, height: int, swizzle: str) -> TmaSpec:
    if height < 4 or height % 4:
        raise ValueError(f"height must be a positive multiple of 4, got {height}")
    box = width if swizzle == "none" else granule(dtype, swizzle)
    return TmaSpec(form, dtype, (1, box), (height, align_up(width, box)), swizzle)


def gather4(
    spec: CacheSpec,
    width: int,
    height: int = 4,
    row_pitch: int | None = None,
    dtype: DType | None = None,
    swizzle: str = "none",
) -> TmaSpec:
    """Four arbitrary rows per copy: what ``create_gather4_tma_tile`` makes. sm_100a only.

    Parameters
    ----------
    width : int
        Elements of a row to load, in ``dtype``.
    height : int
        Rows of the tile, a multiple of 4; a load copies four.
    row_pitch : int, optional
        Elements from one row to the next, in ``dtype``; the cache's, which is the default.
    dtype : DType, optional
        The type to load the rows as: with i64, an fp8 row is one linear box.
    """
    _refuse_kind(spec, "a gather4 TMA tile")
    if spec.strides is not None and spec.num_heads > 1:
        raise ValueError(f"a gather4 TMA tile needs rows of all heads, got strides {spec.strides} of tokens and heads")
    dtype = spec.dtype if dtype is None else dtype
    row_bytes = spec.token_stride * spec.dtype.itemsize
    pitch = row_bytes // dtype.itemsize if row_pitch is None else row_pitch
    if pitch * dtype.itemsize != row_bytes:
        raise ValueError(
            f"row_pitch must be the cache's row of {row_bytes} bytes, got {pitch} elements of {dtype.itemsize}"
        )
    if not 0 < width <= pitch:
        raise ValueError(f"width must be from 1 to the row pitch {pitch}, got {width}")
    return _gathered("gather4", dtype, width, height, swizzle)


def rope_gather4(spec: CacheSpec, padded_depth: int, rope: int, height: int = 4, swizzle: str = "none") -> TmaSpec:
    """Four arbitrary rows of the bf16 rope part per copy: what ``create_rope_gather4_tma_tile`` makes. sm_100a only."""
    most = rope_width(spec, padded_depth)
    if not 0 < rope <= most:
        raise ValueError(f"rope must be from 1 to {most} bf16 elements, got {rope}")
    return _gathered("rope_gather4", dtypes.bf16, rope, height, swizzle)


def scale(dtype: DType, count: int) -> TmaSpec:
    """``count`` consecutive scales: what ``create_scale_tma_tile`` makes."""
    return TmaSpec("scale", dtype, (1, count), (1, count))


# --- coordinates and offsets -----------------------------------------------------------------------


def copy_coordinates(spec: TmaSpec, given: Sequence[Any], chunk: int) -> list[Any]:
    """Coordinates of one copy of a load, fastest first, as the instruction takes them.

    Parameters
    ----------
    given : sequence
        The coordinates of the load, in the order of ``spec.coordinates``.
    chunk : int
        The column chunk, from 0 to ``spec.copies`` - 1.

    Returns
    -------
    list
        For the gathers, the column, then four rows.
    """
    *rest, column = given
    column = column + chunk * spec.box[-1]
    if spec.form in GATHERS:
        return [column, *rest]
    if spec.form == "ragged":
        row, valid, head = rest
        # The base is BM rows early and BM is a separate dimension: line i of the box is row + i, and lines from valid
        # on
        # are out of bounds in that dimension, so that the hardware fills them with zeros.
        return [column, spec.rows - valid, head, row + valid]
    return [column, *reversed(rest)]


def shared_offset(spec: TmaSpec, row: Any, column: Any, rows: int | None = None) -> Any:
    """Byte offset of an element in the tile.

    Parameters
    ----------
    row, column : int, array or value
        Position in the tile: row below ``rows``, column below ``spec.tile[-1]``.
    rows : int, optional
        Rows of the tile in shared memory, which several loads may fill; by default those of the descriptor's tile.
    """
    return shared_layout(spec, rows).offset(row, column)


def shared_layout(spec: TmaSpec, rows: int | None = None) -> SharedLayout:
    """The shared-memory layout of a tile of ``rows`` rows; a box's columns are one panel."""
    swizzle = 0 if spec.swizzle == "none" else SWIZZLE_BYTES[spec.swizzle]
    rows = spec.tile[0] if rows is None else rows
    return SharedLayout(rows, spec.tile[-1], spec.dtype.itemsize, swizzle, pitch=spec.row_bytes)


def tile_loads(spec: TmaSpec, tile_rows: int) -> int:
    """Loads that fill a tile of ``tile_rows`` rows."""
    return cdiv(tile_rows, spec.rows)


def tile_problems(spec: TmaSpec, cache: CacheSpec, tile_rows: int, smem_rows: int) -> list[str]:
    """What is wrong with loading a tile of a cache's tokens with a descriptor; empty when it is legal."""
    if spec.form not in ("tiled", "rope"):
        return [f"takes a descriptor of the form tiled or rope, got {spec.form}: use kv.tma_load"]
    problem = _kind_problem(cache, "a rope TMA tile" if spec.form == "rope" else "a TMA tile", spec.paged)
    if problem is not None:
        return [problem]
    found = []
    if spec.paged and cache.kind == RAGGED:
        found.append("coordinates of page and slot need sequences of one length, got a ragged operand")
    if spec.form == "tiled" and spec.dtype != cache.dtype:
        found.append(f"the descriptor must have the cache's dtype {cache.dtype.name}, got {spec.dtype.name}")
    if spec.form == "rope" and cache.dtype.bits != 8:
        found.append(f"a rope part behind the content needs an 8-bit cache, got {cache.dtype.name}")
    if tile_rows < 1 or tile_rows % spec.rows:
        found.append(f"tile_rows must be a multiple of the box's {spec.rows} rows, got {tile_rows}")
    if cache.paged and cache.page_size % spec.rows:
        found.append(f"the box's rows must divide the page size {cache.page_size}, got {spec.rows}")
    if smem_rows < tile_rows:
        found.append(f"smem_rows must be at least the tile's {tile_rows}, got {smem_rows}")
    if (tile_rows > spec.rows and spec.rows * spec.row_bytes % 128) or (
        spec.copies > 1 and smem_rows * spec.row_bytes % 128
    ):
        found.append(
            f"each copy must start at a multiple of 128 bytes of shared memory, got boxes of {spec.rows} and "
            f"chunks of {smem_rows} rows of {spec.row_bytes} bytes"
        )
    return found
