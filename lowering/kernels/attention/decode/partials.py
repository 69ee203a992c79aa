# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A warp's partial result (m, l, o) in memory, in the lanes' layout, and the detection of a sequence's last warp.

With few query rows half of the lanes have none. They take half of their neighbours' columns when a split ends, so that
all lanes take part in adding, storing and writing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kvarn as kv
from kvarn.lowering.schedules.decode import COLUMNS, DecodeConfig

from ..partials import of_both


@kv.func
def lane_sum(x: Any) -> Any:
    """The sum over the lanes with the same rows, which are every fourth lane."""
    for k in kv.static((4, 8, 16)):
        x = x + kv.shuffle_xor(x, k)
    return x


def rows_of(c: DecodeConfig, nt: int, u: int) -> range:
    """The indices of a lane's outputs of row u of a column tile."""
    return range(nt * c.sum_steps * 4 + u, (nt + 1) * c.sum_steps * 4, 2)


def partials_of(c: DecodeConfig) -> SimpleNamespace:
    """The functions for a configuration.

    ``place`` is the address of a lane's part of a partial result in the workspace.
    """
    NT, KS = c.column_tiles, c.sum_steps

    @kv.func
    def first_row(lane):
        """The first of a lane's two rows in a column tile."""
        return (lane & (3 // c.halves)) * 2

    @kv.func
    def step_of(t, lane):
        """The output step that is a lane's step t; with an odd number of steps it may be past the last."""
        return t + kv.where((lane & 2) != 0, KS, 0) if c.halves > 1 else t

    @kv.func
    def redistributed(m, l, o, lane):
        """A partial result whose columns are redistributed: a lane without rows takes half of a neighbour's columns."""
        if c.halves == 1:
            return m, l, o
        other, found = (lane & 2) != 0, []
        for t in kv.static(range(KS)):
            for j in kv.static(range(4)):
                theirs = kv.f32(0.0)
                if t + KS < c.row_steps:
                    theirs = kv.shuffle_xor(o[(t + KS) * 4 + j], 2)
                found.append(kv.where(other, theirs, o[t * 4 + j]))
        return [kv.shuffle_idx(x, lane & ~2) for x in m], [kv.shuffle_idx(x, lane & ~2) for x in l], found

    @kv.func
    def rows_here(nt, row0, n, lane):
        """Whether a lane has rows of a sequence of n queries in a column tile."""
        return row0 + nt * COLUMNS + first_row(lane) < n * c.head_rows

    @kv.func
    def holder(row0, n, lane):
        """The lane whose part a lane reads: a lane without rows reads its neighbour's part."""
        return kv.where(rows_here(0, row0, n, lane), lane, lane & ~(3 // c.halves))

    @kv.func
    def store(place, m, l, o, nt):
        for t in kv.static(range(KS)):
            four = kv.from_lanes([o[(nt * KS + t) * 4 + i] for i in range(4)], kv.f32)
            (place + (nt * (KS + 1) + t) * 512).store(four)
        four = kv.from_lanes([m[2 * nt], m[2 * nt + 1], l[2 * nt], l[2 * nt + 1]], kv.f32)
        (place + (nt * (KS + 1) + KS) * 512).store(four)

    @kv.func
    def store_existing(place, m, l, o, row0, n, lane):
        """Store a partial result for the existing rows."""
        for nt in kv.static(range(NT)):
            if rows_here(nt, row0, n, lane):
                store(place, m, l, o, nt)

    @kv.func
    def load(place):
        """A stored partial result: (m, l, o)."""
        m, l, o = [], [], []
        for nt in kv.static(range(NT)):
            for t in kv.static(range(KS)):
                four = (place + (nt * (KS + 1) + t) * 512).load(kv.f32, 4)
                o.extend([four[i] for i in range(4)])
            four = (place + (nt * (KS + 1) + KS) * 512).load(kv.f32, 4)
            m.extend([four[0], four[1]])
            l.extend([four[2], four[3]])
        return m, l, o

    @kv.func
    def add(before, m, l, o):
        """Combine an earlier partial result into m, l and o."""
        before_m, before_l, before_o = before
        for nt in kv.static(range(NT)):
            for u in kv.static(range(2)):
                row, mine = 2 * nt + u, rows_of(c, nt, u)
                m[row], sums = of_both(
                    before_m[row],
                    [before_l[row], *(before_o[i] for i in mine)],
                    m[row],
                    [l[row], *(o[i] for i in mine)],
                )
                l[row] = sums[0]
                for j, i in kv.static(enumerate(mine)):
                    o[i] = sums[1 + j]

    @kv.func
    def arrived(counter, lane):
        """The count of parts that other warps have published for a sequence; they may be read afterwards."""
        found = kv.i32(0)
        if lane == 0:
            found = counter.load(kv.i32, order="acquire")
        return kv.shuffle_idx(found, 0)

    @kv.func
    def publish(counter, count, lane):
        """Publish parts in the workspace; returns the count of parts published before."""
        kv.syncwarp()
        found = kv.i32(0)
        if lane == 0:
            found = counter.atomic("add", count, order="acq_rel")
        return kv.shuffle_idx(found, 0)

    @kv.func
    def reset_counter(counter, lane):
        """Reset the counter for the next launch; afterwards all lanes may read the other warps' parts."""
        kv.syncwarp()
        if lane == 0:
            counter.store(kv.i32(0))

    return SimpleNamespace(
        first_row=first_row, step_of=step_of, redistributed=redistributed, rows_here=rows_here, holder=holder,
        load=load, store_existing=store_existing, add=add, arrived=arrived, publish=publish,
        reset_counter=reset_counter,
    )  # fmt: skip
