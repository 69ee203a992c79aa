# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies by the tensor memory accelerator (TMA), as kernels write them: ``kv.tma.load_tile(...)`` and its kin.

A kernel takes a descriptor as an argument annotated with ``kv.TensorMap`` and is specialised for what it says. One
thread starts copies; their bytes are expected at a barrier, on which every reader waits:

    tile, barrier = kv.tma.shared_tile(keys), kv.shared(1, kv.i64)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(keys, barrier)
        kv.tma.load_tile(keys, cache, b, h, base, tile, barrier)
    kv.barrier()
    kv.tma.wait(barrier, 0)

Element (row, column) of the tile is then at byte ``keys.offset(row, column)`` of it. sm_90 and later; gathers and CTA
pairs are of sm_100a. The operations are those of ``kvarn.dialect.ops.tma``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlir import ir

from kvarn.dialect import ops, tma_layout
from kvarn.dialect.dtypes import DType, i32, i64
from kvarn.dialect.tma_layout import GATHERS, TmaSpec

from .builder import OfTrace
from .handles import CacheReads
from .memory import SHARED, Pointer, Shared, shared
from .values import Value, as_value, describe, fold, i32_value, literal, plain, where

__all__ = [
    "TensorMap", "expect", "gather4", "init_barrier", "load", "load_box", "load_tile", "prefetch", "shared_tile",
    "store", "tile_loads", "wait", "wait_stores",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


class TensorMap(OfTrace):
    """A TMA descriptor in a kernel, and the annotation of an argument that is one.

    ``kv.TensorMap`` takes any descriptor and specialises the kernel for it; ``kv.TensorMap[spec]`` takes those of one
    ``TmaSpec``. The argument is what a cache's ``create_tma_tile`` (or ``create_ragged_tma_tile``, ...) gives.

    Attributes
    ----------
    spec : TmaSpec
        All static parameters: form, dtype, box, tile, swizzle.
    """

    __slots__ = ("spec",)

    def __class_getitem__(cls, spec: Any) -> TmaSpec:
        if not isinstance(spec, TmaSpec):
            raise TypeError(f"kv.TensorMap takes the spec of a descriptor, as kv.TensorMap[tile.spec], got {spec!r}")
        return spec

    def __init__(self, value: ir.Value, spec: TmaSpec) -> None:
        self.ir, self.spec = value, spec

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    @property
    def rows(self) -> int:
        """Rows that one load copies."""
        return self.spec.rows

    @property
    def columns(self) -> int:
        """Columns that one load copies."""
        return self.spec.tile[-1]

    @property
    def load_bytes(self) -> int:
        """Bytes that one load transfers, those filled with zeros included."""
        return self.spec.load_bytes

    @property
    def box_bytes(self) -> int:
        """Bytes that one box (one column chunk of a load) transfers, those filled with zeros included."""
        return self.spec.copy_bytes

    def offset(self, row: Any, column: Any, rows: int | None = None) -> Any:
        """Byte of an element in a tile of shared memory, i32: chunks and swizzle taken into account.

        Parameters
        ----------
        row, column : int or i32 value
            Not negative.
        rows : int, optional
            Rows of the tile, when several loads make it up; by default those of the descriptor's own tile.
        """
        return tma_layout.shared_offset(self.spec, row, column, rows)

    def __repr__(self) -> str:
        return f"<TMA descriptor {self.spec}>"


def shared_tile(map: TensorMap, rows: int | None = None) -> Shared:
    """Shared memory for a tile of so many rows (by default the descriptor's own), aligned as its swizzle asks.

    Elements lie where ``map.offset(row, column, rows)`` says: read them with ``tile.ptr() + offset``.
    """
    spec = _map(map)
    count = (spec.tile[0] if rows is None else _count(rows, "rows")) * spec.tile[-1]
    return shared(count, spec.dtype, alignment=spec.alignment)


def tile_loads(map: TensorMap, tile_rows: int, valid: Any = None) -> Any:
    """Loads that ``load_tile`` starts: what to ``expect``.

    All, unless ``valid`` (an i32) is given and boxes without tokens are skipped (``beyond="skip"``).
    """
    spec = _map(map)
    most = tma_layout.tile_loads(spec, _count(tile_rows, "tile_rows"))
    if valid is None:
        return most
    some = (Value(i32_value(valid, "valid"), i32) + (spec.rows - 1)) // spec.rows
    return fold("max", fold("min", some, Value(literal(most, i32), i32)), Value(literal(0, i32), i32))


# --- barriers ------------------------------------------------------------------------------------


def init_barrier(barrier: Any, arrivals: int = 1) -> None:
    """Set up a barrier (8 bytes of shared memory) for ``arrivals`` arrivals a phase. One thread does it."""
    ops.tma_init_barrier(_shared(barrier, "the barrier"), _count(arrivals, "arrivals"))


def expect(map: TensorMap, barrier: Any, loads: Any = 1, *, arrive: bool = True) -> None:
    """Expect exactly the bytes of ``loads`` loads of a descriptor, and arrive.

    With ``arrive=False`` only the former: a barrier that waits for several descriptors' loads expects each, and arrives
    with the last. For a CTA pair the first CTA expects the loads of both.
    """
    _map(map)
    ops.tma_expect(map.ir, _shared(barrier, "the barrier"), i32_value(loads, "loads"), arrive)


def wait(barrier: Any, parity: Any) -> None:
    """Wait until the barrier's phase of a parity is complete: 0 for the first phase, then by turns."""
    ops.tma_wait(_shared(barrier, "the barrier"), i32_value(parity, "parity"))


def prefetch(map: TensorMap) -> None:
    """Fetch a descriptor ahead of its first use. One thread does it."""
    _map(map)
    ops.tma_prefetch(map.ir)


# --- copies --------------------------------------------------------------------------------------


def load(
    map: TensorMap, coordinates: Sequence[Any], destination: Any, barrier: Any, *, smem_rows: int | None = None,
    cta_group: int = 1, multicast: int = 0,
) -> None:  # fmt: skip
    """Start one load: a box of rows, in all its column chunks.

    Parameters
    ----------
    coordinates : sequence of int or i32
        By the descriptor's form. Tiled and rope: (page, slot, head, column), or (row, head, column) without pages.
        Ragged: (row, valid, head, column); rows from ``valid`` on are zeros. Scale: (0, first scale). Gathers: see
        :func:`gather4`.
    destination : pointer to shared memory, or shared array
        A multiple of 128 bytes.
    barrier : pointer to shared memory, or shared array
    smem_rows : int, optional
        Rows of the tile in shared memory, when several loads make it up.
    cta_group : {1, 2}
        2: a copy of a CTA pair, reported to the barrier of its first CTA. sm_100a.
    multicast : int
        Mask of the cluster's CTAs that get the box, each in its own shared memory and at its own barrier; 0: this one.
    """
    ops.tma_load(
        map.ir, _shared(destination, "the destination"), _shared(barrier, "the barrier"),
        _coordinates(map, coordinates, "load"), smem_rows=smem_rows, cta_group=cta_group, multicast=multicast,
    )  # fmt: skip


def load_box(
    map: TensorMap, coordinates: Sequence[Any], destination: Any, barrier: Any, *, l2_policy: Any = None,
    cta_group: int = 1, multicast: int = 0,
) -> None:  # fmt: skip
    """Start one copy: one box of rows, one column chunk, to an address of one's own.

    Several threads may each start a box on one barrier: one expects the bytes of all (``map.box_bytes`` a box, with
    ``kv.mbarrier_arrive_expect_tx``), then the lanes of a warp load side by side under ``if lane < n``.

    Parameters
    ----------
    coordinates : sequence of int or i32
        As of :func:`load`. The box's first column is a multiple of 16 bytes, which the hardware asks for; of a swizzled
        tile one of the box's columns.
    destination : pointer to shared memory, or shared array
        A multiple of 128 bytes. A chunk is a tile of its own: ``map.offset`` of a whole tile counts ``rows *
        map.spec.row_bytes`` from one chunk to the next.
    l2_policy : i64, optional
        Of ``kv.l2_policy``: how long the L2 keeps what is read.
    barrier, cta_group, multicast
        As of :func:`load`.
    """
    given = _coordinates(map, coordinates, "load")
    policy = None if l2_policy is None else as_value(l2_policy, i64, "l2_policy").ir
    ops.tma_load_box(
        map.ir, _shared(destination, "the destination"), _shared(barrier, "the barrier"), given, policy=policy,
        cta_group=cta_group, multicast=multicast,
    )  # fmt: skip


def gather4(map: TensorMap, rows: Sequence[Any], column: Any, destination: Any, barrier: Any, **options: Any) -> None:
    """Start one load of four rows, each of its own (``cache.get_tma_row``), in all column chunks. sm_100a.

    ``destination`` is that of the first of the four in the tile; a row of -1 is all zeros. Options as of :func:`load`.
    """
    if _map(map).form not in GATHERS:
        raise TypeError(f"kv.tma.gather4 needs a descriptor of a gather, got one of the form {map.spec.form}")
    if len(rows) != tma_layout.ROWS_A_GATHER:
        raise TypeError(f"kv.tma.gather4 takes 4 rows, got {len(rows)}")
    load(map, (*rows, column), destination, barrier, **options)


def load_tile(
    map: TensorMap, cache: CacheReads, b: Any, head: Any, base: Any, destination: Any, barrier: Any, *,
    tile_rows: int | None = None, valid: Any = None, column: Any = 0, smem_rows: int | None = None,
    beyond: str = "zero", pair_cta: bool = False, is_leader: Any = True, multicast: int = 0,
) -> None:  # fmt: skip
    """Start the loads of the tokens [base, base + tile_rows) of a head, found through the page table.

    Parameters
    ----------
    map : TensorMap
        Of this cache, tiled or rope.
    cache : cache or operand
    b, head, base : int or i32
        ``base`` is a multiple of ``map.rows``.
    destination, barrier
        As of :func:`load`.
    tile_rows : int, optional
        A multiple of ``map.rows``, which is the default.
    valid : int or i32, optional
        How many of the tile's tokens exist; by default all. Boxes in which none does are zeros or skipped; a box in
        which one does is loaded whole.
    column : int or i32
        The first column to load.
    beyond : {"zero", "skip"}
        What becomes of boxes without tokens. Expect ``tile_loads(map, tile_rows)`` loads, or for "skip"
        ``tile_loads(map, tile_rows, valid)``.
    pair_cta : bool
        Each CTA of a pair copies half of the rows, to the start of its own tile. sm_100a.
    is_leader : bool
        Whether this is the pair's first CTA, known at compile time or not.
    smem_rows, multicast
        As of :func:`load`.
    """
    spec = _map(map)
    if not isinstance(cache, CacheReads):
        raise TypeError(f"kv.tma.load_tile needs a cache or an operand, got {describe(cache)}")
    if beyond not in ops.tma.BEYOND:
        raise ValueError(f"beyond must be one of {', '.join(ops.tma.BEYOND)}, got {beyond!r}")
    rows = spec.rows if tile_rows is None else _count(tile_rows, "tile_rows")
    first = Value(i32_value(base, "the base"), i32)
    count = Value(i32_value(rows if valid is None else valid, "valid"), i32)
    if pair_cta:
        if rows % (2 * spec.rows):
            raise ValueError(f"tile_rows of a CTA pair must be a multiple of {2 * spec.rows}, got {rows}")
        rows //= 2
        leads = plain(is_leader)
        if not isinstance(leads, bool):
            skipped = where(is_leader, Value(literal(0, i32), i32), Value(literal(rows, i32), i32))
            first, count = first + skipped, count - skipped
        elif not leads:
            first, count = first + rows, count - rows
    ops.tma_load_tile(
        map.ir, cache.ir,
        (i32_value(b), i32_value(head, "the head"), first.ir, count.ir, i32_value(column, "the column")),
        _shared(destination, "the destination"), _shared(barrier, "the barrier"),
        tile_rows=rows, smem_rows=smem_rows, cta_group=2 if pair_cta else 1, multicast=multicast, beyond=beyond,
    )  # fmt: skip


def store(map: TensorMap, coordinates: Sequence[Any], source: Any, *, smem_rows: int | None = None) -> None:
    """Start one store of a box of rows from shared memory; what is out of bounds is not written.

    The descriptor is tiled or ragged (rows from ``valid`` on are not written). Those who wrote the source call
    ``kv.fence_proxy_async()`` before the barrier after which one thread starts the store; that thread calls
    :func:`wait_stores` before the source is written again or the kernel ends. Coordinates as of :func:`load`.
    """
    spec = _map(map)
    if spec.form not in ("tiled", "ragged"):
        raise TypeError(f"kv.tma.store needs a tiled or ragged descriptor, got one of the form {spec.form}")
    given = _coordinates(map, coordinates, "store")
    ops.tma_store(map.ir, _shared(source, "the source"), given, smem_rows=smem_rows)


def wait_stores(pending: int = 0, *, read: bool = False) -> None:
    """Wait until at most ``pending`` of the stores that this thread started are under way.

    With ``read``, until their sources may be written again.
    """
    if isinstance(pending, bool) or not isinstance(pending, int) or pending < 0:
        raise ValueError(f"pending must be an int known at compile time and not negative, got {describe(pending)}")
    ops.tma_wait_stores(pending, read)


# --- arguments -----------------------------------------------------------------------------------


def _map(map: Any) -> TmaSpec:
    if not isinstance(map, TensorMap):
        raise TypeError(f"a TMA descriptor (an argument annotated with kv.TensorMap) is needed, got {describe(map)}")
    return map.spec


def _coordinates(map: TensorMap, given: Sequence[Any], what: str) -> list[ir.Value]:
    names = _map(map).coordinates
    if len(given) != len(names):
        raise TypeError(f"a {what} of this descriptor takes ({', '.join(names)}), got {len(given)}")
    return [i32_value(c, f"the {name}") for c, name in zip(given, names, strict=True)]


def _shared(place: Any, what: str) -> ir.Value:
    if isinstance(place, Shared):
        place = place.ptr()
    if not isinstance(place, Pointer) or place.space != SHARED:
        raise TypeError(f"{what} must lie in shared memory: a kv.shared array or its s.ptr(), got {describe(place)}")
    return place.ir


def _count(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a positive int known at compile time, got {describe(value)}")
    return value
