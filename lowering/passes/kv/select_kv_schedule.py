# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Complete the schedules of fused operations: given entries stay if they are legal, otherwise the pass fails.

Users and tuners set entries of the ``schedule`` attribute; this pass decides the rest from the operation, the target
and the tables: the user's (``kvarn tune``), then the built-in one. ``dialect/schedules.py`` declares the legal entries.
The expansions read the completed schedule, and decide nothing again.

Before:  "kv.attention"(...) {schedule = {max_queries = 1, max_batch = 16}, ...}
After:   "kv.attention"(...) {schedule = {kind = "decode", max_queries = 1, max_batch = 16, stages = 2, ...}, ...}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn.dialect import schedules
from kvarn.dialect.verify import attribute_of, python_values
from kvarn.lowering import kernels
from kvarn.lowering.kernels.base import Expansion
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import kv_ops
from kvarn.lowering.target import Target, by_name


@dataclass(frozen=True)
class Options:
    """target: the target of the schedules. without: comma-separated passes that will not run."""

    target: str = "sm_90a"
    without: str = ""


def chosen(op: ir.Operation, target: Target, without: Collection[str] = ()) -> dict[str, Any]:
    """The entries that the pass decides for an operation, if the passes ``without`` do not run.

    Raises
    ------
    ValueError
        If a given entry is illegal.
    """
    at = Expansion(op.opview, op, target, {})
    _require(op.name, at.schedule, target)
    entries = kernels.entries(op.name)
    if entries is None:
        return {}
    found = entries(op.opview, at, without)
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
