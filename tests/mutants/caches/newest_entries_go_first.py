# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A full compile cache removes what was used last: what is used most is compiled again and again."""

SYMBOL = "kvarn.compilation.disk_cache:CompileCache._clean_up"
OLD = "sorted(files)"
NEW = "sorted(files, reverse=True)"
CAUGHT_BY = ("tests/compilation/test_cache.py::test_least_recently_used_goes_first",)
