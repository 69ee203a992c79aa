# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The arguments of attention kernels as one struct: an operation's operands outside of a kernel, its values inside."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from kvarn import dsl as kv

from .case import Case, Division, caches_of, start_of
from .queries import Queries, extents_of, queries_of
from .softmax import arrays_read

# Operands whose names differ from those of the arguments.
_OPERANDS = {
    "slopes": "alibi_slopes", "lists": "indices", "list_counts": "topk_lengths", "chunk_keys": "key",
    "chunk_values": "value", "chunk_offsets": "buffer_row_offsets", "chunk_starts": "cache_offsets",
}  # fmt: skip


@dataclass(frozen=True)
class AttentionArguments:
    """What an attention reads and writes. A field is None, and no kernel argument, if the operation lacks the operand.

    T query rows of Hq heads in a ragged batch of B sequences, or B x S in a padded one; D query columns, V value
    columns; H KV heads.

    Attributes
    ----------
    collection, layer : collection, i32
        Keys and values of a cache's layer; None where ``keys`` and ``values`` are given.
    keys, values : operand
    query : [T, Hq, D] or [B, S, Hq, D]
    extents : i32 [B + 1] or [B]
        Row offsets of a ragged batch, valid lengths of a padded one.
    kv_offsets : i32 [B + 1]
        Offsets of a sequence's new keys, if their number differs from that of its query rows.
    scale : f32
    out : [T, Hq, V] or [B, S, Hq, V]
    partials, counters : i8 [bytes]
        Of a launch: the partial results, and a count of the finished ones.
    max_units : i32
        Of a launch: the most work units of a batch.
    few : i32
        Of a launch that divides a batch: the most new tokens of the sequences that a kernel of kind decode has.
    key_map : TMA descriptor
        Of a launch: a descriptor of the latent rows.
    sinks, slopes : f32 [Hq]
        An extra logit per head; the ALiBi slope per head.
    lse, prior_lse : f32 [T, Hq] or [B, S, Hq]
        Natural log-sum-exp of the result, and of a result over other keys.
    prior : f32, as ``out``
        A normalised result over other keys.
    pages, page_counts : i32 [B, H, K], i32 [B, H]
        Lists of pages per sequence and KV head (:mod:`chosen_pages`).
    array0, ..., array3
        The arrays of the score function, then of the mask function.
    lists, list_counts : i32 [T, K], i32 [T]
        Lists of pool rows per query row.
    block_mask : i32 [tiles, 1 or H, 1 + most]
        Lists of key tiles per tile of query rows (:mod:`key_tiles`), written by ``kv.block_mask``.
    chunk_keys, chunk_values : [rows, Hq, columns], [rows, Hq, V]
        Decompressed keys, without their last columns, and values of an MLA prefill's chunk.
    chunk_offsets, chunk_starts : i32 [B + 1], i32 [B]
        A sequence's rows in these buffers, and the token of the first row.
    """

    collection: Any = None
    layer: Any = None
    keys: Any = None
    values: Any = None
    query: Any = None
    extents: Any = None
    kv_offsets: Any = None
    scale: Any = None
    out: Any = None
    partials: Any = None
    counters: Any = None
    max_units: Any = None
    few: Any = None
    key_map: Any = None
    sinks: Any = None
    lse: Any = None
    slopes: Any = None
    prior: Any = None
    prior_lse: Any = None
    pages: Any = None
    page_counts: Any = None
    array0: Any = None
    array1: Any = None
    array2: Any = None
    array3: Any = None
    lists: Any = None
    list_counts: Any = None
    block_mask: Any = None
    chunk_keys: Any = None
    chunk_values: Any = None
    chunk_offsets: Any = None
    chunk_starts: Any = None

    @staticmethod
    def of(op: Any) -> AttentionArguments:
        """The operands of an attention over a collection, operands, latent rows or an MLA chunk."""
        given = {f.name: getattr(op, _OPERANDS.get(f.name, f.name), None) for f in fields(AttentionArguments)}
        return AttentionArguments(**{**given, "extents": extents_of(op)})

    def without(self, *names: str) -> AttentionArguments:
        """The arguments of a kernel that does not read these fields."""
        return replace(self, **dict.fromkeys(names))

    # --- inside kernels ----------------------------------------------------------------------------

    @property
    def source(self) -> Any:
        """The handle that lengths are read from: the collection or the key operand."""
        return self.collection or self.keys

    @property
    def arrays(self) -> list[Any]:
        """The arrays, in the form that functions read."""
        return arrays_read(self.array0, self.array1, self.array2, self.array3)

    def queries(self, case: Case, most: int | None = None, many: bool = True) -> Queries:
        """The query rows of the sequences, which have at most ``most`` rows each.

        ``many``: which sequences the kernel has, in a launch that divides the batch.
        """
        rows, lists = self.out if self.query is None else self.query, (self.lists, self.list_counts)
        division = None if self.few is None else Division(self.few, many)
        return queries_of(case.padded, self.extents, rows, self.kv_offsets, *lists, most, division)

    def caches(self, case: Case) -> tuple[Any, Any]:
        """The sources of keys and values."""
        return caches_of(case, self.collection, self.layer, self.keys, self.values)

    def chunk_rows(self, b: Any) -> tuple[Any, Any]:
        """(first row, rows) of a sequence in a chunk's buffers, clamped to the buffers."""
        held = kv.math.min(self.chunk_keys.shape[0], self.chunk_values.shape[0])
        first = kv.math.clamp(self.chunk_offsets[b], 0, held)
        return first, kv.math.clamp(self.chunk_offsets[b + 1], first, held) - first

    def chunk_start(self, b: Any) -> Any:
        """The token of the first row of a sequence's chunk."""
        return kv.math.max(self.chunk_starts[b], 0)

    def start(self, case: Case, queries: Queries, b: Any) -> tuple[Any, Any]:
        """(position of its first query among the keys, keys) of a sequence."""
        if self.chunk_keys is not None:
            return self.collection.cache_length(b) - self.chunk_start(b), self.chunk_rows(b)[1]
        return start_of(case, self.source, self.values, queries, b)
