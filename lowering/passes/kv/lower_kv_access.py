# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lower cache accesses and addressing to pointer arithmetic, ``llvm.load`` and ``llvm.store``.

Offsets follow ``dialect.layout``: page * stride0 is a 64-bit product, offsets within a page are 32-bit if they fit.
A store tests its raw table entry against the pool (``oob = "drop"``); a load's page was clamped by ``kv.page``. Slots
of a page are within it; slots of a continuous cache, a dense or a ragged operand are arbitrary tokens, which loads
clamp and stores test. Lengths are clamped to the capacity of a sequence's table row or region, so that loops over them
end there, whatever values are in memory. Quantized loads multiply by their scale. Casts and fields of handles are left
to later passes (``kv.cast``, ``kv.field``); a populate without vector loads is lowered here in scalar form.

Before:  %v = "kv.load"(%k, %b, %h, %t, %d, %p) {width = 8, kv.alignment = 16} : vector<8xbf16>
After:   %e = <page * stride0 + slot * token stride + h * head stride + d>
         %a = llvm.getelementptr %base[%e] ; %v = llvm.load %a {alignment = 16} : vector<8xbf16>
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.dialects import arith, llvm, scf, vector

from kvarn.dialect import codes, dtypes, layout, ops, types, verify
from kvarn.dialect.dtypes import CODED, f32, i32 as i32_of_kernels, u8
from kvarn.dialect.layout import DENSE, RAGGED, SCALES, CacheSpec
from kvarn.dsl.values import Value, Vector, from_lanes, where
from kvarn.lowering import memory_effects
from kvarn.lowering.access_plan import Plan, is_access, units_read
from kvarn.lowering.bounds import in_pool, slot_of, token_capacity
from kvarn.lowering.index import Ix, const, i32, load, offset, pointer, store
from kvarn.lowering.pass_base import fail, kv_pass
from kvarn.lowering.rewrite import Rules, defining_op, functions, is_kernel, ops_named, walk

from . import vectorize_kv_lookups
from .expand_kv_tma import is_copy
from .hoist_kv_lookups import root

RULES = Rules()
# Ops that later passes lower.
_LATER = ("kv.field", "kv.cast", "kv.alloc_shared", "kv.make_collection", "kv.make_cache", "kv.make_operand",
          "kv.buffer_operand", "kv.key_cache", "kv.value_cache", "kv.buffer_address")  # fmt: skip

_ROWS = ("kv.populate", "kv.make_rows")  # ops that make rows


@dataclass(frozen=True)
class Options:
    """target: the target of the code, for the rules of other packages.

    clamp: clamp table indices, page ids, slots of loads, and lengths (otherwise they are trusted).
    """

    target: str = "sm_90a"
    clamp: bool = True


