# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Prefill attention on GPUs without wgmma: tiles of 64 query rows against tiles of keys, by mma.sync.

The query rows of a KV head are the new tokens times the group, so that a group shares every key that is loaded. A warp
has 16 of a block's rows. Softmax is online in base 2; the probabilities stay in registers as the first operand of P V.

The grid is the same for every batch of a size (``attention_common.tile_place``): nothing is read back, and no table is
made. The last tiles start first, since under a causal mask they see the most keys.

Keys and values of 16 bits are copied by cp.async, two tiles of each: the next ones travel while a tile is weighed.
8-bit and quantized ones are converted to the query's type on their way through registers. Keys that exist but lie
outside what the tile's rows see become zeros, since 0 * NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect import ops
from kvarn.dialect.dtypes import DType, bf16, f16, f32, i32
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.dsl.values import i32_value
from kvarn.lowering.target import Target

from .attention_common import (
    Case,
    caches_of,
    interval,
    load_width,
    read,
    sloped,
    softcapped,
    start_of,
)
from .attention_queries import queries_of, tiles_of
from .base import Expansion
from .partial_results import LOG2E, LOWEST, NO_VALUE, finished, log_sum_exp, with_prior

WARPS = 4
THREADS = 32 * WARPS
ROWS = 16 * WARPS
CHUNK = 8  # elements of 16 bytes


@dataclass(frozen=True)
class Tiles:
    """The geometry of a prefill kernel: ``keys`` tokens a tile, of which two are in flight."""

    case: Case
    keys: int

    @property
    def rows(self) -> SharedLayout:
        return SharedLayout.whole_rows(self.keys, self.case.size, 2)

    @property
    def tile_bytes(self) -> int:
        return self.keys * self.rows.pitch

    @property
    def shared_bytes(self) -> int:
        return ROWS * self.rows.pitch + 4 * self.tile_bytes

    @property
    def copied(self) -> bool:
        """Whether tiles are copied as they are; else they are converted."""
        return self.case.spec.dtype is self.case.query and not self.case.spec.quantized


def problems(case: Case, at: Expansion, row_alignment: int) -> list[str]:
    """Why the kernel does not take a case, one sentence each; empty when it does."""
    spec, found = case.spec, []
    if at.target.is_host or not at.target.has("cp_async"):
        return [f"needs a GPU with cp.async, got {at.target.name}"]
    if case.query not in (bf16, f16) or case.out not in (case.query, f32):
        found.append(
            f"needs a query of bf16 or f16 and an output of its type or f32, got {case.query.name} and {case.out.name}"
        )
    if spec.dtype is not case.query and spec.dtype.bits != 8:
        found.append(f"needs a cache of the query's type or of 8 bits, got {spec.dtype.name}")
    if spec.is_mla:
        found.append("needs a collection with values, got an MLA one")
    if spec.head_size % 16 or not 16 <= spec.head_size <= 256:
        found.append(f"needs a head size of a multiple of 16 up to 256, got {spec.head_size}")
    if case.pages:
        found.append("takes no lists of pages")
    if case.functions:
        found.append("takes no score or mask that is a function")
    if row_alignment < 16:
        found.append(f"needs query and output rows aligned to 16 bytes, got {row_alignment}")
    if not found and geometry_of(case, at.target) is None:
        found.append(f"needs a page size that divides a tile or is divided by it, got {spec.page_size}")
    return found


def geometry_of(case: Case, target: Target) -> Tiles | None:
    """The tiles of a case: the most keys that fit the page size, the shared memory and, for wide heads, registers."""
    for keys in (64, 32, 16) if case.size <= 128 else (32, 16):
        pages = case.spec.page_size
        tiles = Tiles(case, keys)
        if tiles.shared_bytes <= target.shared_bytes and (
            not tiles.copied or not pages or not pages % keys or not keys % pages
        ):
            return tiles
    return None


def launch(case: Case, at: Expansion, op: Any, args: list[ir.Value | None]) -> None:
    geometry = geometry_of(case, at.target)
    assert geometry is not None
    tiles = tiles_of(op, at, case.group, ROWS)
    grid, block = (tiles, case.spec.num_heads, 1), (THREADS, 1, 1)
    at.launch(prefill_kernel(geometry), args, grid, block, key=geometry)


def pack(dtype: DType, a: Any, b: Any) -> Any:
    """Two f32 as one word of 16-bit floats, the first in the low half."""
    return kv.pack_f16x2(a, b) if dtype is f16 else kv.pack_bf16x2(a, b)


