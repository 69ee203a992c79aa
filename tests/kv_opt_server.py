# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv-opt for lit tests: a process that has imported everything forks for each call, since most of a call are imports.

python kv_opt_server.py serve SOCKET        until its standard input ends
python kv_opt_server.py SOCKET ARGUMENTS    kv-opt: with this process's folder, environment and files, and its status
"""

import json
import os
import socket
import sys

_LENGTH = 8  # bytes that say how long a request is


def call(path: str, arguments: list[str]) -> int:
    """Ask the server to run kv-opt; its exit status."""
    request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(request).to_bytes(_LENGTH, "little")], [0, 1, 2])
        server.sendall(request)
        return int.from_bytes(server.recv(1) or b"\xff", "little")


def serve(path: str) -> None:
    """Answer calls until standard input ends."""
    import gc
    import importlib
    import pkgutil
    import select

    import kvarn.compilation.driver
    import kvarn.lowering
    from kvarn import emulator  # noqa: F401
    from kvarn.dialect import kv
    from kvarn.tools import edges, kv_opt, opt_emit, opt_run, semantics  # noqa: F401

    # Passes and expansions are imported where they are first needed, which takes a new process longer than most calls.
    for module in pkgutil.walk_packages(kvarn.lowering.__path__, "kvarn.lowering."):
        importlib.import_module(module.name)
    kv.make_context()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it looks at

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
    """In a child of the server: run kv-opt in another one, and tell the caller how it ended."""
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
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall((status if status >= 0 else 128 - status).to_bytes(1, "little"))
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(call(sys.argv[1], sys.argv[2:]))
