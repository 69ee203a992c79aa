# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.index_scores and kv.select_tokens: an indexer's scores of cached tokens, and the selection by them.

Scores use tensor cores. A block has a query row and :data:`CHUNK` tokens. The row's heads are in shared memory,
converted once; a warp multiplies 32 keys at a time by eight heads after another (:mod:`row_products`): product, scale
of the token, relu, weight of the head, sum. 8-bit keys are converted to f16 in pairs, for exact products.

Other cases use tiles (:mod:`indexer_tiles`), or one thread per token, as on the host.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import bf16, f8e4m3, f16, f32, i8, i32
from kvarn.dialect.layout import lowbit
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.cache_rows import load_width, read

from .. import expands
from ..attention.queries import RaggedQueries
from ..base import Expansion
from ..common import BYTES, WARP, Rows, as_vector, begin, row_alignment, starts_early
from ..elements import widened
from . import indexer_tiles, row_products
from .indexer_case import CHUNK, OPERAND_BYTES, UNSEEN, Case, relu, seen_tokens
from .row_products import TILE_ROWS, RowProducts
from .top_k import chooser, key_of

WARPS = 8
TOKENS = 32  # tokens that a warp processes at a time: two tiles of an mma
THREADS = 128  # per block of the kernel without tensor cores
CHOOSING = 1024  # per block of the selection


def on_tensor_cores(c: Case, target: Target) -> bool:
    """Whether the tensor-core kernel supports a case."""
    spec = c.spec
    return (
        row_products.takes(c.size, target)
        and (spec.dtype in (bf16, f16, i8) or (spec.dtype is f8e4m3 and target.has("f8_convert")))
        and not (c.narrow and c.query is f32)
        and not (spec.quantized and (spec.num_scales != 1 or not c.narrow))
        and c.head_tiles * TILE_ROWS * c.size * 2 <= OPERAND_BYTES
        and c.alignment >= min(BYTES, 4 * c.query.itemsize)
    )


# --- on tensor cores -------------------------------------------------------------------------------


