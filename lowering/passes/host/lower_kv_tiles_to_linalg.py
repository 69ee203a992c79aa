# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Turn tiles into upstream tensor operations, for tile kernels on the host, where a block has one thread.

Arithmetic on tiles is already arith and math on tensors, and stays. Positions, broadcasts and reductions become
``linalg.generic``, products become ``linalg.matmul`` in f32, and memory accesses become loops over rows: for a cache
page by page, with one lookup per page and none past the existing tokens, converting as they load; for a buffer under
its mask. Loop-carried tiles are updated in place, so that iterations need no memory of their own. There are no layouts
on the host.

Before:  %x = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<16x64xbf16>, tensor<64x64xbf16>) -> tensor<16x64xf32>
After:   %a = arith.extf %q : tensor<16x64xbf16> to tensor<16x64xf32>
         %x = linalg.matmul indexing_maps = [...] ins(%a, %k : ..., tensor<64x64xf32>) outs(%zeros)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlir import ir
from mlir.dialects import arith, linalg, scf, tensor, vector

from kvarn.dialect import ops, types
from kvarn.dialect.dtypes import by_mlir
from kvarn.dialect.layout import CacheSpec, lowbit
from kvarn.dialect.ops.tile import row_format, stored_from
from kvarn.dsl.handles import Cache, Operand
from kvarn.dsl.memory import atomic_add
from kvarn.dsl.values import Value, Vector, cast as kv_cast
from kvarn.lowering.index import as_index, const
from kvarn.lowering.kernels.append import tile_rows
from kvarn.lowering.kernels.attention.case import column_vectors
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import Rules, defining_op, ops_named, replace, walk
from kvarn.lowering.tiles import score_weights
from kvarn.lowering.tiles.cache_rows import load_width, place_in_pool, read_rope, read_row
from kvarn.lowering.tiles.ir import HIDES, constant_int, element, is_tile, shape, splat_of, tiled, users
from kvarn.lowering.tiles.threads import buffer_of

MOST_EXACT = 1 << 10  # products of i8 whose sum is exact in f32
LANES = 16  # elements of a row per load
# By kind of reduction: the op for floats and for integers.
_FOLDS = {"max": (arith.maxnumf, arith.maxsi), "min": (arith.minnumf, arith.minsi), "add": (arith.addf, arith.addi)}
rules = Rules()


# --- tensors ---------------------------------------------------------------------------------------


def empty(type_: ir.Type) -> ir.Value:
    tile = ir.RankedTensorType(type_)
    return tensor.empty(list(tile.shape), tile.element_type)


def filled(type_: ir.Type, value: ir.Value) -> ir.Value:
    """A tensor of one value."""
    return generic(type_, [], [], lambda: value)


def projected(rank: int, *kept: int) -> ir.AffineMap:
    """The map of an operand that depends on only some of a loop nest's dimensions."""
    return ir.AffineMap.get(rank, 0, [ir.AffineDimExpr.get(d) for d in kept])


def generic(
    type_: ir.Type, inputs: Sequence[ir.Value], maps: Sequence[ir.AffineMap], body: Callable[..., ir.Value],
    into: ir.Value | None = None, reduced: int | None = None,
) -> ir.Value:  # fmt: skip
    """A ``linalg.generic`` with one result; ``reduced`` is the dimension that is reduced into ``into``."""
    rank = ir.RankedTensorType(type_).rank + (reduced is not None)
    output = projected(rank, *(d for d in range(rank) if d != reduced))
    into = empty(type_) if into is None else into
    iterators = ["reduction" if d == reduced else "parallel" for d in range(rank)]
    op = linalg.GenericOp(
        [type_],
        list(inputs),
        [into],
        ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in (*maps, output)]),
        ir.ArrayAttr.get([ir.Attribute.parse(f"#linalg.iterator_type<{name}>") for name in iterators]),
    )
    types_ = [ir.RankedTensorType(x.type).element_type if is_tile(x) else x.type for x in (*inputs, into)]
    block = op.regions[0].blocks.append(*types_)
    with ir.InsertionPoint(block):
        arguments = list(block.arguments)
        linalg.YieldOp([body(*(arguments if reduced is not None else arguments[:-1]))])
    return op.results[0]


def elementwise(type_: ir.Type, value: ir.Value, body: Callable[[ir.Value], ir.Value]) -> ir.Value:
    rank = ir.RankedTensorType(type_).rank
    return generic(type_, [value], [projected(rank, *range(rank))], body)


