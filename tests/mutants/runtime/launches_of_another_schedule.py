# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The table of launches does not compare schedules: a call launches the kernel of another schedule."""

SYMBOL = "python/kvarn/runtime/launches.cpp:find"
OLD = "same = same > 0 ? PyObject_RichCompareBool(record->schedule, schedule, Py_EQ) : same;"
NEW = ""
CAUGHT_BY = ("tests/runtime/test_launch.py::test_the_cases_pass_on_the_fake_driver[True]",)
