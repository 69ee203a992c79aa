# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the kernel of attention over tiles is specialised for, and what a launch of it has besides the operands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvarn.dialect.dtypes import DType, f32
from kvarn.dialect.layout import align_up
from kvarn.dialect.ops.tile import COLUMN_STEP
from kvarn.dialect.tma_layout import joins_heads

from .case import Case
from .softmax import SLACK

# Of weights of 8 bits, which end at 2^-9 and at 448: powers of two that the largest are moved to, so that fewer of the
# others become zeros, and from which on they are moved. Of equal scores a thread's 32 to 48 weights of a row stay below
# the second together, or skip-kv-maxima would look for a maximum in every tile.
NARROW_WEIGHTS, NARROW_SLACK = 3.0, math.log2(448.0)


@dataclass(frozen=True)
class TileKernel:
    """What the kernel is specialised for.

    Attributes
    ----------
    case : Case
    rows, keys : int
        Query rows and keys of a tile.
    threads : int
        Of a block.
    min_blocks : int, optional
        Blocks that a multiprocessor is to hold.
    clean : bool
        As on the host: products are of f32, values of a weight of zero may be anything, and heads are taken as they
        are. Otherwise these have columns of zeros up to whole steps of the products.
    bounded : bool
        So are values past the last that a tile's last row sees, as far as the mask says.
    least : int
        Tiles of keys that each of several splits has, at least.
    looped : bool
        A block may take several tiles of rows; else there are as many blocks as tiles.
    section : tuple of int, optional
        (first, how many) columns of values, and of the output, that this kernel has; without, all of them.
    most : int, optional
        No sequence has more query tokens.
    stored_keys : bool
        8-bit keys are multiplied as they are, by a query of two terms.
    weights : DType, optional
        What weights are rounded to, and values converted to; without, the query's type.
    overlaps : bool
        Whether the target starts a kernel while the one before it runs.
    """

    case: Case
    rows: int
    keys: int
    threads: int
    min_blocks: int | None = None
    clean: bool = False
    bounded: bool = False
    least: int = 1
    looped: bool = True
    section: tuple[int, int] | None = None
    most: int | None = None
    stored_keys: bool = False
    weights: DType | None = None
    overlaps: bool = False

    @property
    def first_column(self) -> int:
        """The first column of the values."""
        return 0 if self.section is None else self.section[0]

    @property
    def values(self) -> int:
        """Columns of the values."""
        return self.case.value_size if self.section is None else self.section[1]

    @property
    def query_columns(self) -> int:
        """Columns of a tile of query rows and of keys."""
        return self.case.size if self.clean else align_up(self.case.size, COLUMN_STEP)

    @property
    def value_columns(self) -> int:
        """Columns of a tile of values and of the sums."""
        return self.values if self.clean else align_up(self.values, COLUMN_STEP)

    @property
    def dtype(self) -> DType:
        """Of the query and the keys in their product."""
        return f32 if self.clean else self.case.query

    @property
    def of_weights(self) -> DType:
        """Of the weights and the values in their product."""
        return self.weights or self.dtype

    @property
    def slack(self) -> tuple[float, float]:
        """(powers of two that scores may exceed the running maximum by, those that the largest is moved to)."""
        return (SLACK, 0.0) if self.clean or self.case.query.bits > 8 else (NARROW_SLACK, NARROW_WEIGHTS)

    @property
    def aligned(self) -> bool:
        """Whether 8-bit keys of several heads are read in one box."""
        return self.stored_keys and joins_heads(self.case.spec)

    @property
    def of_keys(self) -> dict[str, Any]:
        """How a tile of keys is loaded."""
        return {"dtype": self.case.spec.dtype, "aligned": self.aligned} if self.stored_keys else {"dtype": self.dtype}

    @property
    def of_values(self) -> dict[str, Any]:
        """How a tile of values is loaded."""
        return {"columns": self.value_columns, "first_column": self.first_column, "dtype": self.of_weights}


@dataclass(frozen=True)
class TileArguments:
    """What a launch over tiles has besides the operation's operands; what it does not need is None.

    Attributes
    ----------
    tiles : i32
        Tiles of query rows, of all sequences.
    key_map, value_map : TMA descriptor
    partials, ends : f32 [rows, V], f32 [rows, 2]
        Partial results of splits: sums, and (m, l) of each.
    splits : i32
        Splits of the keys of a tile, at most.
    queue : i8 [4]
        The counter that persistent blocks take tiles from.
    """

    tiles: Any
    key_map: Any = None
    value_map: Any = None
    partials: Any = None
    ends: Any = None
    splits: Any = None
    queue: Any = None
