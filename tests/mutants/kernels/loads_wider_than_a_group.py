# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Prompts over groups of 16 elements of 4 bits are read by loads of 32, which give raw bytes."""

SYMBOL = "kvarn.lowering.tiles.cache_rows:load_width"
OLD = "if spec.packed:"
NEW = "if False:"
CAUGHT_BY = ("tests/caches/test_public_formats.py::test_nvfp4_is_written_and_read_in_place",)
