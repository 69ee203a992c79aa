# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Choose how tiles are spread over threads and memory: from the products outwards.

A product's instruction decides where its operands lie and how its result is spread (``dialect.tile_layout``);
everything computed from it element by element, and the vectors that meet it, follow. ``wgmma``: warpgroups stacked in
64 rows each; B in shared memory, swizzled, and of 8-bit elements with its rows as columns there, as the instruction has
no other form; A in shared memory where it is loaded, in registers where it is computed.
``mma.sync``: warps stacked in 16 rows each; B in shared memory; A in registers, also rows of a buffer of no more than
128 columns. Where the schedule says ``across``, up to so many stacks of warps stand beside one another, each with other
columns of results, and A lies in shared memory, where it is computed too (``kv.tile_share``). By wgmma whole warpgroups
do, each with the columns of one instruction. Vectors along the rows are ``rows(wgmma)``, along the columns
``columns(wgmma:8)``, or of ``mma``; those of tables are ``spread`` over a warpgroup's threads.

Where all products have fewer rows than the warps have in one instruction, or the schedule says ``swapped``, operands
are swapped: of S = Q K^T the instruction computes S^T = K Q^T, whose rows are the many keys, and of O = P V it computes
O^T = V^T P^T. Both operands lie in shared memory, weights too. Tiles stay what they are: they have the layout
``transposed(wgmma:4)``, and their vectors ``rows(transposed(wgmma:4))``.

A cache's elements of 8 bits that only an instruction's A takes as 16, and no stacks beside others, stay what they are
in shared memory: threads convert them on the way to registers (``kv.tile_fragments``), and scales of rows multiply the
product.

A vector that is asked for along several is computed once for each. Tiles that only say which rows are loaded or stored
are computed element by element where they are used, and take no layout of their own. Which instruction it is says the
schedule's ``instruction``, or the target: wgmma where it has it.

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
from kvarn.dialect.ops.sharing import TileShareOp, atom_columns
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
from kvarn.lowering.rewrite import defining_op, ops_named, walk
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
BESIDE, FRAGMENTS = "kv.tile_beside", "kv.tile_fragments"
ALONE = 2  # in place of a dimension, of vectors that run along none
ROW_STEP, MOST_SWAPPED = 8, 256  # rows of swapped operands, which are columns of an instruction
_LEAVES = ("kv.tile_index", "tensor.splat", "arith.constant")


def wgmma_problems(a: ir.Value, b: ir.Value, transposed: bool, accumulators: Accumulators) -> list[str]:
    """Why a product cannot be wgmma's, one sentence each; empty when it can."""
    (m, k), n, across = shape(a), shape(b)[0 if transposed else 1], accumulators.across
    kind, found, stacked = str(element(a)), [], accumulators.warps // across // GROUP_WARPS
    if kind not in ("bf16", "f16", "f8E4M3FN"):
        found.append(f"operands must be bf16, f16 or f8E4M3FN, got {kind}")
    if m != WARPGROUP_ROWS * stacked:
        found.append(f"the tile must have 64 rows for each of the {stacked} consumer warpgroups, got {m}")
    step = K_STEP_BYTES if kind == "f8E4M3FN" else K_STEP_BYTES // 2
    if k % step or n % 8 or not 8 <= n <= 256 * across:
        found.append(f"K must be a multiple of {step} and N one of 8 up to {256 * across}, got {k} and {n}")
    least = COLUMN_STEP if transposed else atom_columns(element(b))  # columns at which B may be read from
    each = n // across
    if across > 1 and (element(a).width != 16 or n % across or each & (each - 1) or each < least):
        found.append(
            f"with {across} warpgroups beside one another elements must have 16 bits, and each warpgroup a power of "
            f"two of columns from {least} on, got {kind} and N = {n}"
        )
    return found


def swapped_problems(a: ir.Value, b: ir.Value, transposed: bool, accumulators: Accumulators) -> list[str]:
    """Why a product's operands cannot be swapped, one sentence each; empty when they can."""
    (m, terms), (n, k) = shape(a), shape(b) if transposed else shape(b)[::-1]
    kind, found, warps, by_wgmma = str(element(a)), [], accumulators.warps, accumulators.instruction == WGMMA
    kinds = ("bf16", "f16", "f8E4M3FN") if by_wgmma and transposed else ("bf16", "f16")
    if kind not in kinds or terms != k:
        found.append(f"operands must be {' or '.join(kinds)} and share K, got {kind}, {terms} and {k}")
    if m % ROW_STEP or m > MOST_SWAPPED:
        found.append(f"the tile's rows must be a multiple of {ROW_STEP} up to {MOST_SWAPPED}, got {m}")
    if n % (WARP_ROWS * warps):
        found.append(f"the tile must have 16 columns for each of the {warps} warps, time after time, got {n}")
    step = K_STEP_BYTES * 8 // element(a).width
    if k % step:
        found.append(f"K must be a multiple of {step}, got {k}")
    return found


