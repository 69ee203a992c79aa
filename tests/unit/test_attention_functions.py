# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores and masks of attention as functions: on the host, and as PTX run by the interpreter of ``kvarn.emulator``.

What holds no cached token is NaN, and an access outside the buffers is an error.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.random_caches import Problem, random_query, stored_problem

import kvarn as kv
from kvarn.caches import KVCacheMHAOperand, PagedKVCacheCollection
from kvarn.dsl import functions as registry
from kvarn.emulator import run as emulated
from kvarn.ops import functions, reads

LENGTHS = {"cached": [150, 0, 30], "new": [20, 40, 1]}
SMALL = {"cached": [40, 0], "new": [20, 7]}


def problem_of(seed: int, kind: str = "paged", dtype: str = "f16", **shape: Any) -> tuple[Any, Problem]:
    return stored_problem(seed, kind, dtype, **{"head_size": 32, "num_heads": 2, **SMALL, **shape})


def query_of(rng: Any, problem: Problem, group: int) -> np.ndarray:
    return random_query(rng, problem, group * problem.collection.cache_spec.num_heads, over_8_bits="f16")


def run(problem: Problem, query: np.ndarray, *, score: Any = None, mask: Any = "causal", softcap: Any = None,
        schedule: Any = None, target: str = "sm_90a", **operands: Any) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The output and the log-sum-exp, as ``kv.ops.attention`` makes its call."""
    attributes, arrays = reads._modified(score, mask, None, None, softcap, "kv.ops.attention")
    out, lse = np.full_like(query, 72.0), np.full(query.shape[:2], 72.0, np.float32)
    names = ("sinks", "lse", "kv_offsets", "alibi_slopes")
    rest = [{"lse": lse, **operands}.get(name) for name in names]
    given = (problem.collection, 1, query, problem.row_offsets, query.shape[-1] ** -0.5, out, *rest, *arrays)
    if target == "host":
        reads._ATTENTION(given, attributes, schedule, None)
    else:
        emulated.run(reads._ATTENTION, given, attributes, schedule, target)
    return out, lse


def check(problem: Problem, query: np.ndarray, numpy_score: Any = None, numpy_mask: Any = None, **options: Any) -> None:
    out, lse = run(problem, query, **options)
    want, want_lse = reference.function_attention(
        problem.collection, 1, query, problem.row_offsets, score=numpy_score, mask=numpy_mask
    )
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)
    nothing = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), nothing)
    np.testing.assert_allclose(lse[~nothing], want_lse[~nothing], rtol=2e-3, atol=2e-3)


# --- the functions, as users write them ----------------------------------------------------------------


def t5(score, b, h, q, k, bias, buckets):
    return score + bias[h, buckets[q - k]]


def kerple(score, b, h, q, k, r1, r2):
    return score - r1[h] * kv.math.log(1.0 + r2[h] * kv.f32(kv.math.abs(q - k)))


def document(b, h, q, k, ids):
    return ids[b, q] == ids[b, k]


def prefix(b, h, q, k, lengths):
    return (k <= q) | (k < lengths[b])


def dilated(size, step):
    def mask(b, h, q, k):
        return (k <= q) & (q - k < size * step) & ((q - k) % step == 0)

    return mask


def gemma(cap):
    return lambda score, b, h, q, k: cap * kv.math.tanh(score / cap)


def cooled(score, b, h, q, k, temperatures):
    return score * temperatures[q]


def t5_buckets(longest: int, count: int = 16, farthest: int = 64) -> np.ndarray:
    distance = np.arange(longest)
    exact = count // 2
    far = exact + np.log(np.maximum(distance, 1) / exact) / np.log(farthest / exact) * (count - exact)
    return np.where(distance < exact, distance, np.minimum(far, count - 1)).astype(np.int32)


# --- what they compute ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90a", "host"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("kind", "dtype"), [("paged", "f16"), ("paged", "bf16"), ("paged", "f8e4m3"),
                                             ("continuous", "f16"), ("fa3", "f16")])  # fmt: skip
def test_a_bias_by_distance_buckets_and_a_document_mask_over_every_cache(target, group, kind, dtype):
    rng, problem = problem_of(1, kind, dtype)
    query = query_of(rng, problem, group)
    if dtype == "bf16":
        query = query.astype(np.float32).astype(query.dtype)
    bias, buckets = rng.standard_normal((2 * group, 16)).astype(np.float32), t5_buckets(60)
    ids = np.sort(rng.integers(0, 3, (2, 60)), axis=1).astype(np.int32)

    def numpy_score(x, b, h, q, k):
        return x + bias[h, buckets[np.maximum(q - k, 0)]]

    def numpy_mask(b, h, q, k):
        return (k <= q) & (ids[b, q] == ids[b, k])

    out, _ = run(problem, query, score=(t5, bias, buckets), mask=(kv.masks.causal & document, ids), target=target)
    want, _ = reference.function_attention(
        problem.collection, 1, query, problem.row_offsets, score=numpy_score, mask=numpy_mask
    )
    tolerance = 2e-2 if dtype == "bf16" else 4e-3
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("target", ["sm_90a", "host"])
def test_scores_fall_with_the_logarithm_of_the_distance(target):
    rng, problem = problem_of(2, **LENGTHS)
    query = query_of(rng, problem, 2)
    r1, r2 = (rng.random(4).astype(np.float32) for _ in range(2))

    def numpy_score(x, b, h, q, k):
        return x - r1[h] * np.log(1 + r2[h] * np.abs(q - k))

    check(problem, query, numpy_score, score=(kerple, r1, r2), target=target)


@pytest.mark.parametrize("target", ["sm_90a", "host"])
def test_a_prefix_is_seen_by_all_and_the_rest_causally(target):
    rng, problem = problem_of(3, cached=[0, 0, 100], new=[150, 20, 40], num_heads=1)
    query, lengths = query_of(rng, problem, 2), np.array([140, 0, 120], np.uint32)
    check(problem, query, None, lambda b, h, q, k: (k <= q) | (k < lengths[b]), mask=(prefix, lengths), target=target)


@pytest.mark.parametrize(("size", "step"), [(5, 3), (10, 16)])
def test_a_dilated_window(size, step):
    rng, problem = problem_of(4, **LENGTHS)

    def numpy_mask(b, h, q, k):
        return (k <= q) & (q - k < size * step) & ((q - k) % step == 0)

    check(problem, query_of(rng, problem, 2), None, numpy_mask, mask=dilated(size, step))


def test_a_softcap_as_a_function_is_the_built_in_one():
    rng, problem = problem_of(5)
    query = query_of(rng, problem, 4)
    as_function, _ = run(problem, query, score=gemma(2.0))
    built_in, _ = run(problem, query, softcap=2.0, schedule={"kind": "tile"})
    np.testing.assert_allclose(as_function.astype(np.float32), built_in.astype(np.float32), rtol=2e-3, atol=1e-3)


def test_a_temperature_by_position_and_heads_that_see_different_keys():
    rng, problem = problem_of(6)
    query, temperatures = query_of(rng, problem, 4), (0.5 + rng.random(60)).astype(np.float16)

    def cooled_half(score, b, h, q, k, temperatures):
        return score * kv.f32(temperatures[q])

    def numpy_mask(b, h, q, k):
        return (k <= q) & ((h % 2 == 0) | (q - k < 9))

    check(
        problem, query, lambda x, b, h, q, k: x * temperatures.astype(np.float64)[q], numpy_mask,
        score=(cooled_half, temperatures), mask=kv.masks.causal & (lambda b, h, q, k: (h % 2 == 0) | (q - k < 9)),
    )  # fmt: skip


def test_functions_come_after_the_softcap_and_the_slopes():
    rng, problem = problem_of(7)
    query, slopes = query_of(rng, problem, 2), np.array([0.5, 0.25, 0.125, -0.1], np.float32)

    def numpy_score(x, b, h, q, k):
        return 2 * (3 * np.tanh(x / 3) + slopes[h] * (k - q))

    check(problem, query, numpy_score, score=lambda s, b, h, q, k: 2.0 * s, softcap=3.0, alibi_slopes=slopes)


def test_a_score_may_be_a_number_or_depend_on_one_position_alone():
    rng, problem = problem_of(8)
    query = query_of(rng, problem, 1)
    check(problem, query, lambda x, b, h, q, k: 0.0 * x, score=lambda s, b, h, q, k: 0.0)
    check(problem, query, lambda x, b, h, q, k: 0.0 * x + k / 9, score=lambda s, b, h, q, k: kv.f32(k) / 9.0)


def halved(score, b, h, q, k, times):
    for _ in range(times[b]):
        score = score * 0.5
    return score


def halved_while(score, b, h, q, k, times):
    i = kv.i32(0)
    while i < times[b]:
        score, i = score * 0.5, i + 1
    return score


def without_some(b, h, q, k, counts):
    seen = k <= q
    for i in range(counts[b]):
        seen = seen & (k != i)
    return seen


@pytest.mark.parametrize("schedule", [None, {"kind": "tile", "producer": False, "overlap": False}, "host"])
@pytest.mark.parametrize("function", [halved, halved_while, without_some])
def test_functions_loop_a_number_of_times_that_an_array_holds(function, schedule):
    rng, problem = problem_of(9)
    query, times = query_of(rng, problem, 2), np.arange(len(problem.row_offsets) - 1, dtype=np.int32) % 4
    if function is without_some:
        given = {"mask": (function, times), "numpy_mask": lambda b, h, q, k: (k <= q) & (k >= times[b])}
    else:
        given = {"score": (function, times), "numpy_score": lambda x, b, h, q, k: x * 0.5 ** times[b]}
    how = {"target": "host"} if schedule == "host" else {"schedule": schedule}
    check(problem, query, **given, **how)


@pytest.mark.parametrize(
    ("named", "made"),
    [
        ({}, kv.masks.causal),
        ({"mask": "sliding_window", "window": 9}, kv.masks.sliding_window(9)),
        ({"mask": "chunked", "chunk": 24}, kv.masks.chunked(24)),
        ({"mask": "chunked_causal", "chunk": 24}, kv.masks.chunked(24) & kv.masks.causal),
    ],
    ids=["causal", "sliding_window", "chunked", "chunked_causal"],
)
def test_a_named_mask_is_a_function_of_kv_masks(named, made):
    rng, problem = problem_of(9)
    query = query_of(rng, problem, 2)
    out, _ = run(problem, query, mask=made)
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, **named)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


def test_masks_combine_by_and_or_and_not_with_their_own_arrays():
    rng, problem = problem_of(10, num_heads=1)
    query = query_of(rng, problem, 2)
    ids, hidden = rng.integers(0, 2, (2, 60)).astype(np.int32), rng.integers(0, 2, (2, 60)).astype(np.int8)

    def concealed(b, h, q, k, hidden):
        return hidden[b, k] != 0

    mask = (kv.masks.causal & ~kv.masks.Mask(concealed)) | (document & kv.masks.sliding_window(5))

    def numpy_mask(b, h, q, k):
        near = (k <= q) & (q - k < 5) & (ids[b, q] == ids[b, k])
        return ((k <= q) & (hidden[b, k] == 0)) | near

    check(problem, query, None, numpy_mask, mask=(mask, hidden, ids))


def test_rows_that_see_nothing_are_zeros():
    rng, problem = problem_of(11)
    out, lse = run(problem, query_of(rng, problem, 2), mask=lambda b, h, q, k: (k <= q) & (q % 3 == 0))
    start = np.concatenate([40 + np.arange(20), np.arange(7)])
    assert (out[start % 3 != 0] == 0).all()
    assert np.isneginf(lse[start % 3 != 0]).all()
    assert np.isfinite(lse[start % 3 == 0]).all()


def test_where_pages_lie_does_not_matter_to_a_bit():
    rng, problem = problem_of(12, **LENGTHS)
    query, ids = query_of(rng, problem, 2), np.sort(rng.integers(0, 3, (3, 200)), axis=1).astype(np.int32)
    mask = (kv.masks.causal & document, ids)
    out, lse = run(problem, query, score=gemma(3.0), mask=mask)
    c = problem.collection
    order = rng.permutation(len(c.blocks))
    table = np.argsort(order)[c.lookup_table].astype(np.uint32)
    moved = PagedKVCacheCollection(c.blocks[order], c.cache_lengths, table, c.max_seq_length, c.max_cache_length)
    problem.collection = moved
    again, lse_again = run(problem, query, score=gemma(3.0), mask=mask)
    np.testing.assert_array_equal(out, again)
    np.testing.assert_array_equal(lse, lse_again)


def test_positions_outside_of_an_array_read_its_edge():
    """The last tile has positions past every key, and the arrays end where a caller thinks that they may."""
    rng, problem = problem_of(13, cached=[3], new=[2], num_heads=1)
    query, bias = query_of(rng, problem, 1), np.array([0.5, -0.5, 2.0], np.float32)
    check(
        problem, query, lambda x, b, h, q, k: x + bias[np.clip(q - k, 0, 2)],
        score=(lambda s, b, h, q, k, bias: s + bias[q - k], bias),
    )  # fmt: skip


def test_keys_before_a_named_window_may_be_anything_also_in_a_conjunction():
    rng, problem = problem_of(14, cached=[100], new=[2], num_heads=1)
    query, ids = query_of(rng, problem, 2), np.zeros((1, 102), np.int32)
    for cache in problem.caches(1):
        t = np.arange(80)[:, None, None]
        cache.store(0, np.zeros((1, 1), int), t, np.arange(32), np.full((80, 1, 32), np.nan, np.float16))
    out, _ = run(problem, query, mask=(kv.masks.sliding_window(20) & document, ids))
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, mask="sliding_window", window=20)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


def poisoned(problem: Problem, tokens: slice) -> None:
    """NaN in some values of sequence 0: whoever visits their tile shows it."""
    cache = problem.caches(1)[1]
    t = np.arange(1000)[tokens][:, None, None]
    cache.store(0, np.zeros((1, 1), int), t, np.arange(32), np.full((len(t), 1, 32), np.nan, np.float16))


def test_tiles_before_a_bound_that_a_function_compares_with_are_not_visited():
    rng, problem = problem_of(20, cached=[300], new=[9], num_heads=1)
    poisoned(problem, slice(0, 128))
    out, _ = run(problem, query_of(rng, problem, 2), mask=dilated(15, 3))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("written", ["and", "or"])
def test_tiles_after_a_bound_are_not_visited_beside_what_is_read(written):
    rng, problem = problem_of(21, cached=[0], new=[210], num_heads=1)
    poisoned(problem, slice(128, 210))
    query, ids = query_of(rng, problem, 2), np.zeros((1, 210), np.int32)
    prefixes = np.array([10], np.int32)
    mask = (kv.masks.causal & document, ids) if written == "and" else (prefix, prefixes)
    out, _ = run(problem, query, mask=mask)
    assert np.isfinite(out[:96]).all()  # a block of queries, which ends before the poison
    assert np.isnan(out[128:]).all()


def test_the_padded_form_and_operands_take_functions():
    rng, problem = problem_of(15, num_heads=1)
    query, slopes = query_of(rng, problem, 2), np.array([0.5, 0.25], np.float32)
    score = (lambda s, b, h, q, k, slopes: s + slopes[h] * kv.f32(k - q), slopes)
    attributes, arrays = reads._modified(score, kv.masks.causal, None, None, None, "kv.ops.attention")
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, alibi_slopes=slopes)
    rest = (query.shape[-1] ** -0.5,)
    c = problem.collection
    padded = reference.padded(query, problem.row_offsets, 20, 0.0)
    out = np.zeros_like(padded)
    lengths = problem.new.astype(np.uint32)
    operands = (c, 1, padded, lengths, *rest, out, None, None, None, None, *arrays)
    emulated.run(reads._ATTENTION_PADDED, operands, attributes, None, "sm_90a")
    rows = np.concatenate([out[0, :20], out[1, :7]])
    np.testing.assert_allclose(rows.astype(np.float64), want, rtol=4e-3, atol=4e-3)
    keys, values = (KVCacheMHAOperand(cache) for cache in (c.get_key_cache(1), c.get_value_cache(1)))
    out = np.zeros_like(query)
    operands = (keys, values, query, problem.row_offsets, *rest, out, None, None, None, None, *arrays)
    emulated.run(reads._OPERAND_ATTENTION, operands, attributes, None, "sm_90a")
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


# --- which functions are the same ------------------------------------------------------------------------


def named(function: Any, role: str = "score") -> str:
    return functions.given(function, role, "kv.ops.attention")[0]


def test_closures_with_different_numbers_do_not_share_a_kernel():
    assert named(gemma(2.0)) == named(gemma(2.0))
    assert len({named(gemma(cap)) for cap in (2.0, 3.0, 2, True, -0.0, 0.0)}) == 6
    assert named(dilated(5, 3), "mask") != named(dilated(3, 5), "mask")
    rng, problem = problem_of(16, num_heads=1)
    query = query_of(rng, problem, 1)
    first, second = (run(problem, query, score=gemma(cap))[0] for cap in (0.5, 4.0))
    assert np.abs(first.astype(np.float32) - second).max() > 0.01


def test_masks_are_told_apart_by_their_numbers_parts_and_order():
    made = [
        kv.masks.sliding_window(4), kv.masks.sliding_window(5), kv.masks.chunked(4), kv.masks.chunked_causal(4),
        kv.masks.causal, ~kv.masks.causal, kv.masks.causal & kv.masks.chunked(4), kv.masks.causal | kv.masks.chunked(4),
        kv.masks.causal & kv.masks.chunked(5), kv.masks.causal & document, kv.masks.causal & (lambda b, h, q, k: k > 3),
        kv.masks.chunked(4) & ~kv.masks.sliding_window(4), ~kv.masks.chunked(4) & kv.masks.sliding_window(4),
    ]  # fmt: skip
    names = {named((m, np.zeros((2, 9), np.int32)) if m.arrays else m, "mask") for m in made}
    assert len(names) == len(made)
    assert named(kv.masks.sliding_window(4), "mask") in names


LEVEL = 3.0


def leveled(score, b, h, q, k):
    return score * LEVEL


def test_a_number_of_the_module_that_changed_is_another_function(monkeypatch):
    before = named(leveled)
    monkeypatch.setitem(globals(), "LEVEL", 4.0)
    assert named(leveled) != before
    monkeypatch.setitem(globals(), "LEVEL", 3.0)
    assert named(leveled) == before


def test_a_name_is_the_same_in_another_process(tmp_path):
    """So that the cache on disk has it, and never for another function."""
    text = "def f(size):\n    return lambda b, h, q, k: (k <= q) & (q - k < size)\n"
    (tmp_path / "windows_of_mine.py").write_text(text)
    code = (
        "import windows_of_mine as w, kvarn as kv; from kvarn.ops.functions import given\n"
        "print([given(m, 'mask', '')[0] for m in (w.f(3), w.f(4), kv.masks.chunked(7) & w.f(3))])"
    )
    lines = {
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(lines) == 1
    assert len(set(eval(lines.pop()))) == 3


def test_what_has_no_digest_stays_out_of_the_cache_on_disk():
    class Opaque:
        def __hash__(self):
            return 1

    opaque = Opaque()

    def score(score, b, h, q, k):
        return score if opaque else -score

    with pytest.warns(RuntimeWarning, match="the compile cache is not used"):
        name = named(score)
    assert not registry.registered(name).portable
    assert not registry.are_portable(["causal", name])
    assert named(score) == name


# --- as users call it --------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "attention-functions.md"


@pytest.fixture
def on_a_gpu(monkeypatch):
    """``kv.ops.attention`` on NumPy arrays runs in the interpreter."""
    real = reads._ATTENTION

    def interpreted(operands: Any, attributes: Any, schedule: Any, stream: Any) -> None:
        emulated.run(real, operands, attributes, schedule, "sm_90a")

    monkeypatch.setattr(reads, "_ATTENTION", interpreted)


@pytest.mark.usefixtures("on_a_gpu")
def test_code_of_the_page_runs(tmp_path):
    blocks = re.findall(r"```python sketch\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    found = runpy.run_path(str(tmp_path / "page.py"))
    pool, bias, buckets, ids = (found[name] for name in ("pool", "bias", "buckets", "documents"))
    want, _ = reference.function_attention(
        pool, 0, found["query"], found["offsets"],
        score=lambda x, b, h, q, k: x + bias[h, buckets[np.maximum(q - k, 0)]],
        mask=lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]),
    )  # fmt: skip
    np.testing.assert_allclose(found["out"].astype(np.float64), want, rtol=4e-3, atol=4e-3)
    want, _ = reference.function_attention(
        pool, 0, found["query"], found["offsets"],
        mask=lambda b, h, q, k: (k <= q) & (q - k < 24) & ((q - k) % 3 == 0),
    )  # fmt: skip
    np.testing.assert_allclose(found["dilated"].astype(np.float64), want, rtol=4e-3, atol=4e-3)


# --- what is refused ---------------------------------------------------------------------------------------


def refusal(**options: Any) -> str:
    rng, problem = problem_of(17, num_heads=1)
    with pytest.raises((TypeError, ValueError)) as caught:
        run(problem, query_of(rng, problem, 2), **options)
    return str(caught.value)


def both(b, h, q, k):
    return k <= q and q - k < 5


def between(b, h, q, k):
    return 0 <= q - k < 5


def branching(score, b, h, q, k):
    if q > k:
        return score
    return 0.0


TABLE = np.zeros((2, 60), np.int32)
MISTAKES = [
    ({"score": lambda s, b, h, q: s}, "score: <lambda> must have parameters (score, b, h, q, k) and then one"),
    ({"score": lambda *x: x[0]}, "score: <lambda> must have parameters"),
    ({"mask": lambda s, b, h: s}, "mask: <lambda> must have parameters (b, h, q, k) and then one parameter"),
    ({"mask": document}, "mask takes 1 arrays, which must stand beside it, got 0"),
    ({"mask": (kv.masks.causal, TABLE)}, "mask takes 0 arrays, which must stand beside it, got 1"),
    ({"mask": ("causal", TABLE)}, "arrays go with a mask that is a function, got 'causal' with 1"),
    ({"mask": 3}, "mask must be a name or a function, or a tuple of one and its arrays, got int"),
    ({"score": 3}, "score must be a function, or a tuple of one and its arrays, got int"),
    ({"score": "softcap"}, "score must be a function, or a tuple of one and its arrays, got 'softcap'"),
    ({"score": kv.masks.causal}, "which goes to mask="),
    ({"score": np.tanh}, "a function of positions must be made by def or lambda, got a ufunc"),
    ({"mask": (document, TABLE.astype(np.int64))}, "array 0 of the score and the mask must have dtype"),
    ({"mask": (document, TABLE[:, :0])}, "array 0 of the score and the mask must have at least one element"),
    ({"mask": (document, TABLE[0])}, "an array of 1 dimensions needs 1 indices, got 2"),
    ({"score": lambda s, b, h, q, k: k <= q}, "a score function must return the new score, an f32, got a bool tile"),
    ({"mask": both}, "of tiles write a & b, a | b, ~a"),
    ({"mask": between}, "return 0 <= q - k < 5"),
    ({"score": branching}, "kv.where for if"),
    ({"score": lambda s, b, h, q, k: s.max(axis=1)}, "write x[:, None] or x[None, :] around the vector"),
    ({"score": lambda s, b, h, q, k: None}, "a score function must return the new score, an f32, got None"),
    ({"mask": lambda b, h, q, k: q - k}, "a mask function must return a bool, got a i32 tile"),
    ({"score": lambda s, b, h, q, k: s + (q - k)}, "write kv.f32(x) around the i32"),
    ({"score": lambda s, b, h, q, k: s + TABLE[q]}, "'TABLE' is an array, which must be a parameter"),
    ({"mask": lambda b, h, q, k: k <= q, "schedule": {"kind": "simt"}}, "kind simt takes no score or mask that is a"),
    ({"score": (lambda s, b, h, q, k, u, v, w, x, y: s, *[TABLE] * 5)}, "at most 4 arrays together, got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[m[:40] for _, m in MISTAKES])
def test_a_mistake_is_refused_and_named(options, message):
    assert message in refusal(**options)


def test_an_error_inside_of_a_function_has_its_line():
    def crooked(score, b, h, q, k):
        return score.nothing

    assert "return score.nothing" in refusal(score=crooked)
    assert f"{__file__}:" in refusal(score=crooked)


def test_a_window_beside_a_function_is_refused():
    with pytest.raises(ValueError, match="window and chunk must be None for a mask that is a function"):
        reads._modified(None, kv.masks.causal, 4, None, None, "kv.ops.attention")


def test_a_target_without_the_kernel_says_so():
    rng, problem = problem_of(18, num_heads=1)
    query = query_of(rng, problem, 2)
    attributes, _ = reads._modified(None, kv.masks.causal, None, None, None, "")
    operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy())
    with pytest.raises(ValueError, match="needs a GPU with wgmma, got sm_80"):
        reads._ATTENTION.compile(operands, attributes, None, "sm_80")


def test_heads_of_one_element_have_no_tiles_on_the_host():
    rng, problem = problem_of(18, num_heads=1, head_size=1)
    query = query_of(rng, problem, 2)
    with pytest.raises(ValueError, match="that is a function needs heads of at least 2 elements on the host, got 1"):
        kv.ops.attention(problem.collection, 1, query, problem.row_offsets, mask=kv.masks.causal)


@pytest.mark.parametrize("group", [1, 4])
def test_values_that_a_function_hides_from_all_rows_may_be_anything_on_the_host(group):
    rng, problem = problem_of(20, cached=[40], new=[1], num_heads=1)
    query = query_of(rng, problem, group)
    options = {"mask": lambda b, h, q, k: k >= 37, "target": "host"}
    want, _ = run(problem, query, **options)
    _, values = problem.caches(1)
    values.store(0, 0, np.arange(37)[:, None], np.arange(32), np.full((37, 32), np.nan, np.float16))
    np.testing.assert_array_equal(run(problem, query, **options)[0], want)


def test_ir_names_a_function_that_only_its_own_process_expands():
    rng, problem = problem_of(19, num_heads=1)
    query = query_of(rng, problem, 2)
    attributes, _ = reads._modified(gemma(2.0), kv.masks.causal, None, None, None, "")
    operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy())
    made = reads._ATTENTION.compile(operands, attributes, None, "sm_90a")
    text = made.asm["kv"]
    assert 'mask = "_causal@' in text
    assert 'score = "lambda@' in text
    assert "wgmma.mma_async" in made.asm["ptx"]
    with pytest.raises(ValueError, match="must have been given to an operation in this process"):
        kv.compile(text.replace('mask = "_causal@', 'mask = "_other@'), target="sm_90a")
