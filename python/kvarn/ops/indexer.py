# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores of cached tokens by an indexer, and the selection of tokens for sparse attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvarn.dialect.dtypes import f32
from kvarn.dispatch import Operation, Schedule

from . import checks
from .checks import layer_of


def _check_scores(seen: SimpleNamespace) -> None:
    spec = checks.spec_of(seen)
    if spec.num_heads != 1:
        raise ValueError(f"{seen.title}: collection must have one KV head, got {spec.num_heads}")
    checks.read_as_floats(seen)
    allowed = (*checks.FLOATS, "f8e4m3") if spec.converted else (spec.dtype.name,)
    checks.array(seen, "query", ("T", "Hi", spec.head_size), allowed)
    tokens, heads, _ = seen.query.shape
    if heads < 1:
        raise ValueError(f"{seen.title}: query must have heads in dimension 1, got none")
    checks.array(seen, "weights", (tokens, heads), ("f32",))
    checks.row_table(seen)
    checks.array(seen, "out", (tokens, "L"), ("f32",))
    checks.few_enough(seen.out.shape, f"{seen.title}: out")


_SCORES = Operation("kv.index_scores", {"query": 1, "weights": 1, "out": 2}, _check_scores)


def index_scores(
    collection: Any, layer: int, query: Any, weights: Any, row_offsets: Any, out: Any = None, *,
    schedule: Schedule = None, stream: Any = None,
) -> Any:  # fmt: skip
    """Score the cached tokens for a step's queries, like the indexer of DeepSeek's sparse attention.

    ``out[t, s]`` is the sum over h of ``weights[t, h] * max(query[t, h] . key[s], 0)`` for every token s that query t
    may see (causally, including its own), and minus infinity for other tokens. Products of 8-bit numbers are exact;
    sums are f32.

    Parameters
    ----------
    collection : KV cache collection
        The index cache, with one head and with the step's keys already stored; an MLA collection, which has no values,
        suits it best. f8e4m3 with one scale per token as in DeepSeek, another float type, or int8 with scales.
    layer : int
    query : array-like [T, Hi, D]
        The cache's dtype; over an 8-bit cache f8e4m3, f16, bf16 or f32.
    weights : f32 array-like [T, Hi]
        Weights of the heads, including the scales of a quantized query and other factors of a row.
    row_offsets : uint32 or int32 array-like [B + 1]
    out : f32 array-like [T, L], optional
        All L columns are written. By default allocated by the query's library, with the collection's
        ``max_cache_length`` columns.

    Returns
    -------
    array-like [T, L]
        ``out``. On GPUs a tensor-core kernel handles keys of 64, 128, 192 or 256 columns; for other sizes each thread
        scores a token.
    """
    title = "kv.ops.index_scores"
    layer = layer_of(collection, layer, title)
    if out is None:
        rows = checks.shape_of(query, f"{title}: query", 3)[0]
        out = checks.empty(query, (rows, max(1, collection.max_cache_length)), f32, "out", title)
    _SCORES((collection, layer, query, weights, row_offsets, out), (), schedule, stream)
    return out


_TOKENS = Operation("kv.select_tokens", {"scores": 2}, checks.declared, written=("tokens", "counts"))


def select_tokens(
    scores: Any, count: int | None = None, *, tokens: Any = None, counts: Any = None, schedule: Schedule = None,
    stream: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Select the tokens with the largest scores of each row, for example of :func:`index_scores`.

    Results are deterministic and stay on the device, so a CUDA graph can capture the call.
    :func:`remap_sparse_indices` turns the lists into ``indices`` of :func:`mla_attention`.

    Parameters
    ----------
    scores : f32 array-like [T, L]
        Minus infinity is never selected; NaN is selected before any number.
    count : int, optional
        K, the largest number of tokens per row; required without ``tokens``.
    tokens : int32 array-like [T, K], optional
        Output lists: ascending, padded with -1. By default allocated by the library of ``scores``.
    counts : int32 array-like [T], optional
        Output numbers of tokens per row; allocated in the same way.

    Returns
    -------
    tuple of array-like
        ``tokens`` and ``counts``. Among equal scores the first tokens are selected.
    """
    title = "kv.ops.select_tokens"
    rows = checks.shape_of(scores, f"{title}: scores", 2)[:1]
    tokens, counts = checks.lists(scores, rows, count, tokens, counts, "tokens", title)
    _TOKENS((scores, tokens, counts), (), schedule, stream)
    return tokens, counts