def storage_type(dtype: dtypes.DType, lanes: int) -> ir.Type:
    """The LLVM type for loading ``lanes`` elements: 8-bit floats as integers, bytes in words of four."""
    if dtype.bits == 8:
        if lanes % 4 == 0:
            return i32() if lanes == 4 else ir.VectorType.get([lanes // 4], i32())
        element = ir.IntegerType.get_signless(8)
    else:
        element = types.element_type(dtype)
    return element if lanes == 1 else ir.VectorType.get([lanes], element)


def gep_type(dtype: dtypes.DType) -> ir.Type:
    """The element type of pointer arithmetic; elements that share a byte are addressed by it."""
    return ir.IntegerType.get_signless(8) if dtype.unit.bits == 8 else types.element_type(dtype)


def in_units(dtype: dtypes.DType, elements: Ix) -> Ix:
    """An offset in elements as one in units of memory: bytes for elements that share one."""
    return dtype.units(elements)


def from_storage(value: ir.Value, type_: ir.Type) -> ir.Value:
    """A loaded value in the dialect's type."""
    if value.type == type_:
        return value
    lanes = verify.element_and_width(type_)[1]
    bytes_ = ir.VectorType.get([lanes], ir.IntegerType.get_signless(8))
    if str(value.type) != "i8" and value.type != bytes_:
        value = llvm.bitcast(bytes_, value)
    return value if value.type == type_ else arith.bitcast(type_, value)


def to_storage(value: ir.Value, dtype: dtypes.DType) -> ir.Value:
    """A value of the dialect's type in the LLVM type of stores."""
    lanes = verify.element_and_width(value.type)[1]
    target = storage_type(dtype, lanes)
    if value.type == target:
        return value
    i8 = ir.IntegerType.get_signless(8)
    is_vector = isinstance(value.type, ir.VectorType)
    bytes_ = ir.VectorType.get([lanes], i8) if is_vector else i8
    if value.type != bytes_:
        value = arith.bitcast(bytes_, value)
    if is_vector and lanes == 1 and not isinstance(target, ir.VectorType):
        return vector.extract(value, [], [0])
    return value if value.type == target else llvm.bitcast(target, value)


def raw_entry(cache: ir.Value, batch: ir.Value, token: ir.Value, clamp: bool) -> ir.Value:
    """The table entry of a token; -1 (no page) for a sequence or column outside of the table."""
    spec = types.spec_of(cache.type)
    if not spec.of_cache:
        return buffer_entry(cache, spec, batch, clamp)
    column, _ = layout.page_and_slot(spec, Ix(token))
    index = Ix(batch).wide * Ix(ops.field(cache, "lookup_stride"))
    inside = Ix(batch).below(Ix(ops.field(cache, "batch")))
    if spec.paged:
        index = index + column.wide
        inside = arith.andi(inside, column.below(Ix(ops.field(cache, "lookup_columns"))))
    if clamp:
        index = Ix(arith.select(inside, index.value, const(0, 64)))
    entry = load(offset(ops.field(cache, "lookup"), index, i32()), i32(), 4, invariant=True)
    return arith.select(inside, entry, const(-1)) if clamp else entry


def buffer_entry(cache: ir.Value, spec: CacheSpec, batch: ir.Value, clamp: bool) -> ir.Value:
    """The replacement of the table entry for an operand without a table: the sequence, or its first row."""
    inside = Ix(batch).below(Ix(ops.field(cache, "batch")))
    entry = batch
    if spec.kind == RAGGED:
        index = Ix(arith.select(inside, batch, const(0))) if clamp else Ix(batch)
        entry = load(offset(ops.field(cache, "offsets"), index.wide, i32()), i32(), 4, invariant=True)
    return arith.select(inside, entry, const(-1)) if clamp else entry


@RULES.lowers("kv.raw_page")
def lower_raw_page(op: Any, options: Options) -> ir.Value:
    return raw_entry(op.cache, op.batch, op.token, True)


@RULES.lowers("kv.page")
def lower_page(op: Any, options: Options) -> ir.Value:
    return clamped_page(op.cache, op.batch, op.token, options)


def clamped_page(cache: ir.Value, batch: ir.Value, token: ir.Value, options: Options) -> ir.Value:
    """The page of a token; the pool's last page if the table names none."""
    entry = raw_entry(cache, batch, token, options.clamp)
    if not options.clamp:
        return entry
    return Ix(entry).least(Ix(ops.field(cache, "num_blocks")) - 1).value


def in_page(spec: CacheSpec, slot: Ix, head: ir.Value, dim: ir.Value, of_scales: bool) -> Ix:
    """Offset within a page; 32-bit if a whole page fits, otherwise 64-bit."""
    formula = layout.scale_offset if of_scales else layout.element_offset
    fits = spec.paged and spec.page_span < 2**31
    h, d, zero = Ix(head), Ix(dim), Ix(const(0))
    if not fits:
        slot, h, d, zero = slot.wide, h.wide, d.wide, Ix(const(0, 64))
    return formula(spec, zero, slot, h, d, 0).wide


def element_address(op: Any, page: ir.Value, clamp: bool, of_scales: bool = False) -> ir.Value:
    """Address of (page, token % P, head, dim) of an access op; for a scales operand, of the scale.

    Of a user's own elements, that of the eight to which the element belongs.
    """
    spec = types.spec_of(op.cache.type)
    of_scales = of_scales or spec.kind == SCALES
    slot = slot_of(op.cache, page, op.token, clamp)
    names = ("scales", "scales_stride0") if of_scales else ("base", "stride0")
    dtype = spec.scale_dtype if of_scales else spec.dtype
    dim = (Ix(op.dim) // CODED * CODED).value if dtype.code else op.dim
    index = Ix(page).wide * Ix(ops.field(op.cache, names[1])) + in_page(spec, slot, op.head, dim, of_scales)
    return offset(ops.field(op.cache, names[0]), in_units(dtype, index), gep_type(dtype))


def page_of(op: Any, options: Options) -> ir.Value:
    return op.page if op.page is not None else clamped_page(op.cache, op.batch, op.token, options)


def planned(op: Any, dtype: dtypes.DType) -> tuple[int, bool]:
    """(alignment, read-only) from the plan pass; without it, (one element, false)."""
    attributes = op.operation.attributes
    bytes_ = attributes["kv.alignment"].value if "kv.alignment" in attributes else dtype.unit.itemsize
    return bytes_, "kv.read_only" in attributes


def read(op: Any, options: Options, of_scales: bool = False) -> ir.Value:
    """Load the stored elements of an access, in their storage dtype; of packed elements, their bytes."""
    spec = types.spec_of(op.cache.type)
    dtype = (spec.scale_dtype if of_scales else spec.data_dtype).unit
    result = op.operation.results[0].type
    lanes = verify.element_and_width(result)[1]
    if spec.packed and not of_scales and op.operation.name == "kv.load":
        lanes = units_read(spec.dtype, lanes)
    stored = types.value_type(dtype, lanes)
    if isinstance(result, ir.VectorType) and lanes == 1:
        stored = ir.VectorType.get([1], types.element_type(dtype))
    alignment, read_only = planned(op, dtype)
    address = element_address(op, page_of(op, options), options.clamp, of_scales)
    value = load(address, storage_type(dtype, lanes), alignment, read_only)
    if isinstance(stored, ir.VectorType) and lanes == 1:
        return vector.from_elements(stored, [from_storage(value, types.element_type(dtype))])
    return from_storage(value, stored)


def unpacked(bytes_: ir.Value, result: ir.Type, dim: ir.Value) -> ir.Value:
    """The 4-bit elements of bytes, as bytes: the low half is the even element. A single element is that of a dim."""
    if not isinstance(result, ir.VectorType):
        shift = arith.trunci(ir.IntegerType.get_signless(8), ((Ix(dim) & 1) * 4).value)
        return arith.andi(arith.shrui(bytes_, shift), _splat(bytes_.type, 15))
    low, high = arith.andi(bytes_, _splat(bytes_.type, 15)), arith.shrui(bytes_, _splat(bytes_.type, 4))
    return vector.interleave(low, high)


def numbers(indices: ir.Value, dtype: dtypes.DType) -> ir.Value:
    """What 4-bit elements, given as bytes, stand for before zeros and scales; u4 stay bytes."""
    if dtype is dtypes.u4:
        return indices
    if dtype is not dtypes.f4e2m1:
        return looked_up(indices, dtype.table)
    # The exponent and mantissa in the low places of those of an f16, which is the number times 2^-14.
    i16, wide = _like(indices, ir.IntegerType.get_signless(16)), _like(indices, ir.F32Type.get())
    words = arith.extui(i16, indices)
    size = arith.shli(arith.andi(words, _splat(i16, 7)), _splat(i16, 9))
    sign = arith.shli(arith.andi(words, _splat(i16, 8)), _splat(i16, 12))
    half = arith.bitcast(_like(indices, ir.F16Type.get()), arith.ori(size, sign))
    return arith.mulf(arith.extf(wide, half), _splat(wide, 2.0**14))


def decoded(bytes_: ir.Value, result: ir.Type, dim: ir.Value, dtype: dtypes.DType) -> ir.Value:
    """The f32 numbers of a user's own elements, from the bytes of whole eights of them."""
    data, decode, lanes = Vector(bytes_, u8, ir.VectorType(bytes_.type).shape[0]), codes.of(dtype.code).decoded, []
    for first in range(0, data.lanes, dtype.bits):
        lanes.extend(decode(data[first : first + dtype.bits]))
    width = verify.element_and_width(result)[1]
    if width < CODED:  # the part that begins at the element, which is a multiple of the width
        part = Value((Ix(dim) % CODED).value, i32_of_kernels)
        for first in range(width, CODED, width):
            lanes[:width] = [where(part == first, lanes[first + i], lanes[i]) for i in range(width)]
    found = from_lanes(lanes[:width], f32)
    return found.ir if isinstance(result, ir.VectorType) else lanes[0].ir


def looked_up(indices: ir.Value, table: Sequence[float]) -> ir.Value:
    """The f32 numbers of a table of 16 by their indices, given as bytes: by a tree of selections."""
    i8, wide = indices.type, _like(indices, ir.F32Type.get())
    found = [_splat(wide, x) for x in table]
    for bit in range(4):
        is_set = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(indices, _splat(i8, 1 << bit)), _splat(i8, 0))
        found = [arith.select(is_set, found[i + 1], found[i]) for i in range(0, len(found), 2)]
    return found[0]


def _like(value: ir.Value, element: ir.Type) -> ir.Type:
    """An element type in the shape of a value."""
    type_ = value.type
    return ir.VectorType.get(ir.VectorType(type_).shape, element) if isinstance(type_, ir.VectorType) else element


def _splat(type_: ir.Type, number: float) -> ir.Value:
    """A constant, in all elements of a vector type."""
    element = ir.VectorType(type_).element_type if isinstance(type_, ir.VectorType) else type_
    is_integer = isinstance(element, ir.IntegerType)
    one = ir.IntegerAttr.get(element, int(number)) if is_integer else ir.FloatAttr.get(element, number)
    if isinstance(type_, ir.VectorType):
        return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, one))
    return arith.constant(type_, one)


