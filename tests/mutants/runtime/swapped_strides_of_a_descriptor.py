# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A descriptor of a cache has the stride of heads for slots and that of slots for heads: boxes bring other elements."""

SYMBOL = "kvarn.runtime.tensormap:of_tile"
OLD = "(spec.token_stride, spec.head_stride, 1)"
NEW = "(spec.head_stride, spec.token_stride, 1)"
CAUGHT_BY = ("tests/runtime/test_launch_tensormap.py::test_a_tile_has_dimensions_for_pages_slots_heads_and_depth",)
