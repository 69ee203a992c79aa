# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The passport of a kernel: everything that is known of it, from the Python line to the machine code, without a GPU.

``kernel.explain()`` makes one, ``kvarn explain`` prints it or writes it as a page. Modules: ``facts`` (the object),
``stages`` (the pipeline, watched), ``places`` (code by lines, with their source), ``shared`` (shared memory), ``work``
(traffic and arithmetic by loop), ``machine`` (occupancy and roofs), ``page``, ``figures`` and ``describe`` (what is
shown, as HTML and as text).
"""

from __future__ import annotations

from .facts import Passport

__all__ = ["Passport"]
