# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The TMA and its barriers, for the PTX interpreter and for tests on a GPU.

:func:`read_box` models a copy: dimensions, strides, box, bounds. The interpreter's copies write its result with the
swizzle, to one or several blocks of the cluster, and complete when the order says so. A barrier whose expected bytes
differ from the received ones, and a store without a wait, are errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvarn.dialect.tma_layout import GATHERS, SWIZZLE_BYTES
from kvarn.runtime.tensormap import TensorMap

from .barriers import check_set_up, copy_async
from .block import OFFSET, RANK, Block, Lanes, op
from .ptx_parser import EmulationError, Instruction

Read = Callable[[np.ndarray], np.ndarray]  # addresses [n] to bytes [n, itemsize]


# --- the model of a copy -------------------------------------------------------------------------


def places(m: TensorMap, coordinates: Sequence[int], box: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of the elements of a box, row-major, and which are in bounds. Coordinates from fast to slow."""
    starts = list(coordinates)[::-1]
    index = [i + start for i, start in zip(np.indices(box).reshape(len(box), -1), starts, strict=True)]
    inside = np.ones(index[0].shape, bool)
    address = np.full(index[0].shape, m.base, np.int64)
    for i, extent, stride in zip(index, m.dims, m.strides, strict=True):
        inside &= (i >= 0) & (i < extent)
        address += i * stride * m.dtype.itemsize
    return address, inside


def read_box(m: TensorMap, coordinates: Sequence[int], read: Read) -> np.ndarray:
    """The data of one copy: bytes [rows, bytes of a row], zeros out of bounds.

    ``coordinates`` are the instruction's: fast to slow, or a column and four rows.
    """
    if m.form in GATHERS:
        column, *rows = coordinates
        return np.concatenate([_read(m, (column, row), read) for row in rows])
    return _read(m, coordinates, read)


def touched(m: TensorMap, coordinates: Sequence[int]) -> np.ndarray:
    """Addresses of the elements of one copy."""
    column, *rows = coordinates
    boxes = [(column, row) for row in rows] if m.form in GATHERS else [coordinates]
    return np.concatenate([a[inside] for a, inside in (places(m, box, m.box) for box in boxes)])


def _read(m: TensorMap, coordinates: Sequence[int], read: Read) -> np.ndarray:
    address, inside = places(m, coordinates, m.box)
    found = np.zeros((len(address), m.dtype.itemsize), np.uint8)
    if inside.any():
        found[inside] = read(address[inside])
    return found.reshape(-1, m.box[-1] * m.dtype.itemsize)


def swizzled(m: TensorMap, start: int, rows: int) -> np.ndarray:
    """Shared-memory address of each byte of a box copied to ``start``, [rows, bytes of a row]."""
    address = start + np.arange(rows * m.box[-1] * m.dtype.itemsize).reshape(rows, -1)
    return address if m.swizzle == "none" else address ^ ((address >> 3) & (SWIZZLE_BYTES[m.swizzle] - 16))


# --- instructions -----------------------------------------------------------------------------------


@op("cp")
def copy(t: Block, i: Instruction) -> Any:
    if i.name[2] != "bulk":
        return copy_async(t, i)
    if i.name[3] == "prefetch" or "prefetch" in i.name:
        return lambda m: None
    if i.name[3] in ("commit_group", "wait_group"):
        return _groups(t, i)
    return _tensor(t, i) if "tensor" in i.name else _plain(t, i)


def _parts(operand: str) -> tuple[str, list[str]]:
    found = re.fullmatch(r"\[\s*([%\w]+)\s*,\s*\{([^}]*)\}\s*\]", operand)
    if not found:
        raise EmulationError(f"operand {operand} is not a descriptor with coordinates")
    return found[1], [c.strip() for c in found[2].split(",")]


class Stores:
    """Pending stores of a block's threads: in no group, and in groups."""

    def __init__(self, t: Block) -> None:
        self.open: dict[int, list[Callable[[], None]]] = {}
        self.groups: dict[int, list[list[Callable[[], None]]]] = {}
        t.cluster.at_end.append(self.finish)

    def finish(self) -> None:
        if any(self.open.values()) or any(g for groups in self.groups.values() for g in groups):
            raise EmulationError("the kernel ends with stores without a wait")


def _stores(t: Block) -> Stores:
    if t.stores is None:
        t.stores = Stores(t)
    return t.stores


def _start_store(t: Block, lane: int, write: Callable[[], None]) -> None:
    """A store reads shared memory when it is started or when it is waited for."""
    if t.order.copies == "early" or (t.order.copies == "random" and t.cluster.random.integers(2)):
        write()
        write = _nothing
    _stores(t).open.setdefault(lane, []).append(write)


def _nothing() -> None:
    """The remaining work of a store that is written."""


def _tensor(t: Block, i: Instruction) -> Any:
    to_shared = i.name[5].startswith("shared")
    described, coordinates = _parts(i.operands[1 if to_shared else 0])
    several = "multicast::cluster" in i.name

    def start(m: Lanes) -> None:
        c = t.cluster
        handles = t.value(described, m, np.uint64)
        values = [t.value(x, m, np.int32) for x in coordinates]
        shared = t.address(i.operands[0 if to_shared else 1], m).astype(np.int64) & 0xFFFF_FFFF
        barriers = t.address(i.operands[2], m).astype(np.int64) & 0xFFFF_FFFF if to_shared else shared
        masks = t.value(i.operands[3], m, np.uint16) if several else None
        for n, lane in enumerate(np.arange(t.count)[m].tolist()):
            where = c.descriptors.get(int(handles[n]))
            if where is None:
                raise EmulationError(f"{i.text}: {handles[n]:#x} is not a TMA descriptor")
            at, given = int(shared[n]), [int(v[n]) for v in values]
            if given[0] * where.dtype.itemsize % 16:
                raise EmulationError(f"{i.text}: a box must start at a multiple of 16 bytes, got column {given[0]}")
            if (at & OFFSET) % 128:
                raise EmulationError(f"{i.text}: shared memory must be a multiple of 128, got {at & OFFSET}")
            if c.ahead is not None and c.ahead.concerns(t):
                address = touched(where, given)
                c.ahead.check(t, i, address, where.dtype.itemsize, np.full(len(address), lane), not to_shared)
            if not to_shared:
                _start_store(t, lane, lambda w=where, a=at & OFFSET, g=given, lane=lane: _store(t, i, w, a, g, lane))
                continue
            ranks = [at >> RANK] if masks is None else [r for r in range(16) if int(masks[n]) >> r & 1]
            for rank in ranks:
                bar = int(barriers[n]) if masks is None else int(barriers[n]) & OFFSET | rank << RANK
                if i.barrier:
                    c.names.setdefault(bar, i.barrier)
                check_set_up(t, i, bar, lane, copies=True)
                to = (at & OFFSET, rank)
                known = c.copy(t, lane, bar)
                c.start(lambda w=where, to=to, g=given, b=bar, known=known: _load(t, i, w, to, g, b, known))

    return start


def _load(
    t: Block, i: Instruction, m: TensorMap, to: tuple[int, int], given: list[int], barrier: int, known: Any
) -> None:
    def read(address: np.ndarray) -> np.ndarray:
        if t.counts is not None:
            t.counts.copied(i.index, t.cluster.fields, address, m.dtype.itemsize, False)
        return t.memory.read(address.astype(np.uint64), m.dtype.itemsize, i.text)

    found = read_box(m, given, read)
    block = t.cluster.alive(to[1], i.text)
    at = swizzled(m, to[0], len(found))
    if at.max() >= len(block.shared):
        raise EmulationError(f"{i.text}: outside the {len(block.shared)} bytes of shared memory")
    block.write_shared(at, found, i, None, known)
    t.cluster.arrive(barrier, 0, -found.size, i.text)


def _store(t: Block, i: Instruction, m: TensorMap, at: int, given: list[int], lane: int) -> None:
    address, inside = places(m, given, m.box)
    data = t.read_async(swizzled(m, at, len(address) // m.box[-1]), i, lane).reshape(len(address), -1)
    if inside.any():
        if t.counts is not None:
            t.counts.copied(i.index, t.cluster.fields, address[inside], m.dtype.itemsize, True)
        t.memory.write(address[inside].astype(np.uint64), data[inside], i.text)


def _plain(t: Block, i: Instruction) -> Any:
    """Bulk copies of bytes: from device to shared memory, between blocks of a cluster, or to device memory."""
    to_shared, from_shared = i.name[3].startswith("shared"), i.name[4].startswith("shared")
    if not (to_shared or from_shared) or "multicast::cluster" in i.name or "bytemask" in "".join(i.name):
        raise EmulationError(f"unknown form: {i.text}")

    def start(m: Lanes) -> None:
        c, to, source = t.cluster, t.address(i.operands[0], m), t.address(i.operands[1], m)
        sizes = t.value(i.operands[2], m, np.uint32)
        barriers = t.address(i.operands[3], m).astype(np.int64) & 0xFFFF_FFFF if to_shared else to
        for n, lane in enumerate(np.arange(t.count)[m].tolist()):
            a, b, size = to[n : n + 1], source[n : n + 1], int(sizes[n])
            if size % 16 or a[0] % 16 or b[0] % 16:
                raise EmulationError(f"{i.text}: addresses and size must be multiples of 16, got {size} bytes")

            if c.ahead is not None and not (to_shared and from_shared):
                c.ahead.check(t, i, b if to_shared else a, size, [lane], not to_shared)

            def data(b: np.ndarray = b, size: int = size, lane: int = lane) -> np.ndarray:
                if not from_shared:
                    rows = (b + np.arange(0, size, 16, dtype=np.uint64)).astype(np.uint64)
                    return t.memory.read(rows, 16, i.text).reshape(1, -1)
                return t.read_async(int(b[0] & OFFSET) + np.arange(size)[None], i, lane)

            if not to_shared:
                if t.counts is not None:
                    t.counts.copied(i.index, c.fields, a + np.arange(size, dtype=np.uint64), 1, True)
                _start_store(
                    t,
                    lane,
                    lambda a=a, data=data, size=size: t.memory.write(
                        (a + np.arange(0, size, 16, dtype=np.uint64)).astype(np.uint64), data().reshape(-1, 16), i.text
                    ),
                )
                continue
            bar = int(barriers[n])
            check_set_up(t, i, bar, lane, copies=True)
            known = c.copy(t, lane, bar)
            if t.counts is not None and not from_shared:
                t.counts.copied(i.index, c.fields, b + np.arange(size, dtype=np.uint64), 1, False)

            def land(a: np.ndarray = a, data: Any = data, size: int = size, bar: int = bar, known: Any = known) -> None:
                rows = (a + np.arange(0, size, 16, dtype=np.uint64)).astype(np.uint64)
                c.write(rows, data().reshape(-1, 16), i, None, known)
                c.arrive(bar, 0, -size, i.text)

            c.start(land)

    return start


def _groups(t: Block, i: Instruction) -> Any:
    """Groups of a thread's stores; after a wait, all but the newest groups have been written."""

    def run(m: Lanes) -> None:
        s = _stores(t)
        for lane in np.arange(t.count)[m].tolist():
            groups = s.groups.setdefault(lane, [])
            if i.name[3] == "commit_group":
                groups.append(s.open.pop(lane, []))
                continue
            while len(groups) > int(i.operands[0]):
                for write in groups.pop(0):
                    write()

    return run
