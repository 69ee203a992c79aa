# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compare a run on the paged cache with the same run on the plain one.

The plain run is fed the tokens that the paged run sampled, so every position is comparable, even after a near tie is
decided differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .arrays import NumpyArrays
from .model import Model
from .plain_cache import PlainCache
from .scheduler import Request, generate, greedy
from .weights import ModelWeights

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The largest logit difference that counts as agreement, by the cache's dtype. Logits of this model reach about 40. In
# f32, only the order of sums differs; bf16 keeps 8 bits of every query, key, value and result.
TOLERANCE = {"f32": 1e-3, "bf16": 1.0}


@dataclass
class Recorder:
    """A greedy sampler that records the logits of every position, by request index."""

    logits: dict[int, list[NDArray[np.float32]]] = field(default_factory=dict)

    def __call__(self, request: Request, logits: NDArray[np.float32]) -> int:
        self.logits.setdefault(request.index, []).append(logits.copy())
        return greedy(request, logits)


@dataclass
class Comparison:
    """The largest logit difference at each predicted position, and the number of equal greedy tokens.

    If the logits agree but the tokens differ, two tokens nearly tie: their logits in the plain run differ by at most
    twice the tolerance.
    """

    tolerance: float
    differences: list[float] = field(default_factory=list)
    equal_tokens: int = 0

    @property
    def agrees(self) -> bool:
        return bool(self.differences) and max(self.differences) <= self.tolerance

    def __str__(self) -> str:
        count = len(self.differences)
        return (
            f"{'agrees' if self.agrees else 'DOES NOT AGREE'} with a plain NumPy cache: {count} predictions, logits "
            f"differ by at most {max(self.differences):.2g} (tolerance {self.tolerance:g}), mean "
            f"{sum(self.differences) / count:.2g}; {self.equal_tokens} greedy tokens equal"
        )


def compare(
    weights: ModelWeights, end_of_text: int, requests: Sequence[Request], paged: Recorder, tolerance: float
) -> Comparison:
    """Run the requests again, on a plain contiguous cache in NumPy, and compare every prediction with `paged`'s."""
    found = Comparison(tolerance)
    again = [Request(r.index, r.tokens[: r.prompt_size], r.limit) for r in requests]

    def select(request: Request, logits: NDArray[np.float32]) -> int:
        recorded = paged.logits[request.index][len(request.answer)]
        difference = float(np.max(np.abs(recorded - logits)))
        found.differences.append(difference if np.isfinite(difference) else np.inf)
        token = greedy(request, recorded)
        found.equal_tokens += token == greedy(request, logits)
        return token

    cache = PlainCache(weights.config, max(r.prompt_size + r.limit for r in requests))
    for _ in generate(Model(weights, NumpyArrays("f32")), cache, again, end_of_text, select=select):
        pass
    return found
