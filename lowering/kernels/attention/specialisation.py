# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the tile kernel of attention is specialised for, and the arguments of its launch besides the operands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvarn.dialect.dtypes import DType, f32
from kvarn.dialect.layout import align_up
from kvarn.dialect.ops.tile import COLUMN_STEP
from kvarn.dialect.tma_layout import joins_heads
from kvarn.dsl.softmax import SLACK

from .case import Case

# For 8-bit weights, whose range is 2^-9 to 448: the power of two that a new maximum's weight gets, so that fewer small
# weights become zero, and the power above which the maximum moves. With equal scores, the 32 to 48 weights of a row in
# one thread must sum to less than the second, or skip-kv-maxima would compute a maximum in every tile.
NARROW_WEIGHTS, NARROW_SLACK = 3.0, math.log2(448.0)


@dataclass(frozen=True)
class TileKernel:
    """What the tile kernel is specialised for.

    Attributes
    ----------
    case : Case
    rows, keys : int
        Query rows and keys per tile.
    threads : int
        Threads per block.
    min_blocks : int, optional
        Blocks per multiprocessor that registers must allow.
    on_host : bool
        Products are in f32, masked values may be undefined, and heads are not padded. On GPUs values are defined, and
        heads are padded with zero columns to whole k-steps.
    values_end_with_mask : bool
        Whether values are zeros past the last key that the mask allows for a tile's last row, not only past the
        sequence's end.
    least : int
        The fewest key tiles per split, if there are several splits.
    persistent : bool
        Whether a block may process several tiles of rows; otherwise there is one block per tile.
    column_range : tuple of int, optional
        (first, number) of the value and output columns of this kernel; all of them by default.
    most : int, optional
        The most new tokens of a sequence, if known.
    stored_keys : bool
        Whether 8-bit keys are multiplied without conversion, by a query of two terms.
    weights : DType, optional
        The type of rounded weights and converted values; by default the query's.
    sequences : int
        In a divided batch, the most sequences: the kernel numbers the tiles of those that it computes. 0: it computes
        all sequences.
    overlaps : bool
        Whether the kernel runs beside the one before it, which has the other sequences.
    """

    case: Case
    rows: int
    keys: int
    threads: int
    min_blocks: int | None = None
    on_host: bool = False
    values_end_with_mask: bool = False
    least: int = 1
    persistent: bool = True
    column_range: tuple[int, int] | None = None
    most: int | None = None
    stored_keys: bool = False
    weights: DType | None = None
    sequences: int = 0
    overlaps: bool = False

    @property
    def first_column(self) -> int:
        """The first column of the values."""
        return 0 if self.column_range is None else self.column_range[0]

    @property
    def values(self) -> int:
        """Number of value columns."""
        return self.case.value_size if self.column_range is None else self.column_range[1]

    @property
    def query_columns(self) -> int:
        """Columns of a tile of query rows or keys."""
        return self.case.size if self.on_host else align_up(self.case.size, COLUMN_STEP)

    @property
    def value_columns(self) -> int:
        """Columns of a tile of values and of the accumulators."""
        return self.values if self.on_host else align_up(self.values, COLUMN_STEP)

    @property
    def dtype(self) -> DType:
        """The type of query and keys in their product."""
        return f32 if self.on_host else self.case.query

    @property
    def of_weights(self) -> DType:
        """The type of weights and values in their product."""
        return self.weights or self.dtype

    @property
    def slack(self) -> tuple[float, float]:
        """(power of two by which scores may exceed the running maximum, power that a new maximum's weight gets)."""
        return (SLACK, 0.0) if self.on_host or self.case.query.bits > 8 else (NARROW_SLACK, NARROW_WEIGHTS)

    @property
    def aligned(self) -> bool:
        """Whether one box reads 8-bit keys of several heads."""
        return self.stored_keys and joins_heads(self.case.spec)

    @property
    def of_keys(self) -> dict[str, Any]:
        """Load options of a key tile."""
        return {"dtype": self.case.spec.dtype, "aligned": self.aligned} if self.stored_keys else {"dtype": self.dtype}

    @property
    def of_values(self) -> dict[str, Any]:
        """Load options of a value tile."""
        return {"columns": self.value_columns, "first_column": self.first_column, "dtype": self.of_weights}


@dataclass(frozen=True)
class TileArguments:
    """The arguments of a launch over tiles besides the operation's operands; unneeded ones are None.

    Attributes
    ----------
    tiles : i32
        Tiles of query rows over all sequences.
    key_map, value_map : TMA descriptor
    partials, ends : f32 [rows, V], f32 [rows, 2]
        Partial results of splits: outputs, and (m, l).
    splits : i32
        The most splits per tile.
    splits_alone : i32
        The most splits per tile of a batch that could be divided where the other kernel has no sequence.
    most_split_tiles : i32
        Tiles for whose splits the partial results have room. With more tiles there are fewer splits.
    queue : i8 [4]
        The counter from which persistent blocks take tiles.
    """

    tiles: Any
    key_map: Any = None
    value_map: Any = None
    partials: Any = None
    ends: Any = None
    splits: Any = None
    splits_alone: Any = None
    most_split_tiles: Any = None
    queue: Any = None
