# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A large maximum is taken off exact products of latent rows, though it is rounded: weights are infinite or zeros."""

SYMBOL = "kvarn.lowering.kernels.mla.rows:softmax"
OLD = "if are_large(m):"
NEW = "if are_large([kv.f32(0.0)]):"
CAUGHT_BY = ("tests/ops/test_score_numbers.py::test_products_of_any_size_have_the_weights_that_they_have_in_float64",)
