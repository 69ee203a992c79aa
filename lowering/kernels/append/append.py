# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.append, kv.store_ragged and kv.store_padded: copy rows of new tokens to their slots.

One thread copies one vector of a token for both K and V: it searches the sequence and looks up the page once for both.
If the cache quantizes, a group of threads has one granule and computes its largest magnitude together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.layout import CacheSpec

from .. import expands
from ..base import Expansion
from ..common import (
    Head,
    Rows,
    Work,
    begin,
    converted,
    head_and_lane,
    in_range,
    row_alignment,
    sequence_of,
    single,
    starts_early,
    vector_width,
    whole_warps,
)
from .quantize import Quantizer


@dataclass(frozen=True)
class RowCopy:
    """How rows of the storage type, or converted to it, are written to keys (and values)."""

    spec: CacheSpec
    work: Work
    rows: Rows
    halves: int
    early: bool

    @kv.func
    def write(self, collection: Any, layer: Any, row_offsets: Any, new: Any, tensor_scales: Any = None) -> None:
        """Write this thread's share of ``new``, the rows of keys and of values, divided by the two tensor scales."""
        spec, work, rows, halves = self.spec, self.work, self.rows, self.halves
        vectors, width = spec.head_size // rows.width, rows.width
        begin(self.early)
        caches = halves_of(collection, layer, halves)
        token, first = work.place()
        if (token < new[0].shape[0]) & (first < work.items):
            # The first item is in flight while the token's sequence and page are looked up.
            h, d = first // vectors, first % vectors * width
            loaded = [rows.load(x, token, h, d) for x in new[:halves]]
            b, inside, i = sequence_of(row_offsets, token, new[0].shape[0])
            if inside:
                position = collection.cache_length(b) + i
                if in_range(collection, position):
                    for n in kv.static(range(halves)):
                        row = scaled(loaded[n], tensor_scales, n)
                        caches[n].store(b, h, position, d, single(converted(row, spec.dtype)))
                    for item in range(first + work.step, work.items, work.step):
                        h, d = item // vectors, item % vectors * width
                        for n in kv.static(range(halves)):
                            row = scaled(rows.load(new[n], token, h, d), tensor_scales, n)
                            caches[n].store(b, h, position, d, single(converted(row, spec.dtype)))


def copy_kernel(copy: RowCopy, name: str = "append") -> Any:
    """The kernel that copies rows."""

    def kernel(collection, layer: kv.i32, row_offsets, key, value):
        copy.write(collection, layer, row_offsets, (key, value))

    kernel.__name__ = name
    return kv.kernel(kernel)


def scaled_copy_kernel(copy: RowCopy) -> Any:
    """The kernel that copies rows divided by the scale of all keys, or of all values."""

    @kv.kernel
    def append_scaled(collection, layer: kv.i32, row_offsets, key, value, tensor_scales):
        copy.write(collection, layer, row_offsets, (key, value), tensor_scales)

    return append_scaled


@kv.func
def scaled(row: Any, tensor_scales: Any, half: int) -> Any:
    """Elements of a row of keys (``half`` 0) or values, divided by the scale of all of them, if there is one."""
    return row if tensor_scales is None else kv.f32(row) / tensor_scales[half]


@kv.func
def halves_of(handle: Any, layer: Any, halves: int) -> list[Any]:
    """The caches that a kernel writes: a single cache, or a collection's keys and, with two halves, values."""
    if handle.what == "cache":
        return [handle]
    if halves == 1:
        return [handle.get_key_cache(layer)]
    return [handle.get_key_cache(layer), handle.get_value_cache(layer)]


