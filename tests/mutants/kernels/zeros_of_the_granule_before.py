# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The output of every granule gets the zeros of the first one."""

SYMBOL = "kvarn.lowering.kernels.attention.decode.kernel:decode_kernel"
OLD = "(2 * (lane & 3) + u) * 4 + g % 4"
NEW = "(2 * (lane & 3) + u) * 4"
CAUGHT_BY = ("tests/caches/test_records.py::test_the_decode_kernel_reads_packed_elements[rotated groups of 32]",)
