# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention on a GPU, over torch tensors, against the float64 model: every kernel on the same cases.

``kind`` None is the choice of the expansion, which takes the decode kernel for few queries. Whatever holds no cached
token is NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.kinds import schedule_for
from reference.random_caches import Problem, random_query, stored_problem

import kvarn as kv
from kvarn.caches import ContinuousBatchingKVCacheCollection, PagedKVCacheCollection, PagedKVCacheFA3FallbackCollection
from kvarn.dialect import dtypes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

# The weights are rounded to the query's type before the tensor cores take them.
TOLERANCE = {"f32": 5e-5, "f16": 4e-3, "bf16": 2e-2}
SENTINEL = 72.0
_TORCH = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e8m0": "float8_e8m0fnu"}


def to_gpu(array: np.ndarray) -> Any:
    """A tensor of the same bits; unsigned tables become signed ones."""
    array = np.ascontiguousarray(array)
    name = _TORCH.get(dtypes.of(array.dtype).name)
    if name:
        bits = torch.from_numpy(array.view(f"i{array.itemsize}").copy())
        return bits.cuda().view(getattr(torch, name))
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array).cuda()


def collection_on_gpu(problem: Problem) -> Any:
    c = problem.collection
    parts = [to_gpu(np.asarray(x)) for x in (c.blocks, c.cache_lengths, c.lookup_table)]
    rest = (to_gpu(np.asarray(c.scales)), c.quantization_granularity) if c.scales is not None else ()
    kind = type(c)
    assert kind in (PagedKVCacheCollection, ContinuousBatchingKVCacheCollection, PagedKVCacheFA3FallbackCollection)
    return kind(*parts, c.max_seq_length, c.max_cache_length, *rest)


problem_of = functools.partial(stored_problem, dtype="bf16")
query_of = random_query


def numbers(tensor: Any) -> np.ndarray:
    return tensor.float().cpu().numpy().astype(np.float64)


