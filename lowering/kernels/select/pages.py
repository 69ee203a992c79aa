# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.summarize_pages and kv.select_pages.

Summaries. A group of threads has a page and KV head, and reads the keys of all valid tokens, whichever step wrote them.
Summaries never depend on old ones, so that a call may be repeated and a page reused.

The selection is two kernels, so that many blocks score one long sequence. The first computes per page an upper bound of
the scores of its keys: q+ . max + q- . min, with the positive and negative parts of every query row, on tensor cores if
possible (:mod:`row_products`); otherwise eight lanes share a page, with some columns of the query rows in registers.
The second selects the largest scores (:mod:`top_k`). On the host one thread does both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, bf16, f16, f32, i32
from kvarn.dialect.layout import CacheSpec, cdiv, lowbit
from kvarn.dialect.ops.pages import MIN_MAX
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.cache_rows import load_width, read

from .. import expands
from ..attention.queries import RaggedQueries
from ..base import Expansion
from ..common import BYTES, WARP, Rows, as_vector, at_most, begin, row_alignment, starts_early
from . import row_products
from .row_products import TILE_ROWS, RowProducts
from .top_k import ALWAYS, chooser, key_of

LANES = 8  # lanes per page without tensor cores
ROWS = 4  # query rows that a lane has in registers at a time
CHUNK = 64  # pages per block
WARPS = 4  # per block of the scores and of the summaries
THREADS = 256  # per block of the selection


@kv.func
def tokens_of(collection: Any, b: Any, new: Any) -> tuple[Any, Any]:
    """(cached tokens, cached and new tokens) of a sequence, clamped to its capacity."""
    start = collection.cache_length(b)
    return start, at_most(start + kv.math.max(new, 0), collection.token_capacity())


# --- summaries -------------------------------------------------------------------------------------


@kv.func
def rounded(x: Any, dtype: DType, up: bool) -> Any:
    """A vector of f32 converted to another type, rounded up or down."""
    y = dtype(x)
    if dtype is f32:
        return y
    word = kv.bitcast(y, kv.i16)
    back = kv.f32(y)
    wrong = back < x if up else back > x
    # The neighbour in the direction: one bit pattern up or down by sign; after zero, the smallest number.
    away = 1 if up else -1
    step = kv.where(back > 0.0, away, -away)
    moved = kv.where(back == 0.0, 1 if up else -0x7FFF, word + kv.i16(step))
    return kv.bitcast(kv.where(wrong, moved, word), dtype)


