# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.summarize_pages and kv.select_pages.

Summaries. A group of threads has a page and KV head, and reads its keys from the first to the last token that counts,
whatever wrote them. Pages are summarized from their tokens each time: nothing depends on what a summary was before, so
that a call may be repeated and a page used again.

The choice is two kernels, so that the scores of one long sequence are the work of many blocks. The first gives each
page the largest score that a key within its summary may have: eight lanes share a page and have some columns of every
query row in registers, split in positive and negative parts, q+ . max + q- . min. The second finds the K-th largest
score of a list by its bits, eight at a time with counts in shared memory, and writes the pages from there on in
ascending order. Scores are compared as unsigned integers, the pages that are always chosen first of all; only integers
are counted, so that no order of threads shows. On the host one thread does both, and finds the bits one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, f32, i32
from kvarn.dialect.layout import CacheSpec, cdiv, lowbit
from kvarn.dialect.ops.pages import MIN_MAX

from . import expands
from .attention_common import load_width, read
from .attention_queries import RaggedQueries
from .base import Expansion
from .block import block_scan
from .common import BYTES, WARP, Rows, at_most, begin, row_alignment, starts_early

LANES = 8  # of a page in the choice
ROWS = 4  # query rows that a lane has in registers at a time
CHUNK = 64  # pages of a block
WARPS = 4  # of a block that scores or summarizes
THREADS = 256  # of a block that chooses
ALWAYS, NOT_A_NUMBER = 0xFFFFFFFF, 0xFFFFFFFE  # keys of pages that are always chosen, and of scores that are NaN


@kv.func
def tokens_of(collection: Any, b: Any, new: Any) -> tuple[Any, Any]:
    """(cached tokens, cached and new tokens) of a sequence, within what there is room for."""
    start = collection.cache_length(b)
    return start, at_most(start + kv.math.max(new, 0), collection.token_capacity())


# --- summaries -------------------------------------------------------------------------------------


@kv.func
def rounded(x: Any, dtype: DType, up: bool) -> Any:
    """A vector of f32 in another type, rounded up or down."""
    y = dtype(x)
    if dtype is f32:
        return y
    word = kv.bitcast(y, kv.i16)
    back = kv.f32(y)
    wrong = back < x if up else back > x
    # The neighbour in the direction: away from zero on its side, towards it on the other; zero's is the least number.
    away = 1 if up else -1
    step = kv.where(back > 0.0, away, -away)
    moved = kv.where(back == 0.0, 1 if up else -0x7FFF, word + kv.i16(step))
    return kv.bitcast(kv.where(wrong, moved, word), dtype)


def summarize_kernel(spec: CacheSpec, dtype: DType, rows: int, alignment: int, lanes: int) -> Any:
    """``lanes`` threads have a KV head of a page; ``slots`` of them stand for the pages that a sequence may touch."""
    P, H, D = spec.page_size, spec.num_heads, spec.head_size
    width = load_width(spec, min(lowbit(D), 4))
    store = Rows(width, alignment)
    per_block = WARPS if lanes > 1 else 1

    @kv.func
    def summarize(keys, summaries, layer, b, h, first, end, place, lane):
        for d in range(lane * width, D, lanes * width):
            low = element_vector(read(spec, keys, b, h, first, d, width, place))
            high, total = low, low
            for token in range(first + 1, end):
                x = element_vector(read(spec, keys, b, h, token, d, width, place))
                low = kv.where((x < low) | (x != x), x, low)  # NaN stays, which min and max would drop
                high = kv.where((x > high) | (x != x), x, high)
                total = total + x
            if rows == MIN_MAX:
                store.store(summaries, place, layer, h, 0, d, value=rounded(low, dtype, False))
                store.store(summaries, place, layer, h, 1, d, value=rounded(high, dtype, True))
            else:
                store.store(summaries, place, layer, h, 0, d, value=dtype(total * (1.0 / kv.f32(end - first))))

    @kv.kernel
    def summarize_pages(collection, layer: i32, summaries, row_offsets, slots: i32):
        begin(lanes > 1)
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


@kv.func
def element_vector(x: Any) -> Any:
    """What a load of one element gives as a vector too."""
    return x if isinstance(x, kv.Vector) else kv.vector(f32, [x])


