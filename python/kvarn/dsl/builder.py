# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the DSL makes ops: one function, and the types and attributes of a context made once.

Ops go to the current insertion point and location, so that the values of this package work inside a traced kernel
and inside a pass alike. Building an op by its name takes half the time of its generated class.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from mlir import ir

from kvarn.dialect.dtypes import OUTSIDE_KERNEL, DType

_create = ir.Operation.create
MOST_LANES = 1024  # of a vector

# How many elements a value has: 0 for a scalar, the lanes of a vector, the shape of a tile.
Lanes = int | tuple[int, ...]


class Types:
    """Types and attributes of one context, each made once."""

    def __init__(self, context: ir.Context) -> None:
        self.context = context
        self._dtypes: dict[tuple[str, Lanes], ir.Type] = {}
        self._parsed: dict[str, Any] = {}
        self.i1 = ir.IntegerType.get_signless(1)
        self.i8 = ir.IntegerType.get_signless(8)
        self.i32 = ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        self.index = ir.IndexType.get()
        self.unit = ir.UnitAttr.get()
        self.pointers = {space: ir.Type.parse(f"!llvm.ptr<{space}>") for space in (0, 1, 3)}

    def of(self, dtype: DType, lanes: Lanes = 0) -> ir.Type:
        """The scalar type of a dtype, the vector type of so many lanes, or the tile type of a shape."""
        key = (dtype.mlir, lanes)
        found = self._dtypes.get(key)
        if found is None:
            if isinstance(lanes, tuple):  # an extent of 1 marks a vector that broadcasts
                found = ir.RankedTensorType.get([n for n in lanes if n != 1], self.of(dtype))
            elif lanes > MOST_LANES:
                raise ValueError(f"a vector must have at most {MOST_LANES} lanes, got {lanes}: its lanes are registers")
            else:
                found = ir.Type.parse(dtype.mlir) if lanes == 0 else ir.VectorType.get([lanes], self.of(dtype))
            self._dtypes[key] = found
        return found

    def type(self, text: str) -> ir.Type:
        """A type given as text."""
        found = self._parsed.get(text)
        if found is None:
            found = self._parsed[text] = ir.Type.parse(text)
        return found

    def attribute(self, text: str) -> ir.Attribute:
        """An attribute given as text."""
        key = "#" + text
        found = self._parsed.get(key)
        if found is None:
            found = self._parsed[key] = ir.Attribute.parse(text)
        return found

    def i32_attr(self, value: int) -> ir.Attribute:
        return ir.IntegerAttr.get(self.i32, value)

    def i64_attr(self, value: int) -> ir.Attribute:
        return ir.IntegerAttr.get(self.i64, value)


MOST_OPS = 100_000  # that tracing one kernel may make, those of attempts that are thrown away included


class _State(threading.local):
    types: Types | None = None
    trace: Any = None
    tiled: bool = False  # whether what is traced has made a tile
    counting: bool = False  # whether code of the library counts here: see intervals.py
    asking: bool = False  # whether a function that a user gave is asked


state = _State()


def types() -> Types:
    """The types of the current context."""
    context = ir.Context.current
    found = state.types
    if context is None:
        raise ValueError(OUTSIDE_KERNEL)
    if found is None or found.context is not context:
        found = state.types = Types(context)
    return found


def forget_types() -> None:
    """Let go of the last context's types."""
    state.types = None


def emit(
    name: str,
    results: Sequence[ir.Type] = (),
    operands: Sequence[ir.Value] = (),
    attributes: dict[str, ir.Attribute] | None = None,
    regions: int = 0,
) -> ir.Operation:
    """Make an op at the current insertion point and location."""
    trace = state.trace
    if trace is not None:
        trace.made += 1
        if trace.made > MOST_OPS:
            raise _endless()
    return _create(name, results, operands, attributes, None, regions)


def emit_value(
    name: str, result: ir.Type, operands: Sequence[ir.Value] = (), attributes: dict[str, ir.Attribute] | None = None
) -> ir.Value:
    """Make an op with one result; the result."""
    trace = state.trace
    if trace is not None:
        trace.made += 1
        if trace.made > MOST_OPS:
            raise _endless()
    return _create(name, (result,), operands, attributes).result


def _endless() -> ValueError:
    return ValueError(
        f"the kernel is traced into more than {MOST_OPS} operations: loops over Python values are unrolled, and a "
        "while whose condition is a Python value runs while tracing; use range(...) over a value of the kernel"
    )
