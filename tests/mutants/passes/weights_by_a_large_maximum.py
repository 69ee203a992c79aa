# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Weights with the maximum so far are taken where it is large too: what a fused multiply-add leaves overflows."""

SYMBOL = "kvarn.lowering.passes.tiles.skip_kv_maxima:guess"
OLD = "large = arith.ori(large, score_weights.large(kept))"
NEW = "large = large"
CAUGHT_BY = ("tests/ops/test_score_numbers.py::test_every_finite_score_has_the_weight_that_it_has_in_float64",)
