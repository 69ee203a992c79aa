# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores of any size: every kernel of attention against float64, on the host and as a GPU's code in the interpreter.

What a row's scores are says an array, through a score function; or the query, whose products with keys are as large.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.attention_functions import problem_of, query_of, run
from reference.case import Case
from reference.places import Interpreted, Place
from reference.random_caches import Problem, random_query

import kvarn as kv

pytestmark = pytest.mark.whole

LARGEST = float(np.finfo(np.float32).max)
COUNTED = 2.2e38  # a score that is further from 0 counts as one of 2.2e38 to 2.4e38
# Far from 0, at and beyond numbers whose last place is a unit, and 128 powers of two, and at the ends of f32.
SIZES = (1e5, 1.7e7, 9.4e7, 1e9, 1.5e9, 1e12, 1e16, 1e18, 1e20, 1e25, 1e30, 1e38, 3e38, LARGEST)
TILE = {"kind": "tile", "rows": 64, "keys": 16}
DECODE = {"kind": "decode", "max_queries": 4, "max_batch": 2}
KERNELS: dict[str, tuple[str, Any, str, dict[str, Any]]] = {
    "host": ("host", None, "f32", {}),
    "host, a row at a time": ("host", None, "f32", {"head_size": 1}),
    "host, 8-bit keys": ("host", None, "f8e4m3", {}),
    "tiles by wgmma": ("sm_90a", TILE, "f16", {}),
    "tiles by wgmma, 8-bit keys": ("sm_90a", TILE, "f8e4m3", {}),
    "tiles by mma.sync": ("sm_80", TILE, "f16", {}),
    "tiles of f32": ("sm_90a", TILE, "f32", {}),
    "a warp a row": ("sm_90a", {"kind": "simt"}, "f32", {}),
    "decode": ("sm_90a", DECODE, "f16", {}),
}


def problem_for(name: str, cached: int = 40) -> tuple[Problem, np.ndarray, int]:
    """A problem of one sequence with as many new tokens as a kernel takes, a query, and how many these are."""
    _, schedule, dtype, shape = KERNELS[name]
    new = 4 if schedule is DECODE else 28
    rng, problem = problem_of(11, "paged", dtype, **{"cached": [cached], "new": [new], **shape})
    return problem, query_of(rng, problem, 2), new


def pool_of(problem: Problem) -> Any:
    return problem.collection


def from_array(score, b, h, q, k, z):
    return z[q, k]


def tables(rows: int, positions: int, first: int) -> list[np.ndarray]:
    """Scores of (query position, key position), f32, each row by a rule and a size of its own."""
    rng = np.random.default_rng(5)
    sizes = [sign * size for size in SIZES for sign in (-1.0, 1.0)]
    ordinary = rng.standard_normal((positions, positions))
    hidden = rng.random(positions) < 0.7
    hidden[positions - rows - 3] = False
    rules = [
        lambda row, v: np.full(positions, v),  # all alike
        lambda row, v: np.where(hidden, v, row),  # some far from the others
        lambda row, v: np.where(np.arange(positions) < 20, v, row),  # a tile of them first
        lambda row, v: np.where(np.arange(positions) < 20, row, v),  # and last
        lambda row, v: rng.choice([v, -v, v / 2], positions),
        lambda row, v: rng.choice([-1.0, 1.0], positions) * 10.0 ** rng.uniform(-3, 38, positions),
    ]
    found = []
    for rule in rules:
        for begin in range(0, len(sizes), rows):
            z = ordinary.copy()
            for i, v in enumerate(sizes[begin : begin + rows]):
                z[first + i] = rule(ordinary[first + i], v)
            with np.errstate(over="ignore"):
                found.append(np.clip(z, -LARGEST, LARGEST).astype(np.float32))
    return found


