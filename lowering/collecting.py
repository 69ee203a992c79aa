# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What passes say of themselves, kept by whoever asks for it in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Kept(Protocol):
    """What a thread's passes add to."""

    inside: str  # the pass that runs


T = TypeVar("T", bound=Kept)


class Collector(Generic[T]):
    """One kind of what passes say: of each thread what keeps it, if anything does."""

    def __init__(self) -> None:
        self._local = threading.local()

    def current(self) -> T | None:
        """What keeps it in this thread."""
        return getattr(self._local, "kept", None)

    @contextlib.contextmanager
    def collect(self, kept: T) -> Iterator[T]:
        """Keep what this thread's passes say."""
        before, self._local.kept = self.current(), kept
        try:
            yield kept
        finally:
            self._local.kept = before

    @contextlib.contextmanager
    def within(self, pass_name: str) -> Iterator[None]:
        """What is said is this pass's."""
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
