# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A signature says nothing of the alignment of buffers: one that starts at 4 bytes gets the program of vectors of 16."""

SYMBOL = "kvarn.runtime.signatures:_sign_other"
OLD = "view.data & 15"
NEW = "0"
CAUGHT_BY = ("tests/unit/test_ops_calls.py::test_what_a_signature_holds_is_checked_again_when_it_changes",)
