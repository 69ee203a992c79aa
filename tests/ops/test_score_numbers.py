# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores of any size: every kernel of attention against float64, on the host and as a GPU's code in the interpreter.

What a row's scores are says an array, through a score function; or the query, whose products with keys are as large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reference.case import LAYER, Case, Mask, WithPrior, assert_same_bits, by_name, on
from reference.edges import ALL
from reference.places import Place

import kvarn as kv

pytestmark = pytest.mark.whole

LARGEST = float(np.finfo(np.float32).max)
COUNTED = 2.2e38  # a score that is further from 0 counts as one of 2.2e38 to 2.4e38
# Far from 0, at and beyond numbers whose last place is a unit, and 128 powers of two, and at the ends of f32.
SIZES = (1e5, 1.7e7, 9.4e7, 1e9, 1.5e9, 1e12, 1e16, 1e18, 1e20, 1e25, 1e30, 1e38, 3e38, LARGEST)
TILE = {"rows": 64, "keys": 16}
FEW = {"max_queries": 4, "max_batch": 2}
ROWS = {"head_size": 144, "value_size": 128, "heads": 1, "page_size": 64}
LATENT = {**ROWS, "schedule": {"splits": 1}, "group": 16}
FEW_LATENT = {**ROWS, "schedule": {"splits": 1, "max_queries": 2}, "group": 8}
# A kernel of reference.case, the new tokens that it takes, and a case.
KERNELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "host": ("host", 28, {"dtype": "f32"}),
    "host, a row at a time": ("host", 28, {"dtype": "f32", "head_size": 1}),
    "host, 8-bit keys": ("host", 28, {"dtype": "f8e4m3"}),
    "tiles by wgmma": ("tile", 28, {"schedule": TILE}),
    "tiles by wgmma, 8-bit keys": ("tile", 28, {"schedule": TILE, "dtype": "f8e4m3"}),
    "tiles by mma.sync": ("mma", 28, {"schedule": TILE}),
    "tiles of f32": ("tile", 28, {"schedule": TILE, "dtype": "f32"}),
    "a warp a row": ("simt", 28, {"dtype": "f32"}),
    "decode": ("decode", 4, {"schedule": FEW}),
    "latent, host": ("host", 28, {**ROWS, "dtype": "f32"}),
    "latent, a warp a row": ("simt", 4, ROWS),
    "latent, 64 query rows": ("latent", 28, LATENT),
    "latent, few query rows": ("latent", 2, FEW_LATENT),
    "latent, few query rows, 8-bit keys": ("latent", 2, {**FEW_LATENT, "dtype": "f8e4m3"}),
    "latent, 64 query rows, 8-bit keys": ("latent", 28, {**LATENT, "dtype": "f8e4m3"}),
    "latent, tiles by mma.sync": ("latent-mma", 28, LATENT),
}


def kernels(*thorough: str) -> Any:
    """Every kernel, some of make check-all alone: those that differ in their elements from one that make check has."""
    marks = [pytest.mark.thorough]
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks if n in thorough else []) for n in KERNELS])


def fewer(of: Sequence[Any], name: str, step: int = 2) -> Sequence[Any]:
    """All of some numbers on the host, and in make check-all; every other one in the interpreter."""
    return of if ALL or "host" in name else of[1::step]


OF_PAGES = [name for name in KERNELS if not name.startswith("latent")]  # keys and values of their own


def case_of(name: str, cached: int = 40, new: int = 0, **more: Any) -> tuple[Place, Case]:
    """Where a kernel runs, and a case of one sequence with as many new tokens as the kernel takes."""
    kernel, takes, given = KERNELS[name]
    case = {"dtype": "f16", "heads": 2, "group": 2, "head_size": 32, "seed": 11, **given, **more}
    case["query"] = case.get("query") or ("f16" if case["dtype"] == "f8e4m3" else "")
    return on(kernel, [cached], [new or takes], **case)


def from_array(score, b, h, q, k, z):
    return z[q, k]