@RULES.lowers("kv.load")
def lower_load(op: Any, options: Options) -> ir.Value:
    spec = types.spec_of(op.cache.type)
    result = op.operation.results[0].type
    value = read(op, options)
    if not spec.quantized:
        return convert(value, result)
    # One scale serves all lanes. The product is computed in the scale's type, or in f32 if that type has no products.
    count = spec.granule_scales
    alignment, read_only = count * spec.scale_dtype.itemsize, "kv.scales_read_only" in op.operation.attributes
    address = element_address(op, page_of(op, options), options.clamp, of_scales=True)
    scale = from_storage(
        load(address, storage_type(spec.scale_dtype, count), alignment, read_only),
        types.value_type(spec.scale_dtype, count),
    )
    scale, zero = (vector.extract(scale, [], [i]) for i in range(count)) if spec.zero else (scale, None)
    if spec.dtype.code:
        if spec.dtype.code not in codes.registered:
            fail(op, f"needs the functions of the code {spec.dtype.code!r}: import the module that makes it (kv.Code)")
        value = decoded(value, result, op.dim, spec.dtype)
    elif spec.packed:
        value = numbers(unpacked(value, result, op.dim), spec.dtype)
    return scaled(value, scale, result, zero)


def scaled(value: ir.Value, scale: ir.Value, result: ir.Type, zero: ir.Value | None = None) -> ir.Value:
    """(value + zero) * scale, computed in f32 and rounded once to the result's type."""
    f32 = ir.F32Type.get()
    is_vector = isinstance(result, ir.VectorType)
    wide = ir.VectorType.get(ir.VectorType(result).shape, f32) if is_vector else f32

    def factor(x: ir.Value) -> ir.Value:
        return vector.broadcast(wide, convert(x, f32)) if is_vector else convert(x, f32)

    by = factor(scale)
    x = convert(value, wide)
    return convert(arith.mulf(x if zero is None else arith.addf(x, factor(zero)), by), result)


