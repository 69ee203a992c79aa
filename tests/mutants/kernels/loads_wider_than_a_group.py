# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Prompts over groups of 16 elements of 4 bits are read by loads of 32, which give raw bytes."""

SYMBOL = "kvarn.lowering.tiles.cache_rows:load_width"
OLD = "if spec.packed:"
NEW = "if False:"
_GENERAL = "tests/caches/test_record_formats.py::test_general_kernels_read_groups_that_are_narrower_than_their_loads"
CAUGHT_BY = (_GENERAL,)
