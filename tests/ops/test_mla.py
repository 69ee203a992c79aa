# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows, every kernel of it against the float64 model: the rows of ``reference.latent_rows``.

Beside them, what is no row: the same bits of other orders and pages, several sources, and what is refused.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference, model
from reference.attention_functions import calls_that_differ, document
from reference.case import (
    LAYER,
    NULL,
    Case,
    Listed,
    Mask,
    Row,
    assert_same_bits,
    by_name as named_rows,
    on,
    rows,
    window,
)
from reference.latent_rows import TABLES, in_row, sizes
from reference.places import Interpreted, Place
from reference.random_caches import random_values, stored_problem
from reference.shared_prefixes import close, combined, permuted

import kvarn as kv
from kvarn.dialect import dtypes, tile_layout
from kvarn.dialect.latent_layout import RowFormat
from kvarn.dialect.layout import CacheSpec
from kvarn.emulator import grid as ptx
from kvarn.lowering.kernels.attention.case import Case as OfKernel
from kvarn.lowering.schedules.attention import problems
from kvarn.lowering.target import by_name

pytestmark = pytest.mark.whole


@rows(TABLES["by rows"])
def test_values_are_columns_of_the_keys(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["by wgmma"])
def test_every_way_to_lay_out_the_work_gives_attention(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["by mma.sync"])
def test_warps_beside_one_another_give_attention(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["lists"])
def test_a_query_sees_the_rows_that_it_lists(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["prior"])
def test_every_kernel_ends_with_sinks_and_a_prior_result(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["functions"])
def test_every_kernel_takes_scores_and_masks_as_functions(row: Row, kernel: str):
    row.check(kernel)


# --- the same bits -----------------------------------------------------------------------------------

OF_F16: dict[str, Any] = {"dtype": "f16", **sizes(144, 128)}
ORDERED = {
    "wide": ("latent", [150], [2], {"page_size": 64, **OF_F16}),
    "pages of 5, splits": ("latent", [150], [2], {"page_size": 5, "schedule": {"splits": 2}, **OF_F16}),
    "few": ("latent", [200], [1], {"page_size": 64, "schedule": {"max_queries": 1}, **OF_F16}),
    "few, pages of 5, splits": (
        "latent", [200], [1], {"page_size": 5, "schedule": {"max_queries": 1, "splits": 2}, **OF_F16}),
    "8-bit rows": (
        "latent", [150], [2], {"page_size": 64, "schedule": {"max_queries": 4}, **OF_F16, "dtype": "f8e4m3"}),
    "few 8-bit rows": (
        "latent", [200], [1], {"page_size": 64, "schedule": {"max_queries": 1}, **OF_F16, "dtype": "f8e4m3"}),
    "listed rows": ("latent", [90], [2], {"schedule": {"splits": 2}, "form": Listed(70), **OF_F16}),
    "columns beside one another": ("latent-mma", [40], [1], {"page_size": 5, **OF_F16, **sizes(304, 288)}),
    "rows that end in bf16": ("latent-mma", [40], [1], {"page_size": 5, "group": 16, **in_row(16)}),
}  # fmt: skip


LIKE_OTHERS = (
    "pages of 5, splits", "few, pages of 5, splits", "8-bit rows", "few 8-bit rows", "columns beside one another",
)  # fmt: skip


@named_rows(ORDERED, LIKE_OTHERS)
def test_results_do_not_depend_on_the_order_of_warps_and_copies(name):
    kernel, cached, new, options = ORDERED[name]
    place, case = on(kernel, cached, new, **options)
    orders = ptx.ORDERS[0], ptx.ORDERS[3], ptx.RANDOM[0]
    first, *others = (case.run(Interpreted(place.name, order=order)) for order in orders)
    for other in others:
        assert_same_bits(other, first)


