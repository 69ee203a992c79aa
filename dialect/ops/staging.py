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
LANES = 32  # of a warp
WARPGROUP_WARPS = 4
PRODUCER_WARPS = tuple(f"producer_warp_{i}" for i in range(4))
PRODUCER_REST = {f"producer_warps_from_{i}": i for i in (1, 2, 3)}  # by role its first warp
PRODUCER_GROUPS = tuple(f"producer_group_{i}" for i in range(2))
ROLES = ("producer", *PRODUCER_WARPS, *PRODUCER_REST, *PRODUCER_GROUPS, "consumer")


class Synchronizes(EffectModel):
    """Waits for or signals other threads: nothing moves across it."""

    effects = (Effect(READ, MEMORY), Effect(WRITE, MEMORY))


class _Copies(EffectModel):
    """Reads a cache into shared memory."""

    effects = (Effect(READ, CACHE), Effect(WRITE, MEMORY))


class _CopiesRows(EffectModel):
    """Reads a buffer into shared memory."""

    effects = (Effect(READ, MEMORY), Effect(WRITE, MEMORY))


class StagesType(Kv.Type, name="stages"):
    """A circular buffer of tiles in shared memory, with its barriers."""


class MakeStagesOp(Kv.Operation, name="make_stages", traits=[AllocatesShared]):
    """Allocate a circular buffer and initialise its barriers, at the kernel's start.

    Attributes: name, of the barriers too; stages; tile, the type of one tile; copy, how it is filled: ``tma`` (one
    warp, counted in bytes), ``cp_async``, ``staged`` (8-bit elements by TMA or cp.async to memory from which threads
    convert them), ``transposed`` (likewise, for a tile whose columns are its rows there, with tokens in the order in
    which products take weights of 8 bits) or ``convert`` (through registers): by all producer threads, counted in
    arrivals.

    With an attribute ``parts`` (i64), of boxes by ``tma``, as many parts of the columns have a barrier ``full`` each,
    whole swizzle atoms of 128 bytes.
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
        return verify.fail(self, f'copy "transposed" goes with the layout "{SHARED_TRANSPOSED}", got {self.tile}')


def _tile_in(op: Any) -> ir.RankedTensorType | None:
    """The type of the tiles in an op's buffer; None after an error."""
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
    """Whether a product in flight is named by one ``kv.dot_wait`` and nothing else."""
    names = [use.owner.operation.name for use in value.uses]
    if names == ["kv.dot_wait"]:
        return True
    got = ", ".join(names) or "nothing"
    return verify.fail(op, f"{what} is in flight: only one kv.dot_wait may name it, got {got}")


class ProducerAcquireOp(Kv.Operation, name="producer_acquire", traits=[Synchronizes]):
    """Wait until the consumers have released the tile of use ``n - stages``."""

    buffer: Operand[StagesType]
    n: Operand[I32]


