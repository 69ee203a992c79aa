# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of pages of 4-bit elements leave scales and zeros behind: the copy has those of another page."""

SYMBOL = "kvarn.lowering.kernels.copies.pages:copy_page"
OLD = "if spec.scale_dtype is not None:"
NEW = "if spec.scale_dtype is not None and not spec.zero:"
CAUGHT_BY = ("tests/caches/test_records.py::test_rows_are_gathered_converted_and_copied",)