def run(problem: Problem, query: np.ndarray, kind: str | None = None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp, of tensors that had a sentinel in them."""
    q = to_gpu(query)
    out = torch.full_like(q, SENTINEL)
    lse = torch.full(q.shape[:2], SENTINEL, device=q.device)
    arrays = {n: to_gpu(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    schedule = schedule_for(kind) if kind else None
    kv.ops.attention(
        collection_on_gpu(problem), 1, q, to_gpu(problem.row_offsets), out=out, lse=lse, schedule=schedule, **arrays
    )
    return numbers(out), numbers(lse)


def check(problem: Problem, query: np.ndarray, kind: str | None = None, **options: Any) -> None:
    out, lse = run(problem, query, kind, **options)
    named = dict(options)
    if "window" in options:
        named["mask"] = "sliding_window"
    want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, **named)
    assert_close(out, want, TOLERANCE[dtypes.of(query.dtype).name])
    assert_close(lse, want_lse, 1e-3)


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    assert not np.isnan(got).any(), f"NaN at {np.argwhere(np.isnan(got))[0]} of {got.shape}"
    nothing = np.isneginf(want)
    np.testing.assert_array_equal(np.isneginf(got), nothing)
    got, want = np.where(nothing, 0, got), np.where(nothing, 0, want)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


KINDS = ["simt", "mma"]
needs_tiles = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="wgmma"
)
MASKS = [
    {"mask": "causal"},
    {"mask": "null"},
    {"window": 7},
    {"window": 100},
    {"mask": "chunked", "chunk": 24},
    {"mask": "chunked_causal", "chunk": 80},
]


def mask_name(options: dict[str, Any]) -> str:
    return "-".join(f"{v}" for v in options.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", MASKS, ids=mask_name)
def test_each_mask_in_a_ragged_batch(kind, options):
    rng, problem = problem_of(1, cached=[50, 0, 130, 7, 0, 300], new=[70, 200, 0, 1, 0, 33], head_size=64)
    check(problem, query_of(rng, problem, 4), kind, **options)


def check_padded(problem: Problem, query: np.ndarray, kind: str | None, width: int, **options: Any) -> None:
    """The valid rows of a padded query are the model's; the others were not written."""
    offsets = problem.row_offsets
    exists = reference.padded(np.ones(len(query), bool), offsets, width, False)
    arrays = {n: to_gpu(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    q = to_gpu(reference.padded(query, offsets, width, np.nan))
    out, lse = torch.full_like(q, SENTINEL), torch.full(q.shape[:3], SENTINEL, device=q.device)
    schedule = schedule_for(kind) if kind else None
    valid = to_gpu(problem.new.astype(np.uint32))
    kv.ops.attention_padded(collection_on_gpu(problem), 1, q, valid, out=out, lse=lse, schedule=schedule, **arrays)
    named = {**options, "mask": "sliding_window"} if "window" in options else options
    want, want_lse = reference.attention(problem.collection, 1, query, offsets, **named)
    got, got_lse = numbers(out), numbers(lse)
    assert_close(got[exists], want, TOLERANCE[dtypes.of(query.dtype).name])
    assert_close(got_lse[exists], want_lse, 1e-3)
    assert (got[~exists] == SENTINEL).all()
    assert (got_lse[~exists] == SENTINEL).all()


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("options", MASKS, ids=mask_name)
def test_each_mask_in_a_padded_batch(kind, options):
    for new in ([70, 200, 0, 1, 0, 33], [2, 1, 0, 1, 0, 2]):  # the second is a decode where the kind is open
        rng, problem = problem_of(23, cached=[50, 0, 130, 7, 0, 900], new=new, head_size=64)
        check_padded(problem, query_of(rng, problem, 8), kind, max(new) + 3, **options)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_sinks_in_a_padded_batch(kind):
    for new in ([65, 3], [1, 1]):
        rng, problem = problem_of(24, cached=[100, 20], new=new, head_size=128)
        sinks = rng.standard_normal(8).astype(np.float32)
        check_padded(problem, query_of(rng, problem, 8), kind, 66, sinks=sinks, softcap=20.0)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_valid_lengths_past_the_padding(kind):
    for new in (40, 1):
        rng, problem = problem_of(25, cached=[100, 20], new=[new, new], head_size=64)
        query = query_of(rng, problem, 4)
        want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets)
        schedule = schedule_for(kind) if kind else None
        q, valid = to_gpu(query.reshape(2, new, 4, 64)), to_gpu(np.array([new, new + 1000], np.uint32))
        out = kv.ops.attention_padded(collection_on_gpu(problem), 1, q, valid, schedule=schedule)
        assert_close(numbers(out).reshape(want.shape), want, TOLERANCE["bf16"])


@pytest.mark.parametrize("options", MASKS, ids=mask_name)
@pytest.mark.parametrize("most", [1, 2])
def test_each_mask_for_few_queries(options, most):
    rng, problem = problem_of(2, cached=[50, 0, 130, 7, 1000, 301], new=[1, most, 0, 1, most, 1], head_size=128)
    query = query_of(rng, problem, 8)
    for kind in (None, *KINDS):
        check(problem, query, kind, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_each_group(kind, group):
    rng, problem = problem_of(3, cached=[100, 20], new=[65, 90], num_heads=3, head_size=64)
    check(problem, query_of(rng, problem, 3 * group), kind)


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 32, 64, 128, 256])
def test_each_page_size(kind, page_size):
    for new in ([1, 1, 1], [90, 3, 150]):
        rng, problem = problem_of(4, cached=[100, 0, 333], new=new, page_size=page_size, head_size=128)
        check(problem, query_of(rng, problem, 4), kind)


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_each_head_size(kind, head_size, dtype):
    for new in ([1, 1], [70, 129]):
        rng, problem = problem_of(5, dtype=dtype, cached=[100, 40], new=new, head_size=head_size)
        check(problem, query_of(rng, problem, 4), kind)


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_maxima_move_where_later_scores_are_larger(kind, head_size, dtype):
    """Scores of many powers of two above one another: weights of f16 would be infinite with the first maximum."""
    rng, problem = problem_of(8, dtype=dtype, cached=[900, 40, 333], new=[70, 129, 9], head_size=head_size)
    check(problem, query_of(rng, problem, 4), kind, scale=16 / head_size**0.5)


@needs_tiles
@pytest.mark.parametrize("page_size", [1, 5, 7, 16, 48])
@pytest.mark.parametrize("head_size", [8, 24, 72, 80, 120, 128, 200, 256])
@pytest.mark.parametrize(
    ("dtype", "quantized"),
    [("bf16", {}), ("f16", {}), ("f8e4m3", {}), ("f8e5m2", {}), ("i8", {"scale_dtype": "f32", "granularity": 256}),
     ("f8e4m3", {"scale_dtype": "f32", "granularity": 8}), ("i8", {"scale_dtype": "f16", "granularity": 16})],
    ids=str,
)  # fmt: skip
def test_tiles_of_every_head_size_page_size_and_element(dtype, quantized, head_size, page_size):
    seed = head_size * 1000 + page_size
    cached, new = [700, 0, 333, 40], [150, 90, 3, 0]
    rng, problem = problem_of(
        seed, dtype=dtype, cached=cached, new=new, head_size=head_size, page_size=page_size, **quantized
    )
    scale = 0.0005 if dtype == "i8" else head_size**-0.5
    query = query_of(rng, problem, 6, "f16" if dtype == "f16" else "bf16")
    out, _ = run(problem, query, "tile", scale=scale)
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, scale=scale)
    biggest = max(1.0, np.abs(want).max())
    assert_close(out / biggest, want / biggest, TOLERANCE["bf16"])


