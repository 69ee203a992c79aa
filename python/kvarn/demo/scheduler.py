# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Continuous batching: requests come and go while the others run on.

Every step is one ragged batch through the model: first one token of each sequence that is generating, then, up to a
budget of tokens, chunks of the prompts that are not through yet. A sequence that ends leaves the batch, and a waiting
request takes its place in the next step. Sampling is greedy, and nothing depends on the clock, so that a run can be
repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .model import KVCache, Model

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Request:
    """A prompt to answer.

    Attributes
    ----------
    tokens : tuple of int
        The prompt; at least one token.
    limit : int
        The most tokens to generate.
    arrival : int
        The step before which the request is not known.
    parent : int, optional
        The index of an earlier request whose prompt begins with the same tokens. If this request is known when that one
        starts, it is forked from it as soon as the tokens that both share are in the cache; else it starts by itself.
    """

    tokens: tuple[int, ...]
    limit: int
    arrival: int = 0
    parent: int | None = None


@dataclass
class Answer:
    """What became of a request.

    Attributes
    ----------
    tokens : list of int
        Generated, without the one that ends the text.
    reused : int
        Prompt tokens whose keys and values were in the cache already.
    forked : bool
        Whether it was opened from its parent.
    reason : str
        "" while it runs, then "stop" (the model ended the text) or "length" (the limit was reached).
    first_step, last_step : int
        Steps in which its first tokens went in and its last one came out.
    """

    tokens: list[int] = field(default_factory=list)
    reused: int = 0
    forked: bool = False
    reason: str = ""
    first_step: int = -1
    last_step: int = -1


@dataclass(frozen=True)
class Step:
    """One step of the batch.

    Attributes
    ----------
    index : int
        Counted from 0.
    prompt_tokens, answer_tokens : int
        Tokens that went in: of prompts, and of answers (one for each sequence that is generating).
    sampled : int
        Tokens that came out.
    running, waiting : int
        Sequences in the step, requests that were not.
    seconds : float
    """

    index: int
    prompt_tokens: int
    answer_tokens: int
    sampled: int
    running: int
    waiting: int
    seconds: float


class Observer:
    """Is told what happens; does nothing with it."""

    def token(self, request: int, token: int) -> None:
        """A token of an answer (never the one that ends the text)."""

    def finished(self, request: int, answer: Answer) -> None:
        """An answer is complete."""

    def step(self, step: Step) -> None:
        """A step is through."""


def greedy(request: int, logits: NDArray[np.float32]) -> int:
    """Return the token with the largest logit; the lowest id of several."""
    del request
    return int(logits.argmax())


@dataclass
class _Sequence:
    """A request that is open in the cache.

    `known` are the prompt and the answer so far, `cached` is how many of them the cache holds. `forks` are the places
    in the prompt, ascending, at which other requests branch off: the sequence pauses at each.
    """

    index: int
    request: Request
    answer: Answer
    known: list[int]
    cached: int = 0
    forks: list[tuple[int, int]] = field(default_factory=list)  # (tokens shared, request)

    @property
    def in_prompt(self) -> bool:
        return self.cached < len(self.request.tokens)

    @property
    def told(self) -> int:
        """How many tokens the cache may know: none past the next fork, since a fork has its parent's tokens."""
        return self.forks[0][0] if self.forks else len(self.known)


