# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Look-ups in two layers of an fa3 collection are merged, whose layers have tables of their own: the second layer
reads pages of the first.
"""

SYMBOL = "kvarn.lowering.hoist_kv_lookups:root"
OLD = 'types.type_name(shown.type) == "collection" and types.spec_of(shown.type).kind == FA3'
NEW = "False"
CAUGHT_BY = ("tests/lowering/hoist_kv_lookups.mlir",)
