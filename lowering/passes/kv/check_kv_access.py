# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Check at run time that every access to a cache is in bounds.

Inserts assertions before each access: the sequence is in the batch, head and dim are in the cache, the token is in the
sequence's row of the lookup table (or its region, when continuous), and the token's page is in the pool. Tiles and
lookups of lengths get the assertions that apply to them; a populate's promised alignment and the table entries that it
reads are checked, too. Canonicalization removes assertions that are decided at compile time. Addresses
(``kv.block_ptr``) are not checked, since the accesses through them are not known here.

The pass is off by default: even without it no page outside the pool is written, and reads of one read the null page. It
runs before all passes that move accesses, so that accesses are checked where the user wrote them.

Before:  %x = "kv.load"(%k, %b, %h, %t, %d) {width = 8} : ...
After:   %ok = arith.cmpi ult, %b, <batch> ; cf.assert %ok, "k.py:10:9: kv.load: the sequence must be in the batch"
         ... likewise for the head, the dim, the token and its page
         %x = "kv.load"(%k, %b, %h, %t, %d) {width = 8} : ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mlir import ir
from mlir.dialects import arith, cf

from kvarn.dialect import effects, kv, layout, ops, types, verify
from kvarn.dialect.layout import CacheSpec
from kvarn.errors import source_locations
from kvarn.lowering.access_plan import is_access
from kvarn.lowering.index import Ix, const
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import walk


class _Checks:
    """The assertions of one op."""

    def __init__(self, op: ir.Operation) -> None:
        self.op = op.opview
        self.spec: CacheSpec = types.spec_of(self.op.cache.type)
        places = source_locations(op.location)
        self.title = f"{places[0]}: {op.name}" if places else op.name

    def need(self, condition: ir.Value, sentence: str) -> None:
        cf.AssertOp(condition, f"{self.title}: {sentence}")

    def field(self, name: str) -> Ix:
        return Ix(ops.field(self.op.cache, name))

    def sequence(self) -> None:
        self.need(Ix(self.op.batch).below(self.field("batch")), "the sequence must be in the batch")

    def head(self) -> None:
        heads = self.spec.num_heads
        self.need(Ix(self.op.head).below(heads), f"the head must be in [0, {heads})")

    def accessed(self) -> ir.Value:
        """The value that is read or written."""
        results = self.op.operation.results
        return results[0] if len(results) else self.op.value

    def dims(self) -> None:
        """The first dim and the lanes after it; for a scales operand, the granules."""
        if self.spec.kind == layout.SCALES:
            self.granules()
            return
        lanes = verify.element_and_width(self.accessed().type)[1]
        last = self.spec.head_size - lanes
        self.need(Ix(self.op.dim).below(last + 1), f"the dim must be in [0, {last}] for {lanes} elements")

    def granules(self) -> None:
        """The granule of the first dim and those after it."""
        lanes = verify.element_and_width(self.accessed().type)[1]
        last = self.spec.num_scales - lanes
        granule = Ix(self.op.dim) // self.spec.granularity
        self.need(granule.below(last + 1), f"the dim must be in granule [0, {last}] for {lanes} scales")

    def token(self, token: ir.Value) -> None:
        """The token is in the row of the lookup table, or in the region of a continuous cache."""
        spec = self.spec
        if spec.kind == layout.RAGGED:
            length = ops.cache_length(self.op.cache, self.op.batch)
            self.need(Ix(token).below(Ix(length)), "the token must be in the sequence's rows")
        elif spec.paged:
            inside = (Ix(token) // spec.page_size).below(self.field("lookup_columns"))
            self.need(inside, "the token must be in the lookup table")
        else:
            self.need(Ix(token).below(self.field("capacity")), "the token must be in the sequence's region")

    def page(self) -> None:
        given = self.op.page
        entry = given if given is not None else ops.raw_page(self.op.cache, self.op.batch, self.op.token)
        self.need(Ix(entry).below(self.field("num_blocks")), "the token's page must be in the pool")

    def tile(self) -> None:
        """The last existing token of a tile."""
        op = self.op
        count = Ix(op.valid).least(Ix(const(op.tile_rows.value)))
        none = arith.cmpi(arith.CmpIPredicate.eq, count.value, const(0))
        last = (Ix(op.base) + count - 1).value
        self.token(arith.select(none, const(0), last))

    def populate(self) -> None:
        """The promised alignment of the base, and the table entries that a tile reads."""
        op, page_size = self.op, self.spec.page_size
        pages = layout.populate_pages(op.tile_rows.value, page_size)
        alignment = op.base_alignment.value or op.tile_rows.value
        if pages == 1:
            self.token(op.base)
            return
        whole = arith.cmpi(arith.CmpIPredicate.eq, (Ix(op.base) % alignment).value, const(0))
        self.need(whole, f"the base must be a multiple of the promised alignment {alignment}")
        self.entries(Ix(op.base) // page_size, pages)

    def entries(self, column: Ix, count: int) -> None:
        """``count`` entries of a sequence's row of the table from ``column`` up."""
        inside = arith.cmpi(
            arith.CmpIPredicate.ule, (column.wide + count).value, self.field("lookup_columns").wide.value
        )
        self.need(inside, f"the {count} entries from the column up must be in the lookup table: pad its columns")

    def load_pages(self) -> None:
        column, count = Ix(self.op.column), self.op.count.value
        whole = arith.cmpi(arith.CmpIPredicate.eq, (column % count).value, const(0))
        self.need(whole, f"the column must be a multiple of {count}")
        self.entries(column, count)


# --- which op needs what -------------------------------------------------------------------------

RULES: dict[str, Callable[[_Checks], None]] = {}


def checks(*op_classes: Any) -> Callable[[Callable[[_Checks], None]], Callable[[_Checks], None]]:
    """Declare the checks of ops that do not access a page; they follow the check of the sequence."""

    def declare(rule: Callable[[_Checks], None]) -> Callable[[_Checks], None]:
        RULES.update((c.OPERATION_NAME, rule) for c in op_classes)
        return rule

    return declare


@checks(kv.CacheLengthOp)
def of_length(found: _Checks) -> None:
    """Only the sequence."""


@checks(kv.PopulateOp)
def of_populate(found: _Checks) -> None:
    found.populate()


@checks(kv.LoadPagesOp)
def of_pages(found: _Checks) -> None:
    found.load_pages()


@checks(kv.LoadTileOp, kv.StoreTileOp)
def of_tile(found: _Checks) -> None:
    found.head()
    found.tile()


def of_access(found: _Checks) -> None:
    """Ops that read or write contents of a page."""
    found.head()
    (found.granules if effects.acts_on_scales_only(found.op.operation.name) else found.dims)()
    found.token(found.op.token)
    found.page()


def rule_of(name: str) -> Callable[[_Checks], None] | None:
    """The checks of an op, by its declared traits; None for an op without any."""
    return RULES.get(name) or (of_access if is_access(name) else None)


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    find = functools.cache(rule_of)
    for op in walk(module, lambda name: find(name) is not None):
        with ir.InsertionPoint(op), op.location:
            found = _Checks(op)
            found.sequence()
            rule = find(op.name)
            assert rule is not None
            rule(found)
