# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Choose the schedules of tier-1 operations, whole: entries that are given stay, and are legal or refused.

A researcher or a tuner sets entries of the ``schedule`` attribute; this pass decides the rest from the operation, the
target and the tables alone: the user's (``kvarn tune``), then the built-in one. What may be said is declared in
``dialect/schedules.py``. The expansions read what stands here, and choose nothing of it again.

Before:  "kv.attention"(...) {schedule = {max_queries = 1, max_batch = 16}, ...}
After:   "kv.attention"(...) {schedule = {kind = "decode", max_queries = 1, max_batch = 16, stages = 2, ...}, ...}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlir import ir

from kvarn.dialect import schedules
from kvarn.lowering.kernels.attention import expansion as attention
from kvarn.lowering.kernels.base import Expansion, attribute_of
from kvarn.lowering.kernels.common import row_alignment
from kvarn.lowering.kernels.mla import expansion as mla
from kvarn.lowering.kernels.projection import (
    common as projection_common,
    expansion as projection,
    groups as projection_groups,
    tiles as projection_tiles,
)
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import kv_ops
from kvarn.lowering.schedules import attention as tile_schedule, decode_table, tuned
from kvarn.lowering.schedules.decode import Config, fitted
from kvarn.lowering.target import Target, by_name


@dataclass(frozen=True)
class Options:
    """target: which one the schedules are for; without: passes, by commas, that will not run."""

    target: str = "sm_90a"
    without: str = ""


def attention_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of an attention over keys and values: its kind, and the entries of a decode or of tiles."""
    case = attention.case_of(op, at)
    kind = attention.kind_of(op, at, case)
    for why in attention.slower_than(op, at, case, kind):
        remark(op.operation, "missed", f"kind {kind} is slower than others: {why}")
    if kind == "tile":
        given = {**schedules.TILED.left_out(without), **at.schedule}
        config = tile_schedule.chosen(case, at.target, given, at.tuned)
        why_converted = tile_schedule.why_not_stored(config) if config.converts else None
        if why_converted is not None:
            remark(op.operation, "missed", f"keys are converted before they are multiplied: {why_converted}")
        return {"kind": kind, **config.entries()}
    if kind != "decode":
        return {"kind": kind}
    config = Config(case.spec, case.query, case.group, at.schedule["max_queries"], pages=case.pages,
                    key_tiles=case.blocks)  # fmt: skip
    return {"kind": kind, **decode_entries(at.target, config, at.schedule, at.tuned)}


def decode_entries(
    target: Target, config: Config, schedule: Mapping[str, Any], measured: bool = False
) -> dict[str, Any]:
    """A decode's entries from the tables, as small as the target and the given entries of a schedule need them.

    The user's table is asked where ``measured``: for operations that are declared to be tuned.

    Raises
    ------
    ValueError
        If what is given is not legal for the case.
    """
    config = replace(config, max_batch=schedule.get("max_batch", config.max_batch))
    _require("kv.attention", schedule, target, "decode", config)
    invariant = bool(schedule.get("batch_invariant"))
    found = tuned.entries(target, config, invariant) if measured else {}
    names = schedules.DECODE.names
    given = {name: value for name, value in schedule.items() if name in names}
    chosen_by_table = {**decode_table.entries(config, invariant), **found}
    if config.key_tiles:  # a tile has keys of one entry of a list
        chosen_by_table["tile"] = math.gcd(chosen_by_table["tile"], config.key_tiles[1])
    config = replace(config, **{**chosen_by_table, **given})
    if config.key_tiles and config.key_tiles[1] % config.tile:
        raise ValueError(
            f"the schedule's tile must divide the block mask's {config.key_tiles[1]} keys, got {config.tile}"
        )
    # A tile decides the order of additions, which nothing of the batch may change when it is to be invariant.
    config = fitted(target, config, {*given, *(("tile",) if invariant else ())}, "blocks" in found)
    return {name: getattr(config, name) for name in (*names, "max_batch")}


def latent_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of an attention over latent rows."""
    kind = mla.kind_of(op, at)
    for why in mla.slower_than(op, at):
        remark(op.operation, "missed", f"kind {kind} is slower than others: {why}")
    return {"kind": kind}


def projection_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of a product into a cache."""
    case = projection_common.Projection.of(op, at)
    kind = projection.kind_of(op, at, case)
    if kind == "simt":
        plain = projection_groups.plain_case(case) if case.scaling == "group" else case
        for why in projection_tiles.problems(plain, at.target, row_alignment(op)):
            remark(op.operation, "missed", f"kind {kind} is slower than others: a schedule of kind tile {why}")
    return {"kind": kind}


def chunk_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of a chunk of an MLA prefill."""
    if at.target.is_host or at.schedule.get("kind") == "simt":
        return {"kind": "host" if at.target.is_host else "simt"}
    problems = mla.chunk_problems(op, at)
    if at.schedule.get("kind") == "tile":
        for problem in problems:
            raise ValueError(f"a schedule of kind tile {problem}")
    for problem in problems:
        remark(op.operation, "missed", f"kind simt is slower than others: a schedule of kind tile {problem}")
    return {"kind": "simt" if problems else "tile"}


# Operations whose kernel is chosen; those of the others are divided by their expansions, as ``threads`` says.
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
    """The entries that are decided for an operation, where some passes will not run.

    Raises
    ------
    ValueError
        If what is given is not legal.
    """
    at = Expansion(op.opview, op, target, {})
    _require(op.name, at.schedule, target)
    if op.name not in CHOICES:
        return {}
    found = CHOICES[op.name](op.opview, at, without)
    _require(op.name, at.schedule, target, found["kind"])
    return found


def _require(
    operation: str, schedule: Mapping[str, Any], target: Target, kind: str | None = None, case: Any = None
) -> None:
    problem = schedules.why_unsupported(operation, schedule, target, kind, case)
    if problem is not None:
        raise ValueError(f"the schedule's {problem}")


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    target, without = by_name(options.target), options.without.split(",")
    for op in kv_ops(module):
        if op.name not in schedules.OPERATIONS:
            continue
        try:
            found = chosen(op, target, without)
        except ValueError as error:
            fail(op, f"cannot be scheduled for {target.name}: {error}")
        if found:
            entries = {name: attribute_of(value) for name, value in found.items()}
            if "schedule" in op.attributes:
                entries |= {named.name: named.attr for named in ir.DictAttr(op.attributes["schedule"])}
            op.attributes["schedule"] = ir.DictAttr.get(entries)
