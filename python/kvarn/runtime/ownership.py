# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Page ownership records in device memory: one registry per device or host.

Kernels compiled with ``check-kv-ownership`` find the registry through a variable of their code, which is set when the
code is loaded. The records are updated before such a kernel is launched; on the host and in the emulator, violations
that the kernel recorded are raised after it. The layout is that of ``kvarn.dialect.ownership_layout``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvarn.artifact import Entry
from kvarn.dialect import ownership_layout as at
from kvarn.forks import reinit_after_fork

from . import device as devices, driver
from .mirror import Memory

titles: dict[int, str] = {}  # titles of the checked accesses of all loaded code, by number
_registries: dict[int, Registry] = {}
_lock = reinit_after_fork(threading.RLock())


class ShadowState(Protocol):
    """The owner of the ownership records of some regions; ``base``: the address of the first region."""

    base: int

    def refresh(self) -> None:
        """Update the records before a kernel runs."""
        ...

    def arrays(self) -> Sequence[np.ndarray]:
        """The memory of the records."""
        ...

    def copied(self, base: int, source: np.ndarray, destination: np.ndarray) -> None:
        """Record that whole pages of the pool at ``base`` were copied; ``source`` None: from another pool."""
        ...

    def take_violations(self, found: Sequence[Sequence[int]]) -> list[int]:
        """Accept violations, as words, of these regions; the indices of the accepted ones."""
        ...

    def raise_violations(self) -> None:
        """Raise an error for accepted violations."""
        ...


class Registry:
    """The regions against which kernels of one device check accesses."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.states = ordinal, list[ShadowState]()
        self.words = Memory(at.REGISTRY_WORDS + at.MOST_REGIONS * at.REGION_WORDS, np.int64, ordinal)
        self.violations = Memory(1 + at.MOST_VIOLATIONS * at.VIOLATION_WORDS, np.int64, ordinal)
        self.words.array[at.VIOLATIONS] = self.violations.address
        self.words.push()
        self._regions: list[Sequence[int]] = []

    def add(self, regions: Sequence[Sequence[int]], state: ShadowState) -> None:
        """Watch regions, each given as its words."""
        if len(self._regions) + len(regions) > at.MOST_REGIONS:
            raise ValueError(f"at most {at.MOST_REGIONS} pools and scales can be watched at once on a device")
        self.states.append(state)
        self._publish([*regions, *self._regions])  # the latest regions are searched first

    def drop(self, regions: Sequence[Sequence[int]], state: ShadowState) -> None:
        """Stop watching regions. Their memory may be freed once this returns."""
        self.states = [k for k in self.states if k is not state]
        self._publish([r for r in self._regions if not any(r is gone for gone in regions)])

    def _publish(self, regions: list[Sequence[int]]) -> None:
        self._regions, words = regions, self.words.array
        words[at.REGIONS] = len(regions)
        for i, region in enumerate(regions):
            start = at.REGISTRY_WORDS + i * at.REGION_WORDS
            words[start : start + at.REGION_WORDS] = region
        self.words.push()

    def region_at(self, address: int) -> Sequence[int] | None:
        """The region whose record is at an address."""
        i = (address - self.words.address - 8 * at.REGISTRY_WORDS) // (8 * at.REGION_WORDS)
        return self._regions[i] if 0 <= i < len(self._regions) else None

    def refresh(self) -> None:
        for state in self.states:
            state.refresh()

    def collect(self) -> None:
        """Distribute the violations that kernels recorded."""
        self.violations.pull()
        count = int(self.violations.array[0])
        if not count:
            return
        kept = min(count, at.MOST_VIOLATIONS)
        rows: Any = self.violations.array[1 : 1 + kept * at.VIOLATION_WORDS].reshape(kept, -1).tolist()
        self.violations.array[0] = 0
        self.violations.push()
        for state in list(self.states):
            taken = set(state.take_violations(rows))
            rows = [row for i, row in enumerate(rows) if i not in taken]

    def arrays(self) -> list[np.ndarray]:
        """The memory that kernels on the host access."""
        return [self.words.array, self.violations.array, *(a for k in self.states for a in k.arrays())]


def registry(ordinal: int) -> Registry:
    """The registry of a device. It is never freed: loaded code has its address."""
    with _lock:
        if ordinal not in _registries:
            _registries[ordinal] = Registry(ordinal)
        return _registries[ordinal]


# --- calls of the executors of kernels -------------------------------------------------------------


def accesses(entry: Entry) -> Mapping[str, str]:
    """The checked accesses of an entry; empty for an entry without checks."""
    found: Mapping[str, str] = entry.attributes.get(at.ATTRIBUTE, {})
    return found


def load(entry: Entry, ordinal: int, set_variable: Callable[[str, int], None]) -> None:
    """Set the registry's address in a loaded entry with checks."""
    found = accesses(entry)
    if found:
        titles.update((int(number), text) for number, text in found.items())
        set_variable(at.SYMBOL, registry(ordinal).words.address)


def before(ordinal: int) -> None:
    """Called before a kernel with checks runs."""
    registry(ordinal).refresh()


def after(ordinal: int) -> None:
    """Called after a kernel with checks has finished."""
    found = registry(ordinal)
    found.collect()
    for state in list(found.states):
        state.raise_violations()


def after_failure(ordinal: int, failed: Exception) -> None:
    """Called after a kernel with checks failed: recorded violations are more specific than the failure."""
    try:
        after(ordinal)
    except Exception as found:
        raise found from failed


def launching(launch: Callable[..., int], ordinal: int) -> Callable[..., int]:
    """The driver's launch function for kernels with checks."""

    def refreshed(*args: Any) -> int:
        before(ordinal)
        return launch(*args)

    return refreshed


def copied(collection: Any, source: Any, destination: Any) -> None:
    """Record that whole pages of a collection were copied, with their written tokens. ``source`` may be None."""
    base = collection.pools[0].data
    states = [k for found in list(_registries.values()) for k in found.states if k.base == base]
    if not states:  # ids are read only if someone needs them: on a GPU that waits for the device
        return
    pages = [None if ids is None else _on_host(ids) for ids in (source, destination)]
    for state in states:
        state.copied(base, *pages)  # type: ignore[arg-type]


def _on_host(ids: Any) -> np.ndarray:
    from .buffers import BufferView, view

    if isinstance(ids, (np.ndarray, list, tuple, range)) and not isinstance(ids, BufferView):
        return np.asarray(ids)

    return host_copy(view(ids))


def host_copy(view: Any) -> np.ndarray:
    """A host copy of a buffer of integers on any device."""
    from .buffers import strided_array

    if view.device[0] == "cpu":
        return strided_array(view.data, view.shape, view.strides, view.dtype, True, view).copy()
    flat = np.zeros(view.span, view.dtype.numpy)
    if view.span:
        with devices.device(view.device[1]).active():
            driver.call("cuCtxSynchronize")
            driver.call("cuMemcpyDtoH", flat.ctypes.data, view.data, flat.nbytes)
    strides = tuple(s * flat.itemsize for s in view.strides)
    return np.lib.stride_tricks.as_strided(flat, view.shape, strides).copy()
