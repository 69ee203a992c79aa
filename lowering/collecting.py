# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Collection of what passes report, per thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Kept(Protocol):
    """A collection that a thread's passes add to."""

    inside: str  # the running pass


T = TypeVar("T", bound=Kept)


class Collector(Generic[T]):
    """One kind of report: the collection of each thread that has one."""

    def __init__(self) -> None:
        self._local = threading.local()

    def current(self) -> T | None:
        """This thread's collection, if any."""
        return getattr(self._local, "kept", None)

    @contextlib.contextmanager
    def collect(self, kept: T) -> Iterator[T]:
        """Collect the reports of this thread's passes."""
        before, self._local.kept = self.current(), kept
        try:
            yield kept
        finally:
            self._local.kept = before

    @contextlib.contextmanager
    def within(self, pass_name: str) -> Iterator[None]:
        """Attribute reports to this pass."""
        found = self.current()
        if found is None:
            yield
            return
        before, found.inside = found.inside, pass_name
        try:
            yield
        finally:
            found.inside = before


__all__ = ["Collector"]
