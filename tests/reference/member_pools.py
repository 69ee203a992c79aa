# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random pools of every kind for the tests of members."""

from __future__ import annotations

from typing import Any

import numpy as np

from .random_caches import random_problem

LENGTHS = [13, 0, 37, 16]
POOLS: dict[str, dict[str, Any]] = {
    "paged": {"kind": "paged", "dtype": "bf16", "page_size": 8},
    "continuous": {"kind": "continuous", "dtype": "f16"},
    "fa3": {"kind": "fa3", "dtype": "bf16", "page_size": 8},
    "mla": {"kind": "paged", "dtype": "f16", "num_heads": 1, "head_size": 24, "is_mla": True, "page_size": 4},
    "fp8": {"kind": "paged", "dtype": "f8e4m3", "scale_dtype": "f32", "granularity": 8},
    "int8": {"kind": "paged", "dtype": "i8", "scale_dtype": "f16", "granularity": 16, "page_size": 4},
}
WITH_ROWS = ["paged", "continuous", "mla", "fp8"]
QUANTIZED = ["fp8", "int8"]


def made(pool: str, seed: int = 1, **options: Any) -> Any:
    """A random collection; its cached tokens hold random values."""
    rng = np.random.default_rng(seed)
    return random_problem(rng, **{"cached": LENGTHS, "new": [2, 1, 0, 3], "num_layers": 3, **POOLS[pool], **options})


def cache_of(collection: Any, layer: int = 1, half: str = "key") -> Any:
    return getattr(collection, f"get_{half}_cache")(layer)


def halves(collection: Any) -> tuple[str, ...]:
    return ("key",) if collection.is_mla else ("key", "value")
