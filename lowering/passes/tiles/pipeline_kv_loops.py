# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Software-pipeline loops over tiles: prefetch copies and page lookups, and overlap P V with the next softmax.

1. *Copies.* If consumers copy, the copy of iteration i + stages starts when iteration i has released its stage; the
   prologue starts the first ones. A producer warpgroup runs ahead by itself. One that copies rows by cp.async waits for
   a copy after it has started one or two later ones. Groups of copies for mma.sync are in ``tiles.copy_groups``.
2. *Lookups.* The pages of a tile are looked up one iteration before its copy starts.
3. *Products.* A loop of two products of which the second needs the first (Q K^T, softmax, P V) is rotated as in
   FlashAttention-3. Iteration i starts S = Q K_i^T and O += P V_(i-1), waits for S alone, and computes P_i while P V
   runs. P and the accumulator of P V are carried by the loop; the waits for V and its releases lag by one iteration.
4. *Scalar loads.* Values that the loop loads by its index, such as an entry of a list of tiles, are loaded one
   iteration ahead, unless the loop makes lookup tables or query rows are split into two terms: registers are scarce
   there. Lookup tables are made while products run.
5. *Promoted sums* (``promote-kv-sums``). P V runs before S, some columns at a time into fresh accumulators, each added
   to the sums while the next product runs. The ``behind`` last columns run after S, when the next warpgroup may start.
6. *Ping-pong* (``ping_pong`` in the schedule). Consumer warpgroups take turns in starting their products, so that the
   tensor cores work for one while the others compute their softmax. With one wait and short products, a turn lasts
   until the products are done.

Before:  scf.for %i iter_args(%m, %l, %o) { %s = kv.dot %q, %k ; softmax ; %o2 = kv.dot %p, %v, %o * %alpha }
After:   softmax(kv.dot %q, %k0)
         scf.for %i iter_args(%m, %l, %c, %p) { %s = kv.dot_start %q, %k ; %o = kv.dot_start %p, %v', %c
         kv.dot_wait %s, %o {pending = 1} ; softmax ; kv.dot_wait %o {pending = 0} ; %c2 = %o * %alpha }
         kv.dot %p, %v', %c
One wait: kv.dot_wait %s, %o {pending = 0} ; softmax ; %c2 = %o * %alpha
Promoted: start %t0, %t1, %s, two in flight: %o = %c + %t0 while %t1 runs, %o += %t1 while %s runs ; softmax
Behind: start %t0, %s, %t1: %o = %c + %t0 while %s runs ; pass the turn after %s ; %o += %t1 ; softmax
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect.chips import BYTE_PRODUCTS, EXPONENTIALS
from kvarn.dialect.ops import staging
from kvarn.dialect.ops.sharing import add_columns
from kvarn.lowering.memory_effects import may_write, writes
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, ops_named
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.copies import SLOTS
from kvarn.lowering.tiles.copy_groups import prefetch_groups
from kvarn.lowering.tiles.ir import (
    JOINED,
    MMA,
    PROMOTED,
    ROW_SUMS,
    backward,
    cloned,
    element,
    emit,
    instruction_of,
    rank,
    schedule_of,
    shape,
    splits_rows,
    tiled,
)
from kvarn.lowering.tiles.loop_rotation import (
    NARROWS,
    WAITS,
    Rotation,
    lagging,
    late,
    loads_of,
    only_stage,
    rotation_of,
    sums_of,
)
from kvarn.lowering.tiles.prefetch import finish_later, prefetch_copies, prefetch_lookups

from .promote_kv_sums import start_columns
from .tabulate_kv_scores import makes_tables, meanwhile

STRICT = "kv.strict"  # on kv.tile_ready: ptxas must keep the order too


@dataclass(frozen=True)
class Options:
    """copies: prefetch copies; lookups: prefetch page lookups; products: rotate loops of two products (default: as the
    schedule says); tables: make lookup tables while products run; reads: load scalars one iteration ahead (default:
    unless the loop makes tables or query rows are split into terms)."""

    copies: bool = True
    lookups: bool = True
    products: bool | None = None
    tables: bool = True
    reads: bool | None = None


# --- products --------------------------------------------------------------------------------------


