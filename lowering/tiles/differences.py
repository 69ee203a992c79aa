# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles that are differences of a query's and a key's position, however a mask or score function expresses them."""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from kvarn.lowering.rewrite import defining_op

from .ir import element


@dataclass(frozen=True)
class Difference:
    """``query - key`` of a tile, or the reverse: a vector along the rows, and ``first`` plus the column."""

    query: ir.Value
    first: ir.Value
    negative: bool
    number: bool  # whether it is f32


def _repeated(value: ir.Value) -> tuple[int, ir.Value] | None:
    """(dimension, vector) of a tile that repeats a vector."""
    op = defining_op(value)
    if op is None or op.name != "kv.tile_broadcast":
        return None
    return ir.IntegerAttr(op.attributes["dimension"]).value, op.operands[0]


def _first_of(vector: ir.Value) -> ir.Value | None:
    """The number from which a vector counts up by one per element; None for another vector."""
    op = defining_op(vector)
    if op is None or op.name != "arith.addi":
        return None
    for start, numbers in (tuple(op.operands), tuple(reversed(list(op.operands)))):
        made, index = defining_op(start), defining_op(numbers)
        if made is not None and index is not None and made.name == "tensor.splat" and index.name == "kv.tile_index":
            return made.operands[0]
    return None


def from_base(vector: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """(positions, number) of a vector of floats that are positions minus a number."""
    op = defining_op(vector)
    inner = defining_op(op.operands[0]) if op is not None and op.name == "arith.sitofp" else None
    start = defining_op(inner.operands[1]) if inner is not None and inner.name == "arith.subi" else None
    if inner is None or start is None or start.name != "tensor.splat":
        return None
    return inner.operands[0], start.operands[0]


def difference_of(value: ir.Value) -> Difference | None:
    """The difference that a tile is; None for another tile."""
    op = defining_op(value)
    if op is None or op.name not in ("arith.subi", "arith.subf"):
        return None
    left, right = (_repeated(x) for x in op.operands)
    if left is None or right is None or {left[0], right[0]} != {0, 1}:
        return None
    negative, number = left[0] == 1, op.name == "arith.subf"
    query, key = (right[1], left[1]) if negative else (left[1], right[1])
    if number:
        of_query, of_key = from_base(query), from_base(key)
        if of_query is None or of_key is None or of_query[1] != of_key[1]:
            return None
        query, key = of_query[0], of_key[0]
    first = _first_of(key)
    return None if first is None or str(element(query)) != "i32" else Difference(query, first, negative, number)
