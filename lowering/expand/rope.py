# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.rope_append and kv.rope: rotary embedding of query and key, with the append of key and value.

The heads of query, key and value of a token are one sequence of pieces, which the threads of a block share. A piece is a
unit of a rotated head, a vector of a value; a whole head where it is normalised first; a granule where the cache quantizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.layout import CacheSpec

from . import expands
from .base import Expansion
from .common import (
    CachedHead, Head, NormalHead, Rows, Work, converted, holds, inverse_rms, most_lanes, row_alignment, sequence_of, single,
    vector_width,
)  # fmt: skip
from .quantize import Quantizer
from .rotation import Angles, Rotation, TurnedHead


@dataclass(frozen=True)
class Pieces:
    """Pieces of a token: of each query head, key head and value head, and all of them in this order."""

    query: int
    key: int
    value: int
    query_heads: int
    heads: int

    @property
    def first_key(self) -> int:
        return self.query_heads * self.query

    @property
    def first_value(self) -> int:
        return self.first_key + self.heads * self.key

    @property
    def all(self) -> int:
        return self.first_value + self.heads * self.value


@kv.func
def normal(head: Head, gamma: Any, width: int, size: int, eps: float | None) -> Any:
    """A head, normalised when there is an eps."""
    if eps is None:
        return head
    return NormalHead(head, inverse_rms(head, size, width, eps), gamma)


@kv.func
def turn(rotation: Rotation, unit: Any, whole: bool, angles: Angles, source: Any, target: Any) -> None:
    """Rotate a unit of a head, or the whole head."""
    if whole:
        for each in range(0, rotation.units):
            rotation.unit(each, angles, source.read, target.write)
    else:
        rotation.unit(unit, angles, source.read, target.write)


def rope_append_kernel(
    spec: CacheSpec, work: Work, pieces: Pieces, rows: Rows, rotation: Rotation, quantizer: Quantizer | None, eps: float | None
) -> Any:
    """``eps`` None: no normalisation. ``quantizer`` None: a cache without scales."""

    @kv.kernel
    def rope_append(collection, layer: kv.i32, query, key, value, row_offsets, freqs, query_out, q_gamma, k_gamma):
        token, first = work.place()
        if (token < query.shape[0]) & (first < work.pieces):
            b, inside, i = sequence_of(row_offsets, token)
            if inside:
                position = collection.cache_length(b) + i
                keys, values = collection.get_key_cache(layer), collection.get_value_cache(layer)
                angles = Angles(freqs, rows, (position,))
                kept = holds(collection, position)
                for piece in range(first, work.pieces, work.step):
                    if piece < pieces.first_key:
                        h, unit = piece // pieces.query, piece % pieces.query
                        head = normal(Head(rows, query, token, h), q_gamma, rows.width, spec.head_size, eps)
                        turn(rotation, unit, eps is not None, angles, head, Head(rows, query_out, token, h))
                    elif kept and piece < pieces.first_value:
                        h, part = (piece - pieces.first_key) // pieces.key, (piece - pieces.first_key) % pieces.key
                        head = normal(Head(rows, key, token, h), k_gamma, rows.width, spec.head_size, eps)
                        if quantizer is None:
                            turn(rotation, part, eps is not None, angles, head, CachedHead(keys, b, position, h))
                        else:
                            quantizer.granule(keys, b, h, position, part, TurnedHead(rotation, angles, head).read)
                    elif kept:
                        h, part = (piece - pieces.first_value) // pieces.value, (piece - pieces.first_value) % pieces.value
                        if quantizer is None:
                            loaded = rows.load(value, token, h, part * rows.width)
                            values.store(b, h, position, part * rows.width, single(converted(loaded, spec.dtype)))
                        else:
                            quantizer.granule(values, b, h, position, part, Head(rows, value, token, h).read)

    return rope_append


