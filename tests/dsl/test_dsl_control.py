# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Control flow of the DSL: the same Python function run by Python and, compiled, by the host target.

Each case is a function ``f(i, x, out)`` that reads ``x`` and writes ``out[i]``; both runs must agree for every i. These
are what the random programs of test_dsl_random.py do not have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import kvarn as kv

N = 24
X = np.array([3, -7, 0, 12, 1, 5, -2, 9, 30, -15, 4, 8, 2, 2, -1, 17, 6, -9, 11, 20, -4, 13, 7, 10], dtype=np.int32)


def run(f, x=X):
    """What the compiled function writes for every index."""

    @kv.kernel
    def case(x: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.i32, 1]):
        f(kv.block_id.x, x, out)

    out = np.full(len(x), -99, dtype=np.int32)
    case[len(x), 1](x, out)
    return out


def agrees(f):
    expected = [-99] * N
    for i in range(N):
        f(i, [int(v) for v in X], expected)
    assert run(f).tolist() == expected


def two_variables_swap(i, x, out):
    a, b = 0, 1
    for _ in range(i):
        a, b = b, a + b
    out[i] = a


def while_true_with_break(i, x, out):
    k = 0
    while True:
        if k >= i:
            break
        if x[k] == 12:
            k += 100
            break
        k += 1
    out[i] = k


def pair(v):
    return v + 1, [v * 2, v - 3]


def functions_that_return_tuples(i, x, out):
    a, (b, c) = pair(x[i])
    out[i] = a * 10000 + b * 100 + c


def short_circuit_guards_a_load(i, x, out):
    out[i] = 1 if i > 0 and x[i - 1] > 0 and x[i - 1] < 10 else 0


def unrolled_list_of_accumulators(i, x, out):
    acc = [0] * 4
    for k in range(i):
        for j in kv.static(range(4)):
            acc[j] = acc[j] + x[k] * (j + 1)
    out[i] = acc[0] + 10 * acc[1] - acc[2] + acc[3]


def list_rebound_in_a_loop(i, x, out):
    state = [1, (2, 3)]
    for k in range(i):
        state = [state[0] + x[k], (state[1][1], state[1][0] + 1)]
    out[i] = state[0] * 100 + state[1][0] * 10 + state[1][1]


def dict_as_state(i, x, out):
    state = {"sum": 0, "top": -100}
    for k in range(i):
        state["sum"] += x[k]
        if x[k] > state["top"]:
            state["top"] = x[k]
    out[i] = state["sum"] * 100 + state["top"]


@dataclass
class Stats:
    total: int
    low: int


def dataclass_as_state(i, x, out):
    s = Stats(0, 100)
    for k in range(i):
        s.total += x[k]
        s.low = min(s.low, x[k])
    out[i] = s.total * 1000 + s.low


def closures(i, x, out):
    base = x[i]

    def shifted(by, times=2):
        return base * times + by

    def both(by):
        return shifted(by) + shifted(by, 1)

    base = base + 1
    found = shifted(3)
    if x[i] > 4:  # called first where control flow depends on a value
        found = found + both(7)
        for k in range(i):
            found += both(k)
    out[i] = found + shifted(by=4, times=3) + (lambda v: v * base)(2)


def comprehensions(i, x, out):
    values = [x[(i + j) % 24] for j in range(4) if j != 2]
    out[i] = sum(values) + max(values) * 100 - min(v for v in values) + len(values)


def static_loops_and_conditions(i, x, out):
    total = 0
    for j, w in enumerate((1, 10, 100)):
        if j == 1:
            continue
        total += x[i] * w
    for a, b in zip([1, 2], [3, 4], strict=True):
        total += a * b
    n = 0
    while n < 3:
        total += n
        n += 1
    out[i] = total


def break_in_an_unrolled_loop(i, x, out):
    total = 0
    for j in kv.static(range(5)):
        if x[i] < j * 3:
            total += 1000
            break
        if j == x[i]:
            continue
        total += j
    out[i] = total


def bools_are_carried(i, x, out):
    found, every = False, True
    for k in range(i):
        found = found or x[k] == 9
        every = every and x[k] > -10
    out[i] = (10 if found else 0) + (1 if every else 0)


def any_and_all(i, x, out):
    v = x[i]
    out[i] = (
        (10 if any([v == 1, v == 5, v == 9]) else 0) + (1 if all([v > 0, v < 10]) else 0) + (100 if v in (2, 7) else 0)
    )


def augmented_assignments(i, x, out):
    v = x[i]
    v += 3
    v -= 1
    v *= 2
    v //= 3
    v <<= 1
    v |= 1
    v ^= 6
    v &= 127
    out[i] = 0
    out[i] += v


def walrus(i, x, out):
    out[i] = (y := x[i] * 2) + y


def name_reused_with_another_shape(i, x, out):
    total = 0
    for j in kv.static(range(2)):
        t = [x[i]] * (j + 1)
        total += sum(t)
    for k in range(i):
        t = x[k], k
        for j in kv.static(range(2)):
            total += t[j]
    out[i] = total


CASES = [
    f
    for f in list(globals().values())
    if callable(f) and getattr(f, "__code__", None) and f.__code__.co_varnames[:3] == ("i", "x", "out")
]


@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
def test_compiled_function_does_what_python_does(f):
    agrees(f)
