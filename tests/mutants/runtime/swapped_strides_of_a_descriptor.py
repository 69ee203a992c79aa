# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A descriptor of a cache has the stride of heads for slots and that of slots for heads: boxes bring other elements."""

SYMBOL = "kvarn.runtime.tensormap:of_tile"
OLD = "(spec.token_stride, spec.head_stride, 1)"
NEW = "(spec.head_stride, spec.token_stride, 1)"
CAUGHT_BY = (
    "tests/runtime/test_launch_tensormap.py::test_every_element_of_a_tile_with_pages_is_where_the_layout_says",
)
