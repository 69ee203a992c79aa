# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions that yield: their loop is that of the for statement that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvarn as kv
from kvarn.errors import KernelError

OUT = kv.Buffer[kv.i32, 1]


def squares(n):
    two = n * 0 + 2
    for i in range(n):
        square = i**two if isinstance(i, int) else i * i
        yield i, square


@dataclass(frozen=True)
class Evens:
    """Even numbers below n, as pairs with a table's entry."""

    n: Any
    table: Any

    def pairs(self, factor):
        count = (self.n + 1) // 2
        for i in range(count):
            yield 2 * i, self.table[i] * factor


def run(kernel, *args, size=4):
    out = np.zeros(size, np.int32)
    kernel[1, 1](out, *args)
    return out.tolist()


def test_an_iteration_runs_the_generators_body_and_then_the_statements():
    @kv.kernel
    def kernel(out: OUT, n: kv.i32):
        total, last = 0, -1
        for i, square in squares(n):
            total += square
            last = i
        out[0], out[1] = total, last

    for n in (0, 1, 5):
        assert run(kernel, n)[:2] == [sum(i * i for i in range(n)), n - 1]
    assert kv.compile(kernel, OUT, kv.i32, target="host").stages["verify-kv"].count("scf.for") == 1


def test_a_method_of_a_struct_may_yield_and_loops_may_nest():
    @kv.kernel
    def kernel(out: OUT, table: OUT, n: kv.i32):
        evens = Evens(n, table)
        for i, x in evens.pairs(10):
            for j, y in evens.pairs(1):
                if i == j:
                    out[0] = out[0] + x + y

    assert run(kernel, np.int32([3, 5, 7]), 6)[0] == 11 * (3 + 5 + 7)


def test_break_return_and_continue_leave_the_loop_that_reads():
    @kv.kernel
    def kernel(out: OUT, n: kv.i32):
        for i, square in squares(n):
            if i == 1:
                continue
            if square > 8:
                out[1] = i
                break
            out[0] = out[0] + square

    assert run(kernel, 10)[:2] == [0 + 4, 3]


def test_a_generator_over_python_values_is_unrolled():
    def named(values):
        for x in values:
            yield x + 1

    @kv.kernel
    def kernel(out: OUT):
        for i, x in enumerate(named((4, 5))):
            out[i] = x
        for x in named((7,)):
            out[2] = x

    with pytest.raises(KernelError, match="for statement"):
        run(kernel)

    @kv.kernel
    def plain(out: OUT):
        i = 0
        for x in named((4, 5)):
            out[i] = x
            i += 1

    assert run(plain)[:2] == [5, 6]


def test_what_a_generator_keeps_in_a_list_is_carried():
    def running(n, seen):
        for i in range(n):
            seen[0] = seen[0] + i
            yield seen[0]

    @kv.kernel
    def kernel(out: OUT, n: kv.i32):
        seen = [kv.i32(0)]
        for total in running(n, seen):
            out[0] = total

    assert run(kernel, 5)[0] == 10
