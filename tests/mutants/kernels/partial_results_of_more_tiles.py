# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A divided batch with more tiles than its launch assumed has as many splits, whose partial results lie past the end of
their memory.
"""

SYMBOL = "kvarn.lowering.kernels.attention.key_splits:splits_of"
OLD = "kv.math.clamp(quotient(t.most_split_tiles * t.splits, kv.math.max(many.count * heads, 1)), 1, most)"
NEW = "most"
CAUGHT_BY = (
    "tests/ops/test_divided_batches.py::test_a_batch_of_any_class[more tiles than there is room for splits of]",
)
