# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compute functions of the distance of query and key once per distance, since they repeat along a tile's diagonals.

A tile of 128 query rows (32 tokens of 4 heads) and 128 keys has 16384 elements and 159 distances. A function of a
position difference and a head is computed per distance and head, distributed over a warpgroup's threads, and the tile's
rows become windows of this table (``kv.tile_windows``). This applies to functions that read arrays; pure arithmetic is
faster per element, since without a table's memory tiles have more keys.

The distances and heads that a tile may have follow from the ops that compute positions, up to an upper bound of their
number (:func:`spread_of`); the kernel computes the first and the last before the loop. A number between these may not
occur in the tile, so arrays are indexed by distances only if the index is clamped to their extents.

Before:  %d = %q - %k ; %i = kv.tile_gather %buckets, %d ; %bias = kv.tile_gather %table, %h, %i : tensor<128x128xf32>
         %y = %x + %bias
After:   %t = kv.make_table {length = 768}
         %n = kv.tile_index : tensor<1024xi32>                    // 256 numbers of a head, then the next head's
         %d = splat(high(%q) - %first_key) - %n % 256
         %i = kv.tile_gather %buckets, %d ; %bias = kv.tile_gather %table, %h + %n / 256, %i : tensor<1024xf32>
         kv.table_store %bias, %t {span = 256, pitch = 168}       // of each head the first 168
         %y = %x + kv.tile_windows %t, (%h - low(%h)) * 168 + high(%q) - %q
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, scf

from kvarn.dialect.dtypes import i32
from kvarn.dialect.ops.common import i64_attr
from kvarn.dialect.ops.tables import MakeTableOp, TableStoreOp, TileWindowsOp
from kvarn.dialect.ops.tile import TileIndexOp, tile_type
from kvarn.dsl import ptx
from kvarn.dsl.values import Value
from kvarn.lowering.index import const
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.remarks import remark
from kvarn.lowering.rewrite import defining_op, enclosing, erase_unused, is_inside, walk
from kvarn.lowering.rewrite_counts import performs
from kvarn.lowering.tiles.differences import Difference, difference_of
from kvarn.lowering.tiles.ir import (
    WARPGROUP,
    WARPGROUP_ROWS,
    attributes_of,
    backward,
    constant_int,
    element,
    is_elementwise,
    is_position,
    is_tile,
    rank,
    schedule_of,
    shape,
    splat_of,
    splat_tile,
    tiled,
    users,
)
from kvarn.lowering.tiles.windows import bytes_of, extents, span_of

from .split_kv_loops import Bounds, Linear, Unknown, is_counted, writes_buffers

SAVES = 4  # the fewest elements of a warpgroup's rows per table element
DISTANCE, HEAD = "distance", "head"
_COMPUTED = ("math.", "arith.div", "arith.rem")


@dataclass(frozen=True)
class Options:
    """most: bytes of shared memory for all tables of a kernel, if its schedule leaves as many; computed: also functions
    that read no array, but have math functions or divisions."""

    most: int = 32768
    computed: bool = False


class Impossible(Exception):
    """Why a tile is no function of a distance and a head."""


# --- the number of values of an index -----------------------------------------------------------------


