# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.testing: what is timed, how often and against what."""

import time

import numpy as np
import pytest

import kvarn as kv


def test_calls_are_timed_by_turns_and_compared_sample_by_sample(monkeypatch):
    order, now = [], [0.0]

    def call(name, seconds):
        def run():
            order.append(name)
            now[0] += seconds

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = kv.testing.do_bench(call("slow", 0.004), against=call("fast", 0.0005), samples=3, device="cpu")
    assert order == ["slow"] * 2 + ["fast"] * 2 + ["slow", "fast", "fast"] * 3  # a sample has a millisecond
    assert found.against is not None
    assert found.samples == pytest.approx([4000.0] * 3)
    assert found.against.samples == pytest.approx([500.0] * 3)
    assert (found.mode, found.ratio) == ("clock", pytest.approx(8.0))


def test_the_summary_of_given_samples():
    other = kv.testing.Timing((2.0, 4.0, 2.0), "graph")
    found = kv.testing.Timing((1.0, 3.0, 2.0), "graph", other)
    assert (found.us, found.us_min, found.spread, found.ratio) == (2.0, 1.0, 0.5, 0.75)
    assert str(found) == (
        "2.00 us (least 1.00, spread 50.0%, graph), 0.750 of 2.00 us (least 2.00, spread 50.0%, graph)"
    )
    with pytest.raises(ValueError, match="a ratio needs another call"):
        _ = other.ratio


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": 0}, "samples must be a positive int, got 0"),
        ({"samples": True}, "samples must be a positive int, got True"),
        ({"device": "gpu"}, "device must be 'cuda', 'cpu' or None, got 'gpu'"),
    ],
)
def test_what_cannot_be_timed_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        kv.testing.do_bench(lambda: None, **given)


@pytest.mark.gpu
def test_on_a_gpu_graphs_are_replayed_with_a_cold_l2():
    torch = pytest.importorskip("torch")

    @kv.kernel(block=256)
    def double(x: kv.Buffer[kv.f32, 1]):
        i = kv.block_id.x * 256 + kv.thread_id.x
        x[i] = x[i] * 2.0

    small, large = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 26, device="cuda")
    found = kv.testing.do_bench(
        lambda: double[1 << 12, 256](small), against=lambda: double[1 << 18, 256](large), samples=9
    )
    assert found.against is not None
    assert (found.mode, found.against.mode) == ("graph", "graph")
    assert found.ratio < 0.5
    copied = kv.testing.do_bench(lambda: np.asarray(small.cpu()), samples=3)
    assert copied.mode.startswith("no graph: ")
