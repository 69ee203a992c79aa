# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations on tiles in shared memory that threads address: allocate, copy tokens in through the page table, copy out.

A tile is ``tile_rows`` tokens of one head: row i starts at byte i * pitch, where pitch is at least the row's
head_size * element size bytes. With swizzle 128, the 16-byte chunk c of row i is stored at chunk c ^ (i % 8) (of every
group of eight), which avoids bank conflicts of ``ldmatrix``; a pitch of an odd number of chunks does the same for rows
that are no multiple of 128 bytes. With swizzle 128 and a pitch of 128, wider rows are cut into panels of 128 bytes, one
panel after the other at tile_rows * 128 bytes, as ``wgmma`` reads them.
"""

from collections.abc import Sequence
from typing import Any

from mlir import ir

from .. import types, verify
from ..base import Kv
from ..effects import ELEMENTS, MEMORY, READ, WRITE, AllocatesShared, Effect, EffectModel
from ..ext import I32, Operand, Result
from .common import as_i32, i64_attr

_MOST_BYTES = 1 << 18  # of a tile; more than any GPU's shared memory
_MOST_COPIES = 256  # of a thread, for one tile


class _LoadsTile(EffectModel):
    """Reads a cache, writes shared memory."""

    effects = (Effect(READ, ELEMENTS), Effect(WRITE, MEMORY))


class _StoresTile(EffectModel):
    """Reads shared memory, writes a cache."""

    effects = (Effect(READ, MEMORY), Effect(WRITE, ELEMENTS))


MOST_BYTES = 1 << 20  # of one allocation: more than the shared memory of any GPU


class AllocSharedOp(Kv.Operation, name="alloc_shared", traits=[AllocatesShared]):
    """A block of shared memory that lives as long as the thread block.

    Attributes: bytes, alignment (a power of two).
    """

    bytes: ir.IntegerAttr
    alignment: ir.IntegerAttr
    pointer: Result[Any]

    def verify_invariants(self) -> bool:
        size, alignment = verify.integer(self.bytes), verify.integer(self.alignment)
        if size is None or not 1 <= size <= MOST_BYTES:
            return verify.fail(self, f"bytes must be an integer in [1, {MOST_BYTES}], got {self.bytes}")
        if alignment is None or not 1 <= alignment <= MOST_BYTES or alignment & (alignment - 1):
            return verify.fail(self, f"alignment must be a power of two up to {MOST_BYTES}, got {self.alignment}")
        got = self.operation.results[0].type
        return str(got) == "!llvm.ptr<3>" or verify.fail(self, f"result must be !llvm.ptr<3>, got {got}")


class LoadTileOp(Kv.Operation, name="load_tile", traits=[_LoadsTile]):
    """Copy the tokens [base, base + tile_rows) of a head to shared memory; each thread copies its share.

    Operands: cache, batch, head, base token; valid, the number of tokens that exist (the rest of the tile is
    zero-filled); destination in shared memory, aligned to 16 bytes; thread in [0, num_threads). Attributes: tile_rows;
    num_threads; pitch, bytes from row to row; swizzle, 0 or 128; mode, ``async`` (cp.async: the caller commits and
    waits) or ``sync``. The storage row must be a multiple of 16 bytes. Precondition: base is a multiple of the smaller
    of tile_rows and the page size. Each page of the tile is looked up once.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    head: Operand[I32]
    base: Operand[I32]
    valid: Operand[I32]
    destination: Operand[Any]
    thread: Operand[I32]
    tile_rows: ir.IntegerAttr
    num_threads: ir.IntegerAttr
    pitch: ir.IntegerAttr
    swizzle: ir.IntegerAttr
    mode: ir.StringAttr

    def verify_invariants(self) -> bool:
        return _tile_problems(self, 5, ("async", "sync"), verify.CACHE_LIKE)


