# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A packed launch is used again though a buffer that TMA reads has moved: its descriptor has the address of before."""

SYMBOL = "kvarn.dispatch:Operation._specialise"
OLD = "if i not in buffers_ or i in described"
NEW = "if i not in buffers_"
CAUGHT_BY = ("tests/runtime/test_launch.py::test_the_cases_pass_on_the_fake_driver[False]",)
