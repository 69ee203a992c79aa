# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Selection of the K largest of many numbers by a block, or by one thread on the host, without sorting them.

Numbers are represented by keys: unsigned integers in the same order, 0 for numbers that are never selected. The K-th
largest key is found eleven bits at a time, from the top: a histogram in shared memory of the keys that match the bits
so far determines the next ones. A second pass writes the larger keys in order, and as many of the keys equal to the
K-th as are needed, the first ones. Only integers are counted, so the result does not depend on thread order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import i32

from ..common import WARP
from ..scans import block_scan

DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits), from the top
BINS = 1 << 11
ALWAYS, NOT_A_NUMBER = 0xFFFFFFFF, 0xFFFFFFFE  # keys of numbers that are always selected, and of NaN


@kv.func
def key_of(score: Any) -> Any:
    """The key of an f32: both zeros are equal, and NaN is larger than any number."""
    bits = kv.bitcast(kv.where(score == 0.0, 0.0, score), kv.u32)
    key = kv.where(bits >= 0x80000000, ~bits, bits | kv.u32(0x80000000))
    return kv.where(score != score, kv.u32(NOT_A_NUMBER), key)


def chooser(threads: int, key_at: Callable[..., Any], put: Callable[..., Any]) -> Any:
    """A function ``choose(state, count, most)`` for a block of ``threads``, which returns the number of selected ones.

    Parameters
    ----------
    threads : int
        256 or more, or 1 on the host.
    key_at : kv.func
        ``key_at(state, i)``, the key of number i.
    put : kv.func
        ``put(state, place, i)``, which writes number i as the ``place``-th selected one.
    """
    per_thread = BINS // threads
    warps = threads // WARP

    @kv.func
    def barrier():
        if threads > 1:
            kv.barrier()

    @kv.func
    def scan(x, sums):
        if threads > 1:
            return block_scan(x, sums, warps)
        return x, x

    @kv.func
    def counted(state, count, shift, bits, prefix, bins):
        """A histogram of one digit, over the keys whose higher digits are ``prefix``."""
        tid = kv.thread_id.x
        for i in range(tid, BINS, threads):
            bins[i] = 0
        barrier()
        for i in range(tid, count, threads):
            key = key_at(state, i)
            same = key != 0
            if shift + bits < 32:
                same = same & (key >> (shift + bits) == prefix)
            if same:
                digit = kv.i32((key >> shift) & ((1 << bits) - 1))
                if threads > 1:
                    kv.atomic_add(bins, digit, 1)
                else:
                    bins[digit] = bins[digit] + 1
        barrier()

    @kv.func
    def threshold(state, count, most, bins, sums, found):
        """(the smallest selected key, how many equal to it are selected); (0, 0) if all are selected."""
        tid, prefix, left = kv.thread_id.x, kv.u32(0), most
        if tid == 0:  # the result for fewer numbers than wanted
            found[0], found[1] = 0, 0
        for shift, bits in kv.static(DIGITS):
            if left > 0:
                counted(state, count, shift, bits, prefix, bins)
                mine, first = i32(0), BINS - 1 - tid * per_thread  # from the largest digit down
                for k in range(per_thread):
                    mine = mine + bins[first - k]
                upto, all_ = scan(mine, sums)
                before = upto - mine
                if (upto >= left) & (before < left):
                    for k in range(per_thread):
                        here = bins[first - k]
                        if (before < left) & (before + here >= left):
                            found[0], found[1] = first - k, left - before
                        before = before + here
                barrier()
                prefix, left = (prefix << bits) | kv.u32(found[0]), found[1]
                if shift == DIGITS[0][0]:  # there are no more numbers than wanted
                    enough = all_ > most
                    prefix, left = kv.where(enough, prefix, 0), kv.where(enough, left, 0)
        return prefix, left

    @kv.func
    def choose(state, count, most):
        bins, sums, found = kv.shared(BINS, i32), kv.shared(max(warps, 1), i32), kv.shared(2, i32)
        least, equal, above, same = kv.u32(0), i32(0), i32(0), i32(0)
        if count > most:
            least, equal = threshold(state, count, most, bins, sums, found)
        for base in range(0, kv.where(most > 0, count, 0), threads):
            i = base + kv.thread_id.x
            key = kv.u32(0)
            if i < count:
                key = key_at(state, i)
            more = i32(key > least)
            even = i32((key == least) & (key != 0))
            upto, all_ = scan(more | (even << 16), sums)
            before = same + (upto >> 16) - even
            if (more == 1) | ((even == 1) & (before < equal)):
                put(state, above + (upto & 0xFFFF) - more + kv.math.min(before, equal), i)
            above, same = above + (all_ & 0xFFFF), same + (all_ >> 16)
        return above + kv.math.min(same, equal)

    return choose
