# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The verifier takes loads of scales from caches that have none: the pass that lowers them fails without naming the
op's rule.
"""

SYMBOL = "kvarn.dialect.verify:needs_scales"
OLD = 'spec.quantized or fail(op, "needs a quantized cache (one with a scale type), got one without scales")'
NEW = "True"
CAUGHT_BY = ("tests/dialect/invalid.mlir",)
