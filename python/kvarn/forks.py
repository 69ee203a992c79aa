# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a child of ``os.fork`` finds, whatever other threads did at that moment.

A fork copies the memory of a process and the one thread that asked for it. In the child a lock that another thread
held stays locked, and a pool of threads has none. So a fork waits until no other thread is inside the compiler
(``no_fork``), whose locks in C++ are out of reach; locks that are held for moments are opened in the child
(``renewed``); and who keeps a pool of threads forgets it there, with ``os.register_at_fork``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

L = TypeVar("L")

_changed = threading.Condition()  # of the two below; held from before a fork until after it
_waiting = 0  # forks that wait: no other thread enters meanwhile, or they would wait for ever
_working = 0  # threads inside no_fork
_here = threading.local()  # depth: how often this thread has entered
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """While the block runs, forks of other threads wait for its end. A fork by the thread itself goes on."""
    global _working
    depth = getattr(_here, "depth", 0)
    if depth == 0:
        with _changed:
            while _waiting:
                _changed.wait()
            _working += 1
    _here.depth = depth + 1
    try:
        yield
    finally:
        _here.depth = depth
        if depth == 0:
            with _changed:
                _working -= 1
                _changed.notify_all()


def renewed(lock: L) -> L:
    """The lock, which is open in a child whoever held it; what it guards must be usable half done."""
    _locks.add(lock)
    return lock


def _own() -> int:
    return int(getattr(_here, "depth", 0) > 0)


def _before() -> None:
    global _waiting
    _changed.acquire()
    _waiting += 1
    try:
        while _working > _own():
            _changed.wait()
    finally:
        _waiting -= 1


def _in_parent() -> None:
    _changed.notify_all()
    _changed.release()


def _in_child() -> None:
    global _changed, _waiting, _working
    _changed, _waiting, _working = threading.Condition(), 0, _own()
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
