# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernel that combines a decode's partial results takes the work units to be those of a batch without prompts."""

SYMBOL = "kvarn.lowering.kernels.attention.decode.combine:combine_kernel"
OLD = "units = work.work_units(max_units, total, tile_indptr, batch)"
NEW = "units = work.work_units(a.max_units, total, tile_indptr, batch)"
CAUGHT_BY = ("tests/ops/test_divided_batches.py::test_batches_of_one_shape_change_class[bf16]",)
