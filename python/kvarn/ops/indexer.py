# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An indexer's scores of cached tokens, and the tokens that they choose for sparse attention."""

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
    allowed = (*checks.FLOATS, "f8e4m3") if spec.dtype.bits == 8 else (spec.dtype.name,)
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
    """Score the cached tokens for a step's queries, as the indexer of DeepSeek's sparse attention does.

    ``out[t, s]`` is the sum over h of ``weights[t, h] * max(query[t, h] . key[s], 0)``, of the tokens s that query t
    may see, its own among them; of others minus infinity. Products of 8-bit numbers are exact, sums are f32.

    Parameters
    ----------
    collection : KV cache collection
        The index cache: keys of one head, best as an MLA collection, which has no values; the step's are stored
        already. f8e4m3 with a scale a token, as DeepSeek has it, or any other float type, or int8 with scales.
    layer : int
    query : array-like [T, Hi, D]
        The cache's dtype; over an 8-bit one f8e4m3, f16, bf16 or f32.
    weights : f32 array-like [T, Hi]
        Of each head; scales of a quantized query and what else is constant in a row are to be multiplied in.
    row_offsets : uint32 or int32 array-like [B + 1]
    out : f32 array-like [T, L], optional
        All L columns are written. When not given it is allocated by the query's library, with the collection's
        ``max_cache_length`` columns.

    Returns
    -------
    array-like [T, L]
        ``out``. On GPUs the kernel on tensor cores takes keys of 64, 128, 192 or 256 columns; others have a thread a
        token.
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
    """Choose the tokens with the largest scores of each row, such as those of :func:`index_scores`.

    Nothing is read back, and equal inputs give equal lists: it can be captured in a CUDA graph.
    :func:`remap_sparse_indices` makes of the lists what :func:`mla_attention` takes.

    Parameters
    ----------
    scores : f32 array-like [T, L]
        Minus infinity is never chosen, NaN before any number.
    count : int, optional
        K, the most tokens of a row; not needed where ``tokens`` is given.
    tokens : int32 array-like [T, K], optional
        Where the lists go: ascending, -1 behind their ends. When not given it is allocated by the scores' library.
    counts : int32 array-like [T], optional
        Where the numbers of tokens go; likewise.

    Returns
    -------
    tuple of array-like
        ``tokens`` and ``counts``. Of equal scores the first ones are chosen.
    """
    title = "kv.ops.select_tokens"
    rows = checks.shape_of(scores, f"{title}: scores", 2)[:1]
    tokens, counts = checks.lists(scores, rows, count, tokens, counts, "tokens", title)
    _TOKENS((scores, tokens, counts), (), schedule, stream)
    return tokens, counts
