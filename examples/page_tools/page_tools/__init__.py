# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two operations for kvarn from a package of their own: ``kv.prefetch_page`` and ``kv.page_bounds``."""

from .bounds import page_bounds
from .prefetch import prefetch_page

__all__ = ["page_bounds", "prefetch_page"]
