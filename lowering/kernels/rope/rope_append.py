# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.rope_append: rotary embedding of query and key, and the append of key and value.

There are two kernels. One loads all of a thread's vectors of a token, then looks up the token's slot and the angles,
which all heads share, then rotates and writes, so that all memory latencies overlap. The other processes one item after
another in a loop: on the host, for quantized heads, and where a thread would have too many items.

An item is a unit of a rotated head or a vector of a value; a group of threads shares the item where heads are
normalised or quantized.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec, align_up, cdiv

from .. import expands
from ..append.head_writer import HeadWriter, Norm, TokenItems
from ..append.quantize import Quantizer
from ..base import Expansion
from ..common import (
    THREADS,
    WARP,
    CachedHead,
    Group,
    Head,
    Rows,
    Work,
    begin,
    converted,
    head_and_lane,
    in_range,
    most_lanes,
    row_alignment,
    sequence_of,
    single,
    starts_early,
    vector_width,
    whole_warps,
)
from .rotation import Angles, Rotation


def rope_append_kernel(work: Work, writer: HeadWriter, early: bool) -> Any:
    items, rows = writer.items, writer.rows

    @kv.kernel
    def rope_append(collection, layer: kv.i32, query, key, value, row_offsets, freqs, query_out, q_gamma, k_gamma):
        begin(early)
        token, first = work.place()
        if (token < query.shape[0]) & (first < work.items):
            b, inside, i = sequence_of(row_offsets, token, query.shape[0])
            if inside:
                position = collection.cache_length(b) + i
                keys, values = collection.get_key_cache(layer), collection.get_value_cache(layer)
                angles = Angles(freqs, rows, (position,))
                kept = in_range(collection, position)
                for item in range(first, work.items, work.step):
                    if item < items.first_key:
                        h, part, active = head_and_lane(item, items.query_heads, items.query)
                        source, target = Head(rows, query, token, h), Head(rows, query_out, token, h)
                        writer.query(source, target, angles, q_gamma, part, active)
                    elif kept and item < items.first_value:
                        h, part, active = head_and_lane(item - items.first_key, items.heads, items.key)
                        source = Head(rows, key, token, h)
                        writer.key(source, CachedHead(keys, b, position, h), angles, k_gamma, part, active)
                    elif kept:
                        h, part, active = head_and_lane(item - items.first_value, items.heads, items.value)
                        writer.value(Head(rows, value, token, h), CachedHead(values, b, position, h), part, active)

    return rope_append


# --- all items of a token at once ---------------------------------------------------------------------

MOST_WORDS = 96  # registers per thread for loaded vectors
QUERY_UNITS = 2  # units of the query per thread, where there are enough threads


@dataclass(frozen=True)
class Share:
    """Heads of a kind, divided among ``width`` threads: ``per_head`` threads per head, with one item each."""

    heads: int
    per_head: int
    width: int

    @property
    def items_per_thread(self) -> int:
        """Items per thread."""
        return cdiv(self.heads * self.per_head, self.width)

    @kv.func
    def place(self, thread: Any, n: int) -> tuple[Any, Any, Any]:
        """(head, part of it, whether it exists) of a thread's n-th item; past the end, the last head again."""
        if self.width % self.per_head == 0:
            h, part = thread // self.per_head + n * (self.width // self.per_head), thread % self.per_head
        else:
            h, part = (thread + n * self.width) // self.per_head, (thread + n * self.width) % self.per_head
        if (n + 1) * self.width <= self.heads * self.per_head:
            return h, part, kv.bool(True)
        return kv.math.min(h, self.heads - 1), part, h < self.heads


@dataclass(frozen=True)
class HeadRotation:
    """How the threads of a token rotate its heads of a kind."""

    share: Share
    rotation: Rotation
    rows: Rows
    norm: Norm

    @kv.func
    def unit(self, part: Any) -> Any:
        """The unit of a part of a head; in a group that normalises, some threads may have none."""
        return part if self.share.per_head == self.rotation.units else kv.math.min(part, self.rotation.units - 1)

    @kv.func
    def fetch(self, buffer: Any, token: Any, thread: Any) -> list[Any]:
        """Load the thread's units of a token, without conversion."""
        found = []
        for n in kv.static(range(self.share.items_per_thread)):
            h, part, _ = self.share.place(thread, n)
            starts = self.rotation.starts(self.unit(part))
            found.append([self.rows.load(buffer, token, h, d, width=self.rotation.width) for d in starts])
        return found

    @kv.func
    def finish(self, fetched: list[Any], angles: Angles, angle: Any, gamma: Any, target: Any, thread: Any) -> None:
        """Normalise, rotate and write the loaded units; ``target`` is the first head.

        ``angle`` are the angles of the thread's units if these are the same for every head, otherwise None.
        """
        for n in kv.static(range(self.share.items_per_thread)):
            h, part, exists = self.share.place(thread, n)
            number = self.unit(part)
            has = exists if self.share.per_head == self.rotation.units else exists & (part < self.rotation.units)
            vectors = [kv.f32(x) for x in fetched[n]]
            vectors = self.norm.of_vectors(vectors, self.rotation.starts(number), has, gamma)
            own = self.rotation.angles_of(number, angles) if angle is None else angle
            rotated = self.rotation.rotate(number, own, vectors)
            if has:
                self.rotation.put(number, rotated, replace(target, head=h).write)


