# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Asynchrony of tile kernels: circular buffers of tiles in shared memory, products in flight, roles of warps.

What passes make of ``kv.tile_load`` and ``kv.dot``; kernels may be written with them too. A *stages* value is a
circular buffer: ``stages`` tiles, and for each a ``full`` and an ``empty`` barrier with the buffer's name. Use ``n``
(0, 1, 2, ...) has stage n % stages; producers acquire it, copy, and the barrier ``full`` tells consumers, who release
it.
"""

from collections.abc import Sequence
from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..effects import CACHE, MEMORY, READ, WRITE, AllocatesShared, Effect, EffectModel, Pure
from ..ext import I1, I32, Operand, Result, infer_result
from .common import i64_attr
from .tile import verify_dot

COPIES = ("tma", "cp_async", "convert")
PRODUCER_WARPS = tuple(f"producer_warp_{i}" for i in range(4))
ROLES = ("producer", *PRODUCER_WARPS, "consumer")


class _Synchronizes(EffectModel):
    """Waits for or signals other threads: nothing moves across it."""

    effects = (Effect(READ, MEMORY), Effect(WRITE, MEMORY))


class _Copies(EffectModel):
    """Reads a cache into shared memory."""

    effects = (Effect(READ, CACHE), Effect(WRITE, MEMORY))


class StagesType(Kv.Type, name="stages"):
    """A circular buffer of tiles in shared memory, with its barriers."""


class MakeStagesOp(Kv.Operation, name="make_stages", traits=[AllocatesShared]):
    """Allocate a circular buffer and initialise its barriers, at the kernel's start.

    Attributes: name, of the barriers too; stages; tile, the type of one tile; copy, how it is filled: ``tma`` (one
    warp, counted in bytes), ``cp_async`` or ``convert`` (all producer threads, counted in arrivals).
    """

    buffer_name: ir.StringAttr
    stages: ir.IntegerAttr
    tile: ir.TypeAttr
    copy: ir.StringAttr
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        stages = verify.integer(self.stages)
        if stages is None or not 1 <= stages <= 16:
            return verify.fail(self, f"stages must be an integer from 1 to 16, got {self.stages}")
        if not isinstance(self.tile.value, ir.RankedTensorType):
            return verify.fail(self, f"tile must be the type of a tile, got {self.tile}")
        return verify.one_of(self, "copy", COPIES)


class ProducerAcquireOp(Kv.Operation, name="producer_acquire", traits=[_Synchronizes]):
    """Wait until the consumers have released the tile of use ``n - stages``."""

    buffer: Operand[StagesType]
    n: Operand[I32]


class CopyStartOp(Kv.Operation, name="copy_start", traits=[_Copies]):
    """Start the copy of ``kv.tile_load``'s tile to the stage of use ``n``; its barrier ``full`` tells when it is there.

    Operands and attributes as ``kv.tile_load``; rows past ``count`` hold anything. A buffer that is filled by ``tma``
    needs the descriptor; pages, of ``kv.tile_pages`` with the descriptor's box as step, are looked up by the copy
    without.
    """

    buffer: Operand[StagesType]
    n: Operand[I32]
    cache: Operand[Any]
    batch: Operand[I32]
    head: Operand[I32]
    first: Operand[I32]
    count: Operand[I32]
    descriptor: Operand[Any] | None = None
    pages: Operand[I32] | None = None
    first_column: ir.IntegerAttr


class ConsumerWaitOp(Kv.Operation, name="consumer_wait", traits=[_Synchronizes]):
    """Wait for the tile of use ``n``: a tile in shared memory, to be read until ``kv.consumer_release``."""

    buffer: Operand[StagesType]
    n: Operand[I32]
    tile: Result[Any]


class ConsumerReleaseOp(Kv.Operation, name="consumer_release", traits=[_Synchronizes]):
    """These threads have read the tile of use ``n``."""

    buffer: Operand[StagesType]
    n: Operand[I32]


class TileClearOp(Kv.Operation, name="tile_clear", traits=[_Synchronizes]):
    """Zeros in the rows of a tile in shared memory outside of [begin, end), which may exceed the tile; the tile."""

    source: Operand[Any]
    begin: Operand[I32]
    end: Operand[I32]
    tile: Result[Any]


class TilePagesOp(Kv.Operation, name="tile_pages", traits=[Pure]):
    """The pages of a tile of ``rows`` tokens from ``first`` on: lane i of a warp has that of tokens first + i * step.

    Lanes with no token below ``count`` have a page outside of every pool. Operands as of ``kv.tile_load``.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    first: Operand[I32]
    count: Operand[I32]
    rows: ir.IntegerAttr
    step: ir.IntegerAttr
    pages: Result[I32] = infer_result()


