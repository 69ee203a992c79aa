# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Access to users' files: safe reads, execution of Python files, atomic writes."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
import traceback
from pathlib import Path
from typing import Any

from kvarn.env import env

MOST_BYTES = 1 << 30  # of a file that is read whole: no bundle of ours comes near


class FileError(ValueError):
    """A user's file that is not of the expected kind; the message is one line."""


def read_regular(path: str | os.PathLike[str]) -> tuple[bytes, os.stat_result]:
    """The bytes and the status of a regular file.

    Raises
    ------
    OSError
        For any other file, and for one of more than ``MOST_BYTES``, immediately: links are not followed, and a FIFO is
        not waited for.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(f"{Path(path)} must be a regular file")
        if facts.st_size > MOST_BYTES:
            raise OSError(f"{Path(path)} must have at most {MOST_BYTES} bytes, got {facts.st_size}")
        return file.read(), facts


def write_output(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a user's output file atomically, and create its folders.

    Devices and pipes are written to directly.

    Raises
    ------
    OSError
        With the path, also for a failed write to a device.
    """
    target, content = Path(path), data.encode() if isinstance(data, str) else data
    try:
        if target.exists() and not target.is_file():  # a device or a pipe; a folder cannot be opened
            with target.open("wb") as file:
                file.write(content)
            return
        target = target.resolve()  # write to the target of a link
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            made.write_bytes(content)
            if target.exists():
                made.chmod(stat.S_IMODE(target.stat().st_mode))
            made.replace(target)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {error.strerror or error}") from None


def run_file(path: str | os.PathLike[str], name: str, import_folder: bool = False) -> Any:
    """Run a Python file as a module of the given name; with ``import_folder``, it can import files of its folder.

    Raises
    ------
    FileError
        With a one-line message: if it is not a file, not Python, or raises an exception or exits.
    """
    file = Path(path)
    spec = importlib.util.spec_from_file_location(name, file) if file.is_file() else None
    if spec is None:
        raise FileError(f"expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for dataclasses and inspect, which look up a class's module by name
    folder = str(file.parent.resolve())
    if import_folder:
        sys.path.insert(0, folder)
    try:
        # Compiled from source: cached bytecode is checked by time in seconds and size, which an edit may not change.
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        if env.debug:
            traceback.print_exc()
        raise FileError(f"{path} cannot be run: {error_line(error, str(file))}") from error
    finally:
        if import_folder and folder in sys.path:
            sys.path.remove(folder)
    return module


def error_line(error: BaseException, file: str) -> str:
    """The exception of a file and its location, in one line."""
    if isinstance(error, SystemExit):
        return f"it ends the process, by sys.exit({'' if error.code is None else repr(error.code)})"
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename or file}:{error.lineno or 1})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
