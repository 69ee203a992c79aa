# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Turn linalg on tiles in memory into loops over rows with vector operations.

The input is ``linalg.generic`` and ``linalg.matmul`` on static memory, which upstream has made from tile operations.
Rows become loops, and the last dimension becomes vectors; values that are uniform over a row are computed once per row.
Products keep blocks of rows and columns in registers; sums over rows of both operands end in one reduction tree for 16
sums. Tiles move to the stack, allocated once for all iterations; a tile of bools has one byte per element. Upstream's
``affine-super-vectorize`` does not vectorize reductions and products, which dominate attention.

Before:  linalg.generic ins(%x, %m : memref<16x64xf32>, memref<16xf32>) outs(%x) { arith.subf }
After:   scf.for %i = 0 to 16 { %s = memref.load %m[%i]; scf.for %j = 0 to 64 step 16 {
           %v = vector.load %x[%i, %j] : vector<16xf32>; arith.subf %v, broadcast %s; vector.store } }
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlir import ir
from mlir.dialects import arith, memref, scf, vector

from kvarn.dialect.dtypes import f32 as F32
from kvarn.dsl.values import Value, Vector
from kvarn.lowering.host_math import exp2
from kvarn.lowering.kernels.attention.case import column_vectors
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import defining_op, functions, ops_named, walk
from kvarn.lowering.tiles.ir import HIDES, attributes_of

LANES = 16
ROWS = 4  # rows of a product that are in registers at a time
STACK = 1 << 20  # the most bytes of tiles per kernel: threads have stacks of a few MiB
# By the reducing op: (kind of vector.reduction, neutral element).
_FOLDS: dict[str, tuple[str, Callable[[ir.Type], Any]]] = {
    "arith.addf": ("add", lambda t: 0.0),
    "arith.maxnumf": ("maxnumf", lambda t: float("-inf")),
    "arith.minnumf": ("minnumf", lambda t: float("inf")),
    "arith.addi": ("add", lambda t: 0),
    "arith.maxsi": ("maxsi", lambda t: -(1 << (ir.IntegerType(t).width - 1))),
    "arith.minsi": ("minsi", lambda t: (1 << (ir.IntegerType(t).width - 1)) - 1),
}
_ACCESSES = ("memref.load", "memref.store", "vector.transfer_read", "vector.transfer_write")


def index(value: int) -> ir.Value:
    return arith.constant(ir.IndexType.get(), value)


def extents(value: ir.Value) -> list[int]:
    return list(ir.MemRefType(value.type).shape)


def vector_of(width: int, type_: ir.Type) -> ir.Type:
    return ir.VectorType.get([width], type_)


def splat(value: ir.Value, width: int) -> ir.Value:
    return vector.broadcast(vector_of(width, value.type), value) if width else value


def attribute(text: str) -> ir.Attribute:
    return ir.Attribute.parse(text)


def for_each(count: int, step: int, body: Callable[[ir.Value], None]) -> None:
    """``body(i)`` for i in range(0, count, step); a loop if there is more than one iteration."""
    if count <= step:
        if count > 0:
            body(index(0))
        return
    loop = scf.ForOp(index(0), index(count), index(step))
    with ir.InsertionPoint(loop.body):
        body(loop.induction_variable)
        scf.yield_([])


def folded(extent: int, start: list[ir.Value], step: int, body: Callable[..., list[ir.Value]]) -> list[ir.Value]:
    """The result of repeating ``values = body(i, values)`` over range(0, extent, step)."""
    if extent <= step:
        return body(index(0), start) if extent > 0 else start
    loop = scf.ForOp(index(0), index(extent), index(step), start)
    with ir.InsertionPoint(loop.body):
        scf.yield_(body(loop.induction_variable, list(loop.inner_iter_args)))
    return list(loop.results)


def plus(base: ir.Value, offset: int) -> ir.Value:
    return arith.addi(base, index(offset)) if offset else base


# --- rows ------------------------------------------------------------------------------------------


