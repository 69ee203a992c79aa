# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pages that are not full count as shared: attention over the prefix reads tokens that are not there yet."""

SYMBOL = "kvarn.paging.prefixes:groups"
OLD = "np.minimum(common, np.minimum(pages[1:], pages[:-1]))"
NEW = "common"
CAUGHT_BY = (
    "tests/ops/test_shared_prefixes.py::test_groups_are_neighbours_with_the_same_full_pages_and_save_the_most",
)