def convert(value: ir.Value, result: ir.Type) -> ir.Value:
    """Convert between element types: by arith where possible, by ``kv.cast`` for 8-bit types."""
    if value.type == result:
        return value
    source = dtypes.by_mlir(verify.element_and_width(value.type)[0])
    target = dtypes.by_mlir(verify.element_and_width(result)[0])
    if source.bits == 8 or target.bits == 8 or not (source.is_float and target.is_float):
        return ops.cast(value, target)
    if source.bits == target.bits:  # f16 <-> bf16
        f32 = ir.F32Type.get()
        wide = ir.VectorType.get(ir.VectorType(result).shape, f32) if isinstance(result, ir.VectorType) else f32
        return arith.truncf(result, arith.extf(wide, value))
    return arith.extf(result, value) if source.bits < target.bits else arith.truncf(result, value)


@RULES.lowers("kv.load_raw")
def lower_load_raw(op: Any, options: Options) -> ir.Value:
    return read(op, options)


@RULES.lowers("kv.load_scale")
def lower_load_scale(op: Any, options: Options) -> ir.Value:
    if layout.loads_no_scales(types.spec_of(op.cache.type)):
        return zeros(op.operation.results[0].type)
    return read(op, options, of_scales=True)


def zeros(type_: ir.Type) -> ir.Value:
    """Zero, or a vector of zeros."""
    element = ir.VectorType(type_).element_type if isinstance(type_, ir.VectorType) else type_
    zero = ir.FloatAttr.get(element, 0.0) if dtypes.by_mlir(str(element)).is_float else ir.IntegerAttr.get(element, 0)
    if isinstance(type_, ir.VectorType):
        return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, zero))
    return arith.constant(type_, zero)


