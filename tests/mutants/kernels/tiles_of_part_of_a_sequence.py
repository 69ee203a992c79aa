# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A sequence of a divided batch whose rows do not fill its last tile has no number for that tile."""

SYMBOL = "kvarn.lowering.kernels.attention.queries:tiles_of_sequence"
OLD = "(queries.length(b) * group + (size - 1)) // size"
NEW = "(queries.length(b) * group) // size"
CAUGHT_BY = ("tests/ops/test_edges_attention.py::test_every_form_at_every_edge[few rows by a decode, others by tiles]",)
