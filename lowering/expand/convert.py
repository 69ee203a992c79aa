# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.convert: the cached tokens of a cache, or of another library's pages, into another of either.

Blocks of a sequence take its tokens in turn, as many as it has. Where element types are the same, and nothing is
quantized, stored values are moved as they are; else they pass through f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec
from kvarn.lowering.index import Ix

from . import expands
from .base import Expansion
from .common import (
    CachedHead,
    Rows,
    Work,
    at_most,
    converted,
    head_and_lane,
    holds,
    row_alignment,
    single,
    vector_width,
    whole_warps,
)
from .quantize import Quantizer

TOKENS = 64  # of a block, at most


@kv.func
def stored(cache: Any, b: Any, h: Any, t: Any, d: Any, width: int) -> Any:
    """Stored values as they are, always a vector."""
    if cache.quantization_enabled:
        x = cache.load_quantized(b, h, t, d, width=width)
    else:
        x = cache.load(b, h, t, d, width=width)
    return x if width > 1 else kv.vector(cache.dtype, [x])


# --- sides -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredHead(CachedHead):
    """One head of a cached token, also as it is stored."""

    @kv.func
    def stored(self, d: Any, n: int) -> Any:
        """n stored values."""
        return stored(self.cache, self.b, self.head, self.position, d, n)

    @kv.func
    def put(self, d: Any, x: Any) -> None:
        """Store values of the storage type."""
        self.cache.store(self.b, self.head, self.position, d, single(x))


