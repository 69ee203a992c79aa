# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations that compute where a token is: pages, rows, pointers.

They read only the lookup table, which nothing in a kernel writes, so all are pure. Table indices are clamped to the
table and page ids to the pool's last page (the null page), so that passes may move the ops out of loops and branches
without a fault.
"""

from typing import Any

from mlir import ir

from .. import layout, types, verify
from ..base import Kv
from ..effects import GivesAddress, LooksUpPage, Pure
from ..ext import I32, Operand, Result, infer_result
from ..layout import RAGGED, SCALES
from .common import as_i32, i64_attr
from .metadata import OfRows, rows_cache


class PageOp(Kv.Operation, name="page", traits=[Pure]):
    """Physical page of a token: LUT[b, t // P] (LUT[b] when continuous), clamped to the pool.

    Accesses take the result as their optional ``page`` operand, so that one lookup serves several accesses. The page of
    a dense operand is the sequence, that of a ragged operand the sequence's first row.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    token: Operand[I32]
    page: Result[I32] = infer_result()

    def verify_invariants(self) -> bool:
        return verify.handle(self, self.operation.operands[0]) is not None


class RawPageOp(Kv.Operation, name="raw_page", traits=[Pure]):
    """Entry of the lookup table for a token, not clamped to the pool; a store tests it before it writes."""

    cache: Operand[Any]
    batch: Operand[I32]
    token: Operand[I32]
    page: Result[I32] = infer_result()

    def verify_invariants(self) -> bool:
        return verify.handle(self, self.operation.operands[0]) is not None


class RowIndexOp(OfRows, name="row_index", traits=[Pure]):
    """Row of a token: page * S + t % P, in units of token slots; u32 arithmetic in an i32."""

    batch: Operand[I32]
    token: Operand[I32]
    row: Result[I32] = infer_result()


class TmaRowOp(OfRows, name="tma_row", traits=[Pure]):
    """Row of an encoded index page*P + slot, without the lookup table; a negative index gives -1."""

    encoded: Operand[I32]
    row: Result[I32] = infer_result()


class PopulateOp(Kv.Operation, name="populate", traits=[Pure]):
    """First rows of a tile's pages: rows[i] = row_index(b, base + i * min(P, tile_rows)).

    Attributes: tile_rows, the rows of a value tile; base_alignment, a promised divisor of base (0 means tile_rows);
    pair_cta and is_leader, which half of K's rows a CTA of a pair copies. Preconditions: with several pages per tile,
    base is a multiple of base_alignment, which is a multiple of P.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    base: Operand[I32]
    tile_rows: ir.IntegerAttr
    base_alignment: ir.IntegerAttr
    pair_cta: ir.BoolAttr
    is_leader: ir.BoolAttr
    rows: Result[Any]

    def verify_invariants(self) -> bool:
        spec = rows_cache(self)
        if spec is None:
            return False
        tile, alignment = verify.integer(self.tile_rows), verify.integer(self.base_alignment)
        pair = verify.boolean(self.pair_cta)
        if tile is None or alignment is None or pair is None:
            return verify.fail(self, "tile_rows and base_alignment must be integers and pair_cta a bool")
        for problem in layout.populate_problems(tile, spec.page_size, alignment or None, pair):
            return verify.fail(self, problem)
        expected, got = types.rows_type(tile, spec.page_size), self.operation.results[0].type
        return expected == got or verify.fail(self, f"result must be {expected}, got {got}")


class LoadPagesOp(Kv.Operation, name="load_pages", traits=[Pure]):
    """``count`` consecutive entries of a sequence's table row from ``column`` up, in vector loads of up to four.

    Attribute count: 1, 2, 4 or 8. Preconditions: column is a multiple of count, and every table row is aligned to the
    size of a load. A load that would start past the row's columns reads the row's last entries instead. The entries are
    not clamped to the pool: the table's padding names the null page.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    column: Operand[I32]
    count: ir.IntegerAttr
    pages: Result[Any]

    def verify_invariants(self) -> bool:
        spec = rows_cache(self)
        if spec is None:
            return False
        if not spec.paged:
            return verify.fail(self, "needs a paged cache, whose table has one row per sequence")
        count = verify.integer(self.count)
        if count not in (1, 2, 4, 8):
            return verify.fail(self, f"count must be 1, 2, 4 or 8, got {self.count}")
        got = self.operation.results[0].type
        return str(got) == f"vector<{count}xi32>" or verify.fail(self, f"result must be vector<{count}xi32>, got {got}")


class MakeRowsOp(Kv.Operation, name="make_rows", traits=[Pure]):
    """A ``!kv.rows`` from the first row of each page."""

    firsts: list[Operand[I32]]
    rows: Result[Any]

    def verify_invariants(self) -> bool:
        got = self.operation.results[0].type
        if types.type_name(got) != "rows":
            return verify.fail(self, f"result must be of type !kv.rows, got {got}")
        pages = layout.populate_pages(*types.rows_parameters(got))
        return len(self.operation.operands) == pages or verify.fail(
            self, f"takes {pages} rows for {got}, got {len(self.operation.operands)}"
        )


class GetRowOp(Kv.Operation, name="get_row", traits=[Pure]):
    """Row of the tile's token ``offset`` in [0, tile_rows): rows[offset // page] + offset % page."""

    rows: Operand[Any]
    offset: Operand[I32]
    row: Result[I32] = infer_result()

    def verify_invariants(self) -> bool:
        got = self.operation.operands[0].type
        return types.type_name(got) == "rows" or verify.fail(self, f"operand must be of type !kv.rows, got {got}")


class BlockPtrOp(Kv.Operation, name="block_ptr", traits=[LooksUpPage, GivesAddress, Pure]):
    """Address of (b, t, h, d); ``tile`` tokens from t up follow at the token stride, which is H*D when packed.

    Attribute: tile, a divisor of the page size (ignored without pages). Precondition: t is a multiple of tile. For a
    scales operand the result is the address of the scale, with a token stride of H*G.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    token: Operand[I32]
    head: Operand[I32]
    dim: Operand[I32]
    page: Operand[I32] | None = None
    tile: ir.IntegerAttr
    pointer: Result[Any]

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.operands[0])
        if spec is None:
            return False
        tile = verify.integer(self.tile)
        if tile is None or tile < 1:
            return verify.fail(self, f"tile must be a positive integer, got {self.tile}")
        if spec.paged and spec.page_size % tile:
            return verify.fail(self, f"tile must divide the page size {spec.page_size}, got {tile}")
        return verify.global_pointer(self)


class ScaleBlockPtrOp(Kv.Operation, name="scale_block_ptr", traits=[LooksUpPage, GivesAddress, Pure]):
    """Address of the scale of (b, t, h, d), at granule d // granularity. Needs a quantized cache or dense operand.

    The result is null for scales operands and ragged operands.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    token: Operand[I32]
    head: Operand[I32]
    dim: Operand[I32]
    page: Operand[I32] | None = None
    pointer: Result[Any]

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.operation.operands[0])
        if spec is None:
            return False
        null = spec.kind in (SCALES, RAGGED)
        return (null or verify.needs_scales(self, spec)) and verify.global_pointer(self)