def assert_right(name: str, got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray]) -> None:
    (out, lse), (wanted, wanted_lse) = got, want
    tolerance = {"f32": 1e-4, "f16": 4e-3, "f8e4m3": 6e-3}[KERNELS[name][2]]
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)
    held = np.clip(wanted_lse, -COUNTED, COUNTED)
    np.testing.assert_allclose(np.clip(lse.astype(np.float64), -COUNTED, COUNTED), held, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("name", KERNELS)
def test_every_finite_score_has_the_weight_that_it_has_in_float64(name):
    target, schedule, _, _ = KERNELS[name]
    problem, query, new = problem_for(name)
    found = tables(new, 68, 40)
    for z in found if target == "host" or new > 4 else found[::3]:
        got = run(problem, query, score=(from_array, z), target=target, schedule=schedule)
        want = reference.attention(
            problem.collection, 1, query, problem.row_offsets, score=lambda x, b, h, q, k, z=z: z[q, k].astype(float)
        )
        assert_right(name, got, want)


@pytest.mark.parametrize("name", KERNELS)
def test_minus_infinity_hides_a_key_and_what_else_is_no_number_makes_its_row_none(name):
    target, schedule, _, _ = KERNELS[name]
    problem, query, new = problem_for(name)
    z = np.random.default_rng(6).standard_normal((68, 68)).astype(np.float32)
    z[40] = -np.inf
    z[41, 3:38] = -np.inf
    z[42, 11], z[43, 29] = np.inf, np.nan
    out, lse = run(problem, query, score=(from_array, z), target=target, schedule=schedule)
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()
    assert np.isnan(out[2:4].astype(np.float32)).all()
    assert not np.isfinite(lse[2:4]).any()
    of_reference = np.where(np.isnan(z) | np.isposinf(z), 0.0, z).astype(float)
    want = reference.attention(
        problem.collection, 1, query, problem.row_offsets, score=lambda x, b, h, q, k: of_reference[q, k]
    )
    finite = [1, *range(4, new)]
    assert_right(name, (out[finite], lse[finite]), (want[0][finite], want[1][finite]))


LATENT = {"kind": "latent", "splits": 1}
LATENTS: dict[str, tuple[Any, str, int, Any, int]] = {
    "host": (Place(), "f32", 2, None, 28),
    "a warp a row": (Interpreted("sm_90a"), "f16", 2, {"kind": "simt"}, 4),
    "64 query rows": (Interpreted("sm_90a"), "f16", 16, LATENT, 28),
    "few query rows": (Interpreted("sm_90a"), "f16", 8, {**LATENT, "max_queries": 2}, 2),
    "few query rows, 8-bit keys": (Interpreted("sm_90a"), "f8e4m3", 8, {**LATENT, "max_queries": 2}, 2),
    "64 query rows, 8-bit keys": (Interpreted("sm_90a"), "f8e4m3", 16, LATENT, 28),
    "tiles by mma.sync": (Interpreted("sm_80"), "f16", 16, LATENT, 28),
}


def latent_case(name: str, **more: Any) -> tuple[Place, Case]:
    """Where a kernel runs, and a case of its rows."""
    place, dtype, heads, schedule, new = LATENTS[name]
    given = {
        "cached": [40], "new": [new], "dtype": dtype, "query": "f16" if dtype == "f8e4m3" else "", "group": heads,
        "head_size": 144, "value_size": 128, "page_size": 64, "schedule": schedule or {}, "seed": 13, **more,
    }  # fmt: skip
    return place, Case(**given)


@pytest.mark.parametrize("name", LATENTS)
def test_every_finite_score_of_latent_rows_has_the_weight_that_it_has_in_float64(name):
    new = LATENTS[name][-1]
    for z in tables(new, 68, 40)[:: 2 if new > 4 else 9]:
        scores = (from_array, z), lambda x, b, h, q, k, z=z: z[q, k].astype(float)
        place, case = latent_case(name, score=scores)
        (out, lse), (want, wanted_lse) = case.run(place), case.want()
        np.testing.assert_allclose(out.astype(np.float64), want, rtol=2e-2, atol=8e-3)
        held = np.clip(wanted_lse, -COUNTED, COUNTED)
        np.testing.assert_allclose(np.clip(lse.astype(np.float64), -COUNTED, COUNTED), held, rtol=1e-5, atol=8e-3)


# --- rows by themselves -------------------------------------------------------------------------------------------


def with_other_rows(first: int, new: int) -> list[np.ndarray]:
    """Scores whose every third row is the same: large enough that another form of weights has other bits."""
    own = (3e4 + np.random.default_rng(7).standard_normal((68, 68))).astype(np.float32)
    found = [own]
    for rest in (1e30, -np.inf, np.nan):
        z = own.copy()
        z[[first + i for i in range(new) if i % 3]] = rest
        found.append(z)
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_has_the_same_bits_whatever_the_scores_of_other_rows_are(name):
    target, schedule, _, _ = KERNELS[name]
    problem, query, new = problem_for(name)
    found = [
        run(problem, query, score=(from_array, z), target=target, schedule=schedule) for z in with_other_rows(40, new)
    ]
    for got in found[1:]:
        for x, want in zip(got, found[0], strict=True):
            np.testing.assert_array_equal(x[::3], want[::3])


@pytest.mark.parametrize("name", LATENTS)
def test_a_latent_row_has_the_same_bits_whatever_the_scores_of_other_rows_are(name):
    found = []
    for z in with_other_rows(40, LATENTS[name][-1]):
        place, case = latent_case(name, score=((from_array, z), None))
        found.append(case.run(place))
    for got in found[1:]:
        for x, want in zip(got, found[0], strict=True):
            np.testing.assert_array_equal(x[::3], want[::3])


# --- products, sinks and partial results as large ---------------------------------------------------------------


def with_keys(problem: Problem, columns: np.ndarray) -> None:
    """Make keys zeros but for their first element, which is one of some numbers; what is no token stays NaN."""
    keys = pool_of(problem).blocks[:, 0]
    there = ~np.isnan(keys.astype(np.float32))
    first = np.zeros(keys.shape, np.float32)
    first[..., 0] = np.resize(columns, keys.shape[:-1])
    keys[there] = first.astype(keys.dtype)[there]


SCALED = (1e3, -1e6, 1e9, -1e12, 1e15, -1e18, 1e22, 1e27, -1e30, 1e36)


@pytest.mark.parametrize("name", KERNELS)
def test_products_of_any_size_have_the_weights_that_they_have_in_float64(name):
    target, schedule, _, shape = KERNELS[name]
    dtype = {"f16": "bf16"}.get(KERNELS[name][2], KERNELS[name][2])
    new = 4 if schedule is DECODE else 28
    rng, problem = problem_of(12, "paged", dtype, **{"cached": [300], "new": [new], **shape})
    with_keys(problem, np.array([1.0, 0.5, -1.0, 0.0, 1.0, 0.75, -0.5]))
    query = random_query(rng, problem, 4)
    query[:] = 0
    query[..., 0] = np.resize(SCALED, (new, 4)).astype(query.dtype)
    out, lse = run(problem, query, target=target, schedule=schedule)
    want, wanted_lse = reference.attention(problem.collection, 1, query, problem.row_offsets)
    tolerance = 1e-4 if dtype == "f32" else 2e-2
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("name", LATENTS)
def test_products_of_latent_rows_of_any_size_have_their_weights(name):
    """Few rows see one tile: several are combined by log-sum-exps, whose last place is more than the log of a sum."""
    _, dtype, heads, _, new = LATENTS[name]
    more = {"dtype": {"f16": "bf16"}.get(dtype, dtype), "query": "", "cached": [300 if new > 4 else 40]}
    place, case = latent_case(name, **more, seed=19)
    keys = pool_of(case.problem).blocks
    values = keys.copy()
    with_keys(case.problem, np.array([1.0, 0.5, -1.0, 0.0, 1.0, 0.75, -0.5]))
    keys[..., 1:128] = values[..., 1:128]  # which the query does not multiply
    query = case.query_rows
    query[:] = 0
    query[..., 0] = np.resize(SCALED, (new, heads)).astype(query.dtype)
    (out, lse), (want, wanted_lse) = case.run(place), case.want()
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=3e-2, atol=2e-2)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=8e-3)


