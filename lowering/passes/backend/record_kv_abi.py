# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Record how kernels are launched, and remove the attributes that only kvarn's passes know.

The attributes that passes have left on a kernel (arguments and parameters, written arguments, block, shared memory)
become one JSON text, ``kv.abi`` on the module, together with the program of ``extract-kv-program``. It survives the
upstream passes, which drop or refuse the attributes, and is all that the compiler needs for an artifact. Launch bounds
become NVVM's attributes. An existing record is kept, so that the pipeline may be entered after this pass.

Before:  gpu.func @k(%p: !llvm.ptr<1>, %n: i64) attributes {kv.arg_types = [memref<?xf32>], kv.params = [...],
           kv.block = array<i32: 128, 1, 1>, kv.written = array<i64: 0>}
After:   module attributes {kv.abi = "{\\"kernels\\": [{\\"name\\": \\"k\\", \\"args\\": [...], ...}]}"}
         gpu.func @k(%p: !llvm.ptr<1>, %n: i64) attributes {nvvm.reqntid = array<i32: 128, 1, 1>}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn.dialect import dtypes, layout, types
from kvarn.dialect.ownership_layout import ATTRIBUTE as OWNERSHIP
from kvarn.dialect.trace_layout import ATTRIBUTE as TRACE
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import kernels
from kvarn.lowering.target import Target, by_name

ATTRIBUTE = "kv.abi"


@dataclass(frozen=True)
class Options:
    """target: the target whose limits apply to kernels."""

    target: str = "sm_90a"


def set_launch_bounds(function: ir.Operation) -> None:
    """Translate ``kv.max_threads``, ``kv.block``, ``kv.min_blocks`` and ``kv.max_registers`` to NVVM's attributes."""
    attributes = function.attributes
    i32 = ir.IntegerType.get_signless(32)

    def number(name: str) -> int | None:
        return ir.IntegerAttr(attributes[name]).value if name in attributes else None

    if "kv.block" in attributes:
        attributes["nvvm.reqntid"] = ir.DenseI32ArrayAttr.get(list(ir.DenseI32ArrayAttr(attributes["kv.block"])))
    elif number("kv.max_threads"):
        attributes["nvvm.maxntid"] = ir.DenseI32ArrayAttr.get([number("kv.max_threads")])
    if number("kv.min_blocks"):
        attributes["nvvm.minctasm"] = ir.IntegerAttr.get(i32, number("kv.min_blocks"))
    if number("kv.max_registers"):
        attributes["nvvm.maxnreg"] = ir.IntegerAttr.get(i32, number("kv.max_registers"))


def argument(type_: ir.Type, described: ir.DictAttr | None, index: int) -> dict[str, Any]:
    """The loader's description of an argument, from its type and the front end's description."""
    found: dict[str, Any] = {"name": ir.StringAttr(described["name"]).value if described is not None else f"arg{index}"}
    if isinstance(type_, ir.MemRefType):
        memref = ir.MemRefType(type_)
        dtype = _dtype(str(memref.element_type), described)
        return found | {"kind": "buffer", "dtype": dtype.name, "rank": memref.rank, "alignment": dtype.itemsize}
    kind = types.type_name(type_)
    if kind == "tma":
        return found | {"kind": "tensormap", "type": str(type_)}
    if kind in ("cache", "collection", "operand"):
        spec = types.spec_of(type_)
        # Pools start at multiples of 16 bytes, layers at multiples of their rows.
        alignment = min(16, layout.lowbit(spec.dtype.bytes_of(spec.head_size)))
        return found | {"kind": kind, "type": str(type_), "alignment": alignment}
    return found | {"kind": "scalar", "dtype": _dtype(str(type_), described).name}


def _dtype(element: str, described: ir.DictAttr | None) -> dtypes.DType:
    """The dtype of an MLIR element type, with the sign from the front end's description."""
    if described is not None and "dtype" in described and ir.StringAttr(described["dtype"]).value:
        return dtypes.by_name(ir.StringAttr(described["dtype"]).value)
    return dtypes.by_mlir(element)


def arguments(types_: Sequence[ir.Type], described: ir.Attribute | None) -> list[dict[str, Any]]:
    """All arguments of a kernel or program; ``described`` is its ``kv.args``."""
    said = [ir.DictAttr(d) for d in ir.ArrayAttr(described)] if described is not None else []
    return [argument(t, said[i] if i < len(said) else None, i) for i, t in enumerate(types_)]


