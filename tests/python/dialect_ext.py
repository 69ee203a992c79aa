# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# RUN: %python %s | FileCheck %s
"""What an op declaration becomes: builder signature, IRDL definition, accessors, checks: as LLVM 23's ext has it."""

import inspect
from collections.abc import Sequence
from typing import Any

from mlir import ir
from mlir.dialects import arith, func

from kvarn.dialect import ext, kv
from kvarn.dialect.ext import F32, I32, Dialect, Operand, Result, attribute, infer_result


class Toy(Dialect, name="toy"):
    """A dialect of its own, beside kv."""


class BoxType(Toy.Type, name="box"):
    element: ir.TypeAttr
    size: ir.IntegerAttr


class UnitType(Toy.Type, name="unit"):
    pass


class AddOp(Toy.Operation, name="add"):
    lhs: Operand[I32]
    rhs: Operand[I32]
    out: Result[I32] = infer_result()


class WrapOp(Toy.Operation, name="wrap"):
    value: Operand[I32 | F32]
    label: ir.StringAttr
    box: Result[BoxType]


class ManyOp(Toy.Operation, name="many"):
    first: Operand[I32]
    rest: Sequence[Operand[I32]]
    last: Operand[F32] | None = None
    mode: ir.StringAttr = attribute(default_factory=lambda: ir.StringAttr.get("plain"))
    out: Result[Any]


def signature(op_class: type) -> str:
    return str(inspect.signature(op_class.__init__))


# CHECK-LABEL: === signatures
print("=== signatures")
# Inferred results are no parameters; positional fields in declaration order, then keywords.
# CHECK: (self, lhs, rhs, *, loc=None, ip=None)
print(signature(AddOp))
# CHECK: (self, value, label, box, *, loc=None, ip=None)
print(signature(WrapOp))
# CHECK: (self, first, rest, out, *, last=None, mode=None, loc=None, ip=None)
print(signature(ManyOp))
# CHECK: (self, cache, batch, head, token, dim, width, out, *, page=None, loc=None, ip=None)
print(signature(kv.LoadOp))

