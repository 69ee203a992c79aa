# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A range whose steps are counted has one more where its end is a whole number of steps away."""

SYMBOL = "kvarn.dsl.calls:_counted"
OLD = "(span - 1) // size + 1"
NEW = "span // size + 1"
CAUGHT_BY = ("tests/dsl/test_integers.py::test_a_range_has_pythons_numbers_up_to_the_ends_of_its_type",)
