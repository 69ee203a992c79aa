# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The hash of a page says nothing of the pages before: a request takes keys of the same tokens behind another
beginning.
"""

SYMBOL = "kvarn.paging.page_pool:chain"
OLD = "digest + packed.tobytes()"
NEW = "packed.tobytes()"
CAUGHT_BY = ("tests/caches/test_manager.py::test_prefix_is_reused_and_leaves_a_token",)
