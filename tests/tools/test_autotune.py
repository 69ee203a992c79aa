# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tuning of one's own kernels: which candidates there are, which is launched, and what the file says afterwards."""

import json

import ml_dtypes
import numpy as np
import pytest

import kvarn as kv
from kvarn.env import env
from kvarn.measure import autotune

SPACE = {"block": (128, 256), "producer": (False, True), "stages": (1, 2)}
LEGAL = ["block=128 producer=False stages=1", "block=128 producer=False stages=2", "block=256 producer=True stages=1",
         "block=256 producer=True stages=2"]  # fmt: skip


def tuned(space=SPACE, **options):
    @kv.autotune(space, **options)
    @kv.kernel(block=128)
    def squares(x: kv.Buffer[kv.bf16, 2], out: kv.Buffer[kv.f32, 2]):
        total = kv.full((64, 64), 0.0)
        for n in range(0, x.shape[0] // 64):
            a = x.load_rows(n * 64 + kv.tile_index(64), columns=64)
            total = kv.dot(a.T, a, total)
        i = kv.tile_index(64)
        out.store_rows(i, value=out.load_rows(i, columns=64) + total)

    return squares


class Clock:
    """Gives candidates times by their text, in place of a GPU."""

    def __init__(self, kernel, times):
        self.kernel, self.times, self.asked = kernel, times, []
        kernel.measure = self

    def __call__(self, launch):
        launch()
        (block,) = launch.__defaults__[1:]
        schedule = launch.__defaults__[0].options["schedule"]
        self.asked.append(str(autotune.Candidate(block, schedule)))
        return self.times.get(self.asked[-1], 9.0)


@pytest.fixture
def folder(tmp_path):
    with env.override(cache_dir=tmp_path):
        yield tmp_path


def arrays(rows=64):
    x = np.random.default_rng(0).standard_normal((rows, 64)).astype(ml_dtypes.bfloat16)
    return x, np.zeros((64, 64), np.float32)


def square(x):
    return x.astype(np.float64).T @ x.astype(np.float64)


def test_the_fastest_legal_candidate_is_launched_and_kept(folder):
    kernel = tuned({**SPACE, "block": (128, 256, 384)}, key=["x"], restore=["out"])
    kernel.candidates = tuple(c for c in kernel.candidates if str(c) in LEGAL)
    clock, (x, out) = Clock(kernel, {LEGAL[1]: 3.0}), arrays()
    with kv.emulated("sm_90a"):
        kernel[1](x, out)
    assert clock.asked == LEGAL
    np.testing.assert_allclose(out, square(x), rtol=1e-3, atol=1e-3)  # measurements leave no trace in it
    (entry,) = json.loads((folder / autotune.FILE).read_text())["entries"]
    assert (entry["block"], entry["schedule"], entry["us"]) == (128, {"producer": False, "stages": 2}, 3.0)
    timings = [json.loads(line) for line in (folder / autotune.TIMINGS).read_text().splitlines()]
    assert [t["us"] for t in timings] == [9.0, 3.0, 9.0, 9.0]
    again, (x, out) = tuned(key=["x"], restore=["out"]), arrays()
    unasked = Clock(again, {})
    with kv.emulated("sm_90a"):
        again[1](x, out)  # another process finds it in the file
    assert unasked.asked == []
    assert again._best.popitem()[1] == autotune.Candidate(128, {"producer": False, "stages": 2})


def test_each_shape_of_the_key_is_tuned(folder):
    kernel = tuned({"stages": (1, 2)}, key=["x"], restore=["out"])
    clock = Clock(kernel, {})
    with kv.emulated("sm_90a"):
        for rows in (64, 128, 64):
            kernel[1](*arrays(rows))
    assert len(clock.asked) == 4


def test_the_host_has_nothing_to_choose(folder):
    kernel, (x, out) = tuned(), arrays()
    Clock(kernel, {})
    kernel[1](x, out)
    np.testing.assert_allclose(out, square(x), rtol=1e-3, atol=1e-3)
    assert not (folder / autotune.FILE).exists()


def test_a_changed_kernel_or_a_broken_file_is_tuned_again(folder):
    kernel, (x, out) = tuned({"stages": (1, 2)}, restore=["out"]), arrays()
    clock = Clock(kernel, {})
    (folder / autotune.FILE).write_text("{")
    with kv.emulated("sm_90a"):
        kernel[1](x, out)
    key = next(iter(autotune.entries(folder / autotune.FILE)))
    assert key[:2] == kernel.identity()
    autotune.save(folder / autotune.FILE, (key[0], "other", *key[2:]), autotune.Candidate(128, {"stages": 1}), 1.0)
    assert len(autotune.entries(folder / autotune.FILE)) == 2
    assert len(clock.asked) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tuned({"rows": (64,)}), r"a space has block and the entries .*, got 'rows'"),
        (lambda: tuned({"block": (128,), "producer": (True,)}), r"no legal candidate: schedule: block must have"),
        (lambda: tuned(key=["y"]), r"squares has the parameters x, out, got 'y'"),
        (lambda: kv.autotune(SPACE)(len), r"@kv.autotune stands above @kv.kernel, got builtin"),
    ],
)
def test_what_cannot_be_tuned_is_refused_where_it_is_declared(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_file_is_tuned_for_its_cases(folder, tmp_path):
    kernel, (x, out) = tuned({"stages": (1, 2)}, restore=["out"]), arrays()
    Clock(kernel, {})

    class Module:
        squares, other, cases = kernel, len, staticmethod(lambda: [(1, (x, out))])

    with kv.emulated("sm_90a"):
        (line,) = autotune.tune_file(Module, "squares", "cases")
    assert "9.00 µs with block=128 stages=1 (2 measured, 0 refused)" in line
    with pytest.raises(ValueError, match=r"other must be a kernel under @kv\.autotune"):
        next(autotune.tune_file(Module, "other", "cases"))