@expands("kv.summarize_pages")
def expand_summarize_pages(op: Any, at: Expansion) -> None:
    spec, host, alignment = at.spec(op.collection), at.target.is_host, row_alignment(op)
    lanes, threads, per_block = (1, 1, 1) if host else (WARP, WARPS * WARP, WARPS)
    rows, dtype = at.static_dim(op.summaries, 3), at.dtype(op.summaries)
    slots = at.field(op.collection, "max_seq_length") // spec.page_size + 2
    blocks = ((at.dim(op.row_offsets, 0) - 1) * slots * spec.num_heads + (per_block - 1)) // per_block
    kernel = summarize_kernel(spec, dtype, rows, alignment, lanes)
    args = [op.collection, op.layer, op.summaries, op.row_offsets, slots]
    at.launch(kernel, args, (blocks, 1, 1), (threads, 1, 1), key=(spec, alignment), programmatic=starts_early(at))


# --- scores ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """How the scores of pages are computed, for a case: by ``lanes`` threads a page.

    ``group`` query heads share a KV head; summaries have ``rows`` rows.
    """

    spec: CacheSpec
    group: int
    query: DType
    stored: DType
    rows: int
    alignment: int
    lanes: int

    @property
    def together(self) -> int:
        """Query rows that a thread has in registers."""
        return min(self.group, ROWS)

    @property
    def width(self) -> int:
        """Columns of one load."""
        return min(lowbit(self.spec.head_size), BYTES // self.stored.itemsize)

    @property
    def turns(self) -> int:
        """Loads of a thread that cover a row."""
        return cdiv(self.spec.head_size, self.lanes * self.width)

    @kv.func
    def columns(self, lane: Any, turn: int) -> tuple[Any, Any]:
        """(the first column of a load, whether there is one): the last columns stand for those that are none."""
        d = (turn * self.lanes + lane) * self.width
        if (turn + 1) * self.lanes * self.width <= self.spec.head_size:
            return d, True
        return kv.math.min(d, self.spec.head_size - self.width), d < self.spec.head_size

    @kv.func
    def query_rows(self, query: Any, base: Any, head: Any, first: Any, last: Any, lane: Any) -> Any:
        """Query rows from ``first`` on, at most the row ``last``: (positive parts, negative parts) by row and turn."""
        load, nothing, found = Rows(self.width, self.alignment), kv.vector(f32, self.width), []
        for r in kv.static(range(self.together)):
            row, parts = kv.math.min(first + r, last), []
            for turn in kv.static(range(self.turns)):
                d, there = self.columns(lane, turn)
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
        """A thread's columns of a page's summary, by turn: (largest, smallest), or the mean."""
        load, found = Rows(self.width, self.alignment), []
        for turn in kv.static(range(self.turns)):
            d, _ = self.columns(lane, turn)
            found.append([load.load(summaries, place, layer, head, r, d) for r in reversed(range(self.rows))])
        return found

    @kv.func
    def largest(self, q: Any, summary: Any) -> Any:
        """The largest of the rows' scores of a page, in every thread of the page."""
        best = kv.f32(0.0)
        for r in kv.static(range(self.together)):
            total = kv.vector(f32, self.width)
            for turn in kv.static(range(self.turns)):
                for part, row in kv.static(list(zip(q[r][turn], summary[turn], strict=True))):
                    total = kv.math.fma(part, kv.f32(row), total)
            score = total.reduce("add")
            for distance in kv.static([1 << n for n in range(self.lanes.bit_length() - 1)]):
                score = score + kv.shuffle_xor(score, distance)
            best = score if r == 0 else larger(best, score)
        return best


@kv.func
def larger(a: Any, b: Any) -> Any:
    """The larger of two scores; NaN where one is."""
    return kv.where((b > a) | (b != b), b, a)


@kv.func
def key_of(score: Any, page: Any, pages: Any, first: int, last: int) -> Any:
    """A score as an unsigned integer of the same order; zeros are one, whatever their sign."""
    bits = kv.bitcast(kv.where(score == 0.0, 0.0, score), kv.u32)
    key = kv.where(bits >= 0x80000000, ~bits, bits | kv.u32(0x80000000))
    key = kv.where(score != score, kv.u32(NOT_A_NUMBER), key)
    return kv.where((page < first) | (page >= pages - last), kv.u32(ALWAYS), key)


