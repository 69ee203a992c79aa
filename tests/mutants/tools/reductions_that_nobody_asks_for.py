# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv-reduce takes every valid candidate, also one that the command finds of no interest."""

SYMBOL = "kvarn.tools.reduce:Reducer._try"
OLD = "if text == self.text or not self._asks(text):"
NEW = "if text == self.text:"
CAUGHT_BY = ("tests/tools/test_reduce.py::test_what_the_command_does_not_look_at_goes",)
