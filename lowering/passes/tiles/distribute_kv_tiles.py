# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Distribute tiles over threads: a tile becomes the vector of elements that a thread holds.

The layouts of ``assign-kv-layouts`` say which elements a thread has.

1. Arithmetic keeps its ops, on vectors. Tile indices become constants plus the thread's offset.
2. A reduction folds the registers of a thread, then the lanes of a row by shuffles.
3. Products become wgmma or mma.sync. A wgmma wait takes and returns every accumulator in flight.
4. Circular buffers become shared memory with full and empty mbarriers.
5. Rows of buffers are copied in chunks of 16 bytes, with an index and a mask per row.

Scalars and control flow, which are uniform over the block, stay as they are.

Before:  %x = arith.addf %a, %b : tensor<128x128xf32, "wgmma"> ; %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1}
After:   %x = arith.addf %a, %b : vector<64xf32> ; vector.shuffle, arith.maxnumf ... ; gpu.shuffle xor
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect import ops
from kvarn.dialect.dtypes import f32
from kvarn.dialect.layout import lowbit
from kvarn.dialect.ops.staging import (
    FIRST_PART,
    PRODUCER_GROUPS,
    PRODUCER_REST,
    PRODUCER_WARPS,
    TileStoreDirectOp,
    TileStoreSharedOp,
)
from kvarn.dialect.ops.tile import IN_SHARED, SHARED, SHARED_TRANSPOSED
from kvarn.dialect.register_layout import RegisterLayout
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dsl import functional, gpu as kv_gpu, ptx
from kvarn.dsl.memory import SHARED as SHARED_SPACE, Pointer
from kvarn.dsl.values import Value, vector, where
from kvarn.lowering.index import pointer
from kvarn.lowering.kernels.append import tile_rows
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import defining_op, enclosing, is_inside, ops_named, replace, walk
from kvarn.lowering.tiles import (
    barriers,
    exchange as tile_exchange,
    memory as tile_memory,
    mma as tile_mma,
    products as tile_products,
    score_weights,
)
from kvarn.lowering.tiles.chunks import Chunks
from kvarn.lowering.tiles.copies import SLOTS
from kvarn.lowering.tiles.copy_groups import AWAITED
from kvarn.lowering.tiles.exchange import Fold
from kvarn.lowering.tiles.ir import (
    ACCUMULATORS,
    MMA,
    SWAPPED,
    WARP,
    WARPGROUP,
    WARPGROUP_ROWS,
    WGMMA,
    backward,
    element,
    instruction_of,
    is_elementwise,
    is_second_operand,
    is_tile,
    is_transposed,
    layout_of,
    producers_of,
    rank,
    schedule_of,
    splat_of,
    tiled,
    users,
)
from kvarn.lowering.tiles.loop_rotation import NARROWS
from kvarn.lowering.tiles.memory import Stages
from kvarn.lowering.tiles.products import Product
from kvarn.lowering.tiles.threads import Threads, register_layout, scalar, shared_layout, vector_type
from kvarn.lowering.tiles.values import RULES, TILES, WEIGHTS, lines_of_operand
from kvarn.lowering.tiles.work_queue import Queue

from .pipeline_kv_loops import STRICT
from .select_kv_copies import last_use
from .specialize_kv_warps import ROLES

_CHEAP = ("kv.tile_broadcast", "tensor.splat", "arith.constant")
_MADE = ("kv.make_stages", "kv.make_queue")
_COPIES = ("kv.copy_start", "kv.copy_rows_start")
_PRODUCTS = ("kv.dot", "kv.dot_start")
SEVERAL = (*PRODUCER_REST, *PRODUCER_GROUPS)  # roles that several producer warps have
# Ops without a rule: control flow only passes tiles on, and rows of buffers are lowered before everything else.
_CONTROL = ("scf.for", "scf.if", "scf.while")
_STRUCTURE = (*_CONTROL, "scf.yield", "scf.condition", "arith.constant")
_ROWS = ("kv.tile_load_rows", "kv.tile_store_rows", "kv.copy_rows_start")
ROLE = "kv.role"  # on copies and waits that only some producer warps execute: their role
VALUE = 5  # the number of an operand of kv.tile_store
SLEEP = 200  # ns between polls of the warps that copy one tile of rows while others copy many tiles of keys
# Weights that are denormal in f32 are zero in 16 bits, and a fast exponential that keeps them needs more instructions.
FLUSH_DENORMALS = '[["denormal-fp-math-f32", "preserve-sign,preserve-sign"]]'


