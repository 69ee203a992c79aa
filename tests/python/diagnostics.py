# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# RUN: %python %s 2>&1 | FileCheck %s
"""Diagnostics of ops that Python built point to the Python line; call sites follow as notes."""

import io
import sys

from mlir import ir

from kvarn.dialect import kv
from kvarn.lowering.passes.kv import verify_kv
from kvarn.tools.opt_diagnostics import Collector, Source, render

CACHE = '!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>'
SOURCE = Source("kernel.py", b"def kernel(cache):\n    first(cache)\n\tsecond(cache)\n")

with kv.make_context() as context, ir.Location.unknown(), Collector(context) as collector:
    module = ir.Module.parse(f"func.func @f(%c: {CACHE}, %i: i32) {{ return }}")
    here = ir.Location.file("kernel.py", 2, 5)
    tabbed = ir.Location.file("kernel.py", 3, 2)
    places = [
        here,
        ir.Location.name("kernel", here),
        ir.Location.fused([ir.Location.unknown(), tabbed]),
        ir.Location.callsite(here, [ir.Location.file("kernel.py", 1, 1)]),
        ir.Location.file("/nowhere.py", 7, 1),
        ir.Location.unknown(),
        ir.Location.name("nameless"),
    ]
    for place in places:
        place.emit_error("wrong")
    out = io.StringIO()
    for diagnostic in collector.take():
        out.write(render(diagnostic, SOURCE))
    # CHECK:      kernel.py:2:5: error: wrong
    # CHECK-NEXT: {{^    first\(cache\)$}}
    # CHECK-NEXT: {{^    \^$}}
    # CHECK-NEXT: kernel.py:2:5: error: wrong
    # CHECK-NEXT: {{^    first\(cache\)$}}
    # CHECK-NEXT: {{^    \^$}}
    # A tab before the caret stays a tab, so that the caret stands under its column.
    # CHECK-NEXT: kernel.py:3:2: error: wrong
    # CHECK-NEXT: second(cache)
    # CHECK-NEXT: {{^	\^$}}
    # CHECK-NEXT: kernel.py:2:5: error: wrong
    # CHECK-NEXT: first(cache)
    # CHECK-NEXT: {{^    \^$}}
    # CHECK-NEXT: kernel.py:1:1: note: called from
    # CHECK-NEXT: def kernel(cache):
    # CHECK-NEXT: {{^\^$}}
    # CHECK-NEXT: /nowhere.py:7:1: error: wrong
    # CHECK-NEXT: <unknown>:0: error: wrong
    # CHECK-NEXT: <unknown>:0: error: loc("nameless"): wrong
    sys.stdout.write(out.getvalue())

    # The location that an op was built with is the one that its verifier reports.
    # CHECK: kernel.py:2:5: error: 'kv.load' op width must be a positive integer, got 0 : i64
    block = module.body.operations[0].regions[0].blocks[0]
    cache, i = block.arguments
    with ir.InsertionPoint.at_block_begin(block), here:
        zero = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)
        kv.LoadOp(cache, i, i, i, i, zero, ir.BF16Type.get())
    verify_kv.count_problems(module)
    sys.stdout.write("".join(render(d, SOURCE) for d in collector.take()))
