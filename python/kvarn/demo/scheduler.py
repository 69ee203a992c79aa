# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Continuous batching: requests come and go while the others run on.

Every step is one ragged batch through the model: first one token of each sequence that is generating, then, up to a
budget of tokens, pieces of the prompts that are not through yet. A sequence that ends leaves the batch, and a waiting
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
        The index of an earlier request whose prompt starts with the same tokens. If that one is still in the batch,
        this one waits until it has gone through what they share and is forked from it.
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
class _Running:
    """A request in the batch. `pending` is what the cache has not seen: the rest of the prompt, or the last sample."""

    index: int
    request: Request
    answer: Answer
    pending: list[int]
    cached: int

    @property
    def in_prompt(self) -> bool:
        return self.cached < len(self.request.tokens)


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
        The most tokens in a step, at least `max_batch`; longer prompts go in piece by piece.
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
        running: list[_Running] = []
        step = 0
        while waiting or running:
            if not running:  # nothing to do before the next request comes
                step = max(step, min(requests[index].arrival for index in waiting))
            started = time.perf_counter()
            for index in list(waiting):
                sequence = self._admit(index, step, requests, answers, running)
                if sequence is not None:
                    waiting.remove(index)
                    running.append(sequence)
            batch = self._plan(running)
            prompt_tokens = sum(len(tokens) for sequence, tokens in batch if sequence.in_prompt)
            total = sum(len(tokens) for _, tokens in batch)
            sampled = self._run_step(batch, step, observer, select)
            for sequence, _ in batch:
                if sequence.answer.reason:
                    self.cache.close(sequence.index)
                    running.remove(sequence)
                    observer.finished(sequence.index, sequence.answer)
            seconds = time.perf_counter() - started
            observer.step(Step(step, prompt_tokens, total - prompt_tokens, sampled, len(batch), len(waiting), seconds))
            step += 1
        return answers

    def _admit(
        self,
        index: int,
        step: int,
        requests: Sequence[Request],
        answers: Sequence[Answer],
        running: Sequence[_Running],
    ) -> _Running | None:
        """Open a request in the cache if its time has come, or return None."""
        request, answer = requests[index], answers[index]
        if request.arrival > step or len(running) == self.max_batch:
            return None
        parent = next((sequence for sequence in running if sequence.index == request.parent), None)
        if parent is not None and parent.cached < common_prefix(request.tokens, parent.request.tokens):
            return None
        answer.reused = self.cache.open(index, request.tokens, parent.index if parent else None)
        answer.forked = parent is not None
        answer.first_step = step
        return _Running(index, request, answer, list(request.tokens[answer.reused :]), answer.reused)

    def _plan(self, running: Sequence[_Running]) -> list[tuple[_Running, list[int]]]:
        """Choose the new tokens of the step: generating sequences first, so that a long prompt holds nobody up."""
        budget = self.max_step_tokens
        batch = []
        for sequence in sorted(running, key=lambda sequence: sequence.in_prompt):
            tokens = sequence.pending[:budget]
            if tokens:
                batch.append((sequence, tokens))
                budget -= len(tokens)
        return batch

    def _run_step(
        self,
        batch: Sequence[tuple[_Running, list[int]]],
        step: int,
        observer: Observer,
        select: Callable[[int, NDArray[np.float32]], int],
    ) -> int:
        """Run one step and return how many tokens were sampled."""
        offsets = self.cache.begin_step([(sequence.index, tokens) for sequence, tokens in batch])
        # The last token of a sequence predicts the next one, but only when its prompt is through.
        through = [len(tokens) == len(sequence.pending) for sequence, tokens in batch]
        wanted = np.array([offsets[i + 1] - 1 for i, last in enumerate(through) if last], dtype=np.int64)
        tokens = np.array([token for _, part in batch for token in part], dtype=np.int64)
        logits = iter(self.model.forward(tokens, self.cache, wanted))
        sampled = [
            select(sequence.index, next(logits)) if last else None
            for (sequence, _), last in zip(batch, through, strict=True)
        ]
        self.cache.end_step(sampled)
        for (sequence, part), token in zip(batch, sampled, strict=True):
            sequence.cached += len(part)
            sequence.pending = sequence.pending[len(part) :]
            if token is not None:
                self._take(sequence, token, step, observer)
        return len(wanted)

    def _take(self, sequence: _Running, token: int, step: int, observer: Observer) -> None:
        """Add a sampled token to its answer, and end the answer where it ends."""
        answer = sequence.answer
        if token == self.end_of_text:
            answer.reason = "stop"
        else:
            answer.tokens.append(token)
            sequence.pending = [token]
            observer.token(sequence.index, token)
            if len(answer.tokens) == sequence.request.limit:
                answer.reason = "length"
        if answer.reason:
            answer.last_step = step


def common_prefix(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first tokens two prompts share, short of the last of `tokens`: something must be computed."""
    limit = min(len(tokens) - 1, len(others))
    return next((i for i in range(limit) if tokens[i] != others[i]), limit)
