# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Schedules of kernels of one's own: what passes make of the same tiles, and which schedules there are."""

import ml_dtypes
import numpy as np
import pytest

import kvarn as kv

ROWS, SIZE, PAGE = 128, 64, 16


def attention_by(block, schedule):
    @kv.kernel(block=block, schedule=schedule)
    def attention(
        query: kv.Buffer[kv.bf16, 3], keys: kv.KVCache, values: kv.KVCache, key_map: kv.TensorMap,
        value_map: kv.TensorMap, out: kv.Buffer[kv.bf16, 3],
    ):  # fmt: skip
        b, row = kv.block_id.x, kv.tile_index(ROWS)
        count = keys.cache_length(b)
        q = query.load_rows(b, row, columns=SIZE)
        m, s, o = kv.full(ROWS, -3.0e38), kv.full(ROWS, 0.0), kv.full((ROWS, SIZE), 0.0)
        for j in range(0, (count + 63) // 64):
            k = keys.tile(b, 0, j * 64, count, rows=64, descriptor=key_map)
            v = values.tile(b, 0, j * 64, count, rows=64, descriptor=value_map)
            x = kv.masked(kv.dot(q, k.T) * 0.125, (j * 64 + kv.tile_index(64) < count)[None, :])
            top = kv.math.max(m, x.max(axis=1))
            alpha, p = kv.math.exp(m - top), kv.math.exp(x - top[:, None])
            m, s = top, s * alpha + p.sum(axis=1)
            o = kv.dot(kv.bf16(p), v, o * alpha[:, None])
        out.store_rows(b, row, value=kv.bf16(o / kv.math.max(s, kv.full(ROWS, 1.0e-30))[:, None]))

    return attention


class Batch:
    """Two sequences, one of whose last tile and page are partly there; every other slot is NaN."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        lengths = np.array([200, 64], np.int32)
        table = rng.permutation(32).reshape(2, 16).astype(np.int32)
        pool = np.full((32, 2, 1, PAGE, 1, SIZE), np.nan, ml_dtypes.bfloat16)
        self.query = rng.standard_normal((2, ROWS, SIZE)).astype(ml_dtypes.bfloat16)
        self.want = np.zeros(self.query.shape)
        for b, length in enumerate(lengths):
            k, v = rng.standard_normal((2, length, SIZE)).astype(ml_dtypes.bfloat16)
            for t in range(length):
                pool[table[b, t // PAGE], :, 0, t % PAGE, 0] = k[t], v[t]
            x = np.exp(self.query[b].astype(float) @ k.astype(float).T * 0.125)
            self.want[b] = x / x.sum(axis=1, keepdims=True) @ v.astype(float)
        collection = kv.PagedKVCacheCollection(pool, lengths, table, 4, 256)
        caches = collection.get_key_cache(0), collection.get_value_cache(0)
        maps = [cache.create_tma_tile(tile_rows=PAGE) for cache in caches]
        self.operands = (*caches, *maps)

    def emulated(self, block, schedule):
        out = np.zeros_like(self.query)
        specs = (kv.Buffer[kv.bf16, 3], *self.operands, kv.Buffer[kv.bf16, 3])
        made = kv.compile(attention_by(block, schedule), *specs, target="sm_90a")
        report = made.emulate(2, block, self.query, *self.operands, out)
        assert not report.hazards
        np.testing.assert_allclose(out.astype(float), self.want, rtol=2e-2, atol=2e-2)
        return made.asm["ptx"]


@pytest.mark.parametrize(
    ("block", "schedule"),
    [
        (256, {"stages": 3}),
        (384, {"producer": True, "stages": 3, "ping_pong": True}),
        (384, {"producer": True, "overlap": False, "one_wait": True}),
        (256, {"instruction": "mma.sync"}),
    ],
    ids=str,
)
def test_every_schedule_gives_the_same_answer_by_other_code(block, schedule):
    batch = Batch()
    assert batch.emulated(block, schedule) != batch.emulated(256, {})


@pytest.mark.parametrize(
    ("block", "schedule", "message"),
    [
        (128, {"rows": 64}, r"schedule of a kernel has the entries stages, producer, .*, got 'rows'"),
        (128, {"stages": 0}, r"schedule: stages must be in \[1, 8\], got 0"),
        (128, {"producer": "yes"}, r"schedule: producer must be true or false, got 'yes'"),
        (128, {"producer": True}, r"block must have a multiple of 128 threads, at least 256, got 128"),
        (192, {}, r"block must have a multiple of 128 threads, at least 128, got 192"),
        (None, {"stages": 2}, r"schedule needs block"),
    ],
    ids=str,
)
def test_a_schedule_that_no_kernel_has_is_refused_where_it_is_declared(block, schedule, message):
    with pytest.raises(ValueError, match=message):
        attention_by(block, schedule)


def test_a_schedule_needs_tiles_and_what_its_target_has():
    @kv.kernel(block=128, schedule={"stages": 2})
    def plain(out: kv.Buffer[kv.f32, 1]):
        out[kv.thread_id.x] = 1.0

    @kv.kernel(block=256, schedule={"producer": True})
    def product(x: kv.Buffer[kv.bf16, 2], out: kv.Buffer[kv.bf16, 2]):
        row = kv.tile_index(64)
        a = x.load_rows(row, columns=64)
        out.store_rows(row, value=kv.bf16(kv.dot(a, x.load_rows(row, columns=64).T)))

    with pytest.raises(kv.KernelError, match="a schedule is for kernels over tiles, and this one has none"):
        kv.compile(plain, kv.Buffer[kv.f32, 1], target="sm_90a")
    rows = kv.Buffer[kv.bf16, 2]
    with pytest.raises(kv.KernelError, match=r"schedule for sm_80: producer must be false by mma\.sync"):
        kv.compile(product, rows, rows, target="sm_80")
    assert kv.compile(product, rows, rows, target="host").asm["kv"]


@pytest.mark.parametrize("block", [256, 384])
@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_each_work_item_goes_to_one_block(block, blocks):
    """The range's step is a value of run time: passes count the loop's iterations from 0."""
    items, rows = 7, (block - 128) // 2

    @kv.kernel(block=block, schedule={"producer": True})
    def products(x: kv.Buffer[kv.bf16, 3], cache: kv.KVCache, counter: kv.Buffer[kv.i8, 1], out: kv.Buffer[kv.f32, 3]):
        row = kv.tile_index(rows)
        for i in range(kv.block_id.x, x.shape[0], kv.grid_dim.x):
            item = kv.take_work_item(counter, i, x.shape[0])
            a = x.load_rows(item, row, columns=SIZE)
            total = kv.full((rows, 64), 0.0)
            for j in range(0, 2):
                total = kv.dot(a, cache.tile(0, 0, j * 64, 128, rows=64).T, total)
            out.store_rows(item, row, value=total)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((items, rows, SIZE)).astype(ml_dtypes.bfloat16)
    pool = rng.standard_normal((8, 2, 1, PAGE, 1, SIZE)).astype(ml_dtypes.bfloat16)
    table = np.arange(16, dtype=np.uint32)[None] % 8
    keys = kv.PagedKVCacheCollection(pool, np.array([128], np.uint32), table, 1, 128).get_key_cache(0)
    counter, out = np.zeros(4, np.int8), np.zeros((items, rows, 64), np.float32)
    specs = kv.Buffer[kv.bf16, 3], keys, kv.Buffer[kv.i8, 1], kv.Buffer[kv.f32, 3]
    made = kv.compile(products, *specs, target="sm_90a")
    assert "atom.global.inc" in made.asm["ptx"]
    assert not made.emulate(blocks, block, x, keys, counter, out).hazards
    k = pool[:, 0, 0, :, 0].astype(float).reshape(2, 64, SIZE).sum(0)
    np.testing.assert_allclose(out, x.astype(float) @ k.T, rtol=1e-3, atol=1e-3)
    assert not counter.any()
