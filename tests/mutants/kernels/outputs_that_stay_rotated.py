# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The output of a decode over rotated heads is not rotated back."""

SYMBOL = "kvarn.lowering.kernels.attention.decode.kernel:decode_kernel"
OLD = "if c.spec.rotation:"
NEW = "if False:"
CAUGHT_BY = ("tests/caches/test_records.py::test_attention_reads_the_values_that_elements_stand_for",)
