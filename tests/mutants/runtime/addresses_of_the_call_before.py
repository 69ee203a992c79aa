# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A packed launch keeps the addresses of the call that packed it, wherever the buffers of later calls are."""

SYMBOL = "kvarn.dispatch:OperationProgram.run"
OLD = "elif packed.values != values:"
NEW = "elif packed.values is None:"
CAUGHT_BY = ("tests/runtime/test_launch.py::test_the_cases_pass_on_the_fake_driver[False]",)
