# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""In-place changes of new tokens (rms_norm, radd, iadd_2m), and of the lengths between steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvarn.dispatch import Operation, Schedule

from . import checks
from .checks import layer_of


def _check_rms_norm(seen: SimpleNamespace) -> None:
    spec = checks.spec_of(seen)
    checks.floats_in_place(seen, spec)
    checks.array(seen, "gamma", ("C",), checks.FLOATS)
    size = seen.gamma.shape[0]
    if not 0 < size <= spec.head_size and size != spec.row_size:
        raise ValueError(
            f"{seen.title}: gamma must have C elements, 1 <= C <= {spec.head_size} (the head size) or "
            f"C = {spec.row_size} (heads * head size), got {size}"
        )
    checks.row_table(seen)


_RMS_NORM = Operation("kv.rms_norm", {"gamma": 0}, _check_rms_norm)


def rms_norm(
    cache: Any,
    gamma: Any,
    eps: float,
    row_offsets: Any,
    weight_offset: float = 0.0,
    *,
    multiply_before_cast: bool = True,
    total_tokens: int | None = None,
    schedule: Schedule = None,
    stream: Any = None,
) -> None:
    """Normalise the new tokens of one cache in place: x * rsqrt(mean(x^2) + eps) * (gamma + weight_offset), in f32.

    Parameters
    ----------
    cache : KV cache
        Of floats, without scales.
    gamma : f32, f16 or bf16 array-like [C]
        C <= D normalises the first C columns of each head; C = H * D the whole row.
    eps : float
    row_offsets : uint32 or int32 array-like [B + 1]
        Tokens ``[cache_lengths[b], cache_lengths[b] + row_offsets[b + 1] - row_offsets[b])`` change; cached tokens do
        not.
    weight_offset : float
    multiply_before_cast : bool
        Round to the cache's dtype once, after multiplying by the weight; otherwise also before.
    total_tokens : int, optional
        Number of new tokens of the batch, from which the grid is sized; all tokens are processed in any case. Default:
        the cache's ``max_seq_length`` for every sequence.
    """
    title = "kv.ops.rms_norm"
    if not hasattr(getattr(cache, "spec", None), "num_heads"):
        raise TypeError(f"{title}: cache must be a KV cache, got {type(cache).__name__}")
    if total_tokens is None:
        total_tokens = min(cache.max_seq_length * cache.batch_size, 2**31 - 1)
    else:
        total_tokens = checks.count(total_tokens, "total_tokens", title)
    attributes = (
        ("eps", checks.number(eps, "eps", title)),
        ("weight_offset", checks.number(weight_offset, "weight_offset", title)),
        ("multiply_before_cast", bool(multiply_before_cast)),
    )
    _RMS_NORM((cache, gamma, row_offsets, total_tokens), attributes, schedule, stream)


def _check_added(seen: SimpleNamespace) -> None:
    """Check an addend of keys and values."""
    checks.with_values(seen)
    checks.without_scales(seen)
    checks.declared(seen, apart=True)
    checks.some_offsets(seen)


_RADD = Operation("kv.radd", {"a": 1}, _check_added)


def radd(
    collection: Any,
    layer: int,
    a: Any,
    row_offsets: Any,
    batch_offset: int = 0,
    *,
    schedule: Schedule = None,
    stream: Any = None,
) -> None:
    """Add to the keys and values of the new tokens of a slice of the batch; computed in f32, rounded once.

    Parameters
    ----------
    collection : KV cache collection
        With values, without scales.
    layer : int
    a : array-like [Tn, 2 * H * D]
        The cache's dtype: the keys' half, then the values'. Row 0 belongs to token ``row_offsets[0]``.
    row_offsets : uint32 or int32 array-like [n + 1]
        The batch's offsets of the slice's sequences; the first may be above 0.
    batch_offset : int
        The first sequence of the slice.
    """
    title = "kv.ops.radd"
    layer = layer_of(collection, layer, title)
    batch_offset = checks.count(batch_offset, "batch_offset", title)
    sequences = checks.shape_of(row_offsets, f"{title}: row_offsets", 1)[0] - 1
    if sequences + batch_offset > collection.batch_size:
        raise ValueError(
            f"{title}: batch_offset + the {sequences} sequences of row_offsets must be at most the collection's "
            f"{collection.batch_size}, got batch_offset {batch_offset}"
        )
    _RADD((collection, layer, a, row_offsets, batch_offset), (), schedule, stream)


def _check_iadd_2m(seen: SimpleNamespace) -> None:
    _check_added(seen)
    if seen.kv.shape[0] % 2:
        raise ValueError(f"{seen.title}: kv must have an even number of rows, got {seen.kv.shape[0]}")


_IADD_2M = Operation("kv.iadd_2m", {"kv": 1}, _check_iadd_2m)


def iadd_2m(
    collection: Any, layer: int, kv: Any, row_offsets: Any, *, schedule: Schedule = None, stream: Any = None
) -> None:
    """Add to the keys and values of the first m new tokens of the batch (those of LoRA requests).

    Parameters
    ----------
    collection : KV cache collection
        With values, without scales.
    layer : int
    kv : array-like [2m, H * D]
        The cache's dtype: rows [0, m) are added to keys, [m, 2m) to values.
    row_offsets : uint32 or int32 array-like [n + 1]
        Offsets of the batch's first n sequences, which have at least m new tokens.
    """
    layer = layer_of(collection, layer, "kv.ops.iadd_2m")
    _IADD_2M((collection, layer, kv, row_offsets), (), schedule, stream)


_INCREMENT = Operation("kv.increment_cache_lengths", {}, checks.declared, written=("cache_lengths",))


def increment_cache_lengths(
    cache_lengths: Any, row_offsets: Any, *, schedule: Schedule = None, stream: Any = None
) -> None:
    """Add each sequence's number of new tokens to its cache length, in place, after a step has written every layer.

    Parameters
    ----------
    cache_lengths : uint32 or int32 array-like [B]
        ``cache_lengths[b] += row_offsets[b + 1] - row_offsets[b]``.
    row_offsets : uint32 or int32 array-like [B + 1]
    """
    _INCREMENT((cache_lengths, row_offsets), (), schedule, stream)