def spread_of(value: ir.Value) -> int:
    """An upper bound of an i32 vector's maximum minus its minimum; Impossible if there is none."""
    op = defining_op(value)
    if not is_tile(value) or constant_int(value) is not None:
        return 0
    if op is None:
        raise Impossible("a position that is a block argument")
    if op.name == "tensor.splat":
        return 0
    if op.name == "kv.tile_index":
        return shape(value)[0] - 1
    if op.name in ("arith.addi", "arith.subi"):
        return spread_of(op.operands[0]) + spread_of(op.operands[1])
    if op.name in ("arith.minsi", "arith.maxsi"):
        return max(spread_of(op.operands[0]), spread_of(op.operands[1]))
    by = constant_int(op.operands[1]) if len(op.operands) == 2 else None
    if by is not None:
        if op.name in ("arith.divsi", "arith.divui", "arith.floordivsi") and by > 0:
            return -(-spread_of(op.operands[0]) // by)
        if op.name in ("arith.shrsi", "arith.shrui") and 0 <= by < 32:
            return -(-spread_of(op.operands[0]) // (1 << by))
        if op.name == "arith.andi" and by >= 0:
            return by
        if op.name in ("arith.remsi", "arith.remui") and by > 0:
            return by - 1 if op.name == "arith.remui" or is_counted(op.operands[0]) else 2 * (by - 1)
    raise Impossible(f"a position by {op.name}")


def _known(value: ir.Value) -> int | None:
    try:
        return spread_of(value)
    except Impossible:
        return None


def head_of(vector: ir.Value) -> ir.Value:
    """The i32 vector from which a vector is computed by scalars alone, with as many values."""
    found = _known(vector)
    while found is not None:
        op = defining_op(vector)
        others = [x for x in op.operands if _known(x) != 0] if op is not None and is_elementwise(op) else []
        spread = _known(others[0]) if len(others) == 1 and is_tile(others[0]) else None
        if spread is None or spread > found:
            return vector
        vector, found = others[0], spread
    return vector


# --- functions of a distance --------------------------------------------------------------------------


class Scan:
    """The analysis whether tiles are functions of one distance and one head, which it finds."""

    def __init__(self) -> None:
        self.difference: Difference | None = None
        self.head: ir.Value | None = None
        self.reads = self.computes = False  # arrays; expensive arithmetic
        self._found: dict[ir.Value, frozenset[str]] = {}

    @property
    def positions(self) -> list[ir.Value]:
        """The vectors along the rows on which the tiles depend."""
        given = [] if self.difference is None else [self.difference.query]
        return given if self.head is None else [*given, self.head]

    def of(self, value: ir.Value) -> frozenset[str]:
        """On which of them a tile, or a vector along the rows, depends."""
        if value not in self._found:
            self._found[value] = self._vector(value) if rank(value) == 1 else self._tile(value)
        return self._found[value]

    def _tile(self, value: ir.Value) -> frozenset[str]:
        op = defining_op(value)
        if op is None:
            raise Impossible("a tile that is a block argument")
        if _is_number(value):
            return frozenset()
        difference = difference_of(value)
        if difference is not None:
            known = self.difference or difference
            if (known.query, known.first) != (difference.query, difference.first):
                raise Impossible("two differences")
            self.difference = known
            return frozenset((DISTANCE,))
        if op.name == "kv.tile_broadcast":
            if ir.IntegerAttr(op.attributes["dimension"]).value == 1:
                raise Impossible("a function of the key alone")
            return self.of(op.operands[0])
        return self._computed(op)

    def _vector(self, value: ir.Value) -> frozenset[str]:
        op = defining_op(value)
        if op is None:
            raise Impossible("a vector that is a block argument")
        if _is_number(value):
            return frozenset()
        if str(element(value)) == "i32" and _known(value) is not None:
            head = head_of(value)
            if self.head is not None and self.head != head:
                raise Impossible("two vectors along the rows")
            self.head = head
            return frozenset((HEAD,))
        return self._computed(op)

    def _computed(self, op: ir.Operation) -> frozenset[str]:
        gathers = op.name == "kv.tile_gather"
        if not gathers and not is_elementwise(op):
            raise Impossible(f"{op.name}")
        operands = list(op.operands)[1:] if gathers else list(op.operands)
        found = [self.of(x) if is_tile(x) else frozenset() for x in operands]
        if gathers:
            for index, needs in zip(operands[1:], found[1:], strict=True):
                if DISTANCE in needs and not _held(index):
                    raise Impossible("an index by distance that is not clamped to the array")
        needs = frozenset().union(*found)
        if rank(op.results[0]) == 2:
            self.reads |= gathers
            self.computes |= op.name.startswith(_COMPUTED)
        return needs


def _is_number(value: ir.Value) -> bool:
    """Whether a tile or a vector repeats one scalar."""
    op = defining_op(value)
    return op is not None and (op.name == "tensor.splat" or splat_of(value) is not None)


def _held(index: ir.Value) -> bool:
    """Whether an index is clamped between two numbers."""
    names, op = set(), defining_op(index)
    while op is not None and op.name in ("arith.minsi", "arith.maxsi") and any(map(_is_number, op.operands)):
        names.add(op.name)
        op = next((defining_op(x) for x in op.operands if not _is_number(x)), None)
    return len(names) == 2


def scanned(op: ir.Operation, computed: bool) -> Scan | None:
    """What an op's tile is a function of; None if it is no function of a distance, or too cheap."""
    scan = Scan()
    try:
        scan.of(op.results[0])
    except Impossible:
        return None
    return scan if scan.difference is not None and (scan.reads or (computed and scan.computes)) else None


def function_of(op: ir.Operation, computed: bool) -> ir.Operation | None:
    """The last op of a chain from here that is still a function of a distance and a head."""
    found = None
    while rank(op.results[0]) == 2 and scanned(op, computed) is not None:
        if str(element(op.results[0])) == "f32":
            found = op
        following = users(op.results[0])
        if len(following) != 1 or following[0].block != op.block or len(following[0].results) != 1:
            break
        op = following[0]
    return found


# --- tables -------------------------------------------------------------------------------------------


def _base(bound: Linear) -> ir.Value:
    if bound.factor or bound.wraps is not None:
        raise Unknown
    return const(bound.base) if isinstance(bound.base, int) else bound.base


class Table:
    """The elements of a function for every distance and head of a tile, computed in place of the function."""

    def __init__(self, loop: ir.Operation, scan: Scan, tile: ir.Value) -> None:
        assert scan.difference is not None
        self.difference, self.head = scan.difference, scan.head
        query, columns = self.difference.query, shape(tile)[1]
        self.distances = spread_of(query) + columns
        self.heads = 1 if self.head is None else spread_of(self.head) + 1
        self.pitch, self.length = extents(self.distances, self.heads)
        self.span = span_of(self.pitch, self.heads)
        self.elements = self.length if self.span == self.pitch else self.heads * self.span
        self.loop, self.columns = loop, columns
        self.zero: ir.Value | None = None  # keeps a table in its loop
        self._made: dict[ir.Value, ir.Value] = {}

    def bound(self) -> None:
        """Compute the ranges of positions and heads before the loop; Unknown if they have none."""
        bounds = Bounds(self.loop)
        self.low, self.high = map(_base, bounds.of(self.difference.query))
        self.last = arith.addi(arith.subi(self.high, self.low), const(self.columns - 1))
        if self.head is not None:
            self.first_head, last = map(_base, bounds.of(self.head))
            self.last_head = arith.subi(last, self.first_head)

    def starts(self) -> ir.Value:
        """The first elements of the rows' windows; later queries' windows start at longer distances."""
        query = self.difference.query
        found = arith.subi(splat_tile(query.type, self.high), query)
        if self.head is None:
            return found
        number = arith.subi(self.head, splat_tile(query.type, self.first_head))
        return arith.addi(arith.muli(number, splat_tile(query.type, const(self.pitch))), found)

    def of(self, value: ir.Value) -> ir.Value:
        """A vector of the table, for a tile or for a vector along its rows."""
        if value not in self._made:
            self._made[value] = self._compute(value)
        return self._made[value]

    def _type(self, like: ir.Type) -> ir.Type:
        return tile_type((self.elements,), like)

    @property
    def _numbers(self) -> ir.Type:
        return self._type(ir.IntegerType.get_signless(32))

    def _place(self, divided: bool) -> ir.Value:
        """Each element's head number, or the number of its distance in the window."""
        index = TileIndexOp(self._numbers).operation.results[0]
        if self.head is not None:
            index = (arith.divui if divided else arith.remui)(index, splat_tile(self._numbers, const(self.span)))
        return index if self.zero is None else arith.addi(index, splat_tile(self._numbers, self.zero))

    def _distance(self) -> ir.Value:
        """Query minus key: within a window they fall from the largest."""
        place = arith.minsi(self._place(divided=False), splat_tile(self._numbers, self.last))
        largest = arith.subi(self.high, self.difference.first)
        return arith.subi(splat_tile(self._numbers, largest), place)

    def _heads(self) -> ir.Value:
        place = arith.minsi(self._place(divided=True), splat_tile(self._numbers, self.last_head))
        return arith.addi(splat_tile(self._numbers, self.first_head), place)

    def _compute(self, value: ir.Value) -> ir.Value:
        op = defining_op(value)
        if rank(value) == 2:
            found = difference_of(value)
            if found is not None:
                distance = self._distance()
                if found.negative:
                    distance = arith.subi(splat_tile(self._numbers, const(0)), distance)
                return arith.sitofp(self._type(ir.F32Type.get()), distance) if found.number else distance
            if op.name == "kv.tile_broadcast":
                return self.of(op.operands[0])
        if self.head is not None and value == self.head:
            return self._heads()
        repeated = splat_of(value)
        if repeated is not None:
            attribute = ir.DenseElementsAttr.get_splat(self._type(element(value)), repeated)
            return arith.constant(self._type(element(value)), attribute)
        if op.name == "tensor.splat":
            return splat_tile(self._type(element(value)), op.operands[0])
        operands = [self.of(x) if is_tile(x) else x for x in op.operands]
        return ir.Operation.create(op.name, [self._type(element(value))], operands, attributes_of(op)).result


def tabulate(function: ir.Operation, loop: ir.Operation, op: ir.Operation, table: Table) -> bool:
    """Replace a tile by windows of a table; False if bounds are unknown."""
    tile = op.results[0]
    try:
        with ir.InsertionPoint(loop), op.location:
            table.bound()
            starts = table.starts()
    except Unknown:
        return False
    length = i64_attr(table.length)
    with ir.InsertionPoint.at_block_begin(function.regions[0].blocks[0]), op.location:
        place = MakeTableOp(length, ir.Type.parse("!llvm.ptr<3>")).operation.results[0]
    store(loop, op, table, place)
    with ir.InsertionPoint(op), op.location:
        windows = TileWindowsOp(place, starts, length, tile.type).operation
    tile.replace_all_uses_with(windows.results[0])
    return True


def store(loop: ir.Operation, op: ir.Operation, table: Table, place: ir.Value) -> None:
    """Make the table of an op's tile: in place of the op, or before the branch that contains it.

    In a branch of the loop's body, the tile waits for products, but the table need not: ``pipeline-kv-loops`` moves ops
    before the branch.
    """
    body, branch = loop.regions[0].blocks[0], op.parent.operation
    if op.block == body:
        with ir.InsertionPoint(op), op.location:
            make(table, op.results[0], place)
        return
    outside = branch.name == "scf.if" and branch.block == body
    with ir.InsertionPoint(branch if outside else op), op.location:
        taken = branch.operands[0] if outside else const(1, 1)
        if outside and op.block.region != branch.regions[0]:
            taken = arith.xori(taken, const(1, 1))
        made = scf.IfOp(taken)
        with ir.InsertionPoint(made.then_block):
            make(table, op.results[0], place)
            scf.yield_([])
    needs = {v for o in made.then_block.operations for v in o.operands}
    if outside and any(maker is not None and is_inside(maker, branch) for maker in map(defining_op, needs)):
        made.operation.move_before(op)


def make(table: Table, tile: ir.Value, place: ir.Value) -> None:
    """Compute a table at the insertion point, in a loop or its branch, and store it."""
    # Opaque, since otherwise loop-invariant parts would move before the loop into registers that are not available.
    table.zero = ptx.unknown(Value(const(0), i32)).ir
    span, pitch = (table.elements,) * 2 if table.span == table.pitch else (table.span, table.pitch)
    TableStoreOp(table.of(tile), place, *map(i64_attr, (table.length, span, pitch)))


def makes_tables(op: ir.Operation) -> bool:
    """Whether an op makes a table, or contains an op that does."""
    return any(x.name == "kv.table_store" for x in walk(op))


def meanwhile(ops: list[ir.Operation]) -> list[ir.Operation]:
    """The ops after the first product of a loop that make tables, which need no product."""
    stores = [op for op in ops if makes_tables(op)]
    needed = backward(stores, set(ops).__contains__)
    return [op for op in ops if op in needed]


def _is_before(value: ir.Value, loop: ir.Operation) -> bool:
    maker = defining_op(value)
    return maker is not None and not is_inside(maker, loop)


def functions(function: ir.Operation, computed: bool) -> list[tuple[ir.Operation, ir.Operation]]:
    """(op, its loop) for a kernel's tiles that are functions of a distance and a head, of positions that the loop does
    not compute.
    """
    found: dict[ir.Value, tuple[ir.Operation, ir.Operation]] = {}
    for op in walk(function)[1:]:
        if not op.name.startswith(("kv.tile_gather", *_COMPUTED)) or len(op.results) != 1:
            continue
        loop, last = enclosing(op, "scf.for"), function_of(op, computed)
        if last is None or loop is None or str(loop.operands[0].type) != "i32":
            continue
        if all(_is_before(x, loop) for x in scanned(last, computed).positions) and not any(
            map(writes_buffers, walk(loop)[1:])
        ):
            found[last.results[0]] = last, loop
    return list(found.values())


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for function in tiled(module):
        schedule = schedule_of(function)
        threads = next(iter(ir.DenseI32ArrayAttr(function.attributes["kv.block"])))
        groups = schedule.get("consumers", threads // WARPGROUP)
        computed = options.computed
        left, made = min(options.most, schedule.get("spare", options.most)), []
        for op, loop in functions(function, computed):
            scan = scanned(op, computed)
            if scan is None:  # another tile with a table now includes it
                continue
            table = Table(loop, scan, op.results[0])
            rows, needed = min(WARPGROUP_ROWS, shape(op.results[0])[0]), bytes_of(table.length) * groups
            if table.length * SAVES > rows * table.columns or needed > left:
                why = f"{table.heads} x {table.distances} elements, {needed} bytes where {left} are left"
                remark(op, "missed", f"is computed for every element: a table has {why}")
                continue
            if not performs(op, "tabulate") or not tabulate(function, loop, op, table):
                continue
            made.append(op)
            left -= needed
            sizes = {"distances": table.distances, "heads": table.heads}
            remark(op, "passed", "is computed once per distance and head", **sizes)
        needed_by = backward(made, lambda op: op.name == "kv.tile_gather" or is_position(op))
        erase_unused(op for op in walk(function) if op in needed_by)
