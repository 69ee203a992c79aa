# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of one token store padding as if it were a token, and see it later."""

SYMBOL = "kvarn.torch.huggingface.paged:PagedCache._begin"
OLD = "if isinstance(mask, Mask) and not mask.complete(end) else None"
NEW = "if isinstance(mask, Mask) and tokens > 1 and not mask.complete(end) else None"
CAUGHT_BY = ("tests/pytorch/test_paged_cache.py::test_steps_of_any_size_leave_padding_out_wherever_it_is",)
