# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Complete the schedules of fused operations: given entries stay if they are legal, otherwise the pass fails.

Users and tuners set entries of the ``schedule`` attribute; this pass decides the rest from the operation, the target
and the tables: the user's (``kvarn tune``), then the built-in one. ``dialect/schedules.py`` declares the legal entries.
The expansions read the completed schedule, and decide nothing again.

Before:  "kv.attention"(...) {schedule = {max_queries = 1, max_batch = 16}, ...}
After:   "kv.attention"(...) {schedule = {kind = "decode", max_queries = 1, max_batch = 16, stages = 2, ...}, ...}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn.dialect import schedules
from kvarn.dialect.verify import attribute_of, python_values
from kvarn.lowering.kernels.attention import expansion as attention
from kvarn.lowering.kernels.base import Expansion
from kvarn.lowering.kernels.common import row_alignment
from kvarn.lowering.kernels.mla import chunk_tiles as mla_chunk_tiles, expansion as mla
from kvarn.lowering.kernels.projection import (
    common as projection_common,
    expansion as projection,
    groups as projection_groups,
    tiles as projection_tiles,
)
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import kv_ops
from kvarn.lowering.schedules import (
    attention as tile_schedule,
    decode as decode_schedule,
    decode_table,
    mla as latent_schedule,
    projection as projection_schedule,
)
from kvarn.lowering.schedules.decode import DecodeConfig
from kvarn.lowering.schedules.tables import measured
from kvarn.lowering.target import Target, by_name


@dataclass(frozen=True)
class Options:
    """target: the target of the schedules. without: comma-separated passes that will not run."""

    target: str = "sm_90a"
    without: str = ""


def attention_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of an attention over keys and values: its kind, and the entries of a decode or of tiles."""
    case = attention.case_of(op, at)
    kind = attention.kind_of(op, at, case)
    for why in attention.slower_than(op, at, case, kind):
        remark(op.operation, "missed", f"kind {kind} is not the fastest: {why}")
    if kind == "tile":
        given = {**schedules.TILED.left_out(without), **at.schedule}
        threshold, uneven = given.pop("decode_threshold", None), given.pop("uneven", False)
        if threshold is None:
            threshold, uneven = attention.few_queries(case, attention.Place.of(op, at)), True
        if "max_queries" not in at.schedule:
            given.pop("max_batch", None)  # the decode kernel's: tiles do not depend on the number of sequences
        of_decode = decode_entries(op, case, at, threshold, uneven) if threshold else {}
        if threshold:
            given["sequences"] = of_decode[schedules.PREFIX_OF_DECODE + "max_batch"]
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
    place = attention.Place.of(op, at)
    for problem in attention.decode_problems(case, place, place.max_batch, threshold):
        raise ValueError(f"the schedule's decode_threshold asks for a kernel of kind decode, which {problem}")
    given = {name: at.schedule[name] for name in ("max_batch", "batch_invariant") if name in at.schedule}
    given |= decode_schedule.entries_of_few(at.schedule)
    found = decode_table.choose(at.target, DecodeConfig(case, threshold), given, at.tuned)
    prefixed = {schedules.PREFIX_OF_DECODE + name: value for name, value in found.items()}
    share = at.schedule.get("decode_share", measured("decode_share", at.target))
    return {"decode_threshold": threshold, "uneven": uneven, "decode_share": share} | prefixed


def latent_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of an attention over latent rows."""
    kind = mla.kind_of(op, at)
    for why in mla.slower_than(op, at):
        remark(op.operation, "missed", f"kind {kind} is not the fastest: {why}")
    if kind == "tile":
        return {"kind": kind, **latent_schedule.of_tiles(mla.case_of(op, at), at.target, at.schedule).entries()}
    if kind != "latent":
        return {"kind": kind}
    return {"kind": kind, **latent_schedule.choose(mla.case_of(op, at), at, op, not mla.wgmma_problems(op, at))}


def projection_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of a product into a cache."""
    case = projection_common.Projection.of(op, at)
    kind = projection.kind_of(op, at, case)
    if kind == "simt":
        for why in projection_tiles.problems(projection_groups.plain_case(case), at.target, row_alignment(op)):
            remark(op.operation, "missed", f"kind {kind} is not the fastest: a schedule of kind tile {why}")
    return {"kind": kind, **projection_schedule.choose(op, case, at, kind)}


def chunk_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of a chunk of an MLA prefill."""
    if at.target.is_host or at.schedule.get("kind") == "simt":
        return {"kind": "host" if at.target.is_host else "simt"}
    problems = mla.chunk_problems(op, at)
    if at.schedule.get("kind") == "tile":
        for problem in problems:
            raise ValueError(f"a schedule of kind tile {problem}")
    for problem in problems:
        remark(op.operation, "missed", f"kind simt is not the fastest: a schedule of kind tile {problem}")
    if problems:
        return {"kind": "simt"}
    return {"kind": "tile", **mla_chunk_tiles.choose(mla.chunk_case(op, at), at.target, at.schedule)}


# Operations with a choice of kernels; the others have only entries such as ``threads``, which their expansions read.
CHOICES: dict[str, Callable[[Any, Expansion, Collection[str]], dict[str, Any]]] = {
    "kv.attention": attention_entries,
    "kv.attention_padded": attention_entries,
    "kv.operand_attention": attention_entries,
    "kv.mla_attention": latent_entries,
    "kv.mla_prefill_chunk": chunk_entries,
    "kv.project_append": projection_entries,
    "kv.project_append_padded": projection_entries,
}


def chosen(op: ir.Operation, target: Target, without: Collection[str] = ()) -> dict[str, Any]:
    """The entries that the pass decides for an operation, if the passes ``without`` do not run.

    Raises
    ------
    ValueError
        If a given entry is illegal.
    """
    at = Expansion(op.opview, op, target, {})
    _require(op.name, at.schedule, target)
    if op.name not in CHOICES:
        return {}
    found = CHOICES[op.name](op.opview, at, without)
    _require(op.name, at.schedule, target, found["kind"])
    for entry in schedules.OPERATIONS[op.name].kind(found["kind"]).decided:
        given, decided = at.schedule.get(entry.name), found.get(entry.name)
        if given is not None and given != decided:
            what = f"must be {decided}" if decided is not None else "is of another instruction"
            raise ValueError(f"the schedule's {entry.name} {what}, which nothing but this pass decides, got {given}")
    return found


def _require(operation: str, schedule: Mapping[str, Any], target: Target, kind: str | None = None) -> None:
    problem = schedules.why_unsupported(operation, schedule, target, kind, decided=True)
    if problem is not None:
        raise ValueError(f"the schedule's {problem}")


def _rename_entries(op: ir.Operation) -> None:
    """Replace old names in the schedule of an operation."""
    if "schedule" in op.attributes:
        given = python_values(op.attributes["schedule"])
        with op.location:
            renamed = schedules.current(op.name, given)
            if renamed is not given:
                op.attributes["schedule"] = ir.DictAttr.get({name: attribute_of(v) for name, v in renamed.items()})


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    target, without = by_name(options.target), options.without.split(",")
    for op in kv_ops(module):
        if op.name not in schedules.OPERATIONS:
            continue
        _rename_entries(op)
        try:
            found = chosen(op, target, without)
        except ValueError as error:
            fail(op, f"cannot be scheduled for {target.name}: {error}")
        if found:
            entries = {name: attribute_of(value) for name, value in found.items()}
            if "schedule" in op.attributes:
                entries |= {named.name: named.attr for named in ir.DictAttr(op.attributes["schedule"])}
            op.attributes["schedule"] = ir.DictAttr.get(entries)
