# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A step of transformers that fails in its second layer is counted by the next: sequences have tokens that no layer has
seen whole.
"""

SYMBOL = "kvarn.torch.huggingface.paged:PagedCache.failed"
OLD = "if self._inside or layer not in self._begun:"
NEW = "if not self._begun:"
CAUGHT_BY = ("tests/pytorch/test_paged_cache.py::test_a_step_that_fails_in_a_layer_has_not_been",)
