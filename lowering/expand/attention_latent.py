# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows on the tensor cores: 64 query rows a block, every key read once for all of them.

All query heads of a token share the one latent head, so a tile's 64 rows are tokens times heads. A block has eight
warps. For the scores a warp takes 16 of the rows and half of the tile's keys; maxima and weights meet in shared
memory; for the values a warp takes all rows and an eighth of the columns, so that 512 columns fit in registers. Keys
and values are one tile of shared memory, and two are in flight.

Few tiles leave a GPU idle, so the keys of a tile are split among the blocks of the grid's third dimension, which leave
partial results in the workspace; a second kernel merges them. How many there are depends on shapes and device alone.

A score or mask that is a function of positions is asked at every key of the tiles that a row may see.

8-bit rows, and rows that end in bf16 keys, are converted to the query's type on their way through registers.

Where a list says which rows a token sees, a tile's rows are those of one token, and its keys are gathered row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect import ops
from kvarn.dialect.dtypes import DType, bf16, f16, f32, i8, i32
from kvarn.dialect.layout import align_up, cdiv
from kvarn.dialect.ops.attention import arrays_of
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.dsl.values import i32_value
from kvarn.lowering.target import Target

from .attention_common import (
    Case,
    asks,
    interval,
    load_width,
    read,
    read_rope,
    start_of,
    tile_count,
)
from .attention_queries import RaggedQueries
from .base import Expansion
from .latent_common import ends_in_combine
from .mla_rows import Listed, ListedKeys
from .partial_results import LN2, LOG2E, LOWEST, NO_VALUE, finished, log_sum_exp, normalizer, weight, with_prior
from .softmax import arrays_read, modified_one, shown

ROWS = 64
WARPS = 8
THREADS = 32 * WARPS
MERGE_WARPS = 4
MOST_SPLITS = 16
CHUNK = 8  # elements of 16 bytes


def pack(dtype: DType, a: Any, b: Any) -> Any:
    """Two f32 as one word of 16-bit floats, the first in the low half."""
    return kv.pack_f16x2(a, b) if dtype is f16 else kv.pack_bf16x2(a, b)


@dataclass(frozen=True)
class Tiles:
    """The geometry: ``keys`` tokens a tile, of which two are in flight; ``listed`` ones, or a sequence's in order.

    ``parted``: all results are partial ones, of one split too.
    """

    case: Case
    keys: int
    listed: bool = False
    parted: bool = False

    @property
    def rows(self) -> SharedLayout:
        return SharedLayout.whole_rows(self.keys, self.case.size, 2)

    @property
    def pitch(self) -> int:
        return self.rows.pitch

    @property
    def weights_pitch(self) -> int:
        """Bytes of a row of weights; 16 more than they need keep ldmatrix off one bank."""
        return 2 * self.keys + 16

    @property
    def query_bytes(self) -> int:
        return ROWS * self.pitch

    @property
    def tile_bytes(self) -> int:
        return self.keys * self.pitch

    @property
    def weights_bytes(self) -> int:
        return ROWS * self.weights_pitch

    @property
    def shared_bytes(self) -> int:
        """Query, two tiles, weights, and per row two maxima (later sums) and a factor."""
        return self.query_bytes + 2 * self.tile_bytes + self.weights_bytes + 3 * 4 * ROWS

    @property
    def columns(self) -> int:
        """Value columns of a warp."""
        return self.case.value_size // WARPS

    @property
    def part_bytes(self) -> int:
        """One block's partial result: sums of weighted values, and a maximum and a sum a row."""
        return 4 * ROWS * (self.case.value_size + 2)

    @property
    def copied(self) -> bool:
        """Whether tiles are copied as they are; else they are converted."""
        return self.case.spec.dtype is self.case.query