def of_array(z: np.ndarray) -> tuple[Any, Any]:
    """Scores that an array of query and key positions holds."""
    return (from_array, z), lambda x, b, h, q, k: z[q, k].astype(float)


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


def assert_right(case: Case, got: Any, want: Any) -> None:
    """Outputs and log-sum-exps are the model's, of which what is far from 0 counts as that."""
    latent, (out, lse), (wanted, wanted_lse) = case.value_size > 0, got, want
    tolerance = 2e-2 if latent else {"f32": 1e-4, "f16": 4e-3, "f8e4m3": 6e-3, "bf16": 2e-2}[case.dtype]
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=tolerance, atol=min(tolerance, 8e-3))
    held = np.clip(wanted_lse, -COUNTED, COUNTED)
    bound = 8e-3 if latent else 2e-3
    np.testing.assert_allclose(np.clip(lse.astype(np.float64), -COUNTED, COUNTED), held, rtol=1e-5, atol=bound)


@kernels(
    "latent, few query rows", "latent, 64 query rows", "host, 8-bit keys", "latent, tiles by mma.sync", "tiles of f32"
)
def test_every_finite_score_has_the_weight_that_it_has_in_float64(name):
    new, latent = KERNELS[name][1], name.startswith("latent")
    for z in fewer(tables(new, 68, 40)[:: 1 if new > 4 else 9 if latent else 5], name):
        place, case = case_of(name, score=of_array(z))
        assert_right(case, case.run(place), case.want())


@pytest.mark.parametrize("name", OF_PAGES)
def test_minus_infinity_hides_a_key_and_what_else_is_no_number_makes_its_row_none(name):
    z = np.random.default_rng(6).standard_normal((68, 68)).astype(np.float32)
    z[40] = -np.inf
    z[41, 3:38] = -np.inf
    z[42, 11], z[43, 29] = np.inf, np.nan
    place, case = case_of(name, score=of_array(z))
    out, lse = case.run(place)
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()
    assert np.isnan(out[2:4].astype(np.float32)).all()
    assert not np.isfinite(lse[2:4]).any()
    want = replace(case, score=of_array(np.where(np.isnan(z) | np.isposinf(z), 0.0, z))).want()
    finite = [1, *range(4, len(out))]
    assert_right(case, (out[finite], lse[finite]), (want[0][finite], want[1][finite]))


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


EIGHT_BITS = [name for name in KERNELS if "8-bit" in name]


@kernels(*EIGHT_BITS, "latent, 64 query rows", "latent, a warp a row", "tiles of f32")
def test_a_row_has_the_same_bits_whatever_the_scores_of_other_rows_are(name):
    found = []
    for z in with_other_rows(40, KERNELS[name][1]):
        place, case = case_of(name, score=of_array(z))
        found.append(case.run(place))
    for got in found[1:]:
        assert_same_bits([x[::3] for x in got], [x[::3] for x in found[0]])


# --- products, sinks and partial results as large ---------------------------------------------------------------

SCALED = (1e3, -1e6, 1e9, -1e12, 1e15, -1e18, 1e22, 1e27, -1e30, 1e36)


def of_columns(columns: Any, query: Callable[[Case], np.ndarray]) -> Callable[[Case], None]:
    """Keys of zeros but for their first element, which is one of some numbers, as it is of the query.

    What is no token stays NaN; columns of latent rows that are values stay as they are, which the query does not
    multiply.
    """

    def change(case: Case) -> None:
        keys = case.problem.collection.blocks[:, 0]
        there, first = ~np.isnan(keys.astype(np.float32)), np.zeros(keys.shape, np.float32)
        first[..., 1 : case.value_size] = keys[..., 1 : case.value_size]
        first[..., 0] = np.resize(columns, keys.shape[:-1])
        keys[there] = first.astype(keys.dtype)[there]
        rows, of_first = case.query_rows, query(case)
        rows[:] = 0
        rows[..., 0] = of_first.astype(rows.dtype)

    return change


def scaled(case: Case) -> np.ndarray:
    return np.resize(SCALED, case.query_rows.shape[:2])


