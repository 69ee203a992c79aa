# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Safety of ``os.fork`` while other threads run.

A fork copies the process's memory and only the calling thread: a lock held by another thread stays locked in the child,
and thread pools have no threads there. Therefore a fork waits while another thread is inside the compiler
(``no_fork``), whose C++ locks cannot be reinitialised, or imports a part of kvarn, which the child would see half done;
short-lived locks are reinitialised in the child (``reinit_after_fork``); and owners of thread pools drop them there,
with ``os.register_at_fork``.
"""

from __future__ import annotations

import _imp
import concurrent.futures.thread  # noqa: F401 (this and logging take locks at a fork that imports may need: they come
import contextlib
import importlib
import logging  # noqa: F401 (after what is registered here, where they have been imported before)
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

L = TypeVar("L")

_changed = threading.Condition()  # of the two below; held from before a fork until after it
_waiting = 0  # forks that wait: no other thread enters meanwhile, or they would wait for ever
_working = 0  # threads inside no_fork
_here = threading.local()  # depth: nested no_fork blocks of this thread
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Delay forks of other threads until the block ends. A fork by the thread itself is not delayed."""
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


def reinit_after_fork(lock: L) -> L:
    """Register a lock that a child process reinitialises: data it guards must be valid at any point of an update."""
    _locks.add(lock)
    return lock


_IMPORTED = ("kvarn", "mlir", "ml_dtypes", "numpy", "cuda")  # packages that kvarn imports on first use
_POLL, _PATIENCE = 0.001, 60.0  # seconds
_held = False  # whether a fork has the locks that imports and compilations start under


def _imports_of_others() -> bool:
    """Whether another thread is importing a module that kvarn needs, and this thread imports nothing."""
    locks = getattr(importlib, "_bootstrap")._module_locks  # noqa: B009 (Python has no public interface)
    found = [(name, lock) for name, reference in list(locks.items()) if (lock := reference()) is not None]
    mine = threading.get_ident()
    owners = {name: getattr(lock, "owner", None) for name, lock in found}
    if mine in owners.values():
        return False
    return any(owner is not None and name.partition(".")[0] in _IMPORTED for name, owner in owners.items())


def _own() -> int:
    return int(getattr(_here, "depth", 0) > 0)


def _before() -> None:
    """Wait until no thread compiles or imports, then take the locks that both start under.

    An import may wait for the compiler, and a compilation for an import; so while a thread imports, a fork blocks
    neither.
    """
    end = time.monotonic() + _PATIENCE
    while not _is_quiet() and time.monotonic() < end:  # a blocked parent is worse than a blocked child
        time.sleep(_POLL)


def _is_quiet() -> bool:
    """Whether no other thread compiles or imports, and none can begin before the fork."""
    global _held, _waiting
    if _imports_of_others():
        return False
    _changed.acquire()
    _waiting += 1
    try:
        while _working > _own():
            if _imports_of_others():
                break
            _changed.wait(10 * _POLL)
        else:
            _imp.acquire_lock()
            if not _imports_of_others():
                _held = True
                return True
            _imp.release_lock()
    finally:
        _waiting -= 1
    _changed.notify_all()
    _changed.release()
    return False


def _in_parent() -> None:
    global _held
    if _held:
        _held = False
        _imp.release_lock()
        _changed.notify_all()
        _changed.release()


def _in_child() -> None:
    global _changed, _held, _waiting, _working
    if _held:
        _imp.release_lock()
    _held = False
    _changed, _waiting, _working = threading.Condition(), 0, _own()
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
