# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which entries complete the schedules of an attention over latent rows and of a chunk of an MLA prefill."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvarn.lowering.remarks import remark
from kvarn.lowering.schedules import mla as latent_schedule

from .. import schedules_of
from ..base import Expansion
from . import chunk_tiles, expansion


@schedules_of("kv.mla_attention")
def latent_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of an attention over latent rows."""
    kind = expansion.kind_of(op, at)
    for why in expansion.slower_than(op, at):
        remark(op.operation, "missed", f"kind {kind} is not the fastest: {why}")
    if kind == "tile":
        return {"kind": kind, **latent_schedule.of_tiles(expansion.case_of(op, at), at.target, at.schedule).entries()}
    if kind != "latent":
        return {"kind": kind}
    return {
        "kind": kind,
        **latent_schedule.choose(expansion.case_of(op, at), at, op, not expansion.wgmma_problems(op, at)),
    }


@schedules_of("kv.mla_prefill_chunk")
def chunk_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of a chunk of an MLA prefill."""
    if at.target.is_host or at.schedule.get("kind") == "simt":
        return {"kind": "host" if at.target.is_host else "simt"}
    problems = expansion.chunk_problems(op, at)
    if at.schedule.get("kind") == "tile":
        for problem in problems:
            raise ValueError(f"a schedule of kind tile {problem}")
    for problem in problems:
        remark(op.operation, "missed", f"kind simt is not the fastest: a schedule of kind tile {problem}")
    if problems:
        return {"kind": "simt"}
    return {"kind": "tile", **chunk_tiles.choose(expansion.chunk_case(op, at), at.target, at.schedule)}
