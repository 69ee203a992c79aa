# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lengths at which kernels go wrong: none, one, and those around multiples of a page and of a tile.

The extents are read off the IR: page sizes of its caches, rows of its tiles, ``rows``, ``keys`` and ``tile`` of its
schedules.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any

from mlir import ir

from kvarn.dialect import types
from kvarn.lowering.rewrite import walk

_TILED = ("rows", "keys", "tile", "tile_rows")
_TILE = re.compile(r"tensor<(\d+)x")
_MOST = 256  # no page or tile has more tokens; a larger number is a head size or a bound


def extents_of(module: ir.Module) -> tuple[int, ...]:
    """Page sizes and the tokens of tiles of a module, in ascending order."""
    found: set[int] = set()
    for op in walk(module):
        values = [*op.operands, *op.results, *(a for r in op.regions for b in r.blocks for a in b.arguments)]
        for kind in {value.type for value in values}:
            page = getattr(types.spec_or_problem(kind), "page_size", None)  # a type that is no handle has none
            tile = _TILE.match(str(kind))
            found |= {page} if page else set()
            found |= {int(tile[1])} if tile else set()
        holders: list[Any] = [op.attributes]
        holders += [ir.DictAttr(op.attributes[n]) for n in ("schedule", "kv.schedule") if n in op.attributes]
        tiled = [holder[n] for holder in holders for n in _TILED if n in holder]
        found |= {a.value for a in tiled if isinstance(a, ir.IntegerAttr)}
    return tuple(sorted(n for n in found if 1 < n <= _MOST))


def around(extents: Collection[int], new: int) -> list[int]:
    """Cached tokens, with which they or all tokens, ``new`` ones included, are at most one off a multiple."""
    near = {0, 1}
    for extent, times in itertools.product(extents, (1, 2)):
        edges = {extent * times + d for d in (-1, 0, 1)}
        near |= edges | {n - new for n in edges}
    return sorted(n for n in near if n >= 0)


def batches(lengths: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """The lengths in batches of ``size`` sequences; the last one is filled up from the first."""
    rounds = -(-len(lengths) // size)
    endless = itertools.cycle(lengths)
    return [tuple(itertools.islice(endless, size)) for _ in range(rounds)]


__all__ = ["around", "batches", "extents_of"]