def problems(case: Case, target: Target, row_alignment: int, listed: bool) -> list[str]:
    """Why the kernel does not take a case, one sentence each; empty when it does."""
    spec, found = case.spec, []
    if target.is_host or not target.has("cp_async"):
        return [f"needs a GPU with cp.async, got {target.name}"]
    if case.query not in (bf16, f16) or case.out not in (case.query, f32):
        found.append(
            f"needs a query of bf16 or f16 and an output of its type or f32, got {case.query.name} and {case.out.name}"
        )
    if spec.dtype is not case.query and spec.dtype.bits != 8:
        found.append(f"needs a cache of the query's type or of 8 bits, got {spec.dtype.name}")
    if case.size % 16 or case.content % CHUNK or case.value_size % (16 * WARPS) or case.value_size > 512:
        found.append(
            f"needs a query of a multiple of 16 columns and values of 128, 256, 384 or 512, got {case.size} "
            f"and {case.value_size}"
        )
    if case.inline:
        found.append(f"needs rows without scales in them, got one for {case.inline} elements")
    if row_alignment < 16:
        found.append(f"needs query and output rows aligned to 16 bytes, got {row_alignment}")
    if not found and tile_keys(case, target, listed) is None:
        found.append(f"needs a page size that divides a tile or is divided by it, got {spec.page_size}")
    return found


def tile_keys(case: Case, target: Target, listed: bool) -> int | None:
    """Keys of a tile: the most that fit the page size and the shared memory."""
    pages = case.spec.page_size
    tiles = Tiles(case, 32)
    fits = listed or not tiles.copied or not pages or not pages % 32 or not 32 % pages
    return 32 if fits and tiles.shared_bytes <= target.shared_bytes else None


