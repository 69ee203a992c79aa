# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A NaN in the place of a number is no difference: kvarn bisect and --check-semantics-each pass code that computes
NaN.
"""

SYMBOL = "kvarn.tools.random_inputs:difference"
OLD = "np.isnan(x) & np.isnan(y)"
NEW = "np.isnan(y)"
CAUGHT_BY = ("tests/tools/test_bisect.py::test_a_difference_is_told_and_a_rounding_is_none",)
