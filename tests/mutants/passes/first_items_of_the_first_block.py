# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A loop over work items that counts from 0 starts every block with the first item."""

SYMBOL = "kvarn.lowering.passes.tiles.queue_kv_work:division_of"
OLD = "    if iteration == variable:\n"
NEW = "    if True:\n"
CAUGHT_BY = ("tests/dsl/test_tile_schedules.py::test_each_work_item_goes_to_one_block[3-256]",)
