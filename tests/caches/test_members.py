# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every member of the caches and collections in a kernel against the same member on the host, on random pools.

On the host and in GPU code; tests/gpu runs the same on a GPU. Values are compared bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.member_pools import LENGTHS, POOLS, QUANTIZED, WITH_ROWS, cache_of, halves, made
from reference.places import Place, assert_same, bits
from reference.random_caches import clone, random_problem, random_values

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.dsl.builder import emit_value, types


def run(place: Place, kernel: Any, grid: Any, out: np.ndarray, *args: Any) -> np.ndarray:
    """Launch with an output at the end; what is in it afterwards."""
    given = place.put(out)
    place.launch(kernel, grid, 4, *args, given)
    return place.get(given)


def tokens(cache: Any, longest: int = 40) -> list[tuple[int, int]]:
    """(sequence, token) of every cached token."""
    return [(b, t) for b in range(cache.batch_size) for t in range(min(LENGTHS[b], longest))]


# --- reading and writing ---------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["paged", "continuous", "fa3", "mla"])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_load_reads_elements(place, pool, width):
    @kv.kernel
    def kernel(cache: kv.KVCache, out: kv.Buffer[kv.f32, 4]):
        b, t = kv.block_id.x, kv.block_id.y
        if t < cache.cache_length(b):
            for h in range(cache.num_heads):
                for d in range(kv.thread_id.x * width, cache.head_size, kv.block_dim.x * width):
                    x = kv.f32(cache.load(b, h, t, d, width=width))
                    if width == 1:
                        out[b, t, h, d] = x
                    else:
                        out.store(b, t, h, d, value=x)

    c = made(pool).collection
    for half in halves(c):
        cache = cache_of(c, 2, half)
        out = np.zeros((4, 40, cache.num_heads, cache.head_size), np.float32)
        found, expected = run(place, kernel, (4, 40), out, cache_of(place.collection(c), 2, half)), out.copy()
        for b, t in tokens(cache):
            for h in range(cache.num_heads):
                expected[b, t, h] = cache.load(b, h, t, 0, width=cache.head_size)
        np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("width", [1, 4])
def test_store_writes_stored_values_and_drops_what_has_no_page(place, pool, width):
    @kv.kernel
    def kernel(cache: kv.KVCache, rows: kv.Buffer[dtypes.of(POOLS[pool]["dtype"]), 3]):
        b, t = kv.block_id.x, kv.block_id.y
        for h in range(cache.num_heads):
            for d in range(kv.thread_id.x * width, cache.head_size, kv.block_dim.x * width):
                x = rows[t, h, d] if width == 1 else rows.load(t, h, d, width=width, alignment=1)
                cache.store(b, h, t, d, x)

    c = made(pool).collection
    capacity = c.kv_cache_dynamic_shape[1] if pool == "continuous" else 60
    if pool != "continuous":  # a page id that is none, and the largest
        table = np.array(c.lookup_table)
        table[..., 0, 1], table[..., 2, 0] = c.num_blocks, 0xFFFFFFFF
        rest = () if c.scales is None else (c.scales, c.quantization_granularity)
        c = type(c)(c.blocks, c.cache_lengths, table, c.max_seq_length, c.max_cache_length, *rest)
        capacity = min(capacity, table.shape[-1] * c.page_size)
    found, expected = place.collection(c), clone(c)
    cache = cache_of(expected, 1)
    rows = random_values(np.random.default_rng(3), (capacity, cache.num_heads, cache.head_size), c.dtype)
    args = (cache_of(found, 1), place.put(rows))
    place.launch(kernel, (4, capacity), 4, *args)
    h, d = np.arange(cache.num_heads)[:, None], np.arange(cache.head_size)
    null = bits(np.array(expected.blocks))
    for b in range(4):
        cache.store(b, h, np.arange(capacity)[:, None, None], d, rows)
    if pool != "continuous":  # tables end with the null page, in which several tokens meet: any of them may stay
        _forget_null_page(place, found, expected)
    assert_same(place, found, expected)
    assert (bits(expected.blocks) != null).any()


def _forget_null_page(place: Place, found: Any, expected: Any) -> None:
    axis = 1 if expected.cache_spec.kind == "fa3" else 0
    last = np.moveaxis(np.asarray(expected.blocks), axis, 0)[-1]
    now = np.moveaxis(place.get(found.blocks), axis, 0)[-1]
    last[...] = now