def start(dot: ir.Operation, values: dict[ir.Value, ir.Value]) -> ir.Value:
    """Start a product asynchronously, with its operands mapped by ``values``."""
    op = dot.opview
    a, b, c = (None if v is None else values.get(v, v) for v in (op.a, op.b, op.c))
    with dot.location:
        return staging.DotStartOp(a, b, op.transpose_b, dot.result.type, c=c).operation.results[0]


def ready(value: ir.Value) -> ir.Value:
    """Force a value to be computed before the ops that follow; for a broadcast its source, which is fewer registers."""
    op = defining_op(value)
    if op is not None and op.name == "kv.tile_broadcast":
        return cloned(op, {op.operands[0]: ready(op.operands[0])}).result
    if not rank(value) or str(element(value)) != "f32":
        return value
    return staging.TileReadyOp(value, value.type).operation.results[0]


def strict(value: ir.Value) -> ir.Value:
    """Make the order of a ``ready`` value binding for ptxas too."""
    defining_op(value).attributes[STRICT] = ir.UnitAttr.get()
    return value


class Rotator:
    """Writes the rotated form of one loop.

    Attributes
    ----------
    lagging : list of Operation
        The second product, and ops that move with it by one iteration; ``waits`` are those before it, ``frees`` those
        after it.
    scalars : list of Operation
        Block-uniform scalars that the lagging ops need, which are recomputed.
    late : list of Operation
        Ops that must wait for the second product.
    early, behind, tables : list of Operation
        The other ops: up to the first product, after it, and those after it that need no product.
    """

    def __init__(self, r: Rotation, ping_pong: bool, one_wait: bool, columns_behind: int, options: Options) -> None:
        self.r, self.ping_pong, self.one_wait = r, ping_pong, one_wait
        self.lagging = lagging(r)
        lag = set(self.lagging)
        self.waits = [op for op in self.lagging if op.name in WAITS]
        self.frees = [op for op in self.lagging if op not in (r.second, *r.sums, *self.waits)]
        with_lag = backward(self.lagging, lambda o: o in set(r.ops) and o not in lag and not o.regions)
        # Where registers are scarce, loading ahead costs more than the latency that it hides.
        ahead = not makes_tables(r.loop) and not splits_rows(r.loop)
        self.loads = loads_of(r) if (ahead if options.reads is None else options.reads) else []
        self.scalars = [op for op in r.ops if op in with_lag and op not in lag and _scalar(op)]
        late_ops = late(r, lag)
        self.late = [op for op in r.ops if op in late_ops]
        others = [op for op in r.ops if op not in lag and op not in late_ops]
        behind = others.index(r.first) + 1
        self.early, self.behind = others[:behind], others[behind:]
        self.tables = meanwhile(self.behind) if options.tables else []
        self.early_frees = only_stage(r) if one_wait else []
        self.accumulators = [r.yielded.index(v) for v in r.collected]
        self.a, self.c = r.second.opview.a, r.second.opview.c
        # The accumulators of the lagging ops: of the second product, and of the sums of weights.
        self.added_to = [self.c, *(v for op in r.sums[-1:] for v in op.operands if defining_op(v) not in r.sums)]
        self.short = _short(r)
        self.columns_behind = columns_behind

    def turn(self, op: type, groups: str) -> None:
        if self.ping_pong:
            op(ir.StringAttr.get(groups))

    def pass_turn(self, now: bool) -> None:
        """Let the next warpgroup start its products, if ``now``."""
        if now:
            self.turn(staging.TurnPassOp, "all")

    def carried_after(self, values: dict[ir.Value, ir.Value]) -> list[ir.Value]:
        """The operands of the yield: the other carried values, the accumulators, the weights."""
        kept = [v for i, v in enumerate(self.r.yielded) if i not in self.accumulators]
        return [values.get(v, v) for v in (*kept, *self.added_to, self.a)]

    def lagged(self, index: ir.Value, handed: list[ir.Value], read: list[ir.Value]) -> dict[ir.Value, ir.Value]:
        """Map values of the body to the values of the previous iteration, whose second product is outstanding."""
        lagging = [*self.added_to, self.a]
        values = {self.r.block.arguments[0]: index, **dict(zip(lagging, handed[-len(lagging) :], strict=True))}
        values.update(zip((op.result for op in self.loads), read, strict=True))
        emit([op for op in self.scalars if op not in self.loads], values)
        return values

    def read_ahead(self, index: ir.Value) -> list[ir.Value]:
        """Load the scalars of the next iteration; in the last iteration, load its own scalars again."""
        if not self.loads:
            return []
        _, upper, step, *_ = self.r.loop.operands
        following = arith.minsi(arith.addi(index, step), arith.subi(upper, step))
        values = {self.r.block.arguments[0]: following}
        needed = backward(self.loads, set(self.r.ops).__contains__)
        emit([op for op in self.r.ops if op in needed], values)
        return [values[op.result] for op in self.loads]

    def softmax(self, scores: ir.Value, sums: ir.Value, values: dict[ir.Value, ir.Value]) -> None:
        """Emit the ops after both products, once both are done."""
        values.update({self.r.first.result: scores, self.r.block.arguments[1 + self.accumulators[0]]: sums})
        done = (*self.tables, *self.early_frees)
        emit([op for op in self.r.ops if op in self.late or (op in self.behind and op not in done)], values)

    def after_one_wait(
        self, scores: ir.Value, sums: ir.Value, values: dict[ir.Value, ir.Value], previous: dict[ir.Value, ir.Value]
    ) -> None:
        if self.early_frees:
            scores, sums = staging.dot_wait([scores, sums], 1)
            emit(self.early_frees, values)
        scores, sums = staging.dot_wait([scores, sums], 0)
        self.pass_turn(self.short)
        emit(self.frees, previous)
        self.softmax(scores, sums, values)

    def promote(self, columns: int, values: dict[ir.Value, ir.Value], previous: dict[ir.Value, ir.Value]) -> None:
        """Emit both products; the second in groups of ``columns`` into fresh accumulators, added to the sums.

        The ``columns_behind`` last columns run after the scores. The warpgroup passes its turn when the scores are
        done, so that the next warpgroup's products follow at once. Two products are in flight during each addition.
        """
        op, behind = self.r.second.opview, self.columns_behind
        first = shape(self.c)[1] - behind
        made, sums = self.weighted(columns, first, previous)
        rows = None if behind else self.rows(made, previous)
        scores = start(self.r.first, values)
        self.pass_turn(not self.short and not behind)
        emit(self.tables, values)
        made, scores = staging.dot_wait([made, scores], 1)
        sums = ready(add_columns(sums, made, first - columns))
        if behind:
            made = start_columns(op.operation, *(previous.get(v, v) for v in (op.a, op.b)), first, behind)
            rows = self.rows(made, previous)
            scores, made = staging.dot_wait([scores, made], 1)
            self.pass_turn(True)
            made, *rows = staging.dot_wait([made] if rows is None else [made, rows], 0)
            sums = ready(add_columns(sums, made, first))
            emit(self.frees, previous)
        else:
            emit(self.frees, previous)
            scores, *rows = staging.dot_wait([scores] if rows is None else [scores, rows], 0)
            self.pass_turn(self.short)
        if rows:
            self.add_rows(rows[0], values, previous)
        emit(self.early_frees, values)
        self.softmax(scores, sums, values)

    def add_rows(self, made: ir.Value, values: dict[ir.Value, ir.Value], previous: dict[ir.Value, ir.Value]) -> None:
        """Add the row sums of the weights, computed by a product with ones."""
        previous[self.r.sums[0].result] = made
        emit(self.r.sums[1:], previous)
        values[self.r.block.arguments[1 + self.accumulators[1]]] = previous[self.r.sums[-1].result]

    def weighted(self, columns: int, wide: int, previous: dict[ir.Value, ir.Value]) -> tuple[ir.Value | None, ir.Value]:
        """Compute ``wide`` columns of the second product: (their last group, in flight; the sums without it)."""
        a, b, sums = (previous.get(v, v) for v in (self.a, self.r.second.opview.b, self.c))
        made = None  # the previous group, in flight
        for first in range(0, wide, columns):
            following = start_columns(self.r.second, a, b, first, columns)
            if made is not None:
                made, following = staging.dot_wait([made, following], 1)
                sums = ready(add_columns(sums, made, first - columns))
            made = following
        return made, sums

    def rows(self, made: ir.Value, previous: dict[ir.Value, ir.Value]) -> ir.Value | None:
        """Start the product that sums the weights, awaited with the last group; None if there is none."""
        if not self.r.sums:
            return None
        defining_op(made).attributes[JOINED] = ir.UnitAttr.get()
        return start(self.r.sums[0], previous)

    def finish(self, previous: dict[ir.Value, ir.Value]) -> None:
        """Emit the epilogue: the last iteration's second product, in groups that fit the registers of the scores."""
        if PROMOTED not in self.r.second.attributes:
            emit(self.lagging, previous)
            return
        emit(self.waits, previous)
        columns, wide = ir.IntegerAttr(self.r.second.attributes[PROMOTED]).value, shape(self.c)[1]
        fitting = [n for n in range(columns, shape(self.a)[1] + 1, columns) if wide % n == 0]
        columns = max(fitting, default=columns)
        made, sums = self.weighted(columns, wide, previous)
        rows = self.rows(made, previous)
        made, *rows = staging.dot_wait([made] if rows is None else [made, rows], 0)
        previous[self.r.second.result] = ready(add_columns(sums, made, wide - columns))
        if rows:
            self.add_rows(rows[0], {}, previous)
        emit(self.frees, previous)

    def after_two_waits(
        self, scores: ir.Value, sums: ir.Value, values: dict[ir.Value, ir.Value], previous: dict[ir.Value, ir.Value]
    ) -> None:
        a = self.a
        scores, sums = staging.dot_wait([scores, sums], 1)
        values[self.r.first.result] = scores
        emit([op for op in self.behind if op not in self.tables], values)
        # What the second product should overlap with: operands of the late ops, and the sums of its weights.
        results = {v for op in self.behind for v in op.results}
        packed = [op for op in self.late if op.result == a and op.name in NARROWS]
        rest = [op for op in self.late if op not in packed]
        emit(packed, values)
        for made in dict.fromkeys(v for op in rest for v in op.operands):
            if made in results:
                values[made] = ready(values[made])
        for made in sums_of(self.r, results):
            values[made] = strict(ready(values[made]))
        (values[self.r.block.arguments[1 + self.accumulators[0]]],) = staging.dot_wait([sums], 0)
        emit(self.frees, previous)
        if packed:
            values[a] = strict(staging.TileReadyOp(values[a], a.type).operation.results[0])
        emit(rest, values)

    def iterate(self, loop: scf.ForOp, step: ir.Value) -> None:
        """Write the body of the rotated loop."""
        r, inner = self.r, list(loop.inner_iter_args)
        early, reads = [op for op in self.early[:-1] if op not in self.loads], len(self.loads)
        inner, read = inner[: len(inner) - 2 * reads], inner[len(inner) - 2 * reads :]
        before, now = read[:reads], read[reads:]
        others = [arg for i, arg in enumerate(list(r.block.arguments)[1:]) if i not in self.accumulators]
        values = {r.block.arguments[0]: loop.induction_variable, **dict(zip(others, inner, strict=False))}
        values.update(zip((op.result for op in self.loads), now, strict=True))
        following = self.read_ahead(loop.induction_variable)
        emit(early, values)
        previous = self.lagged(arith.subi(loop.induction_variable, step), inner, before)
        if self.ping_pong:  # clearing a tile is a barrier of all consumers: inside a turn it would deadlock
            emit(self.waits, previous)
        self.turn(staging.TurnWaitOp, "all")
        if PROMOTED in r.second.attributes:
            if not self.ping_pong:
                emit(self.waits, previous)
            self.promote(ir.IntegerAttr(r.second.attributes[PROMOTED]).value, values, previous)
        else:
            scores = start(r.first, values)
            if not self.ping_pong:
                emit(self.waits, previous)
            sums = start(r.second, previous)
            self.pass_turn(not (self.one_wait and self.short))
            emit(self.tables, values)
            (self.after_one_wait if self.one_wait else self.after_two_waits)(scores, sums, values, previous)
        scf.yield_([*self.carried_after(values), *now, *following])

    def rotate(self) -> None:
        """Replace the loop by prologue, rotated loop and epilogue, guarded for loops without an iteration."""
        r = self.r
        lower, upper, step, *inits = r.loop.operands
        with ir.InsertionPoint(r.loop), r.loop.location:
            some = arith.cmpi(arith.CmpIPredicate.slt, lower, upper)
            branch = scf.IfOp(some, [x.type for x in r.loop.results], has_else=True)
            with ir.InsertionPoint(branch.else_block):
                scf.yield_(inits)
            with ir.InsertionPoint(branch.then_block):
                values = dict(zip(r.block.arguments, [lower, *inits], strict=True))
                emit([*self.early, *self.behind, *self.late], values)
                self.turn(staging.TurnPassOp, "last")
                read = [*(values[op.result] for op in self.loads), *self.read_ahead(lower)]
                loop = scf.ForOp(arith.addi(lower, step), upper, step, [*self.carried_after(values), *read])
                with ir.InsertionPoint(loop.body):
                    self.iterate(loop, step)
                self.turn(staging.TurnWaitOp, "first")
                results = list(loop.results)
                handed = results[: len(results) - len(read)]
                read = results[len(results) - len(read) :][: len(self.loads)]
                previous = self.lagged(arith.subi(upper, step), handed, read)
                self.finish(previous)
                kept = iter(handed)
                scf.yield_([previous[v] if v in r.collected else next(kept) for v in r.yielded])
        for old, new in zip(r.loop.results, branch.results, strict=True):
            old.replace_all_uses_with(new)
        r.loop.erase()


