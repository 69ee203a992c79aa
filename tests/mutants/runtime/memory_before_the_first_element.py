# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What lies before the first element, of a negative stride, counts as nobody's: an output that shares it with an input
is taken.
"""

SYMBOL = "kvarn.runtime.overlap:Extent.ends"
OLD = "sum(s for s in spans if s < 0)"
NEW = "0"
CAUGHT_BY = ("tests/ops/test_ops_memory.py::test_sums_go_where_a_summand_is_or_apart_from_both",)
