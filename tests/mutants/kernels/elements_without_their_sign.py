# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The decode kernel reads the magnitudes of f4e2m1 elements."""

SYMBOL = "kvarn.lowering.kernels.elements:moved"
OLD = "_bits(0x80008000)"
NEW = "0"
CAUGHT_BY = ("tests/caches/test_record_formats.py::test_the_decode_kernel_reads_packed_elements[mxfp4]",)
