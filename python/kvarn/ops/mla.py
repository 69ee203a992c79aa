# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows (MLA), and latent rows copied out of the pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvarn.dialect.ops.mla import rope_columns
from kvarn.programs import Operation, Schedule

from . import checks
from .checks import layer_of
from .reads import RowsOperation, check_rows, masked


def _check_mla_attention(seen: SimpleNamespace) -> None:
    spec, title = checks.spec_of(seen), "kv.ops.mla_attention"
    if not spec.is_mla:
        raise ValueError(f"{title}: needs an MLA collection, got one with values; use kv.ops.attention")
    size = seen.attributes["value_size"]
    columns = seen.query.shape[2] if seen.query.rank == 3 else 0
    rope = rope_columns(spec, columns)
    widest = columns - rope if rope else spec.head_size
    if size > widest:
        raise ValueError(f"{title}: value_size must be in [1, {widest}] (the row), got {size}")
    check_rows(seen, title, columns if rope else spec.head_size, size)
    if seen.indices is not None:
        if not spec.paged:
            raise ValueError(f"{title}: indices needs a collection of pages, got a {spec.kind} one")
        checks.has_shape(seen.indices, (seen.query.shape[0], "K"), f"{title}: indices")
    if seen.topk_lengths is not None:
        checks.has_shape(seen.topk_lengths, (seen.query.shape[0],), f"{title}: topk_lengths")


_MLA_ATTENTION = RowsOperation("kv.mla_attention", {"query": 1, "out": 1}, _check_mla_attention)


def mla_attention(
    collection: Any,
    layer: int,
    query: Any,
    row_offsets: Any,
    *,
    value_size: int = 512,
    scale: float | None = None,
    mask: str | None = None,
    window: int | None = None,
    chunk: int | None = None,
    indices: Any = None,
    topk_lengths: Any = None,
    out: Any = None,
    schedule: Schedule = None,
    stream: Any = None,
) -> Any:
    """Attention over latent rows: scores with the whole row, values its first ``value_size`` columns.

    Parameters
    ----------
    collection : KV cache collection
        An MLA one: one latent row of D elements a token.
    layer : int
    query : array-like [T, Hq, D]
        The cache's dtype, or f32, f16 or bf16 over an 8-bit cache. Over an 8-bit cache it may have R columns less than
        a row has bytes: the last R then meet bf16 keys in the last 2 R bytes of each row (512 8-bit and 64 bf16 keys
        in 640 bytes, for a query of 576). Such a row has at most one scale, and its bf16 keys are stored divided by it.
    row_offsets : uint32 or int32 array-like [B + 1]
    value_size : int
        At most D; at most the 8-bit columns of a row that ends in bf16 keys.
    scale : float, optional
        Default: the query's columns ** -0.5. A model that scores with the expanded keys gives its own.
    mask, window, chunk, schedule, stream
        As of :func:`attention`; the mask is ``"causal"`` where none is given. Not with ``indices``.
    indices : int32 array-like [T, K], optional
        Sparse attention, over a paged collection: the rows of the pool that each query sees, and no other, as
        ``page * page_size + slot`` (:func:`remap_sparse_indices`). Negative ones and those outside the pool name
        nothing; a row that is listed twice counts twice.
    topk_lengths : int32 or uint32 array-like [T], optional
        How many of a query's indices count, from the first on. Default, and at most: K.
    out : array-like [T, Hq, value_size], optional
        The query's dtype. When not given it is allocated by the query's library.

    Returns
    -------
    array-like [T, Hq, value_size]
        As of :func:`attention`; zeros in a row whose list names nothing.
    """
    title = "kv.ops.mla_attention"
    if indices is None:
        if topk_lengths is not None:
            raise ValueError(f"{title}: topk_lengths needs indices, got none")
        mask = "causal" if mask is None else mask
    elif mask not in (None, "null") or window is not None or chunk is not None:
        raise ValueError(f"{title}: mask, window and chunk must be None with indices, which say what a query sees")
    else:
        mask = "null"
    layer = layer_of(collection, layer, title)
    attributes = (
        ("value_size", checks.count(value_size, "value_size", title, 1)),
        *masked(mask, window, chunk, title),
    )
    scale = query.shape[-1] ** -0.5 if scale is None else checks.number(scale, "scale", title)
    if out is None:
        out = checks.empty(query, (*query.shape[:2], value_size), None, "out", title)
    operands = (collection, layer, query, row_offsets, scale, out, indices, topk_lengths)
    _MLA_ATTENTION(operands, attributes, schedule, stream)
    return out


def _check_mla_decompress(seen: SimpleNamespace) -> None:
    spec, title = checks.spec_of(seen), "kv.ops.mla_decompress"
    if spec.num_heads != 1:
        raise ValueError(f"{title}: cache must have one head, got {spec.num_heads}")
    batch = seen.cache.batch_size
    checks.offsets(seen.row_offsets, batch, f"{title}: row_offsets")
    checks.has_shape(seen.cache_offsets, (batch,), f"{title}: cache_offsets")
    checks.has_shape(seen.out, ("rows", spec.head_size), f"{title}: out")
    checks.has_dtype(seen.out, (spec.dtype.name,), f"{title}: out")


_MLA_DECOMPRESS = Operation("kv.mla_decompress", {"out": 1}, _check_mla_decompress)


def mla_decompress(
    cache: Any, row_offsets: Any, cache_offsets: Any, out: Any, *, schedule: Schedule = None, stream: Any = None
) -> Any:
    """Copy one chunk of a prefill plan out of the pages.

    Row i, of sequence b, is that sequence's token i - row_offsets[b] + cache_offsets[b].

    Parameters
    ----------
    cache : KV cache
        Of one head; its stored values are copied as they are, without scales.
    row_offsets : uint32 or int32 array-like [B + 1]
        Rows of each sequence in the chunk: a row of ``mla_prefill_plan``'s ``buffer_row_offsets``.
    cache_offsets : uint32 or int32 array-like [B]
        Tokens of each sequence that earlier chunks took: a row of the plan's ``cache_offsets``.
    out : array-like [rows, D]
        The cache's dtype. Rows from ``row_offsets[B]`` on are not written.
    schedule, stream
        As of :func:`attention`.

    Returns
    -------
    array-like [rows, D]
        ``out``.
    """
    _MLA_DECOMPRESS((cache, row_offsets, cache_offsets, out), (), schedule, stream)
    return out
