# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the constructors of caches refuse, the strides they honour, and caches over memory that cannot be read."""

import numpy as np
import pytest

from kvarn.caches import (
    ContinuousBatchingKVCache,
    ContinuousBatchingKVCacheCollection,
    KVCache,
    KVCacheMHAOperand,
    KVCacheStaticParams,
    PagedKVCache,
    PagedKVCacheCollection,
    PagedKVCacheFA3FallbackCollection,
)
from kvarn.dialect import layout

N, L, P, H, D = 5, 3, 16, 2, 8


def build(cls=PagedKVCacheCollection, **options):
    values = {
        "blocks": np.zeros((N, 2, L, P, H, D), np.float32),
        "cache_lengths": np.zeros(2, np.uint32),
        "lookup_table": np.zeros((2, 4), np.uint32),
        "max_seq_length": 1,
        "max_cache_length": 64,
    }
    return cls(**(values | options))


def floats(*shape):
    return np.zeros(shape, np.float32)


def shifted(shape, dtype, by):
    """An array that starts ``by`` bytes past a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + by
    return raw[start : start + size].view(dtype).reshape(shape)


def apart(shape, gap):
    """f32 pages that lie ``gap`` elements apart."""
    page = int(np.prod(shape[1:]))
    memory = np.zeros(shape[0] * (page + gap), np.float32)
    strides = np.zeros(shape, np.float32).strides[1:]
    return np.lib.stride_tricks.as_strided(memory, shape, (4 * (page + gap), *strides))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"blocks": floats(N, L, P, H, D)},
            ValueError,
            r"blocks must have 6 dimensions \[pages, .*got shape \(5, 3, 16, 2, 8\)",
        ),
        ({"blocks": floats(N, 3, L, P, H, D)}, ValueError, "extent 2 .K and V. or 1 .MLA."),
        ({"blocks": floats(0, 2, L, P, H, D)}, ValueError, "positive extent.*got 0 for pages"),
        ({"blocks": floats(N, 2, L, P, H, 0)}, ValueError, "positive extent.*got 0 for head_size"),
        ({"blocks": floats(N, 1, L, P, H, D)}, ValueError, "num_heads of an MLA cache must be 1, got 2"),
        ({"blocks": np.zeros((N, 2, L, P, H, D))}, ValueError, "cache dtype must be f32.*got f64"),
        ({"blocks": np.zeros((N, 2, L, P, H, D), np.uint8)}, ValueError, "cache dtype must be.*got u8"),
        ({"blocks": [1, 2]}, TypeError, "blocks: must be a NumPy array"),
        (
            {"blocks": np.zeros((N, 2, L, P, D, H), np.float32).swapaxes(4, 5)},
            ValueError,
            "last 3 dimensions.*must be packed",
        ),
        ({"blocks": floats(N, 2, L, H, P, D).swapaxes(3, 4)}, ValueError, "must be packed"),
        ({"blocks": floats(N, 2, L, P, H, 2 * D)[..., ::2]}, ValueError, "needs a stride of 1 elements"),
        ({"blocks": floats(N, 2, L, P, H, 2 * D)[..., :D]}, ValueError, "heads, needs a stride of 8"),
        ({"blocks": floats(N, 2, L, P, 2 * H, D)[..., :H, :]}, ValueError, "page_size, needs a stride of 16"),
        ({"blocks": floats(N, 2, L, P, H, D)[::-1]}, ValueError, "strides must be positive"),
        ({"blocks": np.broadcast_to(floats(1, 2, L, P, H, D), (N, 2, L, P, H, D))}, ValueError, "must not overlap"),
        (
            {"blocks": shifted((N, 2, L, P, H, D), np.float32, 4)},
            ValueError,
            "blocks must start at a multiple of 16 bytes",
        ),
        ({"cache_lengths": np.zeros(2, np.int64)}, TypeError, "cache_lengths must be uint32 or int32, got i64"),
        (
            {"cache_lengths": np.zeros((2, 1), np.uint32)},
            ValueError,
            r"cache_lengths must have 1 dimension \[sequences\]",
        ),
        ({"cache_lengths": np.zeros(4, np.uint32)[::2]}, ValueError, "cache_lengths: dimension 0.*stride of 1"),
        ({"cache_lengths": np.zeros(3, np.uint32)}, ValueError, "one row per sequence: 3 by cache_lengths, got 2 rows"),
        ({"lookup_table": np.zeros((2, 4), np.float32)}, TypeError, "lookup_table must be uint32 or int32, got f32"),
        ({"lookup_table": np.zeros(2, np.uint32)}, ValueError, "lookup_table must have 2 dimensions"),
        ({"lookup_table": np.zeros((4, 2), np.uint32).T}, ValueError, "dimension 1.*stride of 1"),
        ({"lookup_table": np.zeros((2, 8), np.uint32)[:, ::2]}, ValueError, "dimension 1.*stride of 1"),
        ({"lookup_table": np.broadcast_to(np.zeros(4, np.uint32), (2, 4))}, ValueError, "stride of at least 4"),
        (
            {"lookup_table": np.zeros((2, 3), np.uint32)},
            ValueError,
            "max_cache_length 64: 4 columns of 16 tokens, got 3",
        ),
        ({"lookup_table": shifted((2, 4), np.uint8, 1).repeat(4, 1)}, TypeError, "uint32 or int32, got u8"),
        ({"max_seq_length": -1}, ValueError, r"max_seq_length must be in \[0, "),
        ({"max_seq_length": 1.5}, TypeError, "max_seq_length must be an integer"),
        ({"max_seq_length": True}, TypeError, "max_seq_length must be an integer, got True"),
        ({"max_cache_length": 2**31}, ValueError, r"max_cache_length must be in \[0, 2147483647\]"),
        ({"max_cache_length": None}, TypeError, "max_cache_length must be an integer on the host, got NoneType"),
        ({"quantization_granularity": 4}, ValueError, "quantization_granularity needs scales"),
        (
            {"scales": floats(N, 2, L, P, H, 2), "quantization_granularity": 4},
            ValueError,
            "must store an 8-bit type, got f32",
        ),
    ],
)
def test_paged_collection_refuses(options, error, match):
    with pytest.raises(error, match=match):
        build(**options)


@pytest.mark.parametrize(
    ("scales", "granularity", "error", "match"),
    [
        (floats(N, 2, L, P, H, 3), 4, ValueError, r"scales must have shape \(5, 2, 3, 16, 2, 2\)"),
        (floats(N, 2, L, P, 1, 2), 4, ValueError, "scales must have shape"),
        (floats(N, 2, P, H, 2), 4, ValueError, "scales must have 6 dimensions"),
        (
            np.zeros((N, 2, L, P, H, 2)),
            4,
            ValueError,
            "scale dtype must be one of f32, f16, bf16, f8e8m0, f8e4m3, got f64",
        ),
        (floats(N, 2, L, P, H, 8), 0, ValueError, "quantization_granularity must be positive"),
        (floats(N, 2, L, P, H, 8), 1.5, TypeError, "quantization_granularity must be an integer"),
        (floats(N, 2, L, P, H, 4)[..., ::2], 4, ValueError, "scales: the last 3 dimensions"),
        (shifted((N, 2, L, P, H, 2), np.float32, 2), 4, ValueError, "scales must start at a multiple of 8 bytes"),
        (shifted((N, 2, L, P, H, 2), np.float32, 4), 4, ValueError, "scales must start at a multiple of 8 bytes"),
        (shifted((N, 2, L, P, H, 8), np.float32, 8), 1, ValueError, "scales must start at a multiple of 16 bytes"),
        (
            apart((N, 2, L, P, H, 2), 1),
            4,
            ValueError,
            r"multiples of 8 bytes \(the 2 scales of a token and head.*got 385 elements of 4 bytes for pages",
        ),
    ],
)
def test_scales_that_are_refused(scales, granularity, error, match):
    with pytest.raises(error, match=match):
        build(blocks=np.zeros((N, 2, L, P, H, D), np.int8), scales=scales, quantization_granularity=granularity)


def test_the_other_kinds_refuse():
    with pytest.raises(ValueError, match="lookup_table must have 1 dimension"):
        build(ContinuousBatchingKVCacheCollection, max_cache_length=8)
    with pytest.raises(ValueError, match="blocks must have 5 dimensions"):
        build(PagedKVCacheFA3FallbackCollection)
    fa3 = {"blocks": floats(2, N, P, H, D), "lookup_table": np.zeros((L, 2, 4), np.int32)}
    build(PagedKVCacheFA3FallbackCollection, **fa3)
    with pytest.raises(ValueError, match="extent 2"):
        build(PagedKVCacheFA3FallbackCollection, **(fa3 | {"blocks": floats(1, N, P, H, D)}))
    with pytest.raises(ValueError, match="one row per sequence"):
        build(PagedKVCacheFA3FallbackCollection, **(fa3 | {"lookup_table": np.zeros((L, 3, 4), np.int32)}))
    with pytest.raises(ValueError, match="at least one layer"):
        build(PagedKVCacheFA3FallbackCollection, **(fa3 | {"lookup_table": np.zeros((0, 2, 4), np.int32)}))
    with pytest.raises(ValueError, match="4 columns of 16 tokens, got 3"):
        build(PagedKVCacheFA3FallbackCollection, **(fa3 | {"lookup_table": np.zeros((L, 2, 3), np.int32)}))
    with pytest.raises(ValueError, match="blocks must have 4 dimensions"):
        build(PagedKVCache)
    with pytest.raises(ValueError, match="blocks must have 4 dimensions"):
        build(ContinuousBatchingKVCache, lookup_table=np.zeros(2, np.uint32))
    with pytest.raises(TypeError, match="is abstract"):
        KVCache()
    with pytest.raises(ValueError, match="num_heads must be positive"):
        KVCacheStaticParams(0, 8)
    with pytest.raises(ValueError, match="MLA cache must be 1"):
        KVCacheStaticParams(2, 8, True)


def pattern(pool):
    """Each element of a [N, 2, L, P, H, D] pool, however strided, says where it is."""
    pool[...] = np.arange(pool.size, dtype=np.float32).reshape(pool.shape)
    return pool


@pytest.mark.parametrize(
    "pool",
    [
        floats(N, 2, L, P, H, D),
        floats(N, 2, L + 4, P, H, D)[:, :, 1 : L + 1],
        floats(2 * N, 2, L, P, H, D)[::2],
        floats(N, 3, L, P, H, D)[:, ::2],
        floats(L, N, 2, P, H, D).transpose(1, 2, 0, 3, 4, 5),
        floats(2, L, N, P, H, D).transpose(2, 0, 1, 3, 4, 5),
        floats(N, L, 2, P + 1, H, D)[:, :, :, :P].swapaxes(1, 2),
    ],
    ids=["packed", "some layers", "every other page", "K and a gap and V", "layer first", "pages last", "padded pages"],
)
def test_outer_strides_are_honoured(pool):
    pattern(pool)
    c = build(blocks=pool, lookup_table=np.array([[3, 0, 4, 1], [2, 4, 1, 0]], np.uint32))
    for layer in range(L):
        for half, cache in enumerate((c.get_key_cache(layer), c.get_value_cache(layer))):
            for b, t in ((0, 5), (1, 21), (0, 63)):
                page = int(c.lookup_table[b, t // P])
                got = cache.load(b, 1, t, 0, width=D)
                assert np.array_equal(got, pool[page, half, layer, t % P, 1])
                rows = np.lib.stride_tricks.as_strided(
                    cache.blocks[0, 0], (cache.num_kv_rows(), H, D), (4 * H * D, 4 * D, 4)
                )
                assert np.array_equal(rows[cache.row_idx(b, t), 1], got), "rows are whole tokens from the base"
            cache.store(0, 0, 0, 0, np.full(D, -1, np.float32))
            assert (pool[3, half, layer, 0, 0] == -1).all()
    assert (pool == -1).sum() == 2 * L * D


def test_strides_that_rows_cannot_number_are_refused():
    raw = np.zeros(N * 2 * L * (P * H * D + 4), np.float32)
    step = P * H * D + 4
    strides = [4 * s for s in (2 * L * step, L * step, step, H * D, D, 1)]
    pool = np.lib.stride_tricks.as_strided(raw, (N, 2, L, P, H, D), strides)
    with pytest.raises(ValueError, match="multiples of one token's 16 elements"):
        build(blocks=pool)


def test_strides_of_extents_of_one_do_not_count():
    pool = floats(N, 2, 2, P, 1, D)[:, :, :1]
    odd = np.lib.stride_tricks.as_strided(pool, (N, 2, 1, P, 1, D), (*pool.strides[:2], 12345 * 4, D * 4, 7 * 4, 4))
    c = build(blocks=pattern(odd))
    assert c.get_value_cache(0).load(0, 0, 3, 2) == odd[0, 1, 0, 3, 0, 2]
    table = np.lib.stride_tricks.as_strided(np.zeros(8, np.uint32), (2, 1), (16, 12))
    assert build(lookup_table=table, max_cache_length=16).fields()[5] == 4
    one = build(lookup_table=np.zeros((1, 4), np.uint32)[:, :], cache_lengths=np.zeros(1, np.uint32))
    assert one.get_key_cache(0).batch_size == 1


def test_a_wide_table_is_read_by_its_rows():
    wide = np.zeros((2, 24), np.uint32)
    wide[1, :4] = [2, 4, 1, 0]
    c = build(blocks=pattern(floats(N, 2, L, P, H, D)), lookup_table=wide[:, :4])
    at = dict(zip([f.name for f in layout.collection_fields(c.cache_spec)], c.fields(), strict=True))
    assert (at["lookup_stride"], at["lookup_columns"]) == (24, 4)
    assert c.get_key_cache(0).load(1, 0, 21, 0) == c.blocks[4, 0, 0, 5, 0, 0]


def test_no_sequence_at_all():
    c = build(
        cache_lengths=np.zeros(0, np.uint32),
        lookup_table=np.zeros((0, 24), np.uint32),
        max_cache_length=0,
        max_seq_length=0,
    )
    k = c.get_key_cache(0)
    assert k.empty_cache()
    assert k.batch_size == 0
    with pytest.raises(IndexError, match=r"b \(sequence\) must be in \[0, 0\)"):
        k.load(0, 0, 0, 0)
    build(
        ContinuousBatchingKVCacheCollection,
        cache_lengths=np.zeros(0, np.uint32),
        lookup_table=np.zeros(0, np.uint32),
        max_cache_length=0,
    )


def test_a_readonly_pool_can_be_read_and_not_written():
    pool = floats(N, 2, L, P, H, D)
    pool.flags.writeable = False
    c = build(blocks=pool)
    k = c.get_key_cache(0)
    assert c.readonly
    assert k.readonly
    assert k.load(0, 0, 0, 0) == 0
    with pytest.raises(ValueError, match="read-only"):
        k.store(0, 0, 0, 0, 1.0)
    assert not k.block_paged_ptr(0, 0, 0).flags.writeable


class Gpu:
    """Memory that nobody can read here: touching it would end the process."""

    def __init__(self, shape, typestr, pointer=0x7F0000000000, ordinal=0):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (pointer, False), "version": 3}
        self.ordinal = ordinal

    def __dlpack_device__(self):
        return (2, self.ordinal)


def on_gpu(cls=PagedKVCacheCollection, blocks=(N, 2, L, P, H, D), table=(2, 4), **options):
    pool = blocks if isinstance(blocks, Gpu) else Gpu(blocks, "<f2")
    values = {"blocks": pool, "cache_lengths": Gpu((2,), "<u4"), "lookup_table": Gpu(table, "<i4")}
    return build(cls, **(values | options))


@pytest.mark.parametrize(
    "make",
    [
        lambda: on_gpu(),
        lambda: on_gpu(blocks=(N, 1, L, P, 1, 64)),
        lambda: on_gpu(
            blocks=Gpu((N, 2, L, P, H, D), "|i1"), scales=Gpu((N, 2, L, P, H, 2), "<f4"), quantization_granularity=4
        ),
        lambda: on_gpu(ContinuousBatchingKVCacheCollection, table=(2,), max_cache_length=16),
        lambda: on_gpu(PagedKVCacheFA3FallbackCollection, blocks=(2, N, P, H, D), table=(L, 2, 4)),
    ],
    ids=["paged", "mla", "quantized", "continuous", "fa3"],
)
def test_caches_on_a_device_are_made_without_reading(make):
    c = make()
    assert c.device == ("cuda", 0)
    assert len(c.fields()) == len(layout.collection_fields(c.cache_spec))
    with pytest.raises(TypeError, match="needs buffers in host memory"):
        c.cache_length(0)
    k = c.get_key_cache(2)
    assert len(k.fields()) == len(layout.cache_fields(k.spec))
    assert k.device == KVCacheMHAOperand(k).device == ("cuda", 0)
    assert k.blocks.device == ("cuda", 0)
    assert k.blocks.data == k.fields()[0]
    assert (k.max_prompt_length(), k.max_context_length() > 0, k.empty_cache()) == (1, True, False)
    calls = [
        lambda: k.load(0, 0, 0, 0), lambda: k.store(0, 0, 0, 0, 1.0), lambda: k.cache_length(0),
        lambda: k.cache_lengths_nd(), lambda: k.block_paged_ptr(0, 0, 0), lambda: k.scales_raw_ptr(),
    ]  # fmt: skip
    if k.spec.kind != "fa3":
        assert k.num_kv_rows() > 0
        assert k.get_tma_row(-3) == -1
        calls += [lambda: k.row_idx(0, 0), lambda: k.populate(0, 0, 16)]
    if k.quantization_enabled:
        calls += [lambda: k.load_scale(0, 0, 0, 0), lambda: k.store_scale(0, 0, 0, 0, 1.0)]
        calls += [lambda: k.load_raw(0, 0, 0, 0), lambda: k.scales_block_paged_ptr(0, 0, 0)]
    for call in calls:
        with pytest.raises(TypeError, match=r"needs buffers in host memory, got a cache on cuda:0"):
            call()


def test_buffers_must_be_on_one_device():
    with pytest.raises(ValueError, match="blocks is on cuda:0, cache_lengths on the CPU"):
        on_gpu(cache_lengths=np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="blocks is on cuda:0, lookup_table on cuda:1"):
        on_gpu(lookup_table=Gpu((2, 4), "<u4", ordinal=1))


def test_rows_of_a_huge_pool_need_64_bits():
    pages, layers = 1_840_895, 44
    c = on_gpu(blocks=(pages, 2, layers, 16, 1, 64), table=(2, 4))
    k = c.get_key_cache(0)
    assert k.num_kv_rows() == (pages - 1) * 1408 + 16 > 2**31
    assert k.get_tma_row((pages - 1) * 16 + 7) == (pages - 1) * 1408 + 7
    at = dict(zip([f.name for f in layout.cache_fields(k.spec)], c.get_value_cache(43).fields(), strict=True))
    assert at["base"] == 0x7F0000000000 + 2 * (44 * 1024 + 43 * 1024)
