# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The demo's batching and its check, on a tiny model with random weights and the plain cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvarn.demo.check import Recorder, compare
from kvarn.demo.model import Model, NumpyDense, rope_frequencies
from kvarn.demo.plain_cache import PlainCache, rotate
from kvarn.demo.scheduler import Answer, Observer, Request, Scheduler, Step
from kvarn.demo.weights import LayerWeights, ModelConfig, ModelWeights

CONFIG = ModelConfig(
    layers=2,
    hidden=24,
    feed_forward=32,
    vocabulary=40,
    query_heads=6,
    kv_heads=2,
    head_size=8,
    context=64,
    rope_base=10000.0,
    norm_eps=1e-5,
)
END = 2


def tiny_weights(seed: int = 0) -> ModelWeights:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)

    c = CONFIG
    layers = tuple(
        LayerWeights(
            attention_norm=matrix(c.hidden) + 1,
            query_key_value=matrix((c.query_heads + 2 * c.kv_heads) * c.head_size, c.hidden),
            attention_output=matrix(c.hidden, c.query_heads * c.head_size),
            feed_forward_norm=matrix(c.hidden) + 1,
            gate_up=matrix(2 * c.feed_forward, c.hidden),
            down=matrix(c.hidden, c.feed_forward),
        )
        for _ in range(c.layers)
    )
    # Far apart embeddings make greedy choices clear, so that the order of sums cannot turn one round.
    return ModelWeights(c, matrix(c.vocabulary, c.hidden) * np.float32(8), layers, matrix(c.hidden) + 1)


WEIGHTS = tiny_weights()
PROMPTS = [(5, 6, 7, 8, 9, 10, 11), (5, 6, 7, 30), (12,), tuple(range(3, 33)), (5, 6, 7, 8, 9, 33)]
REQUESTS = [Request(prompt, limit=3 + 4 * i, arrival=2 * i) for i, prompt in enumerate(PROMPTS)]


class Log(Observer):
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.tokens: dict[int, list[int]] = {}
        self.ended: list[int] = []

    def step(self, step: Step) -> None:
        self.steps.append(step)

    def token(self, request: int, token: int) -> None:
        self.tokens.setdefault(request, []).append(token)

    def finished(self, request: int, answer: Answer) -> None:
        self.ended.append(request)


def make(max_batch: int = 8, max_step_tokens: int = 256, end: int = -1) -> Scheduler:
    cache = PlainCache(CONFIG, CONFIG.context)
    return Scheduler(Model(WEIGHTS, NumpyDense()), cache, end, max_batch, max_step_tokens)


def one_by_one(requests: Sequence[Request]) -> tuple[list[list[int]], list[list[np.ndarray]]]:
    """The answers and logits of each request run by itself, its whole text as one prompt at every position."""
    answers, logits = [], []
    for request in requests:
        tokens, seen = list(request.tokens), []
        for _ in range(request.limit):
            cache = PlainCache(CONFIG, CONFIG.context)
            cache.open(0, tokens)
            cache.begin_step([(0, len(tokens))])
            result = Model(WEIGHTS, NumpyDense()).forward(np.array(tokens), cache, np.array([len(tokens) - 1]))
            seen.append(result[0])
            tokens.append(int(result[0].argmax()))
        answers.append(tokens[len(request.tokens) :])
        logits.append(seen)
    return answers, logits


@pytest.mark.parametrize(("max_batch", "max_step_tokens"), [(8, 256), (2, 256), (3, 5), (1, 1)])
def test_a_ragged_batch_gives_what_each_request_gives_alone(max_batch: int, max_step_tokens: int) -> None:
    recorder = Recorder()
    log = Log()
    answers = make(max_batch, max_step_tokens).run(REQUESTS, log, recorder)
    expected, logits = one_by_one(REQUESTS)
    assert [answer.tokens for answer in answers] == expected
    assert [log.tokens[i] for i in range(len(REQUESTS))] == expected
    for index, reference in enumerate(logits):
        np.testing.assert_allclose(recorder.logits[index], reference, rtol=1e-4, atol=1e-4)
    assert sorted(log.ended) == list(range(len(REQUESTS)))
    assert all(step.running <= max_batch for step in log.steps)
    assert all(step.prompt_tokens + step.answer_tokens <= max_step_tokens for step in log.steps)
    assert sum(step.prompt_tokens for step in log.steps) == sum(map(len, PROMPTS))
    assert sum(step.sampled for step in log.steps) == sum(request.limit for request in REQUESTS)


