# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The marks that traced kernels leave, as kernels see it: one switch a place, the host or a GPU.

Kernels that ``lower-kv-trace`` has seen find the switch through a variable of their code, which is set when the code
is loaded, and by it the buffer of marks, while there is one. The layout is ``kvarn.dialect.trace_layout``'s.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvarn.artifact import Entry
from kvarn.dialect import trace_layout as at
from kvarn.forks import renewed

from .binding import HOST
from .mirror import Memory

kernels: dict[int, tuple[str, tuple[str, ...]]] = {}  # of all code that was loaded: name and labels, by number
_switches: dict[int, Switch] = {}
_asked: tuple[int, int] | None = None  # records and marks, while launches are traced
_lock = renewed(threading.RLock())


class Switch:
    """What tells the kernels of a place where to leave their marks."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.words = Memory(at.SWITCH_WORDS, np.int64, ordinal)
        self.buffer: Memory | None = None

    def turn_on(self, records: int, marks: int) -> None:
        """Give kernels a buffer of so many records with rings of so many marks."""
        self.buffer = Memory(at.RECORDS + records * at.record_words(marks), np.int64, self.ordinal)
        self.buffer.array[at.CAPACITY], self.buffer.array[at.MARKS] = records, marks
        self.buffer.push()
        self.words.array[at.BUFFER] = self.buffer.address
        self.words.push()

    def turn_off(self) -> np.ndarray:
        """The buffer's words, once the kernels that run have ended; none is written any more."""
        assert self.buffer is not None
        self.words.array[at.BUFFER] = 0
        self.words.push()
        self.buffer.pull()
        found, self.buffer = self.buffer.array, None
        return found

    def arrays(self) -> list[np.ndarray]:
        """The memory that kernels on the host touch."""
        return [self.words.array, *([] if self.buffer is None else [self.buffer.array])]


def switch(ordinal: int) -> Switch:
    """The switch of a place. It lasts: code that is loaded has its address."""
    with _lock:
        if ordinal not in _switches:
            _switches[ordinal] = Switch(ordinal)
        found = _switches[ordinal]
        if _asked is not None and found.buffer is None:
            found.turn_on(*_asked)
        return found


def begin(records: int, marks: int) -> None:
    """Trace launches: on the places where traced code has been loaded, and where it is from now on.

    Raises
    ------
    ValueError
        If launches are traced already.
    """
    global _asked
    with _lock:
        if _asked is not None:
            raise ValueError("kv.tracing does not nest: launches are traced already")
        _asked = records, marks
        for ordinal in list(_switches):
            switch(ordinal)


def end() -> list[tuple[int, np.ndarray]]:
    """Trace launches no more: the buffer's words of each place that had one."""
    global _asked
    with _lock:
        _asked = None
        return [(s.ordinal, s.turn_off()) for s in _switches.values() if s.buffer is not None]


def is_traced(entry: Entry) -> bool:
    return bool(entry.attributes.get(at.ATTRIBUTE))


def load(entry: Entry, ordinal: int, set_variable: Callable[[str, int], None]) -> None:
    """An entry with marks has been loaded: tell it where the switch is."""
    described: dict[str, Any] = entry.attributes.get(at.ATTRIBUTE, {})
    for number, text in described.items():
        found = json.loads(text)
        kernels[int(number)] = found["kernel"], tuple(found["labels"])
    if described:
        set_variable(at.SYMBOL, switch(ordinal).words.address)


def before(entry: Entry) -> None:
    """An entry is about to run on the host, where launches have no number of their own."""
    if is_traced(entry):
        switch(HOST).words.array[at.LAUNCH] += 1