def _short(r: Rotation) -> bool:
    """Whether the products take no longer on the tensor cores than the softmax's exponentials on the SFUs.

    Then a turn lasts until the products are done: otherwise two warpgroups would compete first for the tensor cores and
    then for the SFUs.
    """
    operands = r.first.opview.a, r.second.opview.a
    extents = ir.RankedTensorType(operands[0].type).shape[1], ir.RankedTensorType(r.second.result.type).shape[1]
    return (
        sum(n * element(x).width for n, x in zip(extents, operands, strict=True)) <= 8 * BYTE_PRODUCTS // EXPONENTIALS
    )


def _scalar(op: ir.Operation) -> bool:
    """Whether an op computes or loads block-uniform scalars without side effects, and so may be repeated."""
    numbers = all(isinstance(v.type, ir.IntegerType | ir.IndexType | ir.FloatType) for v in op.results)
    return len(op.results) > 0 and numbers and not (may_write(op.name) and writes(op))


def _say_unrotated(loop: ir.Operation) -> None:
    """Emit a remark that products of consecutive iterations do not overlap."""
    ops = (op.operation for op in loop.regions[0].blocks[0].operations)
    dots = [op for op in ops if op.name == "kv.dot" and ROW_SUMS not in op.attributes]
    if not dots:
        return
    shared = [op for op in dots if (made := defining_op(op.opview.a)) is not None and made.name == "kv.tile_share"]
    why = (
        f"it has {len(dots)} products, not two"
        if len(dots) != 2
        else "weights are in shared memory, which the next iteration overwrites"
        if shared
        else "the second product does not add to a tile that only it changes"
    )
    remark(loop, "missed", f"products of iterations do not overlap: {why}", products=len(dots))


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        schedule, grouped = schedule_of(function), instruction_of(function) == MMA
        for loop in ops_named(function, "scf.for") if grouped and options.copies else ():
            prefetch_groups(loop)
        if grouped:
            continue
        products = schedule.get("overlap", True) if options.products is None else options.products
        # Inner loops first: a rewritten loop is erased.
        for loop in reversed(ops_named(function, "scf.for")):
            if options.copies and any(
                op.operation.name == "kv.consumer_wait" for op in loop.regions[0].blocks[0].operations
            ):
                prefetch_copies(loop)
            elif options.copies:
                finish_later(loop, schedule.get("staging_stages", SLOTS))
        for loop in reversed(ops_named(function, "scf.for")) if options.lookups else ():
            prefetch_lookups(loop)
        for loop in reversed(ops_named(function, "scf.for")):
            found = rotation_of(loop) if products else None
            if found is None and products:
                _say_unrotated(loop)
            if found is not None and performs(loop, "rotate"):
                remark(loop, "passed", "the second product of an iteration overlaps the first of the next")
                turns = schedule.get("ping_pong", False) and schedule.get("consumers", 1) > 1
                behind = schedule.get("behind", 0)
                Rotator(found, turns, schedule.get("one_wait", False), behind, options).rotate()
