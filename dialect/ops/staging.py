# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Asynchrony of tile kernels: circular buffers of tiles in shared memory, products in flight, warp roles.

Passes make these from ``kv.tile_load`` and ``kv.dot``; kernels may use them too. A *stages* value is a circular buffer:
``stages`` tiles, each with a ``full`` and an ``empty`` mbarrier named after the buffer. Use ``n`` (0, 1, 2, ...) is in
stage n % stages: the producer acquires the stage and copies, ``full`` signals the consumers, and the consumers release
the stage through ``empty``.
"""

from collections.abc import Sequence
from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..effects import CACHE, MEMORY, READ, WRITE, AllocatesShared, Effect, EffectModel, Pure, WritesMemory
from ..ext import I1, I32, Operand, Result, infer_result
from .common import i64_attr
from .tile import (
    IN_SHARED,
    SHARED,
    SHARED_TRANSPOSED,
    layout_of,
    row_format,
    same_type,
    tile_of,
    verify_columns,
    verify_dot,
    verify_rows,
)

PARTS, FIRST_PART = "parts", "first_part"  # attributes of a buffer, and of a wait for one of its tiles
COPIES = ("tma", "cp_async", "staged", "transposed", "convert")
LANES = 32  # per warp
WARPGROUP_WARPS = 4
PRODUCER_WARPS = tuple(f"producer_warp_{i}" for i in range(4))
PRODUCER_REST = {f"producer_warps_from_{i}": i for i in (1, 2, 3)}  # the first warp of each role
PRODUCER_GROUPS = tuple(f"producer_group_{i}" for i in range(2))
ROLES = ("producer", *PRODUCER_WARPS, *PRODUCER_REST, *PRODUCER_GROUPS, "consumer")


class Synchronizes(EffectModel):
    """Waits for or signals other threads: no op moves across it."""

    effects = (Effect(READ, MEMORY), Effect(WRITE, MEMORY))


class _Copies(EffectModel):
    """Copies from a cache to shared memory."""

    effects = (Effect(READ, CACHE), Effect(WRITE, MEMORY))


class _CopiesRows(EffectModel):
    """Copies from a buffer to shared memory."""

    effects = (Effect(READ, MEMORY), Effect(WRITE, MEMORY))


class StagesType(Kv.Type, name="stages"):
    """A circular buffer of tiles in shared memory, with its barriers."""


class MakeStagesOp(Kv.Operation, name="make_stages", traits=[AllocatesShared]):
    """Allocate a circular buffer and initialise its mbarriers, at the kernel's start.

    Attributes: name, also of the barriers; stages; tile, the type of one tile; copy, how it is filled: ``tma`` (one
    warp copies, and the barrier counts bytes); or by all producer threads, with a barrier that counts arrivals:
    ``cp_async``, ``convert`` (through registers), ``staged`` (8-bit elements are first copied by TMA or cp.async to
    staging memory, from which threads convert them), ``transposed`` (the same, for a tile whose columns are rows in the
    staging memory, with tokens in the order in which products take 8-bit weights).

    An attribute ``parts`` (i64), of boxes by ``tma``: the columns are copied in that many parts of whole swizzle atoms
    of 128 bytes, with one ``full`` barrier each.
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
        tile = self.tile.value if isinstance(self.tile, ir.TypeAttr) else None
        if not isinstance(tile, ir.RankedTensorType) or tile.rank != 2 or layout_of(tile) not in IN_SHARED:
            return verify.fail(
                self, f'tile must be the type of a tile of rank 2 with the layout "{SHARED}", got {self.tile}'
            )
        if not verify.one_of(self, "copy", COPIES):
            return False
        if (layout_of(tile) == SHARED_TRANSPOSED) == (self.copy.value == "transposed"):
            return True
        return verify.fail(self, f'copy "transposed" needs the layout "{SHARED_TRANSPOSED}", got {self.tile}')


