# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Latent rows of 8 bits in the kernel with swapped operands: they stay as they are stored until a product takes them.

Tiles of keys lie in shared memory as bytes, half of what converted ones would be, written once by the copies and never
by a conversion. Keys, and values transposed, are operand A.

- *Keys* of e4m3 are multiplied as they are, with query rows that are sums of two of e4m3 (:mod:`two_terms`): both
  products together cost what one of bf16 would. Products of 8 bits keep about 14 bits of a sum: up
  to 32 query rows, and where there are several scales a row, f32 adds what they make of :data:`TOGETHER` boxes. With
  more query rows and at most one scale, query rows are the rows of scores (:func:`upright`): a warp has all of a row.
- A query of e4m3 is multiplied as it is, too: half of the products. Weights are not e4m3, since products of 8 bits
  lose what is small beside a sum, and the sums of values go over all keys.
- Other keys, and those of an f16 query, are converted on the way to the registers of operand A. A thread loads 16 bytes
  of a row, and the query's columns lie in the order that this gives.
- *Values* are too: ``ldmatrix`` transposes pairs of bytes, two columns by two keys in a word. f16 holds every 8-bit
  element. Even columns are a fragment's upper rows, odd ones the lower.

Scales of rows multiply scores and weights. Weights are f16: a power of two that is above all scales so far is taken
out, and the accumulators are rescaled when it moves. Of several scales a row, each is split in the row's power of two
and a rest below 1, which multiplies elements. The producer writes both for each tile (:func:`write_notes`).
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, bf16, f8e4m3, f8e5m2, f16, f32
from kvarn.dialect.layout import cdiv
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.dsl.wgmma import descriptor_at
from kvarn.lowering.tiles import two_terms
from kvarn.lowering.tiles.cache_rows import inline_scale

from ..attention.partials import LOG2E
from .common import BYTE_BOX, KEYS, MOST_ROWS, LatentConfig, pack

VECTOR = 16  # bytes of a row of a box that a thread loads; scales are of multiples of it
ROPE_COLUMNS = 32  # bf16 columns of a box
TOGETHER = 2  # boxes of keys that products of 8 bits sum up
TOP = 14  # the query's largest element of a row is 2^TOP to 2^(TOP + 1), of f16
ROWS_TOGETHER = 6  # of the query whose loads a warp has under way


def direct(c: LatentConfig) -> bool:
    """Whether keys are multiplied as they are stored."""
    case = c.case
    if c.narrow:
        return True
    return case.spec.dtype is f8e4m3 and case.query is bf16 and (not c.granules or c.granule % BYTE_BOX.columns == 0)


def one_sum(c: LatentConfig) -> bool:
    """Whether all boxes of keys are summed by products: with many query rows, where no scales come between.

    Of a query of 8 bits they always are: what it was rounded from has lost more.
    """
    return c.narrow or (c.rows > MOST_ROWS and not c.granules)


def upright(c: LatentConfig) -> bool:
    """Whether scores have query rows as rows, where there are enough for a product that reads keys as they lie.

    Not where sums are scaled key by key between products.
    """
    return direct(c) and not c.granules and c.rows > MOST_ROWS


def groups_of(c: LatentConfig, order: list[int]) -> list[list[int]]:
    """Boxes, in the order in which they come, that products of 8 bits sum up, or of bf16: under one scale."""

    def kind(box: int) -> Any:
        """What boxes that are summed have in common."""
        return is_rope(c, box), box * BYTE_BOX.columns // c.granule if c.granules and not is_rope(c, box) else 0

    found: list[list[int]] = []
    for box in order:
        full = found and not one_sum(c) and not is_rope(c, box) and len(found[-1]) == TOGETHER
        if found and not full and kind(found[-1][0]) == kind(box):
            found[-1].append(box)
        else:
            found.append([box])
    return found


def rope_type(c: LatentConfig) -> DType:
    """What keys that are stored as bf16 are multiplied as."""
    return bf16 if c.case.query is bf16 else f16


