# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.rope, kv.rope_padded and kv.qk_norm: queries, and keys in the cache, are normalised and rotated.

The heads of a token's query and key are one sequence of items, which the threads of a block share. Without a norm an
item is one unit of a rotation, and dims of a key that are not rotated are not touched; with a norm, the threads of a
group first compute their head's mean square, and all of them have read it before any of them writes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from kvarn import dsl as kv

from .. import expands
from ..append.head_writer import Norm, TokenItems, rotate
from ..base import Expansion
from ..common import (
    CachedHead,
    Group,
    Head,
    Rows,
    Work,
    converted,
    head_and_lane,
    in_range,
    most_lanes,
    row_alignment,
    sequence_of,
    vector_width,
    whole_warps,
)
from .rotation import Angles, Rotation


@dataclass(frozen=True)
class PaddedHead(Head):
    """One head of a token in a padded buffer [B, Smax, heads, size]; the token is (sequence, number)."""

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from dim d up, as f32."""
        return kv.f32(self.rows.load(self.buffer, *self.token, self.head, d, width=n))

    @kv.func
    def write(self, d: Any, x: Any) -> None:
        """Write f32 elements from dim d up, converted."""
        self.rows.store(self.buffer, *self.token, self.head, d, value=converted(x, self.buffer.dtype))


@dataclass(frozen=True)
class Arguments:
    """What the kernels read and write; None for absent operands.

    Attributes
    ----------
    collection, layer : collection, i32
    query, query_out : [T, Hq, D] or [B, S, Hq, D]
    lengths : i32 [B + 1] or [B]
        Row offsets, or valid lengths of a padded batch.
    freqs : f32 [positions, D]
        Cosines and sines.
    position_ids : i32 [T], [B, S] or [sections, ...]
    q_gamma, k_gamma : f32 [D]
    """

    collection: Any
    layer: kv.i32
    query: Any
    lengths: Any
    freqs: Any
    query_out: Any
    position_ids: Any = None
    q_gamma: Any = None
    k_gamma: Any = None


@dataclass(frozen=True)
class IndexHeads:
    """The fields of :class:`Arguments` that an indexer has for itself."""

    collection: Any
    query: Any
    query_out: Any
    q_gamma: Any
    k_gamma: Any

    def beside(self, a: Arguments) -> Arguments:
        """The arguments with the indexer's heads in place of the attention's."""
        return replace(a, **{f.name: getattr(self, f.name) for f in fields(self)})


@dataclass(frozen=True)
class InPlaceRotation:
    """How the heads of a token are processed.

    Attributes
    ----------
    work : Work
    items : TokenItems
        Items per token, without values.
    rows : Rows
        Access to queries, gammas and angles.
    rotations, norms : of queries, of keys
    given : bool
        Whether positions come from position_ids.
    sections : tuple of int
        Pairs that each row of position_ids rotates.
    """

    work: Work
    items: TokenItems
    rows: Rows
    rotations: tuple[Rotation, Rotation]
    norms: tuple[Norm, Norm]
    given: bool = False
    sections: tuple[int, ...] = ()

    @staticmethod
    def of(
        at: Expansion, collection: Any, query: Any, freqs: Any, *, interleaved: bool, eps: float | None = None,
        weight_offset: float = 0.0, given: bool = False, sections: tuple[int, ...] = (),
    ) -> InPlaceRotation:  # fmt: skip
        """For the operands of an operation; without rotation freqs is None, without norm eps is None."""
        spec, rank = at.spec(collection), len(query.type.shape)
        query_heads, query_size = at.static_dim(query, rank - 2), at.static_dim(query, rank - 1)
        types = (at.dtype(query), spec.dtype)
        # Section bounds may be at any pair, so each pair looks up its own section.
        most = most_lanes(types) if len(sections) < 2 else (2 if interleaved else 1)
        rotated = 0 if freqs is None else at.static_dim(freqs, 1)
        rotations = tuple(Rotation.of(size, rotated, interleaved, most) for size in (query_size, spec.head_size))
        rows = Rows(vector_width(query_size, spec.head_size, types=types), row_alignment(at.op))
        groups = [Group.covering(at, r.units) for r in rotations]
        norms = tuple(Norm(eps, r.size, rows, g, weight_offset) for r, g in zip(rotations, groups, strict=True))
        if eps is None:
            items = TokenItems(rotations[0].units, rotations[1].rotated_units, 0, query_heads, spec.num_heads, 1)
        else:
            items = TokenItems(groups[0].lanes, groups[1].lanes, 0, query_heads, spec.num_heads, whole_warps(at, 1))
        return InPlaceRotation(Work.of(at, items.all), items, rows, rotations, norms, given, sections)  # type: ignore[arg-type]

    @kv.func
    def positions(self, position: Any, position_ids: Any, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """Rows of the table of angles for a token: one, or one per section."""
        if not self.given:
            return (position,)
        return tuple(position_ids[(s, *row)] for s in range(max(1, len(self.sections))))

    @kv.func
    def token(
        self, a: Arguments, b: Any, position: Any, row: tuple[Any, ...], source: Any, target: Any, first: Any
    ) -> None:
        """Process this thread's items of one token; ``source`` and ``target`` give the query's heads by number.

        ``row`` is the index of its entries in position_ids.
        """
        angles = Angles(a.freqs, self.rows, self.positions(position, a.position_ids, row), self.sections)
        keys = a.collection.get_key_cache(a.layer)
        kept = in_range(a.collection, position)
        items = self.items
        for item in range(first, self.work.items, self.work.step):
            if item < items.first_key:
                h, part, active = head_and_lane(item, items.query_heads, items.query)
                head = self.norms[0].of(source(h), a.q_gamma, part)
                if active:
                    rotate(self.rotations[0], part, items.query, angles, head, target(h))
            elif kept:
                h, part, active = head_and_lane(item - items.first_key, items.heads, items.key)
                cached = CachedHead(keys, b, position, h)
                head = self.norms[1].of(cached, a.k_gamma, part)
                if active:
                    if self.norms[1].eps is None:
                        self.rotations[1].unit(part, angles, head.read, cached.write)
                    else:
                        rotate(self.rotations[1], part, items.key, angles, head, cached)

    @kv.func
    def ragged(self, a: Arguments) -> None:
        """Process this thread's token of a ragged batch."""
        token, first = self.work.place()
        if (token < a.query.shape[0]) & (first < self.work.items):
            b, inside, i = sequence_of(a.lengths, token)
            if inside:
                position = a.collection.cache_length(b) + i

                def source(h):
                    return Head(self.rows, a.query, token, h)

                def target(h):
                    return Head(self.rows, a.query_out, token, h)

                self.token(a, b, position, (token,), source, target, first)

    @kv.func
    def padded(self, a: Arguments) -> None:
        """Process this thread's token of a padded batch."""
        row, first = self.work.place()
        b, t = row // a.query.shape[1], row % a.query.shape[1]
        if (b < a.query.shape[0]) & (first < self.work.items):
            if t < a.lengths[b]:
                position = a.collection.cache_length(b) + t

                def source(h):
                    return PaddedHead(self.rows, a.query, (b, t), h)

                def target(h):
                    return PaddedHead(self.rows, a.query_out, (b, t), h)

                self.token(a, b, position, (b, t), source, target, first)


