# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kv.token_norm(cache, b, h, t)``: the sum of the squares of a token's elements, as an operation of its own."""

from typing import Any

from mlir import ir
from mlir.dialects import arith, scf, vector

import kvarn as kv
from kvarn.dialect import ops, types, verify
from kvarn.dialect.base import Kv
from kvarn.dialect.effects import LooksUpPage, ReadsCache
from kvarn.dialect.ext import F32, I32, Operand, Result, infer_result
from kvarn.dsl.values import Value, i32_value
from kvarn.lowering.passes.kv import lower_kv_access


class TokenNormOp(Kv.Operation, name="token_norm", traits=[LooksUpPage, ReadsCache]):
    """The sum of the squares of a token's elements, in loads of ``width`` elements."""

    cache: Operand[Any]
    batch: Operand[I32]
    head: Operand[I32]
    token: Operand[I32]
    norm: Result[F32] = infer_result()
    width: ir.IntegerAttr
    page: Operand[I32] | None = None

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.cache)
        if spec is None:
            return False
        width = self.width.value
        if width < 1 or spec.head_size % width:
            return verify.fail(self, f"width must divide the head size {spec.head_size}, got {width}")
        return True


@kv.intrinsic
def token_norm(cache, b, h, t, width=8):
    wide = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), width)
    return Value(TokenNormOp(cache.ir, i32_value(b), i32_value(h), i32_value(t), wide).norm, kv.f32)


@lower_kv_access.RULES.lowers(TokenNormOp)
def lower_token_norm(op, options):
    width, f32, i32 = op.width.value, ir.F32Type.get(), ir.IntegerType.get_signless(32)
    begin, end, step = (arith.constant(i32, n) for n in (0, types.spec_of(op.cache.type).head_size, width))
    loop = scf.ForOp(begin, end, step, [arith.constant(f32, 0.0)])
    with ir.InsertionPoint(loop.body):
        d = loop.induction_variable
        x = ops.load(op.cache, op.batch, op.head, op.token, d, width=width, dtype=kv.f32, page=op.page)
        total = vector.reduction(f32, vector.CombiningKind.ADD, arith.mulf(x, x))
        scf.yield_([arith.addf(loop.inner_iter_args[0], total)])
    return loop.results[0]
