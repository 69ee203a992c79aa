# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ctrl-C in a pass is told as a failure of the pass."""

SYMBOL = "kvarn.lowering.runner:run_step"
OLD = "if call.raised is not None and not isinstance(call.raised, Exception):"
NEW = "if call.raised is not None and isinstance(call.raised, SystemExit):"
CAUGHT_BY = ("tests/runtime/test_interrupts.py::test_ctrl_c_in_a_pass_stays_one_and_the_next_call_is_right",)
