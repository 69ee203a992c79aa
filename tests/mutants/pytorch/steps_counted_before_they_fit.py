# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A step of transformers counts the one before it first, and then whether it fits: each refused step makes sequences
longer.
"""

SYMBOL = "kvarn.torch.huggingface.paged:PagedCache._begin"
OLD = "        batch, tokens = query.shape[0], query.shape[2]\n"
NEW = "        batch, tokens = query.shape[0], query.shape[2]\n        self._settle()\n"
CAUGHT_BY = ("tests/pytorch/test_paged_cache.py::test_after_a_step_that_does_not_fit_one_that_fits_goes_on",)
