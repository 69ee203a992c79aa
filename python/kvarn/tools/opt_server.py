# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A server for kv-opt: a process with all imports done forks for each call, since imports dominate the time of a call.

For lit tests and kv-reduce; ``opt_client.py`` is the client.

python opt_server.py SOCKET    until its standard input ends
"""

import contextlib
import marshal
import os
import select
import signal
import socket
import sys
from pathlib import Path

from kvarn.tools.opt_client import LENGTH

CLIENT = Path(__file__).with_name("opt_client.py")


def serve(path: str) -> None:
    """Serve calls until standard input ends."""
    import gc
    import importlib
    import pkgutil

    import kvarn.compilation.driver
    import kvarn.lowering
    from kvarn import emulator  # noqa: F401
    from kvarn.dialect import kv
    from kvarn.tools import edges, kv_opt, opt_emit, opt_run, semantics  # noqa: F401

    # Passes and expansions are imported on demand, which would take most of the time of a call.
    for module in pkgutil.walk_packages(kvarn.lowering.__path__, "kvarn.lowering."):
        importlib.import_module(module.name)
    kv.prepare_context()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it visits

    ended, wake = os.pipe()  # written to when a child ends
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    callers: dict[int, socket.socket] = {}  # by the process that answers them
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listening, sys.stdin, ended, *callers.values()], [], [])
            if sys.stdin in ready:
                return
            if listening in ready:
                connection, _ = listening.accept()
                child = _answer(connection, kv_opt.main)
                if child is not None:
                    callers[child] = connection
            for child, connection in callers.items():
                if connection in ready:  # its caller has gone, e.g. after a time limit
                    os.kill(child, signal.SIGKILL)
            if ended in ready:
                os.read(ended, 1 << 12)
                _reap(callers)


def _reap(callers: dict[int, socket.socket]) -> None:
    """Send their status to the callers of processes that have ended."""
    for child in list(callers):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            with callers.pop(child) as connection, contextlib.suppress(OSError):  # the caller may have gone
                connection.sendall((code if code >= 0 else 128 - code).to_bytes(1, "little"))


def _answer(connection: socket.socket, main) -> int | None:
    """Run kv-opt for a caller in a child, whose process id is returned; None if the caller has gone."""
    head, files, _, _ = socket.recv_fds(connection, LENGTH, 3)
    length, request = int.from_bytes(head, "little"), b""
    while len(request) < length and (more := connection.recv(length - len(request))):
        request += more
    child = os.fork() if head and len(request) == length else None
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        arguments, folder, environment = marshal.loads(request)
        for to, file in enumerate(files):
            os.dup2(file, to)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["kv-opt", *arguments]
        connection.close()
        try:
            status = main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        for file in (sys.stdout, sys.stderr):
            file.flush()
        os._exit(status)
    for file in files:
        os.close(file)
    if child is None:
        connection.close()
    return child


@contextlib.contextmanager
def on_path():
    """A context with a folder, for the front of PATH, whose ``kv-opt`` calls a server started for it."""
    import shlex
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kv-opt-") as folder:
        place = os.path.join(folder, "s")
        script = os.path.join(folder, "kv-opt")
        with open(script, "w") as file:
            file.write(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(CLIENT))} {place} "$@"\n')
        os.chmod(script, 0o755)
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, __file__, place], stdin=pipe, stdout=pipe, text=True) as server:
            try:
                if server.stdout is None or server.stdout.readline() != "ready\n":
                    raise RuntimeError("the server of kv-opt did not start")
                yield folder
            finally:
                if server.stdin is not None:
                    server.stdin.close()


if __name__ == "__main__":
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    serve(sys.argv[1])
