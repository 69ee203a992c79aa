# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ragged batches without a cache: sliced_add, merge_ragged, shift_tokens, merge_attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvarn.dialect import dtypes
from kvarn.dispatch import Operation, Schedule

from . import checks

NUMBERS = ("f32", "f16", "bf16", "i8", "u8", "i16", "u16", "i32", "u32")


def _alike(seen: SimpleNamespace, *names: str) -> None:
    """Check that buffers [rows, C] have one dtype and width."""
    checks.array(seen, names[0], ("rows", "C"))
    first = getattr(seen, names[0])
    for name in names[1:]:
        checks.array(seen, name, ("rows", first.shape[1]), (first.dtype.name,))
    if first.shape[1] < 1:
        raise ValueError(f"{seen.title}: {names[0]} must have at least one column, got none")


def _check_sliced_add(seen: SimpleNamespace) -> None:
    _alike(seen, "a", "b", "out")
    checks.array(seen, "a", tuple(seen.a.shape), NUMBERS)
    checks.array(seen, "out", tuple(seen.a.shape))
    checks.array(seen, "b", tuple(seen.a.shape))


_SLICED_ADD = Operation(
    "kv.sliced_add", {"a": 1, "b": 1, "out": 1}, _check_sliced_add, in_place=(("out", "a"), ("out", "b"))
)


def sliced_add(a: Any, b: Any, end: int, out: Any = None, *, schedule: Schedule = None, stream: Any = None) -> Any:
    """a + b in the rows below ``end``, ``a`` in the other rows: adds LoRA outputs to the requests that have them.

    Parameters
    ----------
    a, b : array-like [rows, C]
        Of one dtype: f32, f16, bf16, or integers of up to 32 bits. Floats are added in f32 and rounded once.
    end : int
        May exceed the number of rows.
    out : array-like [rows, C], optional
        May be ``a`` or ``b`` itself, but must not overlap them otherwise. By default allocated by the library of ``a``
        (torch, CuPy or NumPy).

    Returns
    -------
    array-like [rows, C]
        ``out``.
    """
    title = "kv.ops.sliced_add"
    end = checks.count(end, "end", title)
    if out is None:
        out = checks.empty_like(a, "out", title)
    _SLICED_ADD((a, b, end, out), (), schedule, stream)
    return out


def _check_merge(seen: SimpleNamespace) -> None:
    _alike(seen, "a", "b", "out")
    checks.array(seen, "out", (seen.a.shape[0] + seen.b.shape[0], seen.a.shape[1]))
    checks.offsets(seen.a_offsets, None, f"{seen.title}: a_offsets")
    for name in ("b_offsets", "out_offsets"):
        checks.array(seen, name, tuple(seen.a_offsets.shape))


_MERGE = Operation("kv.merge_ragged", {"a": 1, "b": 1, "out": 1}, _check_merge, written=("out", "out_offsets"))


