# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Mark the waits, copies and products of a tile kernel's warps, for the timeline of a launch.

Marks that a tile kernel contains are where they were written, but passes make the schedule. This pass runs after them:
every wait, copy and product of circular buffers, ping-pong and queues becomes a phase with the buffer's name. Between
its waits a consumer computes, which the kernel's own marks describe.

Before:  %k = "kv.consumer_wait"(%buffer, %n)
After:   kv.trace_mark "wait for keys" begin ; %k = "kv.consumer_wait"(%buffer, %n) ; kv.trace_mark "wait for keys" end
"""

from __future__ import annotations

from typing import Any

from mlir import ir

from kvarn.dialect import kv, ops, verify
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import kernels, walk

# The names of phases, with {} for the buffer.
PHASES = {
    c.OPERATION_NAME: text
    for c, text in (
        (kv.ProducerAcquireOp, "wait to fill {}"),
        (kv.CopyStartOp, "copy {}"),
        (kv.CopyRowsStartOp, "copy {}"),
        (kv.CopyFinishOp, "finish {}"),
        (kv.ConsumerWaitOp, "wait for {}"),
        (kv.DotStartOp, "start product"),
        (kv.DotWaitOp, "wait for product"),
        (kv.TurnWaitOp, "wait for turn"),
        (kv.QueueNextOp, "wait for queue"),
    )
}


def label_of(op: ir.Operation) -> str:
    """The name of an op's phase."""
    buffer = getattr(op.opview, "buffer", None)
    name = verify.string(buffer.owner.opview.buffer_name) if buffer is not None else ""
    return PHASES[op.name].format(name)


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in kernels(module):
        for op in walk(function, PHASES.__contains__):
            label = label_of(op)
            with op.location:
                with ir.InsertionPoint(op):
                    ops.trace_mark(label, "begin")
                with ir.InsertionPoint.after(op):
                    ops.trace_mark(label, "end")