def summarize_kernel(spec: CacheSpec, dtype: DType, rows: int, alignment: int, lanes: int, early: bool) -> Any:
    """One group of ``lanes`` threads per KV head of a page, for ``slots`` pages per sequence."""
    P, H, D = spec.page_size, spec.num_heads, spec.head_size
    width = load_width(spec, min(lowbit(D), 4))
    store = Rows(width, alignment)
    per_block = WARPS if lanes > 1 else 1

    @kv.func
    def summarize(keys, summaries, layer, b, h, first, end, place, lane):
        for d in range(lane * width, D, lanes * width):
            low = as_vector(read(spec, keys, b, h, first, d, width, place))
            high, total = low, low
            for token in range(first + 1, end):
                x = as_vector(read(spec, keys, b, h, token, d, width, place))
                low = kv.where((x < low) | (x != x), x, low)  # keeps NaN, which min and max would drop
                high = kv.where((x > high) | (x != x), x, high)
                total = total + x
            if rows == MIN_MAX:
                store.store(summaries, place, layer, h, 0, d, value=rounded(low, dtype, False))
                store.store(summaries, place, layer, h, 1, d, value=rounded(high, dtype, True))
            else:
                store.store(summaries, place, layer, h, 0, d, value=dtype(total * (1.0 / kv.f32(end - first))))

    @kv.kernel
    def summarize_pages(collection, layer: i32, summaries, row_offsets, slots: i32):
        begin(early)
        item, lane = kv.block_id.x * per_block + kv.thread_id.x // lanes, kv.thread_id.x % lanes
        h, b, slot = item % H, item // H // slots, item // H % slots
        if b < row_offsets.shape[0] - 1:
            start, end = tokens_of(collection, b, row_offsets[b + 1] - row_offsets[b])
            keys = collection.get_key_cache(layer)
            pages = kv.math.min(keys.field("num_blocks"), summaries.shape[0])
            for page in range(start // P + slot, kv.where(end > start, (end + (P - 1)) // P, 0), slots):
                place = keys.raw_page(b, page * P)
                if kv.u32(place) < kv.u32(pages):
                    summarize(keys, summaries, layer, b, h, page * P, kv.math.min(end, page * P + P), place, lane)

    return summarize_pages


@expands("kv.summarize_pages")
def expand_summarize_pages(op: Any, at: Expansion) -> None:
    spec, host, alignment = at.spec(op.collection), at.target.is_host, row_alignment(op)
    lanes, threads, per_block = (1, 1, 1) if host else (WARP, WARPS * WARP, WARPS)
    rows, dtype = at.static_dim(op.summaries, 3), at.dtype(op.summaries)
    slots = at.field(op.collection, "max_seq_length") // spec.page_size + 2
    blocks = ((at.dim(op.row_offsets, 0) - 1) * slots * spec.num_heads + (per_block - 1)) // per_block
    early = starts_early(at)
    kernel = summarize_kernel(spec, dtype, rows, alignment, lanes, early)
    args = [op.collection, op.layer, op.summaries, op.row_offsets, slots]
    at.launch(kernel, args, (blocks, 1, 1), (threads, 1, 1), key=(spec, alignment), programmatic=early)


# --- scores ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """The computation of the pages' scores, by ``lanes`` threads per page.

    ``group`` query heads share a KV head; summaries have ``rows`` rows. ``early``: kernels use PDL.
    """

    spec: CacheSpec
    group: int
    query: DType
    stored: DType
    rows: int
    alignment: int
    lanes: int
    early: bool

    @property
    def together(self) -> int:
        """Query rows that a thread has in registers."""
        return min(self.group, ROWS)

    @property
    def width(self) -> int:
        """Columns per load."""
        return min(lowbit(self.spec.head_size), BYTES // self.stored.itemsize)

    @property
    def vectors_per_lane(self) -> int:
        """Loads per thread that cover a row."""
        return cdiv(self.spec.head_size, self.lanes * self.width)

    @kv.func
    def columns(self, lane: Any, n: int) -> tuple[Any, Any]:
        """(first column of a load, whether it exists); past the end, the last columns are loaded again."""
        d = (n * self.lanes + lane) * self.width
        if (n + 1) * self.lanes * self.width <= self.spec.head_size:
            return d, True
        return kv.math.min(d, self.spec.head_size - self.width), d < self.spec.head_size

    @kv.func
    def query_rows(self, query: Any, base: Any, head: Any, first: Any, last: Any, lane: Any) -> Any:
        """Query rows from ``first`` up, clamped to ``last``: (positive parts, negative parts) by row and load."""
        load, nothing, found = Rows(self.width, self.alignment), kv.vector(f32, self.width), []
        for r in kv.static(range(self.together)):
            row, parts = kv.math.min(first + r, last), []
            for n in kv.static(range(self.vectors_per_lane)):
                d, there = self.columns(lane, n)
                q = kv.f32(load.load(query, base + row // self.group, head * self.group + row % self.group, d))
                q = kv.where(there, q, nothing)
                if self.rows == MIN_MAX:  # NaN is in both
                    parts.append((kv.where(q < 0.0, nothing, q), kv.where(q > 0.0, nothing, q)))
                else:
                    parts.append((q,))
            found.append(parts)
        return found

    @kv.func
    def summary(self, summaries: Any, place: Any, layer: Any, head: Any, lane: Any) -> Any:
        """A thread's columns of a page's summary, by load: (largest, smallest), or the mean."""
        load, found = Rows(self.width, self.alignment), []
        for n in kv.static(range(self.vectors_per_lane)):
            d, _ = self.columns(lane, n)
            found.append([load.load(summaries, place, layer, head, r, d) for r in reversed(range(self.rows))])
        return found

    @kv.func
    def largest(self, q: Any, summary: Any) -> Any:
        """The maximum of the rows' scores of a page, in every thread of the page."""
        best = kv.f32(0.0)
        for r in kv.static(range(self.together)):
            total = kv.vector(f32, self.width)
            for n in kv.static(range(self.vectors_per_lane)):
                for part, row in kv.static(list(zip(q[r][n], summary[n], strict=True))):
                    total = kv.math.fma(part, kv.f32(row), total)
            score = total.reduce("add")
            for distance in kv.static([1 << n for n in range(self.lanes.bit_length() - 1)]):
                score = score + kv.shuffle_xor(score, distance)
            best = score if r == 0 else larger(best, score)
        return best


@kv.func
def larger(a: Any, b: Any) -> Any:
    """The larger of two scores; NaN if either is NaN."""
    return kv.where((b > a) | (b != b), b, a)


@kv.func
def page_key(score: Any, page: Any, pages: Any, first: int, last: int) -> Any:
    """The key of a page's score; pages that are always selected have the largest key."""
    return kv.where((page < first) | (page >= pages - last), kv.u32(ALWAYS), key_of(score))


@kv.func
def pages_of(collection: Any, queries: Any, b: Any) -> Any:
    """The pages of a sequence; 0 without new tokens."""
    _, end = tokens_of(collection, b, queries.length(b))
    pages = (end + (collection.page_size - 1)) // collection.page_size
    return kv.where(queries.length(b) > 0, pages, 0)


@kv.func
def list_at(collection: Any, b: Any, h: Any) -> Any:
    """The index of the keys of a sequence and KV head."""
    return (b * collection.num_heads + h) * collection.field("lookup_columns")


def score_kernel(c: Scores, first: int, last: int) -> Any:
    """One block per :data:`CHUNK` pages of a sequence and KV head; a warp scores a page per group of lanes."""
    at_a_time = WARPS * WARP // LANES
    pages_per_group = CHUNK // at_a_time

    @kv.kernel(block=(WARPS * WARP, 1, 1))
    def score_pages(collection, layer: i32, query, row_offsets, summaries, keys: kv.Buffer[i32, 1], chunks: i32):
        begin(c.early)
        chunk, rest = kv.block_id.x % chunks * CHUNK, kv.block_id.x // chunks
        h, b = rest % c.spec.num_heads, rest // c.spec.num_heads
        queries = RaggedQueries(row_offsets, query.shape[0])
        pages, rows = pages_of(collection, queries, b), queries.length(b) * c.group
        if chunk < pages:
            k_cache, lane, mine = collection.get_key_cache(layer), kv.thread_id.x % LANES, kv.thread_id.x // LANES
            best = [kv.f32(0.0)] * pages_per_group
            for row in range(0, rows, c.together):
                q = c.query_rows(query, queries.base(b), h, row, rows - 1, lane)
                for i in kv.static(range(pages_per_group)):
                    page = kv.math.min(chunk + i * at_a_time + mine, pages - 1)
                    place = kv.math.min(k_cache.page(b, page * c.spec.page_size), summaries.shape[0] - 1)
                    score = c.largest(q, c.summary(summaries, place, layer, h, lane))
                    best[i] = kv.where(row == 0, score, larger(best[i], score))
            for i in kv.static(range(pages_per_group)):
                page = chunk + i * at_a_time + mine
                if (page < pages) & (lane == 0):
                    key = page_key(best[i], page, pages, first, last)
                    keys[list_at(collection, b, h) + page] = kv.bitcast(key, i32)

    return score_pages


def on_tensor_cores(c: Scores, target: Target) -> bool:
    """Whether tensor cores compute the scores."""
    return (
        row_products.takes(c.spec.head_size, target)
        and c.stored in (bf16, f16)
        and c.query is c.stored
        and c.alignment >= BYTES
    )


def tensor_score_kernel(c: Scores, first: int, last: int) -> Any:
    """One block per :data:`CHUNK` pages of a sequence and KV head; a warp has 16 pages, and eight query rows at a time.

    Positive and negative parts of the query are separate tiles.
    """
    products = RowProducts(c.spec.head_size, c.rows, c.stored)
    load, itemsize = Rows(4, c.alignment), c.stored.itemsize

    @kv.func
    def four_of_query(state, row, d):
        """Four columns of a query row, clamped to the last row; in the second tile, their negative parts."""
        query, base, head, begin_row, end_row = state
        r = kv.math.min(begin_row + row % TILE_ROWS, end_row - 1)
        q, nothing = kv.f32(load.load(query, base + r // c.group, head * c.group + r % c.group, d)), kv.vector(f32, 4)
        if c.rows == MIN_MAX:  # NaN is in both
            return kv.where(kv.where(row < TILE_ROWS, q, -q) < 0.0, nothing, q)
        return q

    @kv.kernel(block=(WARPS * WARP, 1, 1))
    def score_pages(collection, layer: i32, query, row_offsets, summaries, keys: kv.Buffer[i32, 1], chunks: i32):
        begin(c.early)
        operand = kv.shared(products.words, i32)
        chunk, rest = kv.block_id.x % chunks * CHUNK, kv.block_id.x // chunks
        h, b, lane = rest % c.spec.num_heads, rest // c.spec.num_heads, kv.lane_id()
        queries = RaggedQueries(row_offsets, query.shape[0])
        pages, rows = pages_of(collection, queries, b), queries.length(b) * c.group
        if chunk < pages:
            k_cache, summary = collection.get_key_cache(layer), []
            mine = chunk + kv.warp_id() * 16 + (lane >> 2)
            for r in kv.static(reversed(range(c.rows))):  # first the maxima, which the positive parts multiply
                halves = []
                for half in kv.static(range(2)):
                    page = kv.math.min(mine + 8 * half, pages - 1)
                    place = kv.math.min(k_cache.page(b, page * c.spec.page_size), summaries.shape[0] - 1)
                    halves.append(products.read(summaries.address(place, layer, h, r, 0), itemsize, lane))
                summary.append(products.many(*halves))
            best = [kv.f32(0.0)] * 2
            for row in range(0, rows, TILE_ROWS):
                products.fill(operand, WARPS * WARP, four_of_query, (query, queries.base(b), h, row, rows))
                kv.barrier()
                acc = [kv.f32(0.0)] * 4
                for part in kv.static(range(c.rows)):
                    for step in kv.static(range(products.steps)):
                        acc = kv.mma_m16n8k16(
                            summary[part][step], products.few(operand, part, step, lane), acc, c.stored
                        )
                for half in kv.static(range(2)):
                    score = larger(acc[2 * half], acc[2 * half + 1])
                    best[half] = kv.where(row == 0, score, larger(best[half], score))
                kv.barrier()
            for half in kv.static(range(2)):
                for distance in kv.static((1, 2)):
                    best[half] = larger(best[half], kv.shuffle_xor(best[half], distance))
            page, score = mine + 8 * (lane & 1), kv.where(lane & 1 == 0, best[0], best[1])
            if (page < pages) & (lane & 3 < 2):
                key = page_key(score, page, pages, first, last)
                keys[list_at(collection, b, h) + page] = kv.bitcast(key, i32)

    return score_pages


# --- the selection ---------------------------------------------------------------------------------


@kv.func
def stored_key(state: Any, page: Any) -> Any:
    """The key of a page; ``state`` is (keys, index of the list's first key, ...)."""
    return kv.u32(state[0][state[1] + page])


@kv.func
def put_page(state: Any, place: Any, page: Any) -> None:
    """Write a page to its list; ``state`` ends with (lists, sequence, KV head)."""
    state[2][state[3], state[4], place] = page


@kv.func
def finish_list(out: Any, counts: Any, b: Any, h: Any, chosen: Any, threads: int) -> None:
    """Fill the rest of a list with -1."""
    for i in range(chosen + kv.thread_id.x, out.shape[2], threads):
        out[b, h, i] = -1
    if kv.thread_id.x == 0:
        counts[b, h] = chosen


def choose_kernel(c: Scores) -> Any:
    """The selection with one block per sequence and KV head."""
    choose = chooser(THREADS, stored_key, put_page)

    @kv.kernel(block=(THREADS, 1, 1))
    def choose_pages(collection, query, row_offsets, keys: kv.Buffer[i32, 1], out, counts):
        begin(c.early)
        h, b = kv.block_id.x % c.spec.num_heads, kv.block_id.x // c.spec.num_heads
        pages = pages_of(collection, RaggedQueries(row_offsets, query.shape[0]), b)
        chosen = choose((keys, list_at(collection, b, h), out, b, h), pages, out.shape[2])
        finish_list(out, counts, b, h, chosen, THREADS)

    return choose_pages


def host_kernel(c: Scores, first: int, last: int) -> Any:
    """Scores and selection with one thread per sequence and KV head."""
    choose = chooser(1, stored_key, put_page)

    @kv.kernel
    def select_pages(collection, layer: i32, query, row_offsets, summaries, keys: kv.Buffer[i32, 1], out, counts):
        h, b = kv.block_id.x, kv.block_id.y
        queries = RaggedQueries(row_offsets, query.shape[0])
        pages, rows = pages_of(collection, queries, b), queries.length(b) * c.group
        k_cache, at = collection.get_key_cache(layer), list_at(collection, b, h)
        for row in range(0, kv.where(pages > 0, rows, 0), c.together):
            q = c.query_rows(query, queries.base(b), h, row, rows - 1, 0)
            for page in range(pages):
                place = kv.math.min(k_cache.page(b, page * c.spec.page_size), summaries.shape[0] - 1)
                score = c.largest(q, c.summary(summaries, place, layer, h, 0))
                if row > 0:
                    score = larger(kv.bitcast(keys[at + page], f32), score)
                keys[at + page] = kv.bitcast(score, i32)
        for page in range(pages):
            key = page_key(kv.bitcast(keys[at + page], f32), page, pages, first, last)
            keys[at + page] = kv.bitcast(key, i32)
        finish_list(out, counts, b, h, choose((keys, at, out, b, h), pages, out.shape[2]), 1)

    return select_pages


@expands("kv.select_pages")
def expand_select_pages(op: Any, at: Expansion) -> None:
    spec, host = at.spec(op.collection), at.target.is_host
    case = Scores(
        spec, at.static_dim(op.query, 1) // spec.num_heads, at.dtype(op.query), at.dtype(op.summaries),
        at.static_dim(op.summaries, 3), row_alignment(op), 1 if host else LANES, starts_early(at),
    )  # fmt: skip
    first, last, heads = op.first.value, op.last.value, spec.num_heads
    batch, columns = at.dim(op.row_offsets, 0) - 1, at.field(op.collection, "lookup_columns")
    keys = at.workspace(batch * heads * columns, dtype=i32)
    scored = [op.collection, op.layer, op.query, op.row_offsets, op.summaries, keys]
    if host:
        kernel = host_kernel(case, first, last)
        args = [*scored, op.pages, op.page_counts]
        at.launch(kernel, args, (heads, batch, 1), (1, 1, 1), key=(case, first, last))
        return
    chunks, early = (columns + (CHUNK - 1)) // CHUNK, case.early
    blocks, threads = batch * heads * chunks, (WARPS * WARP, 1, 1)
    scoring = tensor_score_kernel if on_tensor_cores(case, at.target) else score_kernel
    kernel = scoring(case, first, last)
    at.launch(kernel, [*scored, chunks], (blocks, 1, 1), threads, key=(case, first, last), programmatic=early)
    args = [op.collection, op.query, op.row_offsets, keys, op.pages, op.page_counts]
    at.launch(choose_kernel(case), args, (batch * heads, 1, 1), (THREADS, 1, 1), key=case, programmatic=early)