class CopyStartOp(Kv.Operation, name="copy_start", traits=[_Copies]):
    """Start the copy of ``kv.tile_load``'s tile to the stage of use ``n``; its barrier ``full`` tells when it is there.

    Operands and attributes as ``kv.tile_load``; rows past ``count`` hold anything, but those of a tile with a
    ``begin``, which ``transposed`` copies take, are zeros before it and from ``count`` on. A buffer that is filled by
    ``tma`` needs the descriptor; pages, of ``kv.tile_pages`` with the descriptor's box as step or, by ``cp_async``, of
    ``kv.tile_row_pages``, are looked up by the copy without. One that is ``staged`` or ``transposed`` has both, or
    threads copy its rows.

    With an attribute ``tile_column`` (i64) it fills the columns of a tile from there on, and stands behind the
    ``kv.copy_rows_start`` that fills those before: its barrier tells of both.
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
            return verify.fail(self, f"takes lists and formats of rows by cp_async and convert, got {copy}")
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
        return verify.fail(self, f"takes pages for a buffer that is filled by tma or cp_async, got {copy}")


class CopyRowsStartOp(Kv.Operation, name="copy_rows_start", traits=[_CopiesRows]):
    """Start the copy of ``kv.tile_load_rows``'s tile to the stage of use ``n``; its barrier tells when it is there.

    Operands: the circular buffer, filled by ``cp_async``, and the use; the rest as of ``kv.tile_load_rows``. With an
    attribute ``columns`` (i64) it fills those first ones of the tile, and a ``kv.copy_start`` the others, perhaps by
    ``convert``.
    With a unit attribute ``tells`` threads do not wait for their copies, which tell the barrier themselves.
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
    """Finish the copy of use ``n`` and tell its barrier ``full``, while ``pending`` later copies of this thread go on.

    For buffers that are filled by ``cp_async``, ``staged`` or ``transposed``. Of one that no ``kv.copy_finish`` names,
    ``kv.copy_start`` finishes its own.
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
    """End a group of copies by cp.async of this thread: those that it started since the group before, perhaps none.

    Of kernels whose products are mma.sync's, whose buffers have no barriers.
    """


class CopyWaitOp(Kv.Operation, name="copy_wait", traits=[Synchronizes]):
    """Wait until all groups of copies but every thread's last ``pending`` are there, and for all threads of the block.

    So everybody sees what anybody has copied, and nobody still reads what was copied before.
    """

    pending: ir.IntegerAttr

    def verify_invariants(self) -> bool:
        pending = verify.integer(self.pending)
        if pending is None or not 0 <= pending <= 7:
            return verify.fail(self, f"pending must be an integer from 0 to 7, got {self.pending}")
        return True


class ConsumerWaitOp(Kv.Operation, name="consumer_wait", traits=[Synchronizes]):
    """Wait for the tile of use ``n``: a tile in shared memory, to be read until ``kv.consumer_release``."""

    buffer: Operand[StagesType]
    n: Operand[I32]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        tile, got = _tile_in(self), self.operation.results[0].type
        if tile is None:
            return False
        return got == tile or verify.fail(self, f"the result must be a tile of the buffer, {tile}, got {got}")


class ConsumerReleaseOp(Kv.Operation, name="consumer_release", traits=[Synchronizes]):
    """These threads have read the tile of use ``n``."""

    buffer: Operand[StagesType]
    n: Operand[I32]


class TileClearOp(Kv.Operation, name="tile_clear", traits=[Synchronizes]):
    """Zeros in the rows of a tile in shared memory outside of [begin, end), which may exceed the tile; the tile."""

    source: Operand[Any]
    begin: Operand[I32]
    end: Operand[I32]
    tile: Result[Any]

    def verify_invariants(self) -> bool:
        return _in_shared(self, self.source, "the operand") and same_type(self, self.source)


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

    def verify_invariants(self) -> bool:
        if verify.handle(self, self.cache) is None:
            return False
        rows, step = verify.integer(self.rows), verify.integer(self.step)
        if rows is None or step is None or step < 1 or not 1 <= rows // step <= LANES or rows % step:
            return verify.fail(
                self, f"rows must be from 1 to {LANES} steps, one a lane, got rows = {self.rows} and step = {self.step}"
            )
        return True


class TileRowPagesOp(Kv.Operation, name="tile_row_pages", traits=[Pure]):
    """The pages of the rows that each of the warps copies: lane i has that of the warp's row i.

    A tile of ``rows`` tokens from ``first`` on is cut into as many runs as warps copy, of 32 rows at most each. Lanes
    past a run have the page of some token below ``count``. Operands as of ``kv.tile_load``; with ``lists`` a lane has
    the entry of its row's token instead, -1 where there is none.
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
            return verify.fail(self, f"rows must be from 1 to {most}, one a lane of a warpgroup, got {self.rows}")
        return True


class TileStoreSharedOp(Kv.Operation, name="tile_store_shared", traits=[Synchronizes]):
    """Write this warp's rows of a tile in registers to shared memory, laid out as tiles in shared memory are."""

    source: Operand[Any]
    place: Operand[Any]

    def verify_invariants(self) -> bool:
        type_ = tile_of(self.source)
        if type_ is None or type_.rank != 2 or layout_of(type_) in IN_SHARED:
            return verify.fail(self, f"the operand must be a tile of rank 2 in registers, got {self.source.type}")
        got = self.place.type
        return str(got) == "!llvm.ptr<3>" or verify.fail(self, f"place must be !llvm.ptr<3>, got {got}")


class TileStageOp(Kv.Operation, name="tile_stage", traits=[Synchronizes]):
    """A copy of some columns of a tile in shared memory, laid out as tiles there are: warps read the rows they held.

    Operand: a tile of 16-bit elements. Attributes: the first column, and how many; multiples of 16. Result: where they
    lie, until as many columns are put there again.
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
            return verify.fail(self, f"columns must lie in the tile's {type_.shape[1]}, got {columns} from {first} on")
        got = self.operation.results[0].type
        return str(got) == "!llvm.ptr<3>" or verify.fail(self, f"the result must be !llvm.ptr<3>, got {got}")


class TileStoreDirectOp(Kv.Operation, name="tile_store_direct", traits=[WritesMemory]):
    """Write the elements of a tile that a thread holds to rows of a buffer, neighbours in a row together.

    Operands: source, tile in registers; buffer; masks, whether each of the thread's rows is written; indices, of one
    row after the other.
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
    """Start ``kv.dot``: the result is in flight, and only ``kv.dot_wait`` may name it."""

    a: Operand[Any]
    b: Operand[Any]
    c: Operand[Any] | None = None
    transpose_b: ir.BoolAttr
    result_: Result[Any]

    def verify_invariants(self) -> bool:
        result = self.operation.results[0]
        return verify_dot(self, self.a, self.b, self.c) and _only_waited_for(self, result, "the result")


class DotWaitOp(Kv.Operation, name="dot_wait", traits=[Synchronizes]):
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
        if given != got:
            return verify.fail(self, f"the results must have the operands' types, got {got} for {given}")
        results = list(self.operation.results)
        return all(_only_waited_for(self, r, "the newer result") for r in results[len(results) - pending :])


