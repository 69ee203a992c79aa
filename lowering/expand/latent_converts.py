# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The producer of the kernels over latent rows that converts: rows of 8 bits, scaled or not, that may end in bf16.

Warpgroups load rows into registers a tile ahead, four threads a row; when a box is free they convert what they hold of
it, and load the next tile's. So every byte of the cache is read once, and shared memory holds what products take. Two
warpgroups do so in the kernel for few rows, which has the memory's rate, one with two rows a thread in that for 64
rows: more threads would leave the others fewer registers than assemblers need for their products.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import bf16, f8e4m3, f32
from kvarn.dsl.machine import inline_asm
from kvarn.dsl.values import Value, bitcast

from .attention_common import inline_scale
from .latent_common import BOX, BOX_COLUMNS, CHUNK, KEYS, LatentConfig, pack

PIECE = 16  # stored elements that a thread loads of a box: a quarter of a row


def scales_of(c: LatentConfig) -> str:
    """``"row"``: one a token; ``"piece"``: one for what a thread loads of a box; empty: none."""
    spec = c.case.spec
    if c.case.inline:
        return "piece"
    if not spec.quantized:
        return ""
    return "row" if spec.granularity >= spec.head_size else "piece"


def turns_of(c: LatentConfig) -> int:
    """Rows of a tile that a thread loads."""
    return 4 * KEYS // (32 * c.producer_warps)


