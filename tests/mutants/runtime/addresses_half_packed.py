# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An interrupt while addresses are packed leaves some of them in the launch of the call before."""

SYMBOL = "kvarn.dispatch:_Packed.move"
OLD = "self.values = None"
NEW = "pass"
CAUGHT_BY = ("tests/runtime/test_launch.py::test_the_cases_pass_on_the_fake_driver[False]",)
