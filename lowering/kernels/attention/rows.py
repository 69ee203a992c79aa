# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention one query row at a time, for cases that the tile kernels do not support: on the host, and on every GPU.

Both kernels make one pass over the row's keys with an online softmax in f32, and read no key outside of the row's
bounds. They support every cache kind, element type, head size, page size and mask, latent rows (whose values are the
first columns of the keys), lists of pool rows, and an MLA prefill's chunk, whose keys are rows of a buffer completed
by columns of latent rows.

On the host one thread has a row and processes eight keys at a time, whose scores are independent and share one vector
exp2. On a GPU one warp has a row: for the scores each lane has one key, for the values some columns of all keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32
from kvarn.dialect.latent_layout import RowFormat
from kvarn.dialect.layout import align_up, cdiv, lowbit
from kvarn.dsl.builder import emit_value, types
from kvarn.dsl.values import rounded_product
from kvarn.lowering.host_math import exp2
from kvarn.lowering.tiles.cache_rows import load_width, place_in_pool, read_rope, read_row

from .. import hadamard
from ..common import most_lanes
from .arguments import AttentionArguments
from .case import Case, Chunk, column_vectors
from .chosen_pages import ChosenPages, chosen_pages
from .key_tiles import KeyTiles, TilesOfRow
from .partials import LOWEST, NO_VALUE, finished, log_sum_exp, with_prior
from .softmax import FAST, modified_one, scale_log2_of, shown

LANES = 16  # f32 lanes of a host vector: one AVX-512 register, or two of AVX2
KEYS = 8  # keys that the host processes at a time
WARPS = 4  # query rows per block on a GPU


@dataclass(frozen=True)
class Row:
    """A query row and the parameters of its scores.

    Attributes
    ----------
    b, head, h : i32
        The sequence, KV head and query head.
    position : i32
        The absolute position.
    slopes : f32 [Hq] or None
    arrays : list
        The arrays that the score and mask functions read.
    """

    b: Any
    head: Any
    h: Any
    position: Any
    slopes: Any
    arrays: list[Any]

    def modified(self, case: Case, score: Any, token: Any, by: Any = FAST) -> Any:
        """The score of a key after all modifications; ``by`` implements the functions' math."""
        return modified_one(case, score, self.b, self.h, self.position, token, self.slopes, self.arrays, by)

    def shows(self, case: Case, token: Any) -> Any:
        """Whether the mask function allows a key."""
        return shown(case, self.b, self.h, self.position, token, self.arrays)


@dataclass(frozen=True)
class SharedRow:
    """The elements of a warp's query row, in its row of a shared-memory array."""

    array: Any
    warp: Any


@kv.func
def place_of(case, a, queries, row):
    """(sequence, absolute position, keys of the sequence) of a row."""
    b = queries.sequence(row)
    start, num_keys = a.start(case, queries, b)
    return b, start + queries.token(b, row), num_keys


def visited_of(
    case: Case, a: AttentionArguments, queries: Any, place: tuple[Any, Any, Any], num_keys: Any
) -> ChosenPages | TilesOfRow | None:
    """The list that a query row at (sequence, row, query head) visits; None where it visits every key."""
    if a.block_mask is None:
        return chosen_pages(a.source, a.pages, a.page_counts)
    (b, row, h), (rows, keys) = place, case.blocks
    of_sequence = (queries.token(b, row) * case.group + h % case.group) // rows
    return TilesOfRow(KeyTiles(a.block_mask, keys), queries.first_tile(b, case.group, rows) + of_sequence, num_keys)


