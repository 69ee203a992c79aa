# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An extension of kvarn: ``kv.prefetch_page``, ``kv.page_bounds``, and caches of the kind ``split_keys``."""

from .bounds import page_bounds
from .prefetch import prefetch_page
from .split_keys import SplitKeys

__all__ = ["SplitKeys", "page_bounds", "prefetch_page"]
