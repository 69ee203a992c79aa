# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A cached page that a request takes stays among the free ones: it is evicted while it is used."""

SYMBOL = "kvarn.paging.page_pool:PagePool.share"
OLD = "del self.free[page]"
NEW = "pass"
CAUGHT_BY = ("tests/caches/test_manager.py::test_released_pages_stay_cached_until_evicted_least_recent_first",)