def test_where_pages_of_latent_rows_lie_does_not_matter_to_a_bit(place):
    ids = np.random.default_rng(3).integers(0, 2, (3, 60)).astype(np.int32)
    case = Case(cached=[40, 0, 9], new=[3, 7, 0], dtype="f16", page_size=4, **sizes(24, 16, 2))
    functions = {"score": lambda s, b, h, q, k: s * 0.5 + kv.f32(h), "mask": (kv.masks.causal & document, ids)}
    here, there = (
        case.launch(
            place, kv.ops.mla_attention, (place.collection(p.collection), LAYER), case.query_rows, case.offsets,
            **functions,
        )
        for p in (case.problem, permuted(case.problem))
    )  # fmt: skip
    assert_same_bits(there, here)


def test_rows_that_a_function_hides_may_be_anything_and_rows_that_see_none_are_zeros(place):
    hidden = Mask("hidden", {"mask": lambda b, h, q, k: (k % 3 != 1) & (k <= q) & (q % 4 != 1)}, lambda *_: True)
    # Products have a weight of zero for a hidden value, which must be finite.
    schedule = {} if place.name == "host" else {"kind": "simt"}
    case = Case(cached=[40, 0, 9], new=[3, 7, 0], dtype="f16", mask=hidden, schedule=schedule, **sizes(24, 16, 2))
    want, want_lse = case.run(place)
    blind = np.concatenate([40 + np.arange(3), np.arange(7)]) % 4 == 1
    assert (want[blind] == 0).all()
    assert np.isneginf(want_lse[blind]).all()
    assert np.isfinite(want_lse[~blind]).all()
    cache = case.problem.collection.get_key_cache(LAYER)
    for b, total in enumerate(case.problem.cached + case.problem.new):
        rows_of = np.arange(1, total, 3)[:, None]
        cache.store(b, 0, rows_of, np.arange(24), np.full((len(rows_of), 24), np.nan, np.float16))
    assert_same_bits(case.run(place), (want, want_lse))


@pytest.mark.parametrize(("kernel", "bound"), [("latent", {"max_queries": 2}), ("latent-mma", {}), ("latent", {})])
def test_before_a_window_anything_may_be(kernel, bound):
    mask = Mask("evens", {"mask": kv.masks.sliding_window(20) & (lambda b, h, q, k: k % 2 == 0)}, lambda *_: True)
    place, case = on(kernel, [70, 30], [2, 1], dtype="f16", mask=mask, schedule=bound, **sizes(144, 128, 8))
    want = case.run(place)
    cache = case.problem.collection.get_key_cache(LAYER)
    cache.store(0, 0, np.arange(50)[:, None], np.arange(144), np.full((50, 144), np.nan, np.float16))
    assert_same_bits(case.run(place), want)


def test_every_token_listed_is_dense_attention_without_a_mask():
    case = Case(cached=[20, 0, 33], new=[2, 1, 3], dtype="f32", page_size=4, mask=NULL, **sizes(24, 16, 2))
    problem, tokens = case.problem, np.arange(36, dtype=np.int32)
    table: Any = problem.collection.lookup_table
    indices = kv.ops.remap_sparse_indices(
        np.tile(tokens, (problem.tokens, 1)), case.offsets, table, 4, problem.null_page
    )
    counts = np.repeat(problem.cached + problem.new, problem.new).astype(np.uint32)
    sparse = case.launch(
        Place(), kv.ops.mla_attention, (problem.collection, LAYER), case.query_rows, case.offsets, mask=None,
        indices=indices, topk_lengths=counts,
    )  # fmt: skip
    close(sparse, case.want(), 2e-5)


# --- several sources ---------------------------------------------------------------------------------


