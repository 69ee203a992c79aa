# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The host multiplies values by weights of zero, whatever they are: a NaN reaches rows that do not see it."""

SYMBOL = "kvarn.lowering.passes.host.vectorize_kv_tiles:lower"
OLD = "(hiding_product if HIDES in op.attributes else product)(a, b, c)"
NEW = "product(a, b, c)"
CAUGHT_BY = ("tests/ops/test_score_numbers.py::test_what_a_row_does_not_see_may_be_anything",)