def _tile_in(op: Any) -> ir.RankedTensorType | None:
    """The type of the tiles in the op's circular buffer; None after an error."""
    made = op.buffer.owner
    if isinstance(made, ir.Block) or made.name != "kv.make_stages":
        verify.fail(op, "must name a buffer by the kv.make_stages that makes it: passes look at it there")
        return None
    return ir.RankedTensorType(made.opview.tile.value)


def _in_shared(op: Any, value: ir.Value, what: str) -> bool:
    """Whether a value is a tile in shared memory."""
    type_ = tile_of(value)
    if type_ is None or type_.rank != 2 or layout_of(type_) not in IN_SHARED:
        return verify.fail(op, f'{what} must be a tile of rank 2 with the layout "{SHARED}", got {value.type}')
    return True


def _only_waited_for(op: Any, value: ir.Value, what: str) -> bool:
    """Whether one ``kv.dot_wait`` is the only use of a product in flight."""
    names = [use.owner.operation.name for use in value.uses]
    if names == ["kv.dot_wait"]:
        return True
    got = ", ".join(names) or "nothing"
    return verify.fail(op, f"{what} is in flight: only one kv.dot_wait may name it, got {got}")


class ProducerAcquireOp(Kv.Operation, name="producer_acquire", traits=[Synchronizes]):
    """Wait on ``empty`` until the consumers have released the tile of use ``n - stages``."""

    buffer: Operand[StagesType]
    n: Operand[I32]