def test_a_window_and_a_compressed_latent_cache_are_one_softmax(place):
    """As models with compressed keys attend: recent rows through a window, older ones by a list, one sink a head."""
    recent = Case(cached=[30, 5], new=[2, 1], dtype="f16", mask=window(6), sinks=True, **sizes(144, 128, 4))
    older = Case(cached=[9, 2], new=[0, 0], dtype="f16", seed=4, **sizes(144, 128, 4))
    chosen = np.array([[8, 0, 3], [8, 1, -1], [0, 1, -1]], np.int32)  # tokens of the older cache, by an indexer
    c: Any = older.problem.collection
    indices = kv.ops.remap_sparse_indices(
        place.put(chosen), place.put(recent.offsets), place.put(c.lookup_table), 16, invalid_id=older.problem.null_page
    )
    collections = [place.collection(x.problem.collection) for x in (older, recent)]
    found = recent.launch(
        place, kv.ops.mla_attention, (collections, [LAYER] * 2), recent.query_rows, recent.offsets, mask=None,
        indices=[indices, None], window=[None, 6],
    )  # fmt: skip
    first = {0: 30, 1: 5}  # position of a sequence's first query
    listed = {(0, 0): chosen[0], (0, 1): chosen[1], (1, 0): chosen[2]}
    of_older = reference.attention(
        c, LAYER, recent.query_rows, recent.offsets, value_size=128, kv_offsets=np.zeros(3, int),
        mask=lambda b, h, q, k: np.stack([np.isin(k, listed[b, i]) for i in range(len(q))]),
    )  # fmt: skip
    assert list(first.values()) == list(recent.cached)
    close(found, combined(*recent.want(), *of_older), 4e-3)


def test_functions_go_with_a_sink_a_prior_result_and_other_sources(place):
    """A window with a score, and keys of another cache that each query sees as its mask says, one sink a head."""
    nine = Mask("window", {"mask": kv.masks.sliding_window(9)}, window(9).seen)
    case = Case(cached=[40, 0, 9], new=[3, 7, 0], dtype="f16", mask=nine, sinks=True, **sizes(24, 16, 2),
                score=(lambda s, b, h, q, k: 2.0 * s, lambda x, b, h, q, k: 2 * x))  # fmt: skip
    memory = Case(cached=[12, 3, 0], new=[0, 0, 0], dtype="f16", seed=5, **sizes(24, 16, 2)).problem.collection
    rng, none = np.random.default_rng(4), np.zeros(4, np.uint32)
    shape = (*case.query_rows.shape[:2], 16)
    prior = rng.standard_normal(shape).astype(np.float32), rng.random(shape[:2], np.float32)
    found = case.launch(
        place, kv.ops.mla_attention,
        ([place.collection(memory), place.collection(case.problem.collection)], [LAYER] * 2), case.query_rows,
        case.offsets, score=[None, lambda s, b, h, q, k: 2.0 * s],
        mask=[lambda b, h, q, k: k % 2 == h, kv.masks.sliding_window(9)], kv_offsets=[none, None], prior=prior,
    )  # fmt: skip
    of_memory = reference.attention(
        memory, LAYER, case.query_rows, case.offsets, mask=lambda b, h, q, k: k % 2 == h, kv_offsets=none, value_size=16
    )
    close(found, combined(*combined(*of_memory, *case.want()), *prior), 4e-3)


def test_calls_that_differ_in_a_function_or_in_offsets_of_keys_are_not_taken_for_one_another():
    calls_that_differ(Place())


# --- what is refused ---------------------------------------------------------------------------------


