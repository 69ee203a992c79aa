# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A page is given back one position too early: the last key of a window is read from the null page."""

SYMBOL = "kvarn.paging.page_pool:AttentionSpan.first_visible"
OLD = "position - self.window + 1"
NEW = "position - self.window + 2"
CAUGHT_BY = (
    "tests/caches/test_hybrid.py::test_pages_behind_a_window_are_given_back_and_their_entries_name_the_null_page",
)
