# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Accepted tokens are checked request by request, when those before are counted: a refused step changes lengths."""

SYMBOL = "kvarn.paging.manager:PagedKVCacheManager.step"
OLD = "self._accepted(names, batch, accepted)"
NEW = "(self._accepted([n], [r], accepted)[0] for n, r in zip(names, batch, strict=True))"
CAUGHT_BY = ("tests/caches/test_hybrid.py::test_a_step_that_is_refused_leaves_every_request_as_it_was",)