def refused(case: Case, message: str, **options: Any) -> None:
    given = {"value_size": case.value_size, **options}
    with pytest.raises((ValueError, TypeError), match=message):
        kv.ops.mla_attention(case.problem.collection, LAYER, case.query_rows, case.offsets, **given)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def test_what_does_not_fit_is_refused():
    case = Case(cached=[50, 9], new=[2, 4], dtype="f32", **sizes(24, 16, 2))
    refused(case, r"value_size must be in \[1, 24\] \(the row\), got 25", value_size=25)
    refused(case, "value_size must be in", value_size=0)
    wide = zeros(6, 2, 24), zeros(6, 2)
    refused(case, r"mla_attention: prior must have shape \[6, 2, 16\], got \[6, 2, 24\]", prior=wide)
    refused(case, r"mla_attention: sinks must have shape \[2\], got \[3\]", sinks=zeros(3))
    refused(case, r"mla_attention: out must have dtype f32, got f16", out=zeros(6, 2, 16, dtype=np.float16))
    lists = zeros(6, 40, dtype=np.int32)
    refused(case, r"indices must have shape \[6, K\], got \[5, 40\]", indices=lists[:5])
    refused(case, "indices must be int32 or uint32, got i64", indices=lists.astype(np.int64))
    two = zeros(2, dtype=np.int32)
    refused(case, r"topk_lengths must have shape \[6\], got \[2\]", indices=lists, topk_lengths=two)
    refused(case, "topk_lengths needs indices, got none", topk_lengths=zeros(6, dtype=np.int32))
    for options in ({"mask": "causal"}, {"window": 3}, {"chunk": 3}):
        refused(case, "mask, window, chunk and kv_offsets must be None with indices", indices=lists, **options)
    for given in ({"score": kv.scores.softcap(3.0)}, {"mask": kv.masks.causal}, {"kv_offsets": case.offsets}):
        refused(case, "score, mask, window, chunk and kv_offsets must be None with indices", indices=lists, **given)
    refused(case, "mask takes 1 arrays, got 0", mask=document)
    refused(case, "window and chunk must be None for a mask that is a function", mask=kv.masks.causal, window=3)
    long = document, zeros(2, 70, dtype=np.int64)
    refused(case, "array 0 of the score and the mask must have dtype f32 or f16 or bf16", mask=long)
    of_others = Case(cached=[3], new=[1], kind="continuous", dtype="f32", **sizes(24, 16, 2))
    refused(of_others, "indices needs a collection of pages, got a continuous one", indices=lists[:1])


def test_rows_that_are_operand_b_wait_for_whole_tiles_of_keys():
    case = Case(cached=[50], new=[1], dtype="bf16", **sizes(128, 64, 16))
    with kv.emulated("sm_90a"):
        few = {"kind": "tile", "rows": 16}
        refused(case, "parts must be 1 for rows of fewer than 64, got 2", schedule={**few, "parts": 2})


def test_caches_that_do_not_fit_are_refused():
    latent = Case(cached=[3], new=[1], dtype="f32", **sizes(24, 16, 2))
    with pytest.raises(ValueError, match="needs a collection with values, got an MLA one"):
        kv.ops.attention(latent.problem.collection, 0, latent.query_rows, latent.offsets)
    with_values = Case(cached=[3], new=[1], dtype="f32")
    refused(with_values, "needs an MLA collection", value_size=8)
    wide = "query must have dtype f32 or f16 or bf16, got f8e4m3"
    eight: dict[str, Any] = {"dtype": "f8e4m3", "query": "f8e4m3"}
    refused(Case(cached=[3], new=[1], rope=8, **eight, **sizes(80, 64, 2)), wide)  # the rows end in 8 bf16
    refused(Case(cached=[3], new=[1], scales=("f32", 80), **eight, **sizes(80, 64, 2)), wide)


def test_rows_that_do_not_fit_their_scales_are_refused():
    case = Case(cached=[3], new=[1], query="f32", group=2, **in_row(8, 16, 64))
    refused(case, "inline_scales needs rows of C 8-bit floats, a scale for every 32 of them", inline_scales=32)
    refused(case, r"value_size must be in \[1, 64\]", value_size=65, inline_scales=16)
    for wrong, said in ((24, "must be a power of two, got 24"), (8, "inline_scales must be in")):
        refused(case, said, inline_scales=wrong)


