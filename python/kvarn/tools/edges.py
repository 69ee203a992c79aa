# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lengths at which kernels are likely to fail: zero, one, and lengths near multiples of a page or a tile.

The extents come from the IR: page sizes of caches, rows of tiles, and ``rows``, ``keys`` and ``tile`` of schedules.
Tiles appear while the IR is lowered (:func:`extents_when_lowered`).
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn.dialect import types
from kvarn.lowering import pipeline, runner
from kvarn.lowering.pass_base import PassFailure
from kvarn.lowering.rewrite import kernels, walk

from . import random_inputs
from .apart import Died, apart

_TILED = ("rows", "keys", "tile", "tile_rows")
_TILE = re.compile(r"tensor<(\d+)x")
_MOST = 256  # no page or tile has more tokens; a larger number is a head size or a bound


def extents_of(module: ir.Module) -> tuple[int, ...]:
    """Page sizes and tile extents of a module, in tokens, ascending."""
    found: set[int] = set()
    for op in walk(module):
        values = [*op.operands, *op.results, *(a for r in op.regions for b in r.blocks for a in b.arguments)]
        for kind in {value.type for value in values}:
            page = getattr(types.spec_or_problem(kind), "page_size", None)  # None for a type that is not a handle
            tile = _TILE.match(str(kind))
            found |= {page} if page else set()
            found |= {int(tile[1])} if tile else set()
        holders: list[Any] = [op.attributes]
        holders += [ir.DictAttr(op.attributes[n]) for n in ("schedule", "kv.schedule") if n in op.attributes]
        tiled = [holder[n] for holder in holders for n in _TILED if n in holder]
        found |= {a.value for a in tiled if isinstance(a, ir.IntegerAttr)}
    return tuple(sorted(n for n in found if 1 < n <= _MOST))


def around(extents: Collection[int], new: int) -> list[int]:
    """Numbers of cached tokens for which they, or they plus ``new``, are within one of a multiple of an extent."""
    near = {0, 1}
    for extent, times in itertools.product(extents, (1, 2)):
        edges = {extent * times + d for d in (-1, 0, 1)}
        near |= edges | {n - new for n in edges}
    return sorted(n for n in near if n >= 0)


def batches(lengths: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """The lengths in batches of ``size`` sequences; the last batch is padded from the first."""
    rounds = -(-len(lengths) // size)
    endless = itertools.cycle(lengths)
    return [tuple(itertools.islice(endless, size)) for _ in range(rounds)]


# --- default lengths -----------------------------------------------------------------------------------

TILES = (64, 128)  # tile extents of kernels that do not declare them
_FIRST = ((37, 3), (0, 1), (18, 2))  # (cached, new) tokens of sequences in every default batch
_LAST_STEP = "distribute-kv-tiles"  # no tiles are left after this pass


@dataclass(frozen=True)
class Shape:
    """The properties by which lengths are chosen.

    Attributes
    ----------
    extents : tuple of int
        Tokens of pages and tiles.
    group : int
        Query rows per token: query heads per KV head.
    most_new, most_batch : int or None
        Largest numbers of new tokens per sequence, and of sequences per batch.
    operation : bool
        Whether it takes any number of sequences.
    """

    extents: tuple[int, ...]
    group: int = 1
    most_new: int | None = None
    most_batch: int | None = None
    operation: bool = True

    @property
    def query_tile(self) -> int:
        """Tokens of the largest tile of query rows."""
        return max(self.extents) // self.group

    def describe(self) -> str:
        tokens = ", ".join(map(str, self.extents))
        return f"near multiples of pages and tiles ({tokens} tokens) and of query tiles ({self.query_tile} tokens)"


def shape_of(text: str, target: str) -> Shape:
    """The properties of IR, before any pass, by which lengths are chosen."""
    module = importlib.import_module("kvarn.compilation.driver").parse(text)
    extents = set(extents_of(module)) | set(TILES) | set(extents_when_lowered(text, target))
    bounds = [ir.DictAttr(op.attributes["schedule"]) for op in walk(module) if "schedule" in op.attributes]

    def bound(name: str) -> int | None:
        found = [ir.IntegerAttr(b[name]).value for b in bounds if name in b and isinstance(b[name], ir.IntegerAttr)]
        return min(found, default=None)

    whole = not any(True for _ in kernels(module))
    return Shape(tuple(sorted(extents)), _group_of(module), bound("max_queries"), bound("max_batch"), whole)


def extents_when_lowered(text: str, target: str) -> Sequence[int]:
    """The extents of IR at all stages of the default pipeline, which runs in a process of its own."""

    def work() -> list[int]:
        compiler = importlib.import_module("kvarn.compilation.driver")
        module, found = compiler.parse(text), set[int]()
        for step in pipeline.steps(target):
            try:
                with compiler.diagnosed(module.context):
                    runner.run(module, [step])
            except (ValueError, PassFailure):
                break
            found |= set(extents_of(module))
            if step.name == _LAST_STEP:
                break
        return sorted(found)

    try:
        return () if target == "host" else apart(work)
    except Died:
        return ()


def _group_of(module: ir.Module) -> int:
    """The group size from the heads of a buffer and of a cache, if one divides the other."""
    heads = {getattr(types.spec_or_problem(v.type), "num_heads", None) for op in walk(module) for v in op.operands}
    rows = {shape[-2] for shape in random_inputs.buffer_shapes(module).values() if len(shape) > 2}
    found = [q // kv for q in rows for kv in heads if q and kv and q % kv == 0]
    return max(found, default=1)


def chosen(shape: Shape, size: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(cached, new) tokens of the sequences of some batches: of any size for an operation, else of ``size``."""
    largest, *smaller = sorted(shape.extents, reverse=True)
    near = [(largest, d) for d in (-16, -8, -1, 0, 1, 8, 16)]
    near += [(extent, d) for extent in smaller for d in (-8, -1, 1, 16)] + [(2 * largest, d) for d in (-8, 1)]
    # A step that starts before an edge and ends one token after it, so that rows of one tile see different tiles.
    fresh = itertools.cycle((1, 2, 9))
    found = {extent + d: 1 - d if d < 0 else next(fresh) for extent, d in near if extent + d > 0}
    sequences = sorted(found.items())
    for place, tokens in ((-2, shape.query_tile + 1), (-3, max(shape.query_tile - 1, 1))):
        sequences[place] = sequences[place][0], tokens
    if shape.most_new is not None:
        sequences = [(n, min(x, shape.most_new)) for n, x in sequences]
    if shape.operation:
        sequences, size = [*_FIRST, *sequences], shape.most_batch or len(sequences) + len(_FIRST)
    pairs = [sequences[i : i + size] for i in range(0, len(sequences), size)]
    pairs[-1] = (pairs[-1] + sequences)[:size] if not shape.operation else pairs[-1]
    return [(tuple(n for n, _ in pair), tuple(x for _, x in pair)) for pair in pairs]


__all__ = ["Shape", "around", "batches", "chosen", "extents_of", "extents_when_lowered", "shape_of"]
