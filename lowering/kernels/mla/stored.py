# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""8-bit latent rows in the kernel with swapped operands: they are converted in registers, or not at all.

Tiles of keys are in shared memory as bytes, half the size of converted ones: copies write them once, and no conversion
writes shared memory. Keys, and values transposed, are operand A.

- *Keys* of e4m3 are multiplied unconverted, by query rows that are sums of two e4m3 terms (:mod:`two_terms`); both
  products together cost as much as one of bf16. 8-bit products keep about 14 bits of a sum, so up to 32 query rows, or
  with several scales per row, f32 adds the partial sums of :data:`TOGETHER` boxes. With more query rows and at most one
  scale, the query rows are the rows of scores (:func:`unswapped`), so that one warp has a whole row.
- A query of e4m3 is multiplied unconverted, in half as many products. Weights are not e4m3, since the sums of values
  go over all keys, and 8-bit products lose small addends.
- Other keys, and those of an f16 query, are converted on the way to the registers of operand A. A thread loads 16 bytes
  of a row, and the query's columns are permuted accordingly.
- *Values* are converted too: ``ldmatrix`` transposes pairs of bytes, so that a word has two columns by two keys. f16
  represents every 8-bit element exactly. Even columns are a fragment's upper rows, odd columns the lower.

Row scales multiply scores and weights. Weights are f16: they are divided by a power of two above all scales so far, and
the accumulators are rescaled when it rises. Several scales per row are each split into the row's power of two and a
remainder below 1, which multiplies elements. The producer stores both per tile (:func:`write_tile_scales`).
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, bf16, f8e4m3, f16, f32
from kvarn.dialect.layout import cdiv
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.dsl.wgmma import descriptor_at
from kvarn.lowering.tiles import two_terms
from kvarn.lowering.tiles.cache_rows import inline_scale

from ..attention.partials import LOG2E
from ..elements import halves
from .common import BYTE_BOX, KEYS, MOST_ROWS, LatentConfig, pack

VECTOR = 16  # bytes of a box's row per load of a thread; a scale covers a multiple of it
ROPE_COLUMNS = 32  # bf16 columns per box
TOGETHER = 2  # boxes of keys whose 8-bit products are summed by the tensor cores
TOP = 14  # for f16, a query row is scaled so that its largest element is from 2^TOP to 2^(TOP + 1)
ROWS_TOGETHER = 6  # query rows whose loads a warp has in flight


def direct(c: LatentConfig) -> bool:
    """Whether keys are multiplied without conversion."""
    case = c.case
    if c.narrow:
        return True
    return case.spec.dtype is f8e4m3 and case.query is bf16 and (not c.granules or c.granule % BYTE_BOX.columns == 0)


def one_sum(c: LatentConfig) -> bool:
    """Whether the tensor cores sum all boxes of keys: with many query rows and no scales between boxes.

    With an 8-bit query always: its own rounding has lost more.
    """
    return c.narrow or (c.rows > MOST_ROWS and not c.granules)


def unswapped(c: LatentConfig) -> bool:
    """Whether query rows are the rows of scores: if they fill a product whose operand B is unconverted keys.

    Not if sums are scaled key by key between products.
    """
    return direct(c) and not c.granules and c.rows > MOST_ROWS


def groups_of(c: LatentConfig, order: list[int]) -> list[list[int]]:
    """Boxes in copy order, grouped by what products sum: 8-bit boxes, or bf16 boxes, under one scale."""

    def kind(box: int) -> Any:
        """The property that boxes of one group share."""
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
    """The type in which keys that are stored as bf16 are multiplied."""
    return bf16 if c.case.query is bf16 else f16


def product_type(c: LatentConfig, box: int) -> DType:
    """The type in which a box's keys are multiplied."""
    return rope_type(c) if is_rope(c, box) else f16


def content_boxes(c: LatentConfig) -> int:
    return cdiv(c.case.content, BYTE_BOX.columns)


def is_rope(c: LatentConfig, box: int) -> bool:
    """Whether a box's elements are bf16."""
    return box >= content_boxes(c)


def query_layout(c: LatentConfig) -> SharedLayout:
    """The layout of the query's panels: one per box of 8-bit elements, or per two boxes of bf16."""
    if c.narrow:
        return SharedLayout(c.rows, content_boxes(c) * BYTE_BOX.columns, 1, BYTE_BOX.columns)
    panels = content_boxes(c) + cdiv(c.case.row.rope, 2 * ROPE_COLUMNS)
    return SharedLayout(c.rows, panels * BYTE_BOX.columns, 2, 128)


def query_place(c: LatentConfig, box: int) -> tuple[int, list[int]]:
    """(panel, byte offsets of the k-steps) of the query columns that multiply a box of keys."""
    if not is_rope(c, box):
        return box, [32 * k for k in range(4)]
    n = box - content_boxes(c)
    return content_boxes(c) + n // 2, [64 * (n % 2) + 32 * k for k in range(2)]


# --- the query -------------------------------------------------------------------------------------


