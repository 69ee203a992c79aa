# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operand A of 8-bit elements: read from a stage by the threads whose fragments they are, and converted there.

What a tile of 16-bit elements costs otherwise is not paid: a second, larger buffer that threads write converted
elements to, a fence between their writes and the products that read them, a barrier. Scales of rows are numbers of the
result's rows, too: they multiply what products make of stored elements.
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import vector as mlir_vector

from kvarn.dialect import types
from kvarn.dialect.dtypes import DType, f8e4m3, f32, i32
from kvarn.dialect.layout import CacheSpec
from kvarn.dialect.ops.fragments import BYTES
from kvarn.dialect.ops.tile import COLUMN_STEP, row_format
from kvarn.dialect.register_layout import ROW, RegisterLayout
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dsl import math as kv_math, ptx
from kvarn.dsl.memory import Pointer
from kvarn.dsl.values import cast
from kvarn.lowering.schedules.limits import MOST_FRAGMENTS
from kvarn.lowering.target import Target

from .copies import copy_of
from .dequantize import pair_of
from .ir import SWIZZLE, element, shape
from .memory import handle_of
from .threads import Threads, from_elements, scalar

ROWS_APART = 8  # of the two rows that a thread has of a fragment


def why_not(op: Any, target: Target, by_tma: bool) -> str | None:
    """Why a load's tile cannot be read as operand A where it was copied as it is stored; None when it can."""
    spec, columns, first = types.spec_of(op.cache.type), shape(op.tile)[1], op.first_column.value
    wanted = str(element(op.tile))
    if spec.data_dtype.mlir not in BYTES or wanted not in ("bf16", "f16"):
        return f"only elements of 8 bits become others of 16 there, got {spec.data_dtype.mlir} and {wanted}"
    if spec.dtype is f8e4m3 and wanted == "f16" and not target.has("f8_convert"):
        return "the target has no instruction that converts f8e4m3 to f16"
    if columns % COLUMN_STEP or columns > MOST_FRAGMENTS:
        return f"threads hold up to {MOST_FRAGMENTS} columns, a multiple of {COLUMN_STEP}, got {columns}"
    if not row_format(op, spec).plain:
        return "its rows have a format"
    if spec.quantized and (op.lists is not None or not one_scale(spec, first, columns)):
        return f"its rows have several scales, of {spec.granularity} elements each, or are listed"
    copy = copy_of(op, target, by_tma, spec.data_dtype.mlir)
    if copy not in ("tma", "cp_async"):
        return "its rows cannot be copied as they are stored"
    if by_tma and copy == "cp_async" and columns < SWIZZLE:  # whose copies take more instructions than are saved
        return f"rows that cp.async copies must have {SWIZZLE} columns beside wgmma, got {columns}"
    if copy == "tma":
        box = types.tma_spec_of(op.descriptor.type)
        if box.form != "tiled" or box.swizzle != f"{SWIZZLE}B":
            return f"boxes must be tiled and swizzled by {SWIZZLE} bytes, got {op.descriptor.type}"
    return None


def one_scale(spec: CacheSpec, first_column: int, columns: int) -> bool:
    """Whether columns of a row have one scale."""
    last = min(first_column + columns, spec.head_size) - 1
    return first_column // spec.granularity == last // spec.granularity


def read(
    place: Pointer, stored: SharedLayout, layout: RegisterLayout, dtypes: tuple[DType, DType], threads: Threads
) -> ir.Value:
    """What a thread holds of a tile as operand A, by its layout: ``dtypes`` are (as it is stored, as it is held).

    Of a chunk of 16 columns, a k-step, lane 4 g + c has columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of rows g and g + 8:
    of its four words the halves ``c & 1`` of the words ``c >> 1`` and 2 + ``c >> 1``.
    """
    lane, c = ptx.unknown(threads.lane), threads.lane & 3  # addresses would be held through the loop
    row, word = layout.thread_offset(lane, threads.warp)[ROW], (c >> 1) * i32.itemsize
    upper, place = (c & 1) == 1, place + word
    found: list[ir.Value] = []
    for k in range(stored.columns // CHUNK):
        step = []
        for down in (0, ROWS_APART):
            at = place + (stored.chunk_offset(row, k) + down * stored.pitch)
            step.append([pair_of((at + x).load(i32), upper, *dtypes) for x in (0, CHUNK // 2)])
        found += [step[row][pair].ir for pair in range(2) for row in range(2)]
    ptx.syncwarp()  # all lanes have read it: one says that the stage is free
    held = from_elements(found)
    return mlir_vector.bitcast(ir.VectorType.get([2 * len(found)], ir.Type.parse(dtypes[1].mlir)), held)


def scales(op: Any, layout: RegisterLayout, threads: Threads) -> ir.Value:
    """``kv.tile_scales``: those of a thread's rows, loaded by itself."""
    cache, count = handle_of(op.cache), scalar(op.count)
    own = scalar(op.first) + layout.thread_offset(threads.lane, threads.warp)[ROW]
    found = []
    for row in layout.rows_a_thread:
        at = kv_math.max(kv_math.min(own + row, count - 1), 0)
        place = {"b": scalar(op.batch), "h": scalar(op.head), "t": at, "d": op.first_column.value}
        found.append(cast(cache.load_scale(**place, page=cache.page(place["b"], at)), f32).ir)
    return from_elements(found)