FINISHES = {
    name: KERNELS[name] for name in ("host", "host, a row at a time", "tiles by wgmma", "a warp a row", "decode")
}


@pytest.mark.parametrize("name", FINISHES)
def test_sinks_and_prior_results_of_any_size_have_their_weight(name):
    target, schedule, _, _ = KERNELS[name]
    problem, query, _ = problem_for(name)
    rng = np.random.default_rng(4)
    prior = rng.standard_normal(query.shape).astype(np.float32)
    rows = query.shape[0], query.shape[1]
    for own in (0.0, -1e9, -1e30, 1e30):
        z = np.full((68, 68), own, np.float32)
        sinks = np.array([-LARGEST, -1e9, 1e9, -np.inf], np.float32)
        prior_lse = np.resize(np.array([-1e30, 1e30, 2.0, -np.inf, -1e9, LARGEST], np.float32), rows)
        alike: dict[str, Any] = {"score": lambda x, b, h, q, k: 0.0 * x}
        values, counts = reference.attention(problem.collection, 1, query, problem.row_offsets, **alike)
        for given in ({"sinks": sinks}, {"prior": prior, "prior_lse": prior_lse}):
            out, _ = run(problem, query, score=(from_array, z), target=target, schedule=schedule, **given)
            other = np.broadcast_to(sinks, rows) if "sinks" in given else prior_lse
            top = np.maximum(np.float32(own), other)
            a, b = np.exp(counts + (np.float64(np.float32(own)) - top)), np.exp(np.float64(other) - top)
            beside = 0.0 if "sinks" in given else prior * (b / (a + b))[..., None]
            want = values * (a / (a + b))[..., None] + beside
            np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


