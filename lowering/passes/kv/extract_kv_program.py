# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Turn the host function of an expanded operation into data: launches with expressions of the arguments.

The loader runs a program without MLIR, so grids, scalars and workspace sizes become expressions of an artifact
(``["mul", ["arg", 2, "shape0"], 8]``), and descriptors become what the loader makes them from (``["tensor_map", 0,
"key", layer]``, or ``["tensor_map", 0, "rows", heads, size]`` for a buffer's rows). They are derived from the arith ops
that the expansion has made; any other op in the function is an error. The result is the module's attribute
``kv.program``, as JSON; the function is removed.

Before:  func.func @append(...) { %g = <ceil(T / 8)> ; gpu.launch_func @kernels::@append blocks in (%g, ...) args(...) }
After:   module attributes {kv.program = "{\\"steps\\": [{\\"entry\\": \\"append\\", \\"grid\\": [...], ...}]}"}
"""

from __future__ import annotations

import json
import math
from typing import Any

from mlir import ir

from kvarn.dialect import dtypes, types
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import defining_op, functions, ops_named

_BINARY = {
    "arith.addi": "add", "arith.subi": "sub", "arith.muli": "mul", "arith.divui": "floordiv", "arith.divsi": "floordiv",
    "arith.floordivsi": "floordiv", "arith.ceildivui": "ceildiv", "arith.ceildivsi": "ceildiv", "arith.remui": "mod",
    "arith.remsi": "mod", "arith.minui": "min", "arith.minsi": "min", "arith.maxui": "max", "arith.maxsi": "max",
}  # fmt: skip
_COMPARISONS = {0: "eq", 2: "lt", 3: "le", 4: "gt", 5: "ge", 6: "lt", 7: "le", 8: "gt", 9: "ge"}
_CASTS = ("arith.index_cast", "arith.extui", "arith.extsi", "arith.trunci", "memref.cast", "arith.index_castui")
_FIELDS = {"kv.max_prompt_length": "max_seq_length", "kv.max_context_length": "max_cache_length"}


class Extractor:
    """Reads one host function."""

    def __init__(self, function: ir.Operation):
        self.function = function
        self.workspaces: dict[Any, dict[str, Any]] = {}

    def argument(self, value: ir.Value) -> int | None:
        """The index of the function argument that a value is, possibly through casts."""
        op = defining_op(value)
        while op is not None and op.name == "memref.cast":
            value = op.operands[0]
            op = defining_op(value)
        return None if op is not None else ir.BlockArgument(value).arg_number

    def expression(self, value: ir.Value, user: ir.Operation) -> Any:
        """A value as an expression of an artifact."""
        op = defining_op(value)
        if op is None:
            return ["arg", ir.BlockArgument(value).arg_number, "value"]
        if op.name == "arith.constant":
            attribute = op.attributes["value"]
            return attribute.value if isinstance(attribute, (ir.IntegerAttr, ir.FloatAttr)) else bool(attribute.value)
        if op.name in _CASTS:
            return self.expression(op.operands[0], user)
        if op.name in _BINARY:
            return [_BINARY[op.name], *(self.expression(v, user) for v in op.operands)]
        if op.name == "arith.shli":
            return ["mul", self.expression(op.operands[0], user), 2 ** self.constant(op.operands[1], op)]
        if op.name == "arith.shrui":
            return ["floordiv", self.expression(op.operands[0], user), 2 ** self.constant(op.operands[1], op)]
        if op.name == "arith.andi" and _is_low_mask(self.expression(op.operands[1], user)):
            return ["mod", self.expression(op.operands[0], user), self.constant(op.operands[1], op) + 1]
        if op.name == "arith.select":
            return ["select", *(self.expression(v, user) for v in op.operands)]
        if op.name == "arith.cmpi":
            predicate = ir.IntegerAttr(op.attributes["predicate"]).value
            if predicate in _COMPARISONS:
                return [_COMPARISONS[predicate], *(self.expression(v, user) for v in op.operands)]
        if op.name == "memref.dim":
            return ["arg", self._known(op.operands[0], op), f"shape{self.constant(op.operands[1], op)}"]
        if op.name == "kv.field":
            return ["arg", self._known(op.operands[0], op), ir.StringAttr(op.attributes["field"]).value]
        if op.name in _FIELDS:
            return ["arg", self._known(op.operands[0], op), _FIELDS[op.name]]
        if op.name == "kv.device_attribute":
            return ["device", ir.StringAttr(op.attributes["attribute"]).value]
        fail(op, "cannot be part of a program: a launch may depend on shapes, fields, scalars and device facts only")

    def constant(self, value: ir.Value, user: ir.Operation) -> int:
        found = self.expression(value, user)
        if not isinstance(found, int):
            fail(user, "must have a constant operand here")
        return found

    def _known(self, value: ir.Value, user: ir.Operation) -> int:
        number = self.argument(value)
        if number is None:
            fail(user, "must read an argument of the program")
        return number

    def operand(self, value: ir.Value, user: ir.Operation) -> Any:
        """A launch operand: a whole argument, a workspace, a descriptor made at launch, or a scalar expression."""
        number = self.argument(value)
        if number is not None:
            return ["arg", number]
        op = defining_op(value)
        while op.name == "memref.cast":
            op = defining_op(op.operands[0])
        if op.name == "memref.alloc":
            return ["workspace", self.workspace(op), *ir.MemRefType(op.results[0].type).shape[1:]]
        if op.name == "kv.tensor_map":
            rows = defining_op(op.operands[0])
            if rows is not None and rows.name == "kv.buffer_operand":
                spec, made = types.spec_of(rows.results[0].type), defining_op(rows.operands[0])
                scratch = made is not None and made.name == "memref.alloc"
                of = self.workspace(made) if scratch else self._known(rows.operands[0], op)
                return ["tensor_map", of, "rows", spec.num_heads, spec.head_size]
            half, layer = ir.StringAttr(op.attributes["half"]).value, list(op.operands)[1:]
            return ["tensor_map", self._known(op.operands[0], op), half, *(self.expression(v, op) for v in layer)]
        if isinstance(value.type, ir.MemRefType) or types.type_name(value.type) is not None:
            fail(user, f"must be given arguments of the program, workspaces or their descriptors, got {value.type}")
        return self.expression(value, user)

    def workspace(self, op: ir.Operation) -> str:
        """The name of a workspace; its size is recorded the first time."""
        key = hash(op.results[0])
        if key not in self.workspaces:
            type_ = ir.MemRefType(op.results[0].type)
            size = self.expression(op.operands[0], op)
            each = math.prod(type_.shape[1:]) * dtypes.by_mlir(str(type_.element_type)).itemsize
            size = ["mul", size, each] if each > 1 else size
            name, zeroed = f"workspace{len(self.workspaces)}", "kv.zeroed" in op.attributes
            self.workspaces[key] = {"name": name, "bytes": size, "zeroed": zeroed}
        return self.workspaces[key]["name"]

    def step(self, launch: ir.Operation) -> dict[str, Any]:
        """One launch as data."""
        view = launch.opview
        attributes = {"programmatic": True} if "kv.programmatic" in launch.attributes else {}
        path = str(launch.attributes["kernel"]).split("::")
        return {
            "entry": path[-1].lstrip("@"),
            "grid": [self.expression(v, launch) for v in (view.gridSizeX, view.gridSizeY, view.gridSizeZ)],
            "block": [self.expression(v, launch) for v in (view.blockSizeX, view.blockSizeY, view.blockSizeZ)],
            "args": [self.operand(v, launch) for v in view.kernelOperands],
            "attributes": attributes,
        }


def _is_low_mask(value: Any) -> bool:
    return isinstance(value, int) and value >= 0 and (value & (value + 1)) == 0


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    found = [f for f in functions(module) if f.name == "func.func" and ops_named(f, "gpu.launch_func")]
    if not found:
        return
    if len(found) > 1:
        fail(found[1], "must be the only function with launches of its module")
    function = found[0]
    extractor = Extractor(function)
    steps = [extractor.step(op) for op in ops_named(function, "gpu.launch_func")]
    types_ = [str(a.type) for a in function.regions[0].blocks[0].arguments]
    program = {
        "name": ir.StringAttr(function.attributes["sym_name"]).value,
        "arg_types": types_,
        "steps": steps,
        "workspaces": list(extractor.workspaces.values()),
    }
    with ir.Location.unknown():
        if "kv.args" in function.attributes:
            module.operation.attributes["kv.program_args"] = function.attributes["kv.args"]
        module.operation.attributes["kv.program"] = ir.StringAttr.get(json.dumps(program))
    function.erase()
