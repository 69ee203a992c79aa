# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernel report: everything known about a kernel, from the Python line to the machine code, without a GPU.

``kernel.explain()`` makes one, ``kvarn explain`` prints it or writes it as a page. Modules: ``facts`` (the object),
``stages`` (an observed run of the pipeline), ``source_map`` (code lines with their source lines), ``shared`` (shared
memory), ``work`` (traffic and arithmetic per loop), ``machine`` (occupancy and rooflines), ``page``, ``figures`` and
``describe`` (the report as HTML and as text).
"""

from __future__ import annotations

from typing import Any

from kvarn import moved

from .facts import KernelReport

__all__ = ["KernelReport"]


def __getattr__(name: str) -> Any:
    return moved.renamed(__name__, name, {"Passport": KernelReport})
