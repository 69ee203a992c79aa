# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Prefills over decompressed chunks of latent rows, whose keys end in columns of these, and their model in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.dialect import dtypes

from . import attention as reference
from .latent import store_latent_rows
from .random_caches import Problem, random_values, stored_problem

RAGGED = {"cached": [5, 0, 37, 9, 0], "new": [2, 13, 6, 0, 0]}


@dataclass
class Prefill:
    """A prefill's problem: ``rope`` columns of the latent rows end the keys, the others are decompressed.

    ``bytes_`` is how many elements of a row these columns take: twice as many where they are bf16 in 8-bit rows.
    """

    problem: Problem
    query: np.ndarray
    key_weights: np.ndarray  # [Hq, Dn, C], C the columns before the rope's
    value_weights: np.ndarray  # [Hq, Dv, C]
    rope: int
    bytes_: int
    ropes: list[np.ndarray]  # [tokens, R] a sequence, float64, as attention sees them

    @property
    def content(self) -> int:
        return self.key_weights.shape[2]

    def expand(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of latent rows, as a model's matmuls make them."""
        latent = rows[:, : self.content].astype(np.float32)
        return tuple(
            np.einsum("tc,hdc->thd", latent, w).astype(self.query.dtype) for w in (self.key_weights, self.value_weights)
        )

    def keys_and_values(self, b: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 [count, Hq, Dn + R] and [count, Hq, Dv] of a sequence's first tokens."""
        cache = self.problem.collection.get_key_cache(1)
        read = cache.load_quantized if cache.scale_dtype is not None else cache.load
        rows = np.asarray(read(b, 0, np.arange(count)[:, None], np.arange(cache.head_size)))
        nope, value = self.expand(rows)
        ropes = np.repeat(self.ropes[b][:count, None], nope.shape[1], 1)
        return np.concatenate([nope.astype(np.float64), ropes], 2), value.astype(np.float64)


def prefill(
    seed: int, dtype: str = "f32", heads: int = 3, nope: int = 16, rope: int = 8, values: int = 24,
    bf16_rope: bool = False, query: str | None = None, **shape: Any,
) -> Prefill:  # fmt: skip
    bytes_ = 2 * rope if bf16_rope else rope
    content = 24
    rng, problem = stored_problem(
        seed, dtype=dtype, num_heads=1, is_mla=True,
        **{"head_size": content + bytes_, "page_size": 4, **RAGGED, **shape},
    )  # fmt: skip
    wide = dtypes.of(query or (dtype if dtypes.of(dtype).bits > 8 else "f32"))
    cache, totals = problem.collection.get_key_cache(1), problem.cached + problem.new
    if bf16_rope:
        store_latent_rows(rng, problem, 1, rope)
    ropes = [
        reference.latent_rows(cache, b, np.arange(n), content + rope)[:, 0, content:] for b, n in enumerate(totals)
    ]
    rows = random_values(rng, (problem.tokens, heads, nope + rope), wide)
    weights = [rng.standard_normal((heads, d, content), np.float32) / 5 for d in (nope, values)]
    return Prefill(problem, rows, *weights, rope, bytes_, ropes)


def dense(p: Prefill) -> tuple[np.ndarray, np.ndarray]:
    """Dense causal attention with the keys [nope, rope], float64."""
    problem, offsets = p.problem, p.problem.row_offsets.astype(int)
    out = np.zeros((problem.tokens, p.query.shape[1], p.value_weights.shape[1]))
    lse = np.zeros(out.shape[:2])
    for b, (cached, new) in enumerate(zip(problem.cached, problem.new, strict=True)):
        if new:
            rows = slice(offsets[b], offsets[b + 1])
            keys, values = p.keys_and_values(b, cached + new)
            seen = reference.visible("causal", cached + np.arange(new), np.arange(cached + new))
            query = p.query[rows].astype(np.float64)
            out[rows], lse[rows] = reference.dense_attention(query, keys, values, seen, p.query.shape[2] ** -0.5)
    return out, lse


def chunks_of(p: Prefill, tokens: int) -> tuple[Any, int]:
    """A plan with two chunks more than are needed, and how many those are."""
    needed = -(-int((p.problem.cached + p.problem.new).sum()) // tokens)
    lengths = p.problem.collection.cache_lengths
    return kv.ops.mla_prefill_plan(p.problem.row_offsets, lengths, tokens, needed + 2), needed


def buffer_of(p: Prefill, tokens: int) -> np.ndarray:
    cache = p.problem.collection.get_key_cache(1)
    return np.zeros((tokens, cache.head_size), cache.dtype.numpy)