def kernel_record(function: ir.Operation) -> dict[str, Any]:
    """The record of one kernel; ValueError or KeyError for malformed attributes."""
    attributes = function.attributes

    def number(name: str) -> int:
        return ir.IntegerAttr(attributes[name]).value if name in attributes else 0

    def integers(name: str, kind: Any) -> list[int]:
        return list(kind(attributes[name])) if name in attributes else []

    described = attributes["kv.args"] if "kv.args" in attributes else None
    args = arguments([ir.TypeAttr(t).value for t in ir.ArrayAttr(attributes["kv.arg_types"])], described)
    for i, alignment in enumerate(integers("kv.arg_alignments", ir.DenseI64ArrayAttr)[: len(args)]):
        if args[i]["kind"] == "buffer":
            args[i]["alignment"] = max(args[i]["alignment"], alignment)
    for i, alignment in enumerate(integers("kv.table_alignments", ir.DenseI64ArrayAttr)[: len(args)]):
        args[i]["table_alignment"] = alignment
    for i in integers("kv.written", ir.DenseI64ArrayAttr):
        args[i]["written"] = True
    for i in integers("kv.read_only_args", ir.DenseI64ArrayAttr):
        args[i]["read_only"] = True
    extra: dict[str, Any] = {}
    if "kv.assertions" in attributes:
        extra["assertions"] = [ir.StringAttr(a).value for a in ir.ArrayAttr(attributes["kv.assertions"])]
    for name in (OWNERSHIP, TRACE):
        if f"kv.{name}" in attributes:
            extra[name] = {a.name: ir.StringAttr(a.attr).value for a in ir.DictAttr(attributes[f"kv.{name}"])}
    if "kv.programmatic" in attributes:
        extra["programmatic"] = True
    return {
        "name": ir.StringAttr(attributes["sym_name"]).value,
        "args": args,
        "params": [
            {"arg": ir.IntegerAttr(p["arg"]).value, "field": ir.StringAttr(p["field"]).value}
            for p in map(ir.DictAttr, ir.ArrayAttr(attributes["kv.params"]))
        ],
        "block": integers("kv.block", ir.DenseI32ArrayAttr) or None,
        "max_threads": number("kv.max_threads"),
        "shared_bytes": number("kv.shared_bytes"),
        "cluster": integers("kv.cluster", ir.DenseI32ArrayAttr) or None,
        "attributes": extra,
    }


def program_record(module: ir.Module) -> dict[str, Any] | None:
    """The program of ``extract-kv-program``, with its arguments described; removes it from the module."""
    attributes = module.operation.attributes
    if "kv.program" not in attributes:
        return None
    record = json.loads(ir.StringAttr(attributes["kv.program"]).value)
    described = attributes["kv.program_args"] if "kv.program_args" in attributes else None
    record["args"] = arguments([ir.Type.parse(t) for t in record.pop("arg_types")], described)
    for name in ("kv.program", "kv.program_args"):
        if name in attributes:
            del attributes[name]
    return record


def record_kernel(function: ir.Operation, target: Target) -> dict[str, Any]:
    """The record of a kernel; removes its attributes, and fails if the target cannot launch the kernel."""
    try:
        record = kernel_record(function)
    except (ValueError, KeyError, IndexError) as error:  # attributes written by hand, or left by another package's pass
        fail(function, f"must have arguments that can be passed to it: {error}")
    if record["shared_bytes"] > target.shared_bytes:
        most = f"{target.shared_bytes} bytes of shared memory on {target.name}"
        fail(function, f"must use at most {most}, got {record['shared_bytes']}")
    return record


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    target, attributes = by_name(options.target), module.operation.attributes
    before = json.loads(ir.StringAttr(attributes[ATTRIBUTE]).value) if ATTRIBUTE in attributes else {}
    known = {k["name"]: k for k in before.get("kernels", ())}
    with ir.Location.unknown():
        for function in list(kernels(module)):
            name = ir.StringAttr(function.attributes["sym_name"]).value
            if name not in known:
                known[name] = record_kernel(function, target)
                set_launch_bounds(function)
            for attribute in [a for a in function.attributes if a.startswith("kv.")]:
                del function.attributes[attribute]
        program = program_record(module) or before.get("program")
        if known:
            record = {"kernels": list(known.values()), "program": program}
            attributes[ATTRIBUTE] = ir.StringAttr.get(json.dumps(record))
