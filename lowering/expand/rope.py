# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.rope_append: rotary embedding of query and key, with the append of key and value.

The heads of query, key and value of a token are one sequence of pieces, which the threads of a block share. A piece is
a unit of a rotated head, a vector of a value; where heads are normalised or quantized a group of threads shares one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.layout import CacheSpec, align_up

from . import expands
from .base import Expansion
from .common import (
    CachedHead,
    Group,
    Head,
    NormalHead,
    Rows,
    Work,
    begin,
    converted,
    head_and_lane,
    holds,
    inverse_rms,
    most_lanes,
    row_alignment,
    sequence_of,
    single,
    starts_early,
    vector_width,
    whole_warps,
)  # fmt: skip
from .quantize import Quantizer
from .rotation import Angles, Rotation, TurnedHead


@dataclass(frozen=True)
class Pieces:
    """Pieces of a token: those of its query heads, then of its key heads, then of its value heads.

    ``query``, ``key`` and ``value`` are the pieces of one head; each kind begins at a multiple of ``multiple``.
    """

    query: int
    key: int
    value: int
    query_heads: int
    heads: int
    multiple: int

    @property
    def first_key(self) -> int:
        return align_up(self.query_heads * self.query, self.multiple)

    @property
    def first_value(self) -> int:
        return self.first_key + align_up(self.heads * self.key, self.multiple)

    @property
    def all(self) -> int:
        return self.first_value + align_up(self.heads * self.value, self.multiple)


@dataclass(frozen=True)
class Norm:
    """RMS norm of a head before its rotation, by a group of threads; ``eps`` None: there is none."""

    eps: float | None
    size: int
    rows: Rows
    group: Group
    weight_offset: float = 0.0

    @kv.func
    def of(self, head: Any, gamma: Any, lane: Any) -> Any:
        """A head, normalised when there is an eps. Every thread of a warp comes here."""
        if self.eps is None:
            return head
        scale = inverse_rms(head, self.size, self.rows.width, self.eps, self.group, lane)
        return NormalHead(head, scale, gamma, self.rows, self.weight_offset)


@kv.func
def turn(rotation: Rotation, first: Any, step: int, angles: Angles, source: Any, target: Any) -> None:
    """Rotate every ``step``-th unit of a head from the first on."""
    if step == rotation.units:
        rotation.unit(first, angles, source.read, target.write)
    else:
        for unit in range(first, rotation.units, step):
            rotation.unit(unit, angles, source.read, target.write)


def rope_append_kernel(
    spec: CacheSpec, work: Work, pieces: Pieces, rows: Rows, rotation: Rotation, norms: tuple[Norm, Norm],
    quantizer: Quantizer | None, early: bool,
) -> Any:  # fmt: skip
    """``norms``: of queries and keys. ``quantizer`` None: a cache without scales."""

    @kv.kernel
    def rope_append(collection, layer: kv.i32, query, key, value, row_offsets, freqs, query_out, q_gamma, k_gamma):
        begin(early)
        token, first = work.place()
        if (token < query.shape[0]) & (first < work.pieces):
            b, inside, i = sequence_of(row_offsets, token, query.shape[0])
            if inside:
                position = collection.cache_length(b) + i
                keys, values = collection.get_key_cache(layer), collection.get_value_cache(layer)
                angles = Angles(freqs, rows, (position,))
                kept = holds(collection, position)
                for piece in range(first, work.pieces, work.step):
                    if piece < pieces.first_key:
                        h, part, active = head_and_lane(piece, pieces.query_heads, pieces.query)
                        head = norms[0].of(Head(rows, query, token, h), q_gamma, part)
                        if active:
                            turn(rotation, part, pieces.query, angles, head, Head(rows, query_out, token, h))
                    elif kept and piece < pieces.first_value:
                        h, part, active = head_and_lane(piece - pieces.first_key, pieces.heads, pieces.key)
                        head = norms[1].of(Head(rows, key, token, h), k_gamma, part % norms[1].group.lanes)
                        if quantizer is None:
                            if active:
                                turn(rotation, part, pieces.key, angles, head, CachedHead(keys, b, position, h))
                        else:
                            turned = TurnedHead(rotation, angles, head)
                            held = quantizer.read(turned.read, part)
                            quantizer.write(keys, b, h, position, part, active, held, turned.read)
                    elif kept:
                        h, part, active = head_and_lane(piece - pieces.first_value, pieces.heads, pieces.value)
                        if quantizer is None:
                            if active:
                                loaded = rows.load(value, token, h, part * rows.width)
                                values.store(b, h, position, part * rows.width, single(converted(loaded, spec.dtype)))
                        else:
                            source = Head(rows, value, token, h)
                            held = quantizer.read(source.read, part)
                            quantizer.write(values, b, h, position, part, active, held, source.read)

    return rope_append


@expands("kv.rope_append")
def rope_append(op: Any, at: Expansion) -> None:
    spec, eps = at.spec(op.collection), None if op.q_gamma is None else op.eps.value
    types = (at.dtype(op.query), at.dtype(op.key), spec.dtype)
    rows = Rows(vector_width(spec.head_size, types=types), row_alignment(at))
    rotation = Rotation.of(spec.head_size, at.static_dim(op.freqs, 1), op.interleaved.value, most_lanes(types))
    quantizer = None
    if spec.quantized:
        quantizer = Quantizer.of(spec, rotation.chunk_width(spec.granularity, most=most_lanes(types)), at)
    # A head's threads: one a unit; a group, where they normalise together; the quantizer's, which normalise for each
    # granule.
    group = Group.covering(at, rotation.units)
    norm = Norm(eps, spec.head_size, rows, group)
    of_head = rotation.units if eps is None else group.lanes
    if quantizer is None:
        norms, of_key, of_value = (norm, norm), of_head, spec.head_size // rows.width
    else:
        norms, of_key, of_value = (norm, replace(norm, group=quantizer.group)), quantizer.threads, quantizer.threads
    together = eps is not None or quantizer is not None
    pieces = Pieces(
        of_head, of_key, of_value, at.static_dim(op.query, 1), spec.num_heads, whole_warps(at, 1) if together else 1
    )
    work = Work.of(at, pieces.all)
    early = starts_early(at)
    kernel = rope_append_kernel(spec, work, pieces, rows, rotation, norms, quantizer, early)
    gammas = [op.freqs, op.freqs] if eps is None else [op.q_gamma, op.k_gamma]  # not looked at without normalisation
    args = [op.collection, op.layer, op.query, op.key, op.value, op.row_offsets, op.freqs, op.query_out, *gammas]
    at.launch(kernel, args, (work.blocks(at.dim(op.query, 0)), 1, 1), (work.threads, 1, 1), programmatic=early)