def product_type(c: LatentConfig, box: int) -> DType:
    """What a box's keys are multiplied as."""
    return rope_type(c) if is_rope(c, box) else f16


def content_boxes(c: LatentConfig) -> int:
    return cdiv(c.case.content, BYTE_BOX.columns)


def is_rope(c: LatentConfig, box: int) -> bool:
    """Whether a box's elements are bf16."""
    return box >= content_boxes(c)


def query_layout(c: LatentConfig) -> SharedLayout:
    """The query's panels: of a box of 8-bit elements, or of two boxes of bf16."""
    if c.narrow:
        return SharedLayout(c.rows, content_boxes(c) * BYTE_BOX.columns, 1, BYTE_BOX.columns)
    panels = content_boxes(c) + cdiv(c.case.row.rope, 2 * ROPE_COLUMNS)
    return SharedLayout(c.rows, panels * BYTE_BOX.columns, 2, 128)


def query_place(c: LatentConfig, box: int) -> tuple[int, list[int]]:
    """(panel, bytes of the steps) of the query's columns that a box of keys is multiplied with."""
    if not is_rope(c, box):
        return box, [32 * k for k in range(4)]
    n = box - content_boxes(c)
    return content_boxes(c) + n // 2, [64 * (n % 2) + 32 * k for k in range(2)]


# --- the query -------------------------------------------------------------------------------------


