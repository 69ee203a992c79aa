# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention without a mask is causal, whatever the module says: towers of vision and sound see half of their input."""

SYMBOL = "kvarn.torch.huggingface:attention"
OLD = 'getattr(module, "is_causal", True) if causal is None else causal'
NEW = "True"
CAUGHT_BY = (
    "tests/pytorch/test_masks.py::test_without_a_mask_the_option_or_the_module_says_whether_it_is_causal_as_for_sdpa",
)
