# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A loaded tile is negated in place although another product reads it, too."""

SYMBOL = "kvarn.lowering.passes.tiles.assign_kv_layouts:loaded"
OLD = "user != op and not _is_alternative(user, op) for user"
NEW = "False for user"
CAUGHT_BY = ("tests/dsl/test_tile_operands.py::test_a_negated_tile_does_not_change_the_tile[sm_90a]",)