class CopyStartOp(Kv.Operation, name="copy_start", traits=[_Copies]):
    """Start the copy of ``kv.tile_load``'s tile to the stage of use ``n``; the barrier ``full`` signals its completion.

    Operands and attributes are as in ``kv.tile_load``. Rows past ``count`` are undefined, except in a tile with
    ``begin`` (``transposed`` copies only), whose rows before ``begin`` and from ``count`` up are zeros. A buffer that
    is filled by ``tma`` needs the descriptor. Optional pages are those of ``kv.tile_pages`` with the descriptor's box
    as step or, for ``cp_async``, of ``kv.tile_row_pages``; without them the copy looks the pages up. A ``staged`` or
    ``transposed`` buffer has descriptor and pages, or neither: threads then copy its rows.

    With the attribute ``tile_column`` (i64) it fills the tile's columns from there up, after the ``kv.copy_rows_start``
    that fills the columns before; ``full`` then signals both copies.
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
    begin: Operand[I32] | None = None
    lists: Operand[Any] | None = None
    first_column: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        spec, tile = verify.handle(self, self.cache), _tile_in(self)
        if spec is None or tile is None:
            return False
        copy = verify.string(self.buffer.owner.opview.copy)
        if not verify_columns(self, spec, tile, copy == "staged"):
            return False
        if (self.lists is not None or not row_format(self, spec).plain) and copy not in ("cp_async", "convert"):
            return verify.fail(self, f"lists and row formats need copies by cp_async or convert, got {copy}")
        if copy not in ("transposed", "staged") and (copy == "tma") != (self.descriptor is not None):
            return verify.fail(
                self, f"needs a descriptor for a buffer that is filled by tma, and for no other, got {copy}"
            )
        if (copy == "transposed") != (self.begin is not None):
            return verify.fail(
                self, f"needs begin for a buffer that is filled by transposed, and for no other, got {copy}"
            )
        staged = copy in ("staged", "transposed")
        if staged and (self.pages is None) != (self.descriptor is None):
            return verify.fail(self, f"needs a descriptor and pages, or neither, for a buffer that is filled by {copy}")
        if self.pages is None or staged or copy in ("tma", "cp_async"):
            return True
        return verify.fail(self, f"takes pages only for a buffer that is filled by tma or cp_async, got {copy}")


class CopyRowsStartOp(Kv.Operation, name="copy_rows_start", traits=[_CopiesRows]):
    """Start the copy of ``kv.tile_load_rows``'s tile to the stage of use ``n``; the barrier signals its completion.

    Operands: the circular buffer, filled by ``cp_async``, and the use; the rest as in ``kv.tile_load_rows``. With the
    attribute ``columns`` (i64) it fills the first ``columns`` columns of the tile, and a ``kv.copy_start`` the others,
    possibly by ``convert``. With the unit attribute ``async_arrive`` threads do not wait for their copies: the copies
    themselves arrive on the barrier.
    """

    buffer: Operand[StagesType]
    n: Operand[I32]
    source: Operand[Any]
    mask: Operand[Any]
    indices: Sequence[Operand[Any]]

    def verify_invariants(self) -> bool:
        tile = _tile_in(self)
        if tile is None:
            return False
        copy = verify.string(self.buffer.owner.opview.copy)
        if copy != "cp_async" and not (copy == "convert" and "columns" in self.operation.attributes):
            return verify.fail(self, f"needs a buffer that is filled by cp_async, got {copy}")
        return verify_rows(self, self.source, tile)


class CopyFinishOp(Kv.Operation, name="copy_finish", traits=[Synchronizes]):
    """Wait for this thread's copies of use ``n`` and arrive on ``full``, while ``pending`` later copies continue.

    For buffers that are filled by ``cp_async``, ``staged`` or ``transposed``. Without a ``kv.copy_finish`` for a
    buffer, ``kv.copy_start`` finishes its own copies.
    """

    buffer: Operand[StagesType]
    n: Operand[I32]
    pending: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        if _tile_in(self) is None:
            return False
        pending = verify.integer(self.pending)
        if pending is None or not 0 <= pending <= 7:
            return verify.fail(self, f"pending must be an integer from 0 to 7, got {self.pending}")
        copy = verify.string(self.buffer.owner.opview.copy)
        return copy in ("cp_async", "staged", "transposed") or verify.fail(
            self, f"finishes copies by cp_async, staged or transposed, got a buffer that is filled by {copy}"
        )


class CopyCommitOp(Kv.Operation, name="copy_commit", traits=[Synchronizes]):
    """Close a cp.async group of this thread: the copies that it has started since the previous group, possibly none.

    For kernels with products by mma.sync, whose buffers have no mbarriers.
    """


class CopyWaitOp(Kv.Operation, name="copy_wait", traits=[Synchronizes]):
    """Wait for all of this thread's cp.async groups except the last ``pending``, then synchronise the block.

    Afterwards every thread sees all of the block's copies, and no thread still reads what these overwrite.
    """

    pending: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        pending = verify.integer(self.pending)
        if pending is None or not 0 <= pending <= 7:
            return verify.fail(self, f"pending must be an integer from 0 to 7, got {self.pending}")
        return True


class ConsumerWaitOp(Kv.Operation, name="consumer_wait", traits=[Synchronizes]):
    """Wait on ``full`` for use ``n``; the result is the tile in shared memory, valid until ``kv.consumer_release``."""

    buffer: Operand[StagesType]
    n: Operand[I32]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        tile, got = _tile_in(self), self.operation.results[0].type
        if tile is None:
            return False
        return got == tile or verify.fail(self, f"the result must be a tile of the buffer, {tile}, got {got}")


class ConsumerReleaseOp(Kv.Operation, name="consumer_release", traits=[Synchronizes]):
    """Arrive on ``empty``: these threads have read the tile of use ``n``."""

    buffer: Operand[StagesType]
    n: Operand[I32]


class TileClearOp(Kv.Operation, name="tile_clear", traits=[Synchronizes]):
    """Zero the rows of a tile in shared memory outside of [begin, end), which may exceed the tile."""

    source: Operand[Any]
    begin: Operand[I32]
    end: Operand[I32]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        return _in_shared(self, self.source, "the operand") and same_type(self, self.source)


class TilePagesOp(Kv.Operation, name="tile_pages", traits=[Pure]):
    """The pages of a tile of ``rows`` tokens from ``first`` up: lane i has the page of token first + i * step.

    Lanes without a token below ``count`` have a page id outside of every pool. Operands as in ``kv.tile_load``.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    first: Operand[I32]
    count: Operand[I32]
    rows: ir.IntegerAttr
    step: ir.IntegerAttr
    pages: Result[I32] = infer_result()

    def verify_invariants(self) -> bool:
        if verify.handle(self, self.cache) is None:
            return False
        rows, step = verify.integer(self.rows), verify.integer(self.step)
        if rows is None or step is None or step < 1 or not 1 <= rows // step <= LANES or rows % step:
            return verify.fail(
                self,
                f"rows must be from 1 to {LANES} steps, one per lane, got rows = {self.rows} and step = {self.step}",
            )
        return True


