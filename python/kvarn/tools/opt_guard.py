# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Conversion of a crash of MLIR or LLVM to an error message.

MLIR and LLVM end the process on some invalid inputs, by an assertion or a fatal error of a back end. kv-opt therefore
works in a child process, forked before MLIR is imported (which makes it cheap), and the parent reports what the child
was doing when it died.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Callable

_SIZE = 4096

Phase = Callable[[str], None]


def run(work: Callable[[Phase], int]) -> int:
    """Run ``work`` in a child process and return its status; 1 after an error message if the child dies.

    ``work`` gets a function to announce its current action: ``phase("running pass 'cse'")``. Without ``fork`` it runs
    in this process.
    """
    if not hasattr(os, "fork"):
        return work(lambda text: None)
    shared = mmap.mmap(-1, _SIZE)
    child = os.fork()
    if child == 0:

        def phase(text: str) -> None:
            data = text.encode("utf-8", "replace")[: _SIZE - 1]
            shared[: len(data) + 1] = data + b"\0"

        return work(phase)
    status = _wait(child)
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    if number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        return 128 + number
    doing = bytes(shared[:_SIZE]).partition(b"\0")[0].decode("utf-8", "replace") or "starting"
    print(f"kv-opt: error: the process was ended by {signal.Signals(number).name} while {doing}", file=sys.stderr)
    return 1


def _wait(child: int) -> int:
    """The child's exit status; a keyboard interrupt reaches the child directly."""
    while True:
        try:
            return os.waitpid(child, 0)[1]
        except KeyboardInterrupt:
            continue
