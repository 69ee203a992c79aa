# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launches on two streams have the same scratch memory: partial results of one call overwrite those of the other."""

SYMBOL = "kvarn.runtime.program:_OnDevice.scratch"
OLD = "self._scratch.get(stream)"
NEW = "next(iter(self._scratch.values()), None)"
CAUGHT_BY = ("tests/runtime/test_launch.py::test_the_cases_pass_on_the_fake_driver[False]",)
