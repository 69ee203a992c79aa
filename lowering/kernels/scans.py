# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Prefix sums over the threads of a warp or block, and over the sequences of a batch."""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv


@kv.func
def warp_scan(x: Any) -> Any:
    """The inclusive prefix sum of one i32 per lane."""
    lane = kv.lane_id()
    for k in kv.static((1, 2, 4, 8, 16)):
        y = kv.shuffle_up(x, k)
        x = kv.where(lane >= k, x + y, x)
    return x


@kv.func
def block_scan(x: Any, sums: Any, warps: int) -> tuple[Any, Any]:
    """(inclusive prefix sum, sum of all) of one i32 per thread of ``warps`` warps.

    ``sums`` is shared memory with one i32 per warp, unused before and after.
    """
    lane, warp = kv.lane_id(), kv.warp_id()
    x = warp_scan(x)
    if lane == 31:
        sums[warp] = x
    kv.barrier()
    total = kv.i32(0)
    for w in kv.static(range(warps)):
        s = sums[w]
        x = x + kv.where(warp > w, s, 0)
        total = total + s
    kv.barrier()
    return x, total


@kv.func
def sums_before(number_of: Any, batch: Any, most: int, warps: int) -> tuple[Any, Any]:
    """(table in shared memory, sum of all) of the numbers of a batch of up to ``most`` sequences.

    Entry b of the table is the sum of ``number_of(i)`` over the sequences i before b. All threads of a block of
    ``warps`` warps call it.
    """
    table, sums = kv.shared(most + 1, kv.i32), kv.shared(warps, kv.i32)
    tid = kv.thread_id.x
    if tid == 0:
        table[0] = 0
    running = kv.i32(0)
    for base in range(0, batch, (32 * warps)):
        b = base + tid
        n = kv.i32(0)
        if b < batch:
            n = number_of(b)
        upto, here = block_scan(n, sums, warps)
        if b < batch:
            table[b + 1] = running + upto
        running = running + here
    kv.barrier()
    return table, running
