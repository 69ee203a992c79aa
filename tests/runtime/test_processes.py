# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Signals and forks: what a launch that is interrupted leaves behind, and what works in a child."""

import subprocess
import sys
import textwrap

import pytest

from kvarn.runtime.host import _workers

# A grid of slow blocks, each of which writes one number when it is done.
SLOW = """
    import os, signal, sys, threading, time, warnings
    import numpy as np
    import kvarn as kv
    from kvarn.runtime import host

    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads

    @kv.kernel
    def slow(x: kv.Buffer[kv.f32, 1], rounds: kv.i32):
        y = kv.f32(kv.block_id.x)  # which no block computes for the others
        for i in range(rounds):
            y = y * kv.f32(0.5) + kv.f32(1)
        x[kv.block_id.x] = y

    x = np.zeros(64, np.float32)
    slow[64, 1](x, 1)  # compiled, and the pool is there
"""


@pytest.fixture
def run(tmp_path):
    """Run a script in a process of its own; the words that it printed. One that hangs is ended and fails the test."""

    def run(script, seconds=60.0):
        path = tmp_path / "script.py"  # the front end reads a kernel's source from its file
        path.write_text(textwrap.dedent(SLOW) + textwrap.dedent(script))
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


@pytest.mark.skipif(_workers() < 2, reason="on one CPU a launch takes the thread that sees interrupts")
def test_an_interrupted_launch_raises_when_nothing_writes_any_more(run):
    """Its last block ends when the second of two interrupts has been seen, and not before."""
    script = """
        @kv.kernel
        def held(x: kv.Buffer[kv.f32, 1], go: kv.Buffer[kv.i32, 1]):
            b = kv.block_id.x
            if b == x.shape[0] - 1:
                while kv.atomic_add(go, 0, 0) == 0:
                    pass
            x[b] = 1.0

        seen, go = [], np.ones(1, np.int32)
        held[64, 1](x, go)  # compiled
        x[:], go[0] = 0, 0

        def interrupted(number, frame):
            seen.append(number)
            raise KeyboardInterrupt

        def interrupt():
            while not x.any():
                time.sleep(0.001)
            for count in (1, 2):  # the second one does not cut the waiting short
                os.kill(os.getpid(), signal.SIGINT)
                while len(seen) < count:
                    time.sleep(0.001)
            left = x[-1]
            time.sleep(0.1)
            print(left)
            go[0] = 1

        signal.signal(signal.SIGINT, interrupted)
        threading.Thread(target=interrupt).start()
        try:
            held[64, 1](x, go)
        except KeyboardInterrupt:
            print("interrupted", int(go[0]), x.all())
    """
    assert run(script) == ["0.0", "interrupted", "1", "True"]


FORK = """
    def child(work, seconds=30):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "hangs"

    def launch():
        x[:] = 0
        slow[64, 1](x, 1)
        assert (x == np.arange(64) * 0.5 + 1).all()

    def compile(target="host"):
        os.environ["KVARN_ALWAYS_COMPILE"] = "1"
        kv.compile(slow, kv.Buffer[kv.f32, 1], kv.i32, target=target)
"""


@pytest.mark.parametrize(
    "work", ["lambda: [launch(), compile('sm_90a')]", pytest.param("compile", marks=pytest.mark.thorough)]
)
def test_a_child_of_a_process_whose_pool_has_run_launches_and_compiles(work, run):
    fill = "host._run_all([lambda: time.sleep(0.05)] * 4)\n"  # every thread of the pool is there
    assert run(textwrap.dedent(FORK) + fill + f"print(child({work}))") == ["0"]


def test_a_child_forked_while_another_thread_compiles_compiles_too(run):
    script = textwrap.dedent(FORK) + textwrap.dedent("""
        from kvarn import dispatch

        os.environ["KVARN_ALWAYS_COMPILE"] = "1"
        blocks, one = np.zeros((4, 2, 1, 16, 2, 64), np.float32), np.array([1], np.uint32)
        pool = kv.PagedKVCacheCollection(blocks, one, np.array([[0]], np.uint32), 1, 2)
        kv.ops.rms_norm(pool.get_key_cache(0), np.ones(64, np.float32), 1e-5, np.array([0, 1], np.uint32))
        what, *_ = next(iter(dispatch._programs))

        def again():
            dispatch._programs.clear()
            dispatch.program(what)

        def forever():
            while not ended:
                again()

        ended = []
        thread = threading.Thread(target=forever)
        thread.start()
        found = []
        for _ in range(15):
            time.sleep(0.01)
            found.append(child(again, 10))
        ended.append(True)
        thread.join()
        print(*set(found))
    """)
    assert run(script, 120.0) == ["0"]


def test_a_fork_waits_for_other_threads_in_the_compiler_and_not_for_its_own(run):
    script = textwrap.dedent(FORK) + textwrap.dedent("""
        from kvarn import forks

        inside, order = threading.Event(), []

        def work():
            with forks.no_fork(), forks.no_fork():
                inside.set()
                time.sleep(0.5)
                order.append("worked")

        thread = threading.Thread(target=work)
        thread.start()
        inside.wait()
        status = child(lambda: compile())
        order.append("forked")
        thread.join()
        with forks.no_fork():
            own = child(compile)
        print(*order, status, own)
    """)
    assert run(script) == ["worked", "forked", "0", "0"]


def test_a_lock_that_another_thread_holds_is_open_in_the_child(run):
    script = textwrap.dedent(FORK) + textwrap.dedent("""
        from kvarn.dialect import ext
        from kvarn.dialect import kv as dialect
        from kvarn.runtime import driver

        held, ended = threading.Event(), threading.Event()

        def hold():
            with driver._lock, dialect._lock, ext._lock, host._pool_lock:
                held.set()
                ended.wait()

        threading.Thread(target=hold).start()
        held.wait()

        def work():
            driver.status()
            dialect.make_context()
            launch()

        print(child(work, 10))
        ended.set()
    """)
    assert run(script) == ["0"]


FIRST = """
    from __future__ import annotations

    import os, signal, sys, threading, time

    import numpy as np
    import kvarn as kv


    def kernel(x: kv.Buffer[kv.f32, 1]):
        x[0] = 2.0


    def first():
        x = np.zeros(1, np.float32)
        kv.kernel(kernel)[1, 1](x)
        assert x[0] == 2
"""


DELAYS = [0.2, *(pytest.param(x, marks=pytest.mark.thorough) for x in (0.0, 0.02, 0.05, 0.1, 0.3, 0.5, 0.8))]


@pytest.mark.parametrize("delay", DELAYS)
def test_a_child_forked_in_another_threads_first_call_makes_a_first_call_too(tmp_path, delay):
    """Nothing is imported before: the thread and the children come upon the same imports, at any point of them."""
    rounds = textwrap.dedent("""
        thread = threading.Thread(target=first)
        thread.start()
        time.sleep(float(sys.argv[1]))
        print(*[child(first) for _ in range(4)])
        thread.join()
    """)
    path = tmp_path / "first.py"
    path.write_text(textwrap.dedent(FIRST) + textwrap.dedent(FORK).partition("def launch")[0] + rounds)
    done = subprocess.run([sys.executable, path, str(delay)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.split()) == (0, ["0"] * 4), done.stderr
