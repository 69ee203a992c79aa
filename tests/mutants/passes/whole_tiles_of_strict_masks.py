# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A tile is whole though its last key fails a strict comparison, and is not masked: of 383 keys in tiles of 128, whose
mask ends at k < 383, the answer was not finite.
"""

SYMBOL = "kvarn.lowering.passes.tiles.split_kv_loops:Comparison._always"
OLD = "_value(total), const(self.strict)"
NEW = "_value(total), const(0)"
CAUGHT_BY = ("tests/lowering/split_kv_loops.mlir",)