class Distribution:
    """The state of distributing one kernel."""

    def __init__(self, function: ir.Operation):
        self.function = function
        schedule = schedule_of(function)
        block = next(iter(ir.DenseI32ArrayAttr(function.attributes["kv.block"])))
        producers, self.slots = producers_of(schedule), schedule.get("staging_stages", SLOTS)
        consumers = schedule.get("consumers", block // WARPGROUP - producers)
        self.body = function.regions[0].blocks[0]
        self.given = [o.operation for o in self.body.operations][:-1]  # without the return
        with ir.InsertionPoint.at_block_begin(self.body), function.location:
            proxy = instruction_of(function) == WGMMA
            across = 4 * consumers if schedule.get(SWAPPED) else schedule.get("across", 1)
            self.threads = Threads.of(consumers, producers, proxy, across)
        self.stages: dict[ir.Value, Any] = {}  # circular buffers and work queues, by their SSA value
        self.partial_tiles: dict[ir.Value, tuple[Stages, Value]] = {}  # only their first part was awaited
        self.products: dict[ir.Value, Product] = {}  # by result: the hash of an op changes when its operands do
        self.chunks = Chunks(function)
        self.weights: dict[ir.Value, ir.Value] = {}  # converted softmax weights, by the f32 weights
        self.places: dict[SharedLayout, Pointer] = {}  # the shared memory of kv.tile_stage
        self.staged: list[StagedRows] = []  # loaded query rows: reusable memory
        self.columns_of: dict[ir.Value, SharedLayout] = {}  # of the whole tile, by kv.tile_columns

    # --- roles -----------------------------------------------------------------------------------------

    def in_producer(self, op: ir.Operation) -> bool:
        """Whether an op is in the producer branch."""
        parent, region = op.parent, op.block.region
        while parent is not None and parent.operation.name != "gpu.func":
            operation = parent.operation
            if ROLES in operation.attributes:
                return operation.regions[0] == region
            region, parent = operation.block.region, operation.parent
        return False

    def copying(self, op: ir.Operation) -> tuple[Value, int]:
        """(index of this thread among the copying threads, their number) at an op."""
        if self.in_producer(op):
            if ROLE not in op.attributes:
                return self.threads.block_thread, self.threads.first
            role = op.attributes[ROLE].value
            if role in PRODUCER_GROUPS:
                return self.threads.block_thread - PRODUCER_GROUPS.index(role) * WARPGROUP, WARPGROUP
            first = PRODUCER_REST[role] * WARP
            return self.threads.block_thread - first, self.threads.first - first
        return self.threads.thread, self.threads.consumers * WARPGROUP

    # --- the walk --------------------------------------------------------------------------------------

    def ops(self) -> list[ir.Operation]:
        """Every op of the kernel, outer before inner."""
        return walk(self.function)[1:]

    def record(self) -> None:
        """Collect what is read from tile types before operands become vectors: products, row copies, roles."""
        for branch in ops_named(self.function, "scf.if"):
            role = defining_op(branch.operands[0])
            if role is not None and role.name == "kv.is_role" and role.attributes["role"].value in SEVERAL:
                for op in ops_named(branch, *_COPIES, "kv.copy_finish", "kv.producer_acquire", "kv.queue_next"):
                    op.attributes[ROLE] = role.attributes["role"]
        for op in self.ops():
            if op.name not in RULES.table and op.name not in (*_STRUCTURE, *_ROWS) and not is_elementwise(op):
                if any(is_tile(v) for v in (*op.operands, *op.results)):
                    fail(op, "takes a tile, and has no rule that distributes it over threads")
            if op.name in _PRODUCTS:
                self.products[op.result] = self.product(op.opview)
            if op.name in ("kv.tile_columns", "kv.tile_terms"):
                self.columns_of[op.results[0]] = shared_layout(op.operands[0].type)
            if op.name == "kv.tile_unshare":  # before rows of buffers are loaded
                op.attributes["kv.tile"] = ir.TypeAttr.get(op.operands[0].type)
            tile_exchange.mark(op, self.grouped)
        for op in ops_named(self.function, "kv.tile_ready"):
            self.convert_with_sums(defining_op(op.operands[0]), op)
        if self.threads.first and not any(ROLES in op.attributes for op in self.ops()):
            self.confine()
        of_rows = dict(zip(_ROWS, (self.load_rows, self.store_rows, self.copy_rows), strict=True))
        for op in ops_named(self.function, *_MADE):
            self.visit(op)
        for op in ops_named(self.function, *_ROWS):
            with ir.InsertionPoint(op), op.location:
                of_rows[op.name](op)
        for op in reversed(self.ops()):  # index and mask tiles, now unused
            if op.name in ("kv.tile_index", "kv.tile_broadcast", "tensor.splat") or is_elementwise(op):
                if is_tile(op.results[0]) and not any(True for _ in op.results[0].uses):
                    op.erase()
        self.sink()

    def folded(self, op: ir.Operation, values: list[ir.Value], layout: RegisterLayout, fold: Fold) -> list[ir.Value]:
        """Per-thread partial values of a reduction, folded over the lanes and warps that share a row or column."""
        lanes = fold.over_lanes(values, layout)
        if fold.warps == 1:
            return lanes.values
        with ir.InsertionPoint.at_block_begin(self.body):
            place_bytes = f32.itemsize * fold.warps
            alignment = min(lowbit(place_bytes), CHUNK)
            place = Pointer(ops.alloc_shared(layout.shape[fold.kept] * place_bytes, alignment), SHARED_SPACE)
        tile_exchange.begin(op, fold.threads)
        return fold.over_warps(lanes, (layout, register_layout(op.results[0].type)), place)

    def convert_with_sums(self, conversion: ir.Operation | None, ready: ir.Operation) -> None:
        """Mark sums of weights that are then converted to 16 or 8 bits: one pass over the registers does both."""
        if conversion is None or conversion.name not in NARROWS or rank(ready.result) != 2:
            return
        for user in users(conversion.operands[0]):
            if user.name == "kv.tile_reduce" and "kv.partial" in user.attributes and user.block == ready.block:
                user.attributes[WEIGHTS] = ir.TypeAttr.get(element(ready.result))

    def confine(self) -> None:
        """Let only the consumers run the kernel if the producer has nothing to copy.

        What the whole block shares stays outside: stages, and all up to the block's last barrier, such as a scan of the
        batch, but for ops that consume tiles.
        """
        made = [op for op in self.given if op.name in _MADE]
        outside = {*made, *backward(made, self.given.__contains__)}
        shared = max((n for n, op in enumerate(self.given) if ops_named(op, barriers.BLOCK_BARRIER)), default=-1)
        outside |= {op for op in self.given[: shared + 1] if not ops_named(op, "kv.consumer_wait")}
        with ir.InsertionPoint(self.body.operations[len(self.body.operations) - 1]), self.function.location:
            branch = scf.IfOp((self.threads.block_thread >= self.threads.first).ir)
            with ir.InsertionPoint(branch.then_block):
                end = scf.YieldOp([])
        for op in self.given:
            if op not in outside:
                op.move_before(end.operation)

    def sink(self) -> None:
        """Clone broadcasts and constants into the blocks that use them: live across blocks they occupy registers."""
        for op in ops_named(self.function, *_CHEAP):
            if rank(op.results[0]) != 2:
                continue
            for use in list(op.results[0].uses):
                owner = use.owner.operation
                if owner.block != op.block and owner.name not in ("scf.yield", "scf.for"):
                    with ir.InsertionPoint(owner), op.location:
                        owner.operands[use.operand_number] = op.clone().result
            if not any(True for _ in op.results[0].uses):
                op.erase()

    @property
    def grouped(self) -> bool:
        """Whether buffers are awaited by cp.async groups: with mma.sync, whose targets may lack mbarriers and TMA."""
        return not self.threads.proxy

    def product(self, op: Any) -> Product:
        a, b, result = (ir.RankedTensorType(x.type) for x in (op.a, op.b, op.operation.results[0]))
        n = b.shape[0 if op.transpose_b.value else 1]
        transposed = op.transpose_b.value != (layout_of(op.b.type) == SHARED_TRANSPOSED)
        lies = self.columns_of.get(op.b, shared_layout(op.b.type))
        place = shared_layout(op.a.type) if layout_of(op.a.type) in IN_SHARED else None
        in_shared = layout_of(op.b.type) in IN_SHARED  # true unless operands are swapped
        k, held = b.shape[1 if op.transpose_b.value else 0], register_layout(result)
        if is_transposed(result):
            return Product(
                k, a.shape[0], str(b.element_type), held.transposed, place, True, lies if in_shared else None,
                element_b=str(a.element_type), transpose_a=in_shared and not transposed, swapped=True,
            )  # fmt: skip
        kind, terms = str(a.element_type), a.shape[1] // k
        by_columns = layout_of(op.a.type) == SHARED_TRANSPOSED
        return Product(k, n, kind, held, lies, transposed, place, terms, str(b.element_type), by_columns)

    def visit(self, op: ir.Operation) -> None:
        rule = RULES.table.get(op.name)
        with op.location:
            if rule is not None:
                with ir.InsertionPoint(op):
                    replace(op, rule(op.opview, self))
            elif op.name in _CONTROL:
                for value in (*op.results, *(a for r in op.regions for b in r.blocks for a in b.arguments)):
                    if is_tile(value):
                        shared = layout_of(value.type) in IN_SHARED
                        value.set_type(pointer(3) if shared else vector_type(value.type))
            elif op.name == "arith.constant" and is_tile(op.result):
                made = vector_type(op.result.type)
                value = splat_of(op.result)
                op.result.set_type(made)
                op.attributes["value"] = ir.DenseElementsAttr.get_splat(made, value)
            elif is_elementwise(op) and is_tile(op.results[0]):
                if op.name == "arith.divf" and rank(op.results[0]) == 2:
                    op.attributes["fastmath"] = ir.Attribute.parse("#arith.fastmath<arcp,afn>")
                op.results[0].set_type(vector_type(op.results[0].type))
                if op.results[0] in self.chunks.roots:
                    with ir.InsertionPoint.after(op):
                        made = self.chunks.computed(op.results[0])
                    op.results[0].replace_all_uses_except(made, defining_op(made))

    # --- rows of buffers -------------------------------------------------------------------------------

    def load_rows(self, op: ir.Operation) -> None:
        held = layout_of(op.result.type) == ACCUMULATORS[MMA] and element(op.result).width == 16
        if layout_of(op.result.type) != SHARED and not held:
            fail(op, "loads rows that no product reads from shared memory: load them as elements, with gather")
        layout = shared_layout(op.result.type)
        place, several = self.allocate(layout), self.threads.consumers > 1 or layout.rows != WARPGROUP_ROWS
        whole = is_second_operand(op.result) or layout.rows != WARPGROUP_ROWS * self.threads.consumers
        threads = dataclasses.replace(self.threads, whole=several and whole)
        last = last_use(op)
        with ir.InsertionPoint(op):
            if enclosing(op, "scf.for", "scf.while") is not None:  # the previous iteration's rows have been read
                barriers.sync_rows(threads)
            tile_memory.load_rows(op.opview, place, layout, threads)
            loaded = place.ir
            if held:
                loaded = tile_mma.loaded(place, layout, threads, element(op.result))
        if not threads.whole:  # otherwise another warpgroup may still be reading it
            self.staged.append(StagedRows(layout, place, op.block, last))
        op.result.replace_all_uses_with(loaded)
        op.erase()

    def copy_rows(self, op: ir.Operation) -> None:
        stages = self.stages[op.operands[0]]
        stages.of_rows = True
        tile_memory.copy_buffer_rows(op.opview, stages, *self.copying(op))
        op.erase()

    def store_rows(self, op: ir.Operation) -> None:
        """Write the rows of a tile, through shared memory or directly from registers.

        Through shared memory, the stage of the query rows is reused, in which every warp has its own rows. Elements of
        32 bits are written from registers: four lanes (eight of a transposed tile) hold 32 bytes of a row, a full
        memory sector. So are those of 8 bits. 16-bit elements are written from registers too if the stage already
        receives the next query rows, or warps divide the columns; not for a transposed tile, whose lanes hold columns.
        """
        value = op.opview.value
        tile = ir.RankedTensorType(value.type)
        layout = shared_layout(value.type)
        free = [rows.place for rows in self.staged if rows.is_free(op, layout)]
        free += self.waited_for(op, layout)
        parts = self.threads.across > 1 or (self.released(op) and not free)
        if tile.element_type.width != 16 or (parts and not is_transposed(tile)):
            held = tile_memory.rows_held(op.opview, register_layout(value.type), self.threads)
            made = TileStoreDirectOp(value, op.opview.buffer, *held)
            for name in ("stored", "first_column"):
                if name in op.attributes:
                    made.operation.attributes[name] = op.attributes[name]
            op.erase()
            return
        if str(tile.element_type) not in ("bf16", "f16"):
            what = f"stores rows of floats, or of integers of 8 or 32 bits, got {tile.element_type}"
            fail(op, f"{what}: convert, or write with scatter")
        place = free[0] if free else self.allocate(layout)
        if free or is_transposed(tile):  # the threads that share rows read all of them
            barriers.sync_rows(self.threads)
        TileStoreSharedOp(value, place.ir)
        tile_memory.store_rows(op.opview, place, layout, self.threads)
        op.erase()

    def waited_for(self, op: ir.Operation, layout: SharedLayout) -> list[Pointer]:
        """The stages of query rows that are acquired at an op and released after it, and that nothing reads later."""
        found = []
        for wait in self.waits_for_rows(op):
            stages = self.stages[wait.operands[0]]
            held = stages.layout
            rows = StagedRows(layout, stages.tiles, wait.block, last_use(wait))
            fits = held.rows == layout.rows and held.row_bytes >= layout.row_bytes
            if fits and not self.is_released(wait, op) and rows.is_free(op, layout):
                found.append(stages.tile(stages.stage(scalar(wait.operands[1]))[0]))
        return found

    def waits_for_rows(self, op: ir.Operation) -> list[ir.Operation]:
        """The waits for copied query rows in the loop around an op."""
        loop = enclosing(op, "scf.for", "scf.while")
        around = [] if loop is None else loop.regions[-1].blocks[0].operations
        waits = [o.operation for o in around if o.operation.name == "kv.consumer_wait"]
        return [wait for wait in waits if self.stages[wait.operands[0]].of_rows]

    def is_released(self, wait: ir.Operation, op: ir.Operation) -> bool:
        """Whether the stage that a wait acquired has been released before an op."""
        for other in wait.block.operations:
            if other.operation.name == "kv.consumer_release" and other.operation.operands[0] == wait.operands[0]:
                return True
            if other.operation == op or is_inside(op, other.operation):
                return False
        return False

    def released(self, op: ir.Operation) -> bool:
        """Whether query rows of the loop around an op have been released before it."""
        return any(self.is_released(wait, op) for wait in self.waits_for_rows(op))

    def arrive(self, tile: ir.Value, parts: Sequence[int] | None = None) -> None:
        """Wait for parts of a tile whose wait covered the first part only: for all others, if none are given."""
        if tile in self.partial_tiles:
            stages, n = self.partial_tiles[tile]
            stages.wait_for(n, range(1, stages.parts) if parts is None else parts)

    def allocate(self, layout: SharedLayout) -> Pointer:
        """Allocate shared memory, at the start of the kernel."""
        with ir.InsertionPoint.at_block_begin(self.body):
            return Pointer(ops.alloc_shared(layout.bytes, layout.alignment), SHARED_SPACE)


@dataclasses.dataclass(frozen=True)
class StagedRows:
    """Rows of a buffer in shared memory, which the rows of a result may overwrite.

    Attributes
    ----------
    block : ir.Block
        Of the load.
    last : ir.Operation
        The last op of the block that reads the rows.
    """

    layout: SharedLayout
    place: Pointer
    block: ir.Block
    last: ir.Operation

    def is_free(self, op: ir.Operation, layout: SharedLayout) -> bool:
        """Whether a tile of ``layout`` fits, and nothing reads the loaded rows once ``op`` has run."""
        if self.layout.bytes < layout.bytes or self.layout.rows != layout.rows:
            return False
        while op.block != self.block:
            if op.parent.operation.name == "gpu.func":
                return True  # the load is in a block that has ended
            if op.parent.operation.name in ("scf.for", "scf.while"):
                return False
            op = op.parent.operation
        following = [o.operation for o in self.block.operations]
        return following.index(self.last) <= following.index(op)


# --- circular buffers and roles ----------------------------------------------------------------------


@RULES.lowers("kv.tile_store_shared")
def _store_shared(op: Any, d: Distribution) -> None:
    tile = op.operation.attributes["kv.tile"].value
    tile_memory.stage_tile(op.source, tile, Pointer(op.place, SHARED_SPACE), shared_layout(tile), d.threads)


@RULES.lowers("kv.tile_stage")
def _stage(op: Any, d: Distribution) -> ir.Value:
    tile = op.operation.attributes["kv.tile"].value
    if is_transposed(tile):
        fail(op, "stages rows that no warp has whole: of products with so few rows write the elements with scatter")
    layout = tile_memory.columns_of(shared_layout(tile), op.columns.value)
    if layout not in d.places:
        d.places[layout] = d.allocate(layout)
    return tile_memory.stage_columns(op, d.places[layout], layout, d.threads)


@RULES.lowers("kv.tile_store_direct")
def _store_direct(op: Any, d: Distribution) -> None:
    layout = register_layout(op.operation.attributes["kv.tile"].value)
    tile_memory.store_registers(op, layout, d.threads)


@RULES.lowers("kv.make_stages")
def _make_stages(op: Any, d: Distribution) -> ir.Value:
    copies = [o for o in users(op.operation.result) if o.name in _COPIES]
    copying = d.copying(copies[0])[1] if copies else 1
    made = Stages.allocate(op, shared_layout(op.tile.value, op.stages.value), copying, d.grouped, d.slots)
    handle = made.tiles.ir
    d.stages[handle] = made
    _initialize(op, d)
    return handle


@RULES.lowers("kv.make_queue")
def _make_queue(op: Any, d: Distribution) -> ir.Value:
    made = Queue.allocate(op.counter, op.readers.value)
    d.stages[made.slots.ir] = made
    _initialize(op, d)
    return made.slots.ir


@RULES.lowers("kv.queue_fetch")
def _fetch(op: Any, d: Distribution) -> None:
    with functional.when(d.threads.block_thread == 0):
        d.stages[op.queue].fetch(scalar(op.n), scalar(op.count))


def _sleep(op: Any) -> int:
    """The nanoseconds between polls of a barrier: SLEEP for warps that copy little, otherwise 0."""
    role = op.operation.attributes[ROLE].value if ROLE in op.operation.attributes else ""
    return SLEEP if role in PRODUCER_REST else 0


@RULES.lowers("kv.queue_next")
def _next(op: Any, d: Distribution) -> ir.Value:
    sleep = _sleep(op)
    return d.stages[op.queue].next(scalar(op.n), d.threads.lane, sleep).ir


@RULES.lowers("kv.take_work_item")
def _round(op: Any, d: Distribution) -> ir.Value:
    return op.iteration


def _initialize(op: Any, d: Distribution) -> None:
    """After the last buffer or queue of the kernel, initialize all mbarriers."""
    following = [o.operation for o in d.body.operations]
    if d.grouped and not any(isinstance(stages, Queue) for stages in d.stages.values()):
        return
    if not any(o.name in _MADE for o in following[following.index(op.operation) + 1 :]):
        with functional.when(d.threads.block_thread == 0):
            for stages in d.stages.values():
                stages.initialize(d.threads.warps)
            ptx.fence_mbarrier_init()
        barriers.sync_all()


@RULES.lowers("kv.producer_acquire")
def _acquire(op: Any, d: Distribution) -> None:
    with _copying(d, op, d.stages[op.buffer]):
        # No sleep if the consumers wait for this copy: in a buffer of one stage, or before a conversion.
        stages = d.stages[op.buffer]
        stages.acquire(scalar(op.n), _sleep(op) if stages.count > 1 and stages.staging is None else 0)


@RULES.lowers("kv.tile_pages")
def _pages(op: Any, d: Distribution) -> ir.Value:
    return tile_memory.pages_of(op, d.threads.lane).ir


@RULES.lowers("kv.tile_row_pages")
def _row_pages(op: Any, d: Distribution) -> ir.Value:
    return tile_memory.row_pages_of(op, *d.copying(op.operation)).ir


@RULES.lowers("kv.copy_start")
def _copy(op: Any, d: Distribution) -> None:
    stages = d.stages[op.buffer]
    thread, count = d.copying(op.operation)
    with _copying(d, op, stages):
        if stages.copy == "tma":
            tile_memory.copy_tile_boxes(op, stages, d.threads.lane)
        elif stages.copy == "convert":
            tile_memory.convert_tile(op, stages, thread, count)
        else:
            tile_memory.start_rows(op, stages, thread, count)
            if not stages.finished and not stages.async_arrive and not stages.grouped:
                tile_memory.finish_rows(stages, scalar(op.n), thread, 0)


@RULES.lowers("kv.copy_finish")
def _finish(op: Any, d: Distribution) -> None:
    tile_memory.finish_rows(d.stages[op.buffer], scalar(op.n), d.copying(op.operation)[0], op.pending.value)


def _copying(d: Distribution, op: Any, stages: Stages) -> Any:
    """The scope of a copy: the first consumer warp for TMA without a producer, otherwise every thread here."""
    if stages.copy == "tma" and not d.in_producer(op.operation):
        return functional.when(d.threads.warp == 0)
    return contextlib.nullcontext()


@RULES.lowers("kv.copy_commit")
def _commit(op: Any, d: Distribution) -> None:
    ptx.cp_async_commit()


@RULES.lowers("kv.copy_wait")
def _copy_wait(op: Any, d: Distribution) -> None:
    barriers.wait_for_groups(op.pending.value)


@RULES.lowers("kv.consumer_wait")
def _consumer_wait(op: Any, d: Distribution) -> ir.Value:
    stages = d.stages[op.buffer]
    if stages.grouped and stages.staging is not None and not stages.finished:
        ptx.cp_async_commit()
        tile_memory.finish_rows(stages, scalar(op.n), d.threads.thread, 0)
    n = scalar(op.n)
    if AWAITED in op.operation.attributes:
        return stages.tile(stages.stage(n)[0]).ir
    if stages.parts == 1:
        return stages.wait(n).ir
    tile, first = stages.tile(stages.stage(n)[0]).ir, FIRST_PART in op.operation.attributes
    stages.wait_for(n, range(1 if first else stages.parts))
    if first:
        d.partial_tiles[tile] = stages, n
    return tile


@RULES.lowers("kv.consumer_release")
def _release(op: Any, d: Distribution) -> None:
    d.stages[op.buffer].release(scalar(op.n), d.threads)


@RULES.lowers("kv.tile_clear")
def _clear(op: Any, d: Distribution) -> ir.Value:
    layout, kept = shared_layout(op.tile.type), (scalar(op.begin), scalar(op.end))
    tile_memory.clear_rows(Pointer(op.source, SHARED_SPACE), layout, kept, d.threads, lambda: d.arrive(op.source))
    return op.source


@RULES.lowers("kv.turn_wait")
def _turn_wait(op: Any, d: Distribution) -> None:
    with functional.when(d.threads.group == 0) if op.groups.value == "first" else contextlib.nullcontext():
        barriers.sync(barriers.turn_of(d.threads.group, d.threads), 2 * WARPGROUP)


@RULES.lowers("kv.turn_pass")
def _turn_pass(op: Any, d: Distribution) -> None:
    last = d.threads.consumers - 1
    following = where(d.threads.group == last, 0, d.threads.group + 1)
    with functional.when(d.threads.group == last) if op.groups.value == "last" else contextlib.nullcontext():
        barriers.arrive(barriers.turn_of(following, d.threads), 2 * WARPGROUP)


@RULES.lowers("kv.tile_ready")
def _ready(op: Any, d: Distribution) -> ir.Value:
    conversion, strict = defining_op(op.source), STRICT in op.operation.attributes
    if conversion is not None and conversion.name in NARROWS and conversion.operands[0] in d.weights:
        made = d.weights[conversion.operands[0]]
        return tile_products.pinned(made, strict) if strict else made
    return tile_products.pinned(op.source, strict)


@RULES.lowers("kv.is_role")
def _is_role(op: Any, d: Distribution) -> ir.Value:
    if op.role.value in PRODUCER_WARPS:
        return (kv_gpu.shuffle_idx(d.threads.block_thread >> 5, 0) == PRODUCER_WARPS.index(op.role.value)).ir
    if op.role.value in PRODUCER_REST:
        warp = kv_gpu.shuffle_idx(d.threads.block_thread >> 5, 0)
        return ((warp >= PRODUCER_REST[op.role.value]) & (warp < d.threads.first // WARP)).ir
    number, producers = kv_gpu.shuffle_idx(d.threads.block_thread >> 7, 0), d.threads.first // WARPGROUP
    if op.role.value in PRODUCER_GROUPS:
        return (number == PRODUCER_GROUPS.index(op.role.value)).ir
    return ((number >= producers) if op.role.value == "consumer" else (number < producers)).ir


@RULES.lowers("kv.set_registers")
def _set_registers(op: Any, d: Distribution) -> None:
    ptx.setmaxnreg(op.count.value, op.action.value)


@RULES.lowers("kv.tile_store")
def _store(op: Any, d: Distribution) -> None:
    cache = tile_memory.handle_of(op.cache)
    if not cache.spec.quantized:
        tile_memory.store_tokens(op, register_layout(op.operation.attributes["kv.tile"].value), d.threads)
        return
    problem = tile_rows.why_not(cache.spec)
    if problem is not None:
        fail(op, f"writes no tiles to this cache: {problem}: use kv.append")
    value, layout, lines = lines_of_operand(op.operation, VALUE, d)
    lines = dataclasses.replace(lines, dtype=f32)
    if ir.VectorType(value.type).element_type.width == 16:
        value = arith.extf(ir.VectorType.get(ir.VectorType(value.type).shape, ir.F32Type.get()), value)
    barriers.sync_consumers(d.threads)
    lines.put(value, layout, d.threads)
    barriers.sync_consumers(d.threads)
    batch, head, first, count = (scalar(x) for x in (op.batch, op.head, op.first, op.count))
    with functional.loop(d.threads.thread, lines.rows, d.threads.consumers * WARPGROUP) as row:

        def read(column: int, width: int) -> Any:
            found = [lines.load(row, column + i) for i in range(width)]
            return vector(f32, found) if width > 1 else found[0]

        with functional.when((first + row >= 0) & (first + row < count)):
            tile_rows.write_row(cache, batch, head, first + row, read)


def annotate(function: ir.Operation) -> None:
    """Attach the tile types of operands to ops whose rules need them after operands have become vectors."""
    stores = "kv.tile_scatter", "kv.tile_stage", "kv.tile_store_shared", "kv.tile_store_direct"
    for op in ops_named(
        function,
        "kv.convert_layout",
        "kv.tile_scan",
        "kv.tile_total",
        "kv.tile_solve",
        "kv.tile_slice",
        "kv.tile_concatenate",
    ):
        for name, value in zip(TILES, op.operands, strict=False):
            op.attributes[name] = ir.TypeAttr.get(value.type)
    for op in ops_named(function, "kv.tile_store"):
        op.attributes["kv.tile"] = ir.TypeAttr.get(op.opview.value.type)
    for op in ops_named(function, *tile_exchange.EXCHANGES, "kv.table_store", "kv.tile_fragments", *stores):
        op.attributes["kv.tile"] = ir.TypeAttr.get(op.operands[0].type)


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in list(tiled(module)):
        score_weights.expand(function, score_weights.guarded)
        distribution = Distribution(function)
        distribution.record()
        annotate(function)
        for op in distribution.ops():
            distribution.visit(op)
        del function.attributes["kv.tiled"]
        function.attributes["passthrough"] = ir.Attribute.parse(FLUSH_DENORMALS)