class TileRowPagesOp(Kv.Operation, name="tile_row_pages", traits=[Pure]):
    """The pages of the rows that each copying warp copies: lane i has the page of the warp's row i.

    A tile of ``rows`` tokens from ``first`` up is cut into one run per copying warp, of at most 32 rows. Lanes past the
    run have the page of some token below ``count``. Operands as in ``kv.tile_load``; with ``lists`` a lane has the list
    entry of its row's token instead, or -1 without one.
    """

    cache: Operand[Any]
    batch: Operand[I32]
    first: Operand[I32]
    count: Operand[I32]
    lists: Operand[Any] | None = None
    rows: ir.IntegerAttr
    pages: Result[I32] = infer_result()

    def verify_invariants(self) -> bool:
        if verify.handle(self, self.cache) is None:
            return False
        rows = verify.integer(self.rows)
        most = WARPGROUP_WARPS * LANES
        if rows is None or not 1 <= rows <= most:
            return verify.fail(self, f"rows must be from 1 to {most}, one per lane of a warpgroup, got {self.rows}")
        return True


class TileStoreSharedOp(Kv.Operation, name="tile_store_shared", traits=[Synchronizes]):
    """Write this warp's rows of a tile from registers to shared memory, in the layout of tiles in shared memory."""

    source: Operand[Any]
    place: Operand[Any]

    def verify_invariants(self) -> bool:
        type_ = tile_of(self.source)
        if type_ is None or type_.rank != 2 or layout_of(type_) in IN_SHARED:
            return verify.fail(self, f"the operand must be a tile of rank 2 in registers, got {self.source.type}")
        got = self.place.type
        return str(got) == "!llvm.ptr<3>" or verify.fail(self, f"place must be !llvm.ptr<3>, got {got}")


class TileStageOp(Kv.Operation, name="tile_stage", traits=[Synchronizes]):
    """Copy some columns of a tile from registers to shared memory; each warp then reads back the rows that it wrote.

    Operand: a tile of 16-bit elements. Attributes: first_column and columns, multiples of 16. Result: a pointer to the
    copy, in the layout of tiles in shared memory; valid until as many columns are copied again.
    """

    source: Operand[Any]
    first_column: ir.IntegerAttr
    columns: ir.IntegerAttr
    place: Result[Any]

    def verify_invariants(self) -> bool:
        type_ = tile_of(self.source)
        if type_ is None or type_.rank != 2 or str(type_.element_type) not in ("bf16", "f16"):
            return verify.fail(self, f"the operand must be a tile of rank 2 of bf16 or f16, got {self.source.type}")
        first, columns = verify.integer(self.first_column), verify.integer(self.columns)
        if first is None or columns is None or first < 0 or columns < 16 or first % 16 or columns % 16:
            got = f"{self.first_column} and {self.columns}"
            return verify.fail(self, f"first_column and columns must be multiples of 16, got {got}")
        if first + columns > type_.shape[1]:
            return verify.fail(self, f"columns must be in the tile's {type_.shape[1]}, got {columns} from {first} on")
        got = self.operation.results[0].type
        return str(got) == "!llvm.ptr<3>" or verify.fail(self, f"the result must be !llvm.ptr<3>, got {got}")


