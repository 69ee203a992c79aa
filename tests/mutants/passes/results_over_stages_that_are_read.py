# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The rows of a result are written through any stage that is not released yet, also one that a later product reads."""

SYMBOL = "kvarn.lowering.passes.tiles.distribute_kv_tiles:Distribution.waited_for"
OLD = " and rows.is_free(op, layout)"
NEW = ""
CAUGHT_BY = ("tests/docs/test_kernel_examples.py::test_linear_attention[sm_90a, a producer]",)
