# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Look up the pages of a ``kv.populate`` by vector loads of the lookup table.

A tile of several pages loads chunks of min(lowbit(pages), lowbit(base_alignment / P), 8) entries, each aligned to its
size, and multiplies them by the row stride S lane by lane; base is a multiple of P, so no slot is added. A tile within
one page loads one entry, and adds the slot unless the alignment makes it 0.

Before:  %r = "kv.populate"(%k, %b, %base) {tile_rows = 128, base_alignment = 0, ...} : !kv.rows<128, 16>
After:   %p = "kv.load_pages"(%k, %b, %column) {count = 8} : vector<8xi32>
         %r = "kv.make_rows"(%p[0] * S, ..., %p[7] * S) : !kv.rows<128, 16>
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, vector

from kvarn.dialect import layout, ops, types
from kvarn.lowering.index import Ix, i32
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import ops_named, replace
from kvarn.lowering.rewrite_counts import performs


@dataclass(frozen=True)
class Options:
    """max_chunk: the most entries per load (1 keeps the loads scalar)."""

    max_chunk: int = 8


def rows_of(op: ir.Operation, max_chunk: int) -> list[ir.Value]:
    """The first row of each page of a populate."""
    view = op.opview
    cache, batch, base = view.cache, view.batch, view.base
    spec = types.spec_of(cache.type)
    tile, alignment = view.tile_rows.value, view.base_alignment.value or view.tile_rows.value
    pages = layout.populate_pages(tile, spec.page_size)
    if pages == 1:
        if spec.paged and alignment % spec.page_size == 0:
            page = ops.page(cache, batch, base)
            return [arith.muli(page, row_stride(cache))]
        return [ops.row_index(cache, batch, base)]
    chunk = min(layout.populate_chunk(tile, spec.page_size, alignment), max_chunk)
    done = f"{pages} pages are looked up by {pages // chunk} loads of {chunk} entries"
    if chunk == 1:
        done += f": the tile of {tile} rows starts at multiples of {alignment}, pages have {spec.page_size}"
    remark(op, "missed" if chunk == 1 else "passed", done, pages=pages, entries=chunk)
    column = Ix(base) // spec.page_size
    stride, rows = row_stride(cache), []
    for first in range(0, pages, chunk):
        entries = ops.load_pages(cache, batch, (column + first).value, chunk)
        scaled = arith.muli(entries, vector.broadcast(entries.type, stride))
        rows += [vector.extract(scaled, [], [i]) for i in range(chunk)]
    return rows


def row_stride(cache: ir.Value) -> ir.Value:
    """S of a cache, i32: rows from one page to the next."""
    spec = types.spec_of(cache.type)
    rows = layout.row_stride(spec, Ix(ops.field(cache, "stride0")))
    return arith.trunci(i32(), rows.value)


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for op in ops_named(module, "kv.populate"):
        view = op.opview
        if not performs(op, "vectorize"):
            continue
        with ir.InsertionPoint(op), op.location:
            spec = types.spec_of(view.cache.type)
            replace(op, ops.make_rows(rows_of(op, options.max_chunk), view.tile_rows.value, spec.page_size))