class TileStoreDirectOp(Kv.Operation, name="tile_store_direct", traits=[WritesMemory]):
    """Write a thread's elements of a tile to rows of a buffer, with vector stores of neighbouring elements.

    Operands: source, a tile in registers; buffer; masks, one per row of the thread, enable writes; indices, row by row.
    """

    source: Operand[Any]
    buffer: Operand[Any]
    masks: Sequence[Operand[I1]]
    indices: Sequence[Operand[I32]]

    def verify_invariants(self) -> bool:
        type_ = tile_of(self.source)
        if type_ is None or type_.rank != 2 or layout_of(type_) in IN_SHARED:
            return verify.fail(self, f"the operand must be a tile of rank 2 in registers, got {self.source.type}")
        rows, indices = len(list(self.masks)), len(list(self.indices))
        rank = indices // rows + 1 if rows and indices % rows == 0 else 0
        return verify.memref(self, self.buffer, rank, (str(type_.element_type),), "the buffer")


class DotStartOp(Kv.Operation, name="dot_start", traits=[Synchronizes]):
    """Start ``kv.dot``: the result is in flight, and its only use is a ``kv.dot_wait``."""

    a: Operand[Any]
    b: Operand[Any]
    c: Operand[Any] | None = None
    transpose_b: ir.BoolAttr
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        result = self.operation.results[0]
        return verify_dot(self, self.a, self.b, self.c) and _only_waited_for(self, result, "the result")


class DotWaitOp(Kv.Operation, name="dot_wait", traits=[Synchronizes]):
    """Wait until at most ``pending`` products are in flight. Its operands are all products in flight, in start order.

    The results are the operands; the last ``pending`` results are still in flight.
    """

    # Two fields instead of a variadic one, whose values would all have one type on MLIR 22.1.
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
        if given != got:
            return verify.fail(self, f"the results must have the operands' types, got {got} for {given}")
        results = list(self.operation.results)
        return all(_only_waited_for(self, r, "the newer result") for r in results[len(results) - pending :])


class TileReadyOp(Kv.Operation, name="tile_ready", traits=[Synchronizes]):
    """A tile that must be computed at this point, not at its first use: work that fills a wait."""

    source: Operand[Any]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        type_ = tile_of(self.source)
        held = ("f32", "bf16", "f16", "f8E4M3FN")
        if type_ is None or layout_of(type_) in IN_SHARED or str(type_.element_type) not in held:
            return verify.fail(
                self, f"the operand must be a tile of f32, bf16, f16 or f8E4M3FN in registers, got {self.source.type}"
            )
        return same_type(self, self.source)


class QueueType(Kv.Type, name="queue"):
    """Work items that a block takes from a counter in device memory and hands to the roles that read them."""


class TakeWorkItemOp(Kv.Operation, name="take_work_item", traits=[Pure]):
    """The work item of an iteration of a loop from the block's number up to ``count``, by the number of blocks.

    Any block may process any work item: every number below ``count`` occurs in one iteration of one block. The result
    is the loop's own number, unless a pass makes blocks take numbers from the counter, four bytes at the start of a
    zero-initialised buffer. ``late``: blocks may start when others have processed several work items, so that they
    take their first one from the counter, too.
    """

    counter: Operand[Any]
    iteration: Operand[I32]
    count: Operand[I32]
    number: Result[I32] = infer_result()

    def verify_invariants(self) -> bool:
        return verify.memref(self, self.counter, 1, ("i8",), "the counter")


class MakeQueueOp(Kv.Operation, name="make_queue", traits=[AllocatesShared]):
    """Allocate a queue of work items in shared memory for ``readers`` warps, and initialise its mbarriers."""

    counter: Operand[Any]
    readers: ir.IntegerAttr
    result_: Result[QueueType]

    def verify_invariants(self) -> bool:
        readers = verify.integer(self.readers)
        if readers is None or not 1 <= readers <= 32:
            return verify.fail(self, f"readers must be from 1 to 32 warps, got {self.readers}")
        return verify.memref(self, self.counter, 1, ("i8",), "the counter")


