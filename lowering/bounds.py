# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Bounds that keep an access inside a handle's memory, whatever lengths, tables and offsets contain.

A table entry is clamped to the pool where it is read (``kv.page``), and a slot of a paged cache is always within its
page. The token of a continuous cache, a dense or a ragged operand is its slot: this file bounds such slots, and the
number of tokens of a sequence.
"""

from __future__ import annotations

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect import layout, ops, types
from kvarn.dialect.layout import RAGGED

from .index import Ix


def token_capacity(handle: ir.Value) -> Ix:
    """The most tokens of a sequence of a cache."""
    columns, slots = (Ix(ops.field(handle, name)) for name in ("lookup_columns", "capacity"))
    return layout.token_capacity(types.spec_of(handle.type), columns, slots)


def slots_after(cache: ir.Value, page: ir.Value) -> Ix | None:
    """Slots of a page, or from a ragged operand's row up; None if a slot is always within its page."""
    spec = types.spec_of(cache.type)
    if spec.paged:
        return None
    return Ix(ops.field(cache, "num_blocks")) - Ix(page) if spec.kind == RAGGED else Ix(ops.field(cache, "capacity"))


def slot_of(cache: ir.Value, page: ir.Value, token: ir.Value, clamp: bool) -> Ix:
    """The slot of a token in its page; past the end, the last slot."""
    _, slot = layout.page_and_slot(types.spec_of(cache.type), Ix(token))
    slots = slots_after(cache, page) if clamp else None
    return slot if slots is None else slot.least(slots - 1)


def in_pool(cache: ir.Value, page: ir.Value, token: ir.Value) -> ir.Value:
    """Whether a token is in the pool, i1, by its raw table entry; stores to other tokens are dropped."""
    inside, slots = Ix(page).below(Ix(ops.field(cache, "num_blocks"))), slots_after(cache, page)
    return inside if slots is None else arith.andi(inside, Ix(token).below(slots))
