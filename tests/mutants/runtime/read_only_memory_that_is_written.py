# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A launch may write what the code takes for read-only, where both arguments begin at one address: loads before a store
read what is stored.
"""

SYMBOL = "kvarn.runtime.overlap:Apart._check"
OLD = "not (same and distance == 0 and a == b)"
NEW = "distance != 0"
CAUGHT_BY = ("tests/ops/test_overlap.py::test_a_kernel_writes_nothing_that_its_code_takes_for_read_only",)