@kernels(
    "latent, 64 query rows", "latent, few query rows", "host, 8-bit keys", "tiles by wgmma", "tiles of f32", "decode"
)
def test_products_of_any_size_have_the_weights_that_they_have_in_float64(name):
    """Few latent rows see one tile: several are combined by log-sum-exps, whose last place is more than a sum's log."""
    dtype = {"f16": "bf16"}.get(KERNELS[name][2].get("dtype", "f16"), KERNELS[name][2].get("dtype"))
    latent, few = name.startswith("latent"), KERNELS[name][1] <= 4
    change = of_columns([1.0, 0.5, -1.0, 0.0, 1.0, 0.75, -0.5], scaled)
    place, case = case_of(
        name, 40 if latent and few else 300, dtype=dtype, query="bf16" if dtype == "f8e4m3" else "", seed=12,
        change=change,
    )  # fmt: skip
    (out, lse), (want, wanted_lse) = case.run(place), case.want()
    tolerance = 3e-2 if latent else 1e-4 if dtype == "f32" else 2e-2
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=tolerance, atol=min(tolerance, 2e-2))
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=8e-3 if latent else 2e-3)


class Beside(WithPrior):
    """Beside a result with sums of any size."""

    def prior(self, case: Case) -> Any:
        prior, lse = super().prior(case)
        prior[...] = np.random.default_rng(4).standard_normal(prior.shape)
        lse[...] = np.resize(np.array([-1e30, 1e30, 2.0, -np.inf, -1e9, LARGEST], np.float32), lse.shape)
        return prior, lse


@pytest.mark.parametrize("name", ["host", "host, a row at a time", "tiles by wgmma", "decode"])
def test_sinks_and_prior_results_of_any_size_have_their_weight(name):
    sinks = np.array([-LARGEST, -1e9, 1e9, -np.inf], np.float32)
    for own in fewer((0.0, -1e9, -1e30, 1e30), name):
        place, case = case_of(name, score=of_array(np.full((68, 68), own, np.float32)))
        values, counts = replace(case, score=(None, lambda x, b, h, q, k: 0.0 * x)).model()
        for form in (None, Beside()):
            if form is None:
                source = case.source(place)
                out, _ = case.launch(place, kv.ops.attention, source, case.query_rows, case.offsets, sinks=sinks)
                prior, other = np.zeros(out.shape), np.broadcast_to(sinks, out.shape[:2])
            else:
                (out, _), (prior, other) = replace(case, form=form).run(place), form.prior(case)
            top = np.maximum(np.float32(own), other)
            a, b = np.exp(counts + (np.float64(np.float32(own)) - top)), np.exp(np.float64(other) - top)
            want = values * (a / (a + b))[..., None] + prior * (b / (a + b))[..., None]
            np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


SPLIT = {
    "tiles": ("tile", {"rows": 64, "keys": 64, "splits": 3, "max_queries": 2}),
    "decode": ("decode", {"max_queries": 2, "max_batch": 1, "tile": 32}),
    "decode, whatever the batch": ("decode", {"max_queries": 2, "max_batch": 1, "tile": 32, "split_size": 64}),
    "decode, sums of splits": (
        "decode", {"max_queries": 2, "max_batch": 4, "tile": 32, "split_size": 64, "combine": 0}
    ),
}  # fmt: skip


@by_name(SPLIT, ["decode"])
def test_partial_results_of_any_size_have_their_weight(name):
    kernel, schedule = SPLIT[name]
    rng, keys = np.random.default_rng(14), 2600 if name == "tiles" else 700
    for far in fewer((-1e9, -LARGEST) if name == "tiles" else (-1e9, -1e30, 1e12, -LARGEST), name):
        z = np.full(keys, far, np.float32)
        z[rng.integers(0, keys, 5)] = 0.0
        for table in (z, np.full(keys, far, np.float32)):
            score = (lambda x, b, h, q, k, z: z[k], table), lambda x, b, h, q, k, z=table: z[k].astype(float) + 0 * x
            place, case = on(kernel, [keys - 2], [2], dtype="f16", heads=2, group=2, head_size=32, page_size=64,
                             score=score, schedule=schedule)  # fmt: skip
            np.testing.assert_allclose(case.run(place)[0].astype(np.float64), case.want()[0], rtol=4e-3, atol=4e-3)


