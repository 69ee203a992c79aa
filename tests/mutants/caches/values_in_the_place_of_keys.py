# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Keys and values of another library's pool count as overlapping only where they begin at one byte: an appended value
shows in the keys of another page.
"""

SYMBOL = "kvarn.caches.foreign:_apart"
OLD = "if share("
NEW = "if b.data == a.data and share("
CAUGHT_BY = ("tests/ops/test_foreign.py::test_keys_and_values_that_share_bytes_are_no_pool",)
