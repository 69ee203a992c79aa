# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lower accesses to buffer arguments (memrefs of the kernel) to pointers, with planned alignment and read-only path.

Buffers are accessed by upstream ops (``memref.load``, ``vector.store``, ``memref.dim``, ``memref.atomic_rmw``); the
last dimension is contiguous, the other strides are run-time fields. Addresses are 64-bit. The alignment that a buffer's
accesses assume is recorded for the loader, which checks pointers and strides against it.

Before:  %v = vector.load %x[%i, %j] {alignment = 16} : memref<?x?xbf16, strided<[?, 1]>, 1>, vector<8xbf16>
After:   %a = llvm.getelementptr %data[%i * %stride0 + %j] ; %v = llvm.load %a {alignment = 16} : vector<8xbf16>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlir import ir
from mlir.dialects import arith, llvm, vector

from kvarn.dialect import dtypes, ops, types, verify
from kvarn.lowering.index import Ix, i64, load, offset, store
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import defining_op, is_flat, kernels, replace, walk

from ..kv.lower_kv_access import from_storage, gep_type, storage_type, to_storage

_ALIGNMENTS = "kv.arg_alignments"
_ACCESSES = (
    "memref.load",
    "memref.store",
    "vector.load",
    "vector.store",
    "memref.dim",
    "memref.atomic_rmw",
    "kv.buffer_address",
)


class Buffers:
    """The buffer arguments of one kernel: which are read-only, and the alignment that accesses to each assume."""

    def __init__(self, function: ir.Operation):
        arguments = list(function.regions[0].blocks[0].arguments) if len(function.regions[0].blocks) else []
        read_only = function.attributes["kv.read_only_args"] if "kv.read_only_args" in function.attributes else ()
        self.read_only = set(read_only)
        self.alignments = {i: 1 for i, a in enumerate(arguments) if isinstance(a.type, ir.MemRefType)}
        if _ALIGNMENTS in function.attributes:  # the pipeline was entered after this pass
            self.alignments |= {i: n for i, n in enumerate(function.attributes[_ALIGNMENTS]) if i in self.alignments}
        self.count = len(arguments)

    def number(self, op: ir.Operation, buffer: ir.Value) -> int:
        """The argument number of a buffer; an error for another memref."""
        if defining_op(buffer) is not None:
            fail(op, "must access a buffer argument of the kernel, got a memref made inside it")
        return ir.BlockArgument(buffer).arg_number

    def uses(self, number: int, alignment: int) -> None:
        self.alignments[number] = max(self.alignments[number], alignment)


def as_i64(index: ir.Value) -> Ix:
    """An index operand as a signed 64-bit integer."""
    if isinstance(index.type, ir.IndexType):
        return Ix(arith.index_cast(i64(), index))
    return Ix(index if ir.IntegerType(index.type).width == 64 else arith.extsi(i64(), index))


def address(buffer: ir.Value, indices: Sequence[ir.Value]) -> ir.Value:
    """The address ``sum(index_i * stride_i)`` elements after the data pointer."""
    total = as_i64(indices[-1])
    for i, index in enumerate(indices[:-1]):
        total = total + as_i64(index) * Ix(ops.field(buffer, f"stride{i}"))
    return offset(ops.field(buffer, "data"), total, gep_type(element_of(buffer)))


def element_of(buffer: ir.Value) -> dtypes.DType:
    return dtypes.by_mlir(str(ir.MemRefType(buffer.type).element_type))


def alignment_of(op: ir.Operation, dtype: dtypes.DType) -> int:
    """The access's alignment attribute, or one element."""
    if "alignment" in op.attributes:
        return min(ir.IntegerAttr(op.attributes["alignment"]).value, 16)
    return dtype.itemsize