def write(op: Any, of_scales: bool) -> None:
    """Store an access's value, subject to its out-of-bounds rule."""
    spec = types.spec_of(op.cache.type)
    dtype = (spec.scale_dtype if of_scales else spec.dtype).unit
    rule = op.oob.value
    page = op.page if op.page is not None else raw_entry(op.cache, op.batch, op.token, True)
    alignment, _ = planned(op, dtype)

    def emit() -> None:
        store(to_storage(op.value, dtype), element_address(op, page, False, of_scales), alignment)

    if rule == "unchecked":
        emit()
        return
    inside = in_pool(op.cache, page, op.token)
    if rule == "trap":
        bad = scf.IfOp(arith.xori(inside, arith.constant(ir.IntegerType.get_signless(1), 1)))
        with ir.InsertionPoint(bad.then_block):
            llvm.intr_trap()
            scf.yield_([])
    good = scf.IfOp(inside)
    with ir.InsertionPoint(good.then_block):
        emit()
        scf.yield_([])


@RULES.lowers("kv.store")
def lower_store(op: Any, options: Options) -> None:
    write(op, of_scales=False)


@RULES.lowers("kv.store_scale")
def lower_store_scale(op: Any, options: Options) -> None:
    write(op, of_scales=True)


# --- addressing and metadata -----------------------------------------------------------------------


@RULES.lowers("kv.block_ptr")
def lower_block_ptr(op: Any, options: Options) -> ir.Value:
    return element_address(op, page_of(op, options), options.clamp)


@RULES.lowers("kv.scale_block_ptr")
def lower_scale_block_ptr(op: Any, options: Options) -> ir.Value:
    if types.spec_of(op.cache.type).kind in (SCALES, RAGGED):
        return llvm.mlir_zero(pointer())
    return element_address(op, page_of(op, options), options.clamp, of_scales=True)


@RULES.lowers("kv.scales_base")
def lower_scales_base(op: Any, options: Options) -> ir.Value:
    spec = types.spec_of(op.cache.type)
    return ops.field(op.cache, "scales") if spec.quantized and spec.of_cache else llvm.mlir_zero(pointer())


@RULES.lowers("kv.row_index")
def lower_row_index(op: Any, options: Options) -> ir.Value:
    return row_of(op.cache, op.batch, op.token, vectorize_kv_lookups.row_stride(op.cache), options).value


def row_of(cache: ir.Value, batch: ir.Value, token: ir.Value, stride: ir.Value, options: Options) -> Ix:
    """The row of a token: page * S + slot."""
    page = clamped_page(cache, batch, token, options)
    return Ix(page) * Ix(stride) + slot_of(cache, page, token, options.clamp)


@RULES.lowers("kv.tma_row")
def lower_tma_row(op: Any, options: Options) -> ir.Value:
    spec = types.spec_of(op.cache.type)
    if not spec.of_cache:
        return op.encoded
    row = layout.tma_row(spec, Ix(op.encoded), Ix(ops.field(op.cache, "stride0")))
    row32 = row.value if row.bits == 32 else arith.trunci(i32(), row.value)
    negative = arith.cmpi(arith.CmpIPredicate.slt, op.encoded, const(0))
    return arith.select(negative, const(-1), row32)


@RULES.lowers("kv.num_rows")
def lower_num_rows(op: Any, options: Options) -> ir.Value:
    spec = types.spec_of(op.cache.type)
    n, capacity, stride0 = (Ix(ops.field(op.cache, f)) for f in ("num_blocks", "capacity", "stride0"))
    return arith.trunci(i32(), layout.num_rows(spec, n.wide, capacity.wide, stride0).value)


