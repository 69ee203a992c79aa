# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A barrier between a shared operand and its last product counts as one after it: the next operand overwrites it."""

SYMBOL = "kvarn.lowering.tiles.exchange:mark"
OLD = 'range(own, last + 1) if op.name == "kv.tile_share" else range(own, own + 1)'
NEW = "range(own, own + 1)"
CAUGHT_BY = ("tests/dsl/test_tile_operands.py::test_computed_operands_of_several_products_of_an_iteration[256-sm_80]",)