def launch(case: Case, at: Expansion, op: Any) -> None:
    listed = op.indices is not None
    keys = tile_keys(case, at.target, listed)
    assert keys is not None
    g, one = Tiles(case, keys, listed, ends_in_combine(case, op)), at.constant(1)
    tokens = at.dim(op.query, 0)
    if listed:
        tiles = needed = tokens * cdiv(case.group, ROWS)
    else:
        tiles = tile_count(tokens, at.dim(op.row_offsets, 0) - 1, case.group, ROWS)
        needed = (tokens * case.group + (ROWS - 1)) // ROWS
    needed = needed + (one - needed.least(one))
    if "splits" in at.schedule:
        splits = at.constant(at.schedule["splits"])
    else:
        splits = (at.device("multiprocessors") // needed).least(at.constant(MOST_SPLITS))
        splits = splits + (one - splits.least(one))
    several = one if g.parted else (splits - 1).least(one)
    parts = at.workspace(several * tiles * splits * g.part_bytes + 16)
    out = None if g.parted else op.out
    args = [op.collection, op.layer, op.query, op.row_offsets, op.scale, out, parts, op.indices, op.topk_lengths]
    args += [op.kv_offsets, *arrays_of(op)]
    at.launch(latent_kernel(g), args, (tiles, splits, 1), (THREADS, 1, 1), key=g)
    blocks = several * tiles * (ROWS // MERGE_WARPS)
    merged = [op.row_offsets, op.out, parts, splits, op.sinks, op.lse, op.prior, op.prior_lse]
    at.launch(merge_kernel(g), merged, (blocks, 1, 1), (32 * MERGE_WARPS, 1, 1), key=g)


@kv.func
def place_of_tile(g, queries, number):
    """As ``tile_place``; listed, a token has tiles of its own, and counts as a sequence."""
    if not g.listed:
        return queries.tile(number, g.case.heads, ROWS)
    tiles = cdiv(g.case.heads, ROWS)
    token = queries.base(0) + number // tiles
    exists = token < queries.base(queries.sequences)
    return kv.i32(0), token, number % tiles * ROWS, kv.where(exists, kv.i32(g.case.heads), 0)


def latent_kernel(g: Tiles) -> Any:
    """The kernel of a geometry."""
    case, spec, D, N, G = g.case, g.case.spec, g.case.size, g.keys, g.case.heads
    dtype, steps, columns = case.query, g.case.size // 16, g.columns
    width, memory_rows = load_width(spec, CHUNK), g.rows

    @kv.func
    def load_query(query, tile, token0, row0, rows):
        """The block's query rows to shared memory; rows past the last repeat it, and are not written back."""
        for i in range(kv.thread_id.x, ROWS * (D // CHUNK), THREADS):
            row, chunk = i // (D // CHUNK), i % (D // CHUNK)
            at = kv.math.min(row0 + row, rows - 1)
            vector = query.load(token0 + at // G, at % G, chunk * CHUNK, width=CHUNK)
            (tile + memory_rows.chunk_offset(row, chunk)).store(vector)

    @kv.func
    def store_vector(tile, row, chunk, words, exists):
        vector = dtype(kv.vector(f32, [kv.where(exists, w, 0.0) for w in words]))
        (tile + memory_rows.chunk_offset(row, chunk)).store(vector)

    @kv.func
    def place_of_key(listed, cache, b, token, last):
        """(token, page, whether it exists) of a tile's key; the place of one that does not is some other's."""
        if g.listed:
            (slot, page), exists = listed.place(token)
            return kv.where(exists, slot, 0), kv.where(exists, page, 0), exists
        held = kv.math.min(token, last - 1)
        return held, cache.page(b, held), token < last

    @kv.func
    def load_tile(listed, cache, b, base, last, tile):
        """The keys [base, base + N) to shared memory, zeros from ``last`` on; in flight until it is waited for."""
        if g.copied and g.listed:
            rows = kv.operand(cache)  # whose pointers are for reading
            for i in range(kv.thread_id.x, N * (D // CHUNK), THREADS):
                row, chunk = i // (D // CHUNK), i % (D // CHUNK)
                slot, page, exists = place_of_key(listed, cache, b, base + row, last)
                source = rows.block_paged_ptr(b, slot, 0, chunk * CHUNK, page=page)
                size = kv.where(exists, 16, kv.i32(0))
                kv.cp_async(tile + memory_rows.chunk_offset(row, chunk), source, zero_fill_size=size)
        elif g.copied:
            ops.load_tile(
                cache.ir, i32_value(b), i32_value(0), i32_value(base), i32_value(last - base), tile.ir,
                i32_value(kv.thread_id.x), tile_rows=N, num_threads=THREADS, pitch=g.pitch,
                swizzle=memory_rows.swizzle,
            )  # fmt: skip
        else:
            for i in range(kv.thread_id.x, N * (case.content // CHUNK), THREADS):
                row, chunk = i // (case.content // CHUNK), i % (case.content // CHUNK)
                token, page, exists = place_of_key(listed, cache, b, base + row, last)
                words = []
                for d in kv.static(range(0, CHUNK, width)):
                    x = read(spec, cache, b, 0, token, chunk * CHUNK + d, width, page)
                    words = words + ([x] if width == 1 else [x[k] for k in range(width)])
                store_vector(tile, row, chunk, words, exists)
            if case.rope:
                row = kv.thread_id.x
                if row < N:
                    token, page, exists = place_of_key(listed, cache, b, base + row, last)
                    for d in kv.static(range(case.content, D, CHUNK)):
                        x = read_rope(case, cache, b, 0, token, d, CHUNK, page)
                        store_vector(tile, row, d // CHUNK, [x[k] for k in range(CHUNK)], exists)

    @kv.func
    def scores_of(q_tile, tile, rows16, half, lane):
        """Scores of 16 rows and 16 keys: [key tile of 8][4]."""
        even, odd = [kv.f32(0.0)] * 8, [kv.f32(0.0)] * 8
        q_steps = memory_rows.steps(q_tile, rows16 * 16 + (lane & 15), lane >> 4)
        k_steps = memory_rows.steps(tile, half * 16 + (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1)
        for k in kv.static(range(steps)):
            a = kv.ldmatrix(memory_rows.step(q_steps, k))
            w = kv.ldmatrix(memory_rows.step(k_steps, k))
            sums = odd if k % 2 else even
            sums[0:4] = kv.mma_m16n8k16(a, [w[0], w[1]], sums[0:4], dtype)
            sums[4:8] = kv.mma_m16n8k16(a, [w[2], w[3]], sums[4:8], dtype)
        return [x + y for x, y in zip(even, odd)]  # noqa: B905 (traced: the lists have one length)

    @kv.func
    def add_values(o, weights, tile, warp, lane):
        """o += P V: all rows, this warp's columns; [row tile of 16][column tile of 8][4]."""
        aligned = columns % 64 == 0  # whole groups of eight chunks: they keep their places
        v_steps = memory_rows.steps(tile + warp * (columns * 2 if aligned else 0), lane & 15, lane >> 4)
        p_rows = weights + ((lane & 15) * g.weights_pitch + (lane >> 4) * 16)
        for k in kv.static(range(N // 16)):
            b = []
            for t in kv.static(range(columns // 16)):
                if aligned:
                    at = memory_rows.step(v_steps, t, k * 16)
                else:
                    chunk = warp * (columns // 8) + 2 * t + (lane >> 4)
                    at = tile + memory_rows.chunk_offset(k * 16 + (lane & 15), chunk)
                b.append(kv.ldmatrix(at, trans=True))
            for r in kv.static(range(ROWS // 16)):
                a = kv.ldmatrix(p_rows + (r * 16 * g.weights_pitch + 2 * k * 16))
                for t in kv.static(range(columns // 16)):
                    for u in kv.static(range(2)):
                        n = (r * (columns // 8) + 2 * t + u) * 4
                        o[n : n + 4] = kv.mma_m16n8k16(a, [b[t][2 * u], b[t][2 * u + 1]], o[n : n + 4], dtype)

    @kv.kernel(block=(THREADS, 1, 1))
    def attention_latent(
        collection: kv.KVCacheCollection, layer: kv.i32, query: kv.Buffer[case.query, 3],
        row_offsets: kv.Buffer[i32, 1], scale: kv.f32, out: kv.Optional[kv.Buffer[case.out, 3]],
        parts: kv.Buffer[i8, 1], indices: kv.Optional[kv.Buffer[i32, 2]], topk_lengths: kv.Optional[kv.Buffer[i32, 1]],
        kv_offsets: kv.Optional[kv.Buffer[i32, 1]] = None, array0=None, array1=None, array2=None, array3=None,
    ):  # fmt: skip
        lane, warp = kv.thread_id.x & 31, kv.thread_id.x >> 5
        rows16, half = warp & 3, warp >> 2
        memory = kv.shared(align_up(g.shared_bytes, 16), kv.u8, alignment=128).ptr()
        tiles = memory + g.query_bytes
        weights = tiles + 2 * g.tile_bytes
        extremes = weights + g.weights_bytes  # a float for each half and row
        factors = extremes + 2 * 4 * ROWS
        number = kv.grid_dim.x - 1 - kv.block_id.x
        queries, arrays = (
            RaggedQueries(row_offsets, query.shape[0], kv_offsets),
            arrays_read(array0, array1, array2, array3),
        )
        b, token0, row0, rows = place_of_tile(g, queries, number)
        if row0 < rows:
            cache = collection.get_key_cache(layer)
            if g.listed:
                listed = ListedKeys(Listed(case), cache, indices, topk_lengths, token0)
                cached, num_keys = kv.i32(0), listed.count
            else:
                listed = None
                cached, num_keys = start_of(case, collection, None, queries, b)
            # What the tile's first and last rows see bounds what any of its rows does.
            first, first_end = interval(case, cached + row0 // G, num_keys)
            last_first, last = interval(case, cached + (kv.math.min(row0 + ROWS, rows) - 1) // G, num_keys)
            begin, end = first // N, (last + (N - 1)) // N
            share = (kv.math.max(end - begin, 0) + (kv.grid_dim.y - 1)) // kv.grid_dim.y
            begin = begin + kv.block_id.y * share
            end = kv.math.min(end, begin + share)
            load_query(query, memory, token0, row0, rows)
            if begin < end:
                load_tile(listed, cache, b, begin * N, last, tiles)
            kv.cp_async_commit()
            seen, of_row = [], []  # of this thread's two rows: the keys they see, and (query head, position)
            for u in kv.static(range(2)):
                at = kv.math.min(row0 + rows16 * 16 + (lane >> 2) + 8 * u, rows - 1)
                seen.append(interval(case, cached + at // G, num_keys))
                of_row.append((at % G, cached + at // G))
            m, l = [kv.f32(LOWEST), kv.f32(LOWEST)], [kv.f32(0.0), kv.f32(0.0)]
            o = [kv.f32(0.0)] * (ROWS // 16 * (columns // 8) * 4)
            factor = scale * LOG2E
            for j in range(begin, end):
                base, tile = j * N, tiles + ((j - begin) & 1) * g.tile_bytes
                kv.cp_async_wait(0)
                kv.barrier()
                if j + 1 < end:
                    load_tile(listed, cache, b, base + N, last, tiles + ((j + 1 - begin) & 1) * g.tile_bytes)
                kv.cp_async_commit()
                if base < first:
                    for i in range(kv.thread_id.x, (first - base) * (D // CHUNK), THREADS):
                        (tile + memory_rows.chunk_offset(i // (D // CHUNK), i % (D // CHUNK))).store(kv.vector(i32, 4))
                    kv.barrier()
                scores = [s * factor for s in scores_of(memory, tile, rows16, half, lane)]
                for i in kv.static(range(8 if case.score else 0)):
                    token = base + half * 16 + (i // 4) * 8 + (lane & 3) * 2 + i % 2
                    scores[i] = modified_one(case, scores[i], b, *of_row[i // 2 % 2], token, None, arrays, unit=LN2)
                if g.listed:
                    for n in kv.static(range(4)):
                        _, exists = listed.place(base + half * 16 + (n // 2) * 8 + (lane & 3) * 2 + n % 2)
                        for u in kv.static(range(2)):
                            i = (n // 2) * 4 + 2 * u + n % 2
                            scores[i] = kv.where(exists, scores[i], NO_VALUE)
                elif (base < last_first) | (base + N > first_end):
                    for i in kv.static(range(8)):
                        token = base + half * 16 + (i // 4) * 8 + (lane & 3) * 2 + i % 2
                        low_key, high_key = seen[i // 2 % 2]
                        scores[i] = kv.where((token >= low_key) & (token < high_key), scores[i], NO_VALUE)
                for i in kv.static(range(8 if asks(case) else 0)):
                    token = base + half * 16 + (i // 4) * 8 + (lane & 3) * 2 + i % 2
                    seen_here = shown(case, b, *of_row[i // 2 % 2], token, arrays)
                    scores[i] = kv.where(seen_here, scores[i], NO_VALUE)
                row = rows16 * 16 + (lane >> 2)
                for u in kv.static(range(2)):
                    highest = kv.math.max(scores[2 * u], scores[2 * u + 1], scores[4 + 2 * u], scores[5 + 2 * u])
                    for k in kv.static((1, 2)):
                        highest = kv.math.max(highest, kv.shuffle_xor(highest, k))
                    (extremes + (half * ROWS + row + 8 * u) * 4).store(highest)
                kv.barrier()
                for u in kv.static(range(2)):
                    at = (row + 8 * u) * 4
                    here = kv.math.max((extremes + at).load(kv.f32), (extremes + 4 * ROWS + at).load(kv.f32))
                    m_new = kv.math.max(m[u], here)
                    alpha = kv.ex2(m[u] - m_new)
                    (factors + at).store(alpha)  # both halves write the same
                    m[u], l[u] = m_new, l[u] * alpha
                    for n in kv.static(range(2)):
                        pair = [kv.ex2(scores[4 * n + 2 * u + i] - m_new) for i in range(2)]
                        l[u] = l[u] + pair[0] + pair[1]
                        byte = (row + 8 * u) * g.weights_pitch + half * 32 + n * 16 + (lane & 3) * 4
                        (weights + byte).store(pack(dtype, pair[0], pair[1]))
                kv.barrier()
                for r in kv.static(range(ROWS // 16)):
                    for u in kv.static(range(2)):
                        alpha = (factors + (r * 16 + (lane >> 2) + 8 * u) * 4).load(kv.f32)
                        for n in kv.static(range(columns // 8)):
                            for i in kv.static(range(2)):
                                at = (r * (columns // 8) + n) * 4 + 2 * u + i
                                o[at] = o[at] * alpha
                add_values(o, weights, tile, warp, lane)
            kv.cp_async_wait(0)
            kv.barrier()  # the factors have been read
            for u in kv.static(range(2)):
                for k in kv.static((1, 2)):
                    l[u] = l[u] + kv.shuffle_xor(l[u], k)
                (extremes + (half * ROWS + rows16 * 16 + (lane >> 2) + 8 * u) * 4).store(l[u])
                (factors + (rows16 * 16 + (lane >> 2) + 8 * u) * 4).store(m[u])
            kv.barrier()
            alone = False if g.parted else kv.grid_dim.y == 1
            in_parts = True if g.parted else kv.grid_dim.y > 1
            which = number * kv.grid_dim.y + kv.block_id.y
            part = parts.address(0) + kv.i64(which) * g.part_bytes
            for r in kv.static(range(ROWS // 16)):
                for u in kv.static(range(2)):
                    row = r * 16 + (lane >> 2) + 8 * u
                    at = row0 + row
                    sum_ = (extremes + row * 4).load(kv.f32) + (extremes + (ROWS + row) * 4).load(kv.f32)
                    inverse = normalizer(sum_)
                    for n in kv.static(range(columns // 8)):
                        d = warp * columns + n * 8 + (lane & 3) * 2
                        i = (r * (columns // 8) + n) * 4 + 2 * u
                        if alone:
                            if at < rows:
                                word = pack(dtype, o[i] * inverse, o[i + 1] * inverse)
                                out.store(token0 + at // G, at % G, d, value=kv.bitcast(word, dtype))
                        else:
                            (part + (row * case.value_size + d) * 4).store(kv.vector(f32, [o[i], o[i + 1]]))
                    if (warp == 0) & ((lane & 3) == 0):
                        if in_parts:
                            ends = part + (ROWS * case.value_size + 2 * row) * 4
                            ends.store(kv.vector(f32, [(factors + row * 4).load(kv.f32), sum_]))

    return attention_latent


def merge_kernel(g: Tiles) -> Any:
    """Merges the partial results: a warp a row, in the order of the splits."""
    case, G = g.case, g.case.heads
    turns = case.value_size // 128

    @kv.kernel(block=(32 * MERGE_WARPS, 1, 1))
    def attention_latent_merge(
        row_offsets: kv.Buffer[i32, 1], out: kv.Buffer[case.out, 3], parts: kv.Buffer[i8, 1], splits: kv.i32,
        sinks: kv.Optional[kv.Buffer[f32, 1]], lse: kv.Optional[kv.Buffer[f32, 2]],
        prior: kv.Optional[kv.Buffer[f32, 3]], prior_lse: kv.Optional[kv.Buffer[f32, 2]],
    ):  # fmt: skip
        lane, warp = kv.thread_id.x & 31, kv.thread_id.x >> 5
        item = kv.block_id.x * MERGE_WARPS + warp
        number, row = item // ROWS, item % ROWS
        _, token0, row0, rows = place_of_tile(g, RaggedQueries(row_offsets, out.shape[0]), number)
        if row0 + row < rows:
            m, l = kv.f32(LOWEST), kv.f32(0.0)
            sums = [kv.vector(f32, 4) for _ in range(turns)]
            for s in range(splits):
                part = parts.address(0) + kv.i64(number * splits + s) * g.part_bytes
                ends = (part + (ROWS * case.value_size + 2 * row) * 4).load(kv.f32, 2)
                m_new = kv.math.max(m, ends[0])
                mine, theirs = weight(m, m_new), weight(ends[0], m_new)
                m, l = m_new, l * mine + ends[1] * theirs
                for n in kv.static(range(turns)):
                    d = (n * 32 + lane) * 4
                    sums[n] = sums[n] * mine + (part + (row * case.value_size + d) * 4).load(kv.f32, 4) * theirs
            token, h = token0 + (row0 + row) // G, (row0 + row) % G
            before = None if prior is None else prior_lse[token, h]
            m, l, factor, of_prior = finished(m, l, None if sinks is None else sinks[h], before)
            for n in kv.static(range(turns)):
                d = (n * 32 + lane) * 4
                x = sums[n] * factor
                if prior is not None:
                    x = with_prior(x, prior.load(token, h, d, width=4), of_prior)
                out.store(token, h, d, value=case.out(x))
            if lse is not None:
                if lane == 0:
                    lse[token, h] = log_sum_exp(m, l)

    return attention_latent_merge
