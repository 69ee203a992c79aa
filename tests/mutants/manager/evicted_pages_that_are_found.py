# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A page that is handed out is still found by the tokens that it had: a hit reads what another request wrote there."""

SYMBOL = "kvarn.paging.page_pool:PagePool.take"
OLD = "self.forget(page)"
NEW = "pass"
CAUGHT_BY = ("tests/caches/test_manager.py::test_evicted_content_is_forgotten",)
