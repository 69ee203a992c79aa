# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Choose the register and shared-memory layout of every tile, starting from the products.

The MMA instruction determines the layouts of its operands and of its accumulator (``dialect.tile_layout``). Elementwise
results, and vectors that are combined with them, take the layout of the accumulator. The instruction is the schedule's
``instruction``; without this entry it is wgmma if the target has it and a loop counts the loads of each tile, otherwise
mma.sync.

1. *wgmma.* Each warpgroup has 64 rows of the accumulator. B is in shared memory, swizzled; 8-bit B is K-major there,
   the only form that the instruction takes. A is in shared memory if it is loaded, in registers if it is computed.
2. *mma.sync.* Each warp has 16 rows. B is in shared memory, A in registers, which includes query rows of up to 128
   columns.
3. *Columns divided* (``across`` in the schedule). That many groups of warps (mma.sync) or warpgroups (wgmma) have the
   same rows and different columns of the accumulator. A is then in shared memory, even if it is computed
   (``kv.tile_share``).
4. *Operands swapped* (``swapped`` in the schedule, or every product has fewer rows than one instruction of all warps).
   The instruction computes S^T = K Q^T instead of S = Q K^T, with the keys as its rows, and O^T = V^T P^T instead of
   O = P V. Both operands are in shared memory, P too. Tiles keep their shapes, with the layout
   ``transposed(wgmma:4)``.
5. *8-bit A.* If only operand A takes an 8-bit tile, and columns are not divided, the tile stays 8-bit in shared memory.
   Threads convert it as they load their fragments (``kv.tile_fragments``), and its scales multiply the product.

6. *Computed operands.* B is copied to shared memory if it is computed (``kv.tile_share``), and so is A if it is
   transposed: the instruction then reads it by columns. Rows that both products and arithmetic read are loaded to
   shared memory, and read back to registers before each use by arithmetic (``kv.tile_unshare``).

A vector with an element per row has the layout ``rows(wgmma)``, one with an element per column ``columns(wgmma:8)``
(or the same of ``mma``), and the vector that fills a lookup table is ``spread`` over the threads of a warpgroup. A
vector that is used along both dimensions is computed once for each, or converted if it is a reduction or a running sum.
Tiles of row indices and masks get no layout: they are evaluated per element where rows are loaded or stored.

Before:  %s = "kv.dot"(%q, %k) : (tensor<128x128xbf16>, tensor<128x128xbf16>) -> tensor<128x128xf32>
After:   %s = "kv.dot"(%q, %k) : (tensor<..., "shared">, tensor<..., "shared">) -> tensor<128x128xf32, "wgmma">
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith

from kvarn.dialect import types
from kvarn.dialect.ops.fragments import tile_fragments, tile_scales
from kvarn.dialect.ops.lines import SCANNED, convert_layout
from kvarn.dialect.ops.sharing import SHAREABLE, TileShareOp, atom_columns, tile_unshare
from kvarn.dialect.ops.tile import (
    COLUMN_STEP,
    SHARED,
    SHARED_TRANSPOSED,
    dot,
    layout_problem,
    tile_broadcast,
    tile_type,
)
from kvarn.dialect.tile_layout import GROUP_WARPS, WARP_ROWS
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, enclosing, is_inside, ops_named, walk
from kvarn.lowering.schedules.limits import MOST_HELD, why_not_by_mma
from kvarn.lowering.target import by_name
from kvarn.lowering.tiles import fragments
from kvarn.lowering.tiles.ir import (
    ACCUMULATORS,
    K_STEP_BYTES,
    MMA,
    SWAPPED,
    TRANSPOSED,
    WARPGROUP_ROWS,
    WGMMA,
    element,
    is_elementwise,
    is_second_operand,
    is_tile,
    layout_of,
    rank,
    schedule_of,
    shape,
    tiled,
    users,
    with_layout,
)

LOADS = ("kv.tile_load", "kv.tile_load_rows")
CONCATENATE, FRAGMENTS, TRANSPOSE = "kv.tile_concatenate", "kv.tile_fragments", "kv.tile_transpose"
ALONE = 2  # instead of a dimension: the vector that fills a table runs along neither rows nor columns
ROW_STEP, MOST_SWAPPED = 8, 256  # of query rows: with swapped operands they are the columns of an instruction
_READ_SHARED = ("kv.dot", TRANSPOSE, FRAGMENTS, "kv.tile_terms", "kv.tile_columns")
_REDUCED = ("kv.tile_reduce", "kv.tile_scan")  # whose vectors are not cheap to compute twice
_LEAVES = ("kv.tile_index", "tensor.splat", "arith.constant")


