# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two neighbouring slots of a page share the place of their scales: the later token's scale is that of both."""

SYMBOL = "kvarn.dialect.layout:scale_offset"
OLD = "slot * spec.scales_token_stride"
NEW = "slot // 2 * spec.scales_token_stride"
CAUGHT_BY = ("tests/caches/test_record_formats.py::test_append_and_loads_are_those_of_numpy",)
