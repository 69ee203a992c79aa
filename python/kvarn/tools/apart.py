# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Run a function in a child process, so that its death (an assertion of MLIR) does not end this process."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any


class Died(RuntimeError):
    """A child ended without a result; the message gives ``how``: the signal or the status."""

    def __init__(self, how: str) -> None:
        super().__init__(f"it ended the process {how}")
        self.how = how


def apart(work: Callable[[], Any]) -> Any:
    """The result of ``work()``, through JSON, from a child process; from this process without ``fork``.

    Raises
    ------
    Died
        If the child ends without a result. ``work`` must catch its own exceptions.
    """
    if not hasattr(os, "fork"):
        return work()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    answered, answer = os.pipe()
    with warnings.catch_warnings():
        # Threads of this process do no harm: the child only does its work, in contexts without threads, and exits.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _answer(work, answer)
    os.close(answer)
    try:
        with os.fdopen(answered, "rb") as pipe:
            found = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    if status == 0 and found:
        return json.loads(found)
    raise Died(f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}")


def _answer(work: Callable[[], Any], answer: int) -> None:
    """In the child: write the function's result and exit."""
    status = 1
    try:
        found = json.dumps(work()).encode()
        with os.fdopen(answer, "wb") as pipe:
            pipe.write(found)
        status = 0
    except SystemExit as end:  # like the interpreter, but there is no result
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(status)


__all__ = ["Died", "apart"]