# --- kv.rope, kv.rope_padded -----------------------------------------------------------------------


def rope_kernel(rotation: InPlaceRotation) -> Any:
    @kv.kernel
    def rope(a: Arguments):
        rotation.ragged(a)

    return rope


def rope_padded_kernel(rotation: InPlaceRotation) -> Any:
    @kv.kernel
    def rope_padded(a: Arguments):
        rotation.padded(a)

    return rope_padded


def launch_rope(op: Any, at: Expansion, make: Any, lengths: Any, tokens: Any) -> None:
    """Launch a kernel from :func:`rope_kernel` or :func:`rope_padded_kernel` for ``tokens`` tokens."""
    given = op.position_ids is not None
    rotation = InPlaceRotation.of(
        at, op.collection, op.query, op.freqs, interleaved=op.interleaved.value, given=given,
        sections=tuple(op.mrope_section),
    )  # fmt: skip
    ids = op.position_ids if given else op.freqs  # a placeholder that is not read
    args = Arguments(op.collection, op.layer, op.query, lengths, op.freqs, op.query_out, ids)
    at.launch(make(rotation), [args], (rotation.work.blocks(tokens), 1, 1), (rotation.work.threads, 1, 1))


@expands("kv.rope")
def rope(op: Any, at: Expansion) -> None:
    launch_rope(op, at, rope_kernel, op.row_offsets, at.dim(op.query, 0))


@expands("kv.rope_padded")
def rope_padded(op: Any, at: Expansion) -> None:
    launch_rope(op, at, rope_padded_kernel, op.valid_lengths, at.dim(op.query, 0) * at.dim(op.query, 1))


# --- kv.qk_norm ------------------------------------------------------------------------------------


def qk_norm_kernel(rotation: InPlaceRotation) -> Any:
    @kv.kernel
    def qk_norm(a: Arguments):
        rotation.ragged(a)

    return qk_norm


def dual_kernel(rotation: InPlaceRotation, index: InPlaceRotation) -> Any:
    """Blocks of the second row of the grid process the index heads."""

    @kv.kernel
    def qk_norm_dual(a: Arguments, heads: IndexHeads):
        if kv.block_id.y == 0:
            rotation.ragged(a)
        else:
            index.ragged(heads.beside(a))

    return qk_norm_dual


@expands("kv.qk_norm")
def qk_norm(op: Any, at: Expansion) -> None:
    options = {"interleaved": op.interleaved.value, "eps": op.eps.value, "weight_offset": op.weight_offset.value}
    main = InPlaceRotation.of(at, op.collection, op.query, op.freqs, **options)
    freqs = op.q_gamma if op.freqs is None else op.freqs  # a placeholder that is not read
    args = Arguments(
        op.collection, op.layer, op.query, op.row_offsets, freqs, op.query_out, q_gamma=op.q_gamma, k_gamma=op.k_gamma
    )
    tokens = at.dim(op.query, 0)
    if op.index_collection is None:
        at.launch(qk_norm_kernel(main), [args], (main.work.blocks(tokens), 1, 1), (main.work.threads, 1, 1))
        return
    index = InPlaceRotation.of(at, op.index_collection, op.index_query, op.freqs, **options)
    heads = IndexHeads(op.index_collection, op.index_query, op.index_query_out, op.index_q_gamma, op.index_k_gamma)
    fewest = min(main.work, index.work, key=lambda work: work.tokens)
    at.launch(dual_kernel(main, index), [args, heads], (fewest.blocks(tokens), 2, 1), (fewest.threads, 1, 1))
