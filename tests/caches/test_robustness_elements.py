# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Robustness of single accesses of kernels: elements and scales, on the host and in GPU code.

============================================================ =====
scales of granules at any dim, short last granules           7
stored and dequantized loads; what is refused by name        8
stores through table entries without a page                  12
============================================================ =====

Group 6, and every member of a cache by itself, are in ``test_members.py``.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from reference.places import bits
from reference.random_caches import random_problem

import kvarn as kv
from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect import dtypes, tma_layout
from kvarn.dialect.layout import CollectionSpec
from kvarn.errors import KernelError

# --- granules --------------------------------------------------------------------------------------


def accesses(size: int, granularity: int) -> list[tuple[int, int]]:
    """(dim, width) of every load that the dialect takes: a width divides the granularity, and the dim is a multiple."""
    widths = [w for w in range(1, granularity + 1) if granularity % w == 0]
    return [(d, w) for w in widths for d in range(0, size - w + 1, w)]


def reader(size: int, granularity: int) -> Any:
    """A kernel that makes every access: out[i] is the lanes dequantized, as stored, and the scale of the dim."""

    @kv.kernel
    def read(cache: kv.PagedKVCache, b: kv.i32, t: kv.i32, out: kv.Buffer[kv.f32, 3], by_dim: kv.Buffer[kv.f32, 2]):
        for i, (d, w) in enumerate(kv.static(accesses(size, granularity))):
            loaded, stored = cache.load(b, 1, t, d, width=w), cache.load_quantized(b, 1, t, d, width=w)
            for lane in kv.static(range(w)):
                out[i, 0, lane] = loaded[lane] if w > 1 else loaded
                out[i, 1, lane] = kv.f32(stored[lane] if w > 1 else stored)
            out[i, 2, 0] = kv.f32(cache.load_scale(b, 1, t, d))
        for d in range(size):  # dims that only a running kernel knows
            by_dim[d, 0] = cache.load(b, 1, t, d)
            by_dim[d, 1] = kv.f32(cache.load(b, 1, t, d, dtype=kv.bf16))

    return read


