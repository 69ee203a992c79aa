# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An append over an 8-bit cache divides values by the scale of all keys."""

SYMBOL = "kvarn.lowering.kernels.append.append:copy_kernel"
OLD = "row = kv.f32(loaded[n]) / scales[n] if scaled"
NEW = "row = kv.f32(loaded[n]) / scales[0] if scaled"
_WRITTEN = "tests/ops/test_cache_operations.py::test_new_tokens_are_written_and_nothing_else"
CAUGHT_BY = (f"{_WRITTEN}[append: f8e4m3 by the scales of tensors, of bf16: host]",)