@dataclass(frozen=True)
class PooledHead:
    """One head of a slot of pages [N, P, H, D], which may lie at any strides but the last."""

    rows: Rows
    pages: Any
    page: Any
    slot: Any
    head: Any

    @kv.func
    def stored(self, d: Any, n: int) -> Any:
        """n stored values."""
        return self.rows.load(self.pages, self.page, self.slot, self.head, d, width=n)

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from dim d on, f32."""
        return kv.f32(self.stored(d, n))

    @kv.func
    def put(self, d: Any, x: Any) -> None:
        """Store values of the storage type."""
        self.rows.store(self.pages, self.page, self.slot, self.head, d, value=x)


@dataclass(frozen=True)
class CacheSide:
    """A cache."""

    spec: CacheSpec

    @property
    def shape(self) -> tuple[int, int]:
        return self.spec.num_heads, self.spec.head_size

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    @property
    def scaled(self) -> bool:
        return self.spec.quantized

    @kv.func
    def length(self, cache: Any, table: Any, lengths: Any, b: Any) -> Any:
        return cache.cache_length(b)

    @kv.func
    def page(self, cache: Any, table: Any, b: Any, t: Any) -> tuple[Any, Any]:
        """(what finds the token's page, whether there may be a token): a cache finds it by itself."""
        return kv.i32(0), holds(cache, t)

    @kv.func
    def at(self, cache: Any, page: Any, b: Any, t: Any, h: Any) -> StoredHead:
        return StoredHead(cache, b, t, h)


@dataclass(frozen=True)
class PoolSide:
    """Pages of another library: a buffer [N, P, H, D] with a table [B, columns]."""

    rows: Rows
    page_size: int
    shape: tuple[int, int]
    dtype: DType
    scaled = False

    @kv.func
    def length(self, pages: Any, table: Any, lengths: Any, b: Any) -> Any:
        return at_most(lengths[b], table.shape[1] * self.page_size)

    @kv.func
    def page(self, pages: Any, table: Any, b: Any, t: Any) -> tuple[Any, Any]:
        """(page, whether the table names one) of a token."""
        column, page = t // self.page_size, kv.i32(-1)
        if column < table.shape[1]:
            page = table[b, column]
        return page, (page >= 0) & (page < pages.shape[0])

    @kv.func
    def at(self, pages: Any, page: Any, b: Any, t: Any, h: Any) -> PooledHead:
        return PooledHead(self.rows, pages, page, t % self.page_size, h)


Side = CacheSide | PoolSide


# --- kernels ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversion:
    """Both sides, and how their tokens are divided. ``quantizer`` is there when the destination has scales."""

    source: Side
    destination: Side
    work: Work
    width: int
    quantizer: Quantizer | None

    @kv.func
    def run(
        self, source: Any, destination: Any, source_table: Any, destination_table: Any, lengths: Any, blocks: Any
    ) -> None:
        """This thread's share; ``blocks`` of the grid have one sequence."""
        work, heads = self.work, self.destination.shape[0]
        per_head = self.destination.shape[1] // self.width if self.quantizer is None else self.quantizer.threads
        exact = self.source.dtype is self.destination.dtype and not self.source.scaled
        slot, first = work.place()
        b = kv.block_id.x // blocks
        start = slot - kv.block_id.x * work.tokens + kv.block_id.x % blocks * work.tokens
        if first < work.pieces:
            for t in range(start, self.source.length(source, source_table, lengths, b), blocks * work.tokens):
                origin, readable = self.source.page(source, source_table, b, t)
                target, writable = self.destination.page(destination, destination_table, b, t)
                if readable & writable:
                    for piece in range(first, work.pieces, work.step):
                        h, part, active = head_and_lane(piece, heads, per_head)
                        head = self.source.at(source, origin, b, t, h)
                        if self.quantizer is not None:
                            held = self.quantizer.read(head.read, part)
                            self.quantizer.write(destination, b, h, t, part, active, held, head.read)
                        else:
                            d = part * self.width
                            x = head.stored(d, self.width) if exact else head.read(d, self.width)
                            self.destination.at(destination, target, b, t, h).put(
                                d, converted(x, self.destination.dtype)
                            )


def convert_kernel(conversion: Conversion) -> Any:
    @kv.kernel
    def convert(source, destination, blocks: kv.i32):
        conversion.run(source, destination, None, None, None, blocks)

    return convert


def pools_kernel(conversion: Conversion) -> Any:
    @kv.kernel
    def convert_pools(source, destination, source_table, destination_table, lengths, blocks: kv.i32):
        conversion.run(source, destination, source_table, destination_table, lengths, blocks)

    return convert_pools


def side_of(at: Expansion, value: ir.Value) -> Side:
    """What an operand is: a cache, or pages."""
    if not isinstance(value.type, ir.MemRefType):
        return CacheSide(at.spec(value))
    page_size, heads, size = (at.static_dim(value, i) for i in (1, 2, 3))
    return PoolSide(Rows(1, row_alignment(at.op)), page_size, (heads, size), at.dtype(value))


@expands("kv.convert")
def convert(op: Any, at: Expansion) -> None:
    source, destination = side_of(at, op.source), side_of(at, op.destination)
    scaled = [s.spec for s in (source, destination) if isinstance(s, CacheSide) and s.scaled]
    heads, size = destination.shape
    width = vector_width(size, *(s.granularity for s in scaled), types=(source.dtype, destination.dtype))
    quantizer = Quantizer.of(destination.spec, width, at) if destination.scaled else None  # type: ignore[union-attr]
    pieces = heads * (size // width) if quantizer is None else whole_warps(at, heads * quantizer.threads)
    work = Work.of(at, pieces)
    conversion = Conversion(source, destination, work, width, quantizer)
    if isinstance(source, CacheSide):
        longest, batch = at.field(op.source, "max_cache_length"), at.field(op.source, "batch")
    else:  # the lengths are on the device: as many as the table has room for
        longest, batch = at.dim(op.source_table, 1) * source.page_size, at.dim(op.source_table, 0)
    blocks: Ix = (longest + (TOKENS - 1)) // TOKENS
    tables = [t for t in (op.source_table, op.destination_table) if t is not None]
    if tables:  # a side that is a cache looks at none
        args = [op.source, op.destination, op.source_table or tables[0], op.destination_table or tables[0],
                op.lengths or tables[0], blocks]  # fmt: skip
        kernel = pools_kernel(conversion)
    else:
        args, kernel = [op.source, op.destination, blocks], convert_kernel(conversion)
    at.launch(kernel, args, (batch * blocks, 1, 1), (work.threads, 1, 1))
