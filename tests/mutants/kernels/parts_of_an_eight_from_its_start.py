# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loads of fewer than eight elements of a user's own code give the first ones of their eight."""

SYMBOL = "kvarn.lowering.passes.kv.lower_kv_access:decoded"
OLD = "part == first"
NEW = "part == -1"
_PROMPTS = "tests/caches/test_record_formats.py::test_attention_of_prompts_reads_the_values_that_elements_stand_for"
CAUGHT_BY = (f"{_PROMPTS}[6 bits-sm_90a]",)
