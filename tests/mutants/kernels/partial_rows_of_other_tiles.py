# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Partial results lie by split and then by tile, at the stride of the other order: tiles overwrite results of one
another.
"""

SYMBOL = "kvarn.lowering.kernels.attention.key_splits:partial_row"
OLD = "tile * max_splits + split"
NEW = "split * max_splits + tile"
CAUGHT_BY = ("tests/ops/test_key_splits.py::test_splits_change_roundings_only",)