class Scheduler:
    """Run requests through a model and a cache.

    Parameters
    ----------
    model : Model
    cache : KVCache
    end_of_text : int
        The token that ends an answer.
    max_batch : int
        The most sequences in a step.
    max_step_tokens : int
        The most tokens in a step, at least `max_batch`; longer prompts go in chunk by chunk.
    """

    def __init__(
        self, model: Model, cache: KVCache, end_of_text: int, max_batch: int = 8, max_step_tokens: int = 256
    ) -> None:
        if max_batch < 1 or max_step_tokens < max_batch:
            raise ValueError(
                f"Scheduler: max_batch must be at least 1 and max_step_tokens at least max_batch, "
                f"got {max_batch} and {max_step_tokens}"
            )
        self.model = model
        self.cache = cache
        self.end_of_text = end_of_text
        self.max_batch = max_batch
        self.max_step_tokens = max_step_tokens

    def run(
        self,
        requests: Sequence[Request],
        observer: Observer | None = None,
        select: Callable[[int, NDArray[np.float32]], int] = greedy,
    ) -> list[Answer]:
        """Answer all requests.

        Parameters
        ----------
        requests : sequence of Request
        observer : Observer, optional
        select : callable
            ``select(request, logits)`` with the f32 [vocabulary] logits of the next token returns that token.

        Returns
        -------
        list of Answer
            In the order of the requests.
        """
        for index, request in enumerate(requests):
            if not request.tokens or request.limit < 1:
                raise ValueError(f"requests[{index}] must have a token and a limit of at least 1, got {request}")
            if request.parent is not None and not 0 <= request.parent < index:
                raise ValueError(f"requests[{index}].parent must be an earlier request, got {request.parent}")
        observer = observer or Observer()
        answers = [Answer() for _ in requests]
        waiting = list(range(len(requests)))
        forked: dict[int, _Sequence] = {}  # open in the cache, waiting for a place in the batch
        running: list[_Sequence] = []
        step = 0
        while waiting or running:
            if not running and not forked:  # nothing to do before the next request comes
                step = max(step, min(requests[index].arrival for index in waiting))
            started = time.perf_counter()
            self._admit(step, requests, answers, waiting, forked, running)
            batch = self._plan(running)
            prompt_tokens = sum(count for sequence, count in batch if sequence.in_prompt)
            total = sum(count for _, count in batch)
            sampled = self._run_step(batch, requests, answers, forked, select)
            for sequence, token in sampled:
                self._take(sequence, token, step, observer)
                if sequence.answer.reason:
                    self.cache.close(sequence.index)
                    running.remove(sequence)
                    observer.finished(sequence.index, sequence.answer)
            seconds = time.perf_counter() - started
            left = len(waiting)
            observer.step(Step(step, prompt_tokens, total - prompt_tokens, len(sampled), len(batch), left, seconds))
            step += 1
        return answers

    def _admit(
        self,
        step: int,
        requests: Sequence[Request],
        answers: Sequence[Answer],
        waiting: list[int],
        forked: dict[int, _Sequence],
        running: list[_Sequence],
    ) -> None:
        """Move requests whose time has come into the batch, in their order, while it has room."""
        branches = {index for sequence in running for _, index in sequence.forks}
        for index in list(waiting):
            request = requests[index]
            if len(running) == self.max_batch:
                return
            if request.arrival > step or index in branches:
                continue
            sequence = forked.pop(index, None)
            if sequence is None:
                sequence = _Sequence(index, request, answers[index], list(request.tokens))
                known = [i for i in waiting if requests[i].parent == index and requests[i].arrival <= step]
                places = [(common_prefix(requests[i].tokens, request.tokens), i) for i in known]
                sequence.forks = sorted(place for place in places if place[0])
                branches.update(i for _, i in sequence.forks)
                self.cache.open(index, sequence.known[: sequence.told])
            answers[index].first_step = step
            waiting.remove(index)
            running.append(sequence)

    def _plan(self, running: Sequence[_Sequence]) -> list[tuple[_Sequence, int]]:
        """Choose the new tokens of the step: generating sequences first, so that a long prompt holds nobody up."""
        budget = self.max_step_tokens
        batch = []
        for sequence in sorted(running, key=lambda sequence: sequence.in_prompt):
            if not budget:
                break
            reused = self.cache.reserve(sequence.index, min(budget, sequence.told - sequence.cached))
            sequence.cached += reused
            sequence.answer.reused += reused
            count = min(budget, sequence.told - sequence.cached)
            batch.append((sequence, count))
            budget -= count
        return batch

    def _run_step(
        self,
        batch: Sequence[tuple[_Sequence, int]],
        requests: Sequence[Request],
        answers: Sequence[Answer],
        forked: dict[int, _Sequence],
        select: Callable[[int, NDArray[np.float32]], int],
    ) -> list[tuple[_Sequence, int]]:
        """Run one step, fork what branches off where it ended, and return the sampled tokens."""
        offsets = self.cache.begin_step([(sequence.index, count) for sequence, count in batch])
        tokens = [t for sequence, count in batch for t in sequence.known[sequence.cached : sequence.cached + count]]
        # The last token of a sequence predicts the next one, but only when its prompt is through.
        through = [sequence.cached + count == len(sequence.known) for sequence, count in batch]
        wanted = np.array([offsets[i + 1] - 1 for i, last in enumerate(through) if last], dtype=np.int64)
        logits = self.model.forward(np.array(tokens, dtype=np.int64), self.cache, wanted)
        self.cache.end_step()
        for sequence, count in batch:
            sequence.cached += count
            self._branch(sequence, requests, answers, forked)
        predicting = [sequence for (sequence, _), last in zip(batch, through, strict=True) if last]
        return [(s, select(s.index, row)) for s, row in zip(predicting, logits, strict=True)]

    def _branch(
        self,
        sequence: _Sequence,
        requests: Sequence[Request],
        answers: Sequence[Answer],
        forked: dict[int, _Sequence],
    ) -> None:
        """Fork the requests that branch off where the sequence is now, and let it go on."""
        if not sequence.forks or sequence.cached < sequence.told:
            return
        place = sequence.told
        while sequence.forks and sequence.forks[0][0] == place:
            _, child = sequence.forks.pop(0)
            request, answer = requests[child], answers[child]
            self.cache.fork(sequence.index, child)
            self.cache.extend(child, request.tokens[place:])
            answer.reused, answer.forked = place, True
            forked[child] = _Sequence(child, request, answer, list(request.tokens), place)
        self.cache.extend(sequence.index, sequence.known[place : sequence.told])

    def _take(self, sequence: _Sequence, token: int, step: int, observer: Observer) -> None:
        """Add a sampled token to its answer, and end the answer where it ends."""
        answer = sequence.answer
        if token == self.end_of_text:
            answer.reason = "stop"
        else:
            answer.tokens.append(token)
            sequence.known.append(token)
            self.cache.extend(sequence.index, [token])
            observer.token(sequence.index, token)
            if len(answer.tokens) == sequence.request.limit:
                answer.reason = "length"
        if answer.reason:
            answer.last_step = step


def common_prefix(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first tokens two prompts share, short of the last of `tokens`: something must be computed."""
    limit = min(len(tokens) - 1, len(others))
    return next((i for i in range(limit) if tokens[i] != others[i]), limit)
