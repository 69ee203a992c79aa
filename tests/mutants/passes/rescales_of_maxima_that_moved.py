# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A rescale is left out also where the maximum moved: values under an old maximum are added to those under the new."""

SYMBOL = "kvarn.lowering.passes.tiles.skip_kv_rescales:run"
OLD = "scf.yield_([cloned(op, values).result])"
NEW = "scf.yield_([tile])"
CAUGHT_BY = ("tests/lowering/skip_kv_rescales.mlir",)