@pytest.mark.parametrize(("head_size", "page_size"), [(7, 16), (100, 16), (64, 48), (320, 16), (512, 5), (64, 5)])
def test_shapes_of_no_common_size(head_size, page_size):
    rng, problem = problem_of(6, dtype="f16", head_size=head_size, page_size=page_size, longest=90)
    check(problem, query_of(rng, problem, 4))


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("cache", ["continuous", "fa3"])
def test_the_other_kinds_of_cache(kind, cache):
    for new in ([1, 1, 1], [70, 5, 129]):
        rng, problem = problem_of(7, cache, cached=[100, 40, 0], new=new, head_size=64)
        check(problem, query_of(rng, problem, 6), kind)


def test_single_precision():
    rng, problem = problem_of(8, dtype="f32", cached=[100, 40, 0], new=[1, 5, 30], head_size=64)
    check(problem, query_of(rng, problem, 6))


QUANTIZED = [("i8", "f32", 64), ("i8", "f16", 4), ("i8", "f32", 1), ("f8e4m3", "f32", 8), ("f8e4m3", "f8e8m0", 32)]


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize(("dtype", "scale_dtype", "granularity"), QUANTIZED)
def test_quantized_caches(kind, dtype, scale_dtype, granularity):
    for new in ([1, 1, 1], [70, 5, 129]):
        rng, problem = problem_of(
            9, dtype=dtype, scale_dtype=scale_dtype, granularity=granularity, cached=[100, 40, 0], new=new, head_size=64
        )
        query = query_of(rng, problem, 4)
        out, lse = run(problem, query, kind, scale=0.001)
        want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, scale=0.001)
        biggest = max(1.0, np.abs(want).max())
        assert_close(out / biggest, want / biggest, TOLERANCE["bf16"])
        assert_close(lse, want_lse, 0.05 if kind != "simt" else 1e-3)  # keys of 8 bits times a scale, rounded to bf16


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("query_dtype", ["bf16", "f16"])
@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_8_bit_caches_without_scales(kind, query_dtype, dtype, head_size):
    for new in ([1, 1, 1], [70, 5, 129]):
        rng, problem = problem_of(10, dtype=dtype, cached=[100, 40, 0], new=new, head_size=head_size)
        check(problem, query_of(rng, problem, 4, query_dtype), kind)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_sinks_and_softcap(kind):
    for new in ([1, 1, 1], [70, 5, 129]):
        rng, problem = problem_of(11, cached=[100, 0, 30], new=new, head_size=64)
        query = query_of(rng, problem, 4)
        sinks = rng.standard_normal(4).astype(np.float32)
        check(problem, query, kind, sinks=sinks)
        check(problem, query, kind, softcap=2.0, scale=0.5)
        check(problem, query, kind, softcap=30.0, sinks=sinks, window=9)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_alibi_slopes(kind):
    slopes = np.array([0.5, 0.25, 0.01, -0.0625], np.float32)
    for new in ([1, 1, 1], [70, 5, 129]):
        rng, problem = problem_of(27, cached=[900, 0, 30], new=new, head_size=64)
        query = query_of(rng, problem, 4)
        check(problem, query, kind, alibi_slopes=slopes)
        check(problem, query, kind, alibi_slopes=slopes, softcap=2.0, window=70)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_cross_attention_and_rows_without_keys(kind):
    rng, problem = problem_of(12, cached=[50, 0, 12], new=[90, 70, 3], head_size=64)
    query = query_of(rng, problem, 4)
    for kv_offsets in ([0, 90, 100, 103], [0, 0, 0, 0]):
        for mask in ("null", "causal"):
            check(problem, query, kind, mask=mask, kv_offsets=np.array(kv_offsets, np.uint32))


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_rows_of_no_sequence_are_not_written(kind):
    rng, problem = problem_of(13, cached=[30, 8], new=[2, 3], head_size=64)
    query = query_of(rng, problem, 4)
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets)
    padded = np.concatenate([query[3:5], query, query[:2]])
    q = to_gpu(padded)
    out = torch.full_like(q, SENTINEL)
    schedule = schedule_for(kind) if kind else None
    kv.ops.attention(
        collection_on_gpu(problem), 1, q, to_gpu(problem.row_offsets + np.uint32(2)), out=out, schedule=schedule
    )
    got = numbers(out)
    assert (got[:2] == SENTINEL).all()
    assert (got[7:] == SENTINEL).all()
    assert_close(got[2:7], want, TOLERANCE["bf16"])


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_empty_batches(kind):
    for cached in ([4, 0], []):
        _, problem = problem_of(14, cached=cached, new=[0] * len(cached), head_size=64)
        out, _ = run(problem, np.zeros((0, 4, 64), dtypes.bf16.numpy), kind)
        assert out.shape == (0, 4, 64)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_keys_that_slid_out_of_every_window_may_be_anything(kind):
    for new in ([1], [75]):
        rng, problem = problem_of(15, cached=[500], new=new, head_size=64, page_size=16)
        query = query_of(rng, problem, 4)
        want, _ = run(problem, query, kind, window=50)
        for cache in problem.caches(1):
            t, h = np.arange(440)[:, None, None], np.arange(2)[:, None]
            cache.store(0, h, t, np.arange(64), np.full((440, 2, 64), np.nan, cache.dtype.numpy))
        np.testing.assert_array_equal(run(problem, query, kind, window=50)[0], want)


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_garbage_in_other_query_rows_does_not_show(kind, dtype, width):
    rng, problem = problem_of(16, dtype=dtype, cached=[133, 20], new=[width, width], head_size=128, num_heads=2)
    query = query_of(rng, problem, 16)
    clean, _ = run(problem, query, kind)
    garbage = query.copy()
    garbage[1:width] = np.nan
    garbage[width + 1 :] = np.nan
    out, _ = run(problem, garbage, kind)
    np.testing.assert_array_equal(out[[0, width]], clean[[0, width]])