def widened(value: ir.Value) -> ir.Value:
    """A float tile as f32, converted where it was made, possibly outside of a loop."""
    if str(element(value)) == "f32":
        return value
    source = by_mlir(str(element(value)))
    maker = defining_op(value)
    point = (
        ir.InsertionPoint.at_block_begin(ir.BlockArgument(value).owner)
        if maker is None
        else ir.InsertionPoint.after(maker)
    )
    f32 = ir.F32Type.get()
    with point:
        return elementwise(
            ir.RankedTensorType.get(shape(value), f32), value, lambda x: kv_cast(Value(x, source), by_mlir("f32")).ir
        )


# --- values ----------------------------------------------------------------------------------------


@rules.lowers("kv.tile_index")
def lower_index(op: Any) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return generic(op.indices.type, [], [], lambda: arith.index_cast(i32, linalg.IndexOp(0).result))


@rules.lowers("kv.tile_broadcast")
def lower_broadcast(op: Any) -> ir.Value:
    return generic(op.tile.type, [op.source], [projected(2, op.dimension.value)], lambda x: x)


@rules.lowers("kv.tile_transpose")
def lower_transpose(op: Any) -> ir.Value:
    return generic(op.tile.type, [op.source], [projected(2, 1, 0)], lambda x: x)


@rules.lowers("tensor.splat")
def lower_splat(op: Any) -> ir.Value:
    return filled(op.operation.results[0].type, op.operation.operands[0])


@rules.lowers("kv.cast")
def lower_cast(op: Any) -> ir.Value:
    type_ = op.out.type
    return elementwise(type_, op.value, lambda x: ops.cast(x, by_mlir(str(element(op.out)))))


@rules.lowers("kv.tile_mask")
def lower_mask(op: Any) -> ir.Value:
    type_ = ir.RankedTensorType(op.scores.type)
    lowest = filled(type_, arith.constant(type_.element_type, float("-inf")))
    return arith.select(op.mask, op.scores, lowest)


@rules.lowers("kv.tile_reduce")
def lower_reduce(op: Any) -> ir.Value:
    type_, kind, axis = ir.RankedTensorType(op.result_.type), op.kind.value, op.axis.value
    is_float = isinstance(type_.element_type, ir.FloatType)
    fold = _FOLDS[kind][0 if is_float else 1]
    if is_float:
        start: Any = {"max": float("-inf"), "min": float("inf"), "add": 0.0}[kind]
    else:
        top = 1 << (ir.IntegerType(type_.element_type).width - 1)
        start = {"max": -top, "min": top - 1, "add": 0}[kind]
    into = filled(type_, arith.constant(type_.element_type, start))
    return generic(type_, [op.source], [projected(2, 0, 1)], lambda x, acc: fold(acc, x), into, axis)


@rules.lowers("kv.dot")
def lower_dot(op: Any) -> ir.Value:
    type_, f32 = op.result_.type, ir.F32Type.get()
    a, b = widened(op.a), widened(op.b)
    integers = str(element(op.result_)) != "f32"
    if integers:  # f32 holds the sums exactly
        if shape(op.a)[1] > MOST_EXACT:
            fail(op.operation, f"sums more than {MOST_EXACT} products of i8: divide K")
        type_ = ir.RankedTensorType.get(shape(op.result_), f32)
    c = filled(type_, arith.constant(f32, 0.0)) if op.c is None or integers else op.c
    right = projected(3, 1, 2) if op.transpose_b.value else projected(3, 2, 1)
    maps = [projected(3, 0, 2), right, projected(3, 0, 1)]
    product = linalg.MatmulOp(
        [type_], [a, b], [c], indexing_maps=ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps])
    )
    block = product.regions[0].blocks.append(f32, f32, f32)
    with ir.InsertionPoint(block):
        x, y, z = block.arguments
        linalg.YieldOp([arith.addf(z, arith.mulf(x, y))])
    if HIDES in op.operation.attributes:
        product.operation.attributes[HIDES] = ir.UnitAttr.get()
    if not integers:
        return product.results[0]
    i32 = ir.IntegerType.get_signless(32)
    made = elementwise(op.result_.type, product.results[0], lambda x: arith.fptosi(i32, x))
    return made if op.c is None else arith.addi(made, op.c)


# --- memory ----------------------------------------------------------------------------------------


