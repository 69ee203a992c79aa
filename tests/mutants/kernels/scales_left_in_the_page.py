# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of pages of 4-bit elements without zeros leave their scales behind: the copy has those of another page."""

SYMBOL = "kvarn.lowering.kernels.copies.pages:copy_page"
OLD = "if spec.scale_dtype is not None:"
NEW = "if spec.scale_dtype is not None and (spec.zero or not spec.packed):"
CAUGHT_BY = ("tests/caches/test_record_formats.py::test_pages_are_copied_with_their_scales",)
