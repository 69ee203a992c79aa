# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The arguments of the kernels of decode attention, as structs, and what a warp has of every sequence.

What they read and write for an operation is named as in :class:`AttentionArguments`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..softmax import arrays_read


@dataclass(frozen=True)
class DecodeArguments:
    """What the decode kernel reads and writes; None what an operation does not have.

    Attributes
    ----------
    partials, counters : i8 [bytes]
        Partial results, and how many of a sequence and part there are.
    """

    collection: Any
    layer: Any
    query: Any
    extents: Any
    kv_offsets: Any
    scale: Any
    out: Any
    partials: Any
    counters: Any
    sinks: Any
    lse: Any
    slopes: Any
    prior: Any
    prior_lse: Any
    pages: Any
    page_counts: Any
    array0: Any
    array1: Any
    array2: Any
    array3: Any
    block_mask: Any

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the functions, as these read them."""
        return arrays_read(self.array0, self.array1, self.array2, self.array3)


@dataclass(frozen=True)
class CombineArguments:
    """What the kernel that combines partial results reads and writes.

    Attributes
    ----------
    max_units : i32
        Work units of the decode kernel, at most.
    """

    collection: Any
    extents: Any
    kv_offsets: Any
    out: Any
    partials: Any
    max_units: Any
    sinks: Any
    lse: Any
    prior: Any
    prior_lse: Any
    pages: Any
    page_counts: Any
    block_mask: Any


@dataclass(frozen=True)
class Own:
    """What a warp has of every sequence: some query rows, and columns, of a KV head.

    Attributes
    ----------
    part, head, row0, column0 : i32
        Its number among all that share a token, the KV head, and its first query row and column.
    lane : i32
    sums : pointer
        Into shared memory: the lane's part of the warp's sums of fixed splits.
    """

    part: Any
    head: Any
    row0: Any
    column0: Any
    lane: Any
    sums: Any = None
