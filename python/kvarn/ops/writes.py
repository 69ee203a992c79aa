# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes of new tokens to caches: append, rope_append, store_ragged, store_padded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvarn.dispatch import Operation, Schedule

from . import checks
from .checks import layer_of

# --- append --------------------------------------------------------------------------------------


def _check_append(seen: SimpleNamespace) -> None:
    spec, title = checks.spec_of(seen), seen.title
    if spec.is_mla and seen.value is not None:
        raise ValueError(f"{title}: value must be None for an MLA collection, which has latent keys only")
    if not spec.is_mla and seen.value is None:
        raise ValueError(f"{title}: value must be given for a collection with values, got None")
    if spec.is_mla and seen.value_scale is not None:
        raise ValueError(f"{title}: value_scale must be None for an MLA collection")
    for name in ("key_scale", "value_scale"):
        if getattr(seen, name) is not None and not spec.quantized:
            raise ValueError(f"{title}: {name} needs a collection with scales, got one without")
        if getattr(seen, name) is not None and spec.zero:
            raise ValueError(
                f"{title}: {name} must be None: append computes scales and zeros of {spec.dtype.name} itself"
            )
    if seen.tensor_scales is not None and not spec.takes_tensor_scales:
        raise ValueError(f"{title}: tensor_scales needs a collection of at most 8 bits without zeros, got {spec}")
    if seen.tensor_scales is not None and seen.key_scale is not None:
        raise ValueError(f"{title}: key_scale must be None with tensor_scales")
    checks.declared(seen, apart=True)
    if seen.value is not None:
        checks.like(seen, "value", "key")
    if not spec.is_mla:
        checks.together(seen, "key_scale", "value_scale")
    checks.same_tokens(seen, "key", "value", "key_scale", "value_scale")


_APPEND = Operation(
    "kv.append", {"key": 1, "value": 1, "key_scale": 1, "value_scale": 1, "tensor_scales": 0}, _check_append,
    single=("tensor_scales",),
)  # fmt: skip


def append(
    collection: Any,
    layer: int,
    key: Any,
    value: Any,
    row_offsets: Any,
    *,
    key_scale: Any = None,
    value_scale: Any = None,
    tensor_scales: Any = None,
    schedule: Schedule = None,
    stream: Any = None,
) -> None:
    """Write the keys and values of a step's new tokens to one layer.

    Token i of sequence b goes to position ``cache_lengths[b] + i``. A token without a page in the table is dropped. A
    collection with scales quantizes, with one scale per granule: its largest magnitude over the storage type's largest
    finite value (1 for a granule of zeros), or the given scales. An 8-bit cache without scales has unit scale, or
    ``tensor_scales``: floats are converted, saturating. The cache lengths do not change: see
    :func:`increment_cache_lengths`.

    Parameters
    ----------
    collection : KV cache collection
    layer : int
    key, value : array-like [T, H, D]
        The cache's dtype; for an 8-bit cache also f32, f16 or bf16, and only these if it has scales. Tokens and heads
        may have any strides. ``value`` is None for an MLA collection.
    row_offsets : uint32 or int32 array-like [B + 1]
        Rows of sequence b: ``row_offsets[b]`` to ``row_offsets[b + 1]``; may be empty. Rows before the first offset and
        from the last on are not read, so T may be padded.
    key_scale, value_scale : f32, f16 or bf16 array-like [T, H, G], optional
        Quantization scales, rounded to the scale type; given together or not at all.
    tensor_scales : f32 array-like [2], optional
        The scale of all keys and that of all values, by which floats are divided before they are converted or
        quantized: of a collection of 8 bits, or of 4 without zeros, such as NVFP4. Attention does not know them: the
        first belongs into its ``scale``, the second onto its output.
    schedule : mapping, optional
        The kernel's schedule; chosen by default.
    stream : optional
        An int, or an object with ``__cuda_stream__``; default: the current stream of the arguments' library.
    """
    layer = layer_of(collection, layer, "kv.ops.append")
    scales: tuple[Any, ...] = () if key_scale is None and value_scale is None else (key_scale, value_scale)
    if tensor_scales is not None:
        scales = (key_scale, value_scale, tensor_scales)
    _APPEND((collection, layer, key, row_offsets, value, *scales), (), schedule, stream)


# --- rope_append ---------------------------------------------------------------------------------