# --- keys and values -------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheRows:
    """The keys, or the values, of a cache or operand, by token; ``row`` is their format."""

    row: RowFormat
    cache: Any

    @kv.func
    def place(self, lists: Any, b: Any, token: Any) -> tuple[Any, Any, Any]:
        """(token or slot, page, whether it exists) of a sequence's token, or of the pool row in its list."""
        if lists is not None:
            return place_in_pool(self.cache, lists[b, token])
        return token, self.cache.page(b, token), True

    def read(self, b: Any, head: Any, token: Any, d: Any, width: int, page: Any) -> Any:
        """``width`` columns from ``d`` up, as f32."""
        return read_row(self.row, self.cache, b, head, token, d, width, page)

    def read_rope(self, b: Any, head: Any, token: Any, column: int, width: int, page: Any) -> Any:
        """Keys of the query's columns from ``column`` up, which follow the content."""
        return read_rope(self.row, self.cache, b, head, token, column, width, page)


@dataclass(frozen=True)
class ChunkRows:
    """The keys, or the values, of a sequence in an MLA prefill's chunk: rows of ``buffer`` from ``first`` up.

    Latent rows of ``cache`` from token ``start`` up complete the keys; values have no ``cache``.
    """

    chunk: Chunk
    buffer: Any
    first: Any
    cache: Any = None
    start: Any = None

    def place(self, lists: Any, b: Any, token: Any) -> tuple[Any, Any, Any]:
        """(row, page of its latent row, whether it exists) of a key, by its number in the chunk."""
        return token, None if self.cache is None else self.cache.page(b, self.start + token), True

    def read(self, b: Any, head: Any, token: Any, d: Any, width: int, page: Any) -> Any:
        """``width`` columns of the buffer from ``d`` up, as f32."""
        alignment = min(self.chunk.alignment, width * self.buffer.dtype.itemsize)
        return kv.f32(self.buffer.load(self.first + token, head, d, width=width, alignment=alignment))

    def read_rope(self, b: Any, head: Any, token: Any, column: int, width: int, page: Any) -> Any:
        """Keys of the query's columns from ``column`` up, which are in the latent rows."""
        latent, column = self.chunk.latent, column - self.chunk.nope + self.chunk.first_column
        of_rope = read_rope if latent.rope else read_row
        return of_rope(latent, self.cache, b, 0, self.start + token, column, width, page)


Rows = CacheRows | ChunkRows


def rows_of(case: Case, a: AttentionArguments, b: Any) -> tuple[Rows, Rows]:
    """The keys and the values of a sequence."""
    if case.chunk is None:
        keys, values = a.caches(case)
        return CacheRows(case.row, keys), CacheRows(case.row, values)
    first, _ = a.chunk_rows(b)
    keys = ChunkRows(case.chunk, a.chunk_keys, first, a.collection.get_key_cache(a.layer), a.chunk_start(b))
    return keys, ChunkRows(case.chunk, a.chunk_values, first)


def read_columns(case: Case) -> int:
    """Query columns whose keys :meth:`CacheRows.read` reads; :meth:`CacheRows.read_rope` reads those of the others."""
    return case.content if case.chunk is None else case.chunk.nope


def rope_vectors(case: Case, widest: int) -> list[tuple[int, int]]:
    """(query column, width) of the loads of :meth:`CacheRows.read_rope`."""
    columns, chunk = case.row.rope, case.chunk
    if chunk is not None:
        columns, at, spec = chunk.rope, chunk.first_column, chunk.latent.spec
        if not chunk.latent.rope:  # elements of the latent rows, from column ``at`` up
            widest = load_width(spec, min(widest, lowbit(at) if at else widest))
    return [(read_columns(case) + d, w) for d, w in column_vectors(columns, widest)]


@dataclass(frozen=True)
class Prior:
    """A result over other keys: that of an earlier call, or the output of the chunks before."""

    out: Any
    lse: Any

    @staticmethod
    def of(case: Case, a: AttentionArguments) -> Prior | None:
        """The prior result of a launch, if it has one."""
        if case.chunk is not None:
            return Prior(a.out, a.lse) if case.chunk.accumulate else None
        return None if a.prior is None else Prior(a.prior, a.prior_lse)

    def load(self, *at: Any, width: int) -> Any:
        """``width`` columns as f32."""
        return kv.f32(self.out.load(*at, width=width, alignment=self.out.dtype.itemsize))


# --- the host --------------------------------------------------------------------------------------


