# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes to what another warp still reads are no race: a stage that is filled too early goes unseen."""

SYMBOL = "kvarn.emulator.races:Races._check_write"
OLD = "if late.any():"
NEW = "if False:"
CAUGHT_BY = ("tests/emulator/test_emulator.py::test_overwriting_what_others_still_read_is_a_race",)