def prefill_kernel(g: Tiles) -> Any:
    """The kernel of a geometry."""
    case, spec, D, N, G = g.case, g.case.spec, g.case.size, g.keys, g.case.group
    dtype, steps = case.query, g.case.size // 16
    query_in_registers, memory_rows = D <= 128, g.rows
    converted_width = load_width(spec, CHUNK)

    @kv.func
    def load_query(queries, query, tile, base, row0, rows, head):
        """The block's query rows to shared memory; rows past the last repeat it, and are not written back."""
        for i in range(kv.thread_id.x, ROWS * (D // CHUNK), THREADS):
            row, chunk = i // (D // CHUNK), i % (D // CHUNK)
            at = kv.math.min(row0 + row, rows - 1)
            piece = query.load(*queries.at(base, at // G), head * G + at % G, chunk * CHUNK, width=CHUNK)
            (tile + memory_rows.chunk_offset(row, chunk)).store(piece)

    @kv.func
    def load_tile(cache, b, head, base, last, tile):
        """The keys [base, base + N) to shared memory, zeros from ``last`` on; in flight until it is waited for."""
        if g.copied:
            ops.load_tile(
                cache.ir, i32_value(b), i32_value(head), i32_value(base), i32_value(last - base), tile.ir,
                i32_value(kv.thread_id.x), tile_rows=N, num_threads=THREADS, pitch=memory_rows.pitch,
                swizzle=memory_rows.swizzle,
            )  # fmt: skip
        else:
            for i in range(kv.thread_id.x, N * (D // CHUNK), THREADS):
                row, chunk = i // (D // CHUNK), i % (D // CHUNK)
                token = kv.math.min(base + row, last - 1)
                page = cache.page(b, token)
                words = []
                for d in kv.static(range(0, CHUNK, converted_width)):
                    x = read(spec, cache, b, head, token, chunk * CHUNK + d, converted_width, page)
                    words = words + ([x] if converted_width == 1 else [x[i] for i in range(converted_width)])
                exists = base + row < last
                piece = dtype(kv.vector(f32, [kv.where(exists, w, 0.0) for w in words]))
                (tile + memory_rows.chunk_offset(row, chunk)).store(piece)

    @kv.func
    def bring(keys, values, b, head, base, last, k_tile, v_tile):
        """Start bringing a tile of keys and one of values, where there is one."""
        if base < last:
            load_tile(keys, b, head, base, last, k_tile)
            load_tile(values, b, head, base, last, v_tile)

    @kv.func
    def products_of(q_steps, q, k_tile, lane):
        """This lane's part of Q K^T: [key tile of 8][4], rows lane / 4 and that + 8, keys 2 * (lane % 4) and + 1."""
        scores = [kv.f32(0.0)] * (N // 2)
        k_steps = memory_rows.steps(k_tile, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1)
        for k in kv.static(range(steps)):
            a = q[k] if query_in_registers else kv.ldmatrix(memory_rows.step(q_steps, k))
            for n in kv.static(range(N // 16)):
                w = kv.ldmatrix(memory_rows.step(k_steps, k, n * 16))
                scores[8 * n : 8 * n + 4] = kv.mma_m16n8k16(a, [w[0], w[1]], scores[8 * n : 8 * n + 4], dtype)
                scores[8 * n + 4 : 8 * n + 8] = kv.mma_m16n8k16(a, [w[2], w[3]], scores[8 * n + 4 : 8 * n + 8], dtype)
        return scores

    @kv.func
    def weigh(scores, unit, state, o):
        """Online softmax: scores, ``unit`` times as large, become weights; the state (maxima, sums) and o follow."""
        shrinks = []
        for u in kv.static(range(2)):
            mine = [4 * n + 2 * u + i for n in range(N // 8) for i in range(2)]
            top = kv.math.max(*[scores[i] for i in mine])
            for k in kv.static((1, 2)):
                top = kv.math.max(top, kv.shuffle_xor(top, k))
            top = kv.math.max(top * unit, state[u])
            shrink = kv.ex2(state[u] - top)
            total = state[2 + u] * shrink
            for i in kv.static(mine):
                scores[i] = kv.ex2(kv.math.fma(scores[i], unit, -top))
                total = total + scores[i]
            state[u], state[2 + u] = top, total
            shrinks.append(shrink)
        # Maxima rarely change after the first tiles; the output is scaled only where one did.
        if kv.ballot((shrinks[0] != 1.0) | (shrinks[1] != 1.0)) != 0:
            for t in kv.static(range(D // 8)):
                for i in kv.static(range(4)):
                    o[4 * t + i] = o[4 * t + i] * shrinks[i // 2]

    @kv.func
    def fragment(weights, k):
        """The weights of 16 keys as the first operand of a product."""
        return [pack(dtype, weights[8 * k + i], weights[8 * k + i + 1]) for i in (0, 2, 4, 6)]

    @kv.func
    def add_values(weights, o, v_tile, lane):
        """o += P V for a tile."""
        v_steps = memory_rows.steps(v_tile, lane & 15, lane >> 4)
        for k in kv.static(range(N // 16)):
            a = fragment(weights, k)
            for t in kv.static(range(steps)):
                b = kv.ldmatrix(memory_rows.step(v_steps, t, k * 16), trans=True)
                o[8 * t : 8 * t + 4] = kv.mma_m16n8k16(a, [b[0], b[1]], o[8 * t : 8 * t + 4], dtype)
                o[8 * t + 4 : 8 * t + 8] = kv.mma_m16n8k16(a, [b[2], b[3]], o[8 * t + 4 : 8 * t + 8], dtype)

    @kv.func
    def clear_rows(tile, count):
        """Zeros in a tile's first rows."""
        for i in range(kv.thread_id.x, count * (D // CHUNK), THREADS):
            (tile + memory_rows.chunk_offset(i // (D // CHUNK), i % (D // CHUNK))).store(kv.vector(i32, 4))

    @kv.func
    def write_rows(queries, out, tile, o, base, row0, rows, head, warp, lane):
        """Write the warp's rows, through its part of the query's shared memory."""
        kv.syncwarp()
        for u in kv.static(range(2)):
            row = warp * 16 + (lane >> 2) + 8 * u
            for t in kv.static(range(D // 8)):
                word = pack(dtype, o[4 * t + 2 * u], o[4 * t + 2 * u + 1])
                (tile + memory_rows.chunk_offset(row, t) + (lane & 3) * 4).store(word)
        kv.syncwarp()
        for i in range(lane, 16 * (D // CHUNK), 32):
            row, chunk = warp * 16 + i // (D // CHUNK), i % (D // CHUNK)
            at = row0 + row
            if at < rows:
                piece = (tile + memory_rows.chunk_offset(row, chunk)).load(dtype, CHUNK)
                out.store(*queries.at(base, at // G), head * G + at % G, chunk * CHUNK, value=piece)

    @kv.kernel(block=(THREADS, 1, 1), min_blocks=1)
    def attention_prefill(
        collection: kv.Optional[kv.KVCacheCollection], layer: kv.Optional[kv.i32],
        key_operand: kv.Optional[kv.MHAOperand], value_operand: kv.Optional[kv.MHAOperand],
        query: kv.Buffer[case.query, case.rank], extents: kv.Buffer[i32, 1], kv_offsets: kv.Optional[kv.Buffer[i32, 1]],
        scale: kv.f32, out: kv.Buffer[case.out, case.rank], sinks: kv.Optional[kv.Buffer[f32, 1]],
        lse: kv.Optional[kv.Buffer[f32, case.rank - 1]], slopes: kv.Optional[kv.Buffer[f32, 1]],
        prior: kv.Optional[kv.Buffer[f32, case.rank]], prior_lse: kv.Optional[kv.Buffer[f32, case.rank - 1]],
    ):  # fmt: skip
        lane, warp = kv.thread_id.x & 31, kv.thread_id.x >> 5
        memory = kv.shared(g.shared_bytes, kv.u8, alignment=128).ptr()
        q_tile, k_tiles = memory, memory + ROWS * g.rows.pitch
        v_tiles = k_tiles + 2 * g.tile_bytes
        number = kv.grid_dim.x - 1 - kv.block_id.x
        head = kv.block_id.y
        queries = queries_of(case.padded, extents, query, kv_offsets)
        b, base_row, row0, rows = queries.tile(number, G, ROWS)
        if row0 < rows:
            keys, values = caches_of(case, collection, layer, key_operand, value_operand)
            start, num_keys = start_of(case, collection or key_operand, value_operand, queries, b)
            # What the tile's first and last rows see bounds what any of its rows does.
            first, first_end = interval(case, start + row0 // G, num_keys)
            last_first, last = interval(case, start + (kv.math.min(row0 + ROWS, rows) - 1) // G, num_keys)
            begin, end = first // N, (last + (N - 1)) // N
            bring(keys, values, b, head, begin * N, last, k_tiles, v_tiles)
            kv.cp_async_commit()
            load_query(queries, query, q_tile, base_row, row0, rows, head)
            seen, alibi = [], []
            for u in kv.static(range(2)):
                at = kv.math.min(row0 + warp * 16 + (lane >> 2) + 8 * u, rows - 1)
                seen.append(interval(case, start + at // G, num_keys))
                if slopes is not None:
                    alibi.append((slopes[head * G + at % G] * LOG2E, start + at // G))
            kv.barrier()
            q_steps = memory_rows.steps(q_tile, warp * 16 + (lane & 15), lane >> 4)
            q = None
            if query_in_registers:
                q = [kv.ldmatrix(memory_rows.step(q_steps, k)) for k in range(steps)]
            state = [kv.f32(LOWEST), kv.f32(LOWEST), kv.f32(0.0), kv.f32(0.0)]
            o = [kv.f32(0.0)] * (D // 2)
            factor = scale * LOG2E
            # Maxima are found before scores are multiplied by what is positive, which then is part of a subtraction.
            bent = case.softcap or slopes is not None
            unit = kv.f32(1.0) if bent else kv.math.max(kv.math.abs(factor), 1.0e-30)
            for j in range(begin, end):
                base, stage = j * N, (j - begin) & 1
                kv.cp_async_wait(0)
                kv.barrier()  # after which everybody sees what anybody has brought
                if base < first:
                    clear_rows(v_tiles + stage * g.tile_bytes, first - base)
                    kv.barrier()
                there = (stage ^ 1) * g.tile_bytes
                following = (keys, values, b, head, base + N, last, k_tiles + there, v_tiles + there)
                scores = products_of(q_steps, q, k_tiles + stage * g.tile_bytes, lane)
                bring(*following)
                kv.cp_async_commit()
                if bent:
                    scores = [softcapped(case, s * factor, kv.ex2) for s in scores]
                elif factor < 0.0:
                    scores = [-s for s in scores]
                if slopes is not None:
                    for i in kv.static(range(N // 2)):
                        slope, position = alibi[i // 2 % 2]
                        scores[i] = sloped(scores[i], slope, base + (i // 4) * 8 + (lane & 3) * 2 + i % 2, position)
                if (base < last_first) | (base + N > first_end):
                    for i in kv.static(range(N // 2)):
                        token = base + (i // 4) * 8 + (lane & 3) * 2 + i % 2
                        low_key, high_key = seen[i // 2 % 2]
                        scores[i] = kv.where((token >= low_key) & (token < high_key), scores[i], NO_VALUE)
                weigh(scores, unit, state, o)
                add_values(scores, o, v_tiles + stage * g.tile_bytes, lane)
            for u in kv.static(range(2)):
                for k in kv.static((1, 2)):
                    state[2 + u] = state[2 + u] + kv.shuffle_xor(state[2 + u], k)
                at = row0 + warp * 16 + (lane >> 2) + 8 * u
                row = kv.math.min(at, rows - 1)
                h = head * G + row % G
                place = (*queries.at(base_row, row // G), h)
                sink, before = None if sinks is None else sinks[h], None if prior is None else prior_lse[place]
                state[u], state[2 + u], factor, of_prior = finished(state[u], state[2 + u], sink, before)
                for t in kv.static(range(D // 8)):
                    pair = [o[4 * t + 2 * u + i] * factor for i in range(2)]
                    if prior is not None:
                        found = prior.load(*place, t * 8 + (lane & 3) * 2, width=2)
                        pair = [with_prior(x, found[i], of_prior) for i, x in enumerate(pair)]
                    o[4 * t + 2 * u : 4 * t + 2 * u + 2] = pair
                if case.out is f32:
                    if at < rows:
                        for t in kv.static(range(D // 8)):
                            pair = kv.vector(f32, o[4 * t + 2 * u : 4 * t + 2 * u + 2])
                            out.store(*place, t * 8 + (lane & 3) * 2, value=pair)
                if lse is not None:
                    if ((lane & 3) == 0) & (at < rows):
                        lse[place] = log_sum_exp(state[u], state[2 + u])
            kv.cp_async_wait(0)
            if case.out is not f32:
                write_rows(queries, out, q_tile, o, base_row, row0, rows, head, warp, lane)

    return attention_prefill
