# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Work of the sequences after those that the threads of a block count at once is numbered as if nothing came before."""

SYMBOL = "kvarn.lowering.kernels.scans:sums_before"
OLD = "running = running + here"
NEW = "running = running + (here - here)"
CAUGHT_BY = ("tests/ops/test_divided_batches.py::test_a_batch_of_any_class[more sequences than threads]",)
