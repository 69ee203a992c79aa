# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What lies in a latent row besides its elements: scales of them, and keys of bf16 for the last query columns."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import CacheSpec

SCALE_BYTES = 4  # of a scale that lies in a latent row


@dataclass(frozen=True)
class RowFormat:
    """The columns of a row of a cache, in which scales and bf16 keys may lie.

    Attributes
    ----------
    spec : CacheSpec
    rope : int
        Columns whose keys lie as bf16 behind the 8-bit ones; 0: none do.
    inline : int
        Elements that share one of the f32 scales that lie between these and the 8-bit elements; 0: none do.
    """

    spec: CacheSpec
    rope: int = 0
    inline: int = 0

    @property
    def plain(self) -> bool:
        """Whether a row is elements of the cache and nothing else."""
        return not (self.rope or self.inline)

    @property
    def size(self) -> int:
        """Columns of a key."""
        return self.content + self.rope

    @property
    def content(self) -> int:
        """Columns that are elements of the cache."""
        stored = self.spec.data_size - 2 * self.rope
        return stored * self.inline // (self.inline + SCALE_BYTES) if self.inline else stored

    @property
    def rope_start(self) -> int:
        """Byte of a row where bf16 keys start."""
        return self.spec.head_size - 2 * self.rope
