# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The sum of weights is not rescaled when the maximum moves, by 8 powers of two or more: results are too small where
later scores are larger.
"""

SYMBOL = "kvarn.dsl.softmax:online_softmax"
OLD = "total * alpha + p.sum(axis=1)"
NEW = "total + p.sum(axis=1)"
CAUGHT_BY = ("tests/ops/test_attention_tiles.py::test_a_maximum_moves_where_later_scores_are_larger",)
