# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Check, when a kernel runs, that every access to a cache stays inside it.

Asserts before each access that the sequence is in the batch, the head and dim in the cache, the token in the sequence's
row of the lookup table (in its block, when continuous) and the token's page in the pool; tiles and look-ups of lengths
have the part of it that applies. A populate's promise about its base is checked, and that the entries it reads are the
table's. What is known at compile time is decided by canonicalize. Addresses (``kv.block_ptr``)
are not checked: what is read through them is not known here.

Off by default: without it a page outside the pool is never written to, and reading one reads the null page. It stands
first of the passes that see accesses, so that they are checked where the user wrote them, under the same conditions.

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
        """What is read or written."""
        results = self.op.operation.results
        return results[0] if len(results) else self.op.value

    def dims(self) -> None:
        """The first dim and the lanes after it; of an operand of scales, the granules."""
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
        """In the row of the lookup table, or in the block of a continuous cache."""
        spec = self.spec
        if spec.kind == layout.RAGGED:
            length = ops.cache_length(self.op.cache, self.op.batch)
            self.need(Ix(token).below(Ix(length)), "the token must lie in the sequence's rows")
        elif spec.paged:
            inside = (Ix(token) // spec.page_size).below(self.field("lookup_columns"))
            self.need(inside, "the token must lie in the lookup table")
        else:
            self.need(Ix(token).below(self.field("capacity")), "the token must lie in the sequence's block")

    def page(self) -> None:
        given = self.op.page
        entry = given if given is not None else ops.raw_page(self.op.cache, self.op.batch, self.op.token)
        self.need(Ix(entry).below(self.field("num_blocks")), "the token's page must be in the pool")

    def tile(self) -> None:
        """The last token of a tile that exists."""
        op = self.op
        count = Ix(op.valid).least(Ix(const(op.tile_rows.value)))
        none = arith.cmpi(arith.CmpIPredicate.eq, count.value, const(0))
        last = (Ix(op.base) + count - 1).value
        self.token(arith.select(none, const(0), last))

    def populate(self) -> None:
        """The promise about the base, and the table's entries that a tile reads."""
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
        """Entries of a sequence's row of the table from a column on."""
        inside = arith.cmpi(
            arith.CmpIPredicate.ule, (column.wide + count).value, self.field("lookup_columns").wide.value
        )
        self.need(inside, f"the {count} entries from the column on must lie in the lookup table: pad its columns")

    def load_pages(self) -> None:
        column, count = Ix(self.op.column), self.op.count.value
        whole = arith.cmpi(arith.CmpIPredicate.eq, (column % count).value, const(0))
        self.need(whole, f"the column must be a multiple of {count}")
        self.entries(column, count)


# --- which op needs what -------------------------------------------------------------------------

RULES: dict[str, Callable[[_Checks], None]] = {}


def checks(*op_classes: Any) -> Callable[[Callable[[_Checks], None]], Callable[[_Checks], None]]:
    """Declare the checks of ops that are no accesses at a page, after that of their sequence."""

    def declare(rule: Callable[[_Checks], None]) -> Callable[[_Checks], None]:
        RULES.update((c.OPERATION_NAME, rule) for c in op_classes)
        return rule

    return declare


@checks(kv.CacheLengthOp)
def of_length(found: _Checks) -> None:
    """Nothing but the sequence."""


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
    """Of whatever reads or writes contents at a page."""
    found.head()
    (found.granules if effects.acts_on_scales_only(found.op.operation.name) else found.dims)()
    found.token(found.op.token)
    found.page()


def rule_of(name: str) -> Callable[[_Checks], None] | None:
    """The checks of an op, by what it declares; None for one that needs none."""
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