def words_of(c: LatentConfig, box: int) -> tuple[int, int]:
    """(first, how many) of a box's words among those of a row that a thread holds: bf16 takes twice as many."""
    stored = min(box, c.case.content // BOX_COLUMNS) if c.case.rope else box
    return 4 * stored + 8 * (box - stored), 8 if box * BOX_COLUMNS >= c.case.content else 4


def held(c: LatentConfig, turn: int, box: int) -> slice:
    """Where a box's words of a thread's row are."""
    first, count = words_of(c, box)
    first += turn * words_of(c, c.boxes)[0]
    return slice(first, first + count)


def row_of(c: LatentConfig, thread: Any, turn: int) -> Any:
    """The row of a tile that a thread loads in a turn: a warp has eight of them."""
    return (thread >> 2) + turn * (8 * c.producer_warps)


@kv.func
def places_of(c, rows, base, thread):
    """The places of the rows that a thread loads of a tile."""
    return [rows.place(base + row_of(c, thread, turn)) for turn in range(turns_of(c))]


@kv.func
def load_piece(c, rows, place, box, thread):
    """This thread's quarter of a row of a box as it is stored: (words, scale)."""
    case = c.case
    token, page, _ = place
    source = kv.operand(rows.cache)  # whose pointers are for reading
    column = box * BOX_COLUMNS + (thread & 3) * PIECE
    last = case.size if box * BOX_COLUMNS >= case.content else case.content
    column = kv.math.min(column, last - PIECE)
    byte, words = column, []
    if box * BOX_COLUMNS >= case.content:  # bf16, in twice the bytes
        byte = case.rope_start + 2 * (column - case.content)
        upper = source.block_paged_ptr(rows.b, token, 0, byte + 16, page=page).load(kv.i32, 4, invariant=True)
        words = [upper[k] for k in range(4)]
    lower = source.block_paged_ptr(rows.b, token, 0, byte, page=page).load(kv.i32, 4, invariant=True)
    words = [lower[k] for k in range(4)] + words
    scale = kv.f32(1.0)
    if case.inline:
        if box * BOX_COLUMNS < case.content:
            scale = inline_scale(case, source, rows.b, 0, token, column, page)
    elif scales_of(c) == "piece":
        scale = kv.f32(rows.cache.load_scale(rows.b, 0, token, column, page=page))
    return words, scale


@kv.func
def load_tile(c, rows, places, thread):
    """What a thread holds of a tile: (words, scales of pieces, scales of rows)."""
    pieces = [load_piece(c, rows, place, box, thread) for place in places for box in range(c.boxes)]
    return [w for words, _ in pieces for w in words], [scale for _, scale in pieces], row_scales(c, rows, places)


@kv.func
def row_scales(c, rows, places):
    """The one scale of each row; 1 where there is none."""
    if scales_of(c) != "row":
        return [kv.f32(1.0) for _ in places]
    return [kv.f32(rows.cache.load_scale(rows.b, 0, token, 0, page=page)) for token, page, _ in places]


@kv.func
def exchange_box(c, rows, box, words, scales, of_rows, there, following, at, thread):
    """Convert what a thread holds of a box, write it to ``at``, and load the same of the following tile."""
    for turn in kv.static(range(turns_of(c))):
        mine, piece = held(c, turn, box), turn * c.boxes + box
        scale = of_rows[turn] if scales_of(c) == "row" else scales[piece]
        store_piece(c, box, words[mine], scale, there[turn], at, row_of(c, thread, turn), thread)
        words[mine], scales[piece] = load_piece(c, rows, following[turn], box, thread)


def times(words: list[Any], scale: Any) -> list[Any]:
    """Pairs of bf16 times an f32, rounded once but for what 16 bits more of the scale leave out."""
    high = bf16(scale)
    low = bf16(scale - f32(high))
    pairs = [bitcast(kv.vector(bf16, [x, x]), kv.i32).ir for x in (high, low)]
    text = "{ .reg .b32 part; mul.rn.bf16x2 part, $1, $3; fma.rn.bf16x2 $0, $1, $2, part; }"
    return [Value(inline_asm(text, "=r,r,r,r", [w.ir, *pairs], "i32"), kv.i32) for w in words]


@kv.func
def converted(c, box, words, scale):
    """What products take of a piece: 8 words of 16 elements."""
    case = c.case
    quantized = scales_of(c) != ""
    if box * BOX_COLUMNS >= case.content:
        if case.query is bf16:
            return times(words, scale) if quantized and not case.inline else words
        elements = [kv.f32(x) for word in words for x in kv.bitcast(word, bf16)]
        quantized = quantized and not case.inline
    elif (case.spec.dtype is f8e4m3) and (case.query is bf16):
        found = [x for word in words for x in kv.cvt_e4m3x4_to_bf16x4(word)]
        return times(found, scale) if quantized else found
    else:
        elements = [kv.f32(x) for word in words for x in kv.bitcast(word, case.spec.dtype)]
    if quantized:
        elements = [x * scale for x in elements]
    return [pack(case.query, elements[2 * k], elements[2 * k + 1]) for k in range(PIECE // 2)]


@kv.func
def store_piece(c, box, words, scale, there, place, row, thread):
    """Convert a piece and write it to its box at ``place``: zeros of a row that is not there."""
    words = [kv.where(there, w, 0) for w in words]
    found = converted(c, box, words, kv.where(there, scale, 1.0))
    for half in kv.static(range(2)):
        at = place + BOX.chunk_offset(row, 2 * (thread & 3) + half)
        at.store(kv.vector(kv.i32, found[4 * half : 4 * half + 4]))


@kv.func
def stored_box(barrier, thread):
    """A warp's part of some boxes is there, and seen by products."""
    kv.fence_proxy_async()
    kv.syncwarp()
    kv.mbarrier_arrive(barrier, (thread & 31) == 0)


@kv.func
def note_rows(c, places, seen_at, thread):
    """Write which rows of a tile there are, a bit each."""
    for turn in kv.static(range(turns_of(c))):
        bits = kv.ballot(places[turn][2])  # four lanes have one row
        word = kv.u32(0)
        for row in kv.static(range(8)):
            word = word | ((bits >> (3 * row)) & (1 << row))
        if (thread & 31) == 0:
            (seen_at + ((thread >> 5) + turn * c.producer_warps)).store(kv.u8(word))


assert CHUNK * 2 == PIECE
