# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The lengths of salts are not hashed: a request of salt bc of the manager a shares pages with one of c of ab."""

SYMBOL = "kvarn.page_pool:chain_root"
OLD = 'b"%d:" % len(salt) + salt'
NEW = "salt"
CAUGHT_BY = ("tests/unit/test_manager.py",)
