# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Named phases of a kernel, for the timeline of its launches."""

from __future__ import annotations

from typing import Any

from kvarn import settings
from kvarn.dialect import ops

from .values import describe

__all__ = ["trace"]


class Trace:
    """The context manager that ``kv.trace`` returns."""

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
    """``with kv.trace("softmax"):`` names a phase of the kernel; in traced launches each warp records its times.

    A warp's first thread records them, so a phase inside a branch is recorded only if that thread takes the branch.
    Outside of ``kv.tracing`` and ``kvarn trace`` the compiled kernel contains no trace code.
    """
    if not isinstance(label, str) or not label:
        raise TypeError(f"the label of kv.trace must be a string that is not empty, got {describe(label)}")
    return Trace(label)