def test_prompts_and_answers_share_steps() -> None:
    log = Log()
    make().run(REQUESTS, log)
    assert any(step.prompt_tokens and step.answer_tokens for step in log.steps)
    assert max(step.running for step in log.steps) > 2


def test_a_long_prompt_does_not_hold_up_a_running_answer() -> None:
    log = Log()
    make(max_batch=2, max_step_tokens=4).run([Request((5, 6), 12), Request(tuple(range(3, 33)), 1, arrival=1)], log)
    assert [step.answer_tokens for step in log.steps[1:11]] == [1] * 10


def test_the_end_of_text_ends_an_answer_and_is_not_in_it() -> None:
    free = make().run([REQUESTS[3]])[0].tokens
    end = free[4]
    first = free.index(end)
    answer = make(end=end).run([REQUESTS[3]])[0]
    assert (answer.tokens, answer.reason) == (free[:first], "stop")


def test_the_limit_ends_an_answer() -> None:
    answer = make().run([REQUESTS[0]])[0]
    assert (len(answer.tokens), answer.reason) == (REQUESTS[0].limit, "length")


def test_a_request_that_nobody_precedes_is_not_waited_for() -> None:
    log = Log()
    make().run([Request((5,), 1, arrival=1000)], log)
    assert [step.index for step in log.steps] == [1000]


class Spy(PlainCache):
    """A plain cache that knows which tokens it holds, and that takes given numbers of them for known already."""

    def __init__(self, reuse: dict[int, int] | None = None) -> None:
        super().__init__(CONFIG, CONFIG.context)
        self.tokens: dict[int, list[int]] = {}
        self.forks: list[tuple[int, int, int]] = []
        self.reuse = reuse or {}

    def open(self, sequence: int, tokens: Sequence[int]) -> None:
        super().open(sequence, tokens)
        self.tokens[sequence] = list(tokens)

    def fork(self, parent: int, sequence: int) -> None:
        super().fork(parent, sequence)
        self.tokens[sequence] = list(self.tokens[parent])
        self.forks.append((parent, sequence, self._lengths[parent]))
        assert len(self.tokens[parent]) == self._lengths[parent], "a fork must come when all known tokens are in"

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        self.tokens[sequence] += tokens

    def reserve(self, sequence: int, count: int) -> int:
        super().reserve(sequence, count)
        reused = self.reuse.pop(sequence, 0)
        if reused:  # as if another sequence had computed them: let the model do it now, out of sight
            tokens = self.tokens[sequence][:reused]
            self.begin_step([(sequence, reused)])
            Model(WEIGHTS, NumpyDense()).forward(np.array(tokens), self, np.array([], np.int64))
            self.end_step()
        return reused

    def begin_step(self, batch: Sequence[tuple[int, int]]) -> np.ndarray:
        for sequence, count in batch:
            assert 0 < self._lengths[sequence] + count <= len(self.tokens[sequence]), "the tokens must be known"
        return super().begin_step(batch)


@pytest.mark.parametrize("max_step_tokens", [8, 256])
def test_forks_give_what_the_requests_give_alone(max_step_tokens: int) -> None:
    shared = PROMPTS[3]
    requests = [
        Request(shared, 9),
        Request((*shared[:20], 35, 36), 8, parent=0),
        Request((*shared, 37), 4, parent=0),
        Request((*shared[:20], 38), 5, parent=0),
        Request((39, 38), 3, parent=0),
        Request((*shared[:10], 38), 3, arrival=1, parent=0),
        Request(shared, 9, parent=0),
    ]
    cache = Spy()
    log = Log()
    answers = Scheduler(Model(WEIGHTS, NumpyDense()), cache, -1, 3, max_step_tokens).run(requests, log)
    assert cache.forks == [(0, 1, 20), (0, 3, 20), (0, 6, 29), (0, 2, 30)]
    assert [(answer.forked, answer.reused) for answer in answers] == [
        (False, 0), (True, 20), (True, 30), (True, 20), (False, 0), (False, 0), (True, 29),
    ]  # fmt: skip
    assert [answer.tokens for answer in answers] == one_by_one(requests)[0]
    assert sum(step.prompt_tokens for step in log.steps) == 30 + 2 + 1 + 1 + 2 + 11 + 1
    assert not cache._data, "everything must be closed"