@pytest.mark.parametrize("pool", QUANTIZED)
def test_store_scale_writes_scales(place, pool):
    """Keys' scales of page p do not lie on values' scales of page p - 1, nor layers on one another."""

    @kv.kernel
    def kernel(cache: kv.PagedKVCache, rows: kv.Buffer[dtypes.of(POOLS[pool]["scale_dtype"]), 2]):
        b, g = kv.block_id.x, kv.thread_id.x
        t = cache.cache_length(b) - 1
        if (t >= 0) & (g < cache.head_dim_granularity):
            cache.store_scale(b, 1, t, g * cache.quantization_granularity, rows[b, g])

    c = made(pool).collection
    found, expected = place.collection(c), clone(c)
    cache = cache_of(expected)
    rows = random_values(np.random.default_rng(4), (4, cache.head_dim_granularity), cache.scale_dtype)
    place.launch(kernel, 4, 4, cache_of(found), place.put(rows))
    for b, n in enumerate(LENGTHS):
        if n:
            starts = np.arange(cache.head_dim_granularity) * cache.quantization_granularity
            cache.store_scale(b, 1, n - 1, starts, rows[b])
    assert_same(place, found, expected)


# --- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", WITH_ROWS)
def test_row_idx_is_the_row_of_a_token(place, pool):
    @kv.kernel
    def kernel(cache: kv.KVCache, out: kv.Buffer[kv.i32, 2]):
        b, t = kv.block_id.x, kv.block_id.y
        out[b, t] = kv.i32(cache.row_idx(b, t))

    c = made(pool).collection
    cache = cache_of(c)
    found = run(place, kernel, (4, 40), np.zeros((4, 40), np.int32), cache_of(place.collection(c)))
    np.testing.assert_array_equal(found, [[cache.row_idx(b, t) for t in range(40)] for b in range(4)])


@pytest.mark.parametrize("pool", WITH_ROWS)
def test_get_tma_row_does_not_ask_the_table(place, pool):
    @kv.kernel
    def kernel(cache: kv.KVCache, encoded: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.i32, 1]):
        i = kv.block_id.x
        out[i] = cache.get_tma_row(encoded[i])

    c = made(pool).collection
    cache, encoded = cache_of(c), np.array([0, 1, 7, 8, 69, 100, -1, -(2**31)], np.int32)
    found = run(place, kernel, 8, np.zeros(8, np.int32), cache_of(place.collection(c)), place.put(encoded))
    np.testing.assert_array_equal(found, cache.get_tma_row(encoded))
    assert found[6:].tolist() == [-1, -1]


@pytest.mark.parametrize("pool", WITH_ROWS)
def test_num_kv_rows_spans_the_view(place, pool):
    @kv.kernel
    def kernel(cache: kv.KVCache, out: kv.Buffer[kv.i32, 1]):
        out[0] = kv.i32(cache.num_kv_rows())

    c = made(pool).collection
    assert run(place, kernel, 1, np.zeros(1, np.int32), cache_of(place.collection(c)))[0] == cache_of(c).num_kv_rows()


# --- pointers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
def test_block_paged_ptr_points_at_consecutive_tokens(place, pool):
    @kv.kernel
    def kernel(cache: kv.KVCache, out: kv.Buffer[kv.f32, 3]):
        b, t, h = kv.block_id.x, kv.block_id.y * 4, cache.num_heads - 1
        if t + 4 <= cache.cache_length(b):
            at = cache.block_paged_ptr(b, t, h, 2, tile=4)
            for i in range(4):
                for d in range(kv.thread_id.x, cache.head_size - 2, kv.block_dim.x):
                    step = i * cache.num_heads * cache.head_size + d
                    out[b, t + i, d] = kv.f32((at + step * cache.dtype.itemsize).load(cache.dtype))

    c = made(pool).collection
    cache, out = cache_of(c), np.zeros((4, 40, c.head_size - 2), np.float32)
    found, expected = run(place, kernel, (4, 10), out, cache_of(place.collection(c))), out.copy()
    for b, n in enumerate(LENGTHS):
        for t in range(0, n - 3, 4):
            expected[b, t : t + 4] = cache.block_paged_ptr(b, t, cache.num_heads - 1, 2, tile=4).astype(np.float32)
    np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("pool", QUANTIZED)
def test_scales_block_paged_ptr_points_at_the_scale(place, pool):
    @kv.kernel
    def kernel(cache: kv.PagedKVCache, out: kv.Buffer[kv.f32, 3]):
        b, t = kv.block_id.x, kv.block_id.y
        if t < cache.cache_length(b):
            for d in range(kv.thread_id.x, cache.head_size, kv.block_dim.x):
                out[b, t, d] = kv.f32(cache.scales_block_paged_ptr(b, t, 1, d).load(cache.scale_dtype))

    c = made(pool).collection
    cache, out = cache_of(c, 2), np.zeros((4, 40, 16), np.float32)
    found, expected = run(place, kernel, (4, 40), out, cache_of(place.collection(c), 2)), out.copy()
    for b, t in tokens(cache):
        expected[b, t] = [np.float32(cache.scales_block_paged_ptr(b, t, 1, d)[0]) for d in range(16)]
    np.testing.assert_array_equal(bits(found), bits(expected))


