# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A server for kv-opt: a process with all imports done forks for each call, since imports dominate the time of a call.

For lit tests and kv-reduce. Run as a file, without kvarn, it is also the client:

python -I -S opt_server.py serve SOCKET        until its standard input ends (with the site's packages: without -I -S)
python -I -S opt_server.py SOCKET ARGUMENTS    kv-opt with this process's folder, environment and files, and its status
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys

_LENGTH = 8  # bytes of the length field of a request


def call(path: str, arguments: list[str]) -> int:
    """Run kv-opt on the server; returns its exit status."""
    request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(request).to_bytes(_LENGTH, "little")], [0, 1, 2])
        server.sendall(request)
        return int.from_bytes(server.recv(1) or b"\xff", "little")


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
    kv.make_context()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it visits

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [], 1.0)
            _reap()
            if sys.stdin in ready:
                return
            if listening in ready:
                connection, _ = listening.accept()
                if os.fork() == 0:
                    os._exit(_answer(connection, kv_opt.main))
                connection.close()


def _reap() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _answer(connection: socket.socket, main) -> int:
    """In a child of the server: run kv-opt in a grandchild, and send its status to the caller."""
    head, files, _, _ = socket.recv_fds(connection, _LENGTH, 3)
    length, request = int.from_bytes(head, "little"), b""
    while len(request) < length:
        request += connection.recv(length - len(request))
    arguments, folder, environment = json.loads(request)
    child = os.fork()
    if child == 0:
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
    if not _ends(child, connection):
        return 1
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall((status if status >= 0 else 128 - status).to_bytes(1, "little"))
    return 0


def _ends(child: int, connection: socket.socket) -> bool:
    """Wait for the end of a call; it is killed if the caller has gone, e.g. after a time limit."""
    if not hasattr(os, "pidfd_open"):
        return True
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, connection], [], [])
    os.close(ended)
    if ended in ready:
        return True
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@contextlib.contextmanager
def on_path():
    """A context with a folder, for the front of PATH, whose ``kv-opt`` calls a server started for it."""
    import shlex
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kv-opt-") as folder:
        place = os.path.join(folder, "s")
        command = [sys.executable, __file__]
        script = os.path.join(folder, "kv-opt")
        with open(script, "w") as file:
            file.write(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(__file__)} {place} "$@"\n')
        os.chmod(script, 0o755)
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, "serve", place], stdin=pipe, stdout=pipe, text=True) as server:
            try:
                if server.stdout is None or server.stdout.readline() != "ready\n":
                    raise RuntimeError("the server of kv-opt did not start")
                yield folder
            finally:
                if server.stdin is not None:
                    server.stdin.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
        serve(sys.argv[2])
    else:
        sys.exit(call(sys.argv[1], sys.argv[2:]))
