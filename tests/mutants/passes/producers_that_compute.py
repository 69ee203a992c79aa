# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A producer warpgroup that has nothing to copy runs the kernel as if it were a consumer, by threads below zero."""

SYMBOL = "kvarn.lowering.passes.tiles.distribute_kv_tiles:Distribution.confine"
OLD = "            if op not in outside:\n"
NEW = "            if False:\n"
CAUGHT_BY = ("tests/docs/test_kernel_examples.py::test_gated_delta_rule[sm_90a, a producer]",)
