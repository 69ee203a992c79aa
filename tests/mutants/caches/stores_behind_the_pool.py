# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A store through a table entry that is the number of pages is done, not dropped: it writes behind the pool."""

SYMBOL = "kvarn.caches.model:HostModel._write"
OLD = 'page < self._at["num_blocks"]'
NEW = 'page <= self._at["num_blocks"]'
CAUGHT_BY = ("tests/caches/test_caches.py::test_store_through_a_page_out_of_range_is_dropped",)
