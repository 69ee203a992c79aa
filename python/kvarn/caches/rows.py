# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""First rows of a tile's pages, the result of ``populate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.dialect.members import TileRows


@dataclass(frozen=True, eq=False)
class PagedRowIndices(TileRows[Any]):
    """The first row of each page of a tile of tokens.

    Attributes
    ----------
    tile_rows : int
        Tokens of the (value) tile, BN.
    page_size : int
        Tokens of a page; 0 for a continuous cache.
    rows : numpy.ndarray
        uint32 [BN // min(P, BN)]: the row of each page's first token in the tile. Always for the whole tile.
    pair_cta, is_leader : bool
        Whether two CTAs share the tile, and which of them this is. They affect what each CTA *copies*, not the rows.
    """

    tile_rows: int
    page_size: int
    rows: np.ndarray
    pair_cta: bool = False
    is_leader: bool = True

    def get_row(self, offset: Any) -> Any:
        """Row of the tile's token ``offset``, in [0, tile_rows); an array of offsets gives an array."""
        offsets = np.asarray(offset, np.int64)
        if ((offsets < 0) | (offsets >= self.tile_rows)).any():
            raise IndexError(f"offset must be in [0, {self.tile_rows}), got {offset}")
        page = self.eff_page
        rows = self.rows[offsets // page].astype(np.int64) + offsets % page
        return int(rows) if rows.ndim == 0 else rows
