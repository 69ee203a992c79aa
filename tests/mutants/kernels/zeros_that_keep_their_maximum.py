# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The sums of weights times zeros are not rescaled when the maximum moves: values of 4-bit elements are off where later
scores are larger.
"""

SYMBOL = "kvarn.lowering.kernels.attention.decode.kernel:decode_kernel"
OLD = "zeros[i] * own"
NEW = "zeros[i]"
CAUGHT_BY = ("tests/caches/test_records.py::test_the_decode_kernel_reads_packed_elements[rotated groups of 32]",)
