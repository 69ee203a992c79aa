# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A table that is short of one column for the longest sequence is taken: its last tokens have the page of the next
row.
"""

SYMBOL = "kvarn.caches.checks:table_covers"
OLD = "columns * page_size < max_cache_length"
NEW = "(columns + 1) * page_size < max_cache_length"
CAUGHT_BY = (
    "tests/caches/test_caches_checks.py::test_paged_collection_refuses",
    "tests/caches/test_caches_checks.py::test_the_other_kinds_refuse",
)
