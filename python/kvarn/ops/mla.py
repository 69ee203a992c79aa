# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over MLA latents (compressed KV), copies of latents out of pages, and prefills of decompressed chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from kvarn.block_mask import BlockMask
from kvarn.dialect.layout import cdiv
from kvarn.dialect.ops.mla import LEAST_INLINE, chunk_problem, inline_content, rope_columns
from kvarn.dispatch import Missed, Operation, Schedule

from . import checks, functions, sources
from .block_lists import check_block_mask, mask_of
from .checks import layer_of
from .forms import parameters_of
from .indices import MlaPrefillPlan, mla_prefill_plan
from .reads import APART, ARRAYS, RowsOperation, check_ends, check_keys, check_rows, prior_of, with_blocks

_FEW = 16  # largest number of new tokens per sequence that the code is specialised for


def _check_mla_attention(seen: SimpleNamespace) -> None:
    spec, title = checks.spec_of(seen), seen.title
    if not spec.is_mla:
        raise ValueError(f"{title}: needs an MLA collection, got one with values; use kv.ops.attention")
    size = seen.attributes["value_size"]
    columns = seen.query.shape[2] if seen.query.rank == 3 else 0
    inline = seen.attributes.get("inline_scales", 0)
    content = inline_content(spec, columns, inline)
    if inline and not content:
        raise ValueError(
            f"{title}: inline_scales needs rows of C 8-bit floats, a scale for every {inline} of them and R bf16, for "
            f"a query of C + R columns, got rows of {spec.head_size} {spec.dtype.name} and {columns} columns"
        )
    rope = columns - content if inline else rope_columns(spec, columns)
    widest = columns - rope if rope or inline else spec.head_size
    if size > widest:
        raise ValueError(f"{title}: value_size must be in [1, {widest}] (the row), got {size}")
    check_rows(seen, columns if rope or inline else spec.head_size, size, ("f32",))
    if rope or inline:  # such rows cannot be multiplied by an 8-bit query
        checks.has_dtype(seen.query, checks.queryable(spec), f"{title}: query")
    check_ends(seen, size)
    check_keys(seen)
    check_block_mask(seen)
    if seen.indices is not None and not spec.paged:
        raise ValueError(f"{title}: indices needs a collection of pages, got a {spec.kind} one")
    checks.array(seen, "indices", (seen.query.shape[0], "K"))
    checks.array(seen, "topk_lengths", (seen.query.shape[0],))


_MLA_ATTENTION = RowsOperation(
    "kv.mla_attention",
    {"query": 1, "out": 1, "sinks": 0, "lse": 1, "prior": 1, "prior_lse": 1, **ARRAYS},
    _check_mla_attention,
)


