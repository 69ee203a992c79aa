# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An append over an 8-bit cache divides values by the scale of all keys."""

SYMBOL = "kvarn.lowering.kernels.append.append:scaled"
OLD = "kv.f32(row) / tensor_scales[half]"
NEW = "kv.f32(row) / tensor_scales[0]"
_WRITTEN = "tests/ops/test_cache_operations.py::test_new_tokens_are_written_and_nothing_else"
CAUGHT_BY = (f"{_WRITTEN}[append: f8e4m3 by the scales of tensors, of bf16: host]",)
