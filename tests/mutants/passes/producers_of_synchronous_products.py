# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A producer is taken beside products by mma.sync, which tell it nothing: it overwrites what they still read."""

SYMBOL = "kvarn.lowering.schedules.limits:why_not_by_mma"
OLD = '"producer", '
NEW = ""
CAUGHT_BY = ("tests/dsl/test_tile_schedules.py::test_a_schedule_needs_tiles_and_what_its_target_has",)
