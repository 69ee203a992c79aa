# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The rows of a result are written through the memory of any loaded rows, also of those that a later product reads."""

SYMBOL = "kvarn.lowering.passes.tiles.distribute_kv_tiles:StagedRows"
OLD = "return following.index(self.last) <= following.index(op)"
NEW = "return True"
CAUGHT_BY = ("tests/dsl/test_tile_operands.py::test_rows_that_are_read_after_a_store_stay[sm_90a]",)