def tensor_kernel(c: Case) -> Any:
    products = RowProducts(c.size, c.head_tiles, f16 if c.narrow else c.spec.dtype)
    load, scaled = Rows(4, c.alignment), c.spec.quantized

    @kv.func
    def four_of_query(state, head, d):
        """Four columns of a head; zeros past the last head. ``state`` is (query, row)."""
        x = kv.f32(load.load(state[0], state[1], kv.math.min(head, c.heads - 1), d))
        return kv.where(head < c.heads, x, kv.vector(f32, 4))

    @kv.func
    def scores(keys, b, first, last, operand, weights, lane):
        """The sums of a warp's 32 tokens from ``first`` up, at most ``last``, by tile and half.

        Every lane has the sums over its quarter of the heads.
        """
        a, scales = [], []
        for mt in kv.static(range(2)):
            halves = []
            for half in kv.static(range(2)):
                token = kv.math.min(first + 16 * mt + 8 * half + (lane >> 2), last)
                at = keys.block_paged_ptr(b, token, 0, page=keys.page(b, token))
                halves.append(products.read(at, c.spec.dtype.itemsize, lane))
                scales.append(kv.f32(keys.load_scale(b, 0, token, 0)) if scaled else None)
            a.append(products.many(*halves, partial(widened, c.spec.dtype) if c.narrow else None))
        sums = [kv.f32(0.0)] * 4
        for nt in range(c.head_tiles):
            acc = [[kv.f32(0.0)] * 4, [kv.f32(0.0)] * 4]
            for step in kv.static(range(products.steps)):
                few = products.few(operand, nt, step, lane)
                for mt in kv.static(range(2)):
                    acc[mt] = kv.mma_m16n8k16(a[mt][step], few, acc[mt], products.dtype)
            w = (weights.ptr(0) + (nt * TILE_ROWS + 2 * (lane & 3)) * 4).load(f32, 2)
            for mt in kv.static(range(2)):
                for i in kv.static(range(4)):
                    x = acc[mt][i] * scales[2 * mt + i // 2] if scaled else acc[mt][i]
                    sums[2 * mt + i // 2] = kv.math.fma(relu(x), w[i % 2], sums[2 * mt + i // 2])
        return sums

    @kv.kernel(block=(WARPS * WARP, 1, 1))
    def index_scores(
        collection, layer: i32, query, weights: kv.Buffer[f32, 2], row_offsets, out: kv.Buffer[f32, 2], chunks: i32
    ):
        begin(c.early)
        operand, head_weights = kv.shared(products.words, i32), kv.shared(c.head_tiles * TILE_ROWS, f32)
        row, chunk, tid, lane = kv.block_id.x // chunks, kv.block_id.x % chunks * CHUNK, kv.thread_id.x, kv.lane_id()
        b, seen = seen_tokens(collection, RaggedQueries(row_offsets, query.shape[0]), row)
        if chunk < seen:
            products.fill(operand, WARPS * WARP, four_of_query, (query, row))
            for h in range(tid, c.head_tiles * TILE_ROWS, WARPS * WARP):
                w = kv.f32(0.0)
                if h < c.heads:
                    w = weights[row, h]
                head_weights[h] = w
        kv.barrier()
        keys, columns = collection.get_key_cache(layer), out.shape[1]
        for first in range(chunk + kv.warp_id() * TOKENS, kv.math.min(chunk + CHUNK, columns), WARPS * TOKENS):
            score, token = kv.f32(UNSEEN), first + lane
            if first < seen:
                sums = scores(keys, b, first, seen - 1, operand, head_weights, lane)
                for i in kv.static(range(4)):
                    for distance in kv.static((1, 2)):
                        sums[i] = sums[i] + kv.shuffle_xor(sums[i], distance)
                # Each quarter of the lanes has one of the four sums; after the exchange, tokens are in lane order.
                mine = kv.shuffle_idx(sums[0], (lane & 7) * 4)
                for i in kv.static(range(1, 4)):
                    mine = kv.where(lane >> 3 == i, kv.shuffle_idx(sums[i], (lane & 7) * 4), mine)
                score = kv.where(token < seen, mine, UNSEEN)
            if token < columns:
                out[row, token] = score

    return index_scores


# --- one thread per token --------------------------------------------------------------------------


def plain_kernel(c: Case, threads: int) -> Any:
    width = load_width(c.spec, min(lowbit(c.size), 16 if threads == 1 else 8))
    load = Rows(width, c.alignment)

    @kv.kernel
    def index_scores(
        collection, layer: i32, query, weights: kv.Buffer[f32, 2], row_offsets, out: kv.Buffer[f32, 2], chunks: i32
    ):
        row, token = kv.block_id.x // chunks, kv.block_id.x % chunks * threads + kv.thread_id.x
        b, seen = seen_tokens(collection, RaggedQueries(row_offsets, query.shape[0]), row)
        if token < out.shape[1]:
            score = kv.f32(UNSEEN)
            if token < seen:
                keys, score = collection.get_key_cache(layer), kv.f32(0.0)
                page = keys.page(b, token)
                for h in range(c.heads):
                    total = kv.vector(f32, width)
                    for d in range(0, c.size, width):
                        key = as_vector(read(c.spec, keys, b, 0, token, d, width, page))
                        total = kv.math.fma(kv.f32(load.load(query, row, h, d)), key, total)
                    score = score + weights[row, h] * relu(total.reduce("add"))
            out[row, token] = score

    return index_scores


@expands("kv.index_scores")
def expand_index_scores(op: Any, at: Expansion) -> None:
    heads, early = at.static_dim(op.query, 1), starts_early(at)
    case = Case(at.spec(op.collection), at.dtype(op.query), heads, row_alignment(op), early)
    tensor = on_tensor_cores(case, at.target)
    if not tensor and indexer_tiles.takes(case, at.target):
        indexer_tiles.launch(case, at, op)
        return
    per_block = CHUNK if tensor else 1 if at.target.is_host else THREADS
    chunks = (at.dim(op.out, 1) + (per_block - 1)) // per_block
    args = [op.collection, op.layer, op.query, op.weights, op.row_offsets, op.out, chunks]
    blocks = (at.dim(op.query, 0) * chunks, 1, 1)
    if tensor:
        at.launch(tensor_kernel(case), args, blocks, (WARPS * WARP, 1, 1), key=case, programmatic=early)
    else:
        at.launch(plain_kernel(case, per_block), args, blocks, (per_block, 1, 1), key=case)


# --- the selection ---------------------------------------------------------------------------------


@kv.func
def score_key(state: Any, i: Any) -> Any:
    """The key of a score; ``state`` starts with (scores, row)."""
    score = state[0][state[1], i]
    return kv.where(score == UNSEEN, kv.u32(0), key_of(score))


@kv.func
def put_token(state: Any, place: Any, i: Any) -> None:
    """Write a token to the row's list; ``state`` is (scores, row, lists)."""
    state[2][state[1], place] = i


def choose_kernel(threads: int, early: bool) -> Any:
    """The selection with one block per row. ``early``: it waits for the previous kernels itself (PDL)."""
    choose = chooser(threads, score_key, put_token)

    @kv.kernel(block=(threads, 1, 1))
    def select_tokens(scores: kv.Buffer[f32, 2], tokens, counts):
        begin(early)
        row = kv.block_id.x
        chosen = choose((scores, row, tokens), scores.shape[1], tokens.shape[1])
        for i in range(chosen + kv.thread_id.x, tokens.shape[1], threads):
            tokens[row, i] = -1
        if kv.thread_id.x == 0:
            counts[row] = chosen

    return select_tokens


@expands("kv.select_tokens")
def expand_select_tokens(op: Any, at: Expansion) -> None:
    threads, early = 1 if at.target.is_host else CHOOSING, starts_early(at)
    args, rows = [op.scores, op.tokens, op.counts], at.dim(op.scores, 0)
    at.launch(choose_kernel(threads, early), args, (rows, 1, 1), (threads, 1, 1), programmatic=early)
