# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where no tile of a divided batch is split, no block of the combine kernel waits.

It ends before the decode kernel, and a kernel that waits for it reads rows that are not written yet.
"""

SYMBOL = "kvarn.lowering.kernels.attention.key_splits:combine_kernel"
OLD = "if (kv.block_id.x * WARPS < items) | (kv.block_id.x == 0):"
NEW = "if kv.block_id.x * WARPS < items:"
CAUGHT_BY = ("tests/ops/test_divided_batches.py::test_batches_of_one_shape_change_class[bf16]",)
