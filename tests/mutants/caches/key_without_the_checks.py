# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The key of the compile cache does not say whether code has checks: a kernel that was compiled without them is taken
under KVARN_CHECK.
"""

SYMBOL = "kvarn.compilation.driver:key_of"
OLD = '"check": settings.check, '
NEW = ""
CAUGHT_BY = ("tests/compilation/test_keys.py::test_settings_are_part_of_the_keys",)
