# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What MLIR makes of Ctrl-C in a callback of a walk is an error of the pass, which except Exception swallows."""

SYMBOL = "kvarn.lowering.pass_base:is_interrupt"
OLD = 'return isinstance(error, RuntimeError) and str(error).startswith(_RAISED) and "KeyboardInterrupt" in str(error)'
NEW = "return False"
CAUGHT_BY = ("tests/runtime/test_interrupts.py::test_ctrl_c_in_a_pass_stays_one_and_the_next_call_is_right",)
