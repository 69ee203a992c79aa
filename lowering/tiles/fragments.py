# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""8-bit operand A: threads read their fragments from a stage and convert them in registers.

This avoids a second buffer for converted elements, twice as large, and the fence and barrier between its writes and the
products. Scales per row of A multiply the rows of the result instead.
"""

from __future__ import annotations

from typing import Any

from mlir import ir
from mlir.dialects import vector as mlir_vector

from kvarn.dialect import types
from kvarn.dialect.dtypes import DType, f8e4m3, f16, f32, i16, i32
from kvarn.dialect.layout import CacheSpec
from kvarn.dialect.ops.fragments import BYTES
from kvarn.dialect.ops.tile import COLUMN_STEP, row_format
from kvarn.dialect.register_layout import COLUMN, LANES, ROW, RegisterLayout
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dsl import gpu, math as kv_math, ptx
from kvarn.dsl.memory import Pointer
from kvarn.dsl.values import Value, cast
from kvarn.lowering.schedules.limits import MOST_FRAGMENTS
from kvarn.lowering.target import Target

from .copies import copy_of
from .dequantize import EVERY_SECOND, HALVES, pair_of
from .ir import SWIZZLE, element, shape
from .memory import handle_of
from .threads import Threads, from_elements, scalar

ROWS_APART = 8  # distance of the two rows that a thread has of a fragment


def why_not(op: Any, target: Target, by_tma: bool, threads: int) -> str | None:
    """Why a tile cannot be read as operand A from an unconverted stage; None if it can.

    ``threads`` hold the tile.
    """
    spec, (rows, columns), first = types.spec_of(op.cache.type), shape(op.tile), op.first_column.value
    wanted = str(element(op.tile))
    if spec.data_dtype.mlir not in BYTES or wanted not in ("bf16", "f16"):
        return f"only elements of 8 bits become others of 16 there, got {spec.data_dtype.mlir} and {wanted}"
    if spec.dtype is f8e4m3 and wanted == "f16" and not target.has("f8_convert"):
        return "the target has no instruction that converts f8e4m3 to f16"
    if rows % COLUMN_STEP or columns % COLUMN_STEP or rows * columns > 2 * MOST_FRAGMENTS * threads:
        most = f"{MOST_FRAGMENTS} words of a thread, of {threads}"
        return f"rows and columns must be multiples of {COLUMN_STEP} that fit {most}, got {rows} x {columns}"
    if not row_format(op, spec).plain:
        return "its rows have a format"
    if spec.quantized and (op.lists is not None or not one_scale(spec, first, columns)):
        return f"its rows have several scales, of {spec.granularity} elements each, or are listed"
    copy = copy_of(op, target, by_tma, spec.data_dtype.mlir)
    if copy not in ("tma", "cp_async"):
        return "its rows cannot be copied as they are stored"
    if by_tma and copy == "cp_async" and columns < SWIZZLE:  # the copies would take more instructions than are saved
        return f"rows that cp.async copies must have {SWIZZLE} columns with wgmma, got {columns}"
    if copy == "tma":
        box = types.tma_spec_of(op.descriptor.type)
        if box.form != "tiled" or box.swizzle != f"{SWIZZLE}B":
            return f"boxes must be tiled and swizzled by {SWIZZLE} bytes, got {op.descriptor.type}"
    return None


def one_scale(spec: CacheSpec, first_column: int, columns: int) -> bool:
    """Whether these columns of a row share one scale."""
    last = min(first_column + columns, spec.head_size) - 1
    return first_column // spec.granularity == last // spec.granularity


def read(
    place: Pointer, stored: SharedLayout, tile: RegisterLayout, dtypes: tuple[DType, DType], threads: Threads,
    transposed: bool,
) -> ir.Value:  # fmt: skip
    """A thread's fragments of operand A, converted from a stage.

    ``dtypes`` are (of the stage, of the fragments). A's rows are the rows of the tile or, if ``transposed``, its
    columns. Fragments of the first rows of all warps come first. In each k-step lane 4 g + c has rows g and g + 8,
    columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9.
    """
    words = (_columns if transposed else _rows)(place, stored, tile, dtypes, threads)
    ptx.syncwarp()  # one lane releases the stage after all have read it
    held = from_elements([word.ir for word in words])
    return mlir_vector.bitcast(ir.VectorType.get([2 * len(words)], ir.Type.parse(dtypes[1].mlir)), held)


def _rows(
    place: Pointer, stored: SharedLayout, tile: RegisterLayout, dtypes: tuple[DType, DType], threads: Threads
) -> list[Value]:
    """Rows of A along rows of the stage: per k-step of 16 columns a thread takes half ``c & 1`` of two words.

    Where one instruction converts two bytes, they are loaded alone.
    """
    lane, c = ptx.unknown(threads.lane), threads.lane & 3  # else LLVM hoists addresses out of the loop
    alone = dtypes == (f8e4m3, f16)
    row, own = tile.thread_offset(lane, threads.warp)[ROW], c if alone else c >> 1
    place = place + own * (i16 if alone else i32).itemsize
    found: list[Value] = []
    for first in range(0, tile.shape[ROW], tile.extents[ROW]):
        for k in range(stored.columns // CHUNK):
            at = place + (stored.chunk_offset(row, k) + first * stored.pitch)
            for half in (0, CHUNK // 2):
                for down in (0, ROWS_APART):
                    part = at + (down * stored.pitch + half)
                    if alone:
                        found.append(ptx.cvt_e4m3x2_to_f16x2(part.load(i16)))
                    else:
                        found.append(pair_of(part.load(i32), (c & 1) == 1, HALVES, *dtypes))
    return found


def _columns(
    place: Pointer, stored: SharedLayout, tile: RegisterLayout, dtypes: tuple[DType, DType], threads: Threads
) -> list[Value]:
    """Rows of A along columns of the stage: a chunk of 16 columns is 16 rows of A, and 16 rows are a k-step.

    ``ldmatrix.trans`` transposes pairs of bytes: lane 4 g + c gets columns 2 g and 2 g + 1 of rows 2 c and 2 c + 1.
    Shuffles then bring columns g and g + 8 from the lanes that have them.
    """
    lane, c, g = ptx.unknown(threads.lane), threads.lane & 3, threads.lane >> 2
    lanes = [((g >> 1) << 2) + c + high for high in (0, LANES // 2)]
    found: list[Value] = []
    for first in range(0, tile.shape[COLUMN], tile.extents[COLUMN]):
        chunk = threads.warp + first // CHUNK
        for row in range(0, stored.rows, LANES):
            count = min(LANES, stored.rows - row) // ROWS_APART  # matrices
            own = lane & (count * ROWS_APART - 1)  # ldmatrix of fewer than four ignores other lanes' addresses
            for word in ptx.ldmatrix(place + (stored.chunk_offset(own, chunk) + row * stored.pitch), count, trans=True):
                others = [gpu.shuffle_idx(word, at) for at in lanes]
                found += [pair_of(other, (g & 1) == 1, EVERY_SECOND, *dtypes) for other in others]
    return found


def scales(op: Any, layout: RegisterLayout, threads: Threads) -> ir.Value:
    """``kv.tile_scales``: each thread loads the scales of its tokens."""
    cache, count, axis = handle_of(op.cache), scalar(op.count), ROW if layout.shape[COLUMN] == 1 else COLUMN
    own = scalar(op.first) + layout.thread_offset(threads.lane, threads.warp)[axis]
    found = []
    for place in layout.places_a_thread(axis):
        at = kv_math.max(kv_math.min(own + place, count - 1), 0)
        token = {"b": scalar(op.batch), "h": scalar(op.head), "t": at, "d": op.first_column.value}
        found.append(cast(cache.load_scale(**token, page=cache.page(token["b"], at)), f32).ir)
    return from_elements(found)
