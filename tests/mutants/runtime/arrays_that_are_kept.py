# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is remembered of a shape holds the views of its first call, and they the arrays: memory is never given back."""

SYMBOL = "kvarn.runtime.overlap:Apart.__init__"
OLD = "self._operands = [(name, None if isinstance(o, BufferView) else o) for name, o in operands]"
NEW = "self._kept, self._operands = operands, [(n, None if isinstance(o, BufferView) else o) for n, o in operands]"
CAUGHT_BY = ("tests/ops/test_ops_memory.py::test_no_array_is_kept_alive_by_what_is_remembered_of_its_shape",)
