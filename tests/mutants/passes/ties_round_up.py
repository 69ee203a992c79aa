# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Halfway between two 8-bit floats is rounded up, not to even: 1.0625 becomes 1.125 in f8e4m3."""

SYMBOL = "kvarn.lowering.passes.backend.lower_kv_casts:narrow_from_f32"
OLD = "(1 << (dropped - 1)) - 1"
NEW = "1 << (dropped - 1)"
CAUGHT_BY = ("tests/dsl/test_dsl_values.py::test_cast_to_8_bits_rounds_to_the_nearest_and_from_halfway_to_even",)