@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "size", "granularity"),
    [("i8", "f32", 10, 4), ("f8e4m3", "f32", 12, 5), ("i8", "f16", 14, 6), ("f8e5m2", "f8e8m0", 7, 1)],
)
def test_a_dim_has_the_scale_of_its_granule(place, dtype, scale_dtype, size, granularity):
    problem = random_problem(
        np.random.default_rng(7), "paged", dtype, head_size=size, scale_dtype=scale_dtype, granularity=granularity,
        cached=[3, 20, 9], new=[0, 0, 0],
    )  # fmt: skip
    cases, token = accesses(size, granularity), 17
    out = place.put(np.full((len(cases), 3, granularity), np.nan, np.float32))
    by_dim = place.put(np.full((size, 2), np.nan, np.float32))
    found = place.collection(problem.collection)
    place.launch(reader(size, granularity), 1, 1, found.get_value_cache(1), 1, token, out, by_dim)
    c = problem.collection
    page = int(np.asarray(c.lookup_table)[1, token // 16])
    stored = np.asarray(c.blocks)[page, 1, 1, token % 16, 1].astype(np.float32)
    scales = np.asarray(c.scales)[page, 1, 1, token % 16, 1].astype(np.float32)
    assert len(scales) == -(-size // granularity)
    product = stored * scales[np.arange(size) // granularity]
    assert np.isfinite(product).all()
    out, by_dim = place.get(out), place.get(by_dim)
    for i, (d, w) in enumerate(cases):
        np.testing.assert_array_equal(out[i, 0, :w], product[d : d + w], f"dim {d}, width {w}")
        np.testing.assert_array_equal(out[i, 1, :w], stored[d : d + w], f"dim {d}, width {w}")
        assert out[i, 2, 0] == scales[d // granularity]
    np.testing.assert_array_equal(by_dim[:, 0], product)
    np.testing.assert_array_equal(by_dim[:, 1], product.astype(dtypes.bf16.numpy).astype(np.float32))


# --- what is refused while a kernel is traced, or a descriptor made --------------------------------

QUANTIZED = kv.CacheSpec("paged", kv.i8, 2, 32, 16, scale_dtype=kv.f32, granularity=8)
PLAIN = kv.CacheSpec("paged", kv.bf16, 2, 32, 16)
LATENT = kv.CacheSpec("paged", kv.f8e4m3, 1, 640, 64, is_mla=True)
FLAT = kv.CacheSpec("continuous", kv.bf16, 2, 32)


def of_cache(spec: Any, body: Any) -> Any:
    """Compiles a kernel that does something with a cache."""

    @kv.kernel
    def kernel(cache: kv.KVCache):
        body(cache)

    return lambda: kv.compile(kernel, spec, target="host")


def values_of(spec: Any) -> Any:
    @kv.kernel
    def kernel(collection: kv.KVCacheCollection):
        collection.get_value_cache(0).cache_length(0)

    return lambda: kv.compile(kernel, CollectionSpec(spec), target="host")


REFUSED = {
    "a quantized load to the storage type": (
        of_cache(QUANTIZED, lambda c: c.load(0, 0, 0, 0, dtype=kv.i8)), "dequantizes, so the result must not have"),
    "lanes of several granules": (of_cache(QUANTIZED, lambda c: c.load(0, 0, 0, 0, width=16)), "granularity 8"),
    "a stored load without scales": (of_cache(PLAIN, lambda c: c.load_quantized(0, 0, 0, 0)), "quantized cache"),
    "a scale without scales": (of_cache(PLAIN, lambda c: c.load_scale(0, 0, 0, 0)), "quantized cache"),
    "a store of another type": (of_cache(PLAIN, lambda c: c.store(0, 0, 0, 0, kv.f32(1.0))), "bf16"),
    "a scale of another type": (of_cache(QUANTIZED, lambda c: c.store_scale(0, 0, 0, 0, kv.f16(1.0))), "f32"),
    "values of latent rows": (values_of(LATENT), "needs a collection with values, got an MLA one"),
    "a tile that does not divide a page": (
        of_cache(PLAIN, lambda c: c.block_paged_ptr(0, 0, 0, tile=12)), "tile must divide the page size 16, got 12"),
    "a tile larger than a page": (of_cache(PLAIN, lambda c: c.block_paged_ptr(0, 0, 0, tile=32)), "page size 16"),
    "a depth of part of a granule": (lambda: tma_layout.tiled(PLAIN, 16, 24, "64B"), "multiple of 32 elements"),
    "rope tiles of a continuous cache": (lambda: tma_layout.rope(FLAT, 16, 16, 8), "needs a paged cache, got cont"),
    "a gather of six rows": (lambda: tma_layout.gather4(LATENT, 64, 6), "height must be a positive multiple of 4"),
    "a gather of none": (lambda: tma_layout.gather4(LATENT, 64, 0), "height must be a positive multiple of 4"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_cache_cannot_do_is_refused_by_name(what):
    make, message = REFUSED[what]
    with pytest.raises((KernelError, ValueError, TypeError), match=re.escape(message)):
        make()


# --- entries without a page ------------------------------------------------------------------------


@kv.kernel
def scatter(cache: kv.PagedKVCache):
    """Every store there is, at token block_id.x * 16 of sequence block_id.y: vectors, scalars, scales, a tile."""
    tile = kv.shared((16, 32), kv.i8)
    b, t, mark = kv.block_id.y, kv.block_id.x * 16, kv.block_id.x + 1 + 16 * kv.block_id.y
    for i in range(16 * 32):
        tile[i // 32, i % 32] = kv.i8(mark)
    cache.store_tile(b, 1, t, 16, tile.ptr(), 0, tile_rows=16, num_threads=1)
    cache.store(b, 0, t + 3, 8, kv.vector(kv.i8, 8, kv.i8(mark)))
    cache.store(b, 0, t + 4, 1, kv.i8(mark))
    cache.store_scale(b, 0, t + 3, 8, kv.f32(mark))


def test_stores_through_entries_without_a_page_write_nowhere(place):
    """Entries past the pool, tokens past the table, a sequence past the batch; pages around keep their pattern."""
    rng = np.random.default_rng(12)
    pages, shape = 6, (2, 2, 16, 2)
    around = rng.integers(-100, 100, (pages + 4, *shape, 32)).astype(np.int8)
    scales = rng.standard_normal((pages + 4, *shape, 4)).astype(np.float32)
    table = np.array([[2, pages, 0xFFFFFFFF, 999999, 2**31, 0, 7, 9]], np.uint32)

    def collection(blocks: Any, kept: Any) -> Any:
        return PagedKVCacheCollection(
            blocks[2:-2], place.put(np.zeros(1, np.uint32)), place.put(table), 1, 128, kept[2:-2], 8
        )

    there = place.put(around.copy()), place.put(scales.copy())
    place.launch(scatter, (10, 2), 1, collection(*there).get_value_cache(1))
    expected, kept = around.copy(), scales.copy()
    for page, mark in ((2, 1), (0, 6)):  # columns 0 and 5; the others name no page
        expected[2 + page, 1, 1, :, 1] = mark
        expected[2 + page, 1, 1, 3, 0, 8:16] = mark
        expected[2 + page, 1, 1, 4, 0, 1] = mark
        kept[2 + page, 1, 1, 3, 0, 1] = mark
    np.testing.assert_array_equal(place.get(there[0]), expected)
    np.testing.assert_array_equal(bits(place.get(there[1])), bits(kept))
