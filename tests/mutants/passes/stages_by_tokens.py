# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stages and barrier phases follow from the loop's variable, also where it counts tokens and not tiles."""

SYMBOL = "kvarn.lowering.passes.tiles.select_kv_copies:run"
OLD = "count_iterations(function)"
NEW = "pass"
CAUGHT_BY = ("tests/lowering/select_kv_copies.mlir", "tests/dsl/test_tile_loops.py")
