# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A box that begins before the first row brings what lies there, not zeros."""

SYMBOL = "kvarn.emulator.tma:places"
OLD = "(i >= 0) & (i < extent)"
NEW = "(i < extent)"
CAUGHT_BY = ("tests/caches/test_tma_copies.py::test_what_lies_out_of_bounds_is_zeros",)
