# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expand tiles that TMA copies into loads of boxes; refuse copies that the target does not support.

A tile of tokens becomes one load per box of rows. The page is looked up (and clamped, like every lookup); a box without
any existing token gets an out-of-bounds coordinate, so that TMA fills it with zeros, or is not loaded.

Before:  "kv.tma_load_tile"(%map, %k, %b, %h, %base, %valid, %column, %tile, %barrier) {tile_rows = 64, ...}
After:   %p = "kv.page"(%k, %b, %base) ; %q = arith.select %exists, %p, %c-1
         "kv.tma_load"(%map, %tile, %barrier, %q, %slot, %h, %column) {smem_rows = 64, ...} ; ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect import layout, ops, types
from kvarn.dialect.tma_layout import GATHERS, TmaSpec
from kvarn.lowering.index import Ix, const
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import kernels, replace, walk
from kvarn.lowering.target import Target, by_name

from .lower_kv_tiles import guarded, moved

_LOADS = ("kv.tma_load", "kv.tma_load_box", "kv.tma_load_tile")
_TILE = "kv.tma_load_tile"


@dataclass(frozen=True)
class Options:
    """target: the target of the copies."""

    target: str = "sm_90a"


def is_copy(name: str) -> bool:
    """Whether an op copies by TMA; ``kv.tma_row`` is a lookup, which every target supports."""
    return name.startswith("kv.tma_") and name != "kv.tma_row"


def refuse(op: ir.Operation, target: Target) -> None:
    """Fail at an op that the target does not support."""
    if target.is_host:
        fail(op, "is a copy by the tensor memory accelerator of sm_90 and later: the host target has none")
    if not target.has("tma"):
        fail(op, f"is a copy by the tensor memory accelerator, which needs sm_90 or later, got target {target.name}")
    if op.name in _LOADS:
        view = op.opview
        if types.tma_spec_of(view.map.type).form in GATHERS and not target.has("gather4"):
            fail(op, f"gathers rows, which needs sm_100a, got target {target.name}")
        if view.cta_group.value == 2 and not target.has("pair_cta"):
            fail(op, f"with cta_group = 2 copies for a CTA pair, which needs sm_100a, got target {target.name}")


def refuse_descriptors(function: ir.Operation, target: Target) -> None:
    """Fail at a kernel with a descriptor argument, even if it is not used."""
    for number, argument in enumerate(function.regions[0].blocks[0].arguments):
        if types.type_name(argument.type) == "tma":
            what = f"argument #{number} is a TMA descriptor"
            fail(function, f"{what}, which needs sm_90 or later, got target {target.name}")


def tile_coordinates(op: Any, spec: TmaSpec, token: Ix, exists: ir.Value | None) -> list[ir.Value]:
    """Coordinates of the box that starts at a token; out of bounds if no token of it exists."""
    cache = types.spec_of(op.cache.type)
    if spec.paged:
        _, slot = layout.page_and_slot(cache, token)
        # A box of a page is within that page, so page -1 is out of bounds.
        page = ops.page(op.cache, op.batch, token.value)
        found, outside = [page, slot.value], -1
    else:
        found, outside = [ops.row_index(op.cache, op.batch, token.value)], -spec.rows
    if exists is not None:
        found[0] = arith.select(exists, found[0], const(outside))
    return [*found, op.head, op.column]


def expand_tile(op: Any) -> None:
    """One ``kv.tma_load`` per box of rows."""
    spec = types.tma_spec_of(op.map.type)
    for first in range(0, op.tile_rows.value, spec.rows):
        exists = arith.cmpi(arith.CmpIPredicate.slt, const(first), op.valid)  # op.valid may be negative
        skip = op.beyond.value == "skip"

        def load(first: int = first, exists: ir.Value | None = None if skip else exists) -> None:
            coordinates = tile_coordinates(op, spec, Ix(op.base) + first, exists)
            ops.tma_load(
                op.map, moved(op.destination, first * spec.row_bytes), op.barrier, coordinates,
                smem_rows=op.smem_rows.value, cta_group=op.cta_group.value, multicast=op.multicast.value,
            )  # fmt: skip

        guarded(exists if skip else None, load)


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    target = by_name(options.target)
    for op in walk(module, is_copy):
        refuse(op, target)
        if op.name == _TILE:
            with ir.InsertionPoint(op), op.location:
                expand_tile(op.opview)
                replace(op, None)
    if not target.has("tma"):
        for function in kernels(module):
            refuse_descriptors(function, target)
