# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random integer expressions, evaluated by the kernel language and, lane by lane, by NumPy: which wraps and floors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import kvarn as kv

OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "&": operator.and_, "|": operator.or_, "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift,
}  # fmt: skip
KERNEL = {**OPERATORS, "min": kv.math.min, "max": kv.math.max, "abs": abs, "neg": operator.neg, "where": kv.where}
NUMPY = {**OPERATORS, "min": np.minimum, "max": np.maximum, "abs": np.abs, "neg": operator.neg, "where": np.where}
Tree = Any  # a name, a number, or a tuple of an operator and its operands


def ends_of(bits: int, signed: bool = True) -> list[int]:
    """Numbers at the ends of a type, and those by which others are brought there."""
    most = (1 << (bits - signed)) - 1
    found = [most, most - 1, most // 2, most // 2 + 1, most // 3, 3, 2, 1, 7]
    return [*found, -most - 1, -most, -1, -2, -7] if signed else found


def pick(rng: np.random.Generator, among: Sequence[Any]) -> Any:
    return among[int(rng.integers(len(among)))]


def random_tree(rng: np.random.Generator, names: Sequence[str], numbers: Sequence[int], bits: int, depth: int) -> Tree:
    """An expression with at least one name."""
    if depth == 0:
        return pick(rng, names)
    op = pick(rng, [*KERNEL])
    first = random_tree(rng, names, numbers, bits, int(rng.integers(depth)) if depth > 1 else 0)
    if op in ("abs", "neg"):
        return (op, first)
    if rng.random() < 0.5:
        second: Tree = pick(rng, numbers)
        if op in ("<<", ">>"):
            second = int(rng.integers(bits))
    else:
        second = random_tree(rng, names, numbers, bits, depth - 1)
    if op == "where":
        return (op, (pick(rng, ["<", "==", ">="]), first, second), first, second)
    if op in ("-", "*", "min", "max") and rng.random() < 0.3:
        return (op, second, first)
    return (op, first, second)


COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}


@kv.intrinsic
def evaluated(tree: Tree, values: Mapping[str, Any], functions: Mapping[str, Any] = KERNEL) -> Any:
    """What an expression is of named values."""
    if isinstance(tree, str):
        return values[tree]
    if isinstance(tree, int):
        return tree
    op, *operands = tree
    operands = [evaluated(x, values, functions) for x in operands]
    return COMPARISONS[op](*operands) if op in COMPARISONS else functions[op](*operands)


def expected(tree: Tree, values: Mapping[str, Any]) -> np.ndarray:
    """The same of NumPy arrays."""
    with np.errstate(all="ignore"):
        return evaluated(tree, values, NUMPY)


def written(tree: Tree) -> str:
    """The expression as text."""
    if not isinstance(tree, tuple):
        return str(tree)
    op, *operands = tree
    texts = [written(x) for x in operands]
    return f"({texts[0]} {op} {texts[1]})" if op in OPERATORS or op in COMPARISONS else f"{op}({', '.join(texts)})"