class TileReadyOp(Kv.Operation, name="tile_ready", traits=[Synchronizes]):
    """A tile that has been computed when this is passed, not where it is first used: work that fills a wait."""

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
    """Numbers that a block takes from a counter in device memory, on their way to the roles that read them."""


class TakeRoundOp(Kv.Operation, name="take_round", traits=[Pure]):
    """The number that a round of a loop has, of a loop from a block's number up to ``count`` by the number of blocks.

    Any block may take any round: every number below ``count`` is that of one round of one block. It is the loop's own
    unless a pass lets blocks take them from the counter, four bytes at the start of a buffer that holds 0.
    """

    counter: Operand[Any]
    round: Operand[I32]
    count: Operand[I32]
    number: Result[I32] = infer_result()

    def verify_invariants(self) -> bool:
        return verify.memref(self, self.counter, 1, ("i8",), "the counter")


class MakeQueueOp(Kv.Operation, name="make_queue", traits=[AllocatesShared]):
    """Allocate a queue of numbers in shared memory, which ``readers`` warps read, and initialise its barriers."""

    counter: Operand[Any]
    readers: ir.IntegerAttr
    result_: Result[QueueType]

    def verify_invariants(self) -> bool:
        readers = verify.integer(self.readers)
        if readers is None or not 1 <= readers <= 32:
            return verify.fail(self, f"readers must be from 1 to 32 warps, got {self.readers}")
        return verify.memref(self, self.counter, 1, ("i8",), "the counter")


class QueueFetchOp(Kv.Operation, name="queue_fetch", traits=[Synchronizes]):
    """The block's first thread takes the number of use ``n`` from the counter: ``count`` and more when there is none.

    Every block fetches once more than it finds numbers below ``count``; the last of these fetches resets the counter.
    """

    queue: Operand[QueueType]
    n: Operand[I32]
    count: Operand[I32]


class QueueNextOp(Kv.Operation, name="queue_next", traits=[Synchronizes]):
    """The number of use ``n``, for the warps of a reader; each use is read once."""

    queue: Operand[QueueType]
    n: Operand[I32]
    number: Result[I32] = infer_result()


class IsRoleOp(Kv.Operation, name="is_role", traits=[Pure]):
    """Whether this thread has a role: ``producer`` (the first warpgroups of the block, as many as the schedule says),
    ``producer_warp_0`` to ``producer_warp_3`` (a warp of the first one), ``producer_warps_from_1`` and so on (the warps
    of all of them from one on), ``producer_group_0`` and ``producer_group_1`` (one of its warpgroups), or
    ``consumer`` (the other warpgroups). The same for all threads of a warp.
    """

    role: ir.StringAttr
    is_it: Result[I1] = infer_result()

    def verify_invariants(self) -> bool:
        return verify.one_of(self, "role", ROLES)


class SetRegistersOp(Kv.Operation, name="set_registers", traits=[Synchronizes]):
    """Give this warpgroup's threads ``count`` registers each (``setmaxnreg``), more or fewer than it had."""

    count: ir.IntegerAttr
    action: ir.StringAttr

    def verify_invariants(self) -> bool:
        count = verify.integer(self.count)
        if count is None or not 24 <= count <= 256 or count % 8:
            return verify.fail(self, f"count must be a multiple of 8 from 24 to 256, got {self.count}")
        return verify.one_of(self, "action", ("increase", "decrease"))


class TurnWaitOp(Kv.Operation, name="turn_wait", traits=[Synchronizes]):
    """Wait for this consumer warpgroup's turn to start products (ping-pong); the one before passes it on.

    Attribute ``groups``: ``all`` in a loop; ``first`` behind it, where only the first warpgroup takes the turn that is
    left.
    """

    groups: ir.StringAttr

    def verify_invariants(self) -> bool:
        return verify.one_of(self, "groups", ("all", "first"))


class TurnPassOp(Kv.Operation, name="turn_pass", traits=[Synchronizes]):
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
        ir.StringAttr.get(name), i64_attr(stages), ir.TypeAttr.get(tile), ir.StringAttr.get(copy), stages_type()
    ).operation.results[0]


def take_round(counter: ir.Value, round: ir.Value, count: ir.Value) -> ir.Value:
    """The number of a round."""
    return TakeRoundOp(counter, round, count).operation.results[0]


def make_queue(counter: ir.Value, readers: int) -> ir.Value:
    """A queue of numbers from a counter."""
    return MakeQueueOp(counter, i64_attr(readers), ir.Type.parse("!kv.queue")).operation.results[0]


def dot_wait(products: Sequence[ir.Value], pending: int = 0) -> list[ir.Value]:
    """The products, one or two, of which all but the last ``pending`` are complete."""
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
    """Where a copy of some columns of a tile lies in shared memory."""
    place = ir.Type.parse("!llvm.ptr<3>")
    return TileStageOp(source, i64_attr(first_column), i64_attr(columns), place).operation.results[0]
