# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over tiles: the one kernel for every cache kind, operand, mask and score modification.

A block has ``s.rows`` query rows (tokens times the group) of one KV head and walks over tiles of ``s.keys`` keys. What is
written here is the algorithm; which tiles are masked or left out, what copies, what multiplies, what overlaps is
decided by the passes from split-kv-loops to distribute-kv-tiles, by the schedule.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32, i32
from kvarn.dialect.layout import cdiv

from .attention_common import Case, caches_of, start_of
from .attention_queries import queries_of, tiles_of
from .base import Expansion
from .softmax import LOG2E, LOWEST, Function, alibi, log_sum_exp, mask_named, online_softmax, softcap, with_sink

# Query rows and keys of a tile on the host: what stays in its first caches.
HOST_ROWS, HOST_KEYS = 16, 32


def attention_kernel(
    case: Case, rows: int, keys: int, threads: int, options: dict[str, Any], clean: bool = False
) -> Any:
    """The kernel of a case, for tiles of ``rows`` query rows and ``keys`` keys.

    ``clean``: values that no row of a tile sees are zeros, whatever they were: a weight of zero times NaN is NaN.
    """
    M, N, G, D, V = rows, keys, case.group, case.size, case.value_size
    mask: Function | None = mask_named(case.mask, case.span)
    modifies = bool(case.softcap or case.alibi)

    @kv.kernel(block=(threads, 1, 1), **options)
    def attention(
        collection: kv.Optional[kv.KVCacheCollection], layer: kv.Optional[kv.i32],
        key_operand: kv.Optional[kv.MHAOperand], value_operand: kv.Optional[kv.MHAOperand],
        query: kv.Buffer[case.query, case.rank], extents: kv.Buffer[i32, 1], kv_offsets: kv.Optional[kv.Buffer[i32, 1]],
        scale: kv.f32, out: kv.Buffer[case.out, case.rank], sinks: kv.Optional[kv.Buffer[f32, 1]],
        lse: kv.Optional[kv.Buffer[f32, case.rank - 1]], slopes: kv.Optional[kv.Buffer[f32, 1]],
        key_map: kv.Optional[kv.TensorMap], value_map: kv.Optional[kv.TensorMap],
    ):  # fmt: skip
        number, head = kv.grid_dim.x - 1 - kv.block_id.x, kv.block_id.y  # the longest first
        queries = queries_of(case.padded, extents, query)
        b, base, row0, count = queries.tile(number, G, M)
        if row0 < count:
            k_rows, v_rows = caches_of(case, collection, layer, key_operand, value_operand)
            start, num_keys = start_of(case, collection or key_operand, value_operand, queries, kv_offsets, b)
            row = row0 + kv.tile_index(M)
            exists, row = row < count, kv.math.min(row, count - 1)
            token, h = row // G, head * G + row % G
            q_at = (start + token)[:, None]
            q = query.load_rows(*queries.at(base, token), h, mask=exists, columns=D)
            if not modifies:
                if scale < 0.0:  # maxima are found before scores are scaled
                    q = -q
            m, l, o = kv.full(M, LOWEST), kv.full(M, 0.0), kv.full((M, V), 0.0)
            unit = kv.f32(LOG2E) if modifies else kv.math.max(kv.math.abs(scale), 1.0e-30) * LOG2E
            end = num_keys
            if clean and case.mask == "causal":
                end = kv.math.min(num_keys, start + (kv.math.min(row0 + M, count) - 1) // G + 1)
            for j in range(0, (num_keys + (N - 1)) // N):
                k = k_rows.tile(
                    b, head, j * N, end, rows=N, columns=D, tail="any", descriptor=key_map, dtype=case.query
                )
                v = v_rows.tile(b, head, j * N, end, rows=N, columns=V, descriptor=value_map, dtype=case.query)
                k_at = (j * N + kv.tile_index(N))[None, :]
                x = kv.dot(q, k.T)
                if modifies:
                    x = x * scale
                    if case.softcap:
                        x = softcap(case.softcap)(x, b, h[:, None], q_at, k_at)
                    if slopes is not None:
                        x = alibi(slopes)(x, b, h[:, None], q_at, k_at)
                seen = k_at < num_keys
                if mask is not None:
                    seen = mask(b, h[:, None], q_at, k_at) & seen
                x = kv.masked(x, seen)
                if clean and case.span:
                    v = kv.where((kv.where(seen, 1, 0).max(axis=0) > 0)[:, None], v, 0.0)
                m, l, p, alpha = online_softmax(m, l, x, unit)
                o = kv.dot(case.query(p), v, o * alpha[:, None])
            factor = kv.f32(1.0)
            if sinks is not None:
                m, l, factor = with_sink(m, l, sinks[h])
            o = o * kv.where(l > 0.0, factor / l, 0.0)[:, None]
            out.store_rows(*queries.at(base, token), h, value=case.out(o), mask=exists)
            if lse is not None:
                lse.scatter(*queries.at(base, token), h, value=log_sum_exp(m, l), mask=exists)

    return attention


# --- the host --------------------------------------------------------------------------------------


def fits_host(case: Case) -> bool:
    """Whether the case is one of tiles: their extents are at least 2."""
    return min(case.size, case.value_size) >= 2


def launch_host(case: Case, at: Expansion, op: Any, args: list[Any]) -> None:
    """Launch the kernel on the host, where a block is one thread: ``args`` are those of the kernel but the maps."""
    total = max(1, at.schedule.get("max_queries", HOST_ROWS) * case.group)
    rows = max(2, cdiv(total, cdiv(total, HOST_ROWS)))  # of the fewest tiles that hold a sequence's rows, the smallest
    keys = HOST_KEYS
    grid = (tiles_of(op, at, case.group, rows), at.constant(case.spec.num_heads), 1)
    kernel = attention_kernel(case, rows, keys, 1, {}, clean=True)
    at.launch(kernel, [*args, None, None], grid, (1, 1, 1), key=(case, rows, keys))
