# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Continuous batching: requests join and leave while others run.

Every step is one ragged batch: one token of each generating sequence, then, up to a token budget, chunks of unfinished
prompts. A finished sequence leaves the batch, and a waiting request takes its place in the next step. Nothing depends
on the clock, so runs are reproducible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .model import KVCache, Model

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(eq=False)
class Request:
    """A prompt, and its answer as it grows.

    Attributes
    ----------
    index : int
        The sequence's number in the cache.
    tokens : list of int
        The prompt, then the answer without the token that ends the text.
    limit : int
        The most tokens to generate.
    arrival : int
        The first step that may include the request.
    parent : Request, optional
        An earlier request with the same arrival that is not a fork itself. This one is forked from it when the
        first `shared` tokens (at least one), which both prompts begin with, are in the cache.
    cached : int
        The number of tokens in the cache.
    reused : int
        The number of prompt tokens found in the cache, not computed for this request.
    reason : str
        "" while it runs, then "stop" (the model ended the text) or "length" (the limit was reached).
    """

    index: int
    tokens: list[int]
    limit: int
    arrival: int = 0
    parent: Request | None = None
    shared: int = 0
    cached: int = 0
    reused: int = 0
    reason: str = ""
    prompt_size: int = field(init=False)
    forks: list[Request] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_size = len(self.tokens)
        if self.parent is not None:
            self.parent.forks.append(self)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_size :]

    @property
    def in_prompt(self) -> bool:
        return self.cached < self.prompt_size

    @property
    def known_tokens(self) -> int:
        """The number of tokens to give to the cache: none past the next fork, since a fork has its parent's tokens."""
        return min((fork.shared for fork in self.forks if not fork.cached), default=len(self.tokens))


@dataclass(frozen=True)
class Step:
    """One step of the batch: the number of prompt tokens, and the sampled tokens with their requests.

    `sampled` includes end-of-text tokens.
    """

    number: int
    prompt_tokens: int
    sampled: list[tuple[Request, int]]
    seconds: float


def greedy(request: Request, logits: NDArray[np.float32]) -> int:
    """Return the token with the largest logit; of equal ones, the lowest id."""
    return int(logits.argmax())


def generate(
    model: Model,
    cache: KVCache,
    requests: Sequence[Request],
    end_of_text: int,
    max_batch: int = 8,
    max_step_tokens: int = 256,
    select: Callable[[Request, NDArray[np.float32]], int] = greedy,
) -> Iterator[Step]:
    """Answer all requests, and yield every step after it is done.

    Parameters
    ----------
    model : Model
    cache : KVCache
    requests : sequence of Request
        Updated in place: tokens, `cached`, `reused` and `reason`.
    end_of_text : int
        The token that ends an answer.
    max_batch : int
        The most sequences in a step.
    max_step_tokens : int
        The most tokens in a step, at least `max_batch`; longer prompts are split into chunks.
    select : callable
        ``select(request, logits)`` with the f32 [vocabulary] logits of the next token returns that token.
    """
    waiting, running, number = list(requests), list[Request](), 0
    while waiting or running:
        started = time.perf_counter()
        if not running:  # idle until the next arrival
            number = max(number, min(request.arrival for request in waiting))
        for request in list(waiting):
            # A fork can start once its parent is in the cache.
            if len(running) < max_batch and request.arrival <= number and (request.parent is None or request.cached):
                if request.parent is None:
                    cache.open(request.index, request.tokens[: request.known_tokens])
                waiting.remove(request)
                running.append(request)
        batch = plan(running, cache, max_step_tokens)
        prompt_tokens = sum(count for request, count in batch if request.in_prompt)
        sampled = run_step(model, cache, batch, select)
        for request, token in sampled:
            if token == end_of_text:
                request.reason = "stop"
            else:
                request.tokens.append(token)
                cache.extend(request.index, [token])
                request.reason = "length" if len(request.answer) == request.limit else ""
            if request.reason:
                cache.close(request.index)
                running.remove(request)
        yield Step(number, prompt_tokens, sampled, time.perf_counter() - started)
        number += 1


def plan(running: Sequence[Request], cache: KVCache, budget: int) -> list[tuple[Request, int]]:
    """Choose the new tokens of a step: generating sequences first, so that a long prompt does not delay them."""
    batch = []
    for request in sorted(running, key=lambda request: request.in_prompt):
        if not budget:
            break
        reused = cache.reserve(request.index, min(budget, request.known_tokens - request.cached))
        request.cached += reused
        request.reused += reused
        count = min(budget, request.known_tokens - request.cached)
        batch.append((request, count))
        budget -= count
    return batch


def run_step(
    model: Model,
    cache: KVCache,
    batch: Sequence[tuple[Request, int]],
    select: Callable[[Request, NDArray[np.float32]], int],
) -> list[tuple[Request, int]]:
    """Run one step, open the forks of sequences that reached their fork point, and return the sampled tokens."""
    offsets = cache.begin_step([(request.index, count) for request, count in batch])
    tokens = [token for r, count in batch for token in r.tokens[r.cached : r.cached + count]]
    # The last token of a sequence predicts the next one, if its prompt is complete.
    through = [(r, offsets[i + 1] - 1) for i, (r, count) in enumerate(batch) if r.cached + count == len(r.tokens)]
    logits = model.forward(tokens, cache, [row for _, row in through])
    cache.end_step()
    for request, count in batch:
        request.cached += count
        opened = [fork for fork in request.forks if not fork.cached and fork.shared == request.cached]
        for fork in opened:
            cache.fork(request.index, fork.index)
            cache.extend(fork.index, fork.tokens[fork.shared :])
            fork.cached = fork.reused = fork.shared
        if opened:
            cache.extend(request.index, request.tokens[request.cached : request.known_tokens])
    return [(request, select(request, row)) for (request, _), row in zip(through, logits, strict=True)]


def common_prefix(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix, less than `tokens`: at least one token must be computed."""
    limit = min(len(tokens) - 1, len(others))
    return next((i for i in range(limit) if tokens[i] != others[i]), limit)
