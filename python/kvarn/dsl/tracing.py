# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Phases of a kernel, for the timeline of its launches."""

from __future__ import annotations

from typing import Any

from kvarn import settings
from kvarn.dialect import ops

from .values import describe

__all__ = ["trace"]


class Trace:
    """What ``kv.trace`` gives."""

    kernel_scope = True
    __slots__ = ("label",)

    def __init__(self, label: str) -> None:
        self.label = label

    def __enter__(self) -> None:
        self._mark("begin")

    def __exit__(self, *raised: Any) -> None:
        if not any(raised):
            self._mark("end")

    def _mark(self, edge: str) -> None:
        if settings.traced():
            ops.trace_mark(self.label, edge)


def trace(label: str) -> Trace:
    """``with kv.trace("softmax"):`` names a phase of the kernel; where launches are traced, warps note its times.

    A warp's first thread notes them, so that a phase in a branch is seen only where that thread goes there. Outside of
    ``kv.tracing`` and ``kvarn trace`` nothing of it is in the kernel.
    """
    if not isinstance(label, str) or not label:
        raise TypeError(f"the label of kv.trace must be a string that is not empty, got {describe(label)}")
    return Trace(label)
