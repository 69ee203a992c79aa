# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A swizzle of 64 bytes takes every line for 128 bytes: threads read other chunks than TMA wrote."""

SYMBOL = "kvarn.dialect.shared_layout:SharedLayout._swizzled"
OLD = "64: 1,"
NEW = "64: 0,"
CAUGHT_BY = ("tests/dialect/test_shared_layout.py::test_a_swizzled_tile_is_what_tma_writes",)