@RULES.lowers("kv.populate")
def lower_populate(op: Any, options: Options) -> ir.Value:
    """The definition of populate: rows[i] = row_index(b, base + i * page)."""
    spec = types.spec_of(op.cache.type)
    tile = op.tile_rows.value
    step = layout.effective_page(tile, spec.page_size)
    stride, rows = vectorize_kv_lookups.row_stride(op.cache), []
    for i in range(layout.populate_pages(tile, spec.page_size)):
        rows.append(row_of(op.cache, op.batch, (Ix(op.base) + i * step).value, stride, options).value)
    return ops.make_rows(rows, tile, spec.page_size)


def table_alignment(count: int) -> int:
    """Alignment in bytes of a load of ``count`` table entries: 8 entries are two loads of four."""
    return 4 * min(count, 4)


@RULES.lowers("kv.load_pages")
def lower_load_pages(op: Any, options: Options) -> ir.Value:
    count, batch, column = op.count.value, Ix(op.batch), Ix(op.column)
    # One load of 32 bytes needs sm_100; two of 16 bytes work on every target.
    width = min(count, 4)
    if options.clamp:
        batch = batch.least(Ix(ops.field(op.cache, "batch")) - 1)
        last = (Ix(ops.field(op.cache, "lookup_columns")) - 1) // width * width
    row = batch.wide * Ix(ops.field(op.cache, "lookup_stride"))
    type_, loads = ir.VectorType.get([width], i32()), []
    for first in range(0, count, width):
        # Each load must start within the row: a row of 4 (mod 8) columns has only one of the last two loads.
        at = (column + first).least(last) if options.clamp else column + first
        address = offset(ops.field(op.cache, "lookup"), row + at.wide, i32())
        if width == 1:
            loads.append(vector.from_elements(type_, [load(address, i32(), 4, True)]))
        else:
            loads.append(load(address, type_, table_alignment(width), True))
    if len(loads) == 1:
        return loads[0]
    return vector.shuffle(loads[0], loads[1], list(range(count)))


@RULES.lowers("kv.get_row")
def lower_get_row(op: Any, options: Options) -> ir.Value:
    made = defining_op(op.rows)
    if made is None or made.name != "kv.make_rows":
        fail(op, "needs rows made by kv.populate in the same function")
    tile, page_size = types.rows_parameters(op.rows.type)
    firsts, page = list(made.operands), layout.effective_page(tile, page_size)
    if len(firsts) == 1:
        return (Ix(firsts[0]) + Ix(op.offset)).value
    which, row = Ix(op.offset) // page, firsts[-1]
    for i in reversed(range(len(firsts) - 1)):
        is_it = arith.cmpi(arith.CmpIPredicate.eq, which.value, const(i))
        row = arith.select(is_it, firsts[i], row)
    return (Ix(row) + Ix(op.offset) % page).value


@RULES.lowers("kv.cache_length")
def lower_cache_length(op: Any, options: Options) -> ir.Value:
    handle = op.cache
    kind = types.spec_of(handle.type).kind
    if kind == RAGGED:
        return ragged_length(op)
    if kind == DENSE:
        return dense_length(op)
    length = Ix(load(offset(ops.field(handle, "lengths"), Ix(op.batch).wide, i32()), i32(), 4, invariant=True))
    return length.least(token_capacity(handle)).value if options.clamp else length.value


def ragged_length(op: Any) -> ir.Value:
    """offsets[b + 1] - offsets[b], with both clamped to the buffer's rows and to ascending order."""
    offsets, rows = ops.field(op.cache, "offsets"), Ix(ops.field(op.cache, "num_blocks"))
    at = Ix(op.batch).wide
    first, end = (Ix(load(offset(offsets, at + i, i32()), i32(), 4, invariant=True)).least(rows) for i in range(2))
    return (end - first.least(end)).value


