# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reading files that somebody else may have put there."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_regular(path: str | os.PathLike[str]) -> tuple[bytes, os.stat_result]:
    """The bytes of a regular file and its facts.

    Raises
    ------
    OSError
        At once for anything else: a link is not followed, and nothing waits for the writer of a FIFO.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(f"{Path(path)} must be a regular file")
        return file.read(), facts
