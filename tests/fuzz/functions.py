# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random masks and scores of attention: one text that kvarn traces and NumPy evaluates.

A text calls a module ``kv`` and operators, which both have. Integers are of 32 bits and wrap around; ``//`` and ``%``
round down. The numbers of a text are small ones, or with ``extreme`` those at the ends of i32 and f32.
"""

from __future__ import annotations

import linecache
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SMALL = (0, 1, 2, 3, 7, 16, 17, 31, 33, 63, 64, 65, 100, 128)
ENDS = (
    2**31 - 1,
    2**31 - 2,
    2**31 - 33,
    2**30,
    2**31 - 64,
    -(2**31),
    -(2**31) + 1,
    -(2**31) + 31,
    -(2**30),
    46341,
    -46341,
)
FLOATS = (0.0, 0.5, -1.25, 2.0, 3.5)
FLOAT_ENDS = (-1e9, -1e30, -3e38, 1e-30, -1e-38, -65504.0, -(2.0**24))
LARGEST = 512  # elements of an array that is read by a position
MOST_ARRAYS = 2  # of a function: a mask and a score take four together


@dataclass(frozen=True)
class Function:
    """A mask or a score.

    Attributes
    ----------
    traced, evaluated : callable
        For kvarn, and for NumPy arrays of a model.
    arrays : tuple of numpy.ndarray
        What it reads, in the order of its last parameters.
    text : str
    """

    traced: Callable[..., Any]
    evaluated: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    text: str


class Grammar:
    """Draws expressions of (b, h, q, k) and arrays that it makes on the way."""

    def __init__(self, seed: int, batch: int, heads: int, extreme: bool) -> None:
        self.random, self.batch, self.heads, self.extreme = random.Random(seed), batch, heads, extreme
        self.numbers = np.random.default_rng(seed)
        self.arrays: list[np.ndarray] = []

    @property
    def is_full(self) -> bool:
        return len(self.arrays) == MOST_ARRAYS

    def _array(self, shape: tuple[int, ...], kind: str) -> str:
        if kind == "i":
            low, high = self.random.choice([(-3, 4), (0, 80), (0, 3)])
            made = self.numbers.integers(low, high, shape).astype(np.int32)
            if self.extreme and self.random.random() < 0.5:
                made.ravel()[:: self.random.randint(1, 3)] = self.random.choice(ENDS)
        else:
            made = self.numbers.standard_normal(shape).astype(np.float32)
        self.arrays.append(made)
        return f"a{len(self.arrays) - 1}"

    def number(self) -> str:
        """A literal of i32."""
        return str(self.random.choice(ENDS if self.extreme and self.random.random() < 0.6 else SMALL))

    def element(self, kind: str, depth: int, at: str) -> str:
        """An element of a new array: at a sequence (b) or head (h), else at any index."""
        extent = {"b": self.batch, "h": self.heads}.get(at) or self.random.randint(1, LARGEST)
        array = self._array((extent,), kind)
        return f"{array}[{at or self.integer(depth - 1)}]"

    def integer(self, depth: int = 2) -> str:
        """An expression of i32."""
        draw = self.random.random()
        if depth == 0 or draw < 0.3:
            return self.random.choice(["q", "k", "k", "q", "h", "b", self.number()])
        if draw < 0.48 and not self.is_full:
            return self.element("i", depth, "b" if draw < 0.4 else "")
        if draw < 0.6:
            divisor = self.random.choice([1, 2, 3, 4, 7, 16, 24, 64, 100])
            return f"({self.integer(depth - 1)} {self.random.choice(['//', '%'])} {divisor})"
        operator = self.random.choice(["+", "-", "*"] if self.extreme else ["+", "-"])
        return f"({self.integer(depth - 1)} {operator} {self.integer(depth - 1)})"

    def condition(self, depth: int = 2) -> str:
        """An expression of bool."""
        draw = self.random.random()
        if depth == 0 or draw < 0.45:
            return f"({self.integer(2)} {self.random.choice(['<', '<=', '>', '>=', '==', '!='])} {self.integer(1)})"
        if draw < 0.6:
            return self.random.choice(["(k <= q)", f"(q - k < {self.number()})", "(k // 16 == q // 16)", "(k < q + 2)"])
        if draw < 0.7:
            return f"~{self.condition(depth - 1)}"
        return f"({self.condition(depth - 1)} {self.random.choice('&|')} {self.condition(depth - 1)})"

    def real(self, depth: int = 2) -> str:
        """An expression of f32 that is small."""
        draw = self.random.random()
        if depth == 0 or draw < 0.2:
            return str(self.random.choice(FLOATS))
        if draw < 0.6 and not self.is_full:
            return self.element("f", depth, "h" if draw < 0.4 else "")
        if draw < 0.75:
            return f"(kv.f32(({self.integer(1)}) % 64) * 0.0625)"
        return f"kv.where({self.condition(0)}, {self.real(depth - 1)}, {self.real(depth - 1)})"

    def score(self, depth: int = 2) -> str:
        """An expression of a score s."""
        draw = self.random.random()
        if depth == 0 or draw < 0.2:
            return "s"
        inner = self.score(depth - 1)
        if draw < 0.45:
            return f"({inner} + {self.real()})"
        if draw < 0.6:
            return f"({inner} * {self.random.choice([0.5, -1.0, 1.5, 0.0])})"
        if draw < 0.7:
            cap = self.random.choice([0.5, 5.0, 50.0, 1e4, 1e6] if self.extreme else [0.5, 5.0, 50.0])
            return f"({cap} * kv.math.tanh({inner} / {cap}))"
        low = self.random.choice(FLOAT_ENDS if self.extreme else (-1e4, -100.0))
        return f"kv.where({self.condition(1)}, {inner}, kv.f32({low}))"


class _Arrays:
    """An array of a function for NumPy: an index past either end reads the edge."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __getitem__(self, at: Any) -> np.ndarray:
        return self.values[np.clip(np.asarray(at, np.int64), 0, len(self.values) - 1)]