SPLIT = {
    "tiles": {"kind": "tile", "rows": 64, "keys": 64, "splits": 3, "max_queries": 2},
    "decode": {"kind": "decode", "max_queries": 2, "max_batch": 1, "tile": 32},
    "decode, whatever the batch": {"kind": "decode", "max_queries": 2, "max_batch": 1, "tile": 32, "split_size": 64},
    "decode, sums of splits": {
        "kind": "decode",
        "max_queries": 2,
        "max_batch": 4,
        "tile": 32,
        "split_size": 64,
        "combine": 0,
    },
}


@pytest.mark.parametrize("name", SPLIT)
def test_partial_results_of_any_size_have_their_weight(name):
    keys = 2600 if name == "tiles" else 700
    rng, problem = problem_of(14, "paged", "f16", cached=[keys - 2], new=[2], page_size=64)
    query = query_of(rng, problem, 2)
    for far in (-1e9, -LARGEST) if name == "tiles" else (-1e9, -1e30, 1e12, -LARGEST):
        z = np.full(keys, far, np.float32)
        z[rng.integers(0, keys, 5)] = 0.0
        for table in (z, np.full(keys, far, np.float32)):
            out, _ = run(
                problem, query, score=(lambda x, b, h, q, k, z: z[k], table), target="sm_90a", schedule=SPLIT[name]
            )
            want, _ = reference.attention(
                problem.collection, 1, query, problem.row_offsets,
                score=lambda x, b, h, q, k, z=table: z[k].astype(float) + 0 * x,
            )  # fmt: skip
            np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


def of_row(score, b, h, q, k, z):
    return score * 2.0 + z[q]


def of_distance(score, b, h, q, k, z):
    return score + z[q] * kv.f32(k - q)