class ScalesBaseOp(Kv.Operation, name="scales_base", traits=[GivesAddress, Pure]):
    """First scale of the cache's view; null without scales, and for operands other than caches."""

    cache: Operand[Any]
    pointer: Result[Any]

    def verify_invariants(self) -> bool:
        return rows_cache(self) is not None and verify.global_pointer(self)


class BufferAddressOp(Kv.Operation, name="buffer_address", traits=[GivesAddress, Pure]):
    """Address of an element of a buffer argument: data + sum(index * stride), in 64 bits. No bounds check."""

    buffer: Operand[Any]
    indices: list[Operand[I32]]
    pointer: Result[Any]

    def verify_invariants(self) -> bool:
        buffer = self.operation.operands[0]
        if len(self.operation.operands) == 1:
            return verify.fail(self, f"takes one index per dimension and at least one, got none for {buffer.type}")
        is_buffer = verify.memref(self, buffer, len(self.operation.operands) - 1, None, "buffer")
        return is_buffer and verify.global_pointer(self)


# --- wrappers --------------------------------------------------------------------------------------


def _pointer() -> ir.Type:
    return ir.Type.parse("!llvm.ptr<1>")


def page(cache: ir.Value, batch: Any, token: Any) -> ir.Value:
    """Physical page of a token, clamped to the pool, i32."""
    return PageOp(cache, as_i32(batch), as_i32(token)).operation.results[0]


