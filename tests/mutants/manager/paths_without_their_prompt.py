# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A path of drafts need not begin with the tokens that are no drafts: rows of others are taken for those of the prompt,
and shared as its pages.
"""

SYMBOL = "kvarn.paging.drafts:CommitsDrafts.commit"
OLD = "own[: request.planned] != [*range(request.planned)] or (own and not request.planned)"
NEW = "own and not request.planned"
CAUGHT_BY = ("tests/caches/test_manager.py::test_a_path_begins_with_the_tokens_that_are_no_drafts",)
