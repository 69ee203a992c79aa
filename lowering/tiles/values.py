# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lowering rules of distribute-kv-tiles for values of tiles: arithmetic, products, indices, gathers and scatters.

A rule is a function of (the op, the kernel's ``Distribution``) that emits the ops of one thread, and returns the values
that replace the op's results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlir import ir
from mlir.dialects import arith, vector as mlir_vector

from kvarn.dialect import ops, types
from kvarn.dialect.dtypes import bool_, by_mlir, f8e4m3, f32, i32
from kvarn.dialect.ops.tile import SHARED, SHARED_TRANSPOSED, row_format
from kvarn.dialect.register_layout import COLUMN, ROW, RegisterLayout
from kvarn.dialect.shared_layout import CHUNK
from kvarn.dialect.tile_layout import GROUP_WARPS
from kvarn.dsl import functional, ptx
from kvarn.dsl.memory import SHARED as SHARED_SPACE, Pointer
from kvarn.dsl.values import Value, vector
from kvarn.lowering.pass_base import fail
from kvarn.lowering.rewrite import Rules

from . import (
    barriers,
    exchange as tile_exchange,
    fragments as tile_fragments,
    lines as tile_lines,
    memory as tile_memory,
    mma as tile_mma,
    products as tile_products,
    two_term_rows as tile_terms,
    windows as tile_windows,
)
from .boxes import panel_bounds
from .chunks import Gather
from .fast_math import CONTRACT, FAST
from .ir import JOINED, PROMOTED, WARPGROUP, WARPGROUP_ROWS, filled, is_tile, is_transposed, layout_of
from .products import Product
from .threads import (
    elements,
    floats,
    folded,
    from_elements,
    held_as_words,
    numbers,
    register_layout,
    shared_layout,
    shuffled,
    splat,
    vector_type,
)

if TYPE_CHECKING:
    from kvarn.lowering.passes.tiles.distribute_kv_tiles import Distribution

RULES = Rules()  # by the name of the op
ONES = 0x38383838  # four of e4m3
TILES = ("kv.tile", "kv.tile2")  # attributes: the types of an op's tiles before they became vectors
WEIGHTS = "kv.weights"  # on sums of weights that are converted in the same pass: the element type


@RULES.lowers("kv.tile_index")
def _index(op: Any, d: Distribution) -> ir.Value:
    layout = register_layout(op.indices.type)
    axis = 0 if layout.shape[1] == 1 else 1
    offsets = [layout.register_offset(r)[axis] for r in range(layout.registers)]
    own = layout.thread_offset(d.threads.lane, d.threads.warp)[axis]
    if isinstance(own, int):
        return numbers([own + x for x in offsets])
    return arith.addi(splat(own.ir, len(offsets)), numbers(offsets))


@RULES.lowers("tensor.splat")
def _splat(op: Any, d: Distribution) -> ir.Value:
    made = vector_type(op.operation.results[0].type)
    return mlir_vector.broadcast(made, op.operation.operands[0])


@RULES.lowers("kv.tile_broadcast")
def _broadcast(op: Any, d: Distribution) -> ir.Value:
    layout = register_layout(op.tile.type)
    if op.dimension.value == 0:
        return shuffled(tile_exchange.rows_of(op.source, layout, d.threads), layout.row_registers)
    return shuffled(op.source, layout.column_registers)


@RULES.lowers("kv.tile_ramp")
def _ramp(op: Any, d: Distribution) -> ir.Value:
    """One fma per element with the column as an immediate: no register holds it."""
    layout = register_layout(op.tile.type)
    step, start = (tile_exchange.rows_of(x, layout, d.threads) for x in (op.step, op.start))
    own = layout.thread_offset(d.threads.lane, d.threads.warp)[1]
    if not isinstance(own, int):  # fold the lane's first column into the start
        first = splat(arith.sitofp(ir.F32Type.get(), own.ir), len(layout.rows_a_thread))
        start = arith.addf(arith.mulf(step, first, fastmath=CONTRACT), start, fastmath=CONTRACT)
        own = 0
    columns = floats([own + layout.register_offset(r)[1] for r in range(layout.registers)])
    steps, starts = (shuffled(x, layout.row_registers) for x in (step, start))
    return arith.addf(arith.mulf(steps, columns, fastmath=CONTRACT), starts, fastmath=CONTRACT)


@RULES.lowers("arith.negf")
def _negate(op: Any, d: Distribution) -> ir.Value:
    value, type_ = op.operation.operands[0], op.operation.results[0].type
    if not is_tile(op.operation.results[0]) or layout_of(type_) != SHARED:
        made = vector_type(type_) if is_tile(op.operation.results[0]) else type_
        return ir.Operation.create("arith.negf", [made], [value]).result
    layout = shared_layout(type_)
    threads = replace(d.threads, whole=d.threads.whole or layout.rows != WARPGROUP_ROWS * d.threads.consumers)
    tile_memory.negate_rows(Pointer(value, SHARED_SPACE), layout, threads)
    return value


@RULES.lowers("kv.cast")
def _cast(op: Any, d: Distribution) -> ir.Value:
    """Casts from and to 8-bit elements; other casts are ops of arith."""
    operand, result = op.operation.operands[0], op.operation.results[0]
    if not is_tile(result):
        return op.operation.clone().result  # scalars, and vectors that are distributed already
    given, wanted = ir.VectorType(operand.type).element_type, ir.RankedTensorType(result.type).element_type
    if given.width == 8 and wanted.width > 8:
        return ops.cast(operand, by_mlir(str(wanted)))
    if str(given) != "f32":
        fail(op, f"casts {given} to {wanted}, which GPUs do for f32 only: write kv.f32(x) first")
    if str(wanted) != "f8E4M3FN":
        return ops.cast(operand, by_mlir(str(wanted)))
    return tile_products.narrowed(operand) if held_as_words(result.type) else ops.cast(operand, f8e4m3)


@RULES.lowers("kv.tile_reduce")
def _reduce(op: Any, d: Distribution) -> ir.Value:
    if str(ir.VectorType(op.source.type).element_type) not in ("f32", "i32"):
        fail(op, "reduces elements that are neither f32 nor i32, which GPUs do not do here: reduce kv.f32(x)")
    layout = register_layout(op.operation.attributes["kv.tile"].value)
    fold = tile_exchange.fold_of(op, op.axis.value, d.threads.split_like(layout))
    places = layout.place_registers(fold.kept)
    if WEIGHTS in op.operation.attributes:
        return _sum_and_convert(op, d, places, len(layout.rows_a_thread))
    parts = []
    for place in range(len(layout.places_a_thread(fold.kept))):
        parts.append(folded(shuffled(op.source, [r for r, of in enumerate(places) if of == place]), fold.combine))
    if "kv.partial" in op.operation.attributes:
        held = register_layout(op.operation.results[0].type).registers
        return from_elements(tile_exchange.among_rows(parts, held, layout, d.threads))
    return from_elements(d.folded(op.operation, parts, layout, fold))


def _sum_and_convert(op: Any, d: Distribution, rows: Sequence[int], count: int) -> ir.Value:
    """Sum and convert a thread's weights, a few at a time, so that few f32 weights are live."""
    narrow = ir.TypeAttr(op.operation.attributes[WEIGHTS]).value
    sums: list[ir.Value | None] = [None] * count
    words: list[ir.Value] = []
    for lanes, part in d.chunks.parts(op.source):
        words += tile_products.pinned_words(tile_products.converted(part, narrow))
        for row, known in enumerate(sums):
            own = shuffled(part, [i for i, lane in enumerate(lanes) if rows[lane] == row])
            sums[row] = own if known is None else arith.addf(known, own)
    d.weights[op.source] = tile_products.of_words(words, tile_products.converted_type(op.source, narrow))
    return from_elements([folded(x, arith.addf) for x in sums])


@RULES.lowers("kv.tile_reduce_lanes")
def _reduce_lanes(op: Any, d: Distribution) -> ir.Value:
    layout = register_layout(op.operation.attributes["kv.tile"].value)
    fold = tile_exchange.fold_of(op, COLUMN, d.threads)
    return from_elements(d.folded(op.operation, elements(op.source), layout, fold))


@RULES.lowers("kv.tile_mask")
def _mask(op: Any, d: Distribution) -> ir.Value:
    hidden = filled(op.scores.type, float("-inf"))
    return d.chunks.computed(arith.select(op.mask, op.scores, hidden))


@RULES.lowers("kv.warp_any")
def _warp_any(op: Any, d: Distribution) -> ir.Value:
    found: ir.Value | None = None
    for x in elements(op.mask):
        found = x if found is None else arith.ori(found, x)
    return (ptx.ballot(Value(found, bool_)) != 0).ir


@RULES.lowers(*FAST)
def _approximated(op: Any, d: Distribution) -> ir.Value:
    x, name = op.operation.operands[0], op.operation.name
    if isinstance(x.type, ir.VectorType) and str(x.type.element_type) == "f32":
        return FAST[name](x)
    return ir.Operation.create(name, [x.type], [x]).result


@RULES.lowers("kv.tile_share")
def _share(op: Any, d: Distribution) -> ir.Value:
    layout = shared_layout(op.operation.results[0].type)
    place = d.allocate(layout)
    tile_exchange.begin(op.operation, d.threads)
    tile_memory.stage_tile(op.source, op.operation.attributes["kv.tile"].value, place, layout, d.threads)
    d.threads.fence()
    barriers.sync_consumers(d.threads)
    return place.ir


@RULES.lowers("kv.tile_unshare")
def _unshare(op: Any, d: Distribution) -> ir.Value:
    tile = op.operation.results[0].type
    layout = shared_layout(op.operation.attributes["kv.tile"].value)
    return tile_memory.read_tile(Pointer(op.source, SHARED_SPACE), layout, tile, d.threads)


@RULES.lowers("kv.tile_transpose")
def _transpose(op: Any, d: Distribution) -> ir.Value:
    if layout_of(op.operation.results[0].type) != SHARED_TRANSPOSED:
        fail(op, "transposes a tile that no product reads: only operands of products are transposed on GPUs")
    return op.source  # the same memory


@RULES.lowers("kv.tile_terms")
def _terms(op: Any, d: Distribution) -> list[ir.Value]:
    layout = d.columns_of[op.operation.results[0]]
    with ir.InsertionPoint.at_block_begin(d.body):
        powers = Pointer(ops.alloc_shared(layout.rows * f32.itemsize, CHUNK), SHARED_SPACE)
    shift = None if op.shift is None else Value(op.shift, i32)
    found = tile_terms.split_rows(Pointer(op.source, SHARED_SPACE), layout, powers, d.threads, shift)
    return [op.source, from_elements([x.ir for x in found])]


@RULES.lowers("kv.tile_columns")
def _columns(op: Any, d: Distribution) -> ir.Value:
    tile, whole = ir.RankedTensorType(op.operation.results[0].type), d.columns_of[op.operation.results[0]]
    transposed = layout_of(tile) == SHARED_TRANSPOSED
    offset = (
        whole.offset(op.first_column.value, 0) if transposed else whole.view(op.first_column.value, tile.shape[1])[0]
    )
    return (Pointer(op.source, SHARED_SPACE) + offset).ir


@RULES.lowers("kv.tile_fragments")
def _fragments(op: Any, d: Distribution) -> ir.Value:
    stored, tile = ir.RankedTensorType(op.operation.attributes["kv.tile"].value), op.operation.results[0].type
    dtypes = tuple(by_mlir(str(x.element_type)) for x in (stored, ir.RankedTensorType(tile)))
    place = Pointer(op.source, SHARED_SPACE)
    given = place, shared_layout(stored), register_layout(tile), dtypes, d.threads
    return tile_fragments.read(*given, is_transposed(tile))


@RULES.lowers("kv.tile_scales")
def _scales(op: Any, d: Distribution) -> ir.Value:
    return tile_fragments.scales(op, register_layout(op.operation.results[0].type), d.threads)


@RULES.lowers("kv.tile_load")
def _load(op: Any, d: Distribution) -> ir.Value:
    if op.lists is not None or not row_format(op, types.spec_of(op.cache.type)).plain:
        fail(op, "loads listed rows, or rows with a format, that no product reads: only products take them")
    return tile_memory.load_registers(op, register_layout(op.tile.type), d.threads)


@RULES.lowers("kv.tile_gather")
def _gather(op: Any, d: Distribution) -> ir.Value:
    if op.operation.result in d.chunks.waiting:
        return d.chunks.defer(Gather(op.buffer, op.mask, list(op.indices)), vector_type(op.tile.type))
    return tile_memory.gathered(op.buffer, op.mask, list(op.indices))


@RULES.lowers("kv.make_table")
def _make_table(op: Any, d: Distribution) -> ir.Value:
    with ir.InsertionPoint.at_block_begin(d.body):
        return ops.alloc_shared(tile_windows.bytes_of(op.length.value) * d.threads.consumers, tile_windows.ALIGNMENT)


@RULES.lowers("kv.table_store")
def _table_store(op: Any, d: Distribution) -> None:
    tile_windows.store(op, register_layout(op.operation.attributes["kv.tile"].value), d.threads)


@RULES.lowers("kv.tile_windows")
def _windows(op: Any, d: Distribution) -> ir.Value:
    layout = register_layout(op.tile.type)
    found = tile_windows.windows(op, layout, d.threads)
    if op.operation.result in d.chunks.waiting:
        return d.chunks.defer(found, vector_type(op.tile.type))
    return found.lanes(range(layout.registers))


@RULES.lowers("kv.tile_scatter")
def _scatter(op: Any, d: Distribution) -> None:
    layout = register_layout(op.operation.attributes["kv.tile"].value)
    value = tile_products.unpacked(op.value) if held_as_words(op.operation.attributes["kv.tile"].value) else op.value
    # If several lanes or warps hold the same elements, the first one writes.
    copies = [bit for bit, basis in enumerate(layout.lane_bases) if basis == (0, 0)]
    first = (d.threads.lane & sum(1 << bit for bit in copies)) == 0
    alike = layout.replicas > 1 << len(copies)
    if alike and d.threads.across > 1 and layout.warps_along(COLUMN) == 1:
        first = first & (d.threads.column_warp == 0)
    if alike and d.threads.stack > 1 and (layout.warps_along(ROW), layout.warps_along(COLUMN)) == (1, d.threads.across):
        first = first & (d.threads.row_warp == 0)
    tile_memory.scatter(op, value, first, range(layout.registers))


@RULES.lowers("kv.tile_scan")
def _scan(op: Any, d: Distribution) -> ir.Value:
    lines = lines_of_operand(op.operation, 0, d)
    kind, axis = op.kind.value, op.axis.value
    return tile_lines.exchanged([lines], lambda: tile_lines.scan(lines[2], kind, axis, d.threads), d.threads)


@RULES.lowers("kv.convert_layout")
def _convert_layout(op: Any, d: Distribution) -> ir.Value:
    lines = lines_of_operand(op.operation, 0, d)
    tile_lines.write([lines], d.threads)
    return lines[2].get(register_layout(op.operation.results[0].type), d.threads)


@RULES.lowers("kv.tile_total")
def _total(op: Any, d: Distribution) -> ir.Value:
    lines = lines_of_operand(op.operation, 0, d)
    tile_lines.write([lines], d.threads)
    return tile_lines.total(lines[2], tile_exchange.fold_of(op, COLUMN, d.threads).combine, d.threads)


@RULES.lowers("kv.tile_solve")
def _solve(op: Any, d: Distribution) -> ir.Value:
    both = [lines_of_operand(op.operation, number, d) for number in (0, 1)]
    return tile_lines.exchanged(both, lambda: tile_lines.solve(both[0][2], both[1][2], d.threads), d.threads)


def lines_of_operand(
    op: ir.Operation, number: int, d: Distribution
) -> tuple[ir.Value, RegisterLayout, tile_lines.Lines]:
    """An operand of an op along lines, its layout, and shared memory for it."""
    tile = ir.RankedTensorType(op.attributes[TILES[number] if number < len(TILES) else TILES[0]].value)
    layout, triangle = register_layout(tile), op.name == "kv.tile_solve" and number == 0

    def allocate(size: int) -> Pointer:
        with ir.InsertionPoint.at_block_begin(d.body):
            return Pointer(ops.alloc_shared(size, CHUNK), SHARED_SPACE)

    return op.operands[number], layout, tile_lines.lines_of(layout, tile.element_type, triangle, allocate)


@RULES.lowers("kv.tile_slice")
def _slice(op: Any, d: Distribution) -> ir.Value:
    source = register_layout(op.operation.attributes["kv.tile"].value)
    tile = register_layout(op.operation.results[0].type)
    places = {source.register_offset(r): r for r in range(source.registers)}
    first = op.first_row.value, op.first_column.value
    wanted = [tuple(x + y for x, y in zip(tile.register_offset(r), first, strict=True)) for r in range(tile.registers)]
    if any(at not in places for at in wanted):
        rows, columns = source.extents[ROW], source.extents[COLUMN]
        what = f"slices a tile of {source.shape[0]} x {source.shape[1]} from row {first[0]} and column {first[1]} on"
        fail(op, f"{what}: on this target rows start at multiples of {rows}, columns at multiples of {columns}")
    return shuffled(op.source, [places[at] for at in wanted])


@RULES.lowers("kv.tile_concatenate")
def _concatenate(op: Any, d: Distribution) -> ir.Value:
    left, right = (register_layout(op.operation.attributes[name].value) for name in TILES)
    tile = register_layout(op.operation.results[0].type)
    places = {left.register_offset(r): r for r in range(left.registers)}
    for r in range(right.registers):
        row, column = right.register_offset(r)
        places[row, column + left.shape[COLUMN]] = left.registers + r
    wanted = [tile.register_offset(r) for r in range(tile.registers)]
    if any(at not in places for at in wanted):
        fail(op, "joins tiles whose columns the warps divide: on this target only tiles with all columns in each warp")
    both = [*elements(op.left), *elements(op.right)]
    return from_elements([both[places[at]] for at in wanted])


# --- products ----------------------------------------------------------------------------------------


@RULES.lowers("kv.dot")
def _dot(op: Any, d: Distribution) -> ir.Value:
    product = d.products[op.operation.result]
    a, b = product.operands(op)
    if d.grouped:
        return tile_mma.multiply(product, a, b, op.c, d.threads)
    if PROMOTED in op.operation.attributes:
        columns = op.operation.attributes[PROMOTED].value
        return tile_products.promoted(product, _left(a, product, d), b, op.c, columns)
    return tile_products.wait(0, [_start(op, d)])[0]


@RULES.lowers("kv.dot_start")
def _start(op: Any, d: Distribution) -> ir.Value:
    product = d.products[op.operation.result]
    a, b = product.operands(op)
    left, right = _left(a, product, d), _right(b, product, d)
    if b not in d.partial_tiles:
        return tile_products.start(product, left, right, op.c, JOINED in op.operation.attributes)
    parts = panel_bounds(product.b, d.partial_tiles[b][0].parts)
    return tile_products.start_parts(product, left, right, op.c, parts, lambda part: d.arrive(b, [part]))


def _left(a: ir.Value, product: Product, d: Distribution) -> ir.Value:
    """Operand A: the registers, or a pointer to this warpgroup's rows."""
    if product.a is None:
        return a
    threads = replace(d.threads, across=product.across)
    group = threads.group if product.across == 1 else threads.row_warp // GROUP_WARPS
    return (Pointer(a, SHARED_SPACE) + group * product.row_offset(WARPGROUP_ROWS)).ir


def _right(b: ir.Value, product: Product, d: Distribution) -> ir.Value:
    """A pointer to this warpgroup's columns of B: all, or its share if warpgroups divide the columns."""
    if product.across == 1:
        return b
    column = replace(d.threads, across=product.across).column_warp
    return (Pointer(b, SHARED_SPACE) + column * product.column_offset(product.n // product.across)).ir


@RULES.lowers("kv.dot_wait")
def _wait(op: Any, d: Distribution) -> list[ir.Value]:
    return tile_products.wait(op.pending.value, list(op.operation.operands))


@RULES.lowers("kv.tile_saturated")
def _saturated(op: Any, d: Distribution) -> ir.Value:
    return tile_products.saturated(op.source)


@RULES.lowers("kv.tile_ones")
def _ones(op: Any, d: Distribution) -> ir.Value:
    """Fill a tile with ones; the block barrier after the initialization of mbarriers publishes it."""
    layout = shared_layout(op.operation.results[0].type)
    place, threads = d.allocate(layout), d.threads.first + d.threads.consumers * WARPGROUP
    with functional.loop(d.threads.block_thread, layout.bytes // CHUNK, threads) as i:
        (place + i * CHUNK).store(vector(i32, [ONES] * (CHUNK // 4)))
    ptx.fence_proxy_async()
    return place.ir


@RULES.lowers("kv.tile_add_columns")
def _add_columns(op: Any, d: Distribution) -> ir.Value:
    return tile_products.added(op.source, op.added, op.first_column.value)
