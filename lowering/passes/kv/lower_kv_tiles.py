# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lower tile copies between pages and shared memory to 16-byte copies, with one lookup per page.

A thread copies the chunks ``thread + i * num_threads``, so that neighbouring threads access neighbouring addresses.
Rows are contiguous within a page: one address per page is computed, and the others are at constant distances. A full
tile is copied without predicates; a partial tile copies 0 bytes for missing rows, which cp.async fills with zeros.

Before:  "kv.load_tile"(%k, %b, %h, %base, %valid, %dst, %thread) {tile_rows = 16, mode = "async", ...}
After:   %p = "kv.page"(%k, %b, %base) ; %a = "kv.block_ptr"(%k, %b, %row, %h, %d, %p)
         nvvm.cp.async.shared.global %dst0, %a, 16 ; nvvm.cp.async.shared.global %dst1, %a1, 16 ; ...
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import arith, llvm, nvvm, scf

from kvarn.dialect import layout, ops, types
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.lowering.bounds import in_pool, slots_after
from kvarn.lowering.index import Ix, const, i32
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import ops_named, replace


def moved(base: ir.Value, distance: Any) -> ir.Value:
    """The address ``distance`` bytes after another."""
    byte = ir.IntegerType.get_signless(8)
    if isinstance(distance, int):
        if distance == 0:
            return base
        return llvm.getelementptr(base.type, base, [], ir.DenseI32ArrayAttr.get([distance]), byte, None)
    return llvm.getelementptr(base.type, base, [distance], ir.DenseI32ArrayAttr.get([-2147483648]), byte, None)