# --- rows copied out of pages, and kernels of one's own ----------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3", "f32"])
def test_decompressing_a_plan_gives_every_row_once(dtype):
    quantized = {"scale_dtype": "f32"} if dtype == "f8e4m3" else {}
    _, problem = stored_problem(
        5, dtype=dtype, cached=[5, 0, 7, 0], new=[2, 3, 1, 0], page_size=4, num_heads=1, is_mla=True, head_size=24,
        **quantized,
    )  # fmt: skip
    cache, tokens = problem.collection.get_key_cache(1), 8
    plan = kv.ops.mla_prefill_plan(problem.row_offsets, problem.cached.astype(np.uint32), tokens, 4)
    found = []
    for chunk in range(4):
        out = np.full((tokens, cache.head_size), 72.0, cache.dtype.numpy)
        rows = np.asarray(plan.buffer_row_offsets)[chunk].astype(np.int32)
        offsets = np.asarray(plan.cache_offsets)[chunk].astype(np.int32)
        kv.ops.mla_decompress(cache, rows, offsets, out)
        count = max(0, int(rows[-1]))
        assert (out[count:].astype(np.float32) == 72.0).all()
        found.append(out[:count])
    read = cache.load_quantized if quantized else cache.load
    dims = np.arange(cache.head_size)
    want = [read(b, 0, np.arange(n)[:, None], dims) for b, n in enumerate(problem.cached + problem.new) if n]
    np.testing.assert_array_equal(np.concatenate(found).view(np.uint8), np.concatenate(want).view(np.uint8))
    assert len(np.concatenate(found)) == 18


@kv.kernel(block=128)
def of_listed(
    x: kv.Buffer[kv.bf16, 2], pool: kv.KVCacheCollection, lists: kv.Buffer[kv.i32, 2], out: kv.Buffer[kv.f32, 2]
):
    """Products of 64 vectors with rows of the pool, the first 20 of a list."""
    row, cache = kv.tile_index(64), pool.get_key_cache(1)
    a = x.load_rows(row, columns=80)
    keys = {"rows": 32, "columns": 80, "dtype": kv.bf16, "lists": lists, "rope": 16, "inline_scales": 32}
    k = cache.tile(1, 0, 0, 20, **keys)
    out.store_rows(row, value=kv.dot(a, k.T))


@pytest.mark.parametrize("place", ["host", "sm_80", "sm_90a"])
def test_a_kernel_of_ones_own_multiplies_listed_rows(place):
    content, rope, elements = 64, 16, 32
    case = Case(cached=[30], new=[0], page_size=4, dtype="f8e4m3", head_size=content + 8 + 2 * rope,
                value_size=content, rope=rope, inline_scales=elements)  # fmt: skip
    problem, rng = case.problem, np.random.default_rng(7)
    stored = reference.latent_rows(problem.caches(1)[0], 0, np.arange(30), content + rope, elements)[:, 0]
    tokens = rng.permutation(30)[:32].astype(np.int32)
    tokens[[2, 9]] = -1
    lists = np.full((2, 30), 1 << 30, np.int32)
    logical, offsets = np.broadcast_to(tokens, (1, 30)), np.array([0, 1], np.uint32)
    pool: Any = problem.collection
    lists[1] = kv.ops.remap_sparse_indices(
        np.ascontiguousarray(logical), offsets, pool.lookup_table, 4, problem.null_page
    )
    x = random_values(rng, (64, content + rope), dtypes.bf16)
    want = np.zeros((64, 32))
    for n, token in enumerate(tokens[:20]):
        if token >= 0:
            want[:, n] = x.astype(np.float64) @ stored[token]
    out = np.full((64, 32), 7.0, np.float32)
    given = (x, problem.collection, lists, out)
    if place == "host":
        of_listed[(1,), 128](*given)
    else:
        Interpreted(place).launch(of_listed, (1, 1, 1), (128, 1, 1), *given)
    np.testing.assert_allclose(out, want, rtol=1e-2, atol=0.1)  # keys are rounded to bf16


