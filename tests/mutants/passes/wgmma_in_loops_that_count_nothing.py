# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles that a while loop or a branch loads are for wgmma, too: nothing counts the phases of their barriers."""

SYMBOL = "kvarn.lowering.passes.tiles.assign_kv_layouts:choose_instruction"
OLD = "if uncounted is not None:"
NEW = "uncounted = None\n    if False:"
CAUGHT_BY = ("tests/dsl/test_tile_loops.py",)
