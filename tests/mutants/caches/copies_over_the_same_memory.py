# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Objects over memory whose copies may be the same memory are copied: a write to the copy changes the original."""

SYMBOL = "kvarn.runtime.copying:CopiedWhole.__reduce_ex__"
OLD = "needs_copies(view.owner, type(self).__name__)"
NEW = "view.owner"
CAUGHT_BY = ("tests/caches/test_copies.py::test_a_collection_over_memory_that_a_copy_may_share_is_not_copied",)
