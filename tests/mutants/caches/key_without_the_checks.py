# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The key of the compile cache does not say whether code has checks: a kernel that was compiled without them is taken
under KVARN_CHECK.
"""

SYMBOL = "kvarn.compiler:key_of"
OLD = '"check": settings.check, '
NEW = ""
CAUGHT_BY = ("tests/unit/test_contents.py::test_checks_may_be_asked_for_after_the_first_call",)
