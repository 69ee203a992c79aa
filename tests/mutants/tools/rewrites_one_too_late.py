# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn bisect stops halving with two rewrites left, and names the second though the first does it."""

SYMBOL = "kvarn.tools.bisect:_narrowed"
OLD = "while high - low > 1:"
NEW = "while high - low > 2:"
CAUGHT_BY = ("tests/tools/test_bisect.py::test_the_rewrite_that_does_it_is_found",)