class StoreTileOp(Kv.Operation, name="store_tile", traits=[_StoresTile]):
    """Copy a tile from shared memory to the tokens [base, base + valid) of a head; the inverse of kv.load_tile.

    Out-of-range pages are not written. mode must be ``sync``.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    head: Operand[I32]
    base: Operand[I32]
    valid: Operand[I32]
    source: Operand[Any]
    thread: Operand[I32]
    tile_rows: ir.IntegerAttr
    num_threads: ir.IntegerAttr
    pitch: ir.IntegerAttr
    swizzle: ir.IntegerAttr
    mode: ir.StringAttr

    def verify_invariants(self) -> bool:
        return _tile_problems(self, 5, ("sync",), ("cache",))


def _tile_problems(op: Any, pointer: int, modes: tuple[str, ...], kinds: tuple[str, ...]) -> bool:
    spec = verify.handle(op, op.operation.operands[0], kinds)
    if spec is None:
        return False
    row_bytes = spec.head_size * spec.dtype.itemsize
    if row_bytes % 16:
        return verify.fail(op, f"needs rows of a multiple of 16 bytes, got {row_bytes}")
    rows, threads = verify.integer(op.tile_rows), verify.integer(op.num_threads)
    if rows is None or rows < 1 or threads is None or threads < 1:
        return verify.fail(
            op, f"tile_rows and num_threads must be positive integers, got {op.tile_rows} and {op.num_threads}"
        )
    if threads > 1024 or rows * row_bytes > _MOST_BYTES:
        text = f"a tile must have at most {_MOST_BYTES} bytes and 1024 threads"
        return verify.fail(op, f"{text}, got {rows} rows of {row_bytes} bytes and {threads} threads")
    copies = -(-rows * row_bytes // (16 * threads))
    if copies > _MOST_COPIES:
        text = f"a thread must copy at most {_MOST_COPIES} times 16 bytes, as its copies are unrolled"
        return verify.fail(op, f"{text}, got {copies}: {rows} rows of {row_bytes} bytes over {threads} threads")
    if spec.page_size and spec.page_size % rows and rows % spec.page_size:
        return verify.fail(op, f"tile_rows and the page size must divide one another, got {rows} and {spec.page_size}")
    pitch = verify.integer(op.pitch)
    swizzle = verify.integer(op.swizzle)
    panels = pitch == 128 and swizzle == 128
    if pitch is None or (pitch < row_bytes and not panels) or pitch % 16:
        return verify.fail(
            op,
            f"pitch must be a multiple of 16 of at least the row's {row_bytes} bytes, or 128 with swizzle 128, "
            f"got {op.pitch}",
        )
    if swizzle not in (0, 128):
        return verify.fail(op, f"swizzle must be 0 or 128, got {op.swizzle}")
    if swizzle and (row_bytes % 128 or pitch % 128):
        return verify.fail(
            op, f"swizzle 128 needs rows and a pitch of a multiple of 128 bytes, got {row_bytes} and {pitch}"
        )
    where = op.operation.operands[pointer].type
    if str(where) != "!llvm.ptr<3>":
        return verify.fail(op, f"the tile must be in shared memory (!llvm.ptr<3>), got {where}")
    return verify.one_of(op, "mode", modes)


# --- wrappers --------------------------------------------------------------------------------------


def alloc_shared(bytes: int, alignment: int = 16) -> ir.Value:
    """An allocation of ``bytes`` of shared memory."""
    return AllocSharedOp(i64_attr(bytes), i64_attr(alignment), ir.Type.parse("!llvm.ptr<3>")).operation.results[0]


def row_bytes(cache: ir.Value) -> int:
    """Bytes of one head's row of a cache."""
    spec = types.spec_of(cache.type)
    return spec.head_size * spec.dtype.itemsize


def load_tile(
    cache: ir.Value, place: Sequence[Any], destination: ir.Value, thread: Any, *,
    tile_rows: int, num_threads: int, pitch: int | None = None, swizzle: int = 0, mode: str = "async",
) -> None:  # fmt: skip
    """Copy this thread's share of a tile of tokens to shared memory; ``place`` is (batch, head, base, valid)."""
    batch, head, base, valid = map(as_i32, place)
    LoadTileOp(
        cache, batch, head, base, valid, destination, as_i32(thread),
        i64_attr(tile_rows), i64_attr(num_threads), i64_attr(pitch or row_bytes(cache)), i64_attr(swizzle),
        ir.StringAttr.get(mode),
    )  # fmt: skip


def store_tile(
    cache: ir.Value, place: Sequence[Any], source: ir.Value, thread: Any, *,
    tile_rows: int, num_threads: int, pitch: int | None = None, swizzle: int = 0,
) -> None:  # fmt: skip
    """Copy this thread's share of a tile from shared memory to the cache; ``place`` as in :func:`load_tile`."""
    batch, head, base, valid = map(as_i32, place)
    StoreTileOp(
        cache, batch, head, base, valid, source, as_i32(thread),
        i64_attr(tile_rows), i64_attr(num_threads), i64_attr(pitch or row_bytes(cache)), i64_attr(swizzle),
        ir.StringAttr.get("sync"),
    )  # fmt: skip