def wgmma_problems(a: ir.Value, b: ir.Value, transposed: bool, accumulators: Accumulators) -> list[str]:
    """Why wgmma cannot compute a product, one sentence per reason; empty if it can."""
    (m, k), n, across = shape(a), shape(b)[0 if transposed else 1], accumulators.across
    kind, found, stacked = str(element(a)), [], accumulators.warps // across // GROUP_WARPS
    if kind not in ("bf16", "f16", "f8E4M3FN"):
        found.append(f"operands must be bf16, f16 or f8E4M3FN, got {kind}")
    if m % (WARPGROUP_ROWS * stacked) or (across > 1 and m != WARPGROUP_ROWS * stacked):
        found.append(f"the tile must have 64 rows for each of the {stacked} consumer warpgroups, got {m}")
    if is_made_by(a, TRANSPOSE) and element(a).width != 16:
        found.append(f"a transposed first operand must have 16-bit elements, got {kind}: write kv.bf16(a).T")
    step = K_STEP_BYTES if kind == "f8E4M3FN" else K_STEP_BYTES // 2
    if k % step or n % 8 or not 8 <= n <= 256 * across:
        found.append(f"K must be a multiple of {step} and N one of 8 up to {256 * across}, got {k} and {n}")
    least = COLUMN_STEP if transposed else atom_columns(element(b))  # B can be read from multiples of this column
    each = n // across
    if across > 1 and (element(a).width != 16 or n % across or each & (each - 1) or each < least):
        found.append(
            f"with {across} warpgroups that divide columns elements must have 16 bits, and each warpgroup a power of "
            f"two of columns from {least} on, got {kind} and N = {n}"
        )
    return found


def swapped_problems(a: ir.Value, b: ir.Value, transposed: bool, accumulators: Accumulators) -> list[str]:
    """Why the operands of a product cannot be swapped, one sentence per reason; empty if they can."""
    (m, terms), (n, k) = shape(a), shape(b) if transposed else shape(b)[::-1]
    kind, found, warps, by_wgmma = str(element(a)), [], accumulators.warps, accumulators.instruction == WGMMA
    kinds = ("bf16", "f16", "f8E4M3FN") if by_wgmma and transposed else ("bf16", "f16")
    if kind not in kinds or terms != k:
        found.append(f"operands must be {' or '.join(kinds)} and share K, got {kind}, {terms} and {k}")
    if m % ROW_STEP or m > MOST_SWAPPED:
        found.append(f"the tile's rows must be a multiple of {ROW_STEP} up to {MOST_SWAPPED}, got {m}")
    if n % (WARP_ROWS * warps):
        found.append(f"the tile must have 16 columns for each of the {warps} warps, time after time, got {n}")
    if is_made_by(a, TRANSPOSE):
        found.append("the first operand must not be transposed: write kv.dot(b.T, a), of which it is the second")
    step = K_STEP_BYTES * 8 // element(a).width
    if k % step:
        found.append(f"K must be a multiple of {step}, got {k}")
    return found