@dataclass(frozen=True)
class DividedHead:
    """A head of keys (``half`` 0) or values, divided by the scale of all of them, if there is one."""

    head: Head
    tensor_scales: Any
    half: int

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from dim d up, as f32."""
        return scaled(self.head.read(d, n), self.tensor_scales, self.half)


def quantize_kernel(work: Work, rows: Rows, quantizer: Quantizer, halves: int, scales: str, early: bool) -> Any:
    """Rows of floats are quantized by granules and written to a cache with scales.

    ``scales`` are those of granules, if they are ``given``, or of the ``tensor``, or are computed (``""``).
    """
    heads, given = quantizer.spec.num_heads, scales == "given"
    once = work.items <= work.step  # whether a thread has one item, which is read before its sequence is looked up

    @kv.func
    def place_of(item, token, sources, of_tensor):
        """(place of an item, its heads, what the quantizer holds of them)."""
        h, part, active = head_and_lane(item, heads, quantizer.threads)
        of_heads = [DividedHead(Head(rows, x, token, h), of_tensor, n) for n, x in enumerate(sources)]
        return (h, part, active), of_heads, [quantizer.read(head.read, part) for head in of_heads]

    @kv.func
    def write(cache, n, b, position, token, item, given_scale):
        """Write keys (``n`` 0) or values of an item, as :func:`place_of` gives it."""
        (h, part, active), of_heads, held = item
        known = kv.f32(given_scale[token, h, part // quantizer.group.lanes]) if given else None
        quantizer.write(cache, b, h, position, part, active, held[n], of_heads[n].read, known)

    @kv.kernel
    def append_quantized(collection, layer: kv.i32, row_offsets, key, value, key_scale, value_scale):
        begin(early)
        of_tensor = key_scale if scales == "tensor" else None
        caches = halves_of(collection, layer, halves)
        token, first = work.place()
        if (token < key.shape[0]) & (first < work.items):
            sources, of_granules = (key, value)[:halves], (key_scale, value_scale)
            held = place_of(first, token, sources, of_tensor) if once else None
            b, inside, i = sequence_of(row_offsets, token, key.shape[0])
            if inside:
                position = collection.cache_length(b) + i
                if kv.static(once):
                    for n in kv.static(range(halves)):
                        write(caches[n], n, b, position, token, held, of_granules[n])
                else:
                    for item in range(first, work.items, work.step):
                        held = place_of(item, token, sources, of_tensor)
                        for n in kv.static(range(halves)):
                            write(caches[n], n, b, position, token, held, of_granules[n])

    return append_quantized


@expands("kv.append")
def append(op: Any, at: Expansion) -> None:
    spec, dtype = at.spec(op.collection), at.dtype(op.key)
    halves = 1 if op.value is None else 2
    value = op.key if op.value is None else op.value  # a placeholder that is not read for an MLA collection
    tokens = at.dim(op.key, 0)
    if spec.quantized:
        extents = (spec.head_size, spec.granularity)
        rows = Rows(vector_width(*extents, types=(dtype, spec.dtype)), row_alignment(at.op))
        quantizer = Quantizer.of_rows(spec, rows.width, at)
        work = Work.of(at, whole_warps(at, spec.num_heads * quantizer.threads))
        of = "given" if op.key_scale is not None else "" if op.tensor_scales is None else "tensor"
        scales = {
            "given": [op.key_scale, op.key_scale if halves == 1 else op.value_scale],
            "tensor": [op.tensor_scales] * 2, "": [op.row_offsets] * 2,
        }[of]  # fmt: skip
        kernel = quantize_kernel(work, rows, quantizer, halves, of, starts_early(at))
        args = [op.collection, op.layer, op.row_offsets, op.key, value, *scales]
    else:
        rows = Rows(vector_width(spec.head_size, types=(dtype, spec.dtype)), row_alignment(at.op))
        work = Work.of(at, spec.row_size // rows.width)
        copy = RowCopy(spec, work, rows, halves, starts_early(at))
        args = [op.collection, op.layer, op.row_offsets, op.key, value]
        if op.tensor_scales is None:
            kernel = copy_kernel(copy)
        else:
            kernel, args = scaled_copy_kernel(copy), [*args, op.tensor_scales]
    at.launch(
        kernel, args, (work.blocks(tokens), 1, 1), (work.threads, 1, 1), key=(rows, work), programmatic=starts_early(at)
    )


@expands("kv.store_ragged")
def store_ragged(op: Any, at: Expansion) -> None:
    spec = at.spec(op.cache)
    rows = Rows(vector_width(spec.head_size, types=(spec.dtype,)), row_alignment(at.op))
    work = Work.of(at, spec.row_size // rows.width)
    args = [op.cache, at.constant(0), op.row_offsets, op.x, op.x]
    kernel = copy_kernel(RowCopy(spec, work, rows, 1, False), "store_ragged")
    at.launch(kernel, args, (work.blocks(at.dim(op.x, 0)), 1, 1), (work.threads, 1, 1))


def padded_kernel(spec: CacheSpec, work: Work, rows: Rows) -> Any:
    """Padded rows of the storage type are written to one cache; a "token" of the work is a row of the padded batch."""
    vectors, width = spec.head_size // rows.width, rows.width

    @kv.kernel
    def store_padded(cache, x, valid_lengths):
        row, first = work.place()
        b, t = row // x.shape[1], row % x.shape[1]
        if (b < x.shape[0]) & (first < work.items):
            if t < valid_lengths[b]:
                position = cache.cache_length(b) + t
                if in_range(cache, position):
                    for item in range(first, work.items, work.step):
                        h, d = item // vectors, item % vectors * width
                        cache.store(b, h, position, d, single(rows.load(x, b, t, h, d)))

    return store_padded


@expands("kv.store_padded")
def store_padded(op: Any, at: Expansion) -> None:
    spec = at.spec(op.cache)
    rows = Rows(vector_width(spec.head_size, types=(spec.dtype,)), row_alignment(at.op))
    work = Work.of(at, spec.row_size // rows.width)
    padded = at.dim(op.x, 0) * at.dim(op.x, 1)
    at.launch(
        padded_kernel(spec, work, rows),
        [op.cache, op.x, op.valid_lengths],
        (work.blocks(padded), 1, 1),
        (work.threads, 1, 1),
    )
