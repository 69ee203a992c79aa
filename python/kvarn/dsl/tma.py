# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies by the tensor memory accelerator (TMA): ``kv.tma.load_tile(...)`` and related functions.

A descriptor is an argument annotated with ``kv.TensorMap``, and the kernel is specialised for its spec. One thread
starts the copies and adds their bytes to a barrier, on which every reader waits:

    tile, barrier = kv.tma.shared_tile(keys), kv.shared(1, kv.i64)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(keys, barrier)
        kv.tma.load_tile(keys, cache, b, h, base, tile, barrier)
    kv.barrier()
    kv.tma.wait(barrier, 0)

Element (row, column) of the tile is then at its byte ``keys.offset(row, column)``. TMA needs sm_90 or later; gathers
and CTA pairs need sm_100a. The ops are those of ``kvarn.dialect.ops.tma``.
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
    """A TMA descriptor in a kernel, and the annotation of a descriptor argument.

    ``kv.TensorMap`` accepts any descriptor and specialises the kernel for its spec; ``kv.TensorMap[spec]`` accepts
    descriptors of one ``TmaSpec``. ``create_tma_tile`` (or ``create_ragged_tma_tile``, ...) of a cache makes one.

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
        """Bytes that one load transfers, including bytes filled with zeros."""
        return self.spec.load_bytes

    @property
    def box_bytes(self) -> int:
        """Bytes that one box (one column chunk of a load) transfers, including bytes filled with zeros."""
        return self.spec.copy_bytes

    def offset(self, row: Any, column: Any, rows: int | None = None) -> Any:
        """Byte offset of an element in a tile in shared memory, i32, with chunks and swizzle.

        Parameters
        ----------
        row, column : int or i32 value
            Non-negative.
        rows : int, optional
            Rows of the tile if several loads fill it; by default the rows of the descriptor's tile.
        """
        return tma_layout.shared_offset(self.spec, row, column, rows)

    def __repr__(self) -> str:
        return f"<TMA descriptor {self.spec}>"


def shared_tile(map: TensorMap, rows: int | None = None) -> Shared:
    """Shared memory for a tile of ``rows`` rows (by default the descriptor's), aligned as its swizzle requires.

    ``map.offset(row, column, rows)`` is the offset of an element; read it with ``tile.ptr() + offset``.
    """
    spec = _map(map)
    count = (spec.tile[0] if rows is None else _count(rows, "rows")) * spec.tile[-1]
    return shared(count, spec.dtype, alignment=spec.alignment)


def tile_loads(map: TensorMap, tile_rows: int, valid: Any = None) -> Any:
    """Number of loads that ``load_tile`` starts, for ``expect``.

    Pass ``valid`` (i32) if boxes without tokens are skipped (``beyond="skip"``).
    """
    spec = _map(map)
    most = tma_layout.tile_loads(spec, _count(tile_rows, "tile_rows"))
    if valid is None:
        return most
    some = (Value(i32_value(valid, "valid"), i32) + (spec.rows - 1)) // spec.rows
    return fold("max", fold("min", some, Value(literal(most, i32), i32)), Value(literal(0, i32), i32))


# --- barriers ------------------------------------------------------------------------------------


def init_barrier(barrier: Any, arrivals: int = 1) -> None:
    """Initialise a barrier (8 bytes of shared memory) for ``arrivals`` arrivals per phase. Called by one thread."""
    ops.tma_init_barrier(_shared(barrier, "the barrier"), _count(arrivals, "arrivals"))


def expect(map: TensorMap, barrier: Any, loads: Any = 1, *, arrive: bool = True) -> None:
    """Add the bytes of ``loads`` loads of a descriptor to the barrier's phase, and arrive.

    ``arrive=False`` leaves out the arrival: for loads of several descriptors on one barrier, call ``expect`` for each,
    and arrive with the last. In a CTA pair the first CTA expects the loads of both.
    """
    _map(map)
    ops.tma_expect(map.ir, _shared(barrier, "the barrier"), i32_value(loads, "loads"), arrive)


def wait(barrier: Any, parity: Any) -> None:
    """Wait until the barrier's phase of the given parity is complete: 0 for the first phase, 1 for the second, ..."""
    ops.tma_wait(_shared(barrier, "the barrier"), i32_value(parity, "parity"))


def prefetch(map: TensorMap) -> None:
    """Prefetch a descriptor before its first use. Called by one thread."""
    _map(map)
    ops.tma_prefetch(map.ir)


# --- copies --------------------------------------------------------------------------------------


def load(
    map: TensorMap, coordinates: Sequence[Any], destination: Any, barrier: Any, *, smem_rows: int | None = None,
    cta_group: int = 1, multicast: int = 0,
) -> None:  # fmt: skip
    """Start one load: a box of rows, with all its column chunks.

    Parameters
    ----------
    coordinates : sequence of int or i32
        Depends on the descriptor's form. Tiled and rope: (page, slot, head, column), or (row, head, column) without
        pages. Ragged: (row, valid, head, column); rows from ``valid`` on are zeros. Scale: (0, first scale). Gathers:
        see :func:`gather4`.
    destination : pointer to shared memory, or shared array
        Aligned to 128 bytes.
    barrier : pointer to shared memory, or shared array
    smem_rows : int, optional
        Rows of the tile in shared memory if several loads fill it.
    cta_group : {1, 2}
        2: a copy of a CTA pair that signals the barrier of the first CTA. sm_100a.
    multicast : int
        Mask of the cluster's CTAs that receive the box, each in its shared memory with its barrier; 0: this CTA only.
    """
    ops.tma_load(
        map.ir, _shared(destination, "the destination"), _shared(barrier, "the barrier"),
        _coordinates(map, coordinates, "load"), smem_rows=smem_rows, cta_group=cta_group, multicast=multicast,
    )  # fmt: skip


def load_box(
    map: TensorMap, coordinates: Sequence[Any], destination: Any, barrier: Any, *, l2_policy: Any = None,
    cta_group: int = 1, multicast: int = 0,
) -> None:  # fmt: skip
    """Start one copy: a box of rows in one column chunk, to a given address.

    Several threads may each start a box on one barrier: one thread expects the bytes of all (``map.box_bytes`` per box,
    with ``kv.mbarrier_arrive_expect_tx``), then the lanes of a warp start loads under ``if lane < n``.

    Parameters
    ----------
    coordinates : sequence of int or i32
        As in :func:`load`. The box's first column is at a multiple of 16 bytes; in a swizzled tile it starts a chunk.
    destination : pointer to shared memory, or shared array
        Aligned to 128 bytes. In a tile, chunks are ``rows * map.spec.row_bytes`` bytes apart.
    l2_policy : i64, optional
        L2 eviction policy from ``kv.l2_policy``.
    barrier, cta_group, multicast
        As in :func:`load`.
    """
    given = _coordinates(map, coordinates, "load")
    policy = None if l2_policy is None else as_value(l2_policy, i64, "l2_policy").ir
    ops.tma_load_box(
        map.ir, _shared(destination, "the destination"), _shared(barrier, "the barrier"), given, policy=policy,
        cta_group=cta_group, multicast=multicast,
    )  # fmt: skip


def gather4(map: TensorMap, rows: Sequence[Any], column: Any, destination: Any, barrier: Any, **options: Any) -> None:
    """Start one load of four independent rows (``cache.get_tma_row``), with all column chunks. sm_100a.

    ``destination`` is the first row's place in the tile; a row of -1 is filled with zeros. Options as in :func:`load`.
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
        A tiled or rope descriptor of this cache.
    cache : cache or operand
    b, head, base : int or i32
        Sequence, head and first token; ``base`` is a multiple of ``map.rows``.
    destination, barrier
        As in :func:`load`.
    tile_rows : int, optional
        A multiple of ``map.rows``, which is the default.
    valid : int or i32, optional
        Number of the tile's tokens that exist; by default all. Boxes without such a token are zeroed or skipped; other
        boxes are loaded whole.
    column : int or i32
        The first column to load.
    beyond : {"zero", "skip"}
        Handling of boxes without tokens. Expect ``tile_loads(map, tile_rows)`` loads, or for "skip"
        ``tile_loads(map, tile_rows, valid)``.
    pair_cta : bool
        Each CTA of a pair copies half of the rows to the start of its own tile. sm_100a.
    is_leader : bool
        Whether this is the pair's first CTA; may be a run-time value.
    smem_rows, multicast
        As in :func:`load`.
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
    """Start one store of a box of rows from shared memory; elements out of bounds are not written.

    The descriptor is tiled or ragged (rows from ``valid`` on are not written). The threads that wrote the source call
    ``kv.fence_proxy_async()`` before the barrier after which one thread starts the store; that thread calls
    :func:`wait_stores` before the source is overwritten or the kernel ends. Coordinates as in :func:`load`.
    """
    spec = _map(map)
    if spec.form not in ("tiled", "ragged"):
        raise TypeError(f"kv.tma.store needs a tiled or ragged descriptor, got one of the form {spec.form}")
    given = _coordinates(map, coordinates, "store")
    ops.tma_store(map.ir, _shared(source, "the source"), given, smem_rows=smem_rows)


def wait_stores(pending: int = 0, *, read: bool = False) -> None:
    """Wait until at most ``pending`` of this thread's stores are incomplete.

    With ``read``, wait only until their sources may be overwritten.
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
