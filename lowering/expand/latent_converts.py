# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The producer of the kernels over latent rows that converts: rows of 8 bits, scaled or not, that may end in bf16.

A warpgroup loads a tile's rows into registers, four threads a row and two rows a thread, converts them when their
boxes are free, and loads its next tile: after the fence that shows products what it wrote, which waits for loads too.
So every byte of the cache is read once, and shared memory holds what products take. In the kernel for few rows, which
has the memory's rate, two warpgroups take tiles by turns: one loads while the other converts. That for 64 rows has
registers for one.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import bf16, f8e4m3
from kvarn.lowering.conversions import times

from .attention_common import inline_scale
from .latent_common import BOX, BOX_COLUMNS, CHUNK, LatentConfig, pack

VECTOR = 16  # stored elements that a thread loads of a box: a quarter of a row


def scales_of(c: LatentConfig) -> str:
    """``"row"``: one a token; ``"vector"``: one for what a thread loads of a box; empty: none."""
    spec = c.case.spec
    if c.case.inline:
        return "vector"
    if not spec.quantized:
        return ""
    return "row" if spec.granularity >= spec.head_size else "vector"


TURNS = 2  # rows of a tile that a thread of a warpgroup loads
THREADS, WARPS = 128, 4  # of a warpgroup


def in_bf16(c: LatentConfig, box: int) -> bool:
    """Whether a box's elements are stored as bf16."""
    return box * BOX_COLUMNS >= c.case.content


def ahead(c: LatentConfig, box: int) -> bool:
    """Whether a box is loaded with its tile: not those of bf16, which would take twice the registers."""
    return not in_bf16(c, box)


def held(c: LatentConfig, turn: int, box: int) -> slice:
    """Where a box's words of a thread's row are, among those that are loaded a tile ahead."""
    first = 4 * (turn * sum(ahead(c, n) for n in range(c.boxes)) + box)
    return slice(first, first + 4)


def scale_of(c: LatentConfig, turn: int, box: int) -> int:
    """Which of the scales that a thread holds is a box's."""
    count = [0, *(int(ends_granule(c, n)) for n in range(c.boxes))]
    return turn * sum(count) + sum(count[: box + 1])


def ends_granule(c: LatentConfig, box: int) -> bool:
    """Whether the next box has another scale: boxes that are no values come first, and have their own."""
    granule = c.case.inline or c.case.spec.granularity
    ends = (box + 1) * BOX_COLUMNS
    return box + 1 in (c.value_boxes, c.boxes) or granule <= BOX_COLUMNS or ends % granule == 0


