# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A call of kv-opt by its server (``opt_server.py``), with few imports: the start of Python is most of the call's time.

python -I -S opt_client.py SOCKET ARGUMENTS    kv-opt with this process's folder, environment and files, and its status
"""

import _socket  # the module socket, which imports enum and selectors, takes as long as the start of Python
import marshal
import os
import sys

LENGTH = 8  # bytes of the length field of a request


def call(path: str, arguments: list[str]) -> int:
    """Run kv-opt on the server; returns its exit status."""
    request = marshal.dumps((arguments, os.getcwd(), dict(os.environ)))
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect(path)
    files = b"".join(file.to_bytes(4, sys.byteorder) for file in (0, 1, 2))
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)]
    server.sendmsg([len(request).to_bytes(LENGTH, "little")], rights)
    server.sendall(request)
    return int.from_bytes(server.recv(1) or b"\xff", "little")


if __name__ == "__main__":
    sys.exit(call(sys.argv[1], sys.argv[2:]))
