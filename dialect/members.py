# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Members that host-side caches and their handles in kernels share: everything that follows from static parameters.

Pure Python, as ``layout``. A class that mixes `SpecMembers` in sets ``_spec``.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from . import layout
from .dtypes import DType
from .layout import CacheSpec

RowT = TypeVar("RowT")


class SpecMembers:
    """Static parameters that caches, collections and operands have."""

    __slots__ = ()
    _spec: CacheSpec

    @property
    def dtype(self) -> DType:
        """Storage type of the elements."""
        return self._spec.dtype

    @property
    def scale_dtype(self) -> DType | None:
        """Type of the quantization scales; None without."""
        return self._spec.scale_dtype

    @property
    def num_heads(self) -> int:
        """KV heads H."""
        return self._spec.num_heads

    @property
    def head_size(self) -> int:
        """Elements of a head D."""
        return self._spec.head_size

    @property
    def page_size(self) -> int:
        """Tokens per page; 0 when continuous."""
        return self._spec.page_size

    @property
    def quantization_granularity(self) -> int:
        """Consecutive elements of a head that share one scale."""
        return self._spec.granularity


class CacheMembers(SpecMembers):
    """Static parameters that only caches and collections have."""

    __slots__ = ()

    @property
    def is_mla(self) -> bool:
        """Whether there is one latent head and no values."""
        return self._spec.is_mla

    @property
    def head_dim_granularity(self) -> int:
        """G: scales per token and head."""
        return self._spec.num_scales


class TileRows(Generic[RowT]):
    """The first rows of a token tile's pages: what ``populate`` gives, on the host and in kernels."""

    __slots__ = ()
    tile_rows: int
    page_size: int
    pair_cta: bool
    is_leader: bool

    @property
    def num_pages(self) -> int:
        """Pages that the tile spans."""
        return layout.populate_pages(self.tile_rows, self.page_size)

    @property
    def eff_page(self) -> int:
        """Rows per sub-tile."""
        return layout.effective_page(self.tile_rows, self.page_size)

    @property
    def cta_group(self) -> int:
        """CTAs that share the tile."""
        return 2 if self.pair_cta else 1

    def key_copies(self) -> list[tuple[RowT, int, int]]:
        """What this CTA copies of a key tile: (first row, row in its own tile, number of rows) per copy.

        In a CTA pair the leader copies the first half of the tile and its peer the second.
        """
        return self._placed(layout.key_copies(self.tile_rows, self.page_size, self.pair_cta, self.is_leader))

    def value_copies(self, part: int = 0, parts: int = 1) -> list[tuple[RowT, int, int]]:
        """What a CTA copies of one of ``parts`` equal parts of a value tile, in the format of ``key_copies``."""
        return self._placed(layout.value_copies(self.tile_rows, self.page_size, part, parts))

    def _placed(self, copies: tuple[layout.TileCopy, ...]) -> list[tuple[RowT, int, int]]:
        return [(self.get_row(p.entry * self.eff_page + p.skipped), p.at, p.rows) for p in copies]

    def get_row(self, offset: Any) -> RowT:
        """Row of the tile's token ``offset``."""
        raise NotImplementedError