class Nest:
    """A ``linalg`` op as a loop nest: the last dimension in vectors, the others one by one."""

    def __init__(self, op: ir.Operation):
        self.op = op
        self.operands = list(op.operands)
        self.maps = [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]
        self.rank = self.maps[0].n_dims
        self.dims = [[ir.AffineDimExpr(e).position for e in m.results] for m in self.maps]
        self.extents = [1] * self.rank
        for value, dims in zip(self.operands, self.dims, strict=True):
            for d, n in zip(dims, extents(value) if dims else (), strict=True):
                self.extents[d] = n
        self.block = op.regions[0].blocks[0]
        *self.body, self.end = [o.operation for o in self.block.operations]
        self.inner = self.rank - 1
        self.reduces = self.inner not in self.dims[-1]

    @property
    def accumulator(self) -> ir.Value:
        return self.block.arguments[len(self.operands) - 1]

    def fold(self) -> ir.Operation:
        """The op that combines the accumulator with a new value."""
        op = defining_op(self.end.operands[0])
        if op is None or op.name not in _FOLDS or self.accumulator not in list(op.operands):
            fail(self.op, "must reduce by a sum, a maximum or a minimum")
        return op

    def emit(self) -> None:
        self._outer(0, [])

    def _outer(self, dim: int, at: list[ir.Value]) -> None:
        if dim < self.inner:
            for_each(self.extents[dim], 1, lambda i: self._outer(dim + 1, [*at, i]))
            return
        whole = self.extents[self.inner] // LANES * LANES
        rest = [(whole + d, w) for d, w in column_vectors(self.extents[self.inner] - whole, LANES)]
        if self.reduces:
            self._reduce(at, whole, rest)
            return
        for_each(whole, LANES, lambda j: self._chunk([*at, j], LANES))
        for start, width in rest:
            self._chunk([*at, index(start)], width if width > 1 else 0)

    def _reduce(self, at: list[ir.Value], whole: int, rest: list[tuple[int, int]]) -> None:
        fold, output = self.fold(), self.operands[-1]
        type_ = ir.MemRefType(output.type).element_type
        kind, identity = _FOLDS[fold.name]
        place = [at[d] for d in self.dims[-1]]
        result = memref.load(output, place)

        def combined(total: ir.Value, width: int) -> ir.Value:
            nonlocal result
            if width:
                flags = {"fastmath": attribute("#arith.fastmath<reassoc>")} if isinstance(type_, ir.FloatType) else {}
                total = ir.Operation.create(
                    "vector.reduction", [type_], [total], {"kind": attribute(f"#vector.kind<{kind}>"), **flags}
                ).result
            return ir.Operation.create(fold.name, [type_], [result, total]).result

        for start, count, width in [(0, whole, LANES)] * (whole > 0) + [(s, w, w if w > 1 else 0) for s, w in rest]:
            neutral = splat(arith.constant(type_, identity(type_)), width)
            (total,) = folded(
                count,
                [neutral],
                max(width, 1),
                lambda j, values, start=start, width=width: [self._payload([*at, plus(j, start)], width, values[0])],
            )
            result = combined(total, width)
        memref.store(result, output, place)

    def _chunk(self, at: list[ir.Value], width: int) -> None:
        output = self.operands[-1]
        value = self._payload(at, width, None)
        if width and not isinstance(value.type, ir.VectorType):
            value = splat(value, width)
        store(value, output, [at[d] for d in self.dims[-1]])

    def _payload(self, at: list[ir.Value], width: int, accumulator: ir.Value | None) -> ir.Value:
        """The body for the elements at an index, in vectors of ``width`` (0: scalars); uniform values are scalars."""
        values: dict[ir.Value, ir.Value] = {}
        for i, operand in enumerate(self.operands):
            argument = self.block.arguments[i]
            if accumulator is not None and i == len(self.operands) - 1:
                values[argument] = accumulator
            elif any(True for _ in argument.uses):
                if not isinstance(operand.type, ir.MemRefType):
                    values[argument] = operand
                else:
                    values[argument] = self._loaded(i, at, width if self.inner in self.dims[i] else 0, argument.type)
        for op in self.body:
            self._cloned(op, at, width, values)
        result = self.end.operands[0]
        return values.get(result, result)

    def _loaded(self, number: int, at: list[ir.Value], lanes: int, type_: ir.Type) -> ir.Value:
        """Elements of an operand; of a transposed one, whose inner dimension is not the last, one after the other."""
        operand, dims = self.operands[number], self.dims[number]
        if not lanes or dims[-1] == self.inner:
            return load(operand, [at[d] for d in dims], lanes, type_)
        several = []
        for lane in range(lanes):
            place = [plus(at[d], lane) if d == self.inner else at[d] for d in dims]
            several.append(load(operand, place, 0, type_))
        return vector.from_elements(vector_of(lanes, several[0].type), several)

    def _cloned(self, op: ir.Operation, at: list[ir.Value], width: int, values: dict[ir.Value, ir.Value]) -> None:
        if op.name == "linalg.index":
            dim = ir.IntegerAttr(op.attributes["dim"]).value
            values[op.result] = positions(at[dim], width) if dim == self.inner and width else at[dim]
            return
        operands = [values.get(x, x) for x in op.operands]
        if not any(isinstance(x.type, ir.VectorType) for x in operands):
            width = 0
        type_ = op.results[0].type
        if op.name == "arith.index_cast" and width and operands[0].type == vector_of(width, type_):
            values[op.result] = operands[0]
            return
        operands = [x if isinstance(x.type, ir.VectorType) else splat(x, width) for x in operands]
        if op.name == "math.exp2" and str(type_) == "f32":
            x: Any = Vector(operands[0], F32, width) if width else Value(operands[0], F32)
            values[op.result] = exp2(x).ir
            return
        result = vector_of(width, type_) if width else type_
        values[op.result] = ir.Operation.create(op.name, [result], operands, attributes_of(op)).result


