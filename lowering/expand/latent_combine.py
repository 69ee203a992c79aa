# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Combine the partial results of the kernels over latent rows: a block a query row and 128 columns.

Partial results are normalized rows in the output's type and their log-sum-exps: a fourth of what f32 would be to write
and read, and rounded as the output is. Each warp takes every fourth split; where there are many, eight loads at a time.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32, i8, i32

from .attention_common import LOWEST
from .latent_common import NEVER, LatentConfig, lse_of, part_of, place_of, queries_of

WARPS = 4
COLUMNS = 128
TOGETHER = 8


def combine_kernel(c: LatentConfig) -> Any:
    """The kernel that combines the partial results of a configuration; its grid is (tiles * rows, columns / 128)."""
    case, heads = c.case, c.case.heads

    @kv.kernel(block=(32 * WARPS, 1, 1))
    def latent_combine(
        row_offsets: kv.Buffer[i32, 1], out: kv.Buffer[case.out, 3], parts: kv.Buffer[i8, 1], tiles: kv.i32,
        splits: kv.i32,
    ):  # fmt: skip
        sums_at = kv.shared((WARPS, COLUMNS), f32)
        totals = kv.shared(WARPS, f32)
        lane, warp = kv.thread_id.x & 31, kv.thread_id.x >> 5
        number, row = kv.block_id.x // c.rows, kv.block_id.x % c.rows
        column = kv.block_id.y * COLUMNS + lane * 4
        _, token0, row0, rows = place_of(c, queries_of(out, row_offsets), number)
        # Every block waits, so that this kernel ends after the one that leaves the partial results.
        kv.griddepcontrol_wait()
        if row0 + row < rows:
            top = kv.f32(LOWEST)
            for s in range(lane, splits, 32):
                top = kv.math.max(top, lse_of(c, parts, tiles, number, splits, s, row).load(f32))
            top = kv.warp_reduce(top, "max")
            total, sums = kv.f32(0.0), kv.vector(f32, 4)
            for first in range(warp, splits, WARPS * TOGETHER):
                found, factors = [], []
                for k in kv.static(range(TOGETHER)):
                    s = kv.math.min(first + k * WARPS, splits - 1)
                    lse = lse_of(c, parts, tiles, number, splits, s, row).load(f32)
                    counts = (first + k * WARPS < splits) & (lse > NEVER)
                    at = part_of(c, parts, number, splits, s, row) + column * case.out.itemsize
                    found.append(kv.f32(at.load(case.out, 4)))
                    factors.append(kv.where(counts, kv.ex2(lse - top), 0.0))
                for k in kv.static(range(TOGETHER)):
                    total = total + factors[k]
                    parts_of = [kv.where(factors[k] > 0.0, found[k][i], 0.0) for i in range(4)]  # nothing was written
                    sums = sums + kv.vector(f32, parts_of) * factors[k]
            sums_at.store(warp, lane * 4, value=sums)
            if lane == 0:
                totals[warp] = total
            kv.barrier()
            if warp == 0:
                for w in kv.static(range(1, WARPS)):
                    sums = sums + sums_at.load(w, lane * 4, width=4)
                    total = total + totals[w]
                inverse = kv.where(total > 0.0, 1.0 / total, 0.0)
                at = row0 + row
                out.store(token0 + at // heads, at % heads, column, value=case.out(sums * inverse))

    return latent_combine
