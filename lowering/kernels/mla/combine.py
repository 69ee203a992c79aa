# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernel that combines the partial results of the latent kernels.

Partial results are normalised rows in the query's type with their log-sum-exps, half the traffic of f32, and
rounded like the output. Sinks and a prior result are added here. With few splits, a warp combines a row. With many, a
block combines 128 columns of a row: each warp has every fourth split, and all loads are in flight at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32, i8, i32

from ..attention.partials import LOWEST, finished, log_sum_exp, weight, with_prior
from .common import NEVER, LatentConfig, lse_of, part_of, place_of, queries_of

WARPS = 4
COLUMNS = 128
MOST_SPLITS = 64
MANY = 8  # splits from which a block has a row


def grid(c: LatentConfig, tiles: Any, splits: Any) -> tuple[Any, Any]:
    """(rows of blocks, columns of blocks) on the host for some tiles of query rows."""
    many = (splits // MANY).least(1)  # 0 or 1
    rows, columns = tiles * c.rows, c.case.value_size // COLUMNS
    return (rows // WARPS) * (many * (WARPS - 1) + 1), many * (columns - 1) + 1


@dataclass(frozen=True)
class Results:
    """The outputs, and what is combined with the partial results; None for absent operands.

    Attributes
    ----------
    out, lse : [T, Hq, V], f32 [T, Hq]
    sinks : f32 [Hq]
    prior, prior_lse : f32 [T, Hq, V], f32 [T, Hq]
        A prior result, and its natural log-sum-exp.
    """

    out: Any
    sinks: Any
    lse: Any
    prior: Any
    prior_lse: Any


def combine_kernel(c: LatentConfig) -> Any:
    """The combine kernel for a configuration."""
    case, heads = c.case, c.case.heads

    @kv.func
    def load(parts, number, splits, s, row, column):
        return kv.f32((part_of(c, parts, number, splits, s, row) + column * c.part.itemsize).load(c.part, 4))

    @kv.func
    def m_of(parts, tiles, number, splits, row, lane):
        """The largest log-sum-exp of a row."""
        m = kv.f32(LOWEST)
        for s in range(lane, splits, 32):
            m = kv.math.max(m, lse_of(c, parts, tiles, number, splits, s, row).load(f32))
        return kv.warp_reduce(m, "max")

    @kv.func
    def factor_of(parts, tiles, number, splits, s, row, m):
        """The factor of a partial result; 0 for one that was never written."""
        lse = lse_of(c, parts, tiles, number, splits, s, row).load(f32)
        return weight(lse, m, lse != NEVER)

    @kv.func
    def weighted(found, factor):
        return kv.vector(f32, [kv.where(factor == 0.0, 0.0, found[i]) for i in range(4)]) * factor

    @kv.func
    def factors_of(to: Results, m, l, token, h, writes):
        """(factor of the sums, factor of the prior result) of a row; ``writes``: store its log-sum-exp."""
        before = None if to.prior is None else to.prior_lse[token, h]
        m, l, factor, of_prior = finished(m, l, None if to.sinks is None else to.sinks[h], before)
        if to.lse is not None:
            if writes:
                to.lse[token, h] = log_sum_exp(m, l)
        return factor, of_prior

    @kv.func
    def write(to: Results, sums, factor, of_prior, token, h, column):
        x = sums * factor
        if to.prior is not None:
            x = with_prior(x, to.prior.load(token, h, column, width=4), of_prior)
        to.out.store(token, h, column, value=case.out(x))

    @kv.func
    def few_splits(to: Results, parts, place, tiles, number, row, splits, lane):
        """Combine a row in one warp."""
        _, token0, row0, _ = place
        m, l = m_of(parts, tiles, number, splits, row, lane), kv.f32(0.0)
        chunks = range(case.value_size // COLUMNS)
        sums = [kv.vector(f32, 4) for _ in chunks]
        for s in range(splits):
            factor = factor_of(parts, tiles, number, splits, s, row, m)
            l = l + factor
            found = [load(parts, number, splits, s, row, n * COLUMNS + lane * 4) for n in chunks]
            for n in kv.static(chunks):
                sums[n] = sums[n] + weighted(found[n], factor)
        token, h = token0 + (row0 + row) // heads, (row0 + row) % heads
        factor, of_prior = factors_of(to, m, l, token, h, lane == 0)
        for n in kv.static(chunks):
            write(to, sums[n], factor, of_prior, token, h, n * COLUMNS + lane * 4)

    @kv.func
    def loaded(parts, tiles, number, splits, row, column, warp, lane):
        """(the splits' log-sum-exps, every 32nd per lane; the lane's columns of every fourth split, per warp).

        All loads are in flight at once; past the last split, the last one is loaded again.
        """
        ends, found = [], []
        for first in kv.static(range(0, MOST_SPLITS, 32)):
            at = lse_of(c, parts, tiles, number, splits, kv.math.min(first + lane, splits - 1), row)
            ends.append(kv.where(first + lane < splits, at.load(f32), NEVER))
        for first in kv.static(range(0, MOST_SPLITS, WARPS)):
            at = part_of(c, parts, number, splits, kv.math.min(first + warp, splits - 1), row)
            found.append((at + column * c.part.itemsize).load(c.part, 4))
        return ends, found

    @kv.func
    def many_splits(to: Results, place, row, ends, found, sums_at, column, warp, lane):
        """Combine 128 columns of a row in one block."""
        _, token0, row0, _ = place
        m = ends[0]
        for end in kv.static(ends[1:]):
            m = kv.math.max(m, end)
        m = kv.math.max(kv.warp_reduce(m, "max"), LOWEST)
        factors = [weight(end, m, end != NEVER) for end in ends]
        l = factors[0]
        for factor in kv.static(factors[1:]):
            l = l + factor
        l, sums = kv.warp_reduce(l, "add"), kv.vector(f32, 4)
        for k in kv.static(range(len(found))):
            factor = kv.shuffle_idx(factors[k * WARPS // 32], k * WARPS % 32 + warp)
            sums = sums + weighted(kv.f32(found[k]), factor)
        sums_at.store(warp, lane * 4, value=sums)
        kv.barrier()
        if warp == 0:
            for w in kv.static(range(1, WARPS)):
                sums = sums + sums_at.load(w, lane * 4, width=4)
            token, h = token0 + (row0 + row) // heads, (row0 + row) % heads
            factor, of_prior = factors_of(to, m, l, token, h, (lane == 0) & (kv.block_id.y == 0))
            write(to, sums, factor, of_prior, token, h, column)

    @kv.kernel(block=(32 * WARPS, 1, 1))
    def latent_combine(
        row_offsets: kv.Buffer[i32, 1], out: kv.Buffer[case.out, 3], parts: kv.Buffer[i8, 1], tiles: kv.i32,
        splits: kv.i32, sinks: kv.Optional[kv.Buffer[f32, 1]], lse: kv.Optional[kv.Buffer[f32, 2]],
        prior: kv.Optional[kv.Buffer[f32, 3]], prior_lse: kv.Optional[kv.Buffer[f32, 2]],
    ):  # fmt: skip
        sums_at = kv.shared((WARPS, COLUMNS), f32)
        lane, warp = kv.thread_id.x & 31, kv.thread_id.x >> 5
        to = Results(out, sinks, lse, prior, prior_lse)
        kv.griddepcontrol_launch_dependents()  # for the next layer's kernel, whose blocks need whole multiprocessors
        queries = queries_of(out, row_offsets)
        if splits < MANY:
            item = kv.block_id.x * WARPS + warp
            number, row = item // c.rows, item % c.rows
            place = place_of(c, queries, number)
            if place[2] + row < place[3]:
                few_splits(to, parts, place, tiles, number, row, splits, lane)
        else:
            number, row = kv.block_id.x // c.rows, kv.block_id.x % c.rows
            column = kv.block_id.y * COLUMNS + lane * 4
            ends, found = loaded(parts, tiles, number, splits, row, column, warp, lane)
            place = place_of(c, queries, number)
            if place[2] + row < place[3]:
                many_splits(to, place, row, ends, found, sums_at, column, warp, lane)

    return latent_combine
