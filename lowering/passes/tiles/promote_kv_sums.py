# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Add 8-bit products to the sums that a loop carries outside of the tensor cores, in f32.

Tensor cores align their addends, 32 products and the previous sum, to the largest exponent, and drop bits below 2^-13
of it. Over a tile of 128 keys the error is at most 2^-10; over a whole context it is a bias that grows with its length:
a sum of ones keeps 0.943 of its value after 4096 keys, and 0.47 after 65536. So a tile's products use fresh
accumulators, ``columns`` columns at a time, which ordinary additions add to the sums.

The schedule's ``promote`` enables it: attention over 8-bit tiles sets it, since its weights are all positive.
``pipeline-kv-loops`` reads the attribute to overlap the additions, and ``distribute-kv-tiles`` to lower them.

Before:  scf.for iter_args(%o) { kv.dot %p, %v, %o : tensor<128x128xf8E4M3FN>, ... }
After:   scf.for iter_args(%o) { kv.dot %p, %v, %o {kv.promoted = 64} }
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from kvarn.dialect.ops import staging
from kvarn.dialect.ops.common import i64_attr
from kvarn.dialect.ops.sharing import tile_columns
from kvarn.dialect.ops.tile import COLUMN_STEP, layout_of, tile_type
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import enclosing, ops_named
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.ir import PROMOTED, WGMMA, element, instruction_of, schedule_of, shape, tiled


def start_columns(dot: ir.Operation, a: ir.Value, b: ir.Value, first: int, columns: int) -> ir.Value:
    """Start some columns of a product, in fresh accumulators."""
    result = ir.RankedTensorType(dot.result.type)
    type_ = tile_type([result.shape[0], columns], result.element_type, layout_of(result))
    if columns < result.shape[1]:
        b = tile_columns(b, first, columns)
    return staging.DotStartOp(a, b, dot.opview.transpose_b, type_).operation.results[0]


@dataclass(frozen=True)
class Options:
    """columns: of a product at a time, all or a divisor that is a multiple of 16; 0: none (default: the schedule's)."""

    columns: int | None = None


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        columns = schedule_of(function).get("promote", 0) if options.columns is None else options.columns
        if not columns or instruction_of(function) != WGMMA:
            continue
        for dot in ops_named(function, "kv.dot"):
            op = dot.opview
            if op.c is None or element(op.a).width != 8 or enclosing(dot, "scf.for") is None:
                continue
            wide = shape(dot.result)[1]
            if (columns % COLUMN_STEP and columns != wide) or wide % columns:
                legal = f"a multiple of {COLUMN_STEP} that divides {wide}, or {wide}"
                fail(dot, f"columns at a time must be {legal}, got {columns}")
            if performs(dot, "promote"):
                dot.attributes[PROMOTED] = i64_attr(columns)
                remark(dot, "passed", f"sums of 8-bit products are added in f32, {columns} columns at a time")
