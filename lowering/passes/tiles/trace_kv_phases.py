# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Mark what warps of kernels over tiles wait for, copy and start, for the timeline of a launch.

Marks that a kernel over tiles has of its own stand where it was written; schedules are made by passes. This one comes
after them: every wait, copy and product of circular buffers, turns and queues becomes a phase, with the buffer's name.
What lies between the waits of a consumer is its arithmetic, of which the kernel's own marks say more.

Before:  %k = "kv.consumer_wait"(%buffer, %n)
After:   kv.trace_mark "wait for keys" begin ; %k = "kv.consumer_wait"(%buffer, %n) ; kv.trace_mark "wait for keys" end
"""

from __future__ import annotations

from typing import Any

from mlir import ir

from kvarn.dialect import kv, ops, verify
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import kernels, walk

# What a phase is called, where {} is the buffer.
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