def address(pointer: Any) -> Any:
    """A kernel's pointer as a number."""
    return kv.Value(emit_value("llvm.ptrtoint", types().i64, [pointer.ir]), kv.i64)


@pytest.mark.parametrize("pool", ["fp8", "paged"])
def test_scales_raw_ptr_is_the_first_scale_or_null(place, pool):
    @kv.kernel
    def kernel(cache: kv.PagedKVCache, out: kv.Buffer[kv.f32, 1]):
        if cache.quantization_enabled:
            out[0] = kv.f32(cache.scales_raw_ptr().load(cache.scale_dtype))
        else:
            out[0] = kv.f32(address(cache.scales_raw_ptr()) == 0)

    c = made(pool).collection
    if c.scales is not None:
        c.scales[0, 1, 1, 0, 0, 0] = 0.75
    found = run(place, kernel, 1, np.zeros(1, np.float32), cache_of(place.collection(c), 1, "value"))
    host = cache_of(c, 1, "value").scales_raw_ptr()
    assert found[0] == (1 if host is None else host[0, 0, 0, 0])


# --- lengths and static facts ----------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
def test_lengths_are_those_of_the_step(place, pool):
    @kv.kernel
    def kernel(collection: kv.KVCacheCollection, out: kv.Buffer[kv.i32, 1]):
        cache = collection.get_key_cache(0)
        i = kv.thread_id.x
        if i < cache.batch_size():
            out[i] = cache.cache_length(i)
            out[4 + i] = kv.i32((cache.cache_lengths_nd() + 4 * i).load(kv.u32))
            out[8 + i] = collection.cache_length(i)
        if i == 0:
            out[12] = cache.max_prompt_length()
            out[13] = cache.max_context_length()
            out[14] = kv.i32(cache.empty_cache())
            out[15] = collection.field("num_layers")

    for new in ([2, 1, 0, 3], [0, 0, 0, 0]):
        c = made(pool, new=new).collection
        cache = cache_of(c)
        facts = [cache.max_prompt_length(), cache.max_context_length(), int(cache.empty_cache())]
        found = run(place, kernel, 1, np.zeros(16, np.int32), place.collection(c))
        lengths = cache.cache_lengths_nd().tolist()
        layers = c.num_layers
        assert found.tolist() == [*lengths, *[cache.cache_length(b) for b in range(4)], *LENGTHS, *facts, layers]


def test_an_empty_cache_has_neither_old_nor_new_tokens(place):
    @kv.kernel
    def kernel(cache: kv.KVCache, out: kv.Buffer[kv.i32, 1]):
        out[0] = kv.i32(cache.empty_cache())

    for cached, new, empty in (([0, 0], [0, 0], True), ([0, 0], [1, 0], False), ([3, 0], [0, 0], False)):
        c = made("paged", cached=cached, new=new).collection
        assert cache_of(c).empty_cache() is empty
        assert run(place, kernel, 1, np.zeros(1, np.int32), cache_of(place.collection(c)))[0] == empty


@pytest.mark.parametrize("pool", POOLS)
def test_views_are_the_halves_of_a_layer(place, pool):
    """The first element of each layer's keys and values, found by the view's base."""

    @kv.kernel
    def kernel(collection: kv.KVCacheCollection, out: kv.Buffer[kv.f32, 2]):
        layer = kv.block_id.x
        dtype = collection.dtype
        out[layer, 0] = kv.f32(collection.get_key_cache(layer).field("base").load(dtype))
        if not collection.is_mla:
            out[layer, 1] = kv.f32(collection.get_value_cache(layer).field("base").load(dtype))

    c = made(pool).collection
    rng = np.random.default_rng(6)
    views = [cache_of(c, layer, half).blocks for layer in range(3) for half in halves(c)]
    for view in views if pool != "fa3" else views[:2]:
        view[0, 0, 0, 0] = random_values(rng, (1,), c.dtype)[0]
    found = run(place, kernel, 3, np.zeros((3, 2), np.float32), place.collection(c))
    expected = np.zeros((3, 2), np.float32)
    for layer in range(3):
        for i, half in enumerate(halves(c)):
            expected[layer, i] = cache_of(c, layer, half).blocks[0, 0, 0, 0]
    np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("pool", POOLS)
