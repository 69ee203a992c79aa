# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The output of prompts by tiles over rotated heads is not rotated back."""

SYMBOL = "kvarn.lowering.kernels.attention.expansion:expand"
OLD = "rotated.rotate(case, at, op, op.out, few)"
NEW = "pass"
CAUGHT_BY = ("tests/caches/test_records.py::test_tiles_of_prompts_are_converted_from_packed_elements[rotated heads]",)
