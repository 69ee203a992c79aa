# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A wait for all but n groups of copies lands one more: a kernel that waits for one group too few goes unseen."""

SYMBOL = "kvarn.emulator.barriers:_flush"
OLD = "while len(groups) > keep:"
NEW = "while groups and len(groups) >= keep:"
CAUGHT_BY = ("tests/emulator/test_ptx_interpreter.py::test_a_missing_wait_shows",)