def test_fields_are_the_buffers_of_a_layer(place, pool):
    """Shapes, strides and first entries of what a view holds, by the kernel's fields and the host's properties."""

    @kv.kernel
    def kernel(cache: kv.KVCache, out: kv.Buffer[kv.i32, 1]):
        field = cache.field
        out[0], out[1], out[2] = kv.i32(field("stride0")), field("num_blocks"), field("capacity")
        out[3], out[4] = kv.i32((field("lookup") + 4 * kv.i32(field("lookup_stride"))).load(kv.u32)), field("batch")
        out[5], out[6] = kv.i32((field("lengths") + 8).load(kv.u32)), field("max_seq_length")
        out[7] = field("max_cache_length")
        if cache.quantization_enabled:
            out[8] = kv.i32(field("scales_stride0"))

    c = made(pool).collection
    cache = cache_of(c, 2)
    found = run(place, kernel, 1, np.zeros(9, np.int32), cache_of(place.collection(c), 2))
    table = cache.lookup_table
    assert found.tolist() == [
        cache.blocks_strides[0], *cache.blocks_shape[:2], table.flat[table.size // 4], len(cache.cache_lengths),
        cache.cache_lengths[2], cache.max_seq_length, cache.max_cache_length, cache.scales_strides[0],
    ]  # fmt: skip
    own = np.asarray(c.lookup_table)
    np.testing.assert_array_equal(table, own[2] if pool == "fa3" else own)
    assert cache.blocks.shape == cache.blocks_shape
    half = np.asarray(c.blocks)[0] if pool == "fa3" else np.asarray(c.blocks)[:, 0, 2]
    np.testing.assert_array_equal(bits(cache.blocks), bits(half))
    if c.scales is None:
        assert cache.scales is None
        assert cache.scales_shape == (0, 0, 0, 0)
    else:
        np.testing.assert_array_equal(bits(cache.scales), bits(np.asarray(c.scales)[:, 0, 2]))
        assert cache.scales.shape == cache.scales_shape


@pytest.mark.parametrize("pool", POOLS)
def test_static_facts_are_the_same_in_a_kernel_and_on_the_host(place, pool):
    names = (
        "dtype", "scale_dtype", "num_heads", "head_size", "page_size", "page_size_", "is_mla", "quantization_enabled",
        "quantization_granularity", "head_dim_granularity",
    )  # fmt: skip
    seen: dict[str, Any] = {}

    @kv.kernel
    def kernel(collection: kv.KVCacheCollection, out: kv.Buffer[kv.i32, 1]):
        cache = collection.get_key_cache(0)
        seen.update({name: getattr(cache, name) for name in names})
        seen["max_tile_size"] = cache.max_tile_size
        seen["collection"] = (collection.dtype, collection.scale_dtype, collection.head_dim_granularity)
        out[0] = kv.i32(cache.max_tile_size)

    c = made(pool).collection
    cache = cache_of(c)
    found = run(place, kernel, 1, np.zeros(1, np.int32), place.collection(c))
    assert found[0] == cache.max_tile_size() == seen.pop("max_tile_size")
    assert seen.pop("collection") == (c.dtype, c.scale_dtype, c.head_dim_granularity)
    assert seen == {name: getattr(cache, name) for name in names}
    assert type(cache).get_type_name() == type(cache).__name__
    assert cache.kv_params == kv.KVCacheStaticParams(cache.num_heads, cache.head_size, cache.is_mla)


# --- operands --------------------------------------------------------------------------------------


def test_scale_pointers_of_operands_point_or_dangle(place):
    """At a scale where an operand has scales in memory that kernels read, else null."""

    @kv.kernel
    def kernel(x: kv.MHAOperand, out: kv.Buffer[kv.f32, 1]):
        base, block = x.scales_raw_ptr(), x.scales_block_paged_ptr(1, 2, 1, 5)
        out[0], out[1] = 0.0, 0.0
        if address(base) != 0:
            out[0] = base.load(kv.f32)
        if address(block) != 0:
            out[1] = block.load(kv.f32)

    rng = np.random.default_rng(7)
    problem = random_problem(rng, "paged", "i8", scale_dtype="f32", granularity=4, cached=[5, 9], new=[0, 0])
    problem.collection.scales[0, 0, 1, 0, 0, 0] = 0.5
    scales, data = np.abs(rng.standard_normal((2, 9, 2, 4))).astype(np.float32), np.zeros((2, 9, 2, 16), np.int8)
    offsets = np.array([0, 9, 18], np.int32)

    def operands(at: Place) -> list[Any]:
        cache = cache_of(at.collection(problem.collection))
        flat, rows = at.put(data.reshape(18, 2, 16)), at.put(scales.reshape(18, 2, 4))
        return [
            kv.KVCacheMHAOperand(cache), kv.KVCacheScalesMHAOperand(cache),
            kv.LayoutTensorMHAOperand(at.put(data), at.put(scales)),
            kv.RaggedMHAOperand(flat, at.put(offsets), rows),
        ]  # fmt: skip

    for given, host in zip(operands(place), operands(Place()), strict=True):
        found = run(place, kernel, 1, np.ones(2, np.float32), given)
        base, block = host.scales_raw_ptr(), host.scales_block_paged_ptr(1, 2, 1, 5)
        assert found.tolist() == [0 if p is None else np.ravel(p)[0] for p in (base, block)]
