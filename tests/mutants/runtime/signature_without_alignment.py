# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A signature says nothing of the alignment of buffers: one at 4 bytes gets the program of vectors of 16."""

SYMBOL = "kvarn.runtime.signatures:_sign_other"
OLD = "view.data & 15"
NEW = "0"
CAUGHT_BY = ("tests/runtime/test_signatures.py::test_calls_that_differ_have_signatures_that_differ",)