@contextmanager
def loop(count: Any, tile: ir.Value | None = None, first: Any = 0) -> Iterator[tuple[Value, list[ir.Value]]]:
    """A loop over i32 from ``first`` to ``count``; yields (variable, [tile]), and carries the list's final entry.

    After the loop the list has its result.
    """
    low, high = (const(x) if isinstance(x, int) else x for x in (first, count))
    made = scf.ForOp(low, high, const(1), [] if tile is None else [tile])
    carried = list(made.inner_iter_args)
    with ir.InsertionPoint(made.body):
        yield Value(made.induction_variable, by_mlir("i32"), nonneg=True), carried
        scf.yield_(carried)
    carried[:] = list(made.results)


def inserted(value: ir.Value, tile: ir.Value, *at: ir.Value) -> ir.Value:
    """A tile with a scalar, or some elements of a row, written at an index."""
    if isinstance(value.type, ir.VectorType):
        rank = ir.RankedTensorType(tile.type).rank
        return vector.transfer_write(tile.type, value, tile, list(at), ir.AffineMap.get_minor_identity(rank, 1), [True])
    return tensor.insert(value, tile, list(at))


def zeros(type_: ir.Type, width: int) -> ir.Value:
    zero = 0 if isinstance(type_, ir.IntegerType) else 0.0
    scalar = arith.constant(type_, zero)
    return vector.broadcast(ir.VectorType.get([width], type_), scalar) if width > 1 else scalar


def tokens_a_page(spec: CacheSpec, rows: int) -> int:
    """Rows of a tile that share a lookup: by the alignment of the first token, they are in one page."""
    if not spec.paged:
        return rows
    size = min(rows, spec.page_size)
    return size if max(rows, spec.page_size) % size == 0 else 1


