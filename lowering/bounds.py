# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What keeps an access inside the memory that a handle names, whatever lengths, tables and offsets hold.

A table entry is held to the pool where it is read (``kv.page``), and a slot of a paged cache lies in its page. The
token of a continuous cache, of a dense or of a ragged operand is its slot: that is what is held here, and how many
tokens a sequence may have.
"""

from __future__ import annotations

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect import layout, ops, types
from kvarn.dialect.layout import RAGGED

from .index import Ix


def token_capacity(handle: ir.Value) -> Ix:
    """Tokens that a sequence of a cache may have."""
    columns, slots = (Ix(ops.field(handle, name)) for name in ("lookup_columns", "capacity"))
    return layout.token_capacity(types.spec_of(handle.type), columns, slots)


def slots_after(cache: ir.Value, page: ir.Value) -> Ix | None:
    """Slots that a token may have in a page, or from a ragged operand's row on; None where it cannot leave its page."""
    spec = types.spec_of(cache.type)
    if spec.paged:
        return None
    return Ix(ops.field(cache, "num_blocks")) - Ix(page) if spec.kind == RAGGED else Ix(ops.field(cache, "capacity"))


def slot_of(cache: ir.Value, page: ir.Value, token: ir.Value, clamp: bool) -> Ix:
    """The slot of a token in its page; the last one for a token past it."""
    _, slot = layout.page_and_slot(types.spec_of(cache.type), Ix(token))
    slots = slots_after(cache, page) if clamp else None
    return slot if slots is None else slot.least(slots - 1)


def in_pool(cache: ir.Value, page: ir.Value, token: ir.Value) -> ir.Value:
    """Whether a token is one of the pool, i1, by its raw table entry: what is not is not written."""
    inside, slots = Ix(page).below(Ix(ops.field(cache, "num_blocks"))), slots_after(cache, page)
    return inside if slots is None else arith.andi(inside, Ix(token).below(slots))
