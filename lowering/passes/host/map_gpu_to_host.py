# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Turn kernels into host functions that loop over grid and block.

``@k`` becomes a function of (status, grid x y z, block x y z, first block, last block, the kernel's parameters). It
runs the linear block ids [first, last), so that a caller may divide a grid among threads. The threads of a block run
one after another, x fastest (tile kernels have one thread per block); ops that need concurrent threads (barriers,
shuffles, asynchronous copies, mma) are refused by name. Shared memory is an array on the stack that all blocks reuse. A
failed assertion does not end the process: its number is stored to ``status``, and the caller raises.

Before:  gpu.func @k(%p: !llvm.ptr<1>) kernel { %i = gpu.thread_id x ... }
After:   func.func @k(%status: !llvm.ptr, %gx: i32, ..., %last: i64, %p: !llvm.ptr<1>) {
           scf.for %block ... scf.for %i ... }
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import arith, func, llvm, math, scf

from kvarn.errors import source_locations
from kvarn.lowering.index import as_index, const, i32, i64
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import ops_named, walk

from ..backend.allocate_kv_shared import check_outermost

_TOGETHER = (
    "gpu.barrier",
    "gpu.shuffle",
    "gpu.subgroup_reduce",
    "gpu.all_reduce",
    "gpu.cluster_id",
    "gpu.subgroup_mma_compute",
)
_IDS = ("gpu.thread_id", "gpu.block_id", "gpu.block_dim", "gpu.grid_dim")
_DIMENSIONS = ("x", "y", "z")


def refuse_what_needs_a_gpu(function: ir.Operation) -> None:
    """Report the first op that needs concurrent threads or GPU hardware."""
    for op in walk(function, lambda name: True):
        if op.name in _TOGETHER:
            what = "needs the threads of a block to run together: the host target runs them one after another"
            fail(op, f"{what}; run it on a GPU, or in the emulator (kv.emulated)")
        if op.name.startswith(("nvvm.", "nvgpu.")) or op.name == "llvm.inline_asm":
            fail(op, "is an instruction of NVIDIA GPUs: the host target has none")
        if op.name == "llvm.intr.trap":
            fail(op, "would end the process on the host target: use kv.device_assert")


class HostFunction:
    """The host function of one kernel, with its loops, and the kernel's body in them."""

    def __init__(self, module: ir.Module, kernel: ir.Operation):
        self.kernel = kernel
        old = kernel.regions[0].blocks[0]
        parameters = [ir.Type.parse("!llvm.ptr"), *[i32()] * 6, i64(), i64(), *[a.type for a in old.arguments]]
        name = ir.StringAttr(kernel.attributes["sym_name"]).value
        with ir.InsertionPoint(module.body), kernel.location:
            self.function = func.FuncOp(name, ir.FunctionType.get(parameters, []))
            self.function.attributes["llvm.emit_c_interface"] = ir.UnitAttr.get()
            self.function.attributes["kv.host_kernel"] = ir.UnitAttr.get()
            for attribute in kernel.attributes:
                if attribute.startswith("kv."):
                    self.function.attributes[attribute] = kernel.attributes[attribute]
            entry = self.function.add_entry_block()
        self.entry = entry
        arguments = list(entry.arguments)
        self.status, self.grid, self.block = arguments[0], arguments[1:4], arguments[4:7]
        with ir.InsertionPoint(entry), kernel.location:
            self.first_op = const(0)
            innermost = self.loops(arguments[7], arguments[8])
            func.ReturnOp([])
        self.move_body(old, innermost, arguments[9:])

    def loops(self, first: ir.Value, last: ir.Value) -> ir.Operation:
        """Build the loops over blocks and threads; returns the innermost terminator."""
        one = arith.constant(i64(), 1)
        blocks = scf.ForOp(first, last, one)
        with ir.InsertionPoint(blocks.body):
            gx, gy = (arith.extui(i64(), g) for g in self.grid[:2])
            linear = blocks.induction_variable
            x, rest = arith.remui(linear, gx), arith.divui(linear, gx)
            y, z = arith.remui(rest, gy), arith.divui(rest, gy)
            self.block_ids = [arith.trunci(i32(), v) for v in (x, y, z)]
            outer_end = scf.yield_([])
        at, threads = outer_end, []
        if "kv.tiled" in self.kernel.attributes:
            with ir.InsertionPoint(at):
                self.thread_ids = [const(0)] * 3
            return at.operation
        for extent in reversed(self.block):
            with ir.InsertionPoint(at):
                loop = scf.ForOp(const(0), extent, const(1))
                threads.append(loop.induction_variable)
            with ir.InsertionPoint(loop.body):
                at = scf.yield_([])
        self.thread_ids = list(reversed(threads))
        return at.operation

    def move_body(self, old: ir.Block, end: ir.Operation, parameters: list[ir.Value]) -> None:
        for argument, value in zip(old.arguments, parameters, strict=True):
            argument.replace_all_uses_with(value)
        body = [op.operation for op in old.operations]
        if body[-1].name != "gpu.return":
            fail(self.kernel, "must end in gpu.return and have one block")
        for op in body[:-1]:
            op.move_before(end)

    def replace_ids(self) -> None:
        """Replace thread, block, lane and warp ids by loop variables."""
        values = {
            "gpu.thread_id": self.thread_ids,
            "gpu.block_id": self.block_ids,
            "gpu.block_dim": self.block,
            "gpu.grid_dim": self.grid,
        }
        for op in ops_named(self.function, *_IDS, "gpu.lane_id", "gpu.subgroup_id"):
            with ir.InsertionPoint(op), op.location:
                if op.name in values:
                    dimension = str(op.attributes["dimension"])
                    which = next(i for i, d in enumerate(_DIMENSIONS) if f" {d}>" in dimension)
                    new = values[op.name][which]
                else:
                    x, y, z = self.thread_ids
                    linear = arith.addi(x, arith.muli(self.block[0], arith.addi(y, arith.muli(self.block[1], z))))
                    new = (arith.remui if op.name == "gpu.lane_id" else arith.divui)(linear, const(32))
                op.results[0].replace_all_uses_with(as_index(new))
                op.erase()

    def place_shared(self) -> None:
        """Allocate one stack array per allocation of shared memory."""
        for op in ops_named(self.function, "kv.alloc_shared"):
            size, alignment = (ir.IntegerAttr(op.attributes[n]).value for n in ("bytes", "alignment"))
            with ir.InsertionPoint(self.first_op.owner), op.location:
                byte = ir.IntegerType.get_signless(8)
                array = llvm.alloca(ir.Type.parse("!llvm.ptr"), const(size, 64), byte, alignment=alignment)
                shared = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<3>"), array)
            op.results[0].replace_all_uses_with(shared)
            op.erase()

    def report_assertions(self) -> None:
        """Store the number of a failed assertion to the status; the function's attributes have the messages."""
        messages = []
        for number, op in enumerate(ops_named(self.function, "cf.assert")):
            text = ir.StringAttr(op.attributes["msg"]).value
            places = source_locations(op.location)
            if places and not text.startswith(str(places[0])):
                text = f"{places[0]}: {text}"
            messages.append(ir.StringAttr.get(text))
            with ir.InsertionPoint(op), op.location:
                failed = arith.xori(op.operands[0], arith.constant(ir.IntegerType.get_signless(1), 1))
                branch = scf.IfOp(failed)
                with ir.InsertionPoint(branch.then_block):
                    # The first failure is reported: later ones are often its consequences.
                    before = llvm.load(i32(), self.status, alignment=4)
                    none = arith.cmpi(arith.CmpIPredicate.eq, before, const(0))
                    llvm.store(arith.select(none, const(number + 1), before), self.status, alignment=4)
                    scf.yield_([])
            op.erase()
        if messages:
            self.function.attributes["kv.assertions"] = ir.ArrayAttr.get(messages)

    def print_through_libc(self, module: ir.Module) -> None:
        """Replace gpu.printf by a call of the C library's printf."""
        for number, op in enumerate(ops_named(self.function, "gpu.printf")):
            text = ir.StringAttr(op.attributes["format"]).value
            data = text.encode() + b"\0"
            symbol = f"{ir.StringAttr(self.function.attributes['sym_name']).value}_format{number}"
            array = ir.Type.parse(f"!llvm.array<{len(data)} x i8>")
            with ir.InsertionPoint.at_block_begin(module.body), op.location:
                llvm.mlir_global(
                    array,
                    symbol,
                    ir.Attribute.parse("#llvm.linkage<internal>"),
                    constant=True,
                    value=ir.StringAttr.get(data),
                )
            declare_printf(module)
            with ir.InsertionPoint(op), op.location:
                address = llvm.mlir_addressof(ir.Type.parse("!llvm.ptr"), ir.FlatSymbolRefAttr.get(symbol))
                arguments = [promoted(v) for v in op.operands]
                llvm.CallOp(
                    i32(), [address, *arguments], [], [], callee=ir.FlatSymbolRefAttr.get("printf"),
                    var_callee_type=ir.TypeAttr.get(ir.Type.parse("!llvm.func<i32 (ptr, ...)>")),
                )  # fmt: skip
            op.erase()


def widen_half_fma(function: ir.Operation) -> None:
    """Compute f16 ``math.fma`` in f32: LLVM would call a conversion from f64, which the JIT lacks.

    The product is exact in f32; the sum is rounded to f32, then to f16.
    """
    for op in ops_named(function, "math.fma"):
        narrow = op.results[0].type
        if not str(narrow).endswith(("f16", "f16>")) or "bf16" in str(narrow):
            continue
        with ir.InsertionPoint(op), op.location:
            f32 = ir.F32Type.get()
            wide = f32
            if isinstance(narrow, ir.ShapedType):  # a vector or a tile
                kind = ir.VectorType if isinstance(narrow, ir.VectorType) else ir.RankedTensorType
                wide = kind.get(ir.ShapedType(narrow).shape, f32)
            made = math.fma(*(arith.extf(wide, v) for v in op.operands))
            op.results[0].replace_all_uses_with(arith.truncf(narrow, made))
        op.erase()


def promoted(value: ir.Value) -> ir.Value:
    """C's promotion of a variadic argument: floats to double, small integers to int."""
    if isinstance(value.type, ir.FloatType):
        return value if str(value.type) == "f64" else arith.extf(ir.F64Type.get(), value)
    if isinstance(value.type, ir.IndexType):
        return arith.index_cast(i64(), value)
    if isinstance(value.type, ir.IntegerType) and value.type.width < 32:
        return arith.extui(i32(), value)
    return value


def declare_printf(module: ir.Module) -> None:
    for op in module.body.operations:
        if op.operation.name == "llvm.func" and str(op.operation.attributes["sym_name"]) == '"printf"':
            return
    declaration = ir.Operation.parse("llvm.func @printf(!llvm.ptr, ...) -> i32", context=module.context)
    module.body.append(declaration)


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for scope in ops_named(module, "gpu.module"):
        for kernel in ops_named(scope, "gpu.func"):
            refuse_what_needs_a_gpu(kernel)
            for op in ops_named(kernel, "kv.alloc_shared"):
                check_outermost(op)
            host = HostFunction(module, kernel)
            host.replace_ids()
            host.place_shared()
            host.report_assertions()
            widen_half_fma(host.function.operation)
            host.print_through_libc(module)
        for variable in ops_named(scope, "llvm.mlir.global"):
            variable.move_before(module.body.operations[0])
        scope.erase()
