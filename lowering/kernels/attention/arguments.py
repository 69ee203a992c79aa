# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The arguments of attention kernels, as one struct: an operation's operands outside of a kernel, its values inside."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from kvarn import dsl as kv

from .case import Case, Division, caches_of, start_of
from .queries import Queries, extents_of, queries_of
from .softmax import arrays_read

# The operands of operations that have another name than the arguments.
_OPERANDS = {
    "slopes": "alibi_slopes", "lists": "indices", "list_counts": "topk_lengths", "chunk_keys": "key",
    "chunk_values": "value", "chunk_offsets": "buffer_row_offsets", "chunk_starts": "cache_offsets",
}  # fmt: skip


@dataclass(frozen=True)
class AttentionArguments:
    """What an attention reads and writes. An operand that an operation does not have is None, and no kernel's argument.

    T query rows of Hq heads in a ragged batch of B sequences, or B x S in a padded one; D columns of a query, V of a
    value; H KV heads.

    Attributes
    ----------
    collection, layer : collection, i32
        Keys and values of a cache's layer; None where ``keys`` and ``values`` are given.
    keys, values : operand
    query : [T, Hq, D] or [B, S, Hq, D]
    extents : i32 [B + 1] or [B]
        Row offsets of a ragged batch, valid lengths of a padded one.
    kv_offsets : i32 [B + 1]
        Of a sequence's new keys, where they are not as many as its query rows.
    scale : f32
    out : [T, Hq, V] or [B, S, Hq, V]
    partials, counters : i8 [bytes]
        Of a launch: partial results, and how many of them there are.
    max_units : i32
        Of a launch: work units that a batch is cut into, at most.
    few : i32
        Of a launch that divides a batch: new tokens up to which a kernel of kind decode has a sequence.
    key_map : TMA descriptor
        Of a launch: of latent rows.
    sinks, slopes : f32 [Hq]
        A logit without a value per head; ALiBi's slope per head.
    lse, prior_lse : f32 [T, Hq] or [B, S, Hq]
        Natural log-sum-exp: the result's; that of a result over other keys.
    prior : f32, as ``out``
        A normalised result over other keys.
    pages, page_counts : i32 [B, H, K], i32 [B, H]
        Which pages a sequence and KV head sees (:mod:`chosen_pages`).
    array0, ..., array3
        What the functions of the score and of the mask read, first the score's.
    lists, list_counts : i32 [T, K], i32 [T]
        Rows of the pool that a query row sees.
    block_mask : i32 [tiles, 1 or H, 1 + most]
        Tiles of keys that a tile of query rows sees (:mod:`key_tiles`); what ``kv.block_mask`` writes.
    chunk_keys, chunk_values : [rows, Hq, columns], [rows, Hq, V]
        Decompressed keys, but for their last columns, and values of a prefill's chunk over latent rows.
    chunk_offsets, chunk_starts : i32 [B + 1], i32 [B]
        Of a sequence, its rows in these buffers, and the token that the first of them is.
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
        """The operands of an attention over a collection, over operands, over latent rows, or over a chunk of these."""
        given = {f.name: getattr(op, _OPERANDS.get(f.name, f.name), None) for f in fields(AttentionArguments)}
        return AttentionArguments(**{**given, "extents": extents_of(op)})

    def without(self, *names: str) -> AttentionArguments:
        """The arguments of a kernel that does not read these."""
        return replace(self, **dict.fromkeys(names))

    # --- inside kernels ----------------------------------------------------------------------------

    @property
    def source(self) -> Any:
        """What lengths are asked of: the collection or the keys' operand."""
        return self.collection or self.keys

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the functions, as these read them."""
        return arrays_read(self.array0, self.array1, self.array2, self.array3)

    def queries(self, case: Case, most: int | None = None, many: bool = True) -> Queries:
        """Where the query rows of the sequences lie; no sequence has more than ``most``.

        ``many``: of a batch that is divided, which sequences the kernel has.
        """
        rows, lists = self.out if self.query is None else self.query, (self.lists, self.list_counts)
        division = None if self.few is None else Division(self.few, many)
        return queries_of(case.padded, self.extents, rows, self.kv_offsets, *lists, most, division)

    def caches(self, case: Case) -> tuple[Any, Any]:
        """Where keys and values come from."""
        return caches_of(case, self.collection, self.layer, self.keys, self.values)

    def chunk_rows(self, b: Any) -> tuple[Any, Any]:
        """(first row, rows) of a sequence in the buffers of a chunk: no offset leads out of them."""
        held = kv.math.min(self.chunk_keys.shape[0], self.chunk_values.shape[0])
        first = kv.math.clamp(self.chunk_offsets[b], 0, held)
        return first, kv.math.clamp(self.chunk_offsets[b + 1], first, held) - first

    def chunk_start(self, b: Any) -> Any:
        """The token that the first row of a sequence's chunk is."""
        return kv.math.max(self.chunk_starts[b], 0)

    def start(self, case: Case, queries: Queries, b: Any) -> tuple[Any, Any]:
        """(position of its first query among the keys, keys) of a sequence."""
        if self.chunk_keys is not None:
            return self.collection.cache_length(b) - self.chunk_start(b), self.chunk_rows(b)[1]
        return start_of(case, self.source, self.values, queries, b)
