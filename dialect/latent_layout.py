# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The format of a latent row: 8-bit or 16-bit elements, scales within the row, bf16 keys for the last query columns."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import CacheSpec

SCALE_BYTES = 4  # bytes of a scale within a latent row


@dataclass(frozen=True)
class RowFormat:
    """The format of a cache's rows, which may contain scales and bf16 keys besides elements.

    Attributes
    ----------
    spec : CacheSpec
    rope : int
        Columns whose keys are stored as bf16 after the 8-bit elements; 0 without.
    inline : int
        Elements per f32 scale, for scales that are stored between the 8-bit elements and the bf16 keys; 0 without.
    """

    spec: CacheSpec
    rope: int = 0
    inline: int = 0

    @property
    def plain(self) -> bool:
        """Whether a row consists of elements of the cache only."""
        return not (self.rope or self.inline)

    @property
    def size(self) -> int:
        """Columns of a key."""
        return self.content + self.rope

    @property
    def content(self) -> int:
        """Columns that are stored as elements of the cache."""
        stored = self.spec.data_size - 2 * self.rope
        return stored * self.inline // (self.inline + SCALE_BYTES) if self.inline else stored

    @property
    def rope_start(self) -> int:
        """Byte offset in a row of the first bf16 key."""
        return self.spec.head_size - 2 * self.rope