@pytest.mark.parametrize("group", [1, 8])
def test_a_prefix_hit_equals_a_cold_start(group):
    for length in (300, 512 + 17):
        rng, problem = problem_of(17, cached=[0], new=[length], page_size=256, num_heads=1, head_size=128)
        query = query_of(rng, problem, group)
        cold, _ = run(problem, query)
        c = collection_on_gpu(problem)
        hit = PagedKVCacheCollection(
            c.blocks, torch.tensor([256], dtype=torch.int32).cuda(), c.lookup_table, length - 256, length
        )
        offsets = torch.tensor([0, length - 256], dtype=torch.int32).cuda()
        out = numbers(kv.ops.attention(hit, 1, to_gpu(query[256:]), offsets))
        np.testing.assert_allclose(out, cold[256:], atol=2e-2, rtol=4e-2)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_the_order_of_the_pages_does_not_change_a_bit(kind):
    for new in ([1, 1], [70, 129]):
        rng, problem = problem_of(18, cached=[301, 40], new=new, head_size=64)
        query = query_of(rng, problem, 4)
        first, _ = run(problem, query, kind)
        c = problem.collection
        blocks, table = np.asarray(c.blocks), np.asarray(c.lookup_table)
        order = rng.permutation(len(blocks))
        problem.collection = PagedKVCacheCollection(
            blocks[order],
            c.cache_lengths,
            np.argsort(order).astype(np.uint32)[table],
            c.max_seq_length,
            c.max_cache_length,
        )
        np.testing.assert_array_equal(run(problem, query, kind)[0], first)