@kv.func
def pages_of(collection: Any, queries: Any, b: Any) -> Any:
    """The pages of a sequence; none of one without new tokens."""
    _, end = tokens_of(collection, b, queries.length(b))
    pages = (end + (collection.page_size - 1)) // collection.page_size
    return kv.where(queries.length(b) > 0, pages, 0)


@kv.func
def list_at(collection: Any, b: Any, h: Any) -> Any:
    """Where the keys of a sequence and KV head stand."""
    return (b * collection.num_heads + h) * collection.field("lookup_columns")


def score_kernel(c: Scores, first: int, last: int) -> Any:
    """A block has :data:`CHUNK` pages of a sequence and KV head, a warp as many at a time as it has groups of lanes."""
    at_a_time = WARPS * WARP // LANES
    turns = CHUNK // at_a_time

    @kv.kernel(block=(WARPS * WARP, 1, 1))
    def score_pages(collection, layer: i32, query, row_offsets, summaries, keys: kv.Buffer[i32, 1], chunks: i32):
        begin(True)
        chunk, rest = kv.block_id.x % chunks * CHUNK, kv.block_id.x // chunks
        h, b = rest % c.spec.num_heads, rest // c.spec.num_heads
        queries = RaggedQueries(row_offsets, query.shape[0])
        pages, rows = pages_of(collection, queries, b), queries.length(b) * c.group
        if chunk < pages:
            k_cache, lane, mine = collection.get_key_cache(layer), kv.thread_id.x % LANES, kv.thread_id.x // LANES
            best = [kv.f32(0.0)] * turns
            for row in range(0, rows, c.together):
                q = c.query_rows(query, queries.base(b), h, row, rows - 1, lane)
                for i in kv.static(range(turns)):
                    page = kv.math.min(chunk + i * at_a_time + mine, pages - 1)
                    place = kv.math.min(k_cache.page(b, page * c.spec.page_size), summaries.shape[0] - 1)
                    score = c.largest(q, c.summary(summaries, place, layer, h, lane))
                    best[i] = kv.where(row == 0, score, larger(best[i], score))
            for i in kv.static(range(turns)):
                page = chunk + i * at_a_time + mine
                if (page < pages) & (lane == 0):
                    key = key_of(best[i], page, pages, first, last)
                    keys[list_at(collection, b, h) + page] = kv.bitcast(key, i32)

    return score_pages


# --- the choice ------------------------------------------------------------------------------------


def choose_kernel(c: Scores) -> Any:
    """A block chooses for a sequence and KV head."""
    warps = THREADS // WARP

    @kv.func
    def threshold(keys, at, pages, wanted, bins, sums, found):
        """(the ``wanted``-th largest key, how many of those that equal it are wanted)."""
        tid, prefix, left = kv.thread_id.x, kv.u32(0), wanted
        for step in kv.static(range(4)):
            shift = 24 - 8 * step
            bins[tid] = 0
            kv.barrier()
            for page in range(tid, pages, THREADS):
                key = kv.u32(keys[at + page])
                if step == 0:
                    same = key == key
                else:
                    same = key >> (shift + 8) == prefix
                if same:
                    kv.atomic_add(bins, kv.i32((key >> shift) & 255), 1)
            kv.barrier()
            mine = bins[255 - tid]  # the largest digit first
            upto, _ = block_scan(mine, sums, warps)
            if (upto >= left) & (upto - mine < left):
                found[0], found[1] = 255 - tid, left - (upto - mine)
            kv.barrier()
            prefix, left = (prefix << 8) | kv.u32(found[0]), found[1]
        return prefix, left

    @kv.kernel(block=(THREADS, 1, 1))
    def choose_pages(collection, query, row_offsets, keys: kv.Buffer[i32, 1], out, counts):
        bins, sums, found = kv.shared(256, i32), kv.shared(warps, i32), kv.shared(2, i32)
        begin(True)
        h, b, tid = kv.block_id.x % c.spec.num_heads, kv.block_id.x // c.spec.num_heads, kv.thread_id.x
        pages = pages_of(collection, RaggedQueries(row_offsets, query.shape[0]), b)
        wanted, at = kv.math.min(pages, out.shape[2]), list_at(collection, b, h)
        if wanted < pages:
            least, equal = kv.u32(0), i32(0)
            if wanted > 0:
                least, equal = threshold(keys, at, pages, wanted, bins, sums, found)
                above, same = i32(0), i32(0)
                for chunk in range(0, pages, THREADS):
                    page = chunk + tid
                    key = kv.u32(0)
                    if page < pages:
                        key = kv.u32(keys[at + page])
                    more, even = i32((page < pages) & (key > least)), i32((page < pages) & (key == least))
                    upto, all_ = block_scan(more | (even << 16), sums, warps)
                    before_even = same + (upto >> 16) - even
                    if (more == 1) | ((even == 1) & (before_even < equal)):
                        out[b, h, above + (upto & 0xFFFF) - more + kv.math.min(before_even, equal)] = page
                    above, same = above + (all_ & 0xFFFF), same + (all_ >> 16)
        else:
            for page in range(tid, pages, THREADS):
                out[b, h, page] = page
        for i in range(wanted + tid, out.shape[2], THREADS):
            out[b, h, i] = -1
        if tid == 0:
            counts[b, h] = wanted

    return choose_pages


