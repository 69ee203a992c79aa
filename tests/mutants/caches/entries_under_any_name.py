# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An entry of the compile cache that was renamed to another key is taken: another kernel runs."""

SYMBOL = "kvarn.compilation.disk_cache:_entry"
OLD = "key.encode() + payload"
NEW = "payload"
CAUGHT_BY = ("tests/compilation/test_cache.py::test_foreign_keys_are_refused",)