def positions(first: ir.Value, width: int) -> ir.Value:
    """first, first + 1, ... as i32."""
    i32 = ir.IntegerType.get_signless(32)
    type_ = vector_of(width, i32)
    steps = arith.constant(type_, attribute(f"dense<[{', '.join(map(str, range(width)))}]> : {type_}"))
    return arith.addi(splat(arith.index_cast(i32, first), width), steps)


# --- memory ----------------------------------------------------------------------------------------


def element(type_: ir.Type) -> ir.Type:
    return ir.VectorType(type_).element_type if isinstance(type_, ir.VectorType) else type_


def load(buffer: ir.Value, at: Sequence[ir.Value], width: int = 0, wanted: ir.Type | None = None) -> ir.Value:
    """Elements of a tile in memory: a scalar or a vector; for i1, converted from bytes."""
    type_ = ir.MemRefType(buffer.type).element_type
    value = vector.load(vector_of(width, type_), buffer, list(at)) if width else memref.load(buffer, list(at))
    if wanted is None or wanted == type_:
        return value
    return arith.trunci(vector_of(width, wanted) if width else wanted, value)


def store(value: ir.Value, buffer: ir.Value, at: Sequence[ir.Value]) -> None:
    type_ = ir.MemRefType(buffer.type).element_type
    width = ir.VectorType(value.type).shape[0] if isinstance(value.type, ir.VectorType) else 0
    if element(value.type) != type_:
        value = arith.extui(vector_of(width, type_) if width else type_, value)
    if width:
        vector.store(value, buffer, list(at))
    else:
        memref.store(value, buffer, list(at))


# --- products --------------------------------------------------------------------------------------


