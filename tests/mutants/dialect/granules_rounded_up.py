# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The granule of an element is rounded up: all but the first elements of a granule get the scale of the next."""

SYMBOL = "kvarn.dialect.layout:scale_offset"
OLD = "dim // spec.granularity"
NEW = "-(-dim // spec.granularity)"
CAUGHT_BY = ("tests/caches/test_caches.py::test_scale_index_is_a_floor_and_views_do_not_alias",)
