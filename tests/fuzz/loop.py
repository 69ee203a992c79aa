# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Seeds to a worker process and its outcomes back: a worker that dies or hangs is named, and another one started."""

from __future__ import annotations

import base64
import itertools
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 60.0  # that one seed may take


def serve(outcomes: Generator[str, str, None]) -> None:
    """A worker: a seed a line on stdin, an outcome a line on stdout; what the code under test prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    next(outcomes)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(outcomes.send(line.strip()).replace("\n", " ")[:1200], file=answers, flush=True)


class Worker:
    """A process that runs ``python -m fuzz.NAME``, with the arguments that stand behind the name."""

    def __init__(self, name: str) -> None:
        environment = os.environ | {"KVARN_CACHE_SIZE": "0", "PYTHONFAULTHANDLER": "1"}
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *f"fuzz.{name}".split()], cwd=TESTS, env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        if (said := self._answer(SECONDS)) != "ready":
            raise RuntimeError(f"python -m fuzz.{name} does not start: {said}")

    def ask(self, seed: int, text: str = "") -> str:
        """The outcome of a seed, or of a text in its place; ``died ...`` or ``hangs`` when the process is gone."""
        assert self.process.stdin is not None
        self.log.seek(0)
        self.log.truncate()
        given = base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()
        self.process.stdin.write(f"{seed} {given}".rstrip().encode() + b"\n")
        self.process.stdin.flush()
        return self._answer(SECONDS)

    def _answer(self, seconds: float) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.stop()
            return "hangs"
        line = self.process.stdout.readline().decode(errors="replace").strip()
        if line:
            return line
        status = self.process.wait()
        self.log.seek(0)
        said = " ".join(self.log.read().decode(errors="replace").split())[:600]
        self.stop()
        return f"died with {status}: {said}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def run(name: str, first: int, seconds: float, count: int | None = None, jobs: int = 1) -> list[tuple[int, str]]:
    """Feed seeds from ``first`` on to ``jobs`` workers; what was neither accepted nor refused, with its seed.

    ``name`` is a module of this package, with arguments behind blanks.
    """
    found: list[tuple[int, str]] = []
    tally: Counter[str] = Counter()
    slowest = (0.0, first)
    start, seeds, lock = time.monotonic(), itertools.count(first), threading.Lock()
    last = first + count if count is not None else sys.maxsize

    def work() -> None:
        nonlocal slowest
        worker = Worker(name)
        while time.monotonic() - start < seconds:
            with lock:
                seed = next(seeds)
            if seed >= last:
                break
            before = time.monotonic()
            outcome = worker.ask(seed)
            with lock:
                slowest = max(slowest, (time.monotonic() - before, seed))
                tally[outcome.partition(" ")[0]] += 1
                if outcome.partition(" ")[0] not in ("ok", "refused"):
                    found.append((seed, outcome))
                    print(f"{name} seed {seed}: {outcome}", flush=True)
            if not worker.alive:
                worker = Worker(name)
        if worker.alive:
            worker.stop()

    with ThreadPoolExecutor(jobs) as pool:
        for ended in [pool.submit(work) for _ in range(jobs)]:
            ended.result()
    print(
        f"{name}: {tally.total()} seeds from {first} on in {time.monotonic() - start:.0f} s by {jobs} processes: "
        f"{dict(tally)}; slowest: seed {slowest[1]}, {slowest[0]:.1f} s",
        flush=True,
    )
    return found