def raw_page(cache: ir.Value, batch: Any, token: Any) -> ir.Value:
    """Lookup-table entry of a token, not clamped, i32."""
    return RawPageOp(cache, as_i32(batch), as_i32(token)).operation.results[0]


def row_index(cache: ir.Value, batch: Any, token: Any) -> ir.Value:
    """Row of a token, i32."""
    return RowIndexOp(cache, as_i32(batch), as_i32(token)).operation.results[0]


def tma_row(cache: ir.Value, encoded: Any) -> ir.Value:
    """Row of an encoded (page, slot) index, i32."""
    return TmaRowOp(cache, as_i32(encoded)).operation.results[0]


def populate(
    cache: ir.Value,
    batch: Any,
    base: Any,
    tile_rows: int,
    base_alignment: int | None = None,
    pair_cta: bool = False,
    is_leader: bool = True,
) -> ir.Value:
    """First rows of the pages of a tile of ``tile_rows`` tokens from ``base``: a ``!kv.rows``.

    Raises
    ------
    ValueError
        When tile rows, page size and alignment are incompatible.
    """
    spec = types.spec_of(cache.type)
    for problem in layout.populate_problems(tile_rows, spec.page_size, base_alignment, pair_cta):
        raise ValueError(f"populate: {problem}")
    return PopulateOp(
        cache, as_i32(batch), as_i32(base), i64_attr(tile_rows), i64_attr(base_alignment or 0),
        ir.BoolAttr.get(pair_cta), ir.BoolAttr.get(is_leader), types.rows_type(tile_rows, spec.page_size),
    ).operation.results[0]  # fmt: skip


def get_row(rows: ir.Value, offset: Any) -> ir.Value:
    """Row of token ``offset`` of a populated tile, i32."""
    return GetRowOp(rows, as_i32(offset)).operation.results[0]


def load_pages(cache: ir.Value, batch: Any, column: Any, count: int) -> ir.Value:
    """``count`` table entries from ``column`` up, vector<count x i32>."""
    result = ir.VectorType.get([count], ir.IntegerType.get_signless(32))
    return LoadPagesOp(cache, as_i32(batch), as_i32(column), i64_attr(count), result).operation.results[0]


def make_rows(firsts: Any, tile_rows: int, page_size: int) -> ir.Value:
    """A ``!kv.rows`` from the first row of each page."""
    return MakeRowsOp(list(firsts), types.rows_type(tile_rows, page_size)).operation.results[0]


def block_ptr(
    cache: ir.Value, batch: Any, token: Any, head: Any, dim: Any = 0, tile: int = 1, page: ir.Value | None = None
) -> ir.Value:
    """Address of (b, t, h, d) in device memory."""
    return BlockPtrOp(
        cache, as_i32(batch), as_i32(token), as_i32(head), as_i32(dim), i64_attr(tile), _pointer(), page=page
    ).operation.results[0]


def scale_block_ptr(
    cache: ir.Value, batch: Any, token: Any, head: Any, dim: Any = 0, page: ir.Value | None = None
) -> ir.Value:
    """Address of the scale of (b, t, h, d)."""
    return ScaleBlockPtrOp(
        cache, as_i32(batch), as_i32(token), as_i32(head), as_i32(dim), _pointer(), page=page
    ).operation.results[0]


def scales_base(cache: ir.Value) -> ir.Value:
    """First scale of the cache's view; null when it has none."""
    return ScalesBaseOp(cache, _pointer()).operation.results[0]


def buffer_address(buffer: ir.Value, indices: Any) -> ir.Value:
    """Address of a buffer's element."""
    return BufferAddressOp(buffer, [as_i32(i) for i in indices], _pointer()).operation.results[0]
