# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Schedules of projections: the entries of each kind of kernel, and the expansions that read them.

``dialect/schedules.py`` declares a kind's entries; ``chosen`` in the kernels' files selects their values.
``select-kv-schedule`` writes the result of :func:`choose`, and expansions only read it through :func:`complete`. Tile
kernels by mma.sync have no entries: each target has one division of the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvarn.dialect.schedules import PROJECTED, written
from kvarn.lowering.kernels.base import Expansion
from kvarn.lowering.kernels.projection import (
    full_k,
    full_k_mma,
    full_k_tiles,
    heads,
    stream_k,
    stream_k_mma,
    stream_k_stored,
    tiles,
)
from kvarn.lowering.kernels.projection.common import Projection, constant_weight
from kvarn.lowering.kernels.projection.groups import plain_case
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import MMA, WGMMA

FULL_K_BY_MMA = ("tile_columns", "runs", "warps")
FULL_K_BY_WGMMA = ("tile_columns", "rows", "atoms", "stages")
STREAM_K_BY_WGMMA = ("rows", "atoms", "stages")


def stream_k_by_wgmma(case: Projection, target: Target) -> bool:
    """Whether products of few tokens use wgmma: not with group scales, which use mma.sync on every target."""
    return target.has("wgmma") and case.scaling != "group"


def choose(op: Any, case: Projection, at: Expansion, kind: str) -> dict[str, Any]:
    """The entries of a kind, including those that the schedule gives.

    Raises
    ------
    ValueError
        If the given entries do not fit.
    """
    if kind == "full_k":
        if full_k.by_mma(case, at.schedule["max_tokens"]):
            return _fields(full_k_mma.chosen(case, at.schedule), FULL_K_BY_MMA)
        return _fields(full_k_tiles.chosen(case, at.schedule, at.target), FULL_K_BY_WGMMA)
    if kind == "stream_k" and not stream_k_by_wgmma(case, at.target):
        stored = stream_k_stored.chosen(op, case, stream_k_mma.chosen(op, case, at), at)
        return {"instruction": MMA if stored is None else WGMMA}
    if kind == "stream_k":
        config = replace(stream_k.chosen(case, at.schedule), constant=constant_weight(op, at))
        return {"instruction": WGMMA, "rows": config.rows, "atoms": config.atoms, "stages": config.stages(at.target)}
    if kind == "tile" and (names := _of_tiles(case, at.target)):
        config = tiles.chosen(plain_case(case), at.target, at.schedule)
        fused = isinstance(config, heads.Config)
        rows = heads.ROWS if fused else config.rows
        entries = {"rows": rows, "columns": config.columns, "fused": fused, "stages": config.stages}
        return {name: entries[name] for name in names}
    return {}


def complete(case: Projection, at: Expansion) -> Mapping[str, Any]:
    """The schedule, checked to have all entries of its kind.

    Raises
    ------
    ValueError
        If one is missing.
    """
    names: tuple[str, ...] = ()
    if at.kind == "full_k":
        names = FULL_K_BY_MMA if full_k.by_mma(case, at.schedule["max_tokens"]) else FULL_K_BY_WGMMA
    elif at.kind == "stream_k":
        names = ("instruction", *(STREAM_K_BY_WGMMA if stream_k_by_wgmma(case, at.target) else ()))
    elif at.kind == "tile":
        names = _of_tiles(case, at.target)
    written(at.schedule, names)
    return at.schedule


def _of_tiles(case: Projection, target: Target) -> tuple[str, ...]:
    """Entries of the tile kernel whose operands are those of the case, after dequantization of group scales."""
    return () if tiles.instruction_for(plain_case(case), target) == MMA else PROJECTED.names


def _fields(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}
