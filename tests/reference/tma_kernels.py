# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels that copy through the tensor memory accelerator and show what came, for the interpreter and for a GPU."""

from __future__ import annotations

import kvarn as kv

THREADS = 64
STALE = 0x55  # what shared memory holds before a copy, in every byte


@kv.func
def spoil(tile):
    """Fill a tile with stale bytes, and let copies come after that."""
    for i in range(kv.thread_id.x, tile.nbytes // 4, kv.block_dim.x):
        (tile.ptr() + i * 4).store(kv.i32(STALE * 0x01010101))
    kv.fence_proxy_async()
    kv.barrier()


@kv.func
def show(map, tile, out, first, rows, columns):
    """Write a tile to ``out[first]``, element by element."""
    for i in range(kv.thread_id.x, rows * columns, kv.block_dim.x):
        row, column = i // columns, i % columns
        out[first, row, column] = (tile.ptr() + map.offset(row, column, rows)).load(map.dtype)


@kv.kernel(block=THREADS)
def copy_tile(
    cache: kv.MHAOperand, map: kv.TensorMap, out, b: kv.i32, base: kv.i32, valid: kv.i32, column: kv.i32,
    tile_rows: int, beyond: str,
):  # fmt: skip
    """A block a head: its tokens [base, base + tile_rows) to ``out[head]``."""
    tile, barrier = kv.tma.shared_tile(map, tile_rows), kv.shared(1, kv.i64)
    spoil(tile)
    if kv.thread_id.x == 0:
        kv.tma.prefetch(map)
        kv.tma.init_barrier(barrier)
        kv.tma.expect(map, barrier, kv.tma.tile_loads(map, tile_rows, valid if beyond == "skip" else None))
        kv.tma.load_tile(
            map, cache, b, kv.block_id.x, base, tile, barrier, tile_rows=tile_rows, valid=valid, column=column,
            beyond=beyond,
        )  # fmt: skip
    kv.barrier()
    kv.tma.wait(barrier, 0)
    show(map, tile, out, kv.block_id.x, tile_rows, map.columns)


@kv.kernel(block=THREADS)
def copy_sequence(
    pool: kv.PagedKVCacheCollection, layer: kv.i32, keys: kv.TensorMap, values: kv.TensorMap, key_out, value_out,
    b: kv.i32, count: kv.i32, tile_rows: int,
):  # fmt: skip
    """A head's keys and values, tile after tile through one barrier, to ``out[head * tiles + tile]``."""
    k_tile, v_tile = kv.tma.shared_tile(keys, tile_rows), kv.tma.shared_tile(values, tile_rows)
    barrier = kv.shared(1, kv.i64)
    k, v, head = pool.get_key_cache(layer), pool.get_value_cache(layer), kv.block_id.x
    tiles = (count + (tile_rows - 1)) // tile_rows
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
    kv.barrier()
    for i in range(tiles):
        if kv.thread_id.x == 0:
            kv.tma.expect(keys, barrier, kv.tma.tile_loads(keys, tile_rows), arrive=False)
            kv.tma.expect(values, barrier, kv.tma.tile_loads(values, tile_rows))
            base = i * tile_rows
            kv.tma.load_tile(keys, k, b, head, base, k_tile, barrier, tile_rows=tile_rows, valid=count - base)
            kv.tma.load_tile(values, v, b, head, base, v_tile, barrier, tile_rows=tile_rows, valid=count - base)
        kv.tma.wait(barrier, i & 1)
        show(keys, k_tile, key_out, head * tiles + i, tile_rows, keys.columns)
        show(values, v_tile, value_out, head * tiles + i, tile_rows, values.columns)
        kv.barrier()


@kv.kernel(block=THREADS)
def copy_populated(cache: kv.PagedKVCache, map: kv.TensorMap, out, b: kv.i32, base: kv.i32, tile_rows: int):
    """As ``copy_tile``, by rows of ``populate``: a box at the first row of each page."""
    tile, barrier = kv.tma.shared_tile(map, tile_rows), kv.shared(1, kv.i64)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(map, barrier, kv.tma.tile_loads(map, tile_rows))
        rows = cache.populate(b, base, tile_rows)
        for first in kv.static(range(0, tile_rows, map.rows)):
            at = tile.ptr() + first * map.spec.row_bytes
            kv.tma.load(map, (rows.get_row(first), kv.block_id.x, 0), at, barrier, smem_rows=tile_rows)
    kv.barrier()
    kv.tma.wait(barrier, 0)
    show(map, tile, out, kv.block_id.x, tile_rows, map.columns)


@kv.kernel(block=THREADS)
def copy_boxes(map: kv.TensorMap, out, at: kv.Buffer[kv.i32, 2]):
    """A block a load: that of the coordinates ``at[block]`` to ``out[block]``."""
    tile, barrier = kv.tma.shared_tile(map, map.rows), kv.shared(1, kv.i64)
    spoil(tile)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(map, barrier)
        given = []
        for i in kv.static(range(len(map.spec.coordinates))):
            given.append(at[kv.block_id.x, i])
        kv.tma.load(map, given, tile, barrier)
    kv.barrier()
    kv.tma.wait(barrier, 0)
    show(map, tile, out, kv.block_id.x, map.rows, map.columns)


@kv.kernel(block=THREADS)
def gather_rows(cache: kv.PagedKVCache, map: kv.TensorMap, encoded: kv.Buffer[kv.i32, 1], out, column: kv.i32):
    """The rows of the encoded indices, a tile's height of them, to ``out[0]``."""
    height = map.spec.tile[0]
    tile, barrier = kv.tma.shared_tile(map), kv.shared(1, kv.i64)
    spoil(tile)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(map, barrier, height // 4)
        for group in kv.static(range(0, height, 4)):
            rows = [cache.get_tma_row(encoded[group]), cache.get_tma_row(encoded[group + 1]),
                    cache.get_tma_row(encoded[group + 2]), cache.get_tma_row(encoded[group + 3])]  # fmt: skip
            kv.tma.gather4(map, rows, column, tile.ptr() + group * map.spec.row_bytes, barrier)
    kv.barrier()
    kv.tma.wait(barrier, 0)
    show(map, tile, out, 0, height, map.columns)


@kv.kernel(block=THREADS)
def store_box(map: kv.TensorMap, data: kv.Buffer[kv.bf16, 2], at: kv.Buffer[kv.i32, 1]):
    """``data`` [rows, columns] through a tile to the coordinates ``at``."""
    tile = kv.tma.shared_tile(map, map.rows)
    for i in range(kv.thread_id.x, map.rows * map.columns, kv.block_dim.x):
        row, column = i // map.columns, i % map.columns
        (tile.ptr() + map.offset(row, column)).store(data[row, column])
    kv.fence_proxy_async()
    kv.barrier()
    if kv.thread_id.x == 0:
        given = []
        for i in kv.static(range(len(map.spec.coordinates))):
            given.append(at[i])
        kv.tma.store(map, given, tile)
        kv.tma.wait_stores()


@kv.kernel(block=THREADS, cluster=2)
def copy_pair(cache: kv.PagedKVCache, map: kv.TensorMap, out, b: kv.i32, head: kv.i32, tile_rows: int):
    """Each CTA of a pair half of a tile to ``out[rank]``; the first expects both halves and waits for them."""
    tile, barrier = kv.tma.shared_tile(map, tile_rows // 2), kv.shared(1, kv.i64)
    leads = kv.cluster_rank() == 0
    if (kv.thread_id.x == 0) & leads:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(map, barrier, kv.tma.tile_loads(map, tile_rows))
    kv.cluster_barrier()
    if kv.thread_id.x == 0:
        kv.tma.load_tile(
            map, cache, b, head, 0, tile, barrier, tile_rows=tile_rows, pair_cta=True, is_leader=leads
        )  # fmt: skip
    if leads:
        kv.tma.wait(barrier, 0)
    kv.cluster_barrier()
    show(map, tile, out, kv.cluster_rank(), tile_rows // 2, map.columns)


@kv.kernel(block=THREADS)
def copy_half(
    cache: kv.PagedKVCache, map: kv.TensorMap, out, b: kv.i32, head: kv.i32, valid: kv.i32, rank: kv.i32,
    tile_rows: int, known: bool,
):  # fmt: skip
    """What one CTA of a pair copies, to ``out[rank]``; which one it is may be known at compile time."""
    tile, barrier = kv.tma.shared_tile(map, tile_rows // 2), kv.shared(1, kv.i64)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(map, barrier, kv.tma.tile_loads(map, tile_rows // 2))
        for leads in kv.static((True, False)):
            if leads == (rank == 0):
                kv.tma.load_tile(
                    map, cache, b, head, 0, tile, barrier, tile_rows=tile_rows, valid=valid, pair_cta=True,
                    is_leader=leads if known else rank == 0,
                )  # fmt: skip
    kv.barrier()
    kv.tma.wait(barrier, 0)
    show(map, tile, out, rank, tile_rows // 2, map.columns)


@kv.kernel(block=THREADS, cluster=2)
def copy_to_both(cache: kv.PagedKVCache, map: kv.TensorMap, out, b: kv.i32, head: kv.i32, tile_rows: int):
    """Two CTAs of a cluster, each of which loads half of a tile for both, to ``out[rank]``."""
    tile, barrier = kv.tma.shared_tile(map, tile_rows), kv.shared(1, kv.i64)
    rank, half = kv.cluster_rank(), tile_rows // 2
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(map, barrier, kv.tma.tile_loads(map, tile_rows))
    kv.cluster_barrier()
    if kv.thread_id.x == 0:
        kv.tma.load_tile(
            map, cache, b, head, rank * half, tile.ptr() + rank * (half * map.spec.row_bytes), barrier,
            tile_rows=half, smem_rows=tile_rows, multicast=0b11,
        )  # fmt: skip
    kv.tma.wait(barrier, 0)
    show(map, tile, out, rank, tile_rows, map.columns)
    kv.cluster_barrier()
