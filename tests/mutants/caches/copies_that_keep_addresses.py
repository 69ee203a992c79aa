# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A view of a cache is copied as Python does by default: with the address of the original's memory."""

SYMBOL = "kvarn.runtime.copying:NoCopies.__reduce_ex__"
OLD = "raise TypeError("
NEW = "return super().__reduce_ex__(protocol) if protocol else str("
CAUGHT_BY = ("tests/caches/test_copies.py::test_a_view_of_a_pool_has_no_copies",)