def test_a_large_mixed_batch():
    rng = np.random.default_rng(19)
    new = np.concatenate([np.ones(230, int), rng.integers(2, 60, 40)])
    rng, problem = problem_of(
        19, cached=rng.integers(0, 90, 270), new=new, page_size=256, head_size=64, num_heads=1, num_layers=2
    )
    check(problem, query_of(rng, problem, 4))


@pytest.mark.parametrize("schedule", [None, {"kind": "simt"}, {"splits": 1}, {"splits": 5}], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f8e4m3"])
def test_latent_rows(dtype, schedule):
    if schedule is not None and "splits" in schedule and dtype == "f32":
        pytest.skip("splits are an entry of latent kernels, which take no f32")
    for new in ([1, 1, 1], [7, 30, 2]):
        rng, problem = problem_of(
            20, dtype=dtype, cached=[100, 40, 0], new=new, head_size=576, num_heads=1, is_mla=True, page_size=16
        )
        query = query_of(rng, problem, 16)
        out = kv.ops.mla_attention(
            collection_on_gpu(problem), 1, to_gpu(query), to_gpu(problem.row_offsets), value_size=512, schedule=schedule
        )
        want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, value_size=512)
        assert_close(numbers(out), want, TOLERANCE[dtypes.of(query.dtype).name])


def test_latent_rows_are_copied_out():
    _, problem = problem_of(21, cached=[50, 0, 70], new=[2, 3, 1], head_size=576, num_heads=1, is_mla=True)
    offsets = np.array([0, 52, 55, 126], np.int32)
    out = torch.full((130, 576), SENTINEL, dtype=torch.bfloat16, device="cuda")
    cache = collection_on_gpu(problem).get_key_cache(1)
    kv.ops.mla_decompress(cache, to_gpu(offsets), to_gpu(np.zeros(3, np.int32)), out)
    host, dims = problem.collection.get_key_cache(1), np.arange(576)
    want = [host.load(b, 0, np.arange(n)[:, None], dims) for b, n in enumerate(problem.cached + problem.new)]
    got = out.cpu().view(torch.int16).numpy()
    np.testing.assert_array_equal(got[:126], np.concatenate(want).view(np.int16))
    assert (numbers(out)[126:] == SENTINEL).all()