@kv.func
def load_query(c, a, tile, scales_log2, place, warp, lane, warps):
    """Store query rows in the layout of the products, and their factors that make products powers of two.

    A warp stores several rows at a time; rows past the last repeat it. A negative scale negates the query, since maxima
    are of unscaled scores.
    """
    _, token0, row0, rows = place
    case, steps_of_warp = c.case, cdiv(query_layout(c).columns // 8, 32)
    together = min(ROWS_TOGETHER, cdiv(c.rows, warps))
    for first in range(warp, c.rows, warps * together):
        found = []
        for n in kv.static(range(together)):
            at = kv.math.min(row0 + first + n * warps, rows - 1)
            for step in kv.static(range(steps_of_warp)):
                column, exists = query_column(c, step * 32 + lane)
                source = a.query.address(token0 + at // case.heads, at % case.heads, kv.where(exists, column, 0))
                words = source.load(kv.i32, 4)
                found = [*found, [kv.where(exists, words[k], 0) for k in range(4)]]
        found = [found[n * steps_of_warp : (n + 1) * steps_of_warp] for n in range(together)]
        tops = [two_terms.largest(case.query, [word for words in row for word in words]) for row in found]
        tops = [kv.warp_reduce(top, "max") for top in tops]  # interleaved: each reduction is a chain of shuffles
        for n in kv.static(range(together)):
            row = first + n * warps
            if row < c.rows:
                store_row(c, tile, scales_log2, row, found[n], tops[n], a.scale, lane)
    kv.fence_proxy_async()


def query_column(c: LatentConfig, chunk: Any) -> tuple[Any, Any]:
    """(first of the 8 query columns of a chunk of its panels, whether they exist)."""
    first_rope = content_boxes(c) * (BYTE_BOX.columns // 8)
    behind = chunk >= first_rope
    column = kv.where(behind, c.case.content + (chunk - first_rope) * 8, chunk * 8)
    return column, column < kv.where(behind, kv.i32(c.case.size), kv.i32(c.case.content))


@kv.func
def store_row(c, tile, scales_log2, row, found, top_of_row, scale, lane):
    """Store a query row, of which a lane has every 32nd chunk, times a power of two and the scale's sign."""
    layout, top = query_layout(c), two_terms.TOP if direct(c) else TOP
    first_rope = content_boxes(c) * (BYTE_BOX.columns // 8)
    factor, power = two_terms.powers_of(top_of_row, top)
    factor = kv.where(scale < 0.0, -factor, factor)
    if lane == 0:
        (scales_log2 + row * 4).store(kv.math.max(kv.math.abs(scale), 1.0e-30) * LOG2E * power)
    for step in kv.static(range(len(found))):
        chunk = step * 32 + lane
        if direct(c):
            scaled = two_terms.scaled(found[step], factor)
            if chunk < first_rope:
                store_terms(c, tile, row, chunk, scaled)
            elif chunk < layout.columns // 8:
                (tile + layout.chunk_offset(row, chunk)).store(kv.vector(kv.i32, scaled))
        else:
            x = [y * factor for word in found[step] for y in two_terms.two_of(c.case.query, word)]
            if chunk < first_rope:
                store_content(c, tile, row, chunk, x)
            elif chunk < layout.columns // 8:
                store_rope(c, tile, row, chunk, x)


@kv.func
def store_terms(c, tile, row, chunk, words):
    """Store 8 query columns for unconverted 8-bit keys, as sums of two e4m3 terms."""
    layout, panel, n, terms = query_layout(c), chunk // 8, chunk % 8, two_terms.terms_of(words)
    for term in kv.static(range(2)):
        of_row = layout.chunk_offset(row, panel * 8 + n // 2 + 4 * term)
        (tile + (of_row + n % 2 * 8)).store(kv.vector(kv.i32, terms[term]))


@kv.func
def store_content(c, tile, row, chunk, x):
    """Store 8 query columns for converted 8-bit keys, in the order of the keys' fragments."""
    layout, panel, n = query_layout(c), chunk // 8, chunk % 8
    for k in kv.static(range(2)):
        for odd in kv.static(range(2)):
            to = layout.chunk_offset(row, panel * 8 + 2 * (2 * (n % 2) + k) + odd) + n // 2 * 4
            (tile + to).store(pack(f16, x[4 * k + odd], x[4 * k + 2 + odd]))


@kv.func
def store_rope(c, tile, row, chunk, x):
    """Store 8 query columns for converted bf16 keys."""
    layout, panel, n = query_layout(c), chunk // 8, chunk % 8
    for k in kv.static(range(4)):
        to = layout.chunk_offset(row, panel * 8 + n // 4 * 4 + k) + n % 4 * 4
        (tile + to).store(pack(rope_type(c), x[2 * k], x[2 * k + 1]))


# --- fragments -------------------------------------------------------------------------------------


def times(words: Any, factors: Any) -> list[Any]:
    """Pairs of f16 times pairs of f16."""
    return [two_terms.word("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y]) for x, y in zip(words, factors, strict=True)]


def bytes_before(c: LatentConfig, box: int) -> int:
    """Bytes of a row before those of a box, within its copy."""
    return c.part_of(box) * BYTE_BOX.pitch


def start_direct(c: LatentConfig, sums: Any, tile: Any, place: Any, box: int, held: Any = ()) -> Any:
    """Start the products of a box of unconverted keys at ``place``, added to ``sums`` unless None.

    ``held`` are the query's words of the first k-steps, if they stay in registers.
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
    if unswapped(c):
        sums, count = KEYS if sums is None else sums, len(held)
        if held:
            sums = kv.wgmma_start(sums, held, keys, [x for x, _ in steps[:count]], kind)
        flipped = [(y, x) for x, y in steps[count:]]
        return kv.wgmma_start(sums, rows, keys, flipped, kind) if flipped else sums
    return kv.wgmma_start(c.rows if sums is None else sums, keys, rows, steps, kind)


@kv.func
def added(c, s, sums, box, tile_scales, warp, lane):
    """Scores plus those of a group of boxes, times the group's scale relative to the row's factor."""
    row, factors = warp * 16 + (lane >> 2), [kv.f32(1.0)] * 2
    if c.granules:
        factors = [inverse_at(tile_scales, row + 8 * u) for u in range(2)]
        if not is_rope(c, box):
            factors = [kv.f32(rest_at(c, tile_scales, box, 0, row + 8 * u).load(f16)) for u in range(2)]
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
def key_steps(c, box, words, tile_scales, warp, lane):
    """Operand A for the products of a box of keys, in k-steps of 16 columns."""
    case = c.case
    if is_rope(c, box):
        return rope_steps(c, words, tile_scales, warp, lane)
    rests = []
    if c.granules:
        row = warp * 16 + (lane >> 2)
        rests = [rest_at(c, tile_scales, box, lane & 3, row + 8 * u).load(f16) for u in range(2)]
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
def rope_steps(c, words, tile_scales, warp, lane):
    """Operand A for keys stored as bf16, divided by the row's factor if only other keys have scales."""
    found = [[words[u][k] for k in range(4)] for u in range(2)]
    row = warp * 16 + (lane >> 2)
    for u in kv.static(range(2)):
        if c.granules:
            inverse = inverse_at(tile_scales, row + 8 * u)
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
def value_steps(c, box, half, words, tile_scales, warp, lane):
    """Operand A for half of a box's keys, in k-steps of 16 keys; columns are in the order of ``column_of``."""
    steps = []
    for k in kv.static(range(HALF // 16)):
        first, second = halves(c.case.spec.dtype, words[2 * k]), halves(c.case.spec.dtype, words[2 * k + 1])
        step = [*first, *second]
        if c.granules:
            at = rest_at(c, tile_scales, box, warp, half * HALF + 16 * k + (lane & 3) * 2)
            low, high = at.load(kv.i32), (at + 16).load(kv.i32)
            step = times(step, [low, low, high, high])
        steps = [*steps, step]
    return steps


def column_of(box: int, warp: Any, lane: Any) -> Any:
    """The first of the two adjacent output columns of a thread's accumulators."""
    return box * BYTE_BOX.columns + warp * 16 + (lane >> 2) * 2


# --- scales ----------------------------------------------------------------------------------------


def factor_at(row: Any) -> Any:
    """Byte offset of a row's factor in a tile's scales."""
    return 16 + row * 4


def inverse_at(tile_scales: Any, row: Any) -> Any:
    """The inverse of a row's factor, which is a power of two."""
    return kv.bitcast(kv.i32(254 << 23) - (tile_scales + factor_at(row)).load(kv.i32), f32)


def rest_at(c: LatentConfig, tile_scales: Any, box: int, vector: Any, row: Any) -> Any:
    """The address of the scale remainder for 16 bytes of a row of a box."""
    granule = kv.math.min((box * BYTE_BOX.columns + vector * VECTOR) // c.granule, c.granules - 1)
    return tile_scales + (c.remainders_at + (granule * KEYS + row) * 2)


@kv.func
def load_scales(c, rows, places):
    """The scales of a lane's rows of a tile; 0 for a missing row."""
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
    """The addresses of a lane's two rows of a tile."""
    return [rows.place(base + 32 * half + lane) for half in range(2)]


@kv.func
def write_tile_scales(c, tile_scales, scales, lane):
    """Store a tile's scales by one warp: the common exponent, one factor per row, remainders of several scales.

    The exponent is that of a power of two above all scales, biased as in f32; a row's factor is its scale, or a power
    of two above its scales.
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
            (tile_scales + factor_at(row)).store(mine[0])
        else:
            (tile_scales + factor_at(row)).store(kv.bitcast(bits << 23, f32))
            inverse = kv.bitcast((254 - bits) << 23, f32)
            for granule in kv.static(range(count)):
                (tile_scales + (c.remainders_at + (granule * KEYS + row) * 2)).store(f16(mine[granule] * inverse))
    most = kv.warp_reduce(most, "max")
    if lane == 0:
        tile_scales.store(most)
    kv.syncwarp()
