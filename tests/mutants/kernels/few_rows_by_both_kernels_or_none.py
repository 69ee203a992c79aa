# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Of a batch that is divided by the sequences' new tokens, both kernels have those of many: nobody those of few."""

SYMBOL = "kvarn.lowering.kernels.attention.case:Division"
OLD = "return kv.where(few, 0, rows) if self.many else kv.where(few, rows, 0)"
NEW = "return kv.where(few, 0, rows)"
CAUGHT_BY = ("tests/ops/test_edges_attention.py::test_every_form_at_every_edge[few rows by a decode, others by tiles]",)
