# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lists of pages: what a sequence and KV head sees of its cache, for the attention kernels.

An entry is a page of the sequence, a column of its row of the lookup table; the kernels mask its tokens by their
positions, as any others. Entries that name no page of the row stand for tokens past every length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv

NOWHERE = 0x7FFF0000  # a token past every length, with room for the tokens of a page behind it


@dataclass(frozen=True)
class ChosenPages:
    """The lists of a batch inside a kernel: ``ids`` [B, H, K], ``counts`` [B, H] or None.

    ``columns`` are those of the lookup table, and ``page_size`` the tokens of each.
    """

    ids: Any
    counts: Any
    columns: Any
    page_size: int

    @property
    def unit(self) -> int:
        """Tokens of an entry."""
        return self.page_size

    def of(self, b: Any) -> Any:
        """What the lists of a sequence are found by."""
        return b

    @kv.func
    def count(self, b: Any, head: Any) -> Any:
        """Entries of a list."""
        if self.counts is None:
            return self.ids.shape[2]
        return kv.math.clamp(self.counts[b, head], 0, self.ids.shape[2])

    @kv.func
    def longest(self, b: Any, heads: int) -> Any:
        """Entries of the longest list of a sequence."""
        found = self.count(b, 0)
        if self.counts is not None:
            for h in kv.static(range(1, heads)):
                found = kv.math.max(found, self.count(b, h))
        return found

    @kv.func
    def first_token(self, b: Any, head: Any, entry: Any, count: Any) -> Any:
        """The first token of an entry's page; past all tokens where it names none, or lies past the list's end."""
        page = kv.i32(-1)
        if entry < count:
            page = self.ids[b, head, entry]
        return self.token(page)

    @kv.func
    def first_token_of(self, b: Any, head: Any, entry: Any) -> Any:
        """As :meth:`first_token`, of an entry that the list has: without a branch, which no pass would look into."""
        return self.token(self.ids[b, head, kv.math.clamp(entry, 0, self.ids.shape[2] - 1)])

    @kv.func
    def token(self, page: Any) -> Any:
        """The first token of a page of a list."""
        return kv.where(kv.u32(page) < kv.u32(self.columns), page * self.page_size, NOWHERE)


def chosen_pages(collection: Any, ids: Any, counts: Any) -> ChosenPages | None:
    """The lists of a kernel's arguments; None where there are none."""
    if ids is None:
        return None
    return ChosenPages(ids, counts, collection.field("lookup_columns"), collection.page_size)