def of_row(score, b, h, q, k, z):
    return score * 2.0 + z[q]


def of_distance(score, b, h, q, k, z):
    return score + z[q] * kv.f32(k - q)


def small_integers(case: Case) -> None:
    rng, keys = np.random.default_rng(18), case.problem.collection.blocks[:, 0]
    keys[~np.isnan(keys)] = rng.integers(-1, 2, keys[~np.isnan(keys)].shape)
    case.query_rows[:] = rng.integers(-1, 2, case.query_rows.shape)


@pytest.mark.parametrize("function", [of_row, of_distance])
@pytest.mark.parametrize("name", ["host", "tiles by wgmma", "tiles by mma.sync"])
def test_scores_that_are_sums_of_products_have_their_weight_however_large(name, function):
    """Such scores are computed with what makes weights of them, by one multiplication and addition (fold-kv-scores)."""
    z = np.zeros(170, np.float32)
    z[150:] = np.resize([0.0, 3.0, -1e3, 1e9, -1e9, 1e12, -1e16, 1e18, -1e25, -1e30, 1e30, 1e35, -1e35], 20)
    if function is of_row:
        z[-2:] = -LARGEST, LARGEST / 4

    def score(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        x, of_query = x.astype(np.float32), z[q]
        found = x * np.float32(2) + of_query if function is of_row else x + of_query * (k - q).astype(np.float32)
        return found.astype(float)

    schedule = {} if name == "host" else {"schedule": {**TILE, "keys": 64}}
    place, case = case_of(
        name, 150, 20, head_size=16, score=((function, z), score), change=small_integers, **schedule
    )  # fmt: skip
    (out, lse), (want, wanted_lse) = case.run(place), case.want()
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)
    # What is linear in a distance is computed from where a tile begins: within 1e-5 of the slope.
    lse, wanted_lse = (np.clip(x.astype(np.float64), -COUNTED, COUNTED) for x in (lse, wanted_lse))
    bound = 1e-5 * np.abs(wanted_lse) + 2e-3 + (0.0 if function is of_row else 1e-5 * np.abs(z[150:, None]))
    assert (np.abs(lse - wanted_lse) <= bound).all()


# --- softcap and tanh --------------------------------------------------------------------------------------------

CAPS = (1e-3, 0.3, 15.9, 16.1, 50.0, 1e5, 1e18, 1e30, 3e38)
FIRST_KEY = Mask("the first key", {"mask": lambda b, h, q, k: k == 0}, lambda b, h, q, k: k == 0)


def test_a_cap_is_a_number_of_f32():
    place, case = case_of("host", softcap=1e39)
    with pytest.raises(ValueError, match=r"softcap must fit in f32, got 1e\+39; omit it for none"):
        case.run(place)


def own_tanh(cap: float) -> Any:
    return lambda score, b, h, q, k: cap * kv.math.tanh(score * (1.0 / cap))


@pytest.mark.parametrize(
    ("name", "own"), [("host", False), ("host, a row at a time", True), ("tiles of f32", True), ("a warp a row", False)]
)
def test_capped_scores_of_any_size_are_off_by_at_most_1e_5_of_what_they_were(name, own):
    """A row that sees one key has its score as the logarithm of its sum."""
    new = 60 if name.startswith("host") else 20
    for cap in fewer(CAPS[1:8:2] if own or not name.startswith("host") else CAPS, name):

        def sizes(case: Case, cap: float = cap) -> np.ndarray:
            sizes = np.concatenate([np.geomspace(1e-6, 1e34, 2 * new), cap * np.geomspace(1e-4, 40.0, 2 * new)])
            signs = np.random.default_rng(15).choice([-1, 1], (new, 4))
            return np.resize(np.clip(sizes, 0, 1e34), (new, 4)) * signs

        options: dict[str, Any] = {"score": (own_tanh(cap), None)} if own else {"softcap": cap}
        with np.errstate(over="ignore"):
            place, case = case_of(name, 0, new, change=of_columns([1.0], sizes), mask=FIRST_KEY, **options)
            _, lse = case.run(place)
        x = case.query_rows[..., 0].astype(np.float64) * case.head_size**-0.5
        error = np.abs(lse - cap * np.tanh(x / cap)) / np.maximum(1.0, np.abs(x))
        assert error.max() < 1e-5, (cap, x.flat[error.argmax()])