def _numpy() -> types.SimpleNamespace:
    """The part of ``kvarn`` that texts call, over arrays."""

    def where(condition: Any, a: Any, b: Any) -> Any:
        return np.where(condition, f32(a), f32(b))

    def f32(x: Any) -> Any:
        return np.asarray(x).astype(np.float32)

    return types.SimpleNamespace(where=where, f32=f32, math=types.SimpleNamespace(tanh=np.tanh))


def _made(name: str, parameters: str, body: str, module: Any) -> Callable[..., Any]:
    text, file = (
        f"def {name}({parameters}):\n    return {body}\n",
        f"<{name} {hash((parameters, body)) & 0xFFFFFFFF:x}>",
    )
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope: dict[str, Any] = {"kv": module}
    exec(compile(text, file, "exec"), scope)
    return scope[name]


def draw(seed: int, kind: str, batch: int, heads: int, extreme: bool) -> Function:
    """A random function; ``kind`` is "mask" or "score"."""
    import kvarn as kv

    grammar = Grammar(seed, batch, heads, extreme)
    body = grammar.condition() if kind == "mask" else grammar.score()
    names = "".join(f", a{i}" for i in range(len(grammar.arrays)))
    parameters = ("s, " if kind == "score" else "") + "b, h, q, k" + names
    plain = _made(kind, parameters, body, _numpy())

    def evaluated(*operands: Any) -> Any:
        arrays = [_Arrays(a) for a in grammar.arrays]
        first, last = operands[:-4], operands[-4:]
        first = tuple(np.asarray(s, np.float32) for s in first)  # scores, which are computed in f32
        with np.errstate(all="ignore"):
            return plain(*first, *(np.asarray(x, np.int32) for x in last), *arrays)

    return Function(_made(kind, parameters, body, kv), evaluated, tuple(grammar.arrays), f"{parameters}: {body}")