def test_a_captured_graph_replays_with_other_lengths():
    rng, problem = problem_of(22, cached=[100, 40], new=[1, 1], head_size=128)
    query = to_gpu(query_of(rng, problem, 8))
    c, offsets = collection_on_gpu(problem), to_gpu(problem.row_offsets)
    out = torch.empty_like(query)
    kv.ops.attention(c, 1, query, offsets, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv.ops.attention(c, 1, query, offsets, out=out)
    lengths = np.array([60, 17], np.uint32)
    c.cache_lengths.copy_(to_gpu(lengths))
    graph.replay()
    torch.cuda.synchronize()
    host = problem.collection
    shorter = PagedKVCacheCollection(host.blocks, lengths, host.lookup_table, 1, host.max_cache_length)
    q = query.float().cpu().numpy()
    want, _ = reference.attention(shorter, 1, q, problem.row_offsets)
    assert_close(numbers(out), want, TOLERANCE["bf16"])


LONG = {"cached": [9000, 0, 20, 2500], "new": [33, 5, 0, 64]}  # keys of several splits, of one, of none


def tile_runs(problem: Problem, query: np.ndarray, schedules: list[dict[str, Any]], **options: Any) -> list[Any]:
    """(out, lse) of each schedule of kind tile, compared with the model."""
    want, want_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, **options)
    window = options.get("window")
    found = []
    for schedule in schedules:
        q = to_gpu(query)
        out, lse = torch.full_like(q, SENTINEL), torch.full(q.shape[:2], SENTINEL, device=q.device)
        arrays = {
            n: to_gpu(v) if isinstance(v, np.ndarray) else v for n, v in options.items() if n != "mask" or not window
        }
        kv.ops.attention(
            collection_on_gpu(problem), 1, q, to_gpu(problem.row_offsets), out=out, lse=lse,
            schedule={"kind": "tile", **schedule}, **arrays,
        )  # fmt: skip
        assert_close(numbers(out), want, TOLERANCE["bf16"])
        assert_close(numbers(lse), want_lse, 1e-3)
        found.append((numbers(out), numbers(lse)))
    return found


@needs_tiles
@pytest.mark.parametrize(
    "options",
    [{"mask": "causal"}, {"mask": "sliding_window", "window": 5000}, {"mask": "chunked_causal", "chunk": 8192}],
    ids=mask_name,
)
@pytest.mark.parametrize("head_size", [64, 128, 192])
def test_split_keys_are_combined(options, head_size):
    rng, problem = problem_of(31, **LONG, head_size=head_size)
    query = query_of(rng, problem, 8)
    sinks = rng.standard_normal(8).astype(np.float32)
    schedules = [{"splits": 1}, {}, {"splits": 3}, {"splits": 32, "rows": 64}]
    whole, *others = tile_runs(problem, query, schedules, sinks=sinks, **options)
    for other in others:
        np.testing.assert_allclose(other[1], whole[1], rtol=1e-4, atol=1e-4)


@needs_tiles
def test_a_batch_invariant_sequence_of_tiles_is_the_same_bits_in_any_batch():
    """Beside sequences of one new token and of many: the line between them moves no bit."""
    rng, problem = problem_of(32, cached=[9000, 0, 2500], new=[1, 70, 5], head_size=128)
    query, c = query_of(rng, problem, 8), collection_on_gpu(problem)
    schedule = {"batch_invariant": True}
    together = kv.ops.attention(c, 1, to_gpu(query), to_gpu(problem.row_offsets), schedule=schedule)
    for b, (first, last) in enumerate(zip(problem.row_offsets[:-1], problem.row_offsets[1:], strict=True)):
        lengths, table = (x[b : b + 1].contiguous() for x in (c.cache_lengths, c.lookup_table))
        one = type(c)(c.blocks, lengths, table, int(last - first), c.max_cache_length)
        alone = kv.ops.attention(
            one, 1, to_gpu(query[first:last]), torch.tensor([0, last - first], dtype=torch.int32).cuda(),
            schedule=schedule,
        )  # fmt: skip
        assert torch.equal(alone, together[first:last]), f"sequence {b}"


@needs_tiles
@pytest.mark.parametrize("keys", [4096, 16384])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_sums_of_8_bit_products_over_many_keys_lose_nothing_of_values_that_are_alike(keys, head_size):
    rng, problem = problem_of(
        9, "paged", dtype="f8e4m3", num_heads=2, head_size=head_size, page_size=64, cached=[keys - 100], new=[100]
    )
    problem.collection.blocks[:, 1] = 1
    query = to_gpu(rng.standard_normal((100, 8, head_size)).astype(dtypes.f8e4m3.numpy))
    offsets = to_gpu(problem.row_offsets.astype(np.uint32))
    out = kv.ops.attention(collection_on_gpu(problem), 1, query, offsets, schedule={"splits": 1})
    np.testing.assert_allclose(numbers(out), 1, rtol=0, atol=8e-3)
