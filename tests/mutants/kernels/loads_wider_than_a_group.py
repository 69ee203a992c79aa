# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Prompts over groups of 16 elements of 4 bits are read by loads of 32, which give raw bytes."""

SYMBOL = "kvarn.lowering.tiles.cache_rows:load_width"
OLD = "if spec.packed:"
NEW = "if False:"
_PROMPTS = "tests/caches/test_record_formats.py::test_attention_of_prompts_reads_the_values_that_elements_stand_for"
CAUGHT_BY = (f"{_PROMPTS}[nvfp4-sm_90a]",)