def mma_problems(a: ir.Value, b: ir.Value, transposed: bool, accumulators: Accumulators) -> list[str]:
    """Why a product cannot be mma.sync's, one sentence each; empty when it can."""
    (m, k), n = shape(a), shape(b)[0 if transposed else 1]
    kind, found, warps, stacks = str(element(a)), [], accumulators.warps, accumulators.stacks(n)
    if kind not in ("bf16", "f16", "f32"):
        found.append(f"operands must be bf16, f16 or f32, got {kind}")
    if stacks == 1 and m != WARP_ROWS * warps:
        found.append(f"the tile must have 16 rows for each of the {warps} warps, got {m}")
    if stacks > 1 and (kind == "f32" or m % (WARP_ROWS * warps // stacks)):
        found.append(
            f"with {stacks} stacks of warps beside one another elements must have 16 bits, and the tile 16 rows for "
            f"each of the {warps // stacks} warps of a stack, got {kind} and {m}"
        )
    if k % COLUMN_STEP or n % (COLUMN_STEP * stacks):
        found.append(f"K and N must be multiples of {COLUMN_STEP} and {COLUMN_STEP * stacks}, got {k} and {n}")
    return found


@dataclass(frozen=True)
class Accumulators:
    """How a kernel's accumulators are spread: by which instruction, over how many warps, and stacks of them.

    Of up to ``across`` stacks beside one another a tile has as many as its columns allow. Vectors of rows are held by
    the threads of those with the most: each then has all rows that it has of any tile. ``swapped``: they are the
    instruction's of transposed tiles.
    """

    instruction: str
    warps: int
    across: int = 1
    swapped: bool = False

    def stacks(self, columns: int) -> int:
        """Stacks of a tile of so many columns: of warps, of fewer than two none are beside others."""
        found = self.across
        while self.instruction == MMA and found > 2 and columns % (COLUMN_STEP * found):
            found //= 2
        return found

    def tile(self, columns: int) -> str:
        return self._name(self.stacks(columns))

    def vector(self, dimension: int, extent: int) -> str:
        """The layout of a vector that runs along rows or columns, or of one that threads compute for all."""
        if dimension == ALONE:
            return f"spread:{self.warps}"
        if dimension == 0:
            return f"rows({self._name(self.across)})"
        name = self._name(self.stacks(extent))
        return f"columns({name})" if ":" in name else f"columns({name}:{self.warps})"

    @property
    def operand_a(self) -> str:
        """The layout of operand A of swapped operands whose rows are the instruction's."""
        return f"{ACCUMULATORS[self.instruction]}:{self.warps}"

    def _name(self, stacks: int) -> str:
        name = ACCUMULATORS[self.instruction]
        if self.swapped:
            return f"{TRANSPOSED}({name}:{self.warps})"
        return name if stacks == 1 else f"{name}:{self.warps // stacks}x{stacks}"


class Vectors:
    """Which vectors run along the rows and which along the columns: groups that element-by-element ops join."""

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
            fail(op, "meets vectors that run along different dimensions of tiles: compute it once for each")

    def layout(self, value: ir.Value) -> str:
        return self.accumulators.vector(self.dimension.get(self.find(value), 0), shape(value)[0])


class Dimensions:
    """Along which dimension of tiles vectors are asked for: 0 for rows, 1 for columns, ALONE for tables."""

    def __init__(self, function: ir.Operation) -> None:
        self.same = {v: handed for op in walk(function) for handed in handed_on(op) for v in handed}
        self.asked: dict[ir.Value, int] = {}  # of vectors whose uses have been looked at

    def of_use(self, op: ir.Operation, number: int) -> int | None:
        """What an op asks of an operand; None where any will do."""
        if op.name == "kv.tile_broadcast":
            return ir.IntegerAttr(op.attributes["dimension"]).value
        if op.name == "kv.tile_load_rows":
            return _along(op)
        if op.name in ("kv.tile_store_rows", "kv.tile_windows"):
            return 0
        if op.name == "kv.table_store":
            return ALONE
        if op.name == "kv.tile_scatter" or (_is_cheap(op) and op.results[0] not in self.asked):
            return next((d for v in op.operands if (d := self.fixed(v)) is not None), None)
        if _is_cheap(op):
            return self.asked[op.results[0]]
        return self.fixed(op.operands[number])

    def fixed(self, value: ir.Value, seen: set[ir.Value] | None = None) -> int | None:
        """The dimension of a vector that cannot be computed again: a fold of a tile, also on its way through loops."""
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
    """Along which dimension of products loaded rows run: of B along columns, where they are no rows of warpgroups."""
    return int(is_second_operand(load.result) and shape(load.result)[0] % WARPGROUP_ROWS > 0)


def _is_cheap(op: ir.Operation) -> bool:
    """Whether an op computes a vector that may as well be computed twice: arithmetic, positions, elements of memory."""
    known = op.name in (*_LEAVES, "kv.tile_gather") or is_elementwise(op)
    return known and len(op.results) == 1 and rank(op.results[0]) == 1


def separate_vectors(function: ir.Operation) -> None:
    """Compute a vector once for each dimension of tiles that it is asked for along, with what it is made of.

    Users come before what they use, so that each asks for one dimension. A copy stands where the op does: of elements
    of memory it reads what that one reads.
    """
    dimensions = Dimensions(function)
    for op in reversed(walk(function)[1:]):
        if not _is_cheap(op):
            continue
        asked: dict[int, list[ir.OpOperand]] = {}
        for use in op.results[0].uses:
            dimension = dimensions.of_use(use.owner.operation, use.operand_number)
            if dimension is not None:
                asked.setdefault(dimension, []).append(use)
        for number, dimension in enumerate(sorted(asked)):
            value = op.results[0]
            if number:
                with ir.InsertionPoint.after(op), op.location:
                    value = op.clone().results[0]
                for use in asked[dimension]:
                    use.owner.operands[use.operand_number] = value
            dimensions.asked[value] = dimension


def separate_leaves(function: ir.Operation) -> None:
    """Give every use its own position vector and constant, which cost nothing and may need another layout each."""
    for op in ops_named(function, *_LEAVES):
        if not op.results or rank(op.results[0]) != 1:
            continue
        uses = list(op.results[0].uses)
        for use in uses[1:]:
            with ir.InsertionPoint(op), op.location:
                use.owner.operands[use.operand_number] = op.clone().result


def handed_on(op: ir.Operation) -> list[list[ir.Value]]:
    """Values that structured control flow hands on to one another, and so need one layout: lists of the same value."""
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
    """The groups of a kernel's vectors."""
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
        elif op.name in ("kv.tile_gather", "kv.tile_scatter"):
            found.join(op, [v for v in (*op.operands, *op.results) if rank(v) == 1] or [op.operands[0]])
        elif is_elementwise(op) and rank(op.results[0]) == 1:
            found.join(op, [op.results[0], *(v for v in op.operands if is_tile(v))])
    return found


def place_operands(function: ir.Operation, accumulators: Accumulators) -> dict[ir.Value, str]:
    """The layouts of the tiles that lie in shared memory: those that products read there.

    A of warps that stand beside others is one of them, also where it is computed: each has some of its columns.
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
        if maker is None or maker.name not in (*LOADS, BESIDE, FRAGMENTS):
            fail(op, "needs a loaded tile as its second operand: only those lie in shared memory")
        along_k = str(element(b)) == "f8E4M3FN" and not op.opview.transpose_b.value
        place = SHARED_TRANSPOSED if along_k else SHARED
        if maker.name == BESIDE:
            shared.update(dict.fromkeys(maker.operands, SHARED))
        if maker.name != FRAGMENTS and shared.setdefault(b, place) != place:
            fail(op, "reads a tile of 8-bit elements along its rows and along its columns: load it once for each")
        whole = accumulators.across > 1 or swapped  # every warp reads all of A
        if by_wgmma or whole or not _held(a):
            shared.update(dict.fromkeys(loaded(a) or (), SHARED))
        if whole and loaded(a) is None:
            with ir.InsertionPoint(op), op.location:
                op.operands[0] = TileShareOp(a, tile_type(shape(a), element(a), SHARED)).operation.results[0]
            shared[op.operands[0]] = SHARED
    return shared


def keep_stored(function: ir.Operation, accumulators: Accumulators, target: str) -> None:
    """Let tiles of 8-bit elements that only an instruction's A takes be copied as they are stored.

    Threads convert them on the way to registers (``kv.tile_fragments``). Scales, one of each row, multiply results or,
    where rows are what is summed over, the weights.
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
            remark(load, "missed", f"tile is converted in shared memory, not by those who multiply it: {why}")
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
        if of_a and True not in summed:  # the others lie as tiles do that are computed
            set_layout(held, accumulators.operand_a)


def _weights(product: ir.Operation) -> ir.Operation | None:
    """The op that rounds what a product multiplies by to bf16; None of anything else."""
    made = defining_op(product.opview.a)
    return made if made is not None and made.name == "arith.truncf" and str(element(made.result)) == "bf16" else None


def scale_weights(product: ir.Operation, scales: ir.Value) -> None:
    """Let what a product multiplies by be multiplied by numbers of the rows of B, before it is rounded."""
    rounded = _weights(product)
    with ir.InsertionPoint(product), product.location:
        factors = tile_broadcast(scales, 1, shape(rounded.operands[0])[0])
        made = arith.truncf(rounded.result.type, arith.mulf(rounded.operands[0], factors))
    product.operands[0] = made


def scale_results(product: ir.Operation, scales: ir.Value, dimension: int) -> None:
    """Let a product's rows or columns be multiplied by numbers, before they are added to anything."""
    op = product.opview
    with ir.InsertionPoint(product), product.location:
        made = dot(op.a, op.b, transpose_b=op.transpose_b.value)
        made = arith.mulf(made, tile_broadcast(scales, dimension, shape(made)[1 - dimension]))
        made = made if op.c is None else arith.addf(op.c, made)
    product.result.replace_all_uses_with(made)
    product.erase()


def _held(a: ir.Value) -> bool:
    """Whether warps load A of mma.sync to registers, for all products of it: few rows of a buffer of 16 bits."""
    if element(a).width != 16:
        return False
    makers = [defining_op(v) for v in loaded(a) or ()]
    return shape(a)[1] <= MOST_HELD and not any(op is not None and op.name == "kv.tile_load" for op in makers)


def loaded(value: ir.Value) -> set[ir.Value] | None:
    """The values on the way from a load to here, if all that happens to it happens there; None of other values."""
    op = defining_op(value)
    if op is None:
        return None
    if op.name in LOADS:
        return {value}
    if op.name in ("arith.negf", "kv.tile_terms"):
        source = loaded(op.operands[0])
        return None if source is None else {value, *source}
    if op.name == "scf.if" and len(op.regions) == 2:
        number = list(op.results).index(value)
        ends = [r.blocks[0].operations[len(r.blocks[0].operations) - 1].operation.operands[number] for r in op.regions]
        sources = [loaded(end) for end in ends]
        return None if None in sources else {value}.union(*sources)
    return None


def set_layout(value: ir.Value, layout: str) -> None:
    """Give a value its layout; a constant's attribute has the type too."""
    value.set_type(with_layout(value, layout))
    op = defining_op(value)
    if op is not None and op.name == "arith.constant":
        op.attributes["value"] = ir.DenseElementsAttr.get_splat(value.type, splat_of_attribute(op.attributes["value"]))


def splat_of_attribute(attribute: ir.Attribute) -> Any:
    dense = ir.DenseElementsAttr(attribute)
    if not dense.is_splat:
        raise ValueError(f"constants of tiles must repeat one element, got {attribute}")
    return dense.get_splat_value()


def choose_instruction(function: ir.Operation, target: str) -> str:
    """The instruction of a kernel's products: what its schedule says, else the target's best; its schedule says it.

    Products of f32 are mma.sync's on every target.
    """
    schedule = ir.DictAttr(function.attributes["kv.schedule"]) if "kv.schedule" in function.attributes else ()
    entries = {named.name: named.attr for named in schedule}
    default = WGMMA if by_name(target).has("wgmma") else MMA
    of_f32 = any(str(element(op.opview.a)) == "f32" for op in ops_named(function, "kv.dot"))
    entries.setdefault("instruction", ir.StringAttr.get(MMA if of_f32 else default))
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
    """Whether operands are swapped: as the schedule says, else where all products have few rows; it says so then."""
    schedule, dots = schedule_of(function), ops_named(function, "kv.dot")
    few = [shape(op.opview.a)[0] < WARP_ROWS * warps and element(op.opview.a).width <= 16 for op in dots]
    found = schedule.get(SWAPPED, bool(few) and all(few) and schedule.get("across", 1) == 1)
    if found and SWAPPED not in schedule:
        entries = {named.name: named.attr for named in ir.DictAttr(function.attributes["kv.schedule"])}
        function.attributes["kv.schedule"] = ir.DictAttr.get({**entries, SWAPPED: ir.BoolAttr.get(True)})
    return found


@dataclass(frozen=True)
class Options:
    """target: whose instructions there are; stored: whether 8-bit elements that only operand A takes stay what they
    are in shared memory, and those who multiply convert them."""

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
            fail(function, f"swapped operands have all warps beside one another, got across {across}")
        accumulators = Accumulators(instruction, 4 * warpgroups, across, swapped)
        if options.stored and across == 1:  # of warps beside others each would convert what all read
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
                    set_layout(value, shared.get(value, accumulators.tile(shape(value)[1])))
                problem, maker = layout_problem(ir.RankedTensorType(value.type)), defining_op(value)
                if problem is not None and maker is not None:
                    extents = " x ".join(map(str, shape(value)))
                    fail(maker, f"makes a tile of {extents} that the kernel's warps cannot share: {problem}")
            elif rank(value) == 1:
                set_layout(value, vectors.layout(value))


__all__ = ["LOADS"]
