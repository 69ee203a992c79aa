# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions that build MLIR ops, and a cache of the types and attributes of the current context.

Ops are built at the current insertion point and location, so the DSL's values work inside a traced kernel and inside a
pass alike. Building an op by its name takes half the time of building it by its generated class.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from mlir import ir

from kvarn.dialect.dtypes import OUTSIDE_KERNEL, DType

_create = ir.Operation.create
MOST_LANES = 1024  # lanes of a vector

# Elements of a value: 0 for a scalar, the number of lanes of a vector, the shape of a tile.
Lanes = int | tuple[int, ...]


class Types:
    """A cache of the types and attributes of one context."""

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
        """The scalar type of ``dtype``, the vector type of ``lanes`` lanes, or the tile type of shape ``lanes``."""
        key = (dtype.mlir, lanes)
        found = self._dtypes.get(key)
        if found is None:
            if isinstance(lanes, tuple):  # a vector with an extent of 1 along one axis
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


MOST_OPS = 100_000  # ops of one trace, including attempts that are discarded


class _State(threading.local):
    types: Types | None = None
    trace: Any = None
    tiled: bool = False  # whether the trace has made a tile
    counting: bool = False  # whether library code is counting ops: see intervals.py
    asking: bool = False  # whether a user's function is being evaluated
    number: int = 0  # number of the trace; 0 while passes build ops


state = _State()
numbers = itertools.count(1)  # numbers of traces


class OfTrace:
    """A value, buffer or handle of a kernel. Its ``ir`` belongs to one trace; another trace cannot use it."""

    __slots__ = ("_ir", "_trace")
    _ir: ir.Value
    _trace: int

    @property
    def ir(self) -> ir.Value:
        if self._trace != state.number:
            raise TypeError(
                f"{self!r} is of an earlier trace: a function of a kernel must not keep its values, in a list, an "
                "attribute or a global, from one call to another"
            )
        return self._ir

    @ir.setter
    def ir(self, value: ir.Value) -> None:
        self._ir, self._trace = value, state.number


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
    """Drop the cached types of the last context."""
    state.types = None


def emit(
    name: str,
    results: Sequence[ir.Type] = (),
    operands: Sequence[ir.Value] = (),
    attributes: dict[str, ir.Attribute] | None = None,
    regions: int = 0,
) -> ir.Operation:
    """Build an op at the current insertion point and location."""
    trace = state.trace
    if trace is not None:
        trace.made += 1
        if trace.made > MOST_OPS:
            raise _endless()
    return _create(name, results, operands, attributes, None, regions)


def emit_value(
    name: str, result: ir.Type, operands: Sequence[ir.Value] = (), attributes: dict[str, ir.Attribute] | None = None
) -> ir.Value:
    """Build an op with one result, and return the result."""
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