def lower(op: ir.Operation, buffers: Buffers) -> ir.Value | None:
    """Rewrite one access; returns the replacement of its result, if it has one."""
    is_write = op.name in ("memref.store", "vector.store")
    at = 1 if is_write or op.name == "memref.atomic_rmw" else 0
    buffer, indices = op.operands[at], list(op.operands)[at + 1 :]
    number, dtype = buffers.number(op, buffer), element_of(buffer)
    if op.name == "memref.dim":
        return extent(op, buffer)
    if op.name == "kv.buffer_address":
        return address(buffer, indices)
    where = address(buffer, indices)
    if op.name == "memref.atomic_rmw":
        return atomic(op, where)
    alignment = alignment_of(op, dtype)
    buffers.uses(number, alignment)
    if is_write:
        store(_stored(op.operands[0], dtype), where, alignment)
        return None
    result = op.results[0].type
    lanes = verify.element_and_width(result)[1]
    if isinstance(result, ir.VectorType) and lanes == 1:
        scalar = load(where, storage_type(dtype, 1), alignment, number in buffers.read_only)
        return vector.from_elements(result, [from_storage(scalar, types.element_type(dtype))])
    return from_storage(load(where, storage_type(dtype, lanes), alignment, number in buffers.read_only), result)


def _stored(value: ir.Value, dtype: dtypes.DType) -> ir.Value:
    if dtype.bits == 8:
        return to_storage(value, dtype)
    if isinstance(value.type, ir.VectorType) and verify.element_and_width(value.type)[1] == 1:
        return vector.extract(value, [], [0])
    return value


def extent(op: ir.Operation, buffer: ir.Value) -> ir.Value:
    """A dimension's extent as an index: static, or a field of the argument."""
    which = defining_op(op.operands[1])
    if which is None or which.name != "arith.constant":
        fail(op, "must ask for a constant dimension")
    dim = ir.IntegerAttr(which.attributes["value"]).value
    type_ = ir.MemRefType(buffer.type)
    if not 0 <= dim < type_.rank:
        fail(op, f"must ask for a dimension below the rank {type_.rank}, got {dim}")
    if not type_.is_dynamic_dim(dim):
        return arith.constant(ir.IndexType.get(), type_.shape[dim])
    return arith.index_cast(ir.IndexType.get(), ops.field(buffer, f"shape{dim}"))


def atomic(op: ir.Operation, where: ir.Value) -> ir.Value:
    """memref.atomic_rmw as llvm.atomicrmw, monotonic."""
    name = str(op.attributes["kind"])
    kind = ir.IntegerAttr(op.attributes["kind"]).value if name.lstrip("-").split(" ")[0].isdigit() else None
    table = {
        "addf": llvm.AtomicBinOp.fadd, "addi": llvm.AtomicBinOp.add, "maxs": llvm.AtomicBinOp.max,
        "maxu": llvm.AtomicBinOp.umax, "mins": llvm.AtomicBinOp.min, "minu": llvm.AtomicBinOp.umin,
        "maximumf": llvm.AtomicBinOp.fmax, "minimumf": llvm.AtomicBinOp.fmin, "ori": llvm.AtomicBinOp._or,
        "andi": llvm.AtomicBinOp._and, "assign": llvm.AtomicBinOp.xchg,
    }  # fmt: skip
    found = arith.AtomicRMWKind(kind).name if kind is not None else name
    if found not in table:
        fail(op, f"kind must be one of {', '.join(table)}, got {found}")
    value = op.operands[0]
    return llvm.atomicrmw(table[found], where, value, llvm.AtomicOrdering.monotonic)


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in kernels(module):
        if is_flat(function):
            continue
        buffers = Buffers(function)
        for op in walk(function, _ACCESSES.__contains__):
            with ir.InsertionPoint(op), op.location:
                replace(op, lower(op, buffers))
        with ir.Location.unknown():
            alignments = [buffers.alignments.get(i, 0) for i in range(buffers.count)]
            function.attributes[_ALIGNMENTS] = ir.DenseI64ArrayAttr.get(alignments)
