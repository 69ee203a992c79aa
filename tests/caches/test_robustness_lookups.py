# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Robustness of the page look-ups: populate, row indices and addresses of kernels, on the host and in GPU code.

============================================================ =====
poisoned and null tables, every tile and page size           1, 2
rows and elements beyond 31 bits                             3
============================================================ =====

Groups 4 and 5 are in ``test_populate.py``.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from reference.places import Place

import kvarn as kv
from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect import layout

TILES = (64, 128, 256)
PAGES = (16, 32, 64, 128, 256, 512)
LAYERS = 3
POISON = 999999


def pool(page_size: int, pages: int, table: np.ndarray, tokens: int = 0) -> PagedKVCacheCollection:
    """A pool of single bytes with three layers."""
    blocks = np.zeros((pages, 2, LAYERS, page_size, 1, 1), np.int8)
    return PagedKVCacheCollection(blocks, np.zeros(len(table), np.uint32), table.astype(np.uint32), 1, tokens)


# --- populate --------------------------------------------------------------------------------------


@kv.kernel
def populated(cache: kv.PagedKVCache, out: kv.Buffer[kv.u32, 4]):
    """out[n, m, k, i]: entry i of tile n with alignment m at base k * tile, of sequence n."""
    for n, tile in enumerate(TILES):
        for m, alignment in enumerate((tile, cache.page_size)):
            for k in kv.static(range(2)):
                rows = cache.populate(n, k * tile, tile, alignment)
                for i in kv.static(range(layout.populate_pages(tile, cache.page_size))):
                    out[n, m, k, i] = rows.get_row(i * layout.effective_page(tile, cache.page_size))


def found_rows(place: Place, collection: PagedKVCacheCollection) -> np.ndarray:
    """What ``populated`` gives; 0xDEADBEEF where it writes nothing."""
    out = place.put(np.full((len(TILES), 2, 2, 16), 0xDEADBEEF, np.uint32))
    place.launch(populated, (1,), 1, place.collection(collection).get_key_cache(1), out)
    return place.get(out).view(np.uint32)


@pytest.mark.parametrize("page_size", PAGES)
def test_populate_never_takes_an_entry_past_the_used_ones(place, page_size):
    used = [2 * max(1, tile // page_size) for tile in TILES]
    table = np.full((len(TILES), layout.lookup_columns(max(used) * page_size, page_size)), POISON)
    for row, count in zip(table, used, strict=True):
        row[:count] = np.arange(count)
    collection = pool(page_size, max(used) + 1, table, max(used) * page_size)
    found, step = found_rows(place, collection), 2 * LAYERS * page_size
    for n, tile in enumerate(TILES):
        pages = layout.populate_pages(tile, page_size)
        for m, alignment in enumerate((tile, page_size)):
            for k in range(2):
                base = k * tile
                # Only a tile that may begin inside a page has rows that do not begin one.
                slot = base % page_size if alignment % page_size else 0
                expected = (base // page_size + np.arange(pages)) * step + slot
                assert found[n, m, k, :pages].tolist() == expected.tolist(), (tile, alignment, base)
                assert (found[n, m, k, pages:] == 0xDEADBEEF).all()


@pytest.mark.parametrize("page_size", [64, 128])
def test_populate_of_an_unassigned_table_stays_in_the_null_page(place, page_size):
    real = 4
    table = np.full((len(TILES), 24), real)
    collection = pool(page_size, real + 1, table, 8 * page_size)
    found, step = found_rows(place, collection), 2 * LAYERS * page_size
    for n, tile in enumerate(TILES):
        pages = layout.populate_pages(tile, page_size)
        rows = found[n, 0, :, :pages].astype(np.int64)
        slots = np.array([0, tile % page_size])[:, None]
        assert (rows == real * step + slots).all()
        assert (rows < (real + 1) * step).all()
        assert (rows < collection.get_key_cache(1).num_kv_rows()).all()


# --- beyond 31 bits --------------------------------------------------------------------------------


HUGE = {"pages": 1_840_895, "layers": 11, "page_size": 64}  # 1408 rows from page to page, 2.59e9 rows in all


def huge_pool(blocks) -> PagedKVCacheCollection:
    return PagedKVCacheCollection(blocks, np.array([5], np.uint32), huge_table(), 1, 256)


def huge_table() -> np.ndarray:
    last = HUGE["pages"] - 1
    return np.array([[last, 3, last // 2, 0]], np.uint32)


@kv.kernel
def mark(cache: kv.PagedKVCache, tokens: kv.Buffer[kv.i32, 1], rows: kv.Buffer[kv.u32, 1], read: kv.Buffer[kv.i8, 1]):
    """Writes i + 1 to token i, reads it back, and says its row and the rows of the view."""
    i = kv.block_id.x
    cache.store(0, 0, tokens[i], 0, kv.i8(i + 1))
    rows[i] = cache.row_idx(0, tokens[i])
    read[i] = cache.load(0, 0, tokens[i], 0)
    if i == 0:
        rows[rows.shape[0] - 1] = cache.num_kv_rows()


def test_rows_and_elements_beyond_31_bits_are_reached(place):
    """The pool is mapped and not resident: only the pages that are named become memory."""
    shape = (HUGE["pages"], 2, HUGE["layers"], HUGE["page_size"], 1, 1)
    size = int(np.prod(shape))
    assert size > 2**31
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    blocks = np.frombuffer(memory, np.int8).reshape(shape)
    collection = huge_pool(blocks)
    check_huge(place, collection, blocks)
    del collection, blocks


def check_huge(place: Place, collection: PagedKVCacheCollection, blocks) -> None:
    """Marks tokens of the pool and finds them where the layout says."""
    tokens = np.array([0, 63, 64, 130, 191], np.int32)
    cache = collection.get_value_cache(10)
    rows, read = place.put(np.zeros(6, np.uint32)), place.put(np.zeros(5, np.int8))
    place.launch(mark, (5,), 1, cache, place.put(tokens), rows, read)
    page, slot = huge_table()[0, tokens // 64].astype(np.int64), tokens % 64
    expected = page * 1408 + slot
    found = place.get(rows).view(np.uint32)
    assert found[:5].tolist() == expected.tolist()
    assert expected.max() > 2**31
    assert found[5] == (HUGE["pages"] - 1) * 1408 + 64
    assert place.get(read).tolist() == [1, 2, 3, 4, 5]
    for i, (p, s) in enumerate(zip(page.tolist(), slot.tolist(), strict=True)):
        assert place.get(blocks[p, 1, 10, s]).ravel().tolist() == [i + 1]
