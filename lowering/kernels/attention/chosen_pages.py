# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lists of pages: the pages of its cache that a sequence and KV head attends to, in the attention kernels.

An entry is a page of the sequence, as a column of its row of the lookup table; the kernels mask its tokens by their
positions as usual. Entries outside of the row count as tokens past every length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv

NOWHERE = 0x7FFF0000  # a token position past every length; adding a page's tokens does not overflow


@dataclass(frozen=True)
class ChosenPages:
    """The lists of a batch inside a kernel: ``ids`` [B, H, K], ``counts`` [B, H] or None.

    ``columns`` is the length of a lookup table row, and ``page_size`` the tokens per page.
    """

    ids: Any
    counts: Any
    columns: Any
    page_size: int

    @property
    def unit(self) -> int:
        """Tokens per entry."""
        return self.page_size

    def of(self, b: Any) -> Any:
        """The index of a sequence's lists."""
        return b

    @kv.func
    def count(self, b: Any, head: Any) -> Any:
        """Entries in a list."""
        if self.counts is None:
            return self.ids.shape[2]
        return kv.math.clamp(self.counts[b, head], 0, self.ids.shape[2])

    @kv.func
    def longest(self, b: Any, heads: int) -> Any:
        """Entries in the longest list of a sequence."""
        found = self.count(b, 0)
        if self.counts is not None:
            for h in kv.static(range(1, heads)):
                found = kv.math.max(found, self.count(b, h))
        return found

    @kv.func
    def first_token(self, b: Any, head: Any, entry: Any, count: Any) -> Any:
        """The first token of an entry's page; past all tokens if the entry is invalid or past the list's end."""
        page = kv.i32(-1)
        if entry < count:
            page = self.ids[b, head, entry]
        return self.token(page)

    @kv.func
    def first_token_of(self, b: Any, head: Any, entry: Any) -> Any:
        """As :meth:`first_token` for an entry of the list, without a branch, which would stop passes."""
        return self.token(self.ids[b, head, kv.math.clamp(entry, 0, self.ids.shape[2] - 1)])

    @kv.func
    def token(self, page: Any) -> Any:
        """The first token of a listed page."""
        return kv.where(kv.u32(page) < kv.u32(self.columns), page * self.page_size, NOWHERE)


def chosen_pages(collection: Any, ids: Any, counts: Any) -> ChosenPages | None:
    """The lists of a kernel's arguments; None without any."""
    if ids is None:
        return None
    return ChosenPages(ids, counts, collection.field("lookup_columns"), collection.page_size)
