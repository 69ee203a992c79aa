# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tile kernel of a divided batch does not wait for the decode kernel beside it: a kernel that waits for the tile
kernel may read rows before the decode kernel has written them.
"""

SYMBOL = "kvarn.lowering.kernels.attention.kernel:attention_kernel"
OLD = "        if s.overlaps:  # a kernel that waits"
NEW = "        if False:  # a kernel that waits"
CAUGHT_BY = ("tests/ops/test_edges_attention.py::test_every_form_at_every_edge[few rows by a decode, others by tiles]",)
