# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn tune keeps the slowest schedule that it measured, and writes none, as it is no better than the built-in one."""

SYMBOL = "kvarn.measure.tune:search"
OLD = "us < best_us"
NEW = "us > best_us"
CAUGHT_BY = ("tests/tools/test_tune.py::test_the_search_finds_the_best_schedule_step_by_step",)