@pytest.mark.parametrize("function", [of_row, of_distance])
@pytest.mark.parametrize("name", ["host", "tiles by wgmma", "tiles by mma.sync"])
def test_scores_that_are_sums_of_products_have_their_weight_however_large(name, function):
    """Such scores are computed with what makes weights of them, by one multiplication and addition (fold-kv-scores)."""
    target, schedule, dtype, _ = KERNELS[name]
    rng, problem = problem_of(18, "paged", dtype, cached=[150], new=[20], head_size=16)
    keys = pool_of(problem).blocks[:, 0]
    keys[~np.isnan(keys)] = rng.integers(-1, 2, keys[~np.isnan(keys)].shape)
    query = rng.integers(-1, 2, query_of(rng, problem, 2).shape).astype(keys.dtype)
    z = np.zeros(170, np.float32)
    z[150:] = np.resize([0.0, 3.0, -1e3, 1e9, -1e9, 1e12, -1e16, 1e18, -1e25, -1e30, 1e30, 1e35, -1e35], 20)
    if function is of_row:
        z[-2:] = -LARGEST, LARGEST / 4

    def score(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        x, of_query = x.astype(np.float32), z[q]
        found = x * np.float32(2) + of_query if function is of_row else x + of_query * (k - q).astype(np.float32)
        return found.astype(float)

    given = schedule and {**schedule, "keys": 64}
    out, lse = run(problem, query, score=(function, z), target=target, schedule=given)
    want, wanted_lse = reference.attention(problem.collection, 1, query, problem.row_offsets, score=score)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)
    # What is linear in a distance is computed from where a tile begins: within 1e-5 of the slope.
    lse, wanted_lse = (np.clip(x.astype(np.float64), -COUNTED, COUNTED) for x in (lse, wanted_lse))
    bound = 1e-5 * np.abs(wanted_lse) + 2e-3 + (0.0 if function is of_row else 1e-5 * np.abs(z[150:, None]))
    assert (np.abs(lse - wanted_lse) <= bound).all()


# --- softcap and tanh --------------------------------------------------------------------------------------------

CAPS = (1e-3, 0.3, 15.9, 16.1, 50.0, 1e5, 1e18, 1e30, 3e38)
CAPPED = {name: KERNELS[name] for name in ("host", "host, a row at a time", "tiles of f32", "a warp a row")}


def test_a_cap_is_a_number_of_f32():
    problem, query, _ = problem_for("host")
    with pytest.raises(ValueError, match=r"softcap must fit in f32, got 1e\+39; omit it for none"):
        run(problem, query, softcap=1e39, target="host")


def own_tanh(cap: float) -> Any:
    return lambda score, b, h, q, k: cap * kv.math.tanh(score * (1.0 / cap))


@pytest.mark.parametrize("name", CAPPED)
@pytest.mark.parametrize("own", [False, True], ids=["softcap", "tanh"])
def test_capped_scores_of_any_size_are_off_by_at_most_1e_5_of_what_they_were(name, own):
    """A row that sees one key has its score as the logarithm of its sum."""
    target, schedule, dtype, shape = KERNELS[name]
    new = 60 if target == "host" else 20
    rng, problem = problem_of(15, "paged", dtype, **{"cached": [0], "new": [new], **shape})
    with_keys(problem, np.ones(1))
    query = random_query(rng, problem, 4)
    for cap in CAPS[1:8:2] if own else CAPS if target == "host" else CAPS[::2]:
        sizes = np.concatenate([np.geomspace(1e-6, 1e34, 2 * new), cap * np.geomspace(1e-4, 40.0, 2 * new)])
        with np.errstate(over="ignore"):
            query[..., 0] = np.resize(np.clip(sizes, 0, 1e34), (new, 4)) * rng.choice([-1, 1], (new, 4))
        query[..., 1:] = 0
        options: dict[str, Any] = {"score": own_tanh(cap)} if own else {"softcap": cap}
        _, lse = run(problem, query, mask=lambda b, h, q, k: k == 0, target=target, schedule=schedule, **options)
        x = query[..., 0].astype(np.float64) * query.shape[-1] ** -0.5
        error = np.abs(lse - cap * np.tanh(x / cap)) / np.maximum(1.0, np.abs(x))
        assert error.max() < 1e-5, (cap, x.flat[error.argmax()])


