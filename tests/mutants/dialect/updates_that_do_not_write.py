# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations that read and write a cache say that they only read: upstream passes drop them as dead code, and they are
given caches that must not be written.
"""

SYMBOL = "kvarn.dialect.effects:UpdatesCache"
OLD = "Effect(READ, CACHE), Effect(WRITE, CACHE)"
NEW = "Effect(READ, CACHE),"
CAUGHT_BY = ("tests/dialect/test_effects.py::test_every_operation_of_tier_one_writes_something",)
