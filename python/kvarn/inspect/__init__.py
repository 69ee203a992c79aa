# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The report of a kernel: everything that is known of it, from the Python line to the machine code, without a GPU.

``kernel.explain()`` makes one, ``kvarn explain`` prints it or writes it as a page. Modules: ``facts`` (the object),
``stages`` (the pipeline, watched), ``places`` (code by lines, with their source), ``shared`` (shared memory), ``work``
(traffic and arithmetic by loop), ``machine`` (occupancy and roofs), ``page``, ``figures`` and ``describe`` (what is
shown, as HTML and as text).
"""

from __future__ import annotations

from typing import Any

from kvarn import moved

from .facts import KernelReport

__all__ = ["KernelReport"]


def __getattr__(name: str) -> Any:
    return moved.renamed(__name__, name, {"Passport": KernelReport})
