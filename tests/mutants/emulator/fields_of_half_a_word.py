# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""bfe of 64 bits takes its field out of the lower 32."""

SYMBOL = "kvarn.emulator.instructions:extract"
OLD = "t.value(a, m, dtype), at"
NEW = "t.value(a, m, np.uint32).astype(dtype), at"
CAUGHT_BY = ("tests/dsl/test_integers.py::test_fields_and_rotations_of_words_are_numpys",)