def merge_ragged(
    a: Any,
    a_offsets: Any,
    b: Any,
    b_offsets: Any,
    out: Any = None,
    out_offsets: Any = None,
    *,
    schedule: Schedule = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Concatenate two ragged batches sequence by sequence: each sequence has its rows of ``a``, then those of ``b``.

    Parameters
    ----------
    a, b : array-like [Ta, C] and [Tb, C], or [Ta] and [Tb]
        Of one dtype.
    a_offsets, b_offsets : uint32 or int32 array-like [B + 1]
        Rows of each sequence; rows that belong to no sequence are dropped.
    out : array-like [Ta + Tb, C] or [Ta + Tb], optional
        By default allocated by the library of ``a`` (torch, CuPy or NumPy). Rows from ``out_offsets[B]`` on are not
        written.
    out_offsets : uint32 or int32 array-like [B + 1], optional
        Allocated in the same way, like ``a_offsets``.

    Returns
    -------
    tuple of array-like
        ``out`` and ``out_offsets``.
    """
    title = "kv.ops.merge_ragged"
    shape, other = checks.shape_of(a, f"{title}: a"), checks.shape_of(b, f"{title}: b")
    if len(shape) not in (1, 2) or len(other) != len(shape):
        raise ValueError(f"{title}: a and b must have 1 or 2 dimensions, both, got shapes {list(shape)}, {list(other)}")
    if out is None:
        out = checks.empty(a, (shape[0] + other[0], *shape[1:]), None, "out", title)
    if out_offsets is None:
        out_offsets = checks.empty_like(a_offsets, "out_offsets", title)
    rows = (a, b, out) if len(shape) == 2 else tuple(x.reshape(-1, 1) for x in (a, b, out))
    _MERGE((rows[0], a_offsets, rows[1], b_offsets, rows[2], out_offsets), (), schedule, stream)
    return out, out_offsets


# Tokens move within a sequence, so the output must not be ``tokens`` itself.
_SHIFT = Operation("kv.shift_tokens", {}, checks.declared)


def shift_tokens(
    tokens: Any, row_offsets: Any, bonus: Any, out: Any = None, *, schedule: Schedule = None, stream: Any = None
) -> Any:
    """Drop each sequence's first token and append its bonus token: the input of a draft model's step.

    Parameters
    ----------
    tokens : int32 or uint32 array-like [T]
    row_offsets : uint32 or int32 array-like [B + 1]
    bonus : int32 or uint32 array-like [B]
        Not used for an empty sequence.
    out : int32 or uint32 array-like [T], optional
        Must not overlap the other operands, including ``tokens``. By default allocated by the library of ``tokens``
        (torch, CuPy or NumPy). Rows that belong to no sequence are not written.

    Returns
    -------
    array-like [T]
        ``out``.
    """
    title = "kv.ops.shift_tokens"
    if out is None:
        out = checks.empty(tokens, checks.shape_of(tokens, f"{title}: tokens"), dtypes.i32, "out", title)
    _SHIFT((tokens, row_offsets, bonus, out), (), schedule, stream)
    return out


def _check_merge_attention(seen: SimpleNamespace) -> None:
    checks.declared(seen)
    if min(seen.a.shape[1:]) < 1:
        raise ValueError(f"{seen.title}: a must have heads and a head size, got shape {list(seen.a.shape)}")
    checks.few_enough(seen.a.shape, f"{seen.title}: a")


# Several threads read a row's logarithms, so lse must not overlap them.
_MERGE_ATTENTION = Operation(
    "kv.merge_attention", {"a": 1, "a_lse": 1, "b": 1, "b_lse": 1, "out": 1, "lse": 1}, _check_merge_attention,
    in_place=(("out", "a"), ("out", "b")),
)  # fmt: skip


def merge_attention(
    a: Any,
    a_lse: Any,
    b: Any,
    b_lse: Any,
    out: Any = None,
    lse: Any = None,
    *,
    schedule: Schedule = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Combine the attention of the same queries over two sets of keys, such as the chunks of a prefill.

    Both inputs come from :func:`attention` with ``return_lse``. The result is computed in f32 and rounded once.

    Parameters
    ----------
    a, b : f32, f16 or bf16 array-like [T, Hq, D]
        Outputs, of one dtype.
    a_lse, b_lse : f32 array-like [T, Hq]
        Their logarithms of the sums of exponentials. A row with minus infinity saw no key, and its output is not read.
    out : array-like [T, Hq, D], optional
        May be ``a`` or ``b`` itself. By default allocated by the library of ``a`` (torch, CuPy or NumPy).
    lse : f32 array-like [T, Hq], optional
        Neither ``a_lse`` nor ``b_lse``. Allocated in the same way.

    Returns
    -------
    tuple of array-like
        ``out`` and ``lse`` of attention over all keys.
    """
    title = "kv.ops.merge_attention"
    if out is None:
        out = checks.empty_like(a, "out", title)
    if lse is None:
        lse = checks.empty_like(a_lse, "lse", title)
    _MERGE_ATTENTION((a, a_lse, b, b_lse, out, lse), (), schedule, stream)
    return out, lse