@kv.kernel(block=128)
def of_columns(x: kv.Buffer[kv.bf16, 2], pool: kv.KVCacheCollection, out: kv.Buffer[kv.f32, 2]):
    """Products of 64 vectors with keys, times the last columns of these: both loads are of the same tokens."""
    row, cache, count = kv.tile_index(64), pool.get_key_cache(1), pool.cache_length(0)
    q, sums = x.load_rows(row, columns=128), kv.full((64, 64), 0.0)
    for j in range(0, (count + 31) // 32):
        k = cache.tile(0, 0, j * 32, count, rows=32, tail="any")
        v = cache.tile(0, 0, j * 32, count, rows=32, columns=64, first_column=64)
        seen = (j * 32 + kv.tile_index(32))[None, :] < count
        sums = kv.dot(kv.bf16(kv.where(seen, kv.dot(q, k.T), 0.0)), v, sums)
    out.store_rows(row, value=sums)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_columns_of_the_keys_are_values_by_every_instruction(target):
    case = Case(cached=[70], new=[0], page_size=4, head_size=128, value_size=64)
    x, out = random_values(np.random.default_rng(1), (64, 128), dtypes.bf16), np.zeros((64, 64), np.float32)
    keys = model.read(case.problem.caches(1)[0], 0, np.arange(70))[:, 0]
    Interpreted(target).launch(of_columns, (1, 1, 1), (128, 1, 1), x, case.problem.collection, out)
    want = x.astype(np.float64) @ keys.T @ keys[:, 64:]
    np.testing.assert_allclose(out, want, rtol=2e-2, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize(
    ("content", "rope", "why"), [(60, 4, "a head size of a multiple of 8"), (1032, 8, "up to 512"), (128, 16, None)]
)
def test_rows_that_products_do_not_read_by_chunks_are_refused(content, rope, why):
    spec = CacheSpec("paged", dtypes.f8e4m3, num_heads=1, head_size=content + 2 * rope, page_size=16, is_mla=True)
    case = OfKernel(RowFormat(spec, rope), dtypes.bf16, dtypes.bf16, heads=16, value_size=content)
    found = problems(case, by_name("sm_80"), 16)
    assert (found == []) if why is None else why in found[0]


@pytest.mark.parametrize(
    ("name", "columns"),
    [("mma:4x2", 64), ("mma:4x2", 192), ("mma:2x4", 64), ("mma:2x4", 192), ("wgmma:4x2", 64), ("wgmma:4x2", 512)],
)
def test_warps_beside_one_another_hold_every_element_once(name, columns):
    layout = tile_layout.parse(name, (64, columns))
    held = [layout.position(r, lane, w) for w in range(8) for lane in range(32) for r in range(layout.registers)]
    assert len(set(held)) == len(held) == 64 * columns
    rows, across = tile_layout.row_vector(layout), tile_layout.column_vector(layout)
    assert tile_layout.parse(str(rows), (64,)) == rows
    assert tile_layout.parse(str(across), (columns,)) == across
    assert rows.replicas == 4 * int(name[-1])


def test_each_warpgroup_beside_another_has_the_columns_of_one_instruction():
    both, one = (tile_layout.parse(name, (64, n)) for name, n in (("wgmma:4x2", 128), ("wgmma", 64)))
    for warp, lane, r in itertools.product(range(8), range(32), range(one.registers)):
        row, column = one.position(r, lane, warp % 4)
        assert both.position(r, lane, warp) == (row, column + 64 * (warp // 4))


@pytest.mark.parametrize("name", ["wgmma:4x2", "mma:3x2", "mma:4x3"])
def test_only_powers_of_two_of_warps_and_of_their_columns_stand_beside_one_another(name):
    with pytest.raises(ValueError, match=r"warps|adjacent columns of a stack must be a power of two"):
        tile_layout.parse(name, (192, 96))
