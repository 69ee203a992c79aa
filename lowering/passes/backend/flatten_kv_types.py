# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Turn handles and buffers in kernel signatures into pointers and integers, and record the ABI.

Every argument becomes the fields that ``dialect.layout`` lists for it, in order; ``kv.field`` is replaced by them,
through views (``kv.key_cache`` adds layer * layer_stride to the base) and makers. The function attribute ``kv.params``
lists the argument and field of each parameter, by which the loader binds them.

Before:  gpu.func @k(%c: !kv.cache<"paged", ...>, %alpha: f32) { %p = "kv.field"(%c) {field = "base"} ... }
After:   gpu.func @k(%base: !llvm.ptr<1>, %stride0: i64, ..., %alpha: f32) attributes {kv.params = [...]} { ... }
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import arith, llvm

from kvarn.dialect import dtypes, types
from kvarn.dialect.layout import FA3
from kvarn.lowering.index import Ix, const, offset, pointer
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import defining_op, is_flat, kernels, ops_named

from ..kv.lower_kv_access import gep_type, in_units
from ..kv.verify_kv import HANDLES
from . import mark_kv_grid_constants

_VIEWS = ("kv.key_cache", "kv.value_cache")
_HANDLES = (*_VIEWS, "kv.make_operand", "kv.buffer_operand", "kv.make_cache", "kv.make_collection")


def is_handle(type_: ir.Type) -> bool:
    return isinstance(type_, ir.MemRefType) or types.type_name(type_) in HANDLES


class Resolver:
    """Resolves fields of handles in one function."""

    def __init__(self, parameters: dict[int, dict[str, ir.Value]]):
        self.parameters = parameters

    def field(self, op: ir.Operation, handle: ir.Value, name: str) -> ir.Value:
        """The value of a handle's field at the insertion point."""
        maker = defining_op(handle)
        if maker is None:
            number = ir.BlockArgument(handle).arg_number
            if number not in self.parameters or name not in self.parameters[number]:
                fail(op, f"reads field {name} of a handle that is not an argument of the kernel")
            return self.parameters[number][name]
        if maker.name == "kv.make_operand":
            return self.field(op, maker.operands[0], name)
        if maker.name == "kv.buffer_operand":
            return self.field_of_rows(op, maker.operands[0], name)
        if maker.name in ("kv.make_cache", "kv.make_collection"):
            names = [f.name for f in types.fields_of(maker.results[0].type)]
            return maker.operands[names.index(name)]
        if maker.name in _VIEWS:
            return self.view_field(op, maker, name)
        fail(op, f"reads field {name} of a handle made by {maker.name}")

    def field_of_rows(self, op: ir.Operation, buffer: ir.Value, name: str) -> ir.Value:
        """A field of a buffer's rows as a dense operand, which has one sequence with all of them."""
        if name == "base":
            return self.field(op, buffer, "data")
        if name == "stride0":  # there is no other sequence
            return const(0, 64)
        if name == "capacity":
            return arith.trunci(ir.IntegerType.get_signless(32), self.field(op, buffer, "shape0"))
        if name == "lengths":
            return llvm.mlir_zero(pointer())
        return const(1)  # num_blocks and batch

    def view_field(self, op: ir.Operation, view: ir.Operation, name: str) -> ir.Value:
        """A field of one layer's K or V, from the fields of the collection."""
        collection, layer = view.operands[0], Ix(view.operands[1])
        spec = types.spec_of(collection.type)
        is_value = view.name == "kv.value_cache"

        def of(field: str) -> ir.Value:
            return self.field(op, collection, field)

        def shifted(pointer: str, kv: str | None, per_layer: str, dtype: dtypes.DType) -> ir.Value:
            index = layer.wide * Ix(of(per_layer))
            if kv is not None and is_value:
                index = index + Ix(of(kv))
            return offset(of(pointer), in_units(dtype, index), gep_type(dtype))

        if name == "base":
            return shifted("blocks", "kv_stride", "layer_stride", spec.dtype)
        if name == "scales":
            return shifted("scales", "scales_kv_stride", "scales_layer_stride", spec.scale_dtype)
        if name == "lookup" and spec.kind == FA3:
            return shifted("lookup", None, "lookup_layer_stride", dtypes.i32)
        return of(name)


def parameter_types(type_: ir.Type) -> list[tuple[str, ir.Type, str]]:
    """(field, MLIR type, ABI type) of the parameters of an argument."""
    if is_handle(type_):
        return [(f.name, types.field_type(f), f.type) for f in types.fields_of(type_)]
    if str(type_) == "i1":  # a bool is one byte in memory
        return [("value", ir.IntegerType.get_signless(8), "i8")]
    return [("value", type_, str(type_))]


def flatten(function: ir.Operation) -> None:
    """Rewrite one kernel's signature and its ``kv.field`` ops."""
    block = function.regions[0].blocks[0]
    old = list(block.arguments)
    arg_types = ir.ArrayAttr.get([ir.TypeAttr.get(a.type) for a in old])
    parameters: dict[int, dict[str, ir.Value]] = {}
    record, flat = [], []
    i64 = ir.IntegerType.get_signless(64)
    for number, argument in enumerate(old):
        parameters[number] = {}
        for field, type_, abi in parameter_types(argument.type):
            value = block.add_argument(type_, argument.location)
            parameters[number][field] = value
            flat.append(type_)
            entry = {
                "arg": ir.IntegerAttr.get(i64, number),
                "field": ir.StringAttr.get(field),
                "type": ir.StringAttr.get(abi),
            }
            record.append(ir.DictAttr.get(entry))
    resolver = Resolver(parameters)
    handles: list[ir.Operation] = []
    fields: list[ir.Operation] = []
    for op in ops_named(function, "kv.field", *_HANDLES):
        (fields if op.name == "kv.field" else handles).append(op)
    for op in fields:
        with ir.InsertionPoint(op), op.location:
            value = resolver.field(op, op.operands[0], ir.StringAttr(op.attributes["field"]).value)
        op.results[0].replace_all_uses_with(value)
        op.erase()
    for op in reversed(handles):
        if any(True for _ in op.results[0].uses):
            fail(op, "has a use that no pass lowered")
        op.erase()
    for number, argument in enumerate(old):
        if not is_handle(argument.type):
            value = parameters[number]["value"]
            if str(argument.type) == "i1":
                with ir.InsertionPoint.at_block_begin(block), function.location:
                    value = arith.cmpi(arith.CmpIPredicate.ne, value, const(0, 8))
            argument.replace_all_uses_with(value)
        for use in argument.uses:
            fail(use.owner, f"uses argument {number} in a way that no pass lowers")
    for _ in old:
        block.erase_argument(0)
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(flat, []))
    if "arg_attrs" in function.attributes:
        del function.attributes["arg_attrs"]
    function.attributes["kv.params"] = ir.ArrayAttr.get(record)
    descriptors = [i for i, p in enumerate(record) if ir.StringAttr(p["type"]).value == "tensormap"]
    if descriptors:
        function.attributes[mark_kv_grid_constants.ATTRIBUTE] = ir.DenseI32ArrayAttr.get(descriptors)
    function.attributes["kv.arg_types"] = arg_types


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    with ir.Location.unknown():
        for function in list(kernels(module)):
            if not is_flat(function):
                flatten(function)