# --- values that are no numbers, and what the host computes in ------------------------------------------------------

MASKS: dict[str, tuple[Any, Any]] = {
    "causal": ("causal", lambda q, k: k <= q),
    "window": (kv.masks.sliding_window(7), lambda q, k: (k <= q) & (q - k < 7)),
    "function": (lambda b, h, q, k: (k <= q) & (k % 3 != 1), lambda q, k: (k <= q) & (k % 3 != 1)),
}


def element(case: Case, token: int, half: int) -> tuple[np.ndarray, Any]:
    """The elements of a token of the layer, in the pool."""
    c: Any = case.problem.collection
    page = c.page_size
    return c.blocks, (c.lookup_table[0, token // page], half, LAYER, token % page)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["host", "host, a row at a time", "host, 8-bit keys", "a warp a row"])
def test_what_a_row_does_not_see_may_be_anything(name, mask):
    given, sees = MASKS[mask]
    place, case = case_of(name, 33, 9, heads=1, seed=16, mask=Mask(mask, {"mask": given}, lambda *_: True))
    want, _ = case.run(place)
    for token in (0, 25, 29, 34, 37, 41) if place.name == "host" else (29, 37):
        for half in (0, 1):
            blocks, at = element(case, token, half)
            kept = blocks[at].copy()
            blocks[at] = np.nan if token % 2 or case.dtype == "f8e4m3" else np.inf
            out, _ = case.run(place)
            blocks[at] = kept
            seen = sees(33 + np.arange(9), token)
            np.testing.assert_array_equal(out[~seen], want[~seen])
            if seen.any() and (token % 2 or half):
                assert not np.isfinite(out[seen].astype(np.float32)).any(-1).all()


BOUNDS = {"window": kv.masks.sliding_window(8), "chunk": kv.masks.chunked_causal(21)}


@pytest.mark.parametrize(
    ("name", "bound"),
    [(name, [*BOUNDS][i % 2]) for i, name in enumerate(n for n in OF_PAGES if not n.startswith("host"))],
)
def test_a_key_that_no_row_sees_by_a_bound_is_not_multiplied(name, bound):
    """On a GPU: keys before the window or the chunk of the first row, in its tile of keys and in others."""
    place, case = case_of(name, 133, 3, heads=1, seed=16, mask=Mask("", {"mask": BOUNDS[bound]}, lambda *_: True))
    want, _ = case.run(place)
    for token in (0, 64, 120, 125):  # the first that is seen is 126
        blocks, at = element(case, token, 1)
        blocks[at] = np.nan
    np.testing.assert_array_equal(case.run(place)[0], want)


@pytest.mark.parametrize(
    ("dtype", "query", "scales"),
    [("bf16", "bf16", None), ("f16", "f16", None), ("f8e4m3", "f32", None), ("f8e4m3", "bf16", None),
     ("f8e4m3", "f16", 32), ("i8", "bf16", 32), ("i8", "f32", 32)],
)  # fmt: skip
def test_the_host_computes_in_f32(dtype, query, scales):
    """Weights and keys with scales are not rounded to the query's type: only the output is."""
    place, case = on("host", [90, 3], [5, 20], dtype=dtype, query=query, heads=2, group=2, head_size=32,
                     scales=("f32", scales) if scales else None, seed=17)  # fmt: skip
    (out, lse), (want, wanted_lse) = case.run(place), case.want()
    rounding = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 1e-5}[query]
    assert (np.abs(out.astype(np.float64) - want) <= 1.01 * rounding * np.abs(want) + 1e-5 * np.abs(want).max()).all()
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-6, atol=2e-5)
