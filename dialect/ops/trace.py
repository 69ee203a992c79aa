# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Marks in time: where a phase of a kernel begins and ends, for the timeline of a launch."""

from mlir import ir

from .. import verify
from ..base import Kv
from ..effects import MEMORY, WRITE, Effect, EffectModel

EDGES = ("begin", "end")


class _Marks(EffectModel):
    """Stays between what it was written between, as far as that has effects of its own."""

    effects = (Effect(WRITE, MEMORY),)


class TraceMarkOp(Kv.Operation, name="trace_mark", traits=[_Marks]):
    """The phase ``label`` of this warp begins or ends here.

    Attributes: label; edge, ``begin`` or ``end``. The warp's first thread notes the time, if it comes here. The kernel
    language makes the op only where launches are traced.
    """

    label: ir.StringAttr
    edge: ir.StringAttr

    def verify_invariants(self) -> bool:
        if not verify.string(self.label):
            return verify.fail(self, f"label must be a string that is not empty, got {self.label}")
        return verify.one_of(self, "edge", EDGES)


def trace_mark(label: str, edge: str) -> None:
    """``kv.trace_mark``: a phase begins or ends."""
    TraceMarkOp(ir.StringAttr.get(label), ir.StringAttr.get(edge))
