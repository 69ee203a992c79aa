# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fill in the schedules of tier-1 operations: entries that are given stay, the others come from measured tables.

A researcher or a tuner sets entries of the ``schedule`` attribute; this pass decides the rest from the operation, the
target and the tables alone: the user's (``kvarn tune``), then the built-in one. Operations without a table are left to
their expansions.

Before:  "kv.attention"(...) {schedule = {max_queries = 1, max_batch = 16}, ...}
After:   "kv.attention"(...) {schedule = {kind = "decode", max_queries = 1, max_batch = 16, stages = 3, ...}, ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlir import ir

from .expand import attention, decode_table, tuned
from .expand.base import Expansion
from .expand.decode_schedule import TUNABLE, Config, fitted
from .pass_base import fail, kv_pass
from .rewrite import ops_named
from .target import Target, by_name


@dataclass(frozen=True)
class Options:
    """target: which one the schedules are for."""

    target: str = "sm_90a"


def attention_entries(op: Any, at: Expansion) -> dict[str, Any]:
    """The schedule of an attention over a collection: its kind, and a decode's entries."""
    case = attention.case_of(op, at)
    kind = attention.kind_of(op, at, case)
    if kind != "decode":
        return {"kind": kind}
    known = {k: at.schedule[k] for k in ("max_batch",) if k in at.schedule}
    config = Config(case.spec, case.query, case.group, at.schedule["max_queries"], **known)
    return {"kind": kind, **decode_entries(at.target, config, at.schedule)}


def decode_entries(target: Target, config: Config, schedule: Mapping[str, Any]) -> dict[str, Any]:
    """A decode's entries from the tables, as small as the target and the given entries of a schedule need them.

    Raises
    ------
    ValueError
        If what is given does not fit the target.
    """
    invariant = bool(schedule.get("batch_invariant"))
    measured = tuned.entries(target.name, config, invariant)
    found = {**decode_table.entries(config, invariant), **measured}
    given = {name: value for name, value in schedule.items() if name in TUNABLE}
    # A tile decides the order of additions, which nothing of the batch may change when it is to be invariant.
    fixed = {*given, *measured, *(("tile",) if invariant else ())}
    config = fitted(target, replace(config, **{**found, **given}), fixed)
    return found | {name: getattr(config, name) for name in ("warps", "tile", "stages", "blocks")}


def attribute_of(value: Any) -> ir.Attribute:
    """A schedule entry as an attribute."""
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    target = by_name(options.target)
    for op in ops_named(module, "kv.attention", "kv.attention_padded"):
        at = Expansion(op.opview, op, target, {})
        try:
            found = attention_entries(op.opview, at)
        except ValueError as error:
            fail(op, f"has a schedule that does not fit: {error}")
        given = {named.name: named.attr for named in ir.DictAttr(op.attributes["schedule"])} if at.schedule else {}
        with op.location:
            chosen = {**{k: attribute_of(v) for k, v in found.items()}, **given}
            op.attributes["schedule"] = ir.DictAttr.get(chosen)