@kv.func
def load_query(c, query, tile, units, token0, row0, rows, scale, warp, lane, warps):
    """Query rows as the products take them; in ``units`` what makes base-2 scores of products.

    A warp has some rows at a time; rows past the last repeat it. The scale's sign is the query's: maxima are of scores.
    """
    case, turns = c.case, cdiv(query_layout(c).columns // 8, 32)
    together = min(ROWS_TOGETHER, cdiv(c.rows, warps))
    for first in range(warp, c.rows, warps * together):
        found = []
        for n in kv.static(range(together)):
            at = kv.math.min(row0 + first + n * warps, rows - 1)
            for turn in kv.static(range(turns)):
                column, exists = query_column(c, turn * 32 + lane)
                place = query.address(token0 + at // case.heads, at % case.heads, kv.where(exists, column, 0))
                words = place.load(kv.i32, 4)
                found = [*found, [kv.where(exists, words[k], 0) for k in range(4)]]
        found = [found[n * turns : (n + 1) * turns] for n in range(together)]
        tops = [two_terms.largest(case.query, [word for words in row for word in words]) for row in found]
        tops = [kv.warp_reduce(top, "max") for top in tops]  # side by side: each is a chain of shuffles
        for n in kv.static(range(together)):
            row = first + n * warps
            if row < c.rows:
                store_row(c, tile, units, row, found[n], tops[n], scale, lane)
    kv.fence_proxy_async()


def query_column(c: LatentConfig, chunk: Any) -> tuple[Any, Any]:
    """(first of the 8 columns of the query of a chunk of its panels, whether they exist)."""
    first_rope = content_boxes(c) * (BYTE_BOX.columns // 8)
    behind = chunk >= first_rope
    column = kv.where(behind, c.case.content + (chunk - first_rope) * 8, chunk * 8)
    return column, column < kv.where(behind, kv.i32(c.case.size), kv.i32(c.case.content))


@kv.func
def store_row(c, tile, units, row, found, top_of_row, scale, lane):
    """A row of the query, of which a lane has every 32nd chunk, times a power of two and the scale's sign."""
    layout, top = query_layout(c), two_terms.TOP if direct(c) else TOP
    first_rope = content_boxes(c) * (BYTE_BOX.columns // 8)
    factor, unit = two_terms.powers_of(top_of_row, top)
    factor = kv.where(scale < 0.0, -factor, factor)
    if lane == 0:
        (units + row * 4).store(kv.math.max(kv.math.abs(scale), 1.0e-30) * LOG2E * unit)
    for turn in kv.static(range(len(found))):
        chunk = turn * 32 + lane
        if direct(c):
            scaled = two_terms.scaled(found[turn], factor)
            if chunk < first_rope:
                store_terms(c, tile, row, chunk, scaled)
            elif chunk < layout.columns // 8:
                (tile + layout.chunk_offset(row, chunk)).store(kv.vector(kv.i32, scaled))
        else:
            x = [y * factor for word in found[turn] for y in two_terms.two_of(c.case.query, word)]
            if chunk < first_rope:
                store_content(c, tile, row, chunk, x)
            elif chunk < layout.columns // 8:
                store_rope(c, tile, row, chunk, x)


@kv.func
def store_terms(c, tile, row, chunk, words):
    """8 columns of the query that are multiplied with 8-bit keys as they are stored: each the sum of two e4m3."""
    layout, panel, n, terms = query_layout(c), chunk // 8, chunk % 8, two_terms.terms_of(words)
    for term in kv.static(range(2)):
        of_row = layout.chunk_offset(row, panel * 8 + n // 2 + 4 * term)
        (tile + (of_row + n % 2 * 8)).store(kv.vector(kv.i32, terms[term]))


@kv.func
def store_content(c, tile, row, chunk, x):
    """8 columns of the query that are multiplied with 8-bit keys, in the order of the keys' fragments."""
    layout, panel, n = query_layout(c), chunk // 8, chunk % 8
    for k in kv.static(range(2)):
        for odd in kv.static(range(2)):
            to = layout.chunk_offset(row, panel * 8 + 2 * (2 * (n % 2) + k) + odd) + n // 2 * 4
            (tile + to).store(pack(f16, x[4 * k + odd], x[4 * k + 2 + odd]))


@kv.func
def store_rope(c, tile, row, chunk, x):
    """8 columns of the query that are multiplied with converted bf16 keys."""
    layout, panel, n = query_layout(c), chunk // 8, chunk % 8
    for k in kv.static(range(4)):
        to = layout.chunk_offset(row, panel * 8 + n // 4 * 4 + k) + n % 4 * 4
        (tile + to).store(pack(rope_type(c), x[2 * k], x[2 * k + 1]))


# --- fragments -------------------------------------------------------------------------------------


def halves(dtype: DType, word: Any) -> tuple[Any, Any]:
    """(bytes 0 and 2, bytes 1 and 3) of a word as f16."""
    if dtype is f8e4m3:
        first, second = kv.cvt_e4m3x4_to_f16x4(kv.prmt(word, kv.i32(0), 0x3120))
        return first, second
    if dtype is f8e5m2:
        return kv.prmt(word, kv.i32(0), 0x2404), word & kv.i32(0xFF00FF00 - (1 << 32))
    signless = word ^ kv.i32(0x80808080 - (1 << 32))  # x + 128 below the byte 0x64 is the f16 1024 + 128 + x
    first, second = (kv.prmt(signless, kv.i32(0x64646464), selector) for selector in (0x4240, 0x4341))
    offset = kv.i32(0x64806480)
    return tuple(two_terms.word("sub.f16x2 $0, $1, $2;", "=r,r,r", [x, offset]) for x in (first, second))


def times(words: Any, factors: Any) -> list[Any]:
    """Pairs of f16 times pairs of f16."""
    return [two_terms.word("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y]) for x, y in zip(words, factors, strict=True)]


def bytes_before(c: LatentConfig, box: int) -> int:
    """Bytes of a row before those of a box, of what was copied with it."""
    return c.part_of(box) * BYTE_BOX.pitch


def start_direct(c: LatentConfig, sums: Any, tile: Any, place: Any, box: int, held: Any = ()) -> Any:
    """Start the products of a box of keys, as it is stored at ``place``, added to ``sums``, which may be None.

    ``held`` are the words of the first steps of the query, where they are in registers.
    """
    panel, query_steps = query_place(c, box)
    rows_at = tile + panel * query_layout(c).panel_bytes
    rows, key_steps = kv.wgmma_descriptor(rows_at), [bytes_before(c, box) + x for x in BYTE_BOX.k_steps()]
    keys = descriptor_at(place, c.box.descriptor())
    if is_rope(c, box):
        steps, kind = list(zip(key_steps, query_steps, strict=True)), bf16
    elif c.narrow:
        rows, kind = descriptor_at(rows_at, query_layout(c).descriptor()), f8e4m3
        steps = list(zip(key_steps, BYTE_BOX.k_steps(), strict=True))
    else:
        pairs = list(zip(key_steps, BYTE_BOX.k_steps(), strict=True))
        steps, kind = [(x, high + y) for high in (0, BYTE_BOX.columns) for x, y in pairs], f8e4m3
    if upright(c):
        sums, count = KEYS if sums is None else sums, len(held)
        if held:
            sums = kv.wgmma_start(sums, held, keys, [x for x, _ in steps[:count]], kind)
        flipped = [(y, x) for x, y in steps[count:]]
        return kv.wgmma_start(sums, rows, keys, flipped, kind) if flipped else sums
    return kv.wgmma_start(c.rows if sums is None else sums, keys, rows, steps, kind)


@kv.func
def added(c, s, sums, box, notes, warp, lane):
    """Scores plus those of a group of boxes, times what its scale has behind the row's factor."""
    row, factors = warp * 16 + (lane >> 2), [kv.f32(1.0)] * 2
    if c.granules:
        factors = [inverse_at(notes, row + 8 * u) for u in range(2)]
        if not is_rope(c, box):
            factors = [kv.f32(rest_at(c, notes, box, 0, row + 8 * u).load(f16)) for u in range(2)]
        if s is not None:
            return [kv.math.fma(sums[k], factors[k // 2 % 2], s[k]) for k in range(len(sums))]
        return [sums[k] * factors[k // 2 % 2] for k in range(len(sums))]
    return sums if s is None else [s[k] + sums[k] for k in range(len(sums))]


@kv.func
def load_keys(c, place, box, warp, lane):
    """A thread's words of a box of keys: 16 bytes of each of its two rows."""
    row, chunk = warp * 16 + (lane >> 2), bytes_before(c, box) // VECTOR + (lane & 3)
    return [(place + c.box.chunk_offset(row + 8 * u, chunk)).load(kv.i32, 4) for u in range(2)]


@kv.func
def key_steps(c, box, words, notes, warp, lane):
    """Operand A of the products of a box of keys, a step of 16 columns each."""
    case = c.case
    if is_rope(c, box):
        return rope_steps(c, words, notes, warp, lane)
    rests = []
    if c.granules:
        row = warp * 16 + (lane >> 2)
        rests = [rest_at(c, notes, box, lane & 3, row + 8 * u).load(f16) for u in range(2)]
    steps = []
    for k in kv.static(range(4)):
        upper, lower = halves(case.spec.dtype, words[0][k]), halves(case.spec.dtype, words[1][k])
        step = [upper[0], lower[0], upper[1], lower[1]]
        if c.granules:
            pairs = [kv.bitcast(kv.vector(f16, [x, x]), kv.i32) for x in rests]
            step = times(step, pairs + pairs)
        steps = [*steps, step]
    return steps


@kv.func
def rope_steps(c, words, notes, warp, lane):
    """Operand A of keys that are stored as bf16: where only others are scaled, divided by the row's factor."""
    found = [[words[u][k] for k in range(4)] for u in range(2)]
    row = warp * 16 + (lane >> 2)
    for u in kv.static(range(2)):
        if c.granules:
            inverse = inverse_at(notes, row + 8 * u)
            pair = pack(bf16, inverse, inverse)
            found[u] = [two_terms.word("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [word, pair]) for word in found[u]]
        if rope_type(c) is not bf16:
            found[u] = [pack(f16, *(kv.f32(x) for x in kv.bitcast(word, bf16))) for word in found[u]]
    return [[found[0][2 * k], found[1][2 * k], found[0][2 * k + 1], found[1][2 * k + 1]] for k in range(2)]


HALF = 32  # keys of a tile whose values a warp loads at a time


@kv.func
def load_values(c, place, box, half, warp, lane):
    """A thread's words of half of the keys of a box of values: two columns of two keys each."""
    chunk = bytes_before(c, box) // VECTOR + warp
    return kv.ldmatrix(place + c.box.chunk_offset(half * HALF + lane, chunk), trans=True)


@kv.func
def value_steps(c, box, half, words, notes, warp, lane):
    """Operand A of the products of half of a box's keys, a step of 16 each: columns in the order of ``column_of``."""
    steps = []
    for k in kv.static(range(HALF // 16)):
        first, second = halves(c.case.spec.dtype, words[2 * k]), halves(c.case.spec.dtype, words[2 * k + 1])
        step = [*first, *second]
        if c.granules:
            at = rest_at(c, notes, box, warp, half * HALF + 16 * k + (lane & 3) * 2)
            low, high = at.load(kv.i32), (at + 16).load(kv.i32)
            step = times(step, [low, low, high, high])
        steps = [*steps, step]
    return steps


def column_of(box: int, warp: Any, lane: Any) -> Any:
    """The first of the two columns of the output, beside each other, that a thread has sums of."""
    return box * BYTE_BOX.columns + warp * 16 + (lane >> 2) * 2


# --- scales ----------------------------------------------------------------------------------------


def factor_at(row: Any) -> Any:
    """Byte of a tile's notes where a row's factor lies."""
    return 16 + row * 4


def inverse_at(notes: Any, row: Any) -> Any:
    """1 by a row's factor, where that is a power of two."""
    return kv.bitcast(kv.i32(254 << 23) - (notes + factor_at(row)).load(kv.i32), f32)


def rest_at(c: LatentConfig, notes: Any, box: int, vector: Any, row: Any) -> Any:
    """Where the rest of the scale of 16 bytes of a row of a box lies."""
    granule = kv.math.min((box * BYTE_BOX.columns + vector * VECTOR) // c.granule, c.granules - 1)
    return notes + (c.notes_head + (granule * KEYS + row) * 2)


@kv.func
def load_scales(c, rows, places):
    """The scales of the rows of a tile that a lane has; of one that is not there 0."""
    case, found = c.case, []
    for place in kv.static(places):
        token, page, there = place
        for granule in kv.static(range(max(c.granules, 1))):
            column = granule * c.granule if c.granules else 0
            if case.row.inline:
                scale = inline_scale(case.row, kv.operand(rows.cache), rows.b, 0, token, column, page)
            else:
                scale = kv.f32(rows.cache.load_scale(rows.b, 0, token, column, page=page))
            found = [*found, kv.where(there, scale, 0.0)]
    return found


@kv.func
def places_of(rows, base, lane):
    """The places of the two rows of a tile that a lane has."""
    return [rows.place(base + 32 * half + lane) for half in range(2)]


@kv.func
def write_notes(c, notes, scales, lane):
    """A warp writes a tile's factors: the exponent of a power of two above all, one a row, rests of several scales.

    The exponent is as f32 has it, biased; a row's factor is its scale, or a power of two above its scales.
    """
    count, most = max(c.granules, 1), kv.i32(1)
    for half in kv.static(range(2)):
        mine, row = scales[half * count : (half + 1) * count], half * 32 + lane
        top = kv.f32(0.0)
        for scale in kv.static(mine):
            top = kv.math.max(top, kv.math.abs(scale))
        bits = kv.math.min(kv.math.max((kv.bitcast(top, kv.i32) >> 23) + 1, 1), 253)
        most = kv.math.max(most, bits)
        if not c.granules:
            (notes + factor_at(row)).store(mine[0])
        else:
            (notes + factor_at(row)).store(kv.bitcast(bits << 23, f32))
            inverse = kv.bitcast((254 - bits) << 23, f32)
            for granule in kv.static(range(count)):
                (notes + (c.notes_head + (granule * KEYS + row) * 2)).store(f16(mine[granule] * inverse))
    most = kv.warp_reduce(most, "max")
    if lane == 0:
        notes.store(most)
    kv.syncwarp()
