# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.radd and kv.iadd_2m: add to cached tokens; kv.increment_cache_lengths, between steps."""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.layout import CacheSpec

from .. import expands
from ..base import Expansion
from ..common import Rows, Work, converted, in_range, row_alignment, sequence_of, single, vector_width

# --- radd, iadd_2m ---------------------------------------------------------------------------------


@kv.func
def add_to(cache: Any, b: Any, h: Any, t: Any, d: Any, x: Any) -> None:
    """cache[...] += x: floats in f32, integers in their own type."""
    width = len(x)
    old = cache.load(b, h, t, d, width=width)
    x = single(x)
    if cache.dtype.is_float:
        cache.store(b, h, t, d, converted(kv.f32(old) + kv.f32(x), cache.dtype))
    else:
        cache.store(b, h, t, d, old + x)


def add_kernel(spec: CacheSpec, work: Work, rows: Rows, name: str, stacked: bool) -> Any:
    """Rows have keys and values side by side or, if ``stacked``, all keys come before all values."""
    vectors, width = spec.head_size // rows.width, rows.width

    def kernel(collection, layer: kv.i32, a, row_offsets, batch_offset: kv.i32):
        row, first = work.place()
        count = a.shape[0] // 2 if stacked else a.shape[0]
        if (row < count) & (first < work.items):
            token = row if stacked else row + row_offsets[0]
            n, inside, i = sequence_of(row_offsets, token)
            b = n + batch_offset
            if inside & (b < collection.batch_size()):
                position = collection.cache_length(b) + i
                keys, values = collection.get_key_cache(layer), collection.get_value_cache(layer)
                if in_range(collection, position):
                    for item in range(first, work.items, work.step):
                        h, d = item // vectors, item % vectors * width
                        column = item * width
                        if stacked:
                            key, value = rows.load(a, row, column), rows.load(a, row + count, column)
                        else:
                            key, value = rows.load(a, row, column), rows.load(a, row, column + spec.row_size)
                        add_to(keys, b, h, position, d, key)
                        add_to(values, b, h, position, d, value)

    kernel.__name__ = name
    return kv.kernel(kernel)


def launch_add(
    at: Expansion, collection: Any, layer: Any, a: Any, row_offsets: Any, batch_offset: Any, name: str, stacked: bool
) -> None:
    spec = at.spec(collection)
    rows = Rows(vector_width(spec.head_size, types=(spec.dtype,)), row_alignment(at.op))
    work = Work.of(at, spec.row_size // rows.width)
    count = at.dim(a, 0) // 2 if stacked else at.dim(a, 0)
    args = [collection, layer, a, row_offsets, batch_offset]
    at.launch(add_kernel(spec, work, rows, name, stacked), args, (work.blocks(count), 1, 1), (work.threads, 1, 1))


@expands("kv.radd")
def radd(op: Any, at: Expansion) -> None:
    launch_add(at, op.collection, op.layer, op.a, op.row_offsets, op.batch_offset, "radd", stacked=False)


@expands("kv.iadd_2m")
def iadd_2m(op: Any, at: Expansion) -> None:
    launch_add(at, op.collection, op.layer, op.kv, op.row_offsets, at.constant(0), "iadd_2m", stacked=True)


# --- lengths ---------------------------------------------------------------------------------------


@kv.kernel
def increment_cache_lengths(lengths, row_offsets):
    b = kv.block_id.x * kv.block_dim.x + kv.thread_id.x
    if b < lengths.shape[0]:
        lengths[b] = lengths[b] + (row_offsets[b + 1] - row_offsets[b])


@expands("kv.increment_cache_lengths")
def expand_increment_cache_lengths(op: Any, at: Expansion) -> None:
    threads = 64 if at.target.is_host else 256
    blocks = (at.dim(op.cache_lengths, 0) + (threads - 1)) // threads
    at.launch(increment_cache_lengths, [op.cache_lengths, op.row_offsets], (blocks, 1, 1), (threads, 1, 1))
