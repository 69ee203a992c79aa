# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rotation (RoPE) and normalisation of queries and of cached keys: rope, rope_padded, qk_norm."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvarn.dispatch import Operation, Schedule

from . import checks
from .checks import layer_of
from .forms import of_padded_batches

_INSTEAD = "rotate before quantizing, with kv.ops.rope_append"


def _positions(seen: SimpleNamespace, tokens: tuple[int, ...]) -> None:
    """Check given positions and their sections."""
    sections, title = seen.attributes["mrope_section"], seen.title
    if seen.position_ids is None:
        if sections:
            raise ValueError(f"{title}: mrope_section needs position_ids, got none")
        return
    checks.array(seen, "position_ids", (max(1, len(sections)) if sections else "sections", *tokens))
    if seen.position_ids.shape[0] < 1:
        raise ValueError(f"{title}: position_ids must have at least one section, got none")
    if sections and sum(sections) != seen.freqs.shape[1] // 2:
        raise ValueError(
            f"{title}: mrope_section must add up to the {seen.freqs.shape[1] // 2} pairs of freqs_cis, got "
            f"{list(sections)}"
        )


def _check_rope(seen: SimpleNamespace) -> None:
    spec = checks.spec_of(seen)
    checks.floats_in_place(seen, spec, _INSTEAD)
    checks.declared(seen)
    checks.like(seen, "query_out", "query")
    checks.rotation(seen, min(spec.head_size, seen.query.shape[-1]))
    _positions(seen, tuple(seen.query.shape[:-2]))


_IN_PLACE = (("query_out", "query"),)
_ROPE = Operation("kv.rope", {"query": 1, "freqs": 1, "query_out": 1}, _check_rope, in_place=_IN_PLACE)


def rope(
    collection: Any,
    layer: int,
    query: Any,
    row_offsets: Any,
    freqs_cis: Any,
    *,
    interleaved: bool = True,
    position_ids: Any = None,
    mrope_section: Sequence[int] | None = None,
    query_out: Any = None,
    schedule: Schedule = None,
    stream: Any = None,
) -> Any:
    """Rotate the new tokens' queries, and their keys that are already in the cache, by their positions.

    Parameters
    ----------
    collection : KV cache collection
        Of floats, without scales; may be an MLA collection.
    layer : int
    query : f32, f16 or bf16 array-like [T, Hq, Dq]
        Dq may differ from the cache's head size: queries and keys each rotate their own last or first R columns.
    row_offsets : uint32 or int32 array-like [B + 1]
    freqs_cis : f32 array-like [positions, R]
        (cos, sin) pairs interleaved; R even. Positions outside of the table are clamped.
    interleaved : bool
        Rotate pairs (2k, 2k + 1) of the *last* R columns; otherwise pairs (k, k + R/2) of the *first* R columns.
    position_ids : uint32 or int32 array-like [sections, T] or [T], optional
        Rows of ``freqs_cis``, in place of the cache positions.
    mrope_section : sequence of int, optional
        Number of pairs that each section of ``position_ids`` rotates, in order; their sum is R/2. By default the first
        section rotates all pairs.
    query_out : array-like [T, Hq, Dq], optional
        May be ``query`` itself. By default allocated by the query's library (torch, CuPy or NumPy).

    Returns
    -------
    array-like [T, Hq, Dq]
        ``query_out``. Rows before the first offset and from the last on are not written.
    """
    given = (
        collection, layer, query, row_offsets, freqs_cis, interleaved, position_ids, mrope_section, query_out, schedule,
    )  # fmt: skip
    return _rope(_ROPE, given, stream, rank=1)


_ROPE_PADDED = Operation("kv.rope_padded", {"query": 2, "freqs": 1, "query_out": 2}, _check_rope, in_place=_IN_PLACE)


@of_padded_batches(rope)
def rope_padded(given: tuple[Any, ...], stream: Any) -> Any:
    """:func:`rope` for a padded batch.

    Parameters
    ----------
    query : f32, f16 or bf16 array-like [B, S, Hq, Dq]
        Token t of sequence b is at position ``cache_lengths[b] + t``.
    valid_lengths : uint32 or int32 array-like [B]
        Tokens t >= ``valid_lengths[b]`` are skipped: their query is not written and their key does not change.
    position_ids : uint32 or int32 array-like [sections, B, S] or [B, S], optional
        Rows of ``freqs_cis``, in place of the cache positions.
    query_out : array-like [B, S, Hq, Dq], optional
        May be ``query`` itself. By default allocated by the query's library (torch, CuPy or NumPy).

    Returns
    -------
    array-like [B, S, Hq, Dq]
        ``query_out``.
    """
    return _rope(_ROPE_PADDED, given, stream, rank=2)


def _rope(operation: Operation, given: tuple[Any, ...], stream: Any, rank: int) -> Any:
    """:func:`rope` or :func:`rope_padded` with their arguments in order; ``rank``: leading dimensions of a row."""
    collection, layer, query, table, freqs, interleaved, position_ids, mrope_section, query_out, schedule = given
    title, sections = operation.title, ()
    layer = layer_of(collection, layer, title)
    if position_ids is None:
        checks.positions_cover(freqs, collection, title)
    elif len(shape := checks.shape_of(position_ids, f"{title}: position_ids")) == rank:
        position_ids = position_ids.reshape(1, *shape)
    if query_out is None:
        query_out = checks.empty_like(query, "query_out", title)
    if mrope_section is not None:
        sections = tuple(checks.count(n, "mrope_section", title) for n in mrope_section)
    attributes = (("interleaved", bool(interleaved)), ("mrope_section", sections))
    operation((collection, layer, query, table, freqs, query_out, position_ids), attributes, schedule, stream)
    return query_out


