# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Integers wrap around and round down as NumPy's do, on the host and as GPU code, in kernels, scores and masks."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from reference.attention_functions import check, problem_of, query_of, run
from reference.integer_expressions import COMPARISONS, ends_of, evaluated, expected, pick, random_tree, written

import kvarn as kv
from kvarn.dsl import intervals

WIDTHS = {f"{sign}{bits}": (bits, sign == "i") for sign in "iu" for bits in (8, 16, 32, 64)}


def target_of(name: str) -> Any:
    return contextlib.nullcontext() if name == "host" else kv.emulated(name)


def computed(trees: tuple, dtype: Any, x: np.ndarray, y: np.ndarray, lanes: int) -> np.ndarray:
    """Expressions of x, y and the number of the block: by scalars, by vectors of lanes."""

    @kv.kernel
    def kernel(x: kv.Buffer[dtype, 1], y: kv.Buffer[dtype, 1], o: kv.Buffer[dtype, 2]):
        i = kv.block_id.x
        for n in kv.static(range(len(trees))):
            if lanes:
                values = {"x": x.load(i * lanes, width=lanes), "y": y.load(i * lanes, width=lanes)}
                values["i"] = values["x"]
                o.store(n, i * lanes, value=evaluated(trees[n], values))
            else:
                o[n, i] = evaluated(trees[n], {"x": x[i], "y": y[i], "i": dtype(i)})

    out = np.zeros((len(trees), len(x)), x.dtype)
    kernel[len(x) // max(lanes, 1), 1](x, y, out)
    return out


@pytest.mark.parametrize("target", ["host", "sm_90a"])
@pytest.mark.parametrize("name", [*WIDTHS])
def test_random_expressions_are_numpys_in_kernels(name, target):
    bits, signed = WIDTHS[name]
    rng = np.random.default_rng([bits, signed])
    numbers = ends_of(bits, signed)
    x, y = (np.array(v, np.dtype(f"{'i' if signed else 'u'}{bits // 8}")) for v in zip(
        *[(a, b) for a in [*numbers, 0] for b in [*numbers, 0]], strict=True))  # fmt: skip
    if target == "host":
        x, y = (np.resize(v, -(-len(v) // 4) * 4) for v in (x, y))
    else:  # fewer blocks: those that divide by 0 and -1, and others
        least = np.iinfo(x.dtype).min
        some = ((y == 0) | (y == x.dtype.type(-1 % 2**bits - (1 << bits) * signed))) & ((x == least) | (x == 7))
        chosen = np.concatenate([np.flatnonzero(some), rng.permutation(len(x))])[:48]
        x, y = x[chosen], y[chosen]
    basic = [(op, "x", "y") for op in ("+", "-", "*", "//", "%", "<<", ">>")]
    by_number = [(op, "x", n) for op in ("//", "%") for n in numbers]
    trees = (*basic, *by_number, *(random_tree(rng, "xyi", numbers, bits, 3) for _ in range(12)))
    with target_of(target):
        for lanes in (0, 4):
            out = computed(trees, getattr(kv, name), x, y, lanes)
            i = x if lanes else np.arange(len(x)).astype(x.dtype)
            for tree, row in zip(trees, out, strict=True):
                want = np.broadcast_to(expected(tree, {"x": x, "y": y, "i": i}), x.shape)
                np.testing.assert_array_equal(row, want, err_msg=f"{written(tree)} of {name}, {lanes} lanes")


# --- functions of positions ------------------------------------------------------------------------------

NAMES = ("q", "k", "b", "h", "p")


def function_of(tree: Any, role: str) -> Any:
    """An expression as a mask or as a score, beside its array; and the same over NumPy's positions."""
    array = np.array([2**31 - 1, -(2**31)], np.int32)

    def value(b: Any, h: Any, q: Any, k: Any, p: Any) -> Any:
        return evaluated(tree, {"q": q, "k": k, "b": b, "h": h, "p": p[b]})

    def model(b: Any, h: Any, q: Any, k: Any) -> Any:
        q, k, h = (np.asarray(x).astype(np.int32) for x in (q, k, h))
        return expected(tree, {"q": q, "k": k, "b": np.int32(b), "h": h, "p": array[b]})

    if role == "mask":
        return (lambda b, h, q, k, p: value(b, h, q, k, p), array), model
    score = lambda s, b, h, q, k, p: s + kv.f32(value(b, h, q, k, p) & 7)  # noqa: E731
    return (score, array), lambda x, b, h, q, k: x + (model(b, h, q, k) & 7)


def random_mask(rng: np.random.Generator) -> Any:
    numbers = ends_of(32)
    left, right = (random_tree(rng, NAMES, numbers, 32, int(rng.integers(3))) for _ in range(2))
    return (pick(rng, [*COMPARISONS]), left, right if rng.random() < 0.6 else pick(rng, numbers))


MASKS = 24


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(MASKS))
@pytest.mark.parametrize("target", ["host", "sm_90a"])
def test_random_masks_are_numpys(seed, target):
    """At whole tiles too: what a pass takes for the bounds of a tile may not wrap around within it."""
    rng, problem = problem_of(3, num_heads=1, cached=[150, 0], new=[20, 7])
    tree = random_mask(np.random.default_rng(seed))
    mask, model = function_of(tree, "mask")
    check(problem, query_of(rng, problem, 2), numpy_mask=model, mask=mask, target=target)


EDGES = [  # (mask, of positions), each of which wraps around somewhere
    ("<", ("*", "k", 1103515245), "q"), ("<", ("%", ("*", "k", 1103515245), 7), 3), (">=", ("+", "k", "p"), "q"),
    ("<", ("+", "q", "p"), "k"), (">", ("-", "k", "p"), ("-", "q", "p")), ("<", ("*", "k", 2**24), 0),
    ("<=", ("+", ("*", "k", 2**20), -(2**31)), 0), (">", ("*", ("-", "q", "k"), 2**25), "p"),
    ("<", ("//", ("+", "k", 2**31 - 100), 8), "q"), (">=", ("*", "b", 2**31 - 1), "k"), ("<", ("-", "q", "k"), "p"),
    ("<", "k", 2**31 - 1), (">", "k", -(2**31)), (">=", "k", "p"), (">=", ("+", "k", 2**31 - 64), 0),
    (">", ("*", ("*", "b", "h"), 2**30), "k"), ("==", ("%", "k", ("-", "b", "b")), 0),
    ("==", ("//", "k", ("&", "b", "p")), 0),
]  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize("tree", EDGES, ids=written)
@pytest.mark.parametrize("target", ["host", "sm_90a"])
def test_masks_that_wrap_around_are_numpys(tree, target):
    rng, problem = problem_of(3, num_heads=1, cached=[150, 0], new=[20, 7])
    mask, model = function_of(tree, "mask")
    check(problem, query_of(rng, problem, 2), numpy_mask=model, mask=mask, target=target)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("target", ["host", "sm_90a"])
def test_random_scores_are_numpys(seed, target):
    rng, problem = problem_of(4, num_heads=1)
    tree = random_tree(np.random.default_rng([seed, 1]), NAMES, ends_of(32), 32, 3)
    score, model = function_of(tree, "score")
    check(problem, query_of(rng, problem, 2), numpy_score=model, score=score, target=target)


INDICES = [
    lambda q, k: k + 2147483647, lambda q, k: k * 1073741824, lambda q, k: (k * 1103515245) % 16,
    lambda q, k: k - 2147483647, lambda q, k: q - k - 2147483600, lambda q, k: (k * 65537) >> 3,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(INDICES)))
@pytest.mark.parametrize("target", ["host", "sm_90a"])
def test_arrays_are_read_within_both_ends_at_indices_that_wrap_around(number, target):
    rng, problem = problem_of(5, num_heads=1)
    index, z = INDICES[number], rng.standard_normal(16).astype(np.float32)

    def model(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        with np.errstate(all="ignore"):
            return x + z[np.clip(index(np.int32(q), k.astype(np.int32)), 0, 15)]

    score = (lambda s, b, h, q, k, z: s + z[index(q, k)], z)
    check(problem, query_of(rng, problem, 2), numpy_score=model, score=score, target=target)


WIDE = [
    (lambda k: kv.i64(k) + 2**40, 15), (lambda k: kv.i64(k) - 2**40, 0), (lambda k: kv.u32(k) + 3000000000, 15),
    (lambda k: kv.u64(k) + 2**63, 15), (lambda k: kv.i64(k) * 2**32 - 1, -1), (lambda k: kv.i8(k & 7) - 100, 0),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(len(WIDE)))
def test_indices_of_other_types_are_held_to_an_array_before_they_are_narrowed(number):
    rng, problem = problem_of(5, num_heads=1)
    (index, found), z = WIDE[number], rng.standard_normal(16).astype(np.float32)

    def model(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return x + (z[found] if found >= 0 else np.where(k == 0, z[0], z[15]))

    score = (lambda s, b, h, q, k, z: s + z[index(k)], z)
    check(problem, query_of(rng, problem, 2), numpy_score=model, score=score, target="host")


def test_a_mask_that_divides_by_zero_ends_no_process():
    rng, problem = problem_of(6, num_heads=1)
    query = query_of(rng, problem, 2)
    zeros = np.zeros(2, np.int32)
    out, _ = run(problem, query, mask=(lambda b, h, q, k, s: k % s[b] == 0, zeros), target="host")
    every, _ = run(problem, query, mask=lambda b, h, q, k: k >= 0, target="host")
    np.testing.assert_array_equal(out, every)


# --- the rule ----------------------------------------------------------------------------------------------


def test_intervals_hold_every_result():
    """Of all pairs of small intervals, and all numbers in them."""
    dtype = kv.i8
    rng = np.random.default_rng(0)
    for op in ("+", "-", "*", "//", "%", "&", "|", "^", "<<", ">>", "min", "max"):
        for _ in range(60):
            a, b = (sorted(int(v) for v in rng.integers(-128, 128, 2)) for _ in range(2))
            if op in ("<<", ">>"):
                b = [abs(v) % 8 for v in b]
                b.sort()
            low, high = intervals.after(op, (a[0], a[1]), (b[0], b[1]), dtype)
            x, y = np.meshgrid(np.arange(a[0], a[1] + 1, dtype=np.int8), np.arange(b[0], b[1] + 1, dtype=np.int8))
            found = expected((op, "x", "y"), {"x": x, "y": y})
            assert low <= found.min(), (op, a, b)
            assert found.max() <= high, (op, a, b)


# --- ranges ------------------------------------------------------------------------------------------


def ranges_of(name: str, steps: list[int] | None = None) -> np.ndarray:
    """Starts, stops and steps at the ends of a type, of ranges that have few numbers."""
    bits, signed = WIDTHS[name]
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    ends = sorted({low, low + 1, low + 5, high // 2, high - 4, high - 1, high, *((-3, -1, 1, 0) if signed else (2,))})
    sizes = [1, 2, 7, high // 2 + 1, high - 1, high]
    steps = steps or [*sizes, *([-s for s in sizes] + [low] if signed else [])]
    found = [(a, b, s) for a in ends for b in ends for s in steps if (b - a) // s <= 6]
    return np.array(found, np.dtype(f"{'i' if signed else 'u'}{bits // 8}"))


def iterated(name: str, cases: np.ndarray, step: int | None) -> np.ndarray:
    """How many numbers, and the sum of each times how many came before, by a for, one that break leaves, kv.for_."""
    dtype = getattr(kv, name)

    @kv.kernel
    def kernel(x: kv.Buffer[dtype, 2], o: kv.Buffer[dtype, 3]):
        i = kv.block_id.x
        start, stop, by = x[i, 0], x[i, 1], x[i, 2] if step is None else step
        count, total = dtype(0), dtype(0)
        for n in range(start, stop, by):
            count += 1
            total += n * count
        o[i, 0, 0], o[i, 0, 1] = count, total
        count, total = dtype(0), dtype(0)
        for n in range(start, stop, by):
            count += 1
            total += n * count
            if count > 20:
                break
        o[i, 1, 0], o[i, 1, 1] = count, total
        count, total = kv.for_(
            start, stop, by, body=lambda n, c, t: (c + 1, t + n * (c + 1)), init=(dtype(0), dtype(0))
        )
        o[i, 2, 0], o[i, 2, 1] = count, total

    out = np.zeros((len(cases), 3, 2), cases.dtype)
    kernel[len(cases), 1](cases, out)
    return out


@pytest.mark.parametrize("target", ["host", "sm_90a"])
@pytest.mark.parametrize("name", ["i32", "u32", "i64", "u64"])
@pytest.mark.parametrize("step", [None, 1, 7, 2**30, 2**31 - 1, -1, -7, -(2**31)])
def test_a_range_has_pythons_numbers_up_to_the_ends_of_its_type(name, step, target):
    bits, signed = WIDTHS[name]
    if (step or 1) < 0 and not signed:
        with pytest.raises(kv.KernelError, match=f"a range of {name} cannot go down"):
            iterated(name, np.zeros((1, 3), ranges_of(name).dtype), step)
        return
    cases = ranges_of(name, [step] if step else None)
    if target != "host":
        cases = np.random.default_rng(bits).permutation(cases)[:48]
    with target_of(target):
        out = iterated(name, cases, step)
    wrap = lambda n: (n + (1 << (bits - 1)) * signed) % (1 << bits) - (1 << (bits - 1)) * signed  # noqa: E731
    for case, row in zip(cases, out.tolist(), strict=True):
        numbers = range(*map(int, case))
        want = [len(numbers), wrap(sum(n * (i + 1) for i, n in enumerate(numbers)))]
        assert row == [want] * 3, (case, want)


@pytest.mark.parametrize("target", ["host", "sm_90a"])
def test_a_range_of_python_numbers_has_them_up_to_the_ends_of_its_type(target):
    top = 2**31 - 1
    cases = [(0, top, 2**30), (top - 5, top, 3), (top, -top - 1, -top), (5, top + 5, 2**30), (top - 1, top, 7)]

    @kv.kernel
    def kernel(o: kv.Buffer[kv.i64, 2]):
        for c in kv.static(range(len(cases))):
            count = kv.i32(0)
            for n in range(*cases[c]):
                o[c, count] = kv.i64(n)
                count += 1
            o[c, 7] = kv.i64(count)

    out = np.zeros((len(cases), 8), np.int64)
    with target_of(target):
        kernel[1, 1](out)
    for case, row in zip(cases, out.tolist(), strict=True):
        assert row[: row[7]] == [*range(*case)]


def test_a_range_by_a_step_of_zero_has_no_numbers():
    cases = np.array([[0, 9, 0], [9, 0, 0], [-(2**31), 2**31 - 1, 0]], np.int32)
    assert not iterated("i32", cases, None).any()


def test_numbers_of_a_range_that_its_type_has_not_are_refused():
    for step in (2**31, -(2**31) - 1):
        with pytest.raises(kv.KernelError, match=r"does not fit|out of range|must be"):
            iterated("i32", np.zeros((1, 3), np.int32), step)


@pytest.mark.parametrize("target", ["host", "sm_90a"])
@pytest.mark.parametrize("name", ["i32", "u32", "i64", "u64"])
def test_fields_and_rotations_of_words_are_numpys(name, target):
    """LLVM makes bfe and shf of shifts of constants."""
    bits = WIDTHS[name][0]
    dtype, unsigned, numpy = getattr(kv, name), getattr(kv, f"u{bits}"), np.dtype(f"{name[0]}{bits // 8}")

    @kv.kernel
    def kernel(x: kv.Buffer[dtype, 1], o: kv.Buffer[dtype, 2]):
        i = kv.thread_id.x
        v = x[i]
        o[0, i], o[1, i] = (v >> 5) & 0x3FF, (v << 7) >> (bits - 9)
        w = unsigned(v)
        o[2, i], o[3, i] = dtype((w << 13) | (w >> (bits - 13))), v << (bits - 1)

    x = np.random.default_rng(bits).integers(*intervals.of_dtype(dtype), 32, numpy, endpoint=True)
    out = np.zeros((4, 32), numpy)
    with target_of(target):
        kernel[1, 32](x, out)
    w = x.view(f"u{bits // 8}")
    want = (x >> 5) & 0x3FF, (x << 7) >> (bits - 9), (w << 13) | (w >> (bits - 13)), x << (bits - 1)
    np.testing.assert_array_equal(out, np.stack([r.view(numpy) for r in want]))