def mla_attention(
    collection: Any,
    layer: Any,
    query: Any,
    row_offsets: Any,
    *,
    value_size: int = 512,
    scale: float | None = None,
    score: Any = None,
    mask: Any = None,
    window: int | None = None,
    chunk: int | None = None,
    indices: Any = None,
    topk_lengths: Any = None,
    inline_scales: int | None = None,
    sinks: Any = None,
    out: Any = None,
    return_lse: bool = False,
    lse: Any = None,
    kv_offsets: Any = None,
    prior: Any = None,
    block_mask: BlockMask | None = None,
    shared: Any = None,
    schedule: Any = None,
    stream: Any = None,
) -> Any:
    """Attention over MLA latents: scores use the whole row, values are its first ``value_size`` columns.

    Lists of collections and layers are sources of one softmax, such as a window and a compressed cache, as in
    :func:`attention`; ``score``, ``mask``, ``window``, ``chunk``, ``kv_offsets``, ``indices``, ``topk_lengths``,
    ``inline_scales`` and ``schedule`` may then be lists with one entry per source.

    Parameters
    ----------
    collection : KV cache collection
        An MLA collection: one latent row of D elements per token.
    layer : int
    query : array-like [T, Hq, D]
        The cache's dtype, or f32, f16 or bf16 over an 8-bit cache. Over an 8-bit cache a query may have R columns fewer
        than a row has bytes: the row's last 2 R bytes are then R bf16 keys for the query's last R columns (512 8-bit
        and 64 bf16 keys in 640 bytes, for a query of 576). Such a row has at most one scale, and its bf16 keys are
        stored divided by it. Over other f8e4m3 rows without scales the query may be f8e4m3; a GPU with wgmma then
        multiplies 8-bit operands. ``scale`` must include the query's quantization scale.
    row_offsets : uint32 or int32 array-like [B + 1]
    value_size : int
        At most D, and at most the number of 8-bit columns of a row with bf16 keys.
    scale : float, optional
        Default: the query's columns ** -0.5. For a model that scores with expanded keys, pass that model's scale.
    score
        As in :func:`attention`, a function or a tuple of it and its arrays; not with ``indices``, whose rows have no
        positions. On a GPU with wgmma it selects the kernels without wgmma.
    mask, window, chunk, schedule, stream
        As in :func:`attention`; the default mask is ``"causal"``. Not with ``indices``.
    indices : int32 array-like [T, K], optional
        Sparse attention over a paged collection: the pool rows that each query sees, as ``page * page_size + slot``
        (:func:`remap_sparse_indices`). Negative entries and entries outside of the pool are skipped; a row that is
        listed twice counts twice.
    topk_lengths : int32 or uint32 array-like [T], optional
        Number of valid indices of each query; at most K, which is the default.
    inline_scales : int, optional
        Elements per scale (a power of two, at least 16) of rows that contain their scales: C 8-bit float elements,
        C / ``inline_scales`` f32 scales, and R bf16 keys without a scale, for a query of C + R columns. With
        ``inline_scales=128`` and 656 bytes, C is 512 and R is 64. Not for a cache with scales of its own.
    sinks, return_lse, lse
        As in :func:`attention`.
    out : array-like [T, Hq, value_size], optional
        The query's dtype, or f32; for an 8-bit query f16, bf16 or f32. By default allocated by the query's library,
        with bf16 for an 8-bit query.
    kv_offsets
        As in :func:`attention`; not with ``indices``.
    prior : tuple of f32 array-like [T, Hq, value_size] and f32 array-like [T, Hq], optional
        As in :func:`attention`. A prior, sinks, a log-sum-exp or an f32 output takes a second kernel.
    block_mask : BlockMask, optional
        Result of :func:`block_mask` for this step and collection. It replaces ``mask``, ``window`` and ``chunk``. On a
        GPU without wgmma it selects the slow kind simt.
    shared : SharedPrefixes, optional
        As in :func:`attention`; not with ``indices``.

    Returns
    -------
    array-like [T, Hq, value_size], or with ``return_lse`` a tuple of that and f32 [T, Hq]
        As in :func:`attention`; rows with an empty list are zeros.
    """
    title = "kv.ops.mla_attention"
    answer = None
    given = (
        collection, layer, query, row_offsets, value_size, scale, score, mask, window, chunk, indices, topk_lengths,
        inline_scales, sinks, out, lse, kv_offsets, prior, shared, schedule,
    )  # fmt: skip
    if out is not None and block_mask is None and not (return_lse and lse is None):
        answer = _MLA_ATTENTION.try_cached_launch(given, stream)
        if answer is True:
            return (out, lse) if return_lse else out
    if collection.__class__ is list or shared is not None:
        options = sources.options_of(_GIVEN, given, return_lse=return_lse, block_mask=block_mask, stream=stream)
        if collection.__class__ is not list and mask is None:
            options["mask"] = "causal"
        return sources.attention(mla_attention, collection, layer, query, row_offsets, shared, options, title)
    if block_mask is not None:
        if indices is not None:
            raise ValueError(f"{title}: block_mask must be None with indices, which select the keys")
        mask = mask_of(block_mask, ("causal" if mask is None else mask, window, chunk), title)
    if indices is None:
        if topk_lengths is not None:
            raise ValueError(f"{title}: topk_lengths needs indices, got none")
        mask = "causal" if mask is None else mask
    elif mask not in (None, "null") or any(x is not None for x in (window, chunk, score, kv_offsets)):
        raise ValueError(
            f"{title}: score, mask, window, chunk and kv_offsets must be None with indices, which select the keys"
        )
    else:
        mask = "null"
    layer = layer_of(collection, layer, title)
    seen, scored, arrays = functions.seen_and_scored(score, mask, window, chunk, title)
    attributes = (("value_size", checks.count(value_size, "value_size", title, 1)), *seen, *scored)
    if inline_scales is not None:
        elements = checks.count(inline_scales, "inline_scales", title, LEAST_INLINE)
        if elements & (elements - 1):
            raise ValueError(f"{title}: inline_scales must be a power of two, got {elements}")
        attributes = (*attributes, ("inline_scales", elements))
    size = checks.shape_of(query, f"{title}: query", 3)[-1]
    scale = size**-0.5 if scale is None else checks.number(scale, "scale", title)
    if out is None:
        out = checks.empty_result(query, "out", title, value_size)
    if return_lse and lse is None:
        lse = checks.empty_lse(query, title)
    operands = (collection, layer, query, row_offsets, scale, out, indices, topk_lengths, sinks, lse)
    missed = Missed(_GIVEN, given, answer) if answer else None
    operands = (*operands, *((None, None) if prior is None else prior_of(prior, title)), kv_offsets, *arrays)
    if block_mask is not None:
        operands, attributes = with_blocks(_MLA_ATTENTION, operands, attributes, block_mask)
    _MLA_ATTENTION(operands, attributes, scheduled(collection, schedule), stream, missed=missed)
    return (out, lse) if return_lse else out


