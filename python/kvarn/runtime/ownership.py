# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The record of who owns a pool's pages, as kernels see it: one registry a place, the host or a GPU.

Kernels that ``check-kv-ownership`` has seen find the registry through a variable of their code, which is set when the
code is loaded. Before such a kernel is launched those who keep the record bring it up to date; on the host, and in the
emulator, what the kernel wrote down is raised after it. The layout is ``kvarn.dialect.ownership_layout``'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvarn.artifact import Entry
from kvarn.dialect import ownership_layout as at
from kvarn.forks import renewed

from . import device as devices, driver
from .mirror import Memory

titles: dict[int, str] = {}  # of the accesses of all code that was loaded, by number
_registries: dict[int, Registry] = {}
_lock = renewed(threading.RLock())


class Keeper(Protocol):
    """Who keeps the record of some regions; ``base``: the address of the first."""

    base: int

    def refresh(self) -> None:
        """Bring the record up to date, before a kernel runs."""
        ...

    def arrays(self) -> Sequence[np.ndarray]:
        """The record's memory."""
        ...

    def copied(self, base: int, source: np.ndarray, destination: np.ndarray) -> None:
        """Whole pages of the pool at an address were copied within it; ``source`` None: filled from elsewhere."""
        ...

    def complain(self, found: Sequence[Sequence[int]]) -> list[int]:
        """Take violations, in words, that are of these regions; the places of those taken."""
        ...

    def raise_violations(self) -> None:
        """Raise an error for violations that were taken and not raised."""
        ...


class Registry:
    """What the kernels of one place are held to."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.keepers = ordinal, list[Keeper]()
        self.words = Memory(at.REGISTRY_WORDS + at.MOST_REGIONS * at.REGION_WORDS, np.int64, ordinal)
        self.violations = Memory(1 + at.MOST_VIOLATIONS * at.VIOLATION_WORDS, np.int64, ordinal)
        self.words.array[at.VIOLATIONS] = self.violations.address
        self.words.push()
        self._regions: list[Sequence[int]] = []

    def add(self, regions: Sequence[Sequence[int]], keeper: Keeper) -> None:
        """Watch regions, each its words."""
        if len(self._regions) + len(regions) > at.MOST_REGIONS:
            raise ValueError(f"at most {at.MOST_REGIONS} pools and scales can be watched at once on a device")
        self.keepers.append(keeper)
        self._publish([*regions, *self._regions])  # those who ask last are asked first

    def drop(self, regions: Sequence[Sequence[int]], keeper: Keeper) -> None:
        """Watch regions no more. Their memory may go once this returns."""
        self.keepers = [k for k in self.keepers if k is not keeper]
        self._publish([r for r in self._regions if not any(r is gone for gone in regions)])

    def _publish(self, regions: list[Sequence[int]]) -> None:
        self._regions, words = regions, self.words.array
        words[at.REGIONS] = len(regions)
        for i, region in enumerate(regions):
            start = at.REGISTRY_WORDS + i * at.REGION_WORDS
            words[start : start + at.REGION_WORDS] = region
        self.words.push()

    def region_at(self, address: int) -> Sequence[int] | None:
        """The region whose record lies at an address."""
        i = (address - self.words.address - 8 * at.REGISTRY_WORDS) // (8 * at.REGION_WORDS)
        return self._regions[i] if 0 <= i < len(self._regions) else None

    def refresh(self) -> None:
        for keeper in self.keepers:
            keeper.refresh()

    def collect(self) -> None:
        """Hand out what kernels wrote down."""
        self.violations.pull()
        count = int(self.violations.array[0])
        if not count:
            return
        kept = min(count, at.MOST_VIOLATIONS)
        rows: Any = self.violations.array[1 : 1 + kept * at.VIOLATION_WORDS].reshape(kept, -1).tolist()
        self.violations.array[0] = 0
        self.violations.push()
        for keeper in list(self.keepers):
            taken = set(keeper.complain(rows))
            rows = [row for i, row in enumerate(rows) if i not in taken]

    def arrays(self) -> list[np.ndarray]:
        """The memory that kernels on the host touch."""
        return [self.words.array, self.violations.array, *(a for k in self.keepers for a in k.arrays())]


def registry(ordinal: int) -> Registry:
    """The registry of a place. It lasts: code that is loaded has its address."""
    with _lock:
        if ordinal not in _registries:
            _registries[ordinal] = Registry(ordinal)
        return _registries[ordinal]


# --- what the places where kernels run call -------------------------------------------------------


def accesses(entry: Entry) -> Mapping[str, str]:
    """The checked accesses of an entry; empty for one without checks."""
    found: Mapping[str, str] = entry.attributes.get(at.ATTRIBUTE, {})
    return found


def load(entry: Entry, ordinal: int, set_variable: Callable[[str, int], None]) -> None:
    """An entry with checks has been loaded: tell it where the registry is."""
    found = accesses(entry)
    if found:
        titles.update((int(number), text) for number, text in found.items())
        set_variable(at.SYMBOL, registry(ordinal).words.address)


def before(ordinal: int) -> None:
    """A kernel with checks is about to run."""
    registry(ordinal).refresh()


def after(ordinal: int) -> None:
    """A kernel with checks has run to its end."""
    found = registry(ordinal)
    found.collect()
    for keeper in list(found.keepers):
        keeper.raise_violations()


def after_failure(ordinal: int, failed: Exception) -> None:
    """A kernel with checks was ended: what it had noted says more than what ended it."""
    try:
        after(ordinal)
    except Exception as found:
        raise found from failed


def launching(launch: Callable[..., int], ordinal: int) -> Callable[..., int]:
    """The driver's function for launches of a kernel with checks."""

    def refreshed(*args: Any) -> int:
        before(ordinal)
        return launch(*args)

    return refreshed


def copied(collection: Any, source: Any, destination: Any) -> None:
    """Pages of a collection were copied, whole: what was written of the one is of the other. ``source`` may be None."""
    base = collection.pools[0].data
    keepers = [k for found in list(_registries.values()) for k in found.keepers if k.base == base]
    if not keepers:  # ids are not read where nobody asks: on a GPU that waits for what runs
        return
    pages = [None if ids is None else _on_host(ids) for ids in (source, destination)]
    for keeper in keepers:
        keeper.copied(base, *pages)  # type: ignore[arg-type]


def _on_host(ids: Any) -> np.ndarray:
    from .buffers import BufferView, view

    if isinstance(ids, (np.ndarray, list, tuple, range)) and not isinstance(ids, BufferView):
        return np.asarray(ids)

    return host_copy(view(ids))


def host_copy(view: Any) -> np.ndarray:
    """A copy of a buffer of integers, wherever it lies."""
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
