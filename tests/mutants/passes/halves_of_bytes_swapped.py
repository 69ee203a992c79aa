# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The odd element of a byte is read as the even one."""

SYMBOL = "kvarn.lowering.passes.kv.lower_kv_access:unpacked"
OLD = "vector.interleave(low, high)"
NEW = "vector.interleave(high, low)"
CAUGHT_BY = ("tests/lowering/lower_kv_access.mlir",)
