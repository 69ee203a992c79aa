# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A known call whose buffers have moved is not checked again: its output may lie over what it reads."""

SYMBOL = "kvarn.dispatch:_Packed.move"
OLD = "overlap.meet(self.meetings, values)"
NEW = "False"
CAUGHT_BY = ("tests/runtime/test_launch.py::test_the_cases_pass_on_the_fake_driver[False]",)
