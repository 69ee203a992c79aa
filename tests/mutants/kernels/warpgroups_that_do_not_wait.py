# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The warps of a warpgroup do not wait for one another: one reads rows that another has yet to write."""

SYMBOL = "kvarn.lowering.tiles.barriers:sync_group"
OLD = "sync(threads.group + GROUP_BARRIER, WARPGROUP)"
NEW = "pass"
CAUGHT_BY = ("tests/lowering/distribute_kv_tiles.mlir",)