def mma_problems(a: ir.Value, b: ir.Value, transposed: bool, accumulators: Accumulators) -> list[str]:
    """Why mma.sync cannot compute a product, one sentence per reason; empty if it can."""
    (m, k), n = shape(a), shape(b)[0 if transposed else 1]
    kind, found, warps, stacks = str(element(a)), [], accumulators.warps, accumulators.stacks(n)
    if kind not in ("bf16", "f16", "f32", "i8"):
        found.append(f"operands must be bf16, f16, f32 or i8, got {kind}: write kv.bf16(x)")
    if kind == "i8" and not transposed:
        found.append("of i8 both operands are read along K: write kv.dot(a, b.T), with K as the columns of b")
    if stacks == 1 and (m % (WARP_ROWS * warps) or (kind == "f32" and m != WARP_ROWS * warps)):
        found.append(f"the tile must have 16 rows for each of the {warps} warps, got {m}")
    if stacks > 1 and (kind == "f32" or m % (WARP_ROWS * warps // stacks)):
        found.append(
            f"with {stacks} stacks of warps that divide columns elements must have 16 bits, and the tile 16 rows for "
            f"each of the {warps // stacks} warps of a stack, got {kind} and {m}"
        )
    if is_made_by(a, TRANSPOSE) and element(a).width != 16:
        found.append(f"a transposed first operand must have 16-bit elements, got {kind}: write kv.bf16(a).T")
    if kind == "i8" and k % K_STEP_BYTES:
        found.append(f"K must be a multiple of {K_STEP_BYTES}, got {k}")
    if k % COLUMN_STEP or n % (COLUMN_STEP * stacks):
        found.append(f"K and N must be multiples of {COLUMN_STEP} and {COLUMN_STEP * stacks}, got {k} and {n}")
    return found


@dataclass(frozen=True)
class Accumulators:
    """The accumulator layout of a kernel: its instruction and how its warps divide rows and columns.

    Attributes
    ----------
    instruction : str
        ``wgmma`` or ``mma.sync``.
    warps : int
        Of the consumers.
    across : int
        Stacks of warps (warps with different rows) that divide the columns of a tile, at most: a narrow tile has
        fewer. Vectors with an element per row use ``across`` stacks, so that a thread has every row that it needs for
        any tile.
    swapped : bool
        Whether the instruction computes the transpose of each tile.
    """

    instruction: str
    warps: int
    across: int = 1
    swapped: bool = False

    def stacks(self, columns: int) -> int:
        """The number of stacks that divide this many columns; mma.sync halves ``across`` until it fits."""
        found = self.across
        while self.instruction == MMA and found > 2 and columns % (COLUMN_STEP * found):
            found //= 2
        return found

    def tile(self, rows: int, columns: int) -> str:
        return self._name(self.stacks(columns), rows)

    def vector(self, dimension: int, extent: int) -> str:
        """The layout of a vector with an element per row (dimension 0) or per column (1), or that fills a table."""
        if dimension == ALONE:
            return f"spread:{self.warps}"
        if dimension == 0:
            return f"rows({self._name(self.across, extent)})"
        name = self._name(self.stacks(extent), WARP_ROWS * self.warps)
        return f"columns({name})" if ":" in name else f"columns({name}:{self.warps})"

    @property
    def operand_a(self) -> str:
        """The layout of a tile that is operand A, in registers, once operands are swapped."""
        return f"{ACCUMULATORS[self.instruction]}:{self.warps}"

    def _name(self, stacks: int, rows: int) -> str:
        name = ACCUMULATORS[self.instruction]
        if self.swapped:
            return f"{TRANSPOSED}({name}:{self.warps})"
        if stacks == 1:
            return name if rows == WARP_ROWS * self.warps else f"{name}:{self.warps}"
        return f"{name}:{self.warps // stacks}x{stacks}"


class Vectors:
    """Which vectors run along rows and which along columns: a union-find over elementwise operations."""

    def __init__(self, accumulators: Accumulators) -> None:
        self.accumulators = accumulators
        self.parent: dict[ir.Value, ir.Value] = {}
        self.dimension: dict[ir.Value, int] = {}

    def find(self, value: ir.Value) -> ir.Value:
        while self.parent.get(value, value) != value:
            value = self.parent[value]
        return value

    def join(self, op: ir.Operation, values: list[ir.Value]) -> None:
        first, *rest = (self.find(v) for v in values)
        for other in rest:
            if other == first:
                continue
            self.parent[other] = first
            if other in self.dimension:
                self.run_along(op, first, self.dimension.pop(other))

    def run_along(self, op: ir.Operation, value: ir.Value, dimension: int) -> None:
        root = self.find(value)
        if self.dimension.setdefault(root, dimension) != dimension:
            fail(op, "combines a vector along rows with one along columns: compute it once for each dimension")

    def layout(self, value: ir.Value) -> str:
        return self.accumulators.vector(self.dimension.get(self.find(value), 0), shape(value)[0])


class Dimensions:
    """The dimension along which each use needs a vector: 0 for rows, 1 for columns, ALONE for tables."""

    def __init__(self, function: ir.Operation) -> None:
        self.same = {v: handed for op in walk(function) for handed in handed_on(op) for v in handed}
        self.asked: dict[ir.Value, int] = {}  # by vector whose uses have been visited

    def of_use(self, op: ir.Operation, number: int) -> int | None:
        """The dimension that an op needs of an operand; None if it accepts either."""
        if op.name == "kv.tile_broadcast":
            return ir.IntegerAttr(op.attributes["dimension"]).value
        if op.name == "kv.tile_load_rows":
            return _along(op)
        if op.name in ("kv.tile_store_rows", "kv.tile_windows"):
            return 0
        if op.name == "kv.tile_scan":
            return self.asked.get(op.results[0])
        if op.name == "kv.table_store":
            return ALONE
        if op.name == "kv.tile_scatter" or (_is_cheap(op) and op.results[0] not in self.asked):
            return next((d for v in op.operands if (d := self.fixed(v)) is not None), None)
        if _is_cheap(op):
            return self.asked[op.results[0]]
        return self.fixed(op.operands[number])

    def fixed(self, value: ir.Value, seen: set[ir.Value] | None = None) -> int | None:
        """The dimension of a vector that cannot be recomputed: a reduction of a tile, also carried through a loop."""
        seen = set() if seen is None else seen
        if rank(value) != 1 or value in seen:
            return None
        seen.add(value)
        op = defining_op(value)
        if op is not None and op.name == "kv.tile_reduce":
            return 1 - ir.IntegerAttr(op.attributes["axis"]).value
        sources = self.same.get(value, ()) if op is None or op.regions else op.operands if _is_cheap(op) else ()
        return next((d for v in sources if (d := self.fixed(v, seen)) is not None), None)


def _along(load: ir.Operation) -> int:
    """The dimension of the row indices of a load: columns (1) for a B whose row count is not a multiple of 64."""
    return int(is_second_operand(load.result) and shape(load.result)[0] % WARPGROUP_ROWS > 0)


def _is_cheap(op: ir.Operation) -> bool:
    """Whether an op computes a vector that is cheap to recompute: arithmetic, indices, gathered elements."""
    known = op.name in (*_LEAVES, "kv.tile_gather") or is_elementwise(op)
    return known and len(op.results) == 1 and rank(op.results[0]) == 1


def separate_vectors(function: ir.Operation) -> None:
    """Clone vectors that are used along both dimensions, together with their operands, so that each has one.

    The walk visits users before definitions: a cloned user then needs one dimension of its operands. The clone is
    inserted right after the original, so that a cloned gather reads the same memory state. Reductions and running sums
    are not cheap: their results are converted (``kv.convert_layout``).
    """
    dimensions = Dimensions(function)
    for op in reversed(walk(function)[1:]):
        kept = op.name in _REDUCED and rank(op.results[0]) == 1 and str(element(op.results[0])) in SCANNED
        if not _is_cheap(op) and not kept:
            continue
        asked: dict[int, list[ir.OpOperand]] = {}
        for use in op.results[0].uses:
            dimension = dimensions.of_use(use.owner.operation, use.operand_number)
            if dimension is not None:
                asked.setdefault(dimension, []).append(use)
        if kept:
            fixed = dimensions.fixed(op.results[0])
            own = min(asked, default=None) if fixed is None else fixed
            if own is not None:
                dimensions.asked[op.results[0]] = own
            for dimension in asked.keys() - {own}:
                with ir.InsertionPoint.after(op), op.location:
                    value = convert_layout(op.results[0])
                for use in asked[dimension]:
                    use.owner.operands[use.operand_number] = value
            continue
        for number, dimension in enumerate(sorted(asked)):
            value = op.results[0]
            if number:
                with ir.InsertionPoint.after(op), op.location:
                    value = op.clone().results[0]
                for use in asked[dimension]:
                    use.owner.operands[use.operand_number] = value
            dimensions.asked[value] = dimension


def separate_leaves(function: ir.Operation) -> None:
    """Clone index vectors and constants per use: they cost nothing, and each use may need another layout."""
    for op in ops_named(function, *_LEAVES):
        if not op.results or rank(op.results[0]) != 1:
            continue
        uses = list(op.results[0].uses)
        for use in uses[1:]:
            with ir.InsertionPoint(op), op.location:
                use.owner.operands[use.operand_number] = op.clone().result


def handed_on(op: ir.Operation) -> list[list[ir.Value]]:
    """Groups of values that structured control flow passes to one another, which therefore need one layout."""
    if op.name not in ("scf.for", "scf.if", "scf.while"):
        return []
    blocks = [b for r in op.regions for b in r.blocks]
    ends = [list(b.operations[len(b.operations) - 1].operation.operands) for b in blocks]
    arguments = [list(b.arguments) for b in blocks]
    if op.name == "scf.for":
        same = [zip(op.results, list(op.operands)[3:], arguments[0][1:], ends[0], strict=True)]
    elif op.name == "scf.if":
        same = [zip(op.results, *ends, strict=True)] if op.results else []
    else:
        same = [zip(op.operands, arguments[0], ends[1], strict=True)]
        same.append(zip(op.results, arguments[1], ends[0][1:], strict=True))
    return [list(values) for handed in same for values in handed]


def vectors_of(function: ir.Operation, accumulators: Accumulators) -> Vectors:
    """The vectors of a kernel, grouped by the operations that need them in one layout."""
    found = Vectors(accumulators)
    for op in walk(function):
        for same in handed_on(op):
            if rank(same[0]) == 1:
                found.join(op, same)
        if op.name == "kv.tile_broadcast":
            found.run_along(op, op.operands[0], ir.IntegerAttr(op.attributes["dimension"]).value)
        elif op.name == "kv.tile_reduce":
            found.run_along(op, op.results[0], 1 - ir.IntegerAttr(op.attributes["axis"]).value)
        elif op.name == "kv.tile_load_rows":
            for rows in op.operands[1:]:
                found.run_along(op, rows, _along(op))
        elif op.name == "kv.table_store":
            found.run_along(op, op.operands[0], ALONE)
        elif op.name == "kv.tile_windows":
            found.run_along(op, op.operands[1], 0)
        elif op.name == "kv.tile_weights":
            for rows in op.operands[1:]:
                found.run_along(op, rows, 0)
        elif op.name == "kv.tile_scan" and rank(op.results[0]) == 1:
            found.join(op, [op.results[0], op.operands[0]])
        elif op.name in ("kv.tile_gather", "kv.tile_scatter"):
            found.join(op, [v for v in (*op.operands, *op.results) if rank(v) == 1] or [op.operands[0]])
        elif is_elementwise(op) and rank(op.results[0]) == 1:
            found.join(op, [op.results[0], *(v for v in op.operands if is_tile(v))])
    return found


def outside_loops(op: ir.Operation, value: ir.Value) -> ir.Operation:
    """The outermost loop around an operation in which a value does not change, or the operation itself."""
    owner = value.owner
    maker = (owner.owner if isinstance(owner, ir.Block) else owner).operation
    while (loop := enclosing(op, "scf.for")) is not None and not is_inside(maker, loop):
        op = loop
    return op


def place_operands(function: ir.Operation, accumulators: Accumulators) -> dict[ir.Value, str]:
    """The shared-memory layouts of the operands that products read from shared memory.

    Where warps divide columns, or operands are swapped, every warp reads all of A: a computed A is then copied to
    shared memory (``kv.tile_share``), before the loops that do not change it.
    """
    shared: dict[ir.Value, str] = {}
    for op in ops_named(function, "kv.dot"):
        a, b, transposed = op.opview.a, op.opview.b, op.opview.transpose_b.value
        of = a, b, transposed
        by_wgmma, swapped = accumulators.instruction == WGMMA, accumulators.swapped
        if swapped:
            problems = swapped_problems(*of, accumulators)
        else:
            problems = (wgmma_problems if by_wgmma else mma_problems)(*of, accumulators)
        for problem in problems:
            fail(op, f"has no instruction on this target{' with swapped operands' if swapped else ''}: {problem}")
        maker = defining_op(b)
        if maker is None or (maker.name not in (*LOADS, FRAGMENTS) and not (by_wgmma and _copied_as_one(maker))):
            if str(element(b)) not in SHAREABLE:
                why = f"computed by arithmetic, which must be one of {', '.join(SHAREABLE)}, got {element(b)}"
                fail(op, f"takes a second operand {why}: convert it, as in kv.bf16(x)")
            b = share(op, 1)
            maker = defining_op(b)
        along_k = str(element(b)) == "f8E4M3FN" and not op.opview.transpose_b.value
        place = SHARED_TRANSPOSED if along_k else SHARED
        if maker.name == CONCATENATE:
            shared.update(dict.fromkeys(maker.operands, SHARED))
        if maker.name != FRAGMENTS and shared.setdefault(b, place) != place:
            fail(op, "reads a tile of 8-bit elements along its rows and along its columns: load it once for each")
        if is_made_by(a, TRANSPOSE):
            place_transposed(op, shared)
            continue
        whole = accumulators.across > 1 or swapped  # every warp reads all of A
        if by_wgmma or whole or not _held(a, accumulators.warps):
            shared.update(dict.fromkeys(loaded(a) or (), SHARED))
        # What a loop does not change would take registers of every iteration.
        unchanged = by_wgmma and element(a).width == 16 and outside_loops(op, a) != op
        if (whole or unchanged or str(element(a)) == "i8") and loaded(a) is None:
            shared[share(op, 0)] = SHARED
    place_rows(function, shared, accumulators)
    return shared


def _copied_as_one(op: ir.Operation) -> bool:
    """Whether two tiles side by side are copied to shared memory as one: rows of a buffer, then tokens of a cache.

    A producer copies them.
    """
    producer = schedule_of(enclosing(op, "gpu.func")).get("producer", False)
    return (
        op.name == CONCATENATE
        and producer
        and all(
            (maker := defining_op(v)) is not None and maker.name == name and len(list(v.uses)) == 1
            for v, name in zip(op.operands, ("kv.tile_load_rows", "kv.tile_load"), strict=True)
        )
    )


def share(op: ir.Operation, number: int) -> ir.Value:
    """Copy a computed operand of an op to shared memory, before the loops that do not change it.

    It is copied once for all products of a block that read it.
    """
    value = op.operands[number]
    place = outside_loops(op, value)
    maker = next((user for user in users(value) if user.name == "kv.tile_share" and user.block == place.block), None)
    if maker is not None:
        op.operands[number] = maker.results[0]
        return maker.results[0]
    with ir.InsertionPoint(place), op.location:
        made = TileShareOp(value, tile_type(shape(value), element(value), SHARED)).operation.results[0]
    op.operands[number] = made
    return made


def place_transposed(product: ir.Operation, shared: dict[ir.Value, str]) -> None:
    """Place a transposed operand A, which the instruction reads by columns of a tile in shared memory."""
    transpose = defining_op(product.opview.a)
    source = transpose.operands[0]
    inside = loaded(source)
    if inside is None:
        share(transpose, 0)
        inside = {transpose.operands[0]}
    for value in inside:
        if shared.setdefault(value, SHARED) != SHARED:
            fail(product, "reads a tile of 8-bit elements along its rows and along its columns: load it once for each")
    shared[transpose.result] = SHARED_TRANSPOSED


def place_rows(function: ir.Operation, shared: dict[ir.Value, str], accumulators: Accumulators) -> None:
    """Place rows of buffers that arithmetic reads in shared memory, and read them to registers for each use.

    mma.sync loads 16-bit rows to registers at once, if no product reads them from shared memory.
    """
    for load in ops_named(function, *LOADS):
        value = load.result
        if value not in shared:
            held = accumulators.instruction == MMA and _held(value, accumulators.warps)
            if load.name == "kv.tile_load" or (held and all(_takes_vectors(user) for user in users(value))):
                continue
            shared[value] = SHARED
        for use in list(value.uses):
            user, number = use.owner.operation, use.operand_number
            results = user.parent.operation.results if user.name == "scf.yield" else user.results
            if user.name in _READ_SHARED or any(result in shared for result in results):
                continue
            with ir.InsertionPoint(user), load.location:
                user.operands[number] = tile_unshare(value)


def keep_stored(function: ir.Operation, accumulators: Accumulators, target: str) -> None:
    """Keep 8-bit tiles that only operand A takes unconverted in shared memory.

    Threads convert them as they load fragments (``kv.tile_fragments``). The scales, one per token, multiply the result
    or, if the product sums over tokens (P V), the weights P.
    """
    of_a = 1 if accumulators.swapped else 0
    for load in ops_named(function, "kv.tile_load"):
        op, uses = load.opview, list(load.result.uses)
        spec, wanted, (rows, columns) = types.spec_of(op.cache.type), element(load.result), shape(load.result)
        dots = [user for user in users(load.result) if user.name == "kv.dot"]
        if spec.data_dtype.bits != 8 or wanted.width == 8 or not dots or len(dots) < len(uses):
            continue
        summed = {of_a == 1 and not product.opview.transpose_b.value for product in dots}
        if any(use.operand_number != of_a for use in uses) or len(summed) > 1:
            continue
        why = fragments.why_not(op, by_name(target), accumulators.instruction == WGMMA, 32 * accumulators.warps)
        if why is None and spec.quantized and True in summed and any(_weights(product) is None for product in dots):
            why = "its scales cannot multiply weights of bf16 before they are rounded"
        if why is not None:
            remark(load, "missed", f"tile is converted in shared memory, not in registers: {why}")
            continue
        remark(load, "passed", f"tile of {rows}x{columns} is converted in registers, from {spec.data_dtype.name}")
        scales = None
        with ir.InsertionPoint(load), load.location:
            if spec.quantized:
                of_tokens = op.cache, op.batch, op.head, op.first, op.count
                scales = tile_scales(of_tokens, op.first_column.value, rows)
        with ir.InsertionPoint.after(load), load.location:
            held = tile_fragments(load.result, wanted)
        for product in dots:
            product.operands[of_a] = held
            if scales is not None:
                scale_weights(product, scales) if True in summed else scale_results(product, scales, of_a)
        load.result.set_type(tile_type((rows, columns), ir.Type.parse(spec.data_dtype.mlir), SHARED))
        if of_a and True not in summed:  # a tile that is summed over has the layout of computed tiles
            set_layout(held, accumulators.operand_a)


def _weights(product: ir.Operation) -> ir.Operation | None:
    """The op that rounds A of a product to bf16; None if A is made otherwise."""
    made = defining_op(product.opview.a)
    return made if made is not None and made.name == "arith.truncf" and str(element(made.result)) == "bf16" else None


def scale_weights(product: ir.Operation, scales: ir.Value) -> None:
    """Multiply A of a product by scales of the rows of B, before A is rounded."""
    rounded = _weights(product)
    with ir.InsertionPoint(product), product.location:
        factors = tile_broadcast(scales, 1, shape(rounded.operands[0])[0])
        made = arith.truncf(rounded.result.type, arith.mulf(rounded.operands[0], factors))
    product.operands[0] = made


def scale_results(product: ir.Operation, scales: ir.Value, dimension: int) -> None:
    """Multiply the rows or columns of a product by scales, before they are added to its accumulator."""
    op = product.opview
    with ir.InsertionPoint(product), product.location:
        made = dot(op.a, op.b, transpose_b=op.transpose_b.value)
        made = arith.mulf(made, tile_broadcast(scales, dimension, shape(made)[1 - dimension]))
        made = made if op.c is None else arith.addf(op.c, made)
    product.result.replace_all_uses_with(made)
    product.erase()


def _takes_vectors(op: ir.Operation) -> bool:
    """Whether an op needs no type of a loaded tile once it is the vector of a thread's elements."""
    return op.name in ("kv.dot", "kv.cast", "scf.yield") or is_elementwise(op)


def is_made_by(value: ir.Value, name: str) -> bool:
    maker = defining_op(value)
    return maker is not None and maker.name == name


def _held(a: ir.Value, warps: int) -> bool:
    """Whether warps load A of mma.sync to registers once for all its products: 16-bit query rows that fit them."""
    if element(a).width != 16 or shape(a)[0] != WARP_ROWS * warps:
        return False
    makers = [defining_op(v) for v in loaded(a) or ()]
    return shape(a)[1] <= MOST_HELD and not any(op is not None and op.name == "kv.tile_load" for op in makers)


def loaded(value: ir.Value) -> set[ir.Value] | None:
    """The values from a load to this value, if all ops between work in shared memory; None if there is another op."""
    op = defining_op(value)
    if op is None:
        return None
    if op.name in LOADS:
        return {value}
    if op.name in ("arith.negf", "kv.tile_terms"):  # in place
        if any(user != op and not _is_alternative(user, op) for user in users(op.operands[0])):
            return None
        source = loaded(op.operands[0])
        return None if source is None else {value, *source}
    if op.name == "scf.if" and len(op.regions) == 2:
        number = list(op.results).index(value)
        ends = [r.blocks[0].operations[len(r.blocks[0].operations) - 1].operation.operands[number] for r in op.regions]
        sources = [loaded(end) for end in ends]
        return None if None in sources else {value}.union(*sources)
    return None


def _is_alternative(end: ir.Operation, op: ir.Operation) -> bool:
    """Whether ``end`` is the end of the other branch of a condition around ``op``: only one of them runs."""
    return end.name == "scf.yield" and end.parent == op.parent and end.block != op.block


def set_layout(value: ir.Value, layout: str) -> None:
    """Set the layout of a value; a constant carries its type in its attribute too."""
    value.set_type(with_layout(value, layout))
    op = defining_op(value)
    if op is not None and op.name == "arith.constant":
        op.attributes["value"] = ir.DenseElementsAttr.get_splat(value.type, splat_of_attribute(op.attributes["value"]))


def splat_of_attribute(attribute: ir.Attribute) -> Any:
    dense = ir.DenseElementsAttr(attribute)
    if not dense.is_splat:
        raise ValueError(f"constants of tiles must repeat one element, got {attribute}")
    return dense.get_splat_value()


def why_uncounted(function: ir.Operation) -> tuple[ir.Operation, str] | None:
    """(a load of a tile for a product, why no loop counts it); None if ``select-kv-copies`` can count all loads."""
    for load in ops_named(function, "kv.tile_load"):
        if not any(user.name == "kv.dot" for user in users(load.result)):
            continue
        around, parent = [], load.parent
        while parent is not None and parent.operation.name != "gpu.func":
            around.append(parent.operation.name)
            parent = parent.operation.parent
        loops = [number for number, name in enumerate(around) if name in ("scf.for", "scf.while")]
        if any(around[number] == "scf.while" for number in loops):
            return load, "a while loop loads it"
        if loops and loops != list(range(len(loops))):
            return load, "a condition in a loop decides whether it is loaded"
        if len(loops) > 2:
            return load, f"{len(loops)} loops are nested around it"
    return None


def choose_instruction(function: ir.Operation, target: str) -> str:
    """The MMA instruction of a kernel: its schedule's, otherwise the target's best, which is written to the schedule.

    f32 (by tf32) and i8 are multiplied by mma.sync on every target. So are tiles whose loads no loop counts: stages for
    wgmma have mbarriers, whose phases follow from the loop's variable.
    """
    schedule = ir.DictAttr(function.attributes["kv.schedule"]) if "kv.schedule" in function.attributes else ()
    entries = {named.name: named.attr for named in schedule}
    default = WGMMA if by_name(target).has("wgmma") else MMA
    of_f32 = any(str(element(op.opview.a)) in ("f32", "i8") for op in ops_named(function, "kv.dot"))
    given = ir.StringAttr(entries["instruction"]).value if "instruction" in entries else None
    by_wgmma = default == WGMMA and not of_f32 and given in (None, WGMMA)
    uncounted = why_uncounted(function) if by_wgmma else None
    if uncounted is not None:
        load, why = uncounted
        narrow = any(element(op.opview.a).width == 8 for op in ops_named(function, "kv.dot"))
        if given or narrow:
            what = "by wgmma" if given else "of 8 bits"
            fail(load, f"is a tile of a product {what}, which every iteration of a for loop must load, but {why}")
        remark(load, "missed", f"products are computed by mma.sync, not by wgmma: {why}")
    entries.setdefault("instruction", ir.StringAttr.get(MMA if of_f32 or uncounted else default))
    function.attributes["kv.schedule"] = ir.DictAttr.get(entries)
    found = ir.StringAttr(entries["instruction"]).value
    if found not in ACCUMULATORS:
        fail(function, f"instruction must be one of {', '.join(ACCUMULATORS)}, got {found!r}")
    if found == WGMMA and default != WGMMA:
        fail(function, f"instruction wgmma needs a target that has it, got {target}")
    problem = why_not_by_mma(schedule_of(function)) if found == MMA else None
    if problem is not None:
        fail(function, f"schedule for {target}: {problem}")
    return found


def choose_operands(function: ir.Operation, warps: int) -> bool:
    """Whether operands are swapped: as the schedule says, otherwise if all products have few rows; sets the entry."""
    schedule, dots = schedule_of(function), ops_named(function, "kv.dot")
    few = [shape(op.opview.a)[0] < WARP_ROWS * warps and element(op.opview.a).width <= 16 for op in dots]
    found = schedule.get(SWAPPED, bool(few) and all(few) and schedule.get("across", 1) == 1)
    if found and SWAPPED not in schedule:
        entries = {named.name: named.attr for named in ir.DictAttr(function.attributes["kv.schedule"])}
        function.attributes["kv.schedule"] = ir.DictAttr.get({**entries, SWAPPED: ir.BoolAttr.get(True)})
    return found


@dataclass(frozen=True)
class Options:
    """target: whose instructions are used; stored: whether 8-bit tiles that only operand A takes stay unconverted in
    shared memory, to be converted as fragments are loaded."""

    target: str = "sm_90a"
    stored: bool = True


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        threads = next(iter(ir.DenseI32ArrayAttr(function.attributes["kv.block"])))
        warpgroups = schedule_of(function).get("consumers", threads // 128)
        instruction = choose_instruction(function, options.target)
        across = schedule_of(function).get("across", 1)
        stacks = warpgroups if instruction == WGMMA else 4 * warpgroups
        if stacks % across:
            fail(function, f"across must divide the {stacks} warpgroups by {WGMMA}, or warps by {MMA}, got {across}")
        swapped = choose_operands(function, 4 * warpgroups)
        if swapped and across > 1:
            fail(function, f"across must be 1 with swapped operands, got {across}")
        accumulators = Accumulators(instruction, 4 * warpgroups, across, swapped)
        if options.stored and across == 1:  # warps that divide columns would each convert all of A
            keep_stored(function, accumulators, options.target)
        shared = place_operands(function, accumulators)
        separate_vectors(function)
        separate_leaves(function)
        vectors = vectors_of(function, accumulators)
        inside = walk(function)[1:]
        values = [v for op in inside for v in op.results]
        values += [a for op in inside for r in op.regions for b in r.blocks for a in b.arguments]
        for value in values:
            if rank(value) == 2:
                if layout_of(value.type) is None:
                    set_layout(value, shared.get(value, accumulators.tile(*shape(value))))
                problem, maker = layout_problem(ir.RankedTensorType(value.type)), defining_op(value)
                if problem is not None and maker is not None:
                    extents = " x ".join(map(str, shape(value)))
                    instead = ": load these rows by themselves" if maker.name == "kv.tile_slice" else ""
                    if instead and swapped:
                        instead = ", which are the tile's columns: of products with so few rows slice by as many"
                    fail(maker, f"makes a tile of {extents} that the kernel's warps cannot share: {problem}{instead}")
            elif rank(value) == 1:
                set_layout(value, vectors.layout(value))


__all__ = ["LOADS"]
