# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A table entry that names no page is clamped to the page behind the pool: GPU code reads memory of others, as the
emulator said of foreign pools.
"""

SYMBOL = "kvarn.lowering.passes.kv.lower_kv_access:clamped_page"
OLD = 'Ix(ops.field(cache, "num_blocks")) - 1'
NEW = 'Ix(ops.field(cache, "num_blocks"))'
CAUGHT_BY = ("tests/lowering/lower_kv_access.mlir",)