def dense_length(op: Any) -> ir.Value:
    """lengths[b], at most S; S without lengths."""
    lengths, extent = ops.field(op.cache, "lengths"), Ix(ops.field(op.cache, "capacity"))
    given = llvm.icmp(llvm.ICmpPredicate.ne, lengths, llvm.mlir_zero(pointer()))
    branch = scf.IfOp(given, [i32()], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        found = Ix(load(offset(lengths, Ix(op.batch).wide, i32()), i32(), 4, invariant=True))
        scf.yield_([found.least(extent).value])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([extent.value])
    return branch.results[0]


@RULES.lowers("kv.cache_lengths")
def lower_cache_lengths(op: Any, options: Options) -> ir.Value:
    return ops.field(op.cache, "lengths")


@RULES.lowers("kv.max_prompt_length")
def lower_max_prompt_length(op: Any, options: Options) -> ir.Value:
    return ops.field(op.cache, "max_seq_length")


@RULES.lowers("kv.max_context_length")
def lower_max_context_length(op: Any, options: Options) -> ir.Value:
    return ops.field(op.cache, "capacity" if types.spec_of(op.cache.type).kind == DENSE else "max_cache_length")


@RULES.lowers("kv.is_empty")
def lower_is_empty(op: Any, options: Options) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, ops.field(op.cache, "max_cache_length"), const(0))


def record_written(function: ir.Operation, writers: Sequence[ir.Operation]) -> None:
    """List the arguments that the kernel may write, in ``kv.written``; the loader refuses read-only buffers for them.

    An address may be written through, so making one counts as a write.
    """
    if "kv.written" in function.attributes:
        return
    written: set[int] = set()
    for handle in (v for op in writers for v in memory_effects.exposed(op)):
        if types.type_name(handle.type) == "operand":
            continue  # operands are read-only, and so are pointers into them
        handle = handle if isinstance(handle.type, ir.MemRefType) else root(handle)
        if defining_op(handle) is None:
            written.add(ir.BlockArgument(handle).arg_number)
    with function.location:
        function.attributes["kv.written"] = ir.DenseI64ArrayAttr.get(sorted(written))


def record_tables(function: ir.Operation, loads: Sequence[ir.Operation]) -> None:
    """List the alignment in bytes of each argument's lookup table rows, in ``kv.table_alignments``.

    The loader refuses tables that are not aligned for the kernel's vector loads.
    """
    found: dict[int, int] = {}
    for op in loads:
        table = root(op.operands[0])
        if defining_op(table) is None:
            number = ir.BlockArgument(table).arg_number
            found[number] = max(found.get(number, 0), table_alignment(op.opview.count.value))
    if found:
        alignments = [found.get(i, 0) for i in range(len(function.regions[0].blocks[0].arguments))]
        with function.location:
            function.attributes["kv.table_alignments"] = ir.DenseI64ArrayAttr.get(alignments)


def plan_made(plan: Plan | None, found: Sequence[ir.Operation]) -> None:
    """Plan the accesses made by rules of other packages like those of the kernel; None: there is no plan."""
    for op in found:
        if plan is not None and is_access(op.name) and "kv.alignment" not in op.attributes:
            plan.apply_to(op)


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    found: list[ir.Operation] = []
    writer = functools.cache(memory_effects.exposes)
    for function in functions(module):
        inside = walk(function, lambda name: writer(name) or RULES.knows(name))
        if is_kernel(function):
            record_written(function, [op for op in inside if writer(op.name)])
        plan = Plan.taken_from(function)
        if RULES.outside:  # whatever an outside rule emits, the op writes what it declares
            RULES.apply_outside(function, options)
            inside = walk(function, RULES.knows)
            plan_made(plan, inside)
        if is_kernel(function):
            record_tables(function, [op for op in inside if op.name == "kv.load_pages"])
        found += [op for op in inside if RULES.knows(op.name)]
    has_rows = any(op.name in _ROWS for op in found)
    later = {*_LATER, "kv.make_rows", *(op.name for op in found if is_copy(op.name))}
    RULES.apply(module, options, leave=later.__contains__, found=found)
    if has_rows:
        # All reads of rows have been replaced: erase the ops that made them, and the rest of populates.
        for op in _dead_rows(module):
            op.erase()


def _dead_rows(module: ir.Module) -> list[ir.Operation]:
    found = []
    for op in ops_named(module, "kv.make_rows"):
        if any(True for _ in op.results[0].uses):
            fail(op, "has a use that is not kv.get_row")
        found.append(op)
    return found