def together(
    at: Expansion, spec: CacheSpec, query_heads: int, head: HeadRotation, types: tuple[DType, ...]
) -> tuple[Work, HeadRotation, HeadRotation, Share] | None:
    """How a block's threads process query, key and value of tokens, each thread all of its items at once.

    ``head`` describes the rotation of a head, ``types`` are those of query and key. None where the loop is used.
    """
    per_head, units = head.share.per_head, head.rotation.units
    if at.target.is_host or spec.quantized or not head.rotation.paired or per_head < units:
        return None
    most = at.schedule.get("threads", THREADS)
    width = min(align_up(cdiv(query_heads * per_head, QUERY_UNITS), WARP), most)
    even = align_up(width, math.lcm(per_head, WARP))  # for a thread to have the same part of every head
    width = even if even <= most else width
    query, key = (replace(head, share=Share(heads, per_head, width)) for heads in (query_heads, spec.num_heads))
    value = Share(spec.num_heads, spec.head_size // head.rows.width, width)
    vectors = (query.share.items_per_thread + key.share.items_per_thread) * (
        1 if head.rotation.interleaved else 2
    ) + value.items_per_thread
    if vectors * head.rotation.width * max(t.itemsize for t in types) > 4 * MOST_WORDS:
        return None
    return Work.of(at, width, width * max(1, most // width)), query, key, value


def rope_together_kernel(
    spec: CacheSpec, work: Work, q: HeadRotation, k: HeadRotation, v: Share, rows: Rows, early: bool
) -> Any:
    """The kernel for the result of :func:`together`."""
    alike = v.width % q.share.per_head == 0

    @kv.kernel
    def rope_append(collection, layer: kv.i32, query, key, value, row_offsets, freqs, query_out, q_gamma, k_gamma):
        begin(early)
        token, thread = work.place()
        if (token < query.shape[0]) & (thread < work.items):
            queries, new_keys = q.fetch(query, token, thread), k.fetch(key, token, thread)
            new_values = []
            for n in kv.static(range(v.items_per_thread)):
                h, part, _ = v.place(thread, n)
                new_values.append(rows.load(value, token, h, part * rows.width))
            b, inside, i = sequence_of(row_offsets, token, query.shape[0])
            if inside:
                position = collection.cache_length(b) + i
                keys, values = collection.get_key_cache(layer), collection.get_value_cache(layer)
                angles = Angles(freqs, rows, (position,))
                _, part, _ = q.share.place(thread, 0)
                angle = q.rotation.angles_of(q.unit(part), angles) if alike else None
                if in_range(collection, position):
                    for n in kv.static(range(v.items_per_thread)):
                        h, part, exists = v.place(thread, n)
                        if exists:
                            x = converted(new_values[n], spec.dtype)
                            values.store(b, h, position, part * rows.width, single(x))
                    k.finish(new_keys, angles, angle, k_gamma, CachedHead(keys, b, position, 0), thread)
                q.finish(queries, angles, angle, q_gamma, Head(rows, query_out, token, 0), thread)

    return rope_append


@expands("kv.rope_append")
def rope_append(op: Any, at: Expansion) -> None:
    spec, eps = at.spec(op.collection), None if op.q_gamma is None else op.eps.value
    types = (at.dtype(op.query), at.dtype(op.key), spec.dtype)
    rows = Rows(vector_width(spec.head_size, types=types), row_alignment(at.op))
    rotation = Rotation.of(spec.head_size, at.static_dim(op.freqs, 1), op.interleaved.value, most_lanes(types))
    quantizer = None
    if spec.quantized:
        quantizer = Quantizer.of(spec, rotation.chunk_width(spec.granularity, most=most_lanes(types)), at)
    # Threads per head: one per unit; a group where they normalise together; for a quantizer, the threads of a granule.
    group = Group.covering(at, rotation.units)
    norm = Norm(eps, spec.head_size, rows, group)
    of_head = rotation.units if eps is None else group.lanes
    early, query_heads = starts_early(at), at.static_dim(op.query, 1)
    gammas = [op.freqs, op.freqs] if eps is None else [op.q_gamma, op.k_gamma]  # not read without norms
    args = [op.collection, op.layer, op.query, op.key, op.value, op.row_offsets, op.freqs, op.query_out, *gammas]
    at_once = together(
        at, spec, query_heads, HeadRotation(Share(query_heads, of_head, WARP), rotation, rows, norm), types
    )
    if at_once is not None:
        work = at_once[0]
        kernel, grid = rope_together_kernel(spec, *at_once, rows, early), work.blocks(at.dim(op.query, 0))
        at.launch(kernel, args, (grid, 1, 1), (work.threads, 1, 1), programmatic=early)
        return
    if quantizer is None:
        norms, of_key, of_value = (norm, norm), of_head, spec.head_size // rows.width
    else:
        norms, of_key, of_value = (norm, replace(norm, group=quantizer.group)), quantizer.threads, quantizer.threads
    grouped = eps is not None or quantizer is not None
    items = TokenItems(of_head, of_key, of_value, query_heads, spec.num_heads, whole_warps(at, 1) if grouped else 1)
    work = Work.of(at, items.all)
    writer = HeadWriter(spec, items, rows, (rotation, rotation), norms, quantizer)
    kernel = rope_append_kernel(work, writer, early)
    at.launch(kernel, args, (work.blocks(at.dim(op.query, 0)), 1, 1), (work.threads, 1, 1), programmatic=early)
