# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A cache with scales divides values by the second scale of keys."""

SYMBOL = "kvarn.lowering.kernels.append.append:DividedHead.read"
OLD = "self.half"
NEW = "0"
CAUGHT_BY = ("tests/caches/test_record_formats.py::test_nvfp4_has_a_second_scale_per_tensor",)
