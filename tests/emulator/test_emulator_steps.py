# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A kernel that does not end, and a grid that nobody waits for, are errors in the emulator; Ctrl-C ends any at once."""

from __future__ import annotations

import contextlib
import signal

import numpy as np
import pytest

import kvarn as kv
from kvarn.emulator import EmulationError, Order
from kvarn.env import env


@kv.kernel
def scaled(x: kv.Buffer[kv.i32, 1], factor: kv.i32):
    """Endless where the factor is 0: i stays 0."""
    i = kv.i32(1)
    while i < 100:
        i = i * factor
    x[kv.thread_id.x] = i


@kv.kernel
def counted(x: kv.Buffer[kv.i32, 1]):
    x[kv.block_id.x] = kv.block_id.x


LIMITS = {
    "argument": lambda: kv.emulated("sm_80", steps=500),
    "order": lambda: kv.emulated("sm_80", order=Order(steps=500)),
    "variable": lambda: limited_by_variable(500),
}


@contextlib.contextmanager
def limited_by_variable(steps):
    with env.override(emulator_steps=steps), kv.emulated("sm_80"):
        yield


@pytest.mark.parametrize("how", LIMITS)
def test_a_kernel_that_does_not_end_is_an_error(how):
    x = np.zeros(32, np.int32)
    with LIMITS[how]():
        scaled[1, 32](x, 2)
        assert (x == 128).all()
        with pytest.raises(EmulationError, match=r"does not end within 500 steps: steps= of kv\.emulated"):
            scaled[1, 32](x, 0)


@pytest.mark.parametrize("grid", [(501, 1, 1), (100_000, 100_000, 1), (2**31 - 1, 1, 1)])
def test_a_grid_of_more_blocks_than_steps_is_refused_before_it_runs(grid):
    x = np.full(8, 7, np.int32)
    with kv.emulated("sm_80", steps=500), pytest.raises(EmulationError, match="takes more than 500 steps"):
        counted[grid, 1](x)
    assert (x == 7).all()


def test_the_steps_are_those_of_one_launch():
    x = np.zeros(100, np.int32)
    with kv.emulated("sm_80", steps=500):
        for _ in range(5):
            counted[100, 1](x)
    np.testing.assert_array_equal(x, np.arange(100))


@pytest.mark.parametrize("steps", [0, -1, True])
def test_a_limit_is_a_positive_number(steps):
    with pytest.raises(ValueError, match="steps must be a positive int"), kv.emulated("sm_80", steps=steps):
        pass


def test_a_limit_of_the_environment_is_a_positive_number(monkeypatch):
    monkeypatch.setenv("KVARN_EMULATOR_STEPS", "none")
    with pytest.raises(ValueError, match="KVARN_EMULATOR_STEPS must be a positive number, got 'none'"):
        _ = env.emulator_steps


def _inside(x):
    with kv.emulated("sm_90a"):
        scaled[1, 1024](x, 0)


RUNS = {"emulate": lambda x: scaled.emulate(1, 1024, x, 0), "emulated": _inside}


@pytest.mark.parametrize("how", RUNS)
def test_an_interrupt_ends_a_kernel_at_once(how):
    x, sent = np.zeros(1024, np.int32), []

    def interrupt(number, frame):
        sent.append(number)
        raise KeyboardInterrupt

    scaled.emulate(1, 1024, x, 2)  # compiled before the time runs
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.5)  # again: what interrupts a destructor, Python drops
    try:
        with pytest.raises(KeyboardInterrupt):
            RUNS[how](x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(sent) < 4, "the timer goes on until the kernel has ended"
    scaled.emulate(1, 1024, x, 3)
    assert (x == 243).all()