@rules.lowers("kv.tile_load")
def lower_load(op: Any) -> ir.Value:
    spec = types.spec_of(op.cache.type)
    handle = (Cache if types.type_name(op.cache.type) == "cache" else Operand)(op.cache, spec)
    rows, columns = shape(op.tile)
    dtype, first_column, of_row = by_mlir(str(element(op.tile))), op.first_column.value, row_format(op, spec)
    if first_column + columns > of_row.size:
        fail(op.operation, f"has columns past the head's {of_row.size}: the host does not pad heads")
    # Products take f32: tiles that only products read are converted once, when they are loaded.
    widen = not str(dtype.mlir) == "f32" and dtype.is_float and all(u.name == "kv.dot" for u in users(op.tile))
    kept = by_mlir("f32") if widen else dtype
    type_ = ir.RankedTensorType.get([rows, columns], types.element_type(kept))
    batch, head, first, count = (Value(x, by_mlir("i32"), nonneg=True) for x in (op.batch, op.head, op.first, op.count))
    widest = min(load_width(spec, LANES), lowbit(first_column) if first_column else LANES)
    of_elements = min(columns, max(of_row.content - first_column, 0)) if of_row.rope else columns
    found = column_vectors(of_elements, widest)
    behind = [(of_elements + at, width) for at, width in column_vectors(columns - of_elements, LANES // 2)]
    exist = arith.maxsi(arith.minsi((count - first).ir, const(rows)), const(0))
    # The first row of the valid range.
    low = None
    if constant_int(op.begin) != 0:
        low = arith.maxsi(arith.minsi(arith.subi(op.begin, first.ir), exist), const(0))
    anywhere = op.lists is not None or any(u.name == "kv.tile_concatenate" for u in users(op.tile))
    step = 1 if anywhere else tokens_a_page(spec, rows)
    pages = arith.divui(arith.addi(exist, const(step - 1)), const(step))
    with loop(pages, empty(type_), first=0 if low is None else arith.divui(low, const(step))) as (n, outer):
        here = n * step
        place = there = None
        if op.lists is None:
            page = handle.page(batch, first + here)
        else:
            place, page, there = place_in_pool(handle, buffer_of(op.lists)[batch, first + here])
        rest = arith.minsi(arith.subi(exist, here.ir), const(step))
        skipped = 0 if low is None else arith.maxsi(arith.subi(low, here.ir), const(0))
        with loop(rest, outer[0], first=skipped) as (i, inner):
            row = here + i
            at = as_index(row.ir)
            for column, width in found + behind:
                token = first + row if there is None else place
                of_key = handle, batch, head, token, first_column + column, width, page
                value = read_row(of_row, *of_key) if column < of_elements else read_rope(of_row, *of_key)
                value = kv_cast(kv_cast(value, dtype), kept).ir
                if there is not None:
                    value = arith.select(there.ir, value, zeros(types.element_type(kept), width))
                inner[0] = inserted(value, inner[0], at, arith.constant(ir.IndexType.get(), column))
        outer[0] = inner[0]
    tile = outer[0]
    if op.tail.value == "zero":
        for start, end in ((exist, rows),) if low is None else ((0, low), (exist, rows)):
            with loop(end, tile, first=start) as (row, carried):
                at = as_index(row.ir)
                for column, width in column_vectors(columns, LANES):
                    value = zeros(types.element_type(kept), width)
                    carried[0] = inserted(value, carried[0], at, arith.constant(ir.IndexType.get(), column))
            tile = carried[0]
    return tile


def _at(tiles: Sequence[ir.Value], *place: ir.Value) -> list[Value]:
    """An element of each index tile."""
    return [Value(tensor.extract(x, list(place)), by_mlir("i32")) for x in tiles]


@rules.lowers("kv.take_work_item")
def _round(op: Any, *_: Any) -> ir.Value:
    return op.iteration


def _require_stored(op: Any) -> None:
    if "stored" in op.operation.attributes:
        fail(op.operation, "has columns past the rows of its buffer: the host does not pad rows")


@rules.lowers("kv.tile_load_rows")
def lower_load_rows(op: Any) -> ir.Value:
    buffer, (rows, columns) = buffer_of(op.buffer), shape(op.tile)
    _require_stored(op)
    with loop(rows, empty(op.tile.type)) as (row, carried):
        at = as_index(row.ir)
        branch = scf.IfOp(tensor.extract(op.mask, [at]), [op.tile.type], has_else=True)
        for block, exists in ((branch.then_block, True), (branch.else_block, False)):
            with ir.InsertionPoint(block):
                tile, indices = carried[0], _at(op.indices, at) if exists else []
                for column, width in column_vectors(columns, LANES):
                    if exists:
                        at_column = stored_from(op) + column
                        value = buffer.load(*indices, at_column, width=width, alignment=buffer.dtype.itemsize)
                        value = value.ir
                    else:
                        value = zeros(element(op.tile), width)
                    tile = inserted(value, tile, at, arith.constant(ir.IndexType.get(), column))
                scf.yield_([tile])
        carried[0] = branch.results[0]
    return carried[0]


@rules.lowers("kv.tile_store_rows")
def lower_store_rows(op: Any) -> None:
    buffer, (rows, columns), first = buffer_of(op.buffer), shape(op.value), stored_from(op)
    _require_stored(op)
    with loop(rows) as (row, _):
        at = as_index(row.ir)
        branch = scf.IfOp(tensor.extract(op.mask, [at]))
        with ir.InsertionPoint(branch.then_block):
            indices = _at(op.indices, at)
            for column, width in column_vectors(columns, LANES):
                place = [at, arith.constant(ir.IndexType.get(), column)]
                if width > 1:
                    type_ = ir.VectorType.get([width], element(op.value))
                    padding = arith.constant(element(op.value), 0.0 if buffer.dtype.is_float else 0)
                    minor = ir.AffineMap.get_minor_identity(2, 1)
                    value: Any = Vector(
                        vector.transfer_read(type_, op.value, place, minor, padding, [True]), buffer.dtype, width
                    )
                    buffer.store(*indices, first + column, value=value, alignment=buffer.dtype.itemsize)
                else:
                    buffer[(*indices, first + column)] = Value(tensor.extract(op.value, place), buffer.dtype)
            scf.yield_([])


@contextmanager
def elements(extents: Sequence[int], tile: ir.Value | None = None) -> Iterator[tuple[list[ir.Value], list[ir.Value]]]:
    """Loops over all elements of a shape: yields (indices, [tile]) as :func:`loop` does."""
    with loop(extents[0], tile) as (i, carried):
        if len(extents) == 1:
            yield [as_index(i.ir)], carried
            inner = carried
        else:
            with loop(extents[1], carried[0] if carried else None) as (j, inner):
                yield [as_index(i.ir), as_index(j.ir)], inner
            carried[:] = inner
    inner[:] = carried


@rules.lowers("kv.tile_gather")
def lower_gather(op: Any) -> ir.Value:
    buffer, type_ = buffer_of(op.buffer), element(op.tile)
    with elements(shape(op.tile), empty(op.tile.type)) as (at, carried):
        branch = scf.IfOp(tensor.extract(op.mask, at), [type_], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([buffer[tuple(_at(op.indices, *at))].ir])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([zeros(type_, 1)])
        carried[0] = tensor.insert(branch.results[0], carried[0], at)
    return carried[0]


@rules.lowers("kv.tile_scatter")
def lower_scatter(op: Any) -> None:
    buffer = buffer_of(op.buffer)
    with elements(shape(op.value)) as (at, _):
        branch = scf.IfOp(tensor.extract(op.mask, at))
        with ir.InsertionPoint(branch.then_block):
            place, value = tuple(_at(op.indices, *at)), Value(tensor.extract(op.value, at), buffer.dtype)
            if "add" in op.operation.attributes:
                atomic_add(buffer, place, value)
            else:
                buffer[place] = value
            scf.yield_([])


@rules.lowers("kv.tile_store")
def lower_store(op: Any) -> None:
    cache, (rows, columns) = Cache(op.cache, types.spec_of(op.cache.type)), shape(op.value)
    source = by_mlir(str(element(op.value)))
    batch, head, first, count = (Value(x, by_mlir("i32")) for x in (op.batch, op.head, op.first, op.count))
    exist = arith.maxsi(arith.minsi((count - first).ir, const(rows)), const(0))
    problem = tile_rows.why_not(cache.spec) if cache.spec.quantized else None
    if problem is not None:
        fail(op.operation, f"writes no tiles to this cache: {problem}: use kv.append")
    if cache.spec.quantized:
        with loop(exist) as (row, _):

            def read(column: int, width: int, row: Value = row) -> Any:
                held: Any = _elements_of(op.value, as_index(row.ir), column, width)
                held = Vector(held, source, width) if width > 1 else Value(held, source)
                return kv_cast(held, by_mlir("f32"))

            tile_rows.write_row(cache, batch, head, first + row, read, on_host=True)
        return
    with loop(exist) as (row, _):
        page = cache.page(batch, first + row)
        for column, width in column_vectors(columns, LANES):
            value: Any = _elements_of(op.value, as_index(row.ir), column, width)
            value = Vector(value, source, width) if width > 1 else Value(value, source)
            at = op.first_column.value + column
            cache.store(batch, head, first + row, at, kv_cast(value, cache.spec.dtype), page=page)


def _elements_of(tile: ir.Value, row: ir.Value, column: int, width: int) -> ir.Value:
    """Some elements of a row of a tile: a vector, or a scalar."""
    place = [row, arith.constant(ir.IndexType.get(), column)]
    if width == 1:
        return tensor.extract(tile, place)
    type_ = ir.VectorType.get([width], element(tile))
    padding = arith.constant(element(tile), 0.0 if isinstance(element(tile), ir.FloatType) else 0)
    minor = ir.AffineMap.get_minor_identity(2, 1)
    return vector.transfer_read(type_, tile, place, minor, padding, [True])


# --- lines and parts ---------------------------------------------------------------------------------


@rules.lowers("kv.tile_slice")
def lower_slice(op: Any) -> ir.Value:
    (rows, columns), first = shape(op.tile), (op.first_row.value, op.first_column.value)
    with loop(rows, empty(op.tile.type)) as (row, carried):
        for column, width in column_vectors(columns, LANES):
            found = _elements_of(op.source, as_index((row + first[0]).ir), first[1] + column, width)
            carried[0] = inserted(found, carried[0], as_index(row.ir), arith.constant(ir.IndexType.get(), column))
    return carried[0]


@rules.lowers("kv.tile_concatenate")
def lower_concatenate(op: Any) -> ir.Value:
    with loop(shape(op.tile)[0], empty(op.tile.type)) as (row, carried):
        at, behind = as_index(row.ir), 0
        for part in (op.left, op.right):
            for column, width in column_vectors(shape(part)[1], LANES):
                found = _elements_of(part, at, column, width)
                carried[0] = inserted(found, carried[0], at, arith.constant(ir.IndexType.get(), behind + column))
            behind += shape(part)[1]
    return carried[0]


@rules.lowers("kv.tile_scan")
def lower_scan(op: Any) -> ir.Value:
    type_ = element(op.result_)
    fold = {("add", True): arith.addf, ("add", False): arith.addi, ("mul", True): arith.mulf}
    combine = fold.get((op.kind.value, isinstance(type_, ir.FloatType)), arith.muli)
    axis, extents = op.axis.value, shape(op.source)
    others = [n for dimension, n in enumerate(extents) if dimension != axis]
    tile = copied(op.source)

    def along(line: list[ir.Value], tile: ir.Value) -> ir.Value:
        with loop(extents[axis], tile, first=1) as (n, carried):
            at, before = [*line], [*line]
            at.insert(axis, as_index(n.ir))
            before.insert(axis, as_index((n - 1).ir))
            made = combine(tensor.extract(carried[0], before), tensor.extract(carried[0], at))
            carried[0] = tensor.insert(made, carried[0], at)
        return carried[0]

    if not others:
        return along([], tile)
    with loop(others[0], tile) as (line, outer):
        outer[0] = along([as_index(line.ir)], outer[0])
    return outer[0]


@rules.lowers("kv.tile_total")
def lower_total(op: Any) -> ir.Value:
    fold = _FOLDS[op.kind.value][0 if isinstance(element(op.source), ir.FloatType) else 1]
    first = tensor.extract(op.source, [arith.constant(ir.IndexType.get(), 0)])
    with loop(shape(op.source)[0], first, first=1) as (i, carried):
        carried[0] = fold(carried[0], tensor.extract(op.source, [as_index(i.ir)]))
    return carried[0]


@rules.lowers("kv.tile_solve")
def lower_solve(op: Any) -> ir.Value:
    rows, columns = shape(op.right)
    with loop(rows, copied(op.right)) as (i, outer):
        with loop(i.ir, outer[0]) as (j, inner):
            factor = tensor.extract(op.lower, [as_index(i.ir), as_index(j.ir)])
            for column, width in column_vectors(columns, LANES):
                above, own = (_elements_of(inner[0], as_index(x.ir), column, width) for x in (j, i))
                by = vector.broadcast(ir.VectorType.get([width], factor.type), factor) if width > 1 else factor
                made = arith.subf(own, arith.mulf(by, above))
                inner[0] = inserted(made, inner[0], as_index(i.ir), arith.constant(ir.IndexType.get(), column))
        outer[0] = inner[0]
    return outer[0]


# --- the whole -------------------------------------------------------------------------------------


def fill_constants(function: ir.Operation) -> None:
    """Replace splat constants of tiles by fills: a constant tensor would be an array in the program."""
    for op in ops_named(function, "arith.constant"):
        if is_tile(op.results[0]):
            splat = splat_of(op.results[0])
            if splat is not None:
                with ir.InsertionPoint(op), op.location:
                    value = ir.Operation.create("arith.constant", [element(op.results[0])], [], {"value": splat})
                    replace(op, filled(op.results[0].type, value.result))


def write_in_place(function: ir.Operation) -> None:
    """Write loop-carried tiles in place, so that all iterations use the same memory."""
    for op in ops_named(function, "scf.for", "scf.while"):
        body = op.regions[-1].blocks[0]
        arguments: list[Any] = list(body.arguments)[1:]
        if op.name == "scf.while":  # for tiles, the condition passes on the carried values
            before = op.regions[0].blocks[0]
            handed = list(_end(before).operands)[1:]
            arguments = [body.arguments[handed.index(x)] if x in handed else x for x in before.arguments]
        end = _end(body)
        with ir.InsertionPoint(op), op.location:
            for i, value in enumerate(op.operands):
                if is_tile(value) and len(list(value.uses)) > 1:
                    op.operands[i] = copied(value)
        with ir.InsertionPoint(end), op.location:
            for i, value in enumerate(end.operands):  # tiles that swap are all read before any is written
                if is_tile(value) and value != arguments[i] and isinstance(value.owner, ir.Block):
                    end.operands[i] = copied(value)
            for i, value in enumerate(end.operands):
                if is_tile(value) and value != arguments[i]:
                    end.operands[i] = ir.Operation.create(
                        "bufferization.materialize_in_destination", [value.type], [value, arguments[i]]
                    ).result


def copied(value: ir.Value) -> ir.Value:
    """A copy of a tile in its own memory."""
    segments = {"operandSegmentSizes": ir.DenseI32ArrayAttr.get([0, 1, 0])}
    return ir.Operation.create("bufferization.alloc_tensor", [value.type], [value], segments).result


def _end(block: ir.Block) -> ir.Operation:
    return block.operations[len(block.operations) - 1].operation


@kv_pass()
def run(module: ir.Module, options: Any) -> None:
    for function in tiled(module):
        score_weights.expand(function, score_weights.chosen)
        fill_constants(function)
        write_in_place(function)
        found = walk(function, rules.table.__contains__)
        rules.apply(function, found=[op for op in found if op.name != "kv.cast" or is_tile(op.results[0])])