@expands("kv.rope_append")
def rope_append(op: Any, at: Expansion) -> None:
    spec, eps = at.spec(op.collection), None if op.q_gamma is None else op.eps.value
    types = (at.dtype(op.query), at.dtype(op.key), spec.dtype)
    rows = Rows(vector_width(spec.head_size, types=types), row_alignment(at))
    rotation = Rotation.of(spec.head_size, at.static_dim(op.freqs, 1), op.interleaved.value, most_lanes(types))
    of_head = rotation.units if eps is None else 1
    granules = spec.num_scales
    pieces = Pieces(
        of_head, granules if spec.quantized else of_head, granules if spec.quantized else spec.head_size // rows.width,
        at.static_dim(op.query, 1), spec.num_heads,
    )  # fmt: skip
    work = Work.of(at, pieces.all)
    quantizer = None
    if spec.quantized:
        quantizer = Quantizer.of(spec, rotation.chunk_width(spec.granularity, most=most_lanes(types)), at)
    kernel = rope_append_kernel(spec, work, pieces, rows, rotation, quantizer, eps)
    gammas = [op.freqs, op.freqs] if eps is None else [op.q_gamma, op.k_gamma]  # not looked at without normalisation
    args = [op.collection, op.layer, op.query, op.key, op.value, op.row_offsets, op.freqs, op.query_out, *gammas]
    at.launch(kernel, args, (work.blocks(at.dim(op.query, 0)), 1, 1), (work.threads, 1, 1))


# --- rotating in place -----------------------------------------------------------------------------


def rope_kernel(
    work: Work, query_heads: int, rows: Rows, of_query: Rotation, of_key: Rotation, given: bool, sections: tuple[int, ...]
) -> Any:
    """``given``: positions come from position_ids; ``sections``: pairs that each of its rows turns."""
    first_key = query_heads * of_query.units

    @kv.kernel
    def rope(collection, layer: kv.i32, query, row_offsets, freqs, query_out, position_ids):
        token, first = work.place()
        if (token < query.shape[0]) & (first < work.pieces):
            b, inside, i = sequence_of(row_offsets, token)
            if inside:
                position = collection.cache_length(b) + i
                keys = collection.get_key_cache(layer)
                positions = [position]
                if given:
                    positions = [position_ids[s, token] for s in kv.static(range(max(1, len(sections))))]
                angles = Angles(freqs, rows, tuple(positions), sections)
                kept = holds(collection, position)
                for piece in range(first, work.pieces, work.step):
                    if piece < first_key:
                        h, unit = piece // of_query.units, piece % of_query.units
                        turn(of_query, unit, False, angles, Head(rows, query, token, h), Head(rows, query_out, token, h))
                    elif kept:
                        h, unit = (piece - first_key) // of_key.turning, (piece - first_key) % of_key.turning
                        head = CachedHead(keys, b, position, h)
                        turn(of_key, unit, False, angles, head, head)

    return rope


@expands("kv.rope")
def rope(op: Any, at: Expansion) -> None:
    spec, query_heads = at.spec(op.collection), at.static_dim(op.query, 1)
    sections, given = tuple(op.mrope_section), op.position_ids is not None
    types = (at.dtype(op.query), spec.dtype)
    # Sections divide the pairs anywhere: each pair finds its own.
    most = most_lanes(types) if len(sections) < 2 else (2 if op.interleaved.value else 1)
    turned, interleaved = at.static_dim(op.freqs, 1), op.interleaved.value
    of_query = Rotation.of(at.static_dim(op.query, 2), turned, interleaved, most)
    of_key = Rotation.of(spec.head_size, turned, interleaved, most)
    rows = Rows(1, row_alignment(at))
    # The plain units of keys stay as they are.
    work = Work.of(at, query_heads * of_query.units + spec.num_heads * of_key.turning)
    kernel = rope_kernel(work, query_heads, rows, of_query, of_key, given, sections)
    ids = op.position_ids if given else op.freqs  # not looked at without
    args = [op.collection, op.layer, op.query, op.row_offsets, op.freqs, op.query_out, ids]
    at.launch(kernel, args, (work.blocks(at.dim(op.query, 0)), 1, 1), (work.threads, 1, 1))