class TileStoreSharedOp(Kv.Operation, name="tile_store_shared", traits=[_Synchronizes]):
    """Write this warp's rows of a tile in registers to shared memory, laid out as tiles in shared memory are."""

    source: Operand[Any]
    place: Operand[Any]


class DotStartOp(Kv.Operation, name="dot_start", traits=[_Synchronizes]):
    """Start ``kv.dot``: the result is in flight, and only ``kv.dot_wait`` may name it."""

    a: Operand[Any]
    b: Operand[Any]
    c: Operand[Any] | None = None
    transpose_b: ir.BoolAttr
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        return verify_dot(self, self.a, self.b, self.c)


class DotWaitOp(Kv.Operation, name="dot_wait", traits=[_Synchronizes]):
    """Wait until at most ``pending`` products are in flight; owns all that are, in the order in which they started.

    The results are the operands: those of the last ``pending`` are still in flight.
    """

    # Two fields, not one of many: IRDL on MLIR 22.1 gives the values of one field one type.
    older: Operand[Any]
    newer: Operand[Any] | None = None
    pending: ir.IntegerAttr
    older_result: Result[Any]
    newer_result: Result[Any] | None = None

    def verify_invariants(self) -> bool:
        pending = verify.integer(self.pending)
        if pending is None or not 0 <= pending < max(len(self.operation.operands), 1):
            return verify.fail(
                self,
                f"pending must be from 0 to {len(self.operation.operands) - 1} (one less than the products), "
                f"got {self.pending}",
            )
        given = [str(v.type) for v in self.operation.operands]
        got = [str(v.type) for v in self.operation.results]
        return given == got or verify.fail(self, f"the results must have the operands' types, got {got} for {given}")


class TileReadyOp(Kv.Operation, name="tile_ready", traits=[_Synchronizes]):
    """A tile that has been computed when this is passed, not where it is first used: work that fills a wait."""

    source: Operand[Any]
    tile: Result[Any]


class IsRoleOp(Kv.Operation, name="is_role", traits=[Pure]):
    """Whether this thread has a role: ``producer`` (the first warpgroup of the block), ``producer_warp_0`` to
    ``producer_warp_3`` (one of its warps), or ``consumer`` (the other warpgroups). The same for all threads of a warp.
    """

    role: ir.StringAttr
    is_it: Result[I1] = infer_result()

    def verify_invariants(self) -> bool:
        return verify.one_of(self, "role", ROLES)


class SetRegistersOp(Kv.Operation, name="set_registers", traits=[_Synchronizes]):
    """Give this warpgroup's threads ``count`` registers each (``setmaxnreg``), more or fewer than it had."""

    count: ir.IntegerAttr
    action: ir.StringAttr

    def verify_invariants(self) -> bool:
        count = verify.integer(self.count)
        if count is None or not 24 <= count <= 256 or count % 8:
            return verify.fail(self, f"count must be a multiple of 8 from 24 to 256, got {self.count}")
        return verify.one_of(self, "action", ("increase", "decrease"))


class TurnWaitOp(Kv.Operation, name="turn_wait", traits=[_Synchronizes]):
    """Wait for this consumer warpgroup's turn to start products (ping-pong); the one before passes it on.

    Attribute ``groups``: ``all`` in a loop; ``first`` behind it, where only the first warpgroup takes the turn that is
    left.
    """

    groups: ir.StringAttr

    def verify_invariants(self) -> bool:
        return verify.one_of(self, "groups", ("all", "first"))


class TurnPassOp(Kv.Operation, name="turn_pass", traits=[_Synchronizes]):
    """Give the turn to the next consumer warpgroup.

    Attribute ``groups``: ``all`` in a loop; ``last`` before it, where the last warpgroup gives the first its first
    turn.
    """

    groups: ir.StringAttr

    def verify_invariants(self) -> bool:
        return verify.one_of(self, "groups", ("all", "last"))


# --- wrappers --------------------------------------------------------------------------------------


def stages_type() -> ir.Type:
    """``!kv.stages`` in the current context."""
    return ir.Type.parse("!kv.stages")


def make_stages(name: str, stages: int, tile: ir.Type, copy: str) -> ir.Value:
    """A circular buffer of ``stages`` tiles."""
    return MakeStagesOp(
        ir.StringAttr.get(name), i64_attr(stages), ir.TypeAttr.get(tile), ir.StringAttr.get(copy),
        stages_type(),
    ).operation.results[0]  # fmt: skip


def dot_wait(products: Sequence[ir.Value], pending: int = 0) -> list[ir.Value]:
    """The products, one or two, of which all but the last ``pending`` are complete."""
    older, *newer = products
    made = DotWaitOp(
        older, i64_attr(pending), older.type, newer=newer[0] if newer else None,
        newer_result=newer[0].type if newer else None,
    )  # fmt: skip
    return list(made.operation.results)
