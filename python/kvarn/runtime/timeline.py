# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Trace marks of kernels in device memory: one switch per device or host.

Kernels compiled with ``lower-kv-trace`` find the switch through a variable of their code, which is set when the code is
loaded; it has the address of the mark buffer while tracing is on. The layout is that of ``kvarn.dialect.trace_layout``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvarn.artifact import Entry
from kvarn.dialect import trace_layout as at
from kvarn.forks import reinit_after_fork

from .binding import HOST
from .mirror import Memory

kernels: dict[int, tuple[str, tuple[str, ...]]] = {}  # (name, labels) of all loaded code, by number
_switches: dict[int, Switch] = {}
_asked: tuple[int, int] | None = None  # records and marks while tracing is on
_lock = reinit_after_fork(threading.RLock())


class Switch:
    """The switch that tells the kernels of a device where to write marks."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.words = Memory(at.SWITCH_WORDS, np.int64, ordinal)
        self.buffer: Memory | None = None

    def turn_on(self, records: int, marks: int) -> None:
        """Give kernels a buffer of ``records`` records, each a ring of ``marks`` marks."""
        self.buffer = Memory(at.RECORDS + records * at.record_words(marks), np.int64, self.ordinal)
        self.buffer.array[at.CAPACITY], self.buffer.array[at.MARKS] = records, marks
        self.buffer.push()
        self.words.array[at.BUFFER] = self.buffer.address
        self.words.push()

    def turn_off(self) -> np.ndarray:
        """Stop tracing; the buffer's words, after running kernels have finished."""
        assert self.buffer is not None
        self.words.array[at.BUFFER] = 0
        self.words.push()
        self.buffer.pull()
        found, self.buffer = self.buffer.array, None
        return found

    def arrays(self) -> list[np.ndarray]:
        """The memory that kernels on the host access."""
        return [self.words.array, *([] if self.buffer is None else [self.buffer.array])]


def switch(ordinal: int) -> Switch:
    """The switch of a device. It is never freed: loaded code has its address."""
    with _lock:
        if ordinal not in _switches:
            _switches[ordinal] = Switch(ordinal)
        found = _switches[ordinal]
        if _asked is not None and found.buffer is None:
            found.turn_on(*_asked)
        return found


def begin(records: int, marks: int) -> None:
    """Start tracing launches, on all devices where traced code is loaded, now or later.

    Raises
    ------
    ValueError
        If tracing is on.
    """
    global _asked
    with _lock:
        if _asked is not None:
            raise ValueError("kv.tracing does not nest: tracing is already on")
        _asked = records, marks
        for ordinal in list(_switches):
            switch(ordinal)


def end() -> list[tuple[int, np.ndarray]]:
    """Stop tracing; the buffer's words of each traced device."""
    global _asked
    with _lock:
        _asked = None
        return [(s.ordinal, s.turn_off()) for s in _switches.values() if s.buffer is not None]


def is_traced(entry: Entry) -> bool:
    return bool(entry.attributes.get(at.ATTRIBUTE))


def load(entry: Entry, ordinal: int, set_variable: Callable[[str, int], None]) -> None:
    """Set the switch's address in a loaded entry with marks."""
    described: dict[str, Any] = entry.attributes.get(at.ATTRIBUTE, {})
    for number, text in described.items():
        found = json.loads(text)
        kernels[int(number)] = found["kernel"], tuple(found["labels"])
    if described:
        set_variable(at.SYMBOL, switch(ordinal).words.address)


def before(entry: Entry) -> None:
    """Called before an entry runs on the host, where launches have no number of their own."""
    if is_traced(entry):
        switch(HOST).words.array[at.LAUNCH] += 1
