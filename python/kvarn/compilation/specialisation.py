# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The specialisation of a program, and its input module: one function with one op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import func

from kvarn.compilation import driver as compiler
from kvarn.dialect import layout, types
from kvarn.dialect.base import Kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec
from kvarn.dialect.verify import attribute_of

WIDEST = 16  # bytes of the widest access; larger alignments have no effect


# For each kind of handle: its MLIR type, the class of its specs, and its name in messages.
HANDLES: dict[str, tuple[Callable[[CacheSpec], ir.Type], type, str]] = {
    "cache": (types.cache_type, CacheSpec, "KV cache"),
    "collection": (types.collection_type, layout.CollectionSpec, "KV cache collection"),
    "operand": (types.operand_type, layout.OperandSpec, "attention operand"),
}


@dataclass(frozen=True)
class HandleType:
    """A cache, collection or attention operand: ``kind`` is ``"cache"``, ``"collection"`` or ``"operand"``."""

    kind: str
    spec: CacheSpec

    def mlir(self) -> ir.Type:
        return HANDLES[self.kind][0](self.spec)


@dataclass(frozen=True)
class BufferType:
    """A buffer operand; ``dims`` has an extent per dimension, None for one that varies between calls."""

    dtype: DType
    dims: tuple[int | None, ...]

    def mlir(self) -> ir.Type:
        shape = "".join(f"{'?' if d is None else d}x" for d in self.dims)
        strides = ", ".join(["?"] * (len(self.dims) - 1) + ["1"])
        return ir.Type.parse(f"memref<{shape}{self.dtype.mlir}, strided<[{strides}]>, 1>")


@dataclass(frozen=True)
class ScalarType:
    """A number of a dtype."""

    dtype: DType

    def mlir(self) -> ir.Type:
        return types.element_type(self.dtype)


OperandType = HandleType | BufferType | ScalarType


@dataclass(frozen=True)
class Specialisation:
    """Everything that the code of a program depends on.

    Parameters
    ----------
    name : str
        The op, such as ``"kv.append"``.
    operands : tuple of (str, OperandType)
        The present operands, by name, in the op's order.
    attributes, schedule : tuple of (str, value)
        Values are bools, ints, floats, strings and tuples of ints.
    target : str
    alignment : int
        Alignment of every row of every data buffer, in bytes, at most 16.
    """

    name: str
    operands: tuple[tuple[str, OperandType], ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    schedule: tuple[tuple[str, Any], ...] = ()
    target: str = "host"
    alignment: int = WIDEST

    @property
    def symbol(self) -> str:
        return self.name.removeprefix("kv.")


def build(what: Specialisation, context: ir.Context | None = None) -> ir.Module:
    """A module with one function that takes the operands and contains the op: the pipeline's input."""
    op_class = op_class_of(what.name)
    with context or compiler.context(), ir.Location.name(f"kvarn.ops.{what.symbol}"):
        module = ir.Module.create()
        operand_types = [t.mlir() for _, t in what.operands]
        with ir.InsertionPoint(module.body):
            function = func.FuncOp(what.symbol, (operand_types, []))
        function.attributes["kv.args"] = ir.ArrayAttr.get([argument(n, t) for n, t in what.operands])
        with ir.InsertionPoint(function.add_entry_block()):
            values = dict(zip((n for n, _ in what.operands), function.arguments, strict=True))
            attributes = {n: attribute_of(v) for n, v in what.attributes}
            declared = {f.name for f in op_class.FIELDS if f.kind == "attribute"}
            made = op_class(**values, **{n: a for n, a in attributes.items() if n in declared})
            for n in attributes.keys() - declared:  # an optional attribute, which IRDL cannot declare
                made.operation.attributes[n] = attributes[n]
            if what.schedule:
                entries = {n: attribute_of(v) for n, v in what.schedule}
                made.operation.attributes["schedule"] = ir.DictAttr.get(entries)
            if what.alignment < WIDEST:
                made.operation.attributes["kv.row_alignment"] = attribute_of(what.alignment)
            func.ReturnOp([])
    return module


def op_class_of(name: str) -> Any:
    """The class of a dialect op; ValueError for an unknown name."""
    for op_class in Kv.operations:
        if op_class.OPERATION_NAME == name:
            return op_class
    raise ValueError(f"operation must be one of the kv dialect, got {name!r}")


def argument(name: str, type_: OperandType) -> ir.Attribute:
    """An operand's entry in the function's ``kv.args``, for the runtime."""
    kind = type_.kind if isinstance(type_, HandleType) else "buffer" if isinstance(type_, BufferType) else "scalar"
    record = {"name": name, "kind": kind, "dtype": "" if isinstance(type_, HandleType) else type_.dtype.name}
    return ir.DictAttr.get({n: ir.StringAttr.get(v) for n, v in record.items()})
