# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which entries complete the schedule of an attention over keys and values."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvarn.dialect import schedules
from kvarn.lowering.remarks import remark
from kvarn.lowering.schedules import attention as tile_schedule, decode_table
from kvarn.lowering.schedules.decode import DecodeConfig

from .. import schedules_of
from ..base import Expansion
from . import expansion


@schedules_of("kv.attention", "kv.attention_padded", "kv.operand_attention")
def attention_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of an attention over keys and values: its kind, and the entries of a decode or of tiles."""
    case = expansion.case_of(op, at)
    kind = expansion.kind_of(op, at, case)
    for why in expansion.slower_than(op, at, case, kind):
        remark(op.operation, "missed", f"kind {kind} is not the fastest: {why}")
    if kind == "tile":
        given = {**schedules.TILED.left_out(without), **at.schedule}
        threshold, uneven = given.pop("decode_threshold", None), given.pop("uneven", False)
        if threshold is None:
            place = expansion.Place.of(op, at)
            threshold, uneven = expansion.few_queries(case, place), not place.invariant
        if "max_queries" not in at.schedule:
            given.pop("max_batch", None)  # the decode kernel's: tiles do not depend on the number of sequences
        of_decode = decode_entries(op, case, at, threshold, uneven) if threshold else {}
        if threshold:
            # Where no bit may depend on the batch, tiles are chosen for as many sequences as are usual.
            usual, most = DecodeConfig.max_batch, of_decode[schedules.PREFIX_OF_DECODE + "max_batch"]
            given["sequences"] = usual if at.schedule.get("batch_invariant") else most
        entries = tile_schedule.choose(case, at.target, given, at.tuned)
        config = tile_schedule.TileConfig(case, **entries)
        why_converted = tile_schedule.why_not_stored(config) if config.converts else None
        if why_converted is not None:
            remark(op.operation, "missed", f"keys are converted before they are multiplied: {why_converted}")
        return {"kind": kind, **entries, **of_decode}
    if kind != "decode":
        return {"kind": kind}
    config = DecodeConfig(case, at.schedule["max_queries"])
    return {"kind": kind, **decode_table.choose(at.target, config, at.schedule, at.tuned)}


def decode_entries(op: Any, case: Any, at: Expansion, threshold: int, uneven: bool) -> dict[str, Any]:
    """The schedule of the decode kernel for the sequences of up to ``threshold`` new tokens in a mixed batch.

    ``uneven``: only batches of uneven sequences are divided.
    """
    place = expansion.Place.of(op, at)
    for problem in expansion.decode_problems(case, place, place.max_batch, threshold):
        raise ValueError(f"the schedule's decode_threshold asks for a kernel of kind decode, which {problem}")
    given = {name: at.schedule[name] for name in ("max_batch", "batch_invariant") if name in at.schedule}
    share, beside = decode_table.beside_tiles(at.target, DecodeConfig(case, threshold), given)
    share = at.schedule.get("decode_share", share)
    found = decode_table.choose(at.target, DecodeConfig(case, threshold), {**beside, **given}, at.tuned)
    prefixed = {schedules.PREFIX_OF_DECODE + name: value for name, value in found.items()}
    return {"decode_threshold": threshold, "uneven": uneven, "decode_share": share} | prefixed