def lane_sum(x: Any) -> Any:
    """The sum of a vector's lanes, in any order."""
    attributes = {
        "kind": types().attribute("#vector.kind<add>"),
        "fastmath": types().attribute("#arith.fastmath<reassoc,contract>"),
    }
    return kv.Value(emit_value("vector.reduction", types().of(f32), [x.ir], attributes), f32)


def host_kernel(case: Case) -> Any:
    """The host's kernel: a grid of (query heads, rows) with one thread per block."""
    spec, hides, content = case.spec, case.mask.evaluated, read_columns(case)
    widest = load_width(spec, LANES)
    key_vectors, value_vectors = column_vectors(content, widest), column_vectors(case.value_size, widest)
    query_vectors = key_vectors + rope_vectors(case, LANES)

    def scores_of(keys: Rows, q: Any, row: Row, places: list[tuple[Any, Any]]) -> list[Any]:
        """The scores of the keys at (token, page): partial sums per vector lane, then the sum over the lanes."""
        b, head, found = row.b, row.head, []
        for token, page in places:
            sums: dict[int, Any] = {}
            for (d, w), x in zip(query_vectors, q, strict=True):
                read = keys.read if d < content else keys.read_rope
                key = read(b, head, token, d, w, page)
                sums[w] = rounded_product(x, key) if w not in sums else sums[w] + x * key
            score = None
            for w, total in sums.items():
                part = lane_sum(total) if w > 1 else total
                score = part if score is None else score + part
            found.append(row.modified(case, score, token, {"exp2": exp2}))
        return found

    def take(
        keys: Rows, values: Rows, q: Any, row: Row, places: list[tuple[Any, Any]], state: list[Any], sums: list[Any]
    ) -> None:
        """Add the keys at (token, page) to the state (maximum, denominator) and to the weighted sums of values."""
        b, head, count, scores = row.b, row.head, len(places), scores_of(keys, q, row, places)
        if isinstance(values, ChunkRows) or isinstance(values.cache, kv.Operand):
            # Keys and values of a collection share one lookup table.
            places = [values.place(None, b, t)[:2] for t, _ in places]
        top = kv.math.max(state[0], *scores)
        alpha = exp2(state[0] - top)
        weights = exp2(kv.vector(f32, scores) - top) if count > 1 else [exp2(scores[0] - top)]
        state[0], state[1] = top, state[1] * alpha + (lane_sum(weights) if count > 1 else weights[0])
        for n, (d, w) in enumerate(value_vectors):
            x = sums[n] * alpha
            for i, (token, page) in enumerate(places):
                x = x + values.read(b, head, token, d, w, page) * weights[i]
            sums[n] = x

    @kv.func
    def take_all(keys, values, q, row, first, end, state, sums, lists):
        """Add the keys [first, end), except missing and masked ones, to the state and the sums, one at a time."""
        if lists is not None:
            for t in range(first, end):
                slot, page, there = keys.place(lists, row.b, t)
                if there:
                    take(keys, values, q, row, [(slot, page)], state, sums)
        elif hides:
            for t in range(first, end):
                if row.shows(case, t):
                    take(keys, values, q, row, [keys.place(None, row.b, t)[:2]], state, sums)
        else:
            whole = first + kv.math.max(end - first, 0) // KEYS * KEYS
            for t in range(first, whole, KEYS):
                places = [keys.place(None, row.b, t + i)[:2] for i in range(KEYS)]
                take(keys, values, q, row, places, state, sums)
            for t in range(whole, end):
                take(keys, values, q, row, [keys.place(None, row.b, t)[:2]], state, sums)

    @kv.kernel
    def attention_host(a: AttentionArguments):
        h, number = kv.block_id.x, kv.block_id.y
        queries = a.queries(case)
        if queries.in_range(number):
            b, position, num_keys = place_of(case, a, queries, number)
            first, end = case.mask.interval(position, num_keys)
            keys, values = rows_of(case, a, b)
            head, here = h // case.group, queries.numbered(number)
            factor = a.scale * scale_log2_of(case)
            q = [
                kv.f32(a.query.load(*here, h, d, width=w, alignment=case.query.itemsize)) * factor
                for d, w in query_vectors
            ]
            if spec.rotation:
                q = hadamard.of_vectors(q, spec.rotation)
            state = [kv.f32(LOWEST), kv.f32(0.0)]
            sums = [kv.vector(f32, w) if w > 1 else kv.f32(0.0) for _, w in value_vectors]
            row = Row(b, head, h, position, a.slopes, a.arrays)
            visited = visited_of(case, a, queries, (b, number, h), num_keys)
            if visited is None:
                take_all(keys, values, q, row, first, end, state, sums, a.lists)
            else:
                count = visited.count(b, head)
                for entry in range(count):
                    token = visited.first_token(b, head, entry, count)
                    low, high = kv.math.max(first, token), kv.math.min(end, token + visited.unit)
                    take_all(keys, values, q, row, low, high, state, sums, None)
            prior, sink = Prior.of(case, a), None if a.sinks is None else a.sinks[h]
            before = None if prior is None else prior.lse[(*here, h)]
            *state, inverse, of_prior = finished(*state, sink, before, exp2)
            if spec.rotation:
                sums = hadamard.of_vectors(sums, spec.rotation)
            for n, (d, w) in enumerate(value_vectors):
                x = sums[n] * inverse
                if prior is not None:
                    x = with_prior(x, prior.load(*here, h, d, width=w), of_prior)
                a.out.store(*here, h, d, value=case.out(x), alignment=case.out.itemsize)
            if a.lse is not None:
                a.lse[(*here, h)] = log_sum_exp(state[0], state[1])

    return attention_host