# --- values that are no numbers, and what the host computes in ------------------------------------------------------

MASKS: dict[str, tuple[Any, Any]] = {
    "causal": ("causal", lambda q, k: k <= q),
    "window": (kv.masks.sliding_window(7), lambda q, k: (k <= q) & (q - k < 7)),
    "function": (lambda b, h, q, k: (k <= q) & (k % 3 != 1), lambda q, k: (k <= q) & (k % 3 != 1)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["host", "host, a row at a time", "host, 8-bit keys", "a warp a row"])
def test_what_a_row_does_not_see_may_be_anything(name, mask):
    target, schedule, dtype, shape = KERNELS[name]
    given, sees = MASKS[mask]
    rng, problem = problem_of(16, "paged", dtype, **{"cached": [33], "new": [9], "num_heads": 1, **shape})
    query, blocks, table = query_of(rng, problem, 2), pool_of(problem).blocks, pool_of(problem).lookup_table
    want, _ = run(problem, query, mask=given, target=target, schedule=schedule)
    page = blocks.shape[3]
    for token in (0, 25, 29, 34, 37, 41) if target == "host" else (29, 37):
        for half in (0, 1):
            at = table[0, token // page], half, 1, token % page
            kept = blocks[at].copy()
            blocks[at] = np.nan if token % 2 or dtype == "f8e4m3" else np.inf
            out, _ = run(problem, query, mask=given, target=target, schedule=schedule)
            blocks[at] = kept
            seen = sees(33 + np.arange(9), token)
            np.testing.assert_array_equal(out[~seen], want[~seen])
            if seen.any() and (token % 2 or half):
                assert not np.isfinite(out[seen].astype(np.float32)).any(-1).all()


@pytest.mark.parametrize("mask", ["window", "chunk"])
@pytest.mark.parametrize("name", [name for name, (target, *_) in KERNELS.items() if target != "host"])
def test_a_key_that_no_row_sees_by_a_bound_is_not_multiplied(name, mask):
    """On a GPU: keys before the window or the chunk of the first row, in its tile of keys and in others."""
    target, schedule, dtype, shape = KERNELS[name]
    rng, problem = problem_of(16, "paged", dtype, **{"cached": [133], "new": [3], "num_heads": 1, **shape})
    query, blocks, table = query_of(rng, problem, 2), pool_of(problem).blocks, pool_of(problem).lookup_table
    given = {"window": kv.masks.sliding_window(8), "chunk": kv.masks.chunked_causal(21)}[mask]  # from keys 126 on
    want, _ = run(problem, query, mask=given, target=target, schedule=schedule)
    for token in (0, 64, 120, 125):
        blocks[table[0, token // blocks.shape[3]], 1, 1, token % blocks.shape[3]] = np.nan
    out, _ = run(problem, query, mask=given, target=target, schedule=schedule)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(
    ("dtype", "query_type", "scaled"),
    [("bf16", "bf16", False), ("f16", "f16", False), ("f8e4m3", "f32", False), ("f8e4m3", "bf16", False),
     ("f8e4m3", "bf16", True), ("f8e4m3", "f16", True), ("i8", "bf16", True), ("i8", "f32", True)],
)  # fmt: skip
def test_the_host_computes_in_f32(dtype, query_type, scaled):
    """Weights and keys with scales are not rounded to the query's type: only the output is."""
    scales: dict[str, Any] = {"scale_dtype": "f32", "granularity": 32} if scaled else {}
    rng, problem = problem_of(17, "paged", dtype, cached=[90, 3], new=[5, 20], **scales)
    query = random_query(rng, problem, 4, query_type)
    out, lse = run(problem, query, target="host")
    want, wanted_lse = reference.attention(problem.collection, 1, query, problem.row_offsets)
    rounding = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 1e-5}[query_type]
    assert (np.abs(out.astype(np.float64) - want) <= 1.01 * rounding * np.abs(want) + 1e-5 * np.abs(want).max()).all()
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-6, atol=2e-5)
