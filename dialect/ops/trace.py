# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Trace marks: the beginning and the end of a kernel's phases, for the timeline of a launch."""

from mlir import ir

from .. import verify
from ..base import Kv
from ..effects import MEMORY, WRITE, Effect, EffectModel

EDGES = ("begin", "end")


class _Marks(EffectModel):
    """Keeps its order relative to every op with effects."""

    effects = (Effect(WRITE, MEMORY),)


class TraceMarkOp(Kv.Operation, name="trace_mark", traits=[_Marks]):
    """Mark the beginning or the end of the phase ``label`` for this warp.

    Attributes: label; edge, ``begin`` or ``end``. The warp's first thread records the time, if it executes the op. The
    kernel language emits the op only where launches are traced.
    """

    label: ir.StringAttr
    edge: ir.StringAttr

    def verify_invariants(self) -> bool:
        if not verify.string(self.label):
            return verify.fail(self, f"label must be a string that is not empty, got {self.label}")
        return verify.one_of(self, "edge", EDGES)


def trace_mark(label: str, edge: str) -> None:
    """``kv.trace_mark``: the beginning or the end of a phase."""
    TraceMarkOp(ir.StringAttr.get(label), ir.StringAttr.get(edge))