def test_tokens_that_the_cache_holds_already_are_not_computed() -> None:
    cache = Spy(reuse={0: 4, 3: 28})
    log = Log()
    answers = Scheduler(Model(WEIGHTS, NumpyDense()), cache, -1, 8, 16).run(REQUESTS, log)
    assert [answer.reused for answer in answers] == [4, 0, 0, 28, 0]
    assert [answer.tokens for answer in answers] == one_by_one(REQUESTS)[0]
    assert sum(step.prompt_tokens for step in log.steps) == sum(map(len, PROMPTS)) - 32


def test_the_check_agrees_with_itself_and_sees_a_wrong_logit() -> None:
    recorder = Recorder()
    answers = make(2, 5, end=END).run(REQUESTS, select=recorder)
    good = compare(WEIGHTS, END, REQUESTS, answers, recorder, 1e-3)
    assert good.agrees
    assert good.worst < 1e-3
    assert not good.near_ties
    assert good.positions == sum(len(answer.tokens) + (answer.reason == "stop") for answer in answers)
    recorder.logits[1][2] = recorder.logits[1][2] + np.float32(0.5)
    bad = compare(WEIGHTS, END, REQUESTS, answers, recorder, 1e-3)
    assert not bad.agrees
    assert bad.worst == pytest.approx(0.5, abs=1e-3)


def test_the_check_sees_nan_and_a_wrong_token() -> None:
    recorder = Recorder()
    answers = make().run(REQUESTS[:1], select=recorder)
    recorder.logits[0][0] = np.full(CONFIG.vocabulary, np.nan, np.float32)
    assert not compare(WEIGHTS, -1, REQUESTS[:1], answers, recorder, 1e3).agrees
    recorder = Recorder()
    answers = make().run(REQUESTS[:1], select=recorder)
    answers[0].tokens[1] = int(recorder.logits[0][1].argmin())
    found = compare(WEIGHTS, -1, REQUESTS[:1], answers, recorder, 1e-3)
    assert not found.agrees
    assert (found.wrong[0].position, found.wrong[0].paged) == (1, answers[0].tokens[1])


def test_a_near_tie_is_told_from_a_wrong_token() -> None:
    recorder = Recorder()
    answers = make().run(REQUESTS[:1], select=recorder)
    last = REQUESTS[0].limit - 1
    logits = recorder.logits[0][last]
    best, second = np.argsort(logits)[::-1][:2]
    gap = float(logits[best] - logits[second])
    answers[0].tokens[last] = int(second)
    assert compare(WEIGHTS, -1, REQUESTS[:1], answers, recorder, gap).near_ties[0].gap == pytest.approx(gap, rel=1e-3)
    assert compare(WEIGHTS, -1, REQUESTS[:1], answers, recorder, gap * 0.4).wrong


def test_rotation_is_the_complex_product_of_neighbours() -> None:
    x = np.random.default_rng(1).standard_normal((5, 3, CONFIG.head_size), dtype=np.float32)
    table = rope_frequencies(CONFIG, 9)[4:9]
    turned = x[..., 0::2] + 1j * x[..., 1::2]
    angles = np.arange(4, 9)[:, None] * 10000.0 ** (-np.arange(0, CONFIG.head_size, 2) / CONFIG.head_size)
    turned = turned * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(rotate(x, table), np.stack([turned.real, turned.imag], -1).reshape(x.shape), atol=1e-5)


@pytest.mark.parametrize(
    "requests", [[Request((), 1)], [Request((1,), 0)], [Request((1,), 1, parent=0)], [Request((1,), 1, parent=1)]]
)
def test_bad_requests_are_refused(requests: list[Request]) -> None:
    with pytest.raises(ValueError, match=r"requests\[0\]"):
        make().run(requests)


def test_a_batch_that_cannot_take_one_token_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_step_tokens"):
        make(max_batch=4, max_step_tokens=3)


def test_the_plain_cache_refuses_what_does_not_fit() -> None:
    cache = PlainCache(CONFIG, 4)
    cache.open(0, [1])
    with pytest.raises(ValueError, match="must be new"):
        cache.open(0, [1])
    with pytest.raises(ValueError, match="must fit in 4 tokens"):
        cache.reserve(0, 5)
