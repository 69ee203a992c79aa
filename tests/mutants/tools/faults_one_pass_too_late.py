# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn bisect looks at what a pass was given: it names the pass behind the one at fault, or none."""

SYMBOL = "kvarn.tools.bisect:first_fault"
OLD = "checker.problem(found.text, after)"
NEW = "checker.problem(text, after)"
CAUGHT_BY = ("tests/tools/test_bisect.py::test_a_fault_planted_in_a_pass_is_found",)