def host_kernel(c: Scores, first: int, last: int) -> Any:
    """A thread scores and chooses for a sequence and KV head."""

    @kv.kernel
    def select_pages(collection, layer: i32, query, row_offsets, summaries, keys: kv.Buffer[i32, 1], out, counts):
        h, b = kv.block_id.x, kv.block_id.y
        queries = RaggedQueries(row_offsets, query.shape[0])
        pages, rows = pages_of(collection, queries, b), queries.length(b) * c.group
        wanted, at = kv.math.min(pages, out.shape[2]), list_at(collection, b, h)
        k_cache, least, equal, written = collection.get_key_cache(layer), kv.u32(0), wanted, i32(0)
        if wanted < pages:
            for row in range(0, rows, c.together):
                q = c.query_rows(query, queries.base(b), h, row, rows - 1, 0)
                for page in range(pages):
                    place = kv.math.min(k_cache.page(b, page * c.spec.page_size), summaries.shape[0] - 1)
                    score = c.largest(q, c.summary(summaries, place, layer, h, 0))
                    if row > 0:
                        score = larger(kv.bitcast(keys[at + page], f32), score)
                    keys[at + page] = kv.bitcast(score, i32)
            for page in range(pages):
                key = key_of(kv.bitcast(keys[at + page], f32), page, pages, first, last)
                keys[at + page] = kv.bitcast(key, i32)
            for i in range(32):  # the largest number that at least as many keys reach as are wanted
                tried, reached = least | (kv.u32(1) << kv.u32(31 - i)), i32(0)
                for page in range(pages):
                    reached = reached + i32(kv.u32(keys[at + page]) >= tried)
                least = kv.where(reached >= wanted, tried, least)
            for page in range(pages):
                equal = equal - i32(kv.u32(keys[at + page]) > least)
        for page in range(pages):
            key = kv.u32(0)
            if wanted < pages:
                key = kv.u32(keys[at + page])
            even = (key == least) & (equal > 0)
            equal = equal - i32(even)
            if (key > least) | even:
                out[b, h, written] = page
                written = written + 1
        for i in range(written, out.shape[2]):
            out[b, h, i] = -1
        counts[b, h] = wanted

    return select_pages


@expands("kv.select_pages")
def expand_select_pages(op: Any, at: Expansion) -> None:
    spec, host = at.spec(op.collection), at.target.is_host
    case = Scores(
        spec, at.static_dim(op.query, 1) // spec.num_heads, at.dtype(op.query), at.dtype(op.summaries),
        at.static_dim(op.summaries, 3), row_alignment(op), 1 if host else LANES,
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
    chunks, early = (columns + (CHUNK - 1)) // CHUNK, starts_early(at)
    blocks, threads = batch * heads * chunks, (WARPS * WARP, 1, 1)
    kernel = score_kernel(case, first, last)
    at.launch(kernel, [*scored, chunks], (blocks, 1, 1), threads, key=(case, first, last), programmatic=early)
    args = [op.collection, op.query, op.row_offsets, keys, op.pages, op.page_counts]
    at.launch(choose_kernel(case), args, (batch * heads, 1, 1), (THREADS, 1, 1), key=case, programmatic=early)
