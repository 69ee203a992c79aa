# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores of latent rows with query rows as rows: masks, softmax, and the stores of weights.

Of 64 rows a warp has 16 and a thread two; of every eight keys a thread has two: its element 4 n + 2 u + i is at row
``16 warp + lane / 4 + 8 u`` and key ``8 n + 2 (lane % 4) + i``. So a maximum takes two shuffles within a warp.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.ops.weights import LARGEST
from kvarn.dsl.softmax import SLACK
from kvarn.dsl.values import rounded_product

from ..attention.partials import are_large, is_large, normalizer
from .common import KEYS, NEVER, pack


def row_of(warp: Any, lane: Any, u: int) -> Any:
    """A thread's upper (u = 0) or lower (u = 1) row."""
    return warp * 16 + (lane >> 2) + 8 * u


def elements_of(warp: Any, lane: Any) -> list[tuple[Any, Any]]:
    """(row, key) of a thread's scores."""
    return [(row_of(warp, lane, k // 2 % 2), k // 4 * 8 + (lane & 3) * 2 + k % 2) for k in range(KEYS // 2)]


@kv.func
def masked(c, s, seen, start, num_keys, row0, rows, base, warp, lane):
    """Minus infinity for masked keys; ``seen`` are the bits of the listed keys of a tile that exist."""
    for u in kv.static(range(2)):
        if not c.case.listed:
            at = kv.math.min(row0 + warp * 16 + (lane >> 2) + 8 * u, rows - 1)
            low, high = c.case.mask.interval(start + at // c.case.heads, num_keys)
        for n in kv.static(range(KEYS // 8)):
            for i in kv.static(range(2)):
                k = 4 * n + 2 * u + i
                if c.case.listed:
                    shown = ((seen[n // 4] >> ((n % 4) * 8 + (lane & 3) * 2 + i)) & 1) != 0
                else:
                    token = base + n * 8 + (lane & 3) * 2 + i
                    shown = (token >= low) & (token < high)
                s[k] = kv.where(shown, s[k], float("-inf"))


@kv.func
def softmax(s, m, total, alpha, scales_log2):
    """One tile of an online softmax for a thread's two rows; ``s`` becomes the weights.

    ``scales_log2`` makes the rows' products powers of two.
    """
    for u in kv.static(range(2)):
        mine = [4 * n + 2 * u + i for n in range(KEYS // 8) for i in range(2)]
        tops = [kv.math.max(*[s[i] for i in mine[k::4]]) for k in range(4)]
        top = kv.math.max(kv.math.max(tops[0], tops[1]), kv.math.max(tops[2], tops[3]))
        for k in kv.static((1, 2)):
            top = kv.math.max(top, kv.shuffle_xor(top, k))
        top = kv.math.min(rounded_product(top, scales_log2[u]), LARGEST)
        top = kv.where(top > m[u] + SLACK, top, m[u])
        alpha[u] = kv.ex2(m[u] - top)
        m[u] = top
    under = [list(m), list(scales_log2)]
    if are_large(m):
        large = [is_large(m[u]) for u in range(2)]
        for i in kv.static(range(len(s))):
            u = i // 2 % 2
            s[i] = kv.where(large[u], rounded_product(s[i], scales_log2[u]) - m[u], s[i])
        under[0] = [kv.where(large[u], 0.0, m[u]) for u in range(2)]
        under[1] = [kv.where(large[u], 1.0, scales_log2[u]) for u in range(2)]
    for u in kv.static(range(2)):
        mine = [4 * n + 2 * u + i for n in range(KEYS // 8) for i in range(2)]
        sums = [kv.f32(0.0)] * 4
        for j in kv.static(range(len(mine))):
            i = mine[j]
            s[i] = kv.ex2(kv.math.fma(s[i], under[1][u], -under[0][u]))
            sums[j % 4] = sums[j % 4] + s[i]
        total[u] = total[u] * alpha[u] + ((sums[0] + sums[1]) + (sums[2] + sums[3]))


def packed(dtype: Any, s: list[Any]) -> list[list[Any]]:
    """16-bit weights as operand A, in k-steps of 16 keys."""
    return [[pack(dtype, s[8 * k + i], s[8 * k + i + 1]) for i in (0, 2, 4, 6)] for k in range(KEYS // 16)]


@kv.func
def store_weights(layout, words, weights, warp, lane):
    """Store weights to shared memory, one row per query row: four matrices at a time, upper and lower rows."""
    row = warp * 16 + (lane & 15)
    for k in kv.static(range(len(words))):
        kv.stmatrix(weights + layout.chunk_offset(row, 2 * k + (lane >> 4)), words[k])


@kv.func
def store_factors(alpha, factors, warp, lane):
    """Store the factors of the accumulators for the warps that have these."""
    if (lane & 3) == 0:
        for u in kv.static(range(2)):
            (factors + row_of(warp, lane, u) * 4).store(alpha[u])


@kv.func
def store_ends(m, total, factor, final, ends, warp, lane):
    """Store the factors of the final accumulators and base-2 log-sum-exps; ``factor`` applies to all weights."""
    for u in kv.static(range(2)):
        for k in kv.static((1, 2)):
            total[u] = total[u] + kv.shuffle_xor(total[u], k)
        if (lane & 3) == 0:
            row = row_of(warp, lane, u)
            (final + row * 4).store(normalizer(total[u], factor))
            (ends + row * 4).store(kv.where(total[u] == 0.0, NEVER, m[u] + kv.math.log2(total[u])))
