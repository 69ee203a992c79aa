# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A warp with one row whose maximum is large computes all of its rows by the exact form."""

SYMBOL = "kvarn.lowering.tiles.score_weights:powers_by_row"
OLD = "return arith.select(large(under), powers(scores, scale_log2, maximum), less)"
NEW = "return powers(scores, scale_log2, maximum)"
CAUGHT_BY = ("tests/ops/test_score_numbers.py::test_a_row_has_the_same_bits_whatever_the_scores_of_other_rows_are",)