def row_of(thread: Any, turn: int) -> Any:
    """The row of a tile that a thread loads in a turn: a warp has eight of them."""
    return (thread >> 2) + turn * (THREADS // 4)


@kv.func
def places_of(rows, base, thread):
    """The places of the rows that a thread loads of a tile."""
    return [rows.place(base + row_of(thread, turn)) for turn in range(TURNS)]


def column_of(c: LatentConfig, box: int, thread: Any) -> Any:
    """The first column that a thread loads of a box; some other where the row has ended."""
    last = c.case.size if in_bf16(c, box) else c.case.content
    return kv.math.min(box * BOX_COLUMNS + (thread & 3) * VECTOR, last - VECTOR)


@kv.func
def load_vector(c, rows, place, box, thread):
    """This thread's quarter of a row of a box as it is stored, in words."""
    case, column = c.case, column_of(c, box, thread)
    token, page, _ = place
    source = rows.cache
    byte, words = column, []
    if in_bf16(c, box):
        byte = case.rope_start + 2 * (column - case.content)
        upper = source.block_paged_ptr(rows.b, token, 0, byte + 16, page=page).load(kv.i32, 4)
        words = [upper[k] for k in range(4)]
    lower = source.block_paged_ptr(rows.b, token, 0, byte, page=page).load(kv.i32, 4)
    return [lower[k] for k in range(4)] + words


@kv.func
def vector_scale(c, rows, place, box, thread):
    """The scale of a thread's quarter of a row of a box; 1 where a row has one, or none."""
    case, column = c.case, column_of(c, box, thread)
    token, page, _ = place
    if scales_of(c) != "vector" or (case.inline and in_bf16(c, box)):
        return kv.f32(1.0)
    if case.inline:
        return inline_scale(case, kv.operand(rows.cache), rows.b, 0, token, column, page)
    return kv.f32(rows.cache.load_scale(rows.b, 0, token, column, page=page))


@kv.func
def load_tile(c, rows, places, thread):
    """What a thread holds of a tile: (words, scales of vectors, scales of rows)."""
    words = [
        word for place in places for box in range(c.boxes) if ahead(c, box)
        for word in load_vector(c, rows, place, box, thread)
    ]  # fmt: skip
    scales = [
        vector_scale(c, rows, place, box, thread) for place in places for box in range(c.boxes) if ends_granule(c, box)
    ]
    return words, scales, row_scales(c, rows, places)


@kv.func
def row_scales(c, rows, places):
    """The one scale of each row; 1 where there is none."""
    if scales_of(c) != "row":
        return [kv.f32(1.0) for _ in places]
    return [kv.f32(rows.cache.load_scale(rows.b, 0, token, 0, page=page)) for token, page, _ in places]


@kv.func
def put_box(c, rows, box, words, scales, of_rows, places, at, thread):
    """Convert what a thread has of a box of its tile, and write it to ``at``."""
    late = [load_vector(c, rows, place, box, thread) for place in places] if not ahead(c, box) else []
    for turn in kv.static(range(TURNS)):
        scale = of_rows[turn] if scales_of(c) == "row" else scales[scale_of(c, turn, box)]
        vector = words[held(c, turn, box)] if ahead(c, box) else late[turn]
        store_vector(c, box, vector, scale, places[turn][2], at, row_of(thread, turn), thread)


@kv.func
def converted(c, box, words, scale):
    """What products take of a vector: 8 words of 16 elements."""
    case = c.case
    quantized = scales_of(c) != ""
    if in_bf16(c, box):
        if case.query is bf16:
            return times(words, scale, bf16) if quantized and not case.inline else words
        elements = [kv.f32(x) for word in words for x in kv.bitcast(word, bf16)]
        quantized = quantized and not case.inline
    elif (case.spec.dtype is f8e4m3) and (case.query is bf16):
        found = [x for word in words for x in kv.cvt_e4m3x4_to_bf16x4(word)]
        return times(found, scale, bf16) if quantized else found
    else:
        elements = [kv.f32(x) for word in words for x in kv.bitcast(word, case.spec.dtype)]
    if quantized:
        elements = [x * scale for x in elements]
    return [pack(case.query, elements[2 * k], elements[2 * k + 1]) for k in range(VECTOR // 2)]


@kv.func
def store_vector(c, box, words, scale, there, place, row, thread):
    """Convert a vector and write it to its box at ``place``: zeros of a row that is not there."""
    words = [kv.where(there, w, 0) for w in words]
    found = converted(c, box, words, kv.where(there, scale, 1.0))
    for half in kv.static(range(2)):
        at = place + BOX.chunk_offset(row, 2 * (thread & 3) + half)
        at.store(kv.vector(kv.i32, found[4 * half : 4 * half + 4]))


@kv.func
def show():
    """What a warp wrote is there for products: it may arrive at the boxes' barriers."""
    kv.fence_proxy_async()
    kv.syncwarp()


@kv.func
def note_rows(places, seen_at, thread):
    """Write which rows of a tile there are, a bit each."""
    for turn in kv.static(range(TURNS)):
        bits = kv.ballot(places[turn][2])  # four lanes have one row
        word = kv.u32(0)
        for row in kv.static(range(8)):
            word = word | ((bits >> (3 * row)) & (1 << row))
        if (thread & 31) == 0:
            (seen_at + ((thread >> 5) + turn * WARPS)).store(kv.u8(word))


assert CHUNK * 2 == VECTOR