def multiply(x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
    flags = attribute("#arith.fastmath<contract>")
    return arith.addf(total, arith.mulf(x, y, fastmath=flags), fastmath=flags)


def row_blocks(rows: int, body: Callable[[ir.Value, int], None]) -> None:
    """``body(first row, rows)`` for blocks of at most ROWS rows."""
    whole = rows // ROWS * ROWS
    for_each(whole, ROWS, lambda i: body(i, ROWS))
    if rows > whole:
        body(index(whole), rows - whole)


def hiding_product(a: ir.Value, b: ir.Value, c: ir.Value) -> None:
    """c += a b for non-negative a, where b may be undefined at zeros of a; the common case costs only a check."""
    i1 = ir.IntegerType.get_signless(1)
    zero = arith.constant(ir.F32Type.get(), 0.0)
    hides = scf.IfOp(arith.cmpf(arith.CmpFPredicate.OEQ, scanned(a, "minnumf"), zero), [i1], has_else=True)
    with ir.InsertionPoint(hides.then_block):
        total = scanned(b, "add", lambda x: arith.mulf(x, splat(zero, width_of_vector(x))))
        scf.yield_([arith.cmpf(arith.CmpFPredicate.UNO, total, total)])
    with ir.InsertionPoint(hides.else_block):
        scf.yield_([arith.constant(i1, 0)])
    branch = scf.IfOp(hides.results[0], has_else=True)
    for block, some in ((branch.then_block, True), (branch.else_block, False)):
        with ir.InsertionPoint(block):
            product(a, b, c, some)
            scf.yield_([])


def scanned(buffer: ir.Value, kind: str, of: Callable[[ir.Value], ir.Value] = lambda x: x) -> ir.Value:
    """The elements of an f32 tile, or their images under ``of``, reduced: a sum (``add``) or the minimum."""
    (rows, columns), type_ = extents(buffer), ir.F32Type.get()
    fold, identity = {"add": (arith.addf, 0.0), "minnumf": (arith.minnumf, float("inf"))}[kind]
    whole, found = columns // LANES * LANES, arith.constant(type_, identity)
    parts = [(0, whole, LANES)] * (whole > 0) + [(whole + d, w, w) for d, w in column_vectors(columns - whole, LANES)]
    for start, count, width in parts:
        lanes = width if width > 1 else 0

        def of_row(i: ir.Value, values: list[ir.Value], start=start, count=count, width=width, lanes=lanes) -> Any:
            def step(j: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
                return [fold(values[0], of(load(buffer, [i, plus(j, start)], lanes)))]

            return folded(count, values, width, step)

        (total,) = folded(rows, [splat(arith.constant(type_, identity), lanes)], 1, of_row)
        if lanes:
            attributes = {"kind": attribute(f"#vector.kind<{kind}>"), "fastmath": attribute("#arith.fastmath<reassoc>")}
            total = ir.Operation.create("vector.reduction", [type_], [total], attributes).result
        found = fold(found, total)
    return found


def width_of_vector(value: ir.Value) -> int:
    return ir.VectorType(value.type).shape[0] if isinstance(value.type, ir.VectorType) else 0


def product(a: ir.Value, b: ir.Value, c: ir.Value, hides: bool = False) -> None:
    """c += a b: a row of b times elements of some rows of a; blocks of c stay in registers.

    ``hides``: zeros of a cancel whatever they are multiplied by.
    """
    (rows, depth), columns = extents(a), extents(b)[1]

    def block(i: ir.Value, count: int, found: list[tuple[ir.Value, int]]) -> None:
        places = [(plus(i, r), j, w) for r in range(count) for j, w in found]
        sums = [load(c, [row, j], w if w > 1 else 0) for row, j, w in places]

        def step(k: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
            row_of_b = [load(b, [k, j], w if w > 1 else 0) for j, w in found]
            made = []
            for r in range(count):
                x = load(a, [plus(i, r), k])
                for n, (_, w) in enumerate(found):
                    before = values[r * len(found) + n]
                    total = multiply(splat(x, w if w > 1 else 0), row_of_b[n], before)
                    if hides:
                        zero = arith.constant(ir.F32Type.get(), 0.0)
                        total = arith.select(arith.cmpf(arith.CmpFPredicate.UNE, x, zero), total, before)
                    made.append(total)
            return made

        for value, (row, j, _) in zip(folded(depth, sums, 1, step), places, strict=True):
            store(value, c, [row, j])

    def of_rows(i: ir.Value, count: int) -> None:
        most = 4 * LANES
        whole = columns // most * most
        for_each(whole, most, lambda j: block(i, count, [(plus(j, n * LANES), LANES) for n in range(4)]))
        rest = [(index(whole + d), w) for d, w in column_vectors(columns - whole, LANES)]
        for n in range(0, len(rest), 4):
            block(i, count, rest[n : n + 4])

    row_blocks(rows, of_rows)


def product_of_rows(a: ir.Value, b: ir.Value, c: ir.Value) -> bool:
    """c += a b^T for whole vectors along the rows; returns False, and emits nothing, if the extents do not fit."""
    (rows, depth), columns = extents(a), extents(b)[0]
    if depth % LANES or columns % LANES:
        return False

    def block(i: ir.Value, count: int) -> None:
        # LANES sums at a time: ``count`` rows by ``width`` columns, the same for three rows as for four.
        width = LANES // (1 << (count - 1).bit_length())

        def columns_from(j: ir.Value) -> None:
            zero = splat(arith.constant(ir.F32Type.get(), 0.0), LANES)

            def step(k: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
                left = [load(a, [plus(i, r), k], LANES) for r in range(count)]
                right = [load(b, [plus(j, n), k], LANES) for n in range(width)]
                return [multiply(left[n // width], right[n % width], v) for n, v in enumerate(values)]

            sums = folded(depth, [zero] * (count * width), LANES, step)
            total = lane_sums([*sums, *[zero] * (LANES - len(sums))])
            for r in range(count):
                part = vector.extract_strided_slice(
                    vector_of(width, ir.F32Type.get()), total, [r * width], [width], [1]
                )
                place = [plus(i, r), j]
                store(arith.addf(load(c, place, width), part), c, place)

        for_each(columns, width, columns_from)

    row_blocks(rows, block)
    return True


def lane_sums(values: list[ir.Value]) -> ir.Value:
    """The sums of LANES vectors' lanes, one per lane: a tree that adds even and odd lanes of two vectors at a time."""
    even, odd = list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2))
    while len(values) > 1:
        values = [
            arith.addf(vector.shuffle(x, y, even), vector.shuffle(x, y, odd))
            for x, y in zip(values[::2], values[1::2], strict=True)
        ]
    return values[0]


# --- the whole -------------------------------------------------------------------------------------


def memrefs(function: ir.Operation) -> list[ir.Value]:
    """All memrefs of a function, which are its tiles."""
    found = []
    for op in walk(function, lambda name: True):
        found += [r for r in op.results if isinstance(r.type, ir.MemRefType)]
        for region in op.regions:
            for block in region.blocks:
                found += [x for x in block.arguments if isinstance(x.type, ir.MemRefType)]
    return found


def to_the_stack(function: ir.Operation) -> None:
    """Move the allocations of bufferization to stack allocations at the function's start."""
    bytes_, start = 0, function.regions[0].blocks[0]
    for op in ops_named(function, "memref.alloc"):
        type_ = ir.MemRefType(op.results[0].type)
        for use in op.results[0].uses:
            owner = use.owner.operation
            if owner.name == "scf.condition" or (owner.name == "scf.yield" and owner.parent.name != "scf.if"):
                fail(op, "is a tile carried by a while loop: use a for loop, which updates tiles in place")
        size = 1
        for n in type_.shape:
            size *= n
        bytes_ += size * max(8, width_of(type_.element_type)) // 8
        if bytes_ > STACK:
            fail(op, f"brings the kernel's tiles to {bytes_} bytes: the host's stack has {STACK}; use smaller tiles")
        with ir.InsertionPoint.at_block_begin(start), op.location:
            made = memref.alloca(type_, [], [], alignment=64)
        op.results[0].replace_all_uses_with(made)
        op.erase()


def width_of(type_: ir.Type) -> int:
    return type_.width if isinstance(type_, ir.IntegerType | ir.FloatType) else 64


def widen_bools(function: ir.Operation) -> None:
    """Give tiles of bools one byte per element: vectors and scalars would have different bit layouts."""
    with function.location:
        byte = ir.IntegerType.get_signless(8)
    for value in memrefs(function):
        type_ = ir.MemRefType(value.type)
        if str(type_.element_type) == "i1":
            value.set_type(ir.MemRefType.get(type_.shape, byte, loc=function.location))


def lower_access(op: ir.Operation) -> None:
    """Lower accesses of rows and elements that the lowering of tiles has made."""
    reads = op.name in ("memref.load", "vector.transfer_read")
    buffer = op.operands[0 if reads else 1]
    if not isinstance(buffer.type, ir.MemRefType):
        return
    rank = ir.MemRefType(buffer.type).rank
    at = list(op.operands)[1:][:rank] if reads else list(op.operands)[2:][:rank]
    if reads:
        type_ = op.results[0].type
        width = ir.VectorType(type_).shape[0] if isinstance(type_, ir.VectorType) else 0
        op.results[0].replace_all_uses_with(load(buffer, at, width, element(type_)))
    else:
        store(op.operands[0], buffer, at)
    op.erase()


def lower(op: ir.Operation) -> None:
    if op.results:  # still on tensors
        return
    nest = Nest(op)
    if op.name == "linalg.matmul":
        a, b, c = nest.operands
        if nest.dims[1] == [2, 1]:
            (hiding_product if HIDES in op.attributes else product)(a, b, c)
            op.erase()
            return
        if product_of_rows(a, b, c):
            op.erase()
            return
    nest.emit()
    op.erase()


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in functions(module):
        if "kv.tiled" not in function.attributes:
            continue
        widen_bools(function)
        for op in walk(function, lambda name: name in _ACCESSES):
            with ir.InsertionPoint(op), op.location:
                lower_access(op)
        for op in ops_named(function, "linalg.generic", "linalg.matmul"):
            with ir.InsertionPoint(op), op.location:
                lower(op)
        to_the_stack(function)
