# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A page is free when all but one of its users are gone: another request is given it and overwrites what that one
reads.
"""

SYMBOL = "kvarn.paging.page_pool:PagePool.drop"
OLD = "self.references[page] == 0"
NEW = "self.references[page] <= 1"
CAUGHT_BY = ("tests/caches/test_manager.py::test_fork_copies_on_write",)
