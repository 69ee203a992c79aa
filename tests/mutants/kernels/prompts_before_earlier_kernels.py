# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tile kernel of a batch that could be divided, and is not, does not wait for the kernels before it: no decode kernel
has waited for them.
"""

SYMBOL = "kvarn.lowering.kernels.attention.kernel:attention_kernel"
OLD = "            if a.few < 1:"
NEW = "            if a.few < 0:"
CAUGHT_BY = ("tests/ops/test_divided_batches.py::test_a_batch_of_any_class[even prompts]",)