class QueueFetchOp(Kv.Operation, name="queue_fetch", traits=[Synchronizes]):
    """The block's first thread takes the work item of use ``n`` from the counter; ``count`` or more: none is left.

    Every block fetches until it gets such a number; the last of these fetches in the grid resets the counter.
    """

    queue: Operand[QueueType]
    n: Operand[I32]
    count: Operand[I32]


class QueueNextOp(Kv.Operation, name="queue_next", traits=[Synchronizes]):
    """The work item of use ``n``, for the warps of a reader; each reader reads each use once."""

    queue: Operand[QueueType]
    n: Operand[I32]
    number: Result[I32] = infer_result()


class IsRoleOp(Kv.Operation, name="is_role", traits=[Pure]):
    """Whether this thread has a role, which all threads of a warp share.

    Roles: ``producer``, the block's first warpgroups, as many as the schedule says; ``consumer``, the other warpgroups;
    and parts of the producer: ``producer_warp_0`` to ``producer_warp_3``, one warp of the first warpgroup;
    ``producer_warps_from_1`` and so on, all of the producer's warps from that one up; ``producer_group_0`` and
    ``producer_group_1``, one warpgroup.
    """

    role: ir.StringAttr
    is_it: Result[I1] = infer_result()

    def verify_invariants(self) -> bool:
        return verify.one_of(self, "role", ROLES)


class SetRegistersOp(Kv.Operation, name="set_registers", traits=[Synchronizes]):
    """Set the registers of this warpgroup's threads to ``count`` each (``setmaxnreg``)."""

    count: ir.IntegerAttr
    action: ir.StringAttr

    def verify_invariants(self) -> bool:
        count = verify.integer(self.count)
        if count is None or not 24 <= count <= 256 or count % 8:
            return verify.fail(self, f"count must be a multiple of 8 from 24 to 256, got {self.count}")
        return verify.one_of(self, "action", ("increase", "decrease"))


class TurnWaitOp(Kv.Operation, name="turn_wait", traits=[Synchronizes]):
    """Ping-pong: wait for this consumer warpgroup's turn to start products, which the previous warpgroup passes on.

    Attribute ``groups``: ``all`` in a loop; ``first`` after it, where the first warpgroup takes the last turn.
    """

    groups: ir.StringAttr

    def verify_invariants(self) -> bool:
        return verify.one_of(self, "groups", ("all", "first"))


class TurnPassOp(Kv.Operation, name="turn_pass", traits=[Synchronizes]):
    """Ping-pong: pass the turn to the next consumer warpgroup.

    Attribute ``groups``: ``all`` in a loop; ``last`` before it, where the last warpgroup starts the first.
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
        ir.StringAttr.get(name), i64_attr(stages), ir.TypeAttr.get(tile), ir.StringAttr.get(copy), stages_type()
    ).operation.results[0]


def take_work_item(counter: ir.Value, iteration: ir.Value, count: ir.Value, late: bool = False) -> ir.Value:
    """The work item of an iteration."""
    op = TakeWorkItemOp(counter, iteration, count).operation
    if late:
        op.attributes["late"] = ir.UnitAttr.get()
    return op.results[0]


def make_queue(counter: ir.Value, readers: int) -> ir.Value:
    """A queue of work items from a counter."""
    return MakeQueueOp(counter, i64_attr(readers), ir.Type.parse("!kv.queue")).operation.results[0]


def dot_wait(products: Sequence[ir.Value], pending: int = 0) -> list[ir.Value]:
    """The one or two products, of which all but the last ``pending`` are complete."""
    older, *newer = products
    made = DotWaitOp(
        older,
        i64_attr(pending),
        older.type,
        newer=newer[0] if newer else None,
        newer_result=newer[0].type if newer else None,
    )
    return list(made.operation.results)


def tile_stage(source: ir.Value, first_column: int, columns: int) -> ir.Value:
    """A pointer to a shared-memory copy of some columns of a tile."""
    place = ir.Type.parse("!llvm.ptr<3>")
    return TileStageOp(source, i64_attr(first_column), i64_attr(columns), place).operation.results[0]