_GIVEN = tuple(name for name in parameters_of(mla_attention) if name not in APART)


def scheduled(collection: Any, schedule: Schedule) -> Schedule:
    """The schedule with a bound on the new tokens per sequence, if they are few, on a GPU.

    There are few distinct bounds. Since the bound depends on the batch, so do the chosen code and its rounding.
    """
    known = collection.max_seq_length
    if schedule and isinstance(schedule, Mapping) and schedule.get("batch_invariant"):
        return schedule
    if known > _FEW or collection.device[0] == "cpu" or not (schedule is None or isinstance(schedule, Mapping)):
        return schedule
    return {"max_queries": 1 << max(known - 1, 0).bit_length(), **(schedule or {})}


def _check_mla_decompress(seen: SimpleNamespace) -> None:
    spec = checks.spec_of(seen)
    if spec.num_heads != 1:
        raise ValueError(f"{seen.title}: cache must have one head, got {spec.num_heads}")
    checks.declared(seen)


_MLA_DECOMPRESS = Operation("kv.mla_decompress", {"out": 1}, _check_mla_decompress)


def mla_decompress(
    cache: Any, row_offsets: Any, cache_offsets: Any, out: Any, *, schedule: Schedule = None, stream: Any = None
) -> Any:
    """Copy the latents of one chunk of a prefill plan out of the pages.

    Row i of sequence b is the sequence's token i - row_offsets[b] + cache_offsets[b].

    Parameters
    ----------
    cache : KV cache
        With one head. Stored values are copied unchanged, without scales.
    row_offsets : uint32 or int32 array-like [B + 1]
        Rows of each sequence in the chunk: a row of ``mla_prefill_plan``'s ``buffer_row_offsets``.
    cache_offsets : uint32 or int32 array-like [B]
        Tokens of each sequence in earlier chunks: a row of the plan's ``cache_offsets``.
    out : array-like [rows, D]
        The cache's dtype. Rows from ``row_offsets[B]`` on are not written.

    Returns
    -------
    array-like [rows, D]
        ``out``.
    """
    _MLA_DECOMPRESS((cache, row_offsets, cache_offsets, out), (), schedule, stream)
    return out


# --- prefill of decompressed chunks ------------------------------------------------------------------


def _check_mla_prefill_chunk(seen: SimpleNamespace) -> None:
    spec, title = checks.spec_of(seen), seen.title
    if not spec.is_mla:
        raise ValueError(f"{title}: needs an MLA collection, got one with values; use kv.ops.attention")
    checks.array(seen, "query", ("T", "Hq", "Dn + R"))
    tokens, heads, columns = seen.query.shape
    checks.array(seen, "key", ("Tb", heads, "Dn"))
    checks.array(seen, "value", (seen.key.shape[0], heads, "Dv"))
    if seen.value.shape[2] < 1:
        raise ValueError(f"{title}: value must have at least one column, got none")
    problem = chunk_problem(spec, columns, seen.key.shape[2], seen.attributes["bf16_rope"])
    if problem is not None:
        raise ValueError(f"{title}: {problem}")
    check_rows(seen, columns, seen.value.shape[2])
    for name in ("key", "value"):
        checks.has_dtype(getattr(seen, name), (seen.query.dtype.name,), f"{title}: {name}")
    checks.array(seen, "lse", (tokens, heads), ("f32",))
    batch = seen.collection.batch_size
    checks.offsets(seen.buffer_row_offsets, batch, f"{title}: buffer_row_offsets")
    checks.array(seen, "cache_offsets", (batch,))


