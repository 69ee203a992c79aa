# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attributes that passes leave for one another are taken whatever they hold, and a later pass raises on them."""

SYMBOL = "kvarn.dialect.annotations:problems"
OLD = "if not KINDS[name][1](attribute)"
NEW = "if not KINDS[name][1]"
CAUGHT_BY = ("tests/lowering/verify_kv.mlir",)
