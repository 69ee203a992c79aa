# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Latent rows with more in them than elements of a type: 8-bit elements, their scales, and bf16 keys at the end."""

from __future__ import annotations

import numpy as np

from kvarn.dialect import dtypes

from .random_caches import Problem, random_values


def store_latent_rows(rng: np.random.Generator, problem: Problem, layer: int, rope: int, elements: int = 0) -> int:
    """Put ``rope`` bf16 keys at the end of every row, and before them a scale for so many ``elements``, if any.

    Returns the columns that a query has: the elements' and the keys'.
    """
    cache = problem.collection.get_key_cache(layer)
    size, eight = cache.head_size - 2 * rope, cache.dtype.numpy
    content = size if not elements else size // (elements + 4) * elements
    for b, n in enumerate(problem.cached + problem.new):
        keys = random_values(rng, (n, rope), dtypes.bf16).view(np.uint8).reshape(n, 2 * rope)
        scales = rng.uniform(0.5, 2.0, (n, (size - content) // 4)).astype(np.float32).view(np.uint8)
        ends = np.concatenate([scales.reshape(n, size - content), keys], 1).view(eight)
        for t in range(n):
            cache.store(b, 0, t, content + np.arange(ends.shape[1]), ends[t])
    return content + rope
