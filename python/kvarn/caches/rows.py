# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""First rows of a tile's pages: what ``populate`` gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.dialect import layout


@dataclass(frozen=True, eq=False)
class PagedRowIndices:
    """Where the pages of a tile of tokens begin, in rows.

    Attributes
    ----------
    tile_rows : int
        Tokens of the (value) tile, BN.
    page_size : int
        Tokens of a page; 0 for a continuous cache.
    rows : numpy.ndarray
        uint32 [BN // min(P, BN)]: the row of each sub-tile's first token. Always for the whole tile.
    pair_cta, is_leader : bool
        Whether two CTAs share the tile, and which of them this is. What each one *copies* depends on it, the rows do
        not.
    """

    tile_rows: int
    page_size: int
    rows: np.ndarray
    pair_cta: bool = False
    is_leader: bool = True

    @property
    def num_pages(self) -> int:
        return len(self.rows)

    @property
    def eff_page(self) -> int:
        """Rows of one sub-tile."""
        return layout.effective_page(self.tile_rows, self.page_size)

    @property
    def cta_group(self) -> int:
        """CTAs that share the tile."""
        return 2 if self.pair_cta else 1

    def key_copies(self) -> list[tuple[int, int, int]]:
        """What this CTA copies of the tile as keys: (first row, row of its own tile, rows) of each copy.

        Of a pair the leader copies the first half of the tile and its peer the second.
        """
        return self._placed(layout.key_copies(self.tile_rows, self.page_size, self.pair_cta, self.is_leader))

    def value_copies(self, part: int = 0, parts: int = 1) -> list[tuple[int, int, int]]:
        """What a CTA copies of the tile as values, of one of some equal parts; as :meth:`key_copies`."""
        return self._placed(layout.value_copies(self.tile_rows, self.page_size, part, parts))

    def _placed(self, copies: tuple[layout.TileCopy, ...]) -> list[tuple[int, int, int]]:
        return [(int(self.rows[p.entry]) + p.skipped, p.at, p.rows) for p in copies]

    def get_row(self, offset: Any) -> Any:
        """Row of the tile's token ``offset``, in [0, tile_rows); an array of offsets gives an array."""
        offsets = np.asarray(offset, np.int64)
        if ((offsets < 0) | (offsets >= self.tile_rows)).any():
            raise IndexError(f"offset must be in [0, {self.tile_rows}), got {offset}")
        page = self.eff_page
        rows = self.rows[offsets // page].astype(np.int64) + offsets % page
        return int(rows) if rows.ndim == 0 else rows
