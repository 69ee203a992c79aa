# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compare a run on the paged cache with the same run on the plain one.

The plain run is fed the tokens that the paged run chose, so that every position can be compared, even after a near tie
was decided the other way; the token that each of them would choose is compared too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from .model import Model, NumpyDense
from .plain_cache import PlainCache
from .scheduler import Answer, Observer, Request, Scheduler, greedy
from .weights import ModelWeights

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The largest difference of a logit that counts as agreement, by the cache's dtype. Logits of this model reach about 40.
# f32 differs by the order of sums only (seen: 1e-4); bf16 keeps 8 bits of every query, key, value and
# result (seen: 0.3).
TOLERANCE = {"f32": 1e-3, "bf16": 1.0}


@dataclass
class Recorder:
    """Samples greedily and keeps the logits of every position."""

    logits: dict[int, list[NDArray[np.float32]]] = field(default_factory=dict)

    def __call__(self, request: int, logits: NDArray[np.float32]) -> int:
        self.logits.setdefault(request, []).append(logits.copy())
        return greedy(request, logits)


@dataclass(frozen=True)
class Disagreement:
    """A position where the caches would choose different tokens; `gap` is how much the plain run prefers its own."""

    request: int
    position: int
    paged: int
    plain: int
    gap: float


@dataclass(frozen=True)
class Comparison:
    """What the comparison found.

    Attributes
    ----------
    positions : int
        How many next-token predictions were compared.
    worst : float
        The largest difference of any logit.
    mean : float
        The mean over positions of the largest difference at the position.
    tolerance : float
    near_ties, wrong : tuple of Disagreement
        Different choices that the tolerance explains (both logits may be off by it), and those that it does not.
    """

    positions: int
    worst: float
    mean: float
    tolerance: float
    near_ties: tuple[Disagreement, ...]
    wrong: tuple[Disagreement, ...]

    @property
    def agrees(self) -> bool:
        return self.positions > 0 and self.worst <= self.tolerance and not self.wrong


def compare(
    weights: ModelWeights,
    end_of_text: int,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    recorder: Recorder,
    tolerance: float,
    observer: Observer | None = None,
    max_batch: int = 8,
) -> Comparison:
    """Run the requests on a plain contiguous cache in NumPy and compare every prediction.

    Parameters
    ----------
    weights : ModelWeights
    end_of_text : int
    requests, answers : sequences
        What the paged run was asked and what it answered.
    recorder : Recorder
        The paged run's logits.
    tolerance : float
        See `TOLERANCE`.
    observer : Observer, optional
        Is told of the plain run's steps.
    max_batch : int
        Sequences in one step of the plain run.

    Returns
    -------
    Comparison
    """
    chosen = [[*a.tokens, end_of_text] if a.reason == "stop" else list(a.tokens) for a in answers]
    done = [0] * len(requests)
    differences: list[float] = []
    disagreements: list[Disagreement] = []

    def select(request: int, logits: NDArray[np.float32]) -> int:
        position = done[request]
        done[request] += 1
        paged, token = recorder.logits[request][position], chosen[request][position]
        difference = float(np.max(np.abs(paged - logits)))
        differences.append(difference if np.isfinite(difference) else np.inf)
        own = greedy(request, logits)
        if own != token:
            disagreements.append(Disagreement(request, position, token, own, float(logits[own] - logits[token])))
        return token

    capacity = max(len(request.tokens) + request.limit for request in requests)
    cache = PlainCache(weights.config, capacity)
    alone = [replace(request, parent=None, arrival=0) for request in requests]
    scheduler = Scheduler(Model(weights, NumpyDense()), cache, end_of_text, max_batch=max_batch)
    scheduler.run(alone, observer, select)
    return Comparison(
        positions=len(differences),
        worst=max(differences, default=0.0),
        mean=float(np.mean(differences)) if differences else 0.0,
        tolerance=tolerance,
        near_ties=tuple(d for d in disagreements if d.gap <= 2 * tolerance),
        wrong=tuple(d for d in disagreements if not d.gap <= 2 * tolerance),
    )
