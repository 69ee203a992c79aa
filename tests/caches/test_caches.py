# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The worked vectors of the cache semantics, and the methods of the caches on host buffers."""

import numpy as np
import pytest

from kvarn.caches import (
    ContinuousBatchingKVCacheCollection,
    KVCacheMHAOperand,
    KVCacheScalesMHAOperand,
    LayoutTensorMHAOperand,
    PagedKVCache,
    PagedKVCacheCollection,
    PagedKVCacheFA3Fallback,
    PagedKVCacheFA3FallbackCollection,
    RaggedMHAOperand,
)
from kvarn.dialect import dtypes, layout

N, KV, L, P, H, D = 5, 2, 3, 16, 2, 8
LUT = np.array([[3, 0, 5, 5], [2, 4, 1, 5]], np.uint32)


def pool(shape=(N, KV, L, P, H, D), dtype=np.float32):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def paged(**options):
    values = {
        "blocks": pool(), "cache_lengths": np.array([20, 41], np.uint32), "lookup_table": LUT.copy(),
        "max_seq_length": 1, "max_cache_length": 42,
    }  # fmt: skip
    return PagedKVCacheCollection(**(values | options))


def test_worked_numbers_of_a_paged_collection():
    c = paged()
    start = c.fields()[0]
    assert c.kv_cache_dynamic_strides == (1536, 16, 8, 1)
    bases = [c.get_key_cache(1), c.get_value_cache(0), c.get_value_cache(1)]
    assert [(v.fields()[0] - start) // 4 for v in bases] == [256, 768, 1024]
    k, v = c.get_key_cache(1), c.get_value_cache(1)
    assert k.num_kv_rows() == 400
    assert v.row_idx(1, 21) == 389
    assert v.load(1, 1, 21, 3) == 7259
    assert k.row_idx(0, 5) == 293
    assert c.get_key_cache(0).load(0, 0, 5, 7) == 293 * 16 + 7
    assert v.load(0, 0, 5, 7) == 5719
    assert k.row_idx(1, 40) == 104
    assert v.load(1, 0, 40, 0) == 2688
    assert k.get_tma_row(4 * 16 + 5) == 389
    assert k.get_tma_row(-1) == -1
    assert (k.max_tile_size(), k.max_prompt_length(), k.max_context_length(), k.empty_cache()) == (16, 1, 42, False)
    assert k.cache_length(1) == c.cache_length(1) == 41
    assert k.cache_lengths_nd().tolist() == [20, 41]


def test_fields_are_in_the_order_of_the_layout():
    scales = np.ones((N, KV, L, P, H, 2), np.float32)
    c = paged(blocks=pool(dtype=np.int8), scales=scales, quantization_granularity=4)
    at = dict(zip([f.name for f in layout.collection_fields(c.cache_spec)], c.fields(), strict=True))
    assert at == {
        "blocks": c.blocks.ctypes.data, "stride0": 1536, "num_blocks": 5, "capacity": 16,
        "lookup": c.lookup_table.ctypes.data, "lookup_stride": 4, "lookup_columns": 4,
        "lengths": c.cache_lengths.ctypes.data, "batch": 2, "max_seq_length": 1,
        "max_cache_length": 42, "num_layers": 3, "kv_stride": 768, "layer_stride": 256, "lookup_layer_stride": 0,
        "scales": scales.ctypes.data, "scales_stride0": 384, "scales_kv_stride": 192, "scales_layer_stride": 64,
    }  # fmt: skip
    v = c.get_value_cache(2)
    at = dict(zip([f.name for f in layout.cache_fields(v.spec)], v.fields(), strict=True))
    assert at["base"] == c.blocks[0, 1, 2].ctypes.data
    assert at["scales"] == scales[0, 1, 2].ctypes.data
    assert at["scales_stride0"] == 384
    assert c.spec == layout.CollectionSpec(v.spec)
    assert KVCacheMHAOperand(v).spec == layout.OperandSpec(v.spec)
    assert KVCacheMHAOperand(v).fields() == v.fields()
    assert all(type(x) is int for x in c.fields() + v.fields())


def test_caches_of_a_layer_are_made_once():
    c = paged()
    assert c.get_key_cache(1) is c.get_key_cache(1) is c.get_key_cache(np.int64(1))
    assert c.get_key_cache(1) is not c.get_value_cache(1)
    assert c.get_key_cache(1).buffers == (c.blocks, c.cache_lengths, c.lookup_table)


@pytest.mark.parametrize(
    ("layer", "error"), [(True, TypeError), (False, TypeError), (3, IndexError), (-1, IndexError), (1.0, TypeError)]
)
def test_layer_must_be_an_integer_in_range(layer, error):
    c = paged()
    c.get_key_cache(1), c.get_key_cache(0)
    with pytest.raises(error, match="layer must be"):
        c.get_key_cache(layer)


def test_value_cache_of_mla_is_refused():
    c = paged(blocks=pool((N, 1, L, P, 1, D)))
    assert c.is_mla
    assert c.get_key_cache(0).is_mla
    with pytest.raises(ValueError, match="latent keys"):
        c.get_value_cache(0)


def test_store_and_load_vectors_and_arrays():
    c = paged()
    v = c.get_value_cache(1)
    v.store(1, 1, 21, 4, np.array([1, 2, 3, 4], np.float32))
    assert c.blocks[4, 1, 1, 5, 1].tolist()[4:] == [1, 2, 3, 4]
    assert v.load(1, 1, 21, 4, width=4).tolist() == [1, 2, 3, 4]
    t = np.arange(48)
    pages, slots = LUT[1][t // 16], t % 16
    assert np.array_equal(v.load(1, 0, t, 0, width=8), c.blocks[pages, 1, 1, slots, 0])
    v.store(1, 0, t[:, None], np.arange(8), np.float32(7) * np.ones((48, 8), np.float32))
    assert (c.blocks[[2, 4, 1], 1, 1, :, 0] == 7).all()
    v.store(0, 0, 0, 0, 5)
    assert v.load(0, 0, 0, 0) == 5
    assert v.load(0, 0, 0, 0, dtype="bf16").dtype.name == "bfloat16"


def test_store_through_a_page_out_of_range_is_dropped():
    guarded = np.full((N + 1, KV, L, P, H, D), 9, np.float32)
    c = paged(blocks=guarded[:N], lookup_table=np.array([[N, 0xFFFFFFFF, 0, 0]] * 2, np.uint32))
    k = c.get_key_cache(2)
    before = guarded.copy()
    for t in (3, 20):
        k.store(0, 0, t, 0, np.ones(8, np.float32))
        assert np.array_equal(guarded, before)
        for oob in ("trap", "unchecked"):
            with pytest.raises(IndexError, match="page id"):
                k.store(0, 0, t, 0, np.ones(8, np.float32), oob=oob)
        with pytest.raises(IndexError, match="page id"):
            k.block_paged_ptr(0, t, 0)
    # some lanes of an array of indices may be stray
    k.store(0, 0, np.array([3, 35]), 0, np.array([1, 2], np.float32))
    assert guarded[0, 0, 2, 3, 0, 0] == 2
    assert (guarded == before).sum() == guarded.size - 1
    assert (k.raw_page(0, 3), k.page(0, 3), k.raw_page(1, np.array([40, 3])).tolist()) == (N, N - 1, [0, N])
    # a read sees the last page
    assert k.load(0, 0, 3, 0) == guarded[N - 1, 0, 2, 3, 0, 0]
    with pytest.raises(ValueError, match="oob must be"):
        k.store(0, 0, 0, 0, 1.0, oob="maybe")


def test_int32_tables_read_as_unsigned():
    c = paged(
        lookup_table=np.array([[-1, 0, 5, 5], [2, 4, 1, 5]], np.int32), cache_lengths=np.array([20, 41], np.int32)
    )
    k = c.get_key_cache(0)
    k.store(0, 0, 3, 0, 1.0)
    assert np.array_equal(c.blocks, pool())
    assert k.cache_lengths_nd().dtype == np.uint32


@pytest.mark.parametrize(
    ("index", "name"),
    [
        ((2, 0, 0, 0), "b"),
        ((0, 2, 0, 0), "h"),
        ((0, 0, 64, 0), "t"),
        ((0, 0, -1, 0), "t"),
        ((0, 0, 0, 8), "d"),
        ((-1, 0, 0, 0), "b"),
    ],
)
def test_indices_out_of_range(index, name):
    k = paged().get_key_cache(0)
    for access in (lambda: k.load(*index), lambda: k.store(*index, 1.0)):
        with pytest.raises(IndexError, match=rf"{name} \("):
            access()


def test_lanes_must_stay_in_the_head():
    k = paged().get_key_cache(0)
    assert k.load(0, 0, 0, 4, width=4).shape == (4,)
    with pytest.raises(IndexError, match="4 lanes"):
        k.load(0, 0, 0, 5, width=4)
    with pytest.raises(ValueError, match="width must be"):
        k.load(0, 0, 0, 0, width=9)


def test_store_needs_the_storage_type():
    k = paged(blocks=pool(dtype=dtypes.bf16.numpy)).get_key_cache(0)
    with pytest.raises(TypeError, match="dtype bfloat16"):
        k.store(0, 0, 0, 0, np.float32(1))
    k.store(0, 0, 0, 0, 1.5)
    assert k.load(0, 0, 0, 0) == 1.5


def test_scale_index_is_a_floor_and_views_do_not_alias():
    size, gran = 10, 4  # G = 3: the last granule is short
    blocks = np.zeros((N, KV, L, P, H, size), np.int8)
    scales = np.zeros((N, KV, L, P, H, 3), np.float16)
    c = paged(blocks=blocks, scales=scales, quantization_granularity=gran)
    k, v = c.get_key_cache(1), c.get_value_cache(1)
    assert (k.head_dim_granularity, k.quantization_enabled, k.scale_dtype) == (3, True, dtypes.f16)
    for d in range(size):
        scales[:] = 0
        k.store_scale(1, 1, 21, d, np.float16(2))
        assert np.argwhere(scales).tolist() == [[4, 0, 1, 5, 1, d // gran]]
        assert v.load_scale(1, 1, 21, d) == 0
        assert k.load_scale(1, 1, 21, d) == 2
    k.store_scale(1, 1, 21, 0, np.array([1, 2, 4], np.float16))
    assert k.load_scale(1, 1, 21, 4, width=2).tolist() == [2, 4]
    blocks[4, 0, 1, 5, 1] = np.arange(10)
    assert k.load(1, 1, 21, 4, width=4).tolist() == [8, 10, 12, 14]
    assert k.load(1, 1, 21, np.arange(10)).tolist() == [0, 1, 2, 3, 8, 10, 12, 14, 32, 36]
    assert k.load(1, 1, 21, 1).dtype == np.float32
    assert k.load_raw(1, 1, 21, 4, width=4).tolist() == k.load_quantized(1, 1, 21, 4, 4).tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="share one granule"):
        k.load(1, 1, 21, 3, width=2)
    with pytest.raises(ValueError, match="float other than the storage type"):
        k.load(1, 1, 21, 3, dtype=dtypes.i8)
    assert np.shares_memory(k.scales_raw_ptr(), scales)
    assert k.scales_raw_ptr().shape == (N, P, H, 3)
    assert k.scales_block_paged_ptr(1, 21, 1, 4).tolist() == [2, 4]
    operand = KVCacheMHAOperand(k)
    assert operand.load_scale(1, 21, 1, 9) == 4
    assert not operand.scales_block_paged_ptr(1, 21, 1).flags.writeable
    shown = KVCacheScalesMHAOperand(k)
    assert shown.dtype == shown.scale_dtype == dtypes.f16
    assert shown.block_paged_ptr(1, 16, 1, tile=8)[5].tolist() == [1, 2, 4]
    assert shown.load_scale(0, 0, 0) == 0


def test_methods_of_scales_need_scales():
    k = paged().get_key_cache(0)
    for call in (
        lambda: k.load_scale(0, 0, 0, 0),
        lambda: k.store_scale(0, 0, 0, 0, 1.0),
        lambda: k.load_raw(0, 0, 0, 0),
        lambda: k.scales_block_paged_ptr(0, 0, 0),
    ):
        with pytest.raises(TypeError, match="needs a quantized cache"):
            call()
    assert k.scales_raw_ptr() is None
    with pytest.raises(ValueError, match="must be quantized"):
        KVCacheScalesMHAOperand(k)


def test_block_ptr_is_a_tile_of_a_page():
    c = paged()
    v = c.get_value_cache(2)
    tile = v.block_paged_ptr(1, 24, 1, 2, tile=8)
    assert np.array_equal(tile, c.blocks[4, 1, 2, 8:, 1, 2:])
    tile[:] = -1
    assert (c.blocks[4, 1, 2, 8:, 1, 2:] == -1).all()
    assert (c.blocks == -1).sum() == 8 * 6
    for bad in (3, 32, 0):
        with pytest.raises(ValueError, match="tile must divide"):
            v.block_paged_ptr(1, 0, 0, tile=bad)
    with pytest.raises(ValueError, match="multiple of tile"):
        v.block_paged_ptr(1, 4, 0, tile=8)
    with pytest.raises(ValueError, match="read-only"):
        KVCacheMHAOperand(v).block_paged_ptr(1, 24, 1)[:] = 0


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("tile", [64, 128, 192, 256])
def test_populate_reads_no_padding(page_size, tile):
    """Entries past the used ones are poison: they must neither be taken nor shift the others."""
    used = 2 * max(1, tile // page_size)
    table = np.full((1, layout.lookup_columns(used * page_size, page_size)), 999999, np.uint32)
    table[0, :used] = np.arange(used)
    blocks = np.zeros((used, 2, 3, page_size, 1, 1), np.int8)
    k = paged(
        blocks=blocks, lookup_table=table, cache_lengths=np.zeros(1, np.uint32), max_cache_length=used * page_size
    ).get_key_cache(1)
    if page_size % tile and tile % page_size:
        with pytest.raises(ValueError, match="divide one another"):
            k.populate(0, 0, tile)
        return
    step = 6 * page_size
    for alignment in (None, page_size):
        for base in (0, tile):
            found = k.populate(0, base, tile, base_alignment=alignment)
            count = max(1, tile // page_size)
            if count > 1:
                assert found.rows.tolist() == [(base // page_size + i) * step for i in range(count)]
            else:
                assert found.rows.tolist() == [base // page_size * step + base % page_size]
            offsets = np.arange(tile)
            assert np.array_equal(found.get_row(offsets), k.row_idx(0, base + offsets))


def test_populate_of_the_null_page():
    for page_size, tile in ((128, 128), (128, 256), (64, 64), (64, 128)):
        table = np.full((1, 24), 4, np.uint32)
        k = paged(
            blocks=np.zeros((5, 2, 2, page_size, 1, 1), np.int8),
            lookup_table=table,
            cache_lengths=np.zeros(1, np.uint32),
        ).get_value_cache(0)
        rows = k.populate(0, 0, tile).rows
        assert (rows == 4 * 4 * page_size).all()
        assert (rows < k.num_kv_rows()).all()


def test_populate_refuses_what_a_kernel_could_not_do():
    k = paged(max_cache_length=0).get_key_cache(0)
    with pytest.raises(ValueError, match="promised alignment"):
        k.populate(0, 16, 32)
    with pytest.raises(ValueError, match="at most 16 pages"):
        k.populate(0, 0, 17 * 16)
    with pytest.raises(ValueError, match="4 columns"):
        k.populate(0, 32, 64, base_alignment=16)
    with pytest.raises(ValueError, match="multiple of the page size"):
        k.populate(0, 0, 64, base_alignment=8)
    assert k.populate(0, 5, 8, base_alignment=1).get_row(3) == k.row_idx(0, 8)
    with pytest.raises(IndexError, match="offset"):
        k.populate(0, 0, 16).get_row(16)


def test_continuous():
    blocks = pool((3, 2, 2, 40, H, D))
    c = ContinuousBatchingKVCacheCollection(blocks, np.array([7, 0], np.int32), np.array([2, 0], np.int32), 4, 40)
    v = c.get_value_cache(1)
    assert (v.page_size, v.max_tile_size(), v.quantization_enabled, c.name_str) == (0, -1, False, "continuous_batching")
    assert v.load(0, 1, 39, 3) == blocks[2, 1, 1, 39, 1, 3]
    v.store(1, 0, 7, 0, np.full(8, -1, np.float32))
    assert (blocks[0, 1, 1, 7, 0] == -1).all()
    assert v.row_idx(0, 39) == 2 * 160 + 39
    assert v.num_kv_rows() == 2 * 160 + 40
    assert v.get_tma_row(77) == 77
    assert v.populate(0, 5, 32).rows.tolist() == [325]
    assert v.populate(0, 5, 32).get_row(31) == 356
    assert np.array_equal(v.block_paged_ptr(0, 3, 1, tile=37), blocks[2, 1, 1, 3:, 1])
    with pytest.raises(IndexError, match="at most 40"):
        v.block_paged_ptr(0, 4, 1, tile=37)
    with pytest.raises(IndexError, match="t \\(token\\)"):
        v.load(0, 0, 40, 0)
    with pytest.raises(ValueError, match="40 slots"):
        ContinuousBatchingKVCacheCollection(blocks, np.zeros(2, np.int32), np.zeros(2, np.int32), 4, 41)


def test_fa3():
    blocks = pool((2, 6, P, H, D))
    table = np.array([[[5, 1], [0, 2]], [[3, 4], [1, 0]]], np.int32)
    lengths = np.array([3, 20], np.int32)
    c = PagedKVCacheFA3FallbackCollection(blocks, lengths, table, 2, 32)
    for layer in (0, 1):
        for half, cache in enumerate((c.get_key_cache(layer), c.get_value_cache(layer))):
            assert (cache.layer_idx, cache.kv_idx) == (layer, half)
            for b in (0, 1):
                for t in (0, 17, 31):
                    assert cache.load(b, 1, t, 3) == blocks[half, table[layer, b, t // P], t % P, 1, 3]
            same = PagedKVCacheFA3Fallback(blocks, lengths, table, 2, 32, layer, half)
            assert same.fields() == cache.fields()
            assert same.spec == cache.spec
            assert np.array_equal(same.blocks, blocks[half])
    fa3 = c.to_fa3(1)
    assert np.shares_memory(fa3.v, blocks)
    assert np.array_equal(fa3.v, blocks[1])
    assert fa3.block_table.tolist() == table[1].tolist()
    assert fa3.seqlens is lengths
    cache = c.get_key_cache(1)
    assert cache.cache_lengths_nd().dtype == np.uint32
    for call in (
        lambda: cache.row_idx(0, 0),
        lambda: cache.populate(0, 0, 16),
        lambda: cache.num_kv_rows(),
        lambda: cache.get_tma_row(0),
    ):
        with pytest.raises(TypeError, match="no rows"):
            call()


def test_direct_constructor_sees_what_the_collection_sees():
    c = paged()
    for layer in range(L):
        for half, made in enumerate((c.get_key_cache(layer), c.get_value_cache(layer))):
            direct = PagedKVCache(c.blocks[:, half, layer], c.cache_lengths, c.lookup_table, 1, 42)
            assert direct.fields() == made.fields()
            assert direct.spec == made.spec
            assert np.shares_memory(direct.blocks, c.blocks)
            assert np.array_equal(direct.blocks, c.blocks[:, half, layer])


def test_operands_of_buffers():
    dense = pool((2, 6, H, D))
    scales = np.arange(2 * 6 * H * 2, dtype=np.float32).reshape(2, 6, H, 2)
    o = LayoutTensorMHAOperand(dense, scales)
    assert (o.row_idx(1, 2), o.num_kv_rows(), o.cache_length(1), o.max_context_length(), o.page_size) == (
        8,
        12,
        6,
        6,
        0,
    )
    assert o.quantization_granularity == 4
    assert o.load_scale(1, 2, 1, 5) == scales[1, 2, 1, 1]
    assert np.array_equal(o.block_paged_ptr(1, 2, 1, 3, tile=3), dense[1, 2:5, 1, 3:])
    assert o.populate(1, 2, 4).get_row(3) == 11
    ragged = RaggedMHAOperand(dense.reshape(12, H, D), np.array([0, 5, 5, 12], np.uint32))
    assert (ragged.row_idx(2, 3), ragged.cache_length(1), ragged.cache_length(2)) == (8, 0, 7)
    assert np.array_equal(ragged.block_paged_ptr(2, 3, 0, tile=2), dense.reshape(12, H, D)[8:10, 0])
    with pytest.raises(TypeError, match="max_context_length"):
        ragged.max_context_length()
    with pytest.raises(ValueError, match="must not decrease"):
        RaggedMHAOperand(dense.reshape(12, H, D), np.array([0, 5, 4, 12], np.uint32))
    with pytest.raises(TypeError, match="must be a cache"):
        KVCacheMHAOperand(dense)