class Tile:
    """The geometry of one tile copy, and this thread's chunks in it."""

    def __init__(self, op: Any):
        self.op = op
        self.spec = types.spec_of(op.cache.type)
        self.rows, self.threads = op.tile_rows.value, op.num_threads.value
        itemsize = self.spec.dtype.itemsize
        self.layout = SharedLayout(self.rows, self.spec.head_size, itemsize, op.swizzle.value, pitch=op.pitch.value)
        self.chunks = self.layout.row_bytes // CHUNK
        self.page_rows = layout.effective_page(self.rows, self.spec.page_size)
        self.pages: dict[int, tuple[ir.Value, ir.Value]] = {}
        self.valid = Ix(op.valid)
        if not self.spec.paged:  # without pages the copy must end at the sequence's region
            slots = slots_after(op.cache, ops.page(op.cache, op.batch, op.base))
            assert slots is not None
            self.valid = self.valid.least(slots - slots.least(Ix(op.base)))

    @property
    def count(self) -> int:
        """Chunks per thread; the last ones may be past the tile."""
        return layout.cdiv(self.rows * self.chunks, self.threads)

    @property
    def uniform(self) -> bool:
        """Whether a thread keeps its column, and all threads' rows of one iteration are in one page."""
        if self.threads % self.chunks:
            return False
        return self.page_rows % (self.threads // self.chunks) == 0

    def place(self, i: int) -> tuple[Ix, Ix]:
        """(row, chunk of the row) of this thread's i-th copy."""
        index = Ix(self.op.thread) + i * self.threads
        if self.uniform:
            first = Ix(self.op.thread)
            return first // self.chunks + i * (self.threads // self.chunks), first % self.chunks
        return index // self.chunks, index % self.chunks

    def global_address(self, i: int, row: Ix, column: Ix) -> ir.Value:
        """Address of a chunk in the cache."""
        op, itemsize = self.op, self.spec.dtype.itemsize
        dim = (column * (CHUNK // itemsize)).value
        if not self.uniform:
            token = Ix(op.base) + row
            page = ops.page(op.cache, op.batch, token.value)
            return ops.block_ptr(op.cache, op.batch, token.value, op.head, dim, page=page)
        step = self.threads // self.chunks
        page_number = i * step // self.page_rows
        if page_number not in self.pages:
            start = Ix(op.base) + page_number * self.page_rows
            page = ops.page(op.cache, op.batch, start.value)
            token = start + Ix(op.thread) // self.chunks
            self.pages[page_number] = (page, ops.block_ptr(op.cache, op.batch, token.value, op.head, dim, page=page))
        in_page = i * step - page_number * self.page_rows
        return moved(self.pages[page_number][1], in_page * self.spec.token_stride * itemsize)


def inside_tile(tile: Tile, i: int, row: Ix) -> ir.Value | None:
    """Whether the i-th chunk is in the tile; None if it always is."""
    if (i + 1) * tile.threads <= tile.rows * tile.chunks:
        return None
    return row.below(tile.rows)


def guarded(condition: ir.Value | None, body: Any) -> None:
    """Emit a body, under a condition if there is one."""
    if condition is None:
        body()
        return
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        body()
        scf.yield_([])


def copy_in(tile: Tile, whole: bool) -> None:
    """This thread's copies to shared memory."""
    op, is_async = tile.op, tile.op.mode.value == "async"
    tile.pages.clear()
    for i in range(tile.count):
        row, column = tile.place(i)

        def one(i: int = i, row: Ix = row, column: Ix = column) -> None:
            source = tile.global_address(i, row, column)
            target = moved(op.destination, tile.layout.chunk_offset(row, column).value)
            exists = None if whole else row.below(tile.valid)
            if is_async:
                size = None if whole else arith.select(exists, const(CHUNK), const(0))
                nvvm.cp_async_shared_global(target, source, CHUNK, nvvm.LoadCacheModifierKind.CG, cp_size=size)
                return
            vector = ir.VectorType.get([4], i32())
            value = llvm.load(vector, source, alignment=CHUNK)
            if exists is not None:
                zero = arith.constant(vector, ir.DenseElementsAttr.get_splat(vector, ir.IntegerAttr.get(i32(), 0)))
                value = arith.select(exists, value, zero)
            llvm.store(value, target, alignment=CHUNK)

        # A page that was looked up inside a guard cannot be used by the next chunk.
        condition = inside_tile(tile, i, row)
        if condition is not None:
            tile.pages.clear()
        guarded(condition, one)


def copy_out(tile: Tile) -> None:
    """This thread's copies from shared memory to existing tokens on existing pages."""
    op = tile.op
    for i in range(tile.count):
        row, column = tile.place(i)
        token = Ix(op.base) + row
        entry = ops.raw_page(op.cache, op.batch, token.value)
        exists = arith.andi(row.below(tile.valid), in_pool(op.cache, entry, token.value))
        tail = inside_tile(tile, i, row)
        branch = scf.IfOp(exists if tail is None else arith.andi(exists, tail))
        with ir.InsertionPoint(branch.then_block):
            vector = ir.VectorType.get([4], i32())
            value = llvm.load(vector, moved(op.source, tile.layout.chunk_offset(row, column).value), alignment=CHUNK)
            dim = (column * (CHUNK // tile.spec.dtype.itemsize)).value
            target = ops.block_ptr(op.cache, op.batch, token.value, op.head, dim, page=entry)
            llvm.store(value, target, alignment=CHUNK)
            scf.yield_([])


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for op in ops_named(module, "kv.load_tile", "kv.store_tile"):
        with ir.InsertionPoint(op), op.location:
            tile = Tile(op.opview)
            if op.name == "kv.store_tile":
                copy_out(tile)
            else:
                whole = arith.cmpi(arith.CmpIPredicate.uge, tile.valid.value, const(tile.rows))
                branch = scf.IfOp(whole, has_else=True)
                with ir.InsertionPoint(branch.then_block):
                    copy_in(tile, whole=True)
                    scf.yield_([])
                with ir.InsertionPoint(branch.else_block):
                    copy_in(tile, whole=False)
                    scf.yield_([])
            replace(op, None)
