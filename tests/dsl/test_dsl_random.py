# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random programs of nested loops, branches, break, continue and return: run by Python, and compiled for the host.

Both must agree for every index. Arithmetic is that of 32-bit integers on both sides. A failing seed prints its program.
"""

from __future__ import annotations

import linecache
import random
from pathlib import Path

import numpy as np
import pytest

import kvarn as kv

X = [3, -7, 0, 12, 1, 5, -2, 9]
STATE = "out[i] = a * 7 + b * 5 + c * 3 + l[0] + l[1] * 2 + l[2] * 4"


def wrapped(operator):
    def method(a, b):
        return Int((int(operator(int(a), int(b))) + 2**31) % 2**32 - 2**31)

    return method


class Int(int):
    """A 32-bit integer that wraps around."""


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in ("", "r"):
        setattr(Int, f"__{_side}{_name}__", wrapped(getattr(int, f"__{_side}{_name}__")))


class Program:
    """Source text of a helper and of ``f(i, x, out)``, from a seed."""

    def __init__(self, seed):
        self.random, self.count = random.Random(seed), 0
        lines = ["import kvarn as kv", "def change(l, v):", "    l[0] += v", "    if v > 3:", "        l[2] = v"]
        lines += ["def helper(a, b):", "    c, i, x, l = a - b, 3, [1, 2, 3, 4, 5, 6, 7, 8], [a, b, a]"]
        lines += [line.replace("helper(", "max(") for line in self.block(1, 1, False, "return {value} % 1000")]
        lines += [
            "    return (a + b * 2 + c * 3) % 1000",
            "def f(i, x, out):",
            "    a, b, c, l = x[i], 1, i, [0, x[0], 2]",
        ]
        lines += self.block(1, 0, False, "return")
        self.text = "\n".join([*self.visible(lines), f"    {STATE}", ""])

    @staticmethod
    def visible(lines):
        """Write the state before every return of ``f``."""
        for line in lines:
            if line.strip() == "return":
                yield line.replace("return", STATE)
            yield line

    def expression(self, depth=0):
        r, kind = self.random, self.random.random()
        if depth > 2 or kind < 0.3:
            return r.choice(["a", "b", "c", "i", "x[i]", f"x[(i + {r.randrange(8)}) % 8]", f"l[{r.randrange(3)}]"])
        if kind < 0.4:
            return str(r.randrange(-4, 9))
        left, right = self.expression(depth + 1), self.expression(depth + 1)
        if kind < 0.75:
            return f"({left} {r.choice('+-*')} {right})"
        if kind < 0.9:
            return f"({left} {r.choice(['// 2', '// 3', '// -3', '% 3', '% 8'])})"
        return f"({left} if {self.condition(depth + 1)} else {right})"

    def condition(self, depth=0):
        r, kind = self.random, self.random.random()
        left, right = self.expression(depth + 1), self.expression(depth + 1)
        if depth > 2 or kind < 0.6:
            return f"{left} {r.choice(['<', '>', '==', '!=', '<=', '>='])} {right}"
        if kind < 0.8:
            return f"({self.condition(depth + 1)} {r.choice(['and', 'or'])} {self.condition(depth + 1)})"
        return (
            f"not ({self.condition(depth + 1)})" if kind < 0.9 else f"{left} < {right} <= {self.expression(depth + 1)}"
        )

    def simple(self):
        r = self.random
        return r.choice([
            f"{r.choice('abc')} = {self.expression()} % 1000",
            f"{r.choice('abc')} += {self.expression()} % 100",
            f"l[{r.randrange(3)}] {r.choice(['=', '+=', '-='])} {self.expression()} % 1000",
            f"change(l, {self.expression()} % 100)",
            f"{r.choice('abc')} = helper({self.expression()} % 100, {self.expression()} % 100)",
        ])  # fmt: skip

    def loop(self, indent, depth, leave):
        r, pad = self.random, "    " * indent
        self.count += 1
        if r.random() < 0.6:
            bound = r.choice(["range(i)", "range(2, i)", "range(i, 0, -2)", "range(a % 4)", "kv.static(range(2))"])
            return [f"{pad}for k{self.count} in {bound}:", *self.block(indent + 1, depth + 1, True, leave)]
        w = f"w{self.count}"
        test = f"{w} < {r.randrange(1, 6)}" + (f" and {self.condition()}" if r.random() < 0.5 else "")
        body = self.block(indent + 1, depth + 1, True, leave)
        return [f"{pad}{w} = 0", f"{pad}while {test}:", f"{pad}    {w} = {w} + 1", *body]

    def block(self, indent, depth, in_loop, leave):
        r, pad, lines = self.random, "    " * indent, []
        for _ in range(r.randrange(1, 4)):
            kind = r.random()
            if kind < 0.35 or depth > 3:
                lines.append(pad + self.simple())
            elif kind < 0.65:
                lines += [f"{pad}if {self.condition()}:", *self.block(indent + 1, depth + 1, in_loop, leave)]
                if r.random() < 0.3:
                    lines += [f"{pad}elif {self.condition()}:", *self.block(indent + 1, depth + 1, in_loop, leave)]
                if r.random() < 0.5:
                    lines += [f"{pad}else:", *self.block(indent + 1, depth + 1, in_loop, leave)]
            elif kind < 0.85 and depth < 3:
                lines += self.loop(indent, depth, leave)
            elif in_loop and kind < 0.93:
                return [*lines, pad + r.choice(["break", "continue"])]
            elif kind < 0.95 and (leave == "return" or not in_loop):  # a value does not leave a loop
                return [*lines, pad + leave.format(value=self.expression())]
            else:
                lines.append(pad + self.simple())
        return lines


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(16))
def test_random_program_does_what_python_does(seed):
    text = Program(seed).text
    file = str(Path(__file__).with_name(f"<program {seed}>"))
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    names = {"__name__": "programs"}
    exec(compile(text, file, "exec"), names)
    f = names["f"]
    expected = [0] * len(X)
    for i in range(len(X)):
        f(Int(i), [Int(v) for v in X], expected)

    @kv.kernel
    def k(x: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.i32, 1]):
        f(kv.block_id.x, x, out)

    out = np.zeros(len(X), np.int32)
    k[len(X), 1](np.array(X, np.int32), out)
    assert out.tolist() == [int(Int(v) + 0) for v in expected], text