with kv.make_context() as context, ir.Location.unknown():
    Toy.load()
    # CHECK-LABEL: irdl.dialect @toy
    # CHECK:         irdl.type @box {
    # CHECK:           irdl.parameters(element: %{{.+}}, size: %{{.+}})
    # CHECK:         irdl.type @unit
    # CHECK:         irdl.operation @add {
    # CHECK:           irdl.is i32
    # CHECK:           irdl.operands(lhs: %{{.+}}, rhs: %{{.+}})
    # CHECK:           irdl.results(out: %{{.+}})
    # CHECK:         irdl.operation @wrap {
    # CHECK:           irdl.any_of(
    # CHECK:           irdl.base @toy::@box
    # CHECK:           irdl.base "#builtin.string"
    # CHECK:           irdl.attributes {"label" = %{{.+}}}
    # CHECK:         irdl.operation @many {
    # CHECK:           irdl.operands(first: %{{.+}}, rest: variadic %{{.+}}, last: optional %{{.+}})
    print(Toy.irdl_module(context))

    # CHECK-LABEL: === built
    print("=== built")
    module = ir.Module.create()
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    with ir.InsertionPoint(module.body):

        @func.FuncOp.from_py_func(i32, f32)
        def build(a, x):
            total = AddOp(a, rhs=a)
            box = BoxType.get(ir.TypeAttr.get(i32), ir.IntegerAttr.get(i32, 4))
            WrapOp(total.out, ir.StringAttr.get("sum"), box)
            ManyOp(a, [a, a], i32, last=x)
            ManyOp(a, [], i32, mode=ir.StringAttr.get("empty"))
            arith.addi(a, a)

    # CHECK: %[[SUM:.+]] = "toy.add"(%{{.+}}, %{{.+}}) : (i32, i32) -> i32
    # CHECK: "toy.wrap"(%[[SUM]]) {label = "sum"} : (i32) -> !toy.box<i32, 4 : i32>
    # CHECK: "toy.many"(%{{.+}}, %{{.+}}, %{{.+}}, %{{.+}}) {mode = "plain", operandSegmentSizes = array<i32: 1, 2, 1>}
    # CHECK: "toy.many"(%{{.+}}) {mode = "empty", operandSegmentSizes = array<i32: 1, 0, 0>}
    module.operation.verify()
    print(module)

    # CHECK-LABEL: === parsed
    print("=== parsed")
    # Ops of the kv dialect come back from text as their classes, with accessors by name.
    cache = '!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>'
    again = ir.Module.parse(f"""
    func.func @f(%c: {cache}, %i: i32, %p: i32) {{
      %0 = "kv.load"(%c, %i, %i, %i, %i) {{width = 8 : i64}} : ({cache}, i32, i32, i32, i32) -> vector<8xbf16>
      %1 = "kv.load"(%c, %i, %i, %i, %i, %p) {{width = 1 : i64}} : ({cache}, i32, i32, i32, i32, i32) -> bf16
      return
    }}""")
    plain, paged, _ = again.body.operations[0].regions[0].blocks[0].operations
    # CHECK: LoadOp LoadOp
    print(type(plain).__name__, type(paged).__name__)
    # CHECK: 8 : i64 None
    print(plain.width, plain.page)
    # CHECK: 1 : i64 i32
    print(paged.width, paged.page.type)
    # CHECK: vector<8xbf16>
    print(plain.out.type)
    # CHECK: bf16 8 : i64
    print(*kv.CacheType(plain.cache.type).parameters[1:3])

    # CHECK-LABEL: === refused
    print("=== refused")

    def refused(make) -> None:
        try:
            make()
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
        else:
            print("accepted")

    block = module.body.operations[0].regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block):
        value = block.arguments[0]
        # CHECK: TypeError: missing a required argument: 'rhs'
        refused(lambda: AddOp(value))
        # CHECK: TypeError: too many positional arguments
        refused(lambda: AddOp(value, value, value))
        # CHECK: TypeError: got an unexpected keyword argument 'zork'
        refused(lambda: AddOp(value, value, zork=value))
        # CHECK: TypeError: multiple values for argument 'lhs'
        refused(lambda: AddOp(value, value, lhs=value))
    # CHECK: TypeError: BoxType takes 2 parameters, got 1
    refused(lambda: BoxType.get(ir.TypeAttr.get(i32)))

    def shadowing():
        class BadOp(Toy.Operation, name="bad"):
            name: Operand[I32]

    # CHECK: TypeError: BadOp.name shadows a member of OpView: choose another name
    refused(shadowing)

    def optional_attribute():
        class WorseOp(Toy.Operation, name="worse"):
            label: ir.StringAttr | None = None

    # CHECK: TypeError: attribute field 'label' cannot be optional or variadic: IRDL has none
    refused(optional_attribute)

    def uninferable():
        class WorstOp(Toy.Operation, name="worst"):
            out: Result[Any] = infer_result()

    # CHECK: TypeError: toy.worst: the type of result 'out' cannot be inferred
    refused(uninferable)
    # A union with a constraint of several types would end the process on MLIR 22.1.
    # CHECK: TypeError: a union of constraints must be of exact types on MLIR 22.1
    refused(lambda: ext._irdl_constraint(I32 | BoxType))

# CHECK-LABEL: === documented
print("=== documented")
# CHECK-NEXT: []
print([c.OPERATION_NAME for c in kv.Kv.operations if not (c.__dict__.get("__doc__") or "").strip()])
# Those have nothing to verify but the types of their operands.
# CHECK-NEXT: ['kv.producer_acquire', 'kv.copy_commit', 'kv.consumer_release', 'kv.queue_fetch', 'kv.queue_next']
own = getattr(kv.Kv.Operation, "verify_invariants", None)
print([c.OPERATION_NAME for c in kv.Kv.operations if getattr(c, "verify_invariants", None) is own])
