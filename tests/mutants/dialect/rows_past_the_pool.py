# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The rows of a view end one page behind its last: a descriptor lets TMA read memory that is not the pool's."""

SYMBOL = "kvarn.dialect.layout:num_rows"
OLD = "(num_blocks - 1)"
NEW = "num_blocks"
CAUGHT_BY = (
    "tests/runtime/test_launch_tensormap.py::test_rows_of_a_tile_are_the_layouts_rows",
    "tests/caches/test_members.py::test_num_kv_rows_spans_the_view",
)
