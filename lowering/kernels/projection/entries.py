# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which entries complete the schedule of a product into a cache."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvarn.lowering.remarks import remark
from kvarn.lowering.schedules import projection as projection_schedule

from .. import schedules_of
from ..base import Expansion
from ..common import row_alignment
from . import common, expansion, groups, tiles


@schedules_of("kv.project_append", "kv.project_append_padded")
def projection_entries(op: Any, at: Expansion, without: Collection[str]) -> dict[str, Any]:
    """The schedule of a product into a cache."""
    case = common.Projection.of(op, at)
    kind = expansion.kind_of(op, at, case)
    if kind == "simt":
        for why in tiles.problems(groups.plain_case(case), at.target, row_alignment(op)):
            remark(op.operation, "missed", f"kind {kind} is not the fastest: a schedule of kind tile {why}")
    return {"kind": kind, **projection_schedule.choose(op, case, at, kind)}
