# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A last tile that has one key is left out: attention over one key more than whole tiles does not see that key."""

SYMBOL = "kvarn.lowering.kernels.attention.key_splits:key_range"
OLD = "(end + (keys - 1)) // keys"
NEW = "(end + (keys - 2)) // keys"
CAUGHT_BY = ("tests/ops/test_key_splits.py::test_every_mask_leaves_the_keys_of_the_model",)