# --- qk_norm -------------------------------------------------------------------------------------


class IndexHeads(NamedTuple):
    """The query and key heads of an indexer, which :func:`qk_norm` processes in the same launch.

    Attributes
    ----------
    collection : KV cache collection
        With the head size and number of sequences of the main collection.
    query : f32, f16 or bf16 array-like [T, Hi, D]
    q_gamma, k_gamma : f32, f16 or bf16 array-like [D]
    query_out : array-like [T, Hi, D], optional
        May be ``query`` itself. By default allocated by the query's library.
    """

    collection: Any
    query: Any
    q_gamma: Any
    k_gamma: Any
    query_out: Any = None


def _check_qk_norm(seen: SimpleNamespace) -> None:
    spec, title = checks.spec_of(seen), seen.title
    for prefix in ("", "index_"):
        collection = getattr(seen, prefix + "collection")
        if collection is None:
            continue
        found = collection.spec.cache
        checks.floats_in_place(seen, found, _INSTEAD)
        if found.head_size != spec.head_size:
            raise ValueError(
                f"{title}: index.collection must have the head size of the collection, {spec.head_size}, got "
                f"{found.head_size}"
            )
        if collection.batch_size != seen.collection.batch_size:
            raise ValueError(
                f"{title}: index.collection must have the collection's {seen.collection.batch_size} sequences, got "
                f"{collection.batch_size}"
            )
    checks.declared(seen)
    for prefix in ("", "index_") if seen.index_query is not None else ("",):
        checks.like(seen, f"{prefix}query_out", f"{prefix}query", "query")
    checks.rotation(seen, spec.head_size)


_QK_NORM = Operation(
    "kv.qk_norm",
    {
        "query": 1, "query_out": 1, "q_gamma": 0, "k_gamma": 0, "freqs": 1, "index_query": 1, "index_query_out": 1,
        "index_q_gamma": 0, "index_k_gamma": 0,
    },
    _check_qk_norm,
    written=("query_out", "index_query_out"),
    in_place=(*_IN_PLACE, ("index_query_out", "index_query")),
)  # fmt: skip


def qk_norm(
    collection: Any,
    layer: int,
    query: Any,
    row_offsets: Any,
    q_gamma: Any,
    k_gamma: Any,
    *,
    freqs_cis: Any = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    index: IndexHeads | None = None,
    query_out: Any = None,
    schedule: Schedule = None,
    stream: Any = None,
) -> Any:
    """RMS-normalise the heads of the new tokens' queries, and of their keys already in the cache, in one launch.

    Each head becomes x * rsqrt(mean(x^2) + eps) * (gamma + weight_offset), in f32. With ``freqs_cis`` it is then
    rotated as by :func:`rope`; with ``index`` the heads of an indexer are processed too.

    Parameters
    ----------
    collection : KV cache collection
        Of floats, without scales.
    layer : int
        The layer of both collections.
    query : f32, f16 or bf16 array-like [T, Hq, D]
    row_offsets : uint32 or int32 array-like [B + 1]
    q_gamma, k_gamma : f32, f16 or bf16 array-like [D]
    freqs_cis : f32 array-like [positions, R], optional
        As in :func:`rope`.
    interleaved : bool
        As in :func:`rope`; the default rotates pairs (k, k + R/2) of the first R columns.
    eps, weight_offset : float
    index : IndexHeads, optional
    query_out : array-like [T, Hq, D], optional
        May be ``query`` itself. By default allocated by the query's library (torch, CuPy or NumPy).

    Returns
    -------
    array-like [T, Hq, D], or two of them
        ``query_out``; with ``index`` a tuple of it and the indexer's. Rows before the first offset and from the last on
        are not written.
    """
    title = "kv.ops.qk_norm"
    layer = layer_of(collection, layer, title)
    if freqs_cis is not None:
        checks.positions_cover(freqs_cis, collection, title)
    if query_out is None:
        query_out = checks.empty_like(query, "query_out", title)
    attributes = (
        ("interleaved", bool(interleaved)),
        ("eps", checks.number(eps, "eps", title)),
        ("weight_offset", checks.number(weight_offset, "weight_offset", title)),
    )
    operands = (collection, layer, query, row_offsets, query_out, q_gamma, k_gamma, freqs_cis)
    if index is None:
        _QK_NORM(operands, attributes, schedule, stream)
        return query_out
    if not isinstance(index, IndexHeads):
        raise TypeError(f"{title}: index must be a kv.ops.IndexHeads, got {type(index).__name__}")
    layer_of(index.collection, layer, f"{title}: index")
    if freqs_cis is not None:
        checks.positions_cover(freqs_cis, index.collection, f"{title}: index")
    if index.query_out is None:
        index = index._replace(query_out=checks.empty_like(index.query, "index.query_out", title))
    given = (index.collection, index.query, index.query_out, index.q_gamma, index.k_gamma)
    _QK_NORM((*operands, *given), attributes, schedule, stream)
    return query_out, index.query_out
