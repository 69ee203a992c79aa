# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.sliced_add, kv.merge_ragged, kv.shift_tokens and kv.merge_attention: operations on ragged tensors."""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType

from .. import expands
from ..attention.partials import normalizer, weight
from ..base import Expansion
from ..common import Rows, Work, converted, row_alignment, sequence_of, vector_width
from ..tables.indices import threads_of

# --- sliced_add ------------------------------------------------------------------------------------


@kv.func
def added(x: Any, y: Any, dtype: DType) -> Any:
    """x + y: floats in f32, integers in their own type."""
    return converted(kv.f32(x) + kv.f32(y), dtype) if dtype.is_float else x + y


def sliced_add_kernel(work: Work, rows: Rows, dtype: DType) -> Any:
    @kv.kernel
    def sliced_add(a, b, end: kv.i32, out):
        row, first = work.place()
        if (row < a.shape[0]) & (first < work.items):
            for item in range(first, work.items, work.step):
                c = item * rows.width
                x = rows.load(a, row, c)
                if row < end:
                    x = added(x, rows.load(b, row, c), dtype)
                rows.store(out, row, c, value=x)

    return sliced_add


def rows_of(at: Expansion, buffer: Any) -> tuple[Rows, Work]:
    """How the rows of a buffer [rows, C] are accessed, and divided among threads."""
    columns = at.static_dim(buffer, 1)
    rows = Rows(vector_width(columns, types=(at.dtype(buffer),)), row_alignment(at.op))
    return rows, Work.of(at, columns // rows.width)


@expands("kv.sliced_add")
def sliced_add(op: Any, at: Expansion) -> None:
    rows, work = rows_of(at, op.a)
    kernel = sliced_add_kernel(work, rows, at.dtype(op.a))
    at.launch(kernel, [op.a, op.b, op.end, op.out], (work.blocks(at.dim(op.a, 0)), 1, 1), (work.threads, 1, 1))


# --- merge_ragged ----------------------------------------------------------------------------------


def merge_kernel(work: Work, rows: Rows) -> Any:
    """A "token" of the work is a row of a, then of b; the first threads also write the offsets."""

    @kv.kernel
    def merge_ragged(a, a_offsets, b, b_offsets, out, out_offsets):
        n = kv.block_id.x * kv.block_dim.x + kv.thread_id.x
        for k in range(n, out_offsets.shape[0], kv.grid_dim.x * kv.block_dim.x):
            out_offsets[k] = (a_offsets[k] - a_offsets[0]) + (b_offsets[k] - b_offsets[0])
        row, first = work.place()
        if first < work.items:
            if row < a.shape[0]:
                s, inside, i = sequence_of(a_offsets, row)
                if inside:
                    target = (a_offsets[s] - a_offsets[0]) + (b_offsets[s] - b_offsets[0]) + i
                    copy_row(out, target, a, row, first)
            elif row - a.shape[0] < b.shape[0]:
                row = row - a.shape[0]
                s, inside, i = sequence_of(b_offsets, row)
                if inside:
                    target = (a_offsets[s + 1] - a_offsets[0]) + (b_offsets[s] - b_offsets[0]) + i
                    copy_row(out, target, b, row, first)

    @kv.func
    def copy_row(out, target, source, row, first):
        if (target >= 0) & (target < out.shape[0]):
            for item in range(first, work.items, work.step):
                rows.store(out, target, item * rows.width, value=rows.load(source, row, item * rows.width))

    return merge_ragged


@expands("kv.merge_ragged")
def merge_ragged(op: Any, at: Expansion) -> None:
    rows, work = rows_of(at, op.a)
    blocks = work.blocks(at.dim(op.a, 0) + at.dim(op.b, 0)) + 1  # one more, for the offsets of empty batches
    args = [op.a, op.a_offsets, op.b, op.b_offsets, op.out, op.out_offsets]
    at.launch(merge_kernel(work, rows), args, (blocks, 1, 1), (work.threads, 1, 1))


# --- shift_tokens ----------------------------------------------------------------------------------


@kv.kernel
def shift_tokens(tokens, row_offsets, bonus, out):
    row = kv.block_id.x * kv.block_dim.x + kv.thread_id.x
    if row < tokens.shape[0]:
        b, inside, _ = sequence_of(row_offsets, row)
        if inside:
            if row + 1 < kv.math.min(row_offsets[b + 1], tokens.shape[0]):
                out[row] = tokens[row + 1]
            else:
                out[row] = bonus[b]


@expands("kv.shift_tokens")
def expand_shift_tokens(op: Any, at: Expansion) -> None:
    threads = threads_of(at)
    blocks = (at.dim(op.tokens, 0) + (threads - 1)) // threads
    at.launch(shift_tokens, [op.tokens, op.row_offsets, op.bonus, op.out], (blocks, 1, 1), (threads, 1, 1))


# --- merge_attention -------------------------------------------------------------------------------

_LEAST = -3e38  # below the logarithm of any sum, and finite, so that differences of log-sum-exps of no keys are not NaN


def merge_attention_kernel(work: Work, rows: Rows, heads: int, dtype: DType) -> Any:
    """A "token" of the work is one head of a query; its threads share the weights. The first writes the log-sum-exp."""

    @kv.kernel
    def merge_attention(a, a_lse, b, b_lse, out, lse):
        row, first = work.place()
        t, h = row // heads, row % heads
        if (t < a.shape[0]) & (first < work.items):
            x, y = a_lse[t, h], b_lse[t, h]
            most = kv.math.max(kv.math.max(x, y), _LEAST)
            from_a, from_b = weight(x, most, exp2=kv.math.exp), weight(y, most, exp2=kv.math.exp)
            total = from_a + from_b
            scale = normalizer(total)
            for item in range(first, work.items, work.step):
                d = item * rows.width
                # The output over a set without keys may be undefined: its weight is zero.
                of_a = kv.where(from_a > 0.0, kv.f32(rows.load(a, t, h, d)), 0.0)
                of_b = kv.where(from_b > 0.0, kv.f32(rows.load(b, t, h, d)), 0.0)
                rows.store(out, t, h, d, value=converted((of_a * from_a + of_b * from_b) * scale, dtype))
            if first == 0:
                lse[t, h] = kv.where(total == 0.0, float("-inf"), most + kv.math.log(total))

    return merge_attention


@expands("kv.merge_attention")
def merge_attention(op: Any, at: Expansion) -> None:
    heads, size = at.static_dim(op.a, 1), at.static_dim(op.a, 2)
    rows = Rows(vector_width(size, types=(at.dtype(op.a),)), row_alignment(at.op))
    work = Work.of(at, size // rows.width)
    kernel = merge_attention_kernel(work, rows, heads, at.dtype(op.a))
    args = [op.a, op.a_lse, op.b, op.b_lse, op.out, op.lse]
    at.launch(kernel, args, (work.blocks(at.dim(op.a, 0) * heads), 1, 1), (work.threads, 1, 1))
