# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Index tables of a step: row offsets of cached tokens, sparse indices, chunks of an MLA prefill."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from kvarn.dialect import dtypes
from kvarn.dispatch import Operation, Schedule

from . import checks

_CACHE_ROW_OFFSETS = Operation("kv.cache_row_offsets", {}, checks.declared)


def cache_row_offsets(
    row_offsets: Any, cache_lengths: Any, out: Any = None, *, schedule: Schedule = None, stream: Any = None
) -> Any:
    """Row offsets of the concatenation of all sequences, each with its cached and then its new tokens.

    Parameters
    ----------
    row_offsets : uint32 or int32 array-like [B + 1]
    cache_lengths : uint32 or int32 array-like [B]
    out : uint32 or int32 array-like [B + 1], optional
        By default allocated like ``row_offsets`` by its library (torch, CuPy or NumPy).

    Returns
    -------
    array-like [B + 1]
        ``out[n]``: the sum over j < n of ``cache_lengths[j] + row_offsets[j + 1] - row_offsets[j]``.
    """
    if out is None:
        out = checks.empty_like(row_offsets, "out", "kv.ops.cache_row_offsets")
    _CACHE_ROW_OFFSETS((row_offsets, cache_lengths, out), (), schedule, stream)
    return out


def _check_remap(seen: SimpleNamespace) -> None:
    checks.array(seen, "logical", ("R", "Ks"))
    checks.array(seen, "out", tuple(seen.logical.shape))
    checks.array(seen, "lookup_table", ("B", "columns"))
    checks.offsets(seen.row_offsets, None, f"{seen.title}: row_offsets")


_REMAP = Operation("kv.remap_sparse_indices", {}, _check_remap, in_place=(("out", "logical"),))


def remap_sparse_indices(
    logical: Any,
    row_offsets: Any,
    lookup_table: Any,
    page_size: int,
    invalid_id: int,
    out: Any = None,
    *,
    schedule: Schedule = None,
    stream: Any = None,
) -> Any:
    """Convert token positions to ``page * page_size + slot``, the index format of sparse attention.

    Parameters
    ----------
    logical : int32 array-like [R, Ks]
        Token positions in the row's sequence; negative ones are passed through.
    row_offsets : uint32 or int32 array-like [B + 1]
        Rows of sequence b: ``row_offsets[b]`` to ``row_offsets[b + 1]``.
    lookup_table : uint32 or int32 array-like [B, columns]
    page_size : int
    invalid_id : int
        The first invalid page id. The index of a token is -1 if its page id is invalid, its column is past the table,
        or its row belongs to no sequence.
    out : int32 array-like [R, Ks], optional
        May be ``logical`` itself. By default allocated by the library of ``logical`` (torch, CuPy or NumPy).

    Returns
    -------
    array-like [R, Ks]
        ``out``, int32.
    """
    title = "kv.ops.remap_sparse_indices"
    page_size = checks.count(page_size, "page_size", title, least=1)
    invalid_id = checks.count(invalid_id, "invalid_id", title)
    if out is None:
        out = checks.empty(logical, checks.shape_of(logical, f"{title}: logical"), dtypes.i32, "out", title)
    _REMAP((logical, row_offsets, lookup_table, invalid_id, out), (("page_size", page_size),), schedule, stream)
    return out


class MlaPrefillPlan(NamedTuple):
    """The chunks of an MLA prefill; all arrays are int32.

    Attributes
    ----------
    buffer_row_offsets : array-like [C, B + 1]
        Rows of each sequence in the chunk's buffer.
    cache_offsets : array-like [C, B]
        Tokens of each sequence in earlier chunks.
    buffer_lengths : array-like [C]
        Tokens of each chunk; -1 past the last chunk.
    """

    buffer_row_offsets: Any
    cache_offsets: Any
    buffer_lengths: Any


_PLAN = Operation(
    "kv.mla_prefill_plan", {}, checks.declared, written=("buffer_row_offsets", "cache_offsets", "buffer_lengths")
)


def mla_prefill_plan(
    row_offsets: Any,
    cache_lengths: Any,
    buffer_tokens: int,
    max_chunks: int,
    out: MlaPrefillPlan | None = None,
    *,
    schedule: Schedule = None,
    stream: Any = None,
) -> MlaPrefillPlan:
    """Divide the cached and new tokens of all sequences, concatenated, into chunks of ``buffer_tokens`` tokens.

    Parameters
    ----------
    row_offsets : uint32 or int32 array-like [B + 1]
    cache_lengths : uint32 or int32 array-like [B]
    buffer_tokens : int
        Tokens per chunk.
    max_chunks : int
        C, the number of chunks in the plan.
    out : MlaPrefillPlan, optional
        Output arrays. By default allocated by the library of ``row_offsets`` (torch, CuPy or NumPy).

    Returns
    -------
    MlaPrefillPlan
    """
    title = "kv.ops.mla_prefill_plan"
    buffer_tokens = checks.count(buffer_tokens, "buffer_tokens", title, least=1)
    chunks = checks.count(max_chunks, "max_chunks", title, least=1)
    (batch,) = checks.shape_of(cache_lengths, f"{title}: cache_lengths", 1)
    if out is None:
        shapes = ((chunks, batch + 1), (chunks, batch), (chunks,))
        out = MlaPrefillPlan(*(checks.empty(row_offsets, s, dtypes.i32, "out", title) for s in shapes))
    _PLAN((row_offsets, cache_lengths, *out), (("buffer_tokens", buffer_tokens),), schedule, stream)
    return out
