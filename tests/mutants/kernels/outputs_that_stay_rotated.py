# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The output of a decode over rotated heads is not rotated back."""

SYMBOL = "kvarn.lowering.kernels.attention.decode.kernel:decode_kernel"
OLD = "if c.spec.rotation:"
NEW = "if False:"
CAUGHT_BY = ("tests/caches/test_records.py::test_the_decode_kernel_reads_packed_elements[rotated groups of 32]",)
