# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The native launch cache does not look where the tensor of a pool is: a call writes memory that was given back."""

SYMBOL = "python/kvarn/runtime/operands.h:isInPlace"
OLD = "if (!PyTuple_Check(memory))"
NEW = "if (true)"
CAUGHT_BY = ("tests/runtime/test_launch.py::test_the_cases_pass_on_the_fake_driver[True]",)
