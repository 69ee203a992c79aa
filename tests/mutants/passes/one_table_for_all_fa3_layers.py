# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Look-ups in two layers of an fa3 collection are merged, whose layers have tables of their own: a kernel that loads
token 0 of layers that have it in pages 1 and 3 reads page 1 twice.
"""

SYMBOL = "kvarn.lowering.passes.kv.hoist_kv_lookups:root"
OLD = 'types.type_name(shown.type) == "collection" and types.spec_of(shown.type).kind == FA3'
NEW = "False"
CAUGHT_BY = ("tests/lowering/hoist_kv_lookups.mlir",)