def _check_rope_append(seen: SimpleNamespace) -> None:
    checks.with_values(seen)
    checks.declared(seen, apart=True)
    checks.like(seen, "value", "key")
    checks.array(seen, "query_out", tuple(seen.query.shape))
    checks.like(seen, "query_out", "query")
    checks.together(seen, "q_gamma", "k_gamma")
    checks.rotation(seen, checks.spec_of(seen).head_size)
    checks.same_tokens(seen, "query", "key", "value")


_ROPE_APPEND = Operation(
    "kv.rope_append",
    {"query": 1, "key": 1, "value": 1, "freqs": 1, "query_out": 1, "q_gamma": 0, "k_gamma": 0},
    _check_rope_append,
    in_place=(("query_out", "query"),),
)


def rope_append(
    collection: Any,
    layer: int,
    query: Any,
    key: Any,
    value: Any,
    row_offsets: Any,
    freqs_cis: Any,
    *,
    interleaved: bool = True,
    query_out: Any = None,
    q_gamma: Any = None,
    k_gamma: Any = None,
    eps: float = 1e-6,
    schedule: Schedule = None,
    stream: Any = None,
) -> Any:
    """Rotate the new tokens' queries and keys by their positions and append keys and values, in one launch.

    Computed in f32. With gammas, each head of query and key is RMS-normalised first: x * rsqrt(mean(x^2) + eps) *
    gamma. Keys and values are written as by :func:`append`, quantized if the collection has scales.

    Parameters
    ----------
    collection : KV cache collection
        With values (not MLA).
    layer : int
    query : array-like [T, Hq, D]
        The cache's dtype, or f32, f16 or bf16 over an 8-bit cache.
    key, value : array-like [T, H, D]
        As in :func:`append`.
    row_offsets : uint32 or int32 array-like [B + 1]
    freqs_cis : f32 array-like [positions, R]
        (cos, sin) pairs interleaved, one row per position below the collection's ``max_cache_length``; R <= D, even.
    interleaved : bool
        Rotate pairs (2k, 2k + 1) of the *last* R columns; otherwise pairs (k, k + R/2) of the *first* R columns. The
        other columns are copied.
    query_out : array-like [T, Hq, D], optional
        May be ``query`` itself. By default allocated by the query's library (torch, CuPy or NumPy).
    q_gamma, k_gamma : f32, f16 or bf16 array-like [D], optional
        Given together or not at all.
    eps : float

    Returns
    -------
    array-like [T, Hq, D]
        ``query_out``. Rows before the first offset and from the last on are not written.
    """
    layer = layer_of(collection, layer, "kv.ops.rope_append")
    checks.positions_cover(freqs_cis, collection, "kv.ops.rope_append")
    if query_out is None:
        query_out = checks.empty_like(query, "query_out", "kv.ops.rope_append")
    if eps.__class__ is not float or eps - eps != 0:  # infinities and NaNs differ from themselves by NaN
        eps = checks.number(eps, "eps", "kv.ops.rope_append")
    attributes = (("interleaved", bool(interleaved)), ("eps", eps))
    gammas = () if q_gamma is None and k_gamma is None else (q_gamma, k_gamma)
    operands = (collection, layer, query, key, value, row_offsets, freqs_cis, query_out, *gammas)
    _ROPE_APPEND(operands, attributes, schedule, stream)
    return query_out


# --- stores --------------------------------------------------------------------------------------


_STORE_RAGGED = Operation("kv.store_ragged", {"x": 1}, checks.declared)


def store_ragged(cache: Any, x: Any, row_offsets: Any, *, schedule: Schedule = None, stream: Any = None) -> None:
    """Write rows of the storage type to the new tokens of one cache, without conversion; scales do not change.

    Parameters
    ----------
    cache : KV cache
        One layer's keys or values.
    x : array-like [T, H, D]
        The cache's dtype.
    row_offsets : uint32 or int32 array-like [B + 1]
        Row i of sequence b goes to position ``cache_lengths[b] + i``.
    """
    _STORE_RAGGED((cache, x, row_offsets), (), schedule, stream)


_STORE_PADDED = Operation("kv.store_padded", {"x": 2}, checks.declared)


def store_padded(cache: Any, x: Any, valid_lengths: Any, *, schedule: Schedule = None, stream: Any = None) -> None:
    """Write padded rows of the storage type to the new tokens of one cache.

    Parameters
    ----------
    cache : KV cache
    x : array-like [B, S, H, D]
        The cache's dtype. Row t of sequence b goes to position ``cache_lengths[b] + t``.
    valid_lengths : uint32 or int32 array-like [B]
        Rows t >= ``valid_lengths[b]`` are skipped; their slots do not change.
    """
    _STORE_PADDED((cache, x, valid_lengths), (), schedule, stream)
