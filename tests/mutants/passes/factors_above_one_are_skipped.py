# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A rescale is left out where a factor is larger than 1 or no number: a loop whose accumulator grows by exp2(1) an
iteration keeps it as it was.
"""

SYMBOL = "kvarn.lowering.skip_kv_rescales:run"
OLD = "arith.CmpFPredicate.UNE"
NEW = "arith.CmpFPredicate.OLT"
CAUGHT_BY = ("tests/lowering/skip_kv_rescales.mlir",)