# --- GPUs ------------------------------------------------------------------------------------------


def lane_width(case: Case) -> int:
    """Columns of the values per access of a lane: few enough for all lanes to have some, at most 16 bytes."""
    widest = min(
        most_lanes((case.spec.dtype,)), lowbit(case.value_size), max(1, 1 << cdiv(case.value_size, 32).bit_length() - 1)
    )
    return load_width(case.spec, widest)


def simt_kernel(case: Case) -> Any:
    """The GPU's kernel: one warp per (row, query head), ``WARPS`` per block, in a linear grid."""
    spec, content = case.spec, read_columns(case)
    key_width = load_width(spec, min(most_lanes((spec.dtype,)), lowbit(content)))
    width = lane_width(case)
    columns = case.value_size // width  # vectors per value
    vectors_per_lane = cdiv(columns, 32)
    unrolled, hides = content // key_width <= 32, case.mask.evaluated or case.listed

    def product(total: Any, x: Any, y: Any) -> Any:
        """total + x . y"""
        for one, other in zip(x, y, strict=True) if isinstance(x, kv.Vector) else [(x, y)]:
            total = total + one * other
        return total

    @kv.func
    def score_of(keys, q, b, head, token, page):
        """The score of this lane's key with the query row in shared memory."""
        total = kv.f32(0.0)
        for d in range(0 if unrolled else kv.i32(0), content, key_width):
            key = keys.read(b, head, token, d, key_width, page)
            total = product(total, q.array.load(q.warp, d, width=key_width), key)
        for d, w in kv.static(rope_vectors(case, 8)):
            key = keys.read_rope(b, head, token, d, w, page)
            total = product(total, q.array.load(q.warp, d, width=w, alignment=4), key)
        return total

    @kv.func
    def take_all(keys, values, q, row, lane, first, end, state, sums, lists):
        """Add the keys [first, end) to the state (maximum, this lane's sum) and to the weighted sums of values."""
        b, head = row.b, row.head
        for base in range(first, end, 32):
            token = kv.math.min(base + lane, end - 1)
            at, page, seen = keys.place(lists, b, token)
            score = row.modified(case, score_of(keys, q, b, head, at, page), token)
            seen = seen & (base + lane < end)
            if case.mask.evaluated:
                seen = seen & row.shows(case, token)
            score = kv.where(seen, score, NO_VALUE)
            higher = kv.math.max(state[0], kv.warp_reduce(score, "max"))
            alpha = kv.ex2(state[0] - higher)
            weight = kv.ex2(score - higher)
            state[0], state[1] = higher, state[1] * alpha + weight
            for n in kv.static(range(vectors_per_lane)):
                sums[n] = sums[n] * alpha
            for i in range(0, kv.math.min(end - base, 32)):
                share = kv.shuffle_idx(weight, i)
                if (share != 0.0) if hides else True:  # a masked value may be undefined
                    at, page, _ = values.place(lists, b, base + i)
                    for n in kv.static(range(vectors_per_lane)):
                        d = kv.math.min(lane + 32 * n, columns - 1) * width
                        sums[n] = sums[n] + values.read(b, head, at, d, width, page) * share

    @kv.func
    def rotate_row(q, warp, lane):
        """Rotate the blocks of a query row in shared memory."""
        steps = [1 << n for n in range(spec.rotation.bit_length() - 1)]
        for distance in kv.static(steps):
            for pair in range(lane, case.size // 2, 32):
                d = pair // distance * (2 * distance) + pair % distance
                low, high = q[warp, d], q[warp, d + distance]
                q[warp, d], q[warp, d + distance] = low + high, low - high
            kv.syncwarp()
        for d in range(lane, case.size, 32):
            q[warp, d] = q[warp, d] * hadamard.factor(spec.rotation)
        kv.syncwarp()

    @kv.kernel(max_threads=32 * WARPS)
    def attention_simt(a: AttentionArguments):
        lane, warp = kv.thread_id.x & 31, kv.thread_id.x >> 5
        item = kv.block_id.x * WARPS + warp
        number, h = item // case.heads, item % case.heads
        q = kv.shared((WARPS, align_up(case.size, 16)), f32)
        queries = a.queries(case)
        exists, here = queries.in_range(number), queries.numbered(number)
        if exists:
            factor = a.scale * scale_log2_of(case)
            for d in range(lane, case.size, 32):
                q[warp, d] = kv.f32(a.query[(*here, h, d)]) * factor
        kv.syncwarp()
        if spec.rotation:
            rotate_row(q, warp, lane)
        if exists:
            b, position, num_keys = place_of(case, a, queries, number)
            first, end = case.mask.interval(position, num_keys)
            keys, values = rows_of(case, a, b)
            sums = [kv.vector(f32, width) if width > 1 else kv.f32(0.0) for _ in range(vectors_per_lane)]
            row, q_row = Row(b, h // case.group, h, position, a.slopes, a.arrays), SharedRow(q, warp)
            state = [kv.f32(LOWEST), kv.f32(0.0)]
            visited = visited_of(case, a, queries, (b, number, h), num_keys)
            if visited is None:
                take_all(keys, values, q_row, row, lane, first, end, state, sums, a.lists)
            else:
                count = visited.count(b, row.head)
                for entry in range(count):
                    token = visited.first_token(b, row.head, entry, count)
                    low, high = kv.math.max(first, token), kv.math.min(end, token + visited.unit)
                    take_all(keys, values, q_row, row, lane, low, high, state, sums, None)
            top, total = state
            prior, sink = Prior.of(case, a), None if a.sinks is None else a.sinks[h]
            before = None if prior is None else prior.lse[(*here, h)]
            top, total, inverse, of_prior = finished(top, kv.warp_reduce(total, "add"), sink, before)
            if spec.rotation:
                sums = hadamard.of_vectors(sums, spec.rotation, 32, lane)
            for n in kv.static(range(vectors_per_lane)):
                column = lane + 32 * n
                if column < columns:
                    x = sums[n] * inverse
                    if prior is not None:
                        x = with_prior(x, prior.load(*here, h, column * width, width=width), of_prior)
                    a.out.store(*here, h, column * width, value=case.out(x), alignment=case.out.itemsize)
            if a.lse is not None:
                if lane == 0:
                    a.lse[(*here, h)] = log_sum_exp(top, total)

    return attention_simt
