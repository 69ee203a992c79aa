# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Blocks that take their first work item from the counter, too, reset it as if they had one: the next launch takes
other numbers.
"""

SYMBOL = "kvarn.lowering.passes.tiles.queue_kv_work:take"
OLD = "            upper = arith.addi(upper, step)"
NEW = "            upper = arith.addi(upper, const(1))"
CAUGHT_BY = ("tests/ops/test_divided_batches.py::test_a_batch_of_any_class[a share of one block]",)
