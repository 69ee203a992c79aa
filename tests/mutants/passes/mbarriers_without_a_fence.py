# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""No fence tells the asynchronous proxy of barriers that were set up: a bulk copy may report to one that it does not
see yet.
"""

SYMBOL = "kvarn.lowering.passes.tiles.distribute_kv_tiles:_initialize"
OLD = "ptx.fence_mbarrier_init()"
NEW = "pass"
CAUGHT_BY = ("tests/lowering/distribute_kv_tiles.mlir",)
