# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.append, kv.store_ragged and kv.store_padded: copy rows of new tokens to their slots.

One thread copies one vector of a token for both K and V: it searches the sequence and looks up the page once for both.
If the cache quantizes, a group of threads has one granule and computes its largest magnitude together.
"""

from __future__ import annotations

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


def copy_kernel(
    spec: CacheSpec, work: Work, rows: Rows, halves: int, early: bool, name: str = "append", scaled: bool = False
) -> Any:
    """Rows of the storage type, or converted to it, are written to keys (and values).

    If ``scaled``, the kernel takes the scales of all keys and of all values too, and divides rows by them.
    """
    vectors, width = spec.head_size // rows.width, rows.width

    @kv.func
    def copy(collection, layer, row_offsets, key, value, scales):
        begin(early)
        caches = halves_of(collection, layer, halves)
        token, first = work.place()
        if (token < key.shape[0]) & (first < work.items):
            # The first item is in flight while the token's sequence and page are looked up.
            h, d = first // vectors, first % vectors * width
            loaded = [rows.load(x, token, h, d) for x in (key, value)[:halves]]
            b, inside, i = sequence_of(row_offsets, token, key.shape[0])
            if inside:
                position = collection.cache_length(b) + i
                if in_range(collection, position):
                    for n in kv.static(range(halves)):
                        row = kv.f32(loaded[n]) / scales[n] if scaled else loaded[n]
                        caches[n].store(b, h, position, d, single(converted(row, spec.dtype)))
                    for item in range(first + work.step, work.items, work.step):
                        h, d = item // vectors, item % vectors * width
                        for n in kv.static(range(halves)):
                            more = rows.load((key, value)[n], token, h, d)
                            row = kv.f32(more) / scales[n] if scaled else more
                            caches[n].store(b, h, position, d, single(converted(row, spec.dtype)))

    if scaled:

        def kernel(collection, layer: kv.i32, row_offsets, key, value, tensor_scales):
            copy(collection, layer, row_offsets, key, value, tensor_scales)
    else:

        def kernel(collection, layer: kv.i32, row_offsets, key, value):
            copy(collection, layer, row_offsets, key, value, None)

    kernel.__name__ = name
    return kv.kernel(kernel)


@kv.func
def halves_of(handle: Any, layer: Any, halves: int) -> list[Any]:
    """The caches that a kernel writes: a single cache, or a collection's keys and, with two halves, values."""
    if handle.what == "cache":
        return [handle]
    if halves == 1:
        return [handle.get_key_cache(layer)]
    return [handle.get_key_cache(layer), handle.get_value_cache(layer)]


def quantize_kernel(work: Work, rows: Rows, quantizer: Quantizer, halves: int, given: bool, early: bool) -> Any:
    """Rows of floats are quantized by granules and written to a cache with scales."""
    heads = quantizer.spec.num_heads

    @kv.kernel
    def append_quantized(collection, layer: kv.i32, row_offsets, key, value, key_scale, value_scale):
        begin(early)
        caches = halves_of(collection, layer, halves)
        token, first = work.place()
        if (token < key.shape[0]) & (first < work.items):
            b, inside, i = sequence_of(row_offsets, token, key.shape[0])
            if inside:
                position = collection.cache_length(b) + i
                for item in range(first, work.items, work.step):
                    h, part, active = head_and_lane(item, heads, quantizer.threads)
                    sources = [Head(rows, x, token, h) for x in (key, value)[:halves]]
                    held = [quantizer.read(source.read, part) for source in sources]
                    for n in kv.static(range(halves)):
                        known = (
                            kv.f32((key_scale, value_scale)[n][token, h, part // quantizer.group.lanes])
                            if given
                            else None
                        )
                        quantizer.write(caches[n], b, h, position, part, active, held[n], sources[n].read, known)

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
        quantizer = Quantizer.of(spec, rows.width, at)
        work = Work.of(at, whole_warps(at, spec.num_heads * quantizer.threads))
        given = op.key_scale is not None
        scales = [op.key_scale, op.key_scale if halves == 1 else op.value_scale] if given else [op.row_offsets] * 2
        kernel = quantize_kernel(work, rows, quantizer, halves, given, starts_early(at))
        args = [op.collection, op.layer, op.row_offsets, op.key, value, *scales]
    else:
        rows = Rows(vector_width(spec.head_size, types=(dtype, spec.dtype)), row_alignment(at.op))
        work = Work.of(at, spec.row_size // rows.width)
        scaled = op.tensor_scales is not None
        kernel = copy_kernel(spec, work, rows, halves, starts_early(at), scaled=scaled)
        args = [op.collection, op.layer, op.row_offsets, op.key, value, *([op.tensor_scales] if scaled else [])]
    at.launch(
        kernel, args, (work.blocks(tokens), 1, 1), (work.threads, 1, 1), key=(rows, work), programmatic=starts_early(at)
    )


@expands("kv.store_ragged")
def store_ragged(op: Any, at: Expansion) -> None:
    spec = at.spec(op.cache)
    rows = Rows(vector_width(spec.head_size, types=(spec.dtype,)), row_alignment(at.op))
    work = Work.of(at, spec.row_size // rows.width)
    args = [op.cache, at.constant(0), op.row_offsets, op.x, op.x]
    kernel = copy_kernel(spec, work, rows, 1, False, "store_ragged")
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