_MLA_PREFILL_CHUNK = RowsOperation(
    "kv.mla_prefill_chunk", {"query": 1, "key": 1, "value": 1, "out": 1, "lse": 1}, _check_mla_prefill_chunk
)


def mla_prefill_chunk(
    collection: Any,
    layer: int,
    query: Any,
    row_offsets: Any,
    key: Any,
    value: Any,
    buffer_row_offsets: Any,
    cache_offsets: Any,
    *,
    scale: float | None = None,
    bf16_rope: bool = False,
    accumulate: bool = False,
    out: Any = None,
    lse: Any = None,
    schedule: Schedule = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Causal attention over one chunk of decompressed keys, whose last R columns come from the latents.

    Row i of ``key`` and ``value``, of sequence b, is the sequence's token i - buffer_row_offsets[b] + cache_offsets[b],
    as written by :func:`mla_decompress`. The token's key is that row followed by the last R columns of its latent row.
    Query i of sequence b is at position ``cache_lengths[b] + i``. On sm_90a kind ``tile`` uses tensor cores, for
    queries of bf16 and f16 with Dn columns in a multiple of 128 bytes and R a multiple of 16; other cases compute row
    by row in f32 without tensor cores.

    Parameters
    ----------
    collection : KV cache collection
        An MLA collection: one latent row of D elements per token, with those of the step's new tokens.
    layer : int
    query : array-like [T, Hq, Dn + R]
        The cache's dtype, or f32, f16 or bf16 over an 8-bit cache.
    row_offsets : uint32 or int32 array-like [B + 1]
    key : array-like [Tb, Hq, Dn]
        The query's dtype.
    value : array-like [Tb, Hq, Dv]
        The query's dtype.
    buffer_row_offsets : uint32 or int32 array-like [B + 1]
        Rows of each sequence in the chunk: a row of ``mla_prefill_plan``'s. They are clamped to the Tb rows.
    cache_offsets : uint32 or int32 array-like [B]
        Tokens of each sequence in earlier chunks: a row of the plan's.
    scale : float, optional
        Default (Dn + R) ** -0.5.
    bf16_rope : bool
        An 8-bit row with at most one scale ends in R bf16 columns, in 2 R bytes, stored divided by the scale.
    accumulate : bool
        ``out`` and ``lse`` already have the attention over other chunks and are replaced by the attention over those
        and this chunk, as by :func:`merge_attention`.
    out : array-like [T, Hq, Dv], optional
        The query's dtype. By default allocated by the query's library (torch, CuPy or NumPy).
    lse : f32 array-like [T, Hq], optional
        Logarithm of the sum of exponentials, minus infinity in a row that sees no key. Allocated in the same way.

    Returns
    -------
    tuple of array-like
        ``out`` and ``lse``. Rows that belong to no sequence are not written.
    """
    title = "kv.ops.mla_prefill_chunk"
    layer = layer_of(collection, layer, title)
    if accumulate and (out is None or lse is None):
        raise ValueError(f"{title}: out and lse must be given with accumulate: they hold earlier chunks")
    tokens, heads, size = checks.shape_of(query, f"{title}: query", 3)
    scale = size**-0.5 if scale is None else checks.number(scale, "scale", title)
    if out is None:
        shape = (tokens, heads, checks.shape_of(value, f"{title}: value", 3)[2])
        out = checks.empty(query, shape, None, "out", title)
    if lse is None:
        lse = checks.empty_lse(query, title)
    operands = (collection, layer, query, row_offsets, key, value, buffer_row_offsets, cache_offsets, scale, out, lse)
    attributes = (("bf16_rope", bool(bf16_rope)), ("accumulate", bool(accumulate)))
    _MLA_PREFILL_CHUNK(operands, attributes, schedule, stream)
    return out, lse


def mla_prefill(
    collection: Any,
    layer: int,
    query: Any,
    row_offsets: Any,
    expand: Callable[[Any], tuple[Any, Any]],
    buffer: Any,
    *,
    plan: MlaPrefillPlan | None = None,
    scale: float | None = None,
    bf16_rope: bool = False,
    out: Any = None,
    return_lse: bool = False,
    lse: Any = None,
    stream: Any = None,
) -> Any:
    """Causal attention of a step's new tokens over keys and values that are decompressed chunk by chunk.

    For each chunk of the plan, :func:`mla_decompress` copies latent rows to ``buffer``, ``expand`` computes keys and
    values from them, and :func:`mla_prefill_chunk` combines their attention with that over earlier chunks. Everything
    is queued on the stream without a read-back: the plan's extent determines the number of chunks, and chunks past the
    last token are empty. With ``plan``, ``out`` and ``lse`` given, only ``expand`` may allocate.

    Parameters
    ----------
    collection : KV cache collection
        An MLA collection: one latent row of D elements per token, with those of the step's new tokens.
    layer : int
    query : array-like [T, Hq, Dn + R]
        The cache's dtype, or f32, f16 or bf16 over an 8-bit cache.
    row_offsets : uint32 or int32 array-like [B + 1]
    expand : callable
        ``key, value = expand(buffer)``: [Tb, Hq, Dn] and [Tb, Hq, Dv] of the query's dtype, products of the latent rows
        with the model's weights, computed on the same stream. Rows past the chunk's tokens have stale contents and are
        not used. It is called once per chunk and may return the same arrays each time.
    buffer : array-like [Tb, D]
        The cache's dtype: receives the latent rows of one chunk, as stored values without scales.
    plan : MlaPrefillPlan, optional
        Result of ``mla_prefill_plan(row_offsets, cache_lengths, Tb, chunks)``, valid for all layers of a step. The
        default plan has enough chunks for B times the collection's ``max_cache_length`` tokens; pass a plan with fewer
        chunks if possible, since empty chunks are launched too. Tokens past its last chunk are not seen.
    scale : float, optional
        Default (Dn + R) ** -0.5.
    bf16_rope : bool
        As in :func:`mla_prefill_chunk`.
    out : array-like [T, Hq, Dv], optional
        The query's dtype, rounded once per chunk. By default allocated by the query's library.
    return_lse : bool
        Return the log-sum-exp too.
    lse : f32 array-like [T, Hq], optional
        Output of the log-sum-exp; allocated by default.
    stream
        As in :func:`attention`.

    Returns
    -------
    array-like [T, Hq, Dv], or with ``return_lse`` a tuple of that and f32 [T, Hq]
        Rows that belong to no sequence are not written.
    """
    title = "kv.ops.mla_prefill"
    layer = layer_of(collection, layer, title)
    cache = collection.get_key_cache(layer)
    tokens, columns = checks.shape_of(buffer, f"{title}: buffer", 2)
    if tokens < 1 or columns != cache.head_size:
        raise ValueError(
            f"{title}: buffer must have shape [Tb, {cache.head_size}], Tb at least 1, got [{tokens}, {columns}]"
        )
    if not callable(expand):
        raise TypeError(f"{title}: expand must be callable, got {type(expand).__name__}")
    if plan is None:
        chunks = max(1, cdiv(collection.batch_size * collection.max_cache_length, tokens))
        plan = mla_prefill_plan(row_offsets, collection.cache_lengths, tokens, chunks, stream=stream)
    elif not isinstance(plan, MlaPrefillPlan):
        raise TypeError(f"{title}: plan must be a MlaPrefillPlan (of mla_prefill_plan), got {type(plan).__name__}")
    (chunks,) = checks.shape_of(plan.buffer_lengths, f"{title}: plan.buffer_lengths", 1)
    if chunks < 1:
        raise ValueError(f"{title}: plan must have at least one chunk, got none")
    for chunk in range(chunks):
        rows, taken = plan.buffer_row_offsets[chunk], plan.cache_offsets[chunk]
        mla_decompress(cache, rows, taken, buffer, stream=stream)
        made = expand(buffer)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise TypeError(f"{title}: expand must return keys and values, got {type(made).__name__}")
        key, value = made
        held = checks.shape_of(key, f"{title}: key of expand")[:1]
        if held != (tokens,):
            raise ValueError(f"{title}: expand must return keys of the buffer's {tokens} rows, got {list(held)}")
        out, lse = mla_prefill_chunk(
            collection, layer, query, row_offsets, key, value, rows, taken, scale=scale, bf16_rope=bf16_rope,
            accumulate=chunk > 0, out=out, lse=lse, stream=stream,
        )  # fmt: skip
    return (out, lse) if return_lse else out
