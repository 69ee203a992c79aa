# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.rms_norm: the new tokens of one cache are normalised in place, by head or by whole row.

Only the device knows the number of new tokens: a fixed grid of blocks loops over the tokens up to the last offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.layout import MAX_TOKENS, CacheSpec
from kvarn.lowering.index import Ix

from .. import expands
from ..base import Expansion
from ..common import (
    CachedHead,
    Group,
    Rows,
    Work,
    converted,
    head_and_lane,
    in_range,
    inverse_rms,
    row_alignment,
    sequence_of,
    vector_width,
    whole_warps,
)

MOST_BLOCKS = 1 << 16  # the host knows only an upper bound of the tokens, often a loose one


@dataclass(frozen=True)
class CachedRow:
    """All heads of a cached token as one row of H * D elements."""

    cache: Any
    b: Any
    position: Any

    @kv.func
    def read(self, d: Any, n: int) -> Any:
        """n elements from element d up, as f32."""
        size = self.cache.head_size
        return CachedHead(self.cache, self.b, self.position, d // size).read(d % size, n)

    @kv.func
    def write(self, d: Any, x: Any) -> None:
        """Write f32 elements from element d up, converted."""
        size = self.cache.head_size
        CachedHead(self.cache, self.b, self.position, d // size).write(d % size, x)


def rms_norm_kernel(
    spec: CacheSpec,
    work: Work,
    rows: Rows,
    group: Group,
    size: int,
    eps: float,
    weight_offset: float,
    multiply_before_cast: bool,
) -> Any:
    """A group normalises one head or, with ``size`` above the head size, one row."""
    heads = 1 if size > spec.head_size else spec.num_heads

    @kv.kernel
    def rms_norm(cache, gamma, row_offsets):
        start, first = work.place()
        if first < work.items:
            first_token, end = row_offsets[0], row_offsets[row_offsets.shape[0] - 1]
            # The most tokens that the sequences have room for, and no more than 32 bits count with a step added.
            room = kv.math.min(kv.i64(cache.batch_size()) * kv.i64(cache.token_capacity()), MAX_TOKENS)
            for n in range(start, kv.math.min(end - first_token, kv.i32(room)), kv.grid_dim.x * work.tokens):
                b, inside, i = sequence_of(row_offsets, first_token + n)
                if inside:
                    position = cache.cache_length(b) + i
                    if in_range(cache, position):
                        for item in range(first, work.items, work.step):
                            h, lane, active = head_and_lane(item, heads, group.lanes)
                            whole = (
                                CachedRow(cache, b, position)
                                if size > spec.head_size
                                else CachedHead(cache, b, position, h)
                            )
                            scale = inverse_rms(whole, size, rows.width, eps, group, lane)
                            if active:
                                for d in range(lane * rows.width, size, group.lanes * rows.width):
                                    weight = kv.f32(rows.load(gamma, d)) + weight_offset
                                    x = whole.read(d, rows.width) * scale
                                    if not multiply_before_cast:
                                        x = kv.f32(converted(x, spec.dtype))
                                    whole.write(d, x * weight)

    return rms_norm


@expands("kv.rms_norm")
def rms_norm(op: Any, at: Expansion) -> None:
    spec, size = at.spec(op.cache), at.static_dim(op.gamma, 0)
    rows = Rows(vector_width(spec.head_size, size, types=(spec.dtype, at.dtype(op.gamma))), row_alignment(at.op))
    group = Group.covering(at, size // rows.width)
    work = Work.of(at, whole_warps(at, group.lanes * (1 if size > spec.head_size else spec.num_heads)))
    kernel = rms_norm_kernel(
        spec, work, rows, group, size, op.eps.value, op.weight_offset.value, op.multiply_before_cast.value
    )
    blocks = work.blocks(Ix(op.total_tokens)).least(MOST_BLOCKS)
    at.launch(kernel, [op.cache, op.gamma, op.row_offsets], (blocks, 1, 1), (work.threads, 1, 1))
