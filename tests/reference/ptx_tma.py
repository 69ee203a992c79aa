# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tensor memory accelerator and its barriers, for the PTX interpreter and for tests on a GPU.

:func:`read_box` is the model of a copy: dimensions, strides, box, bounds. The interpreter's copies write what it gives
where the swizzle puts it, and land when a barrier is waited for (or at once, as the schedule says). A barrier whose
expected bytes are not exactly those that came, and a store that nothing waited for, are errors. Each block runs alone:
a copy of a CTA pair reports to the block's own barrier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.dialect.tma_layout import GATHERS, SWIZZLE_BYTES
from kvarn.runtime.tensormap import TensorMap

from .ptx import Block, EmulationError, Instruction, Lanes, op
from .ptx_instructions import copy_async

_WAITS = 10_000  # polls of a barrier after which it is taken to never complete
Read = Callable[[np.ndarray], np.ndarray]  # addresses [n] to bytes [n, itemsize]


# --- the model of a copy -------------------------------------------------------------------------


def places(m: TensorMap, coordinates: Sequence[int], box: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of the elements of a box, row-major, and which are in bounds. Coordinates fast to slow."""
    starts = list(coordinates)[::-1]
    index = [i + start for i, start in zip(np.indices(box).reshape(len(box), -1), starts, strict=True)]
    inside = np.ones(index[0].shape, bool)
    address = np.full(index[0].shape, m.base, np.int64)
    for i, extent, stride in zip(index, m.dims, m.strides, strict=True):
        inside &= (i >= 0) & (i < extent)
        address += i * stride * m.dtype.itemsize
    return address, inside


def read_box(m: TensorMap, coordinates: Sequence[int], read: Read) -> np.ndarray:
    """What one copy brings: bytes [rows, bytes of a row], zeros out of bounds.

    ``coordinates`` are the instruction's: fast to slow, or a column and four rows.
    """
    if m.form in GATHERS:
        column, *rows = coordinates
        return np.concatenate([_read(m, (column, row), read) for row in rows])
    return _read(m, coordinates, read)


def _read(m: TensorMap, coordinates: Sequence[int], read: Read) -> np.ndarray:
    address, inside = places(m, coordinates, m.box)
    found = np.zeros((len(address), m.dtype.itemsize), np.uint8)
    if inside.any():
        found[inside] = read(address[inside])
    return found.reshape(-1, m.box[-1] * m.dtype.itemsize)


def swizzled(m: TensorMap, start: int, rows: int) -> np.ndarray:
    """Address in shared memory of each byte of a box that a copy puts at ``start``, [rows, bytes of a row]."""
    address = start + np.arange(rows * m.box[-1] * m.dtype.itemsize).reshape(rows, -1)
    return address if m.swizzle == "none" else address ^ ((address >> 3) & (SWIZZLE_BYTES[m.swizzle] - 16))


# --- the interpreter's part ----------------------------------------------------------------------


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    polls: int = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending, self.polls = self.phase ^ 1, self.count, 0


class State:
    """Barriers by address, and copies under way, of one block."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.barriers: dict[int, Barrier] = {}
        self.loads: list[Callable[[], None]] = []
        self.stores: dict[int, list[Callable[[], None]]] = {}
        block.at_end.append(self.finish)

    def barrier(self, address: int, what: str) -> Barrier:
        if address not in self.barriers:
            raise EmulationError(f"{what}: no barrier was set up at {address}")
        return self.barriers[address]

    def land(self) -> None:
        while self.loads:
            self.loads.pop(0)()

    def finish(self) -> None:
        self.land()
        for address, barrier in self.barriers.items():
            if barrier.bytes or barrier.pending != barrier.count:
                raise EmulationError(f"the barrier at {address} still waits for {barrier.bytes} bytes at the end")
        if any(self.stores.values()):
            raise EmulationError("the kernel ends with stores that nothing waited for")


def _state(t: Block) -> State:
    found = getattr(t, "tma", None)
    if found is None:
        found = t.tma = State(t)  # type: ignore[attr-defined]
    return found


@op("mbarrier")
def barrier_instruction(t: Block, i: Instruction) -> Any:
    s, kind, ops = _state(t), i.name[1:3], i.operands

    def run(m: Lanes) -> None:
        where = next(k for k, o in enumerate(ops) if o.startswith("["))
        for n, address in enumerate(t.address(ops[where], m).astype(np.int64)):
            rest = [int(t.value(o, m, np.uint32)[n]) for o in ops[where + 1 :]]
            if address % 8:
                raise EmulationError(f"{i.text}: a barrier must start at a multiple of 8, got {address}")
            if kind[0] == "init":
                s.barriers[int(address)] = Barrier(rest[0], rest[0])
                continue
            b = s.barrier(int(address), i.text)
            if "expect_tx" in i.name:
                b.bytes += rest[0]
            if kind[0] == "arrive":
                b.pending -= 1
                if b.pending < 0:
                    raise EmulationError(f"{i.text}: more than {b.count} arrivals")
            if kind[0] in ("expect_tx", "arrive"):
                b.settle()

    def wait(m: Lanes) -> None:
        s.land()
        done = []
        parity = t.value(ops[2], m, np.uint32)
        for n, address in enumerate(t.address(ops[1], m).astype(np.int64)):
            b = s.barrier(int(address), i.text)
            b.polls += 1
            if b.polls > _WAITS * t.count:
                raise EmulationError(f"{i.text}: waits for {b.bytes} bytes and {b.pending} arrivals that never come")
            done.append(b.phase != parity[n])
        t.put(ops[0], m, np.array(done))
        t.polling[np.arange(t.count)[m][~np.array(done)]] = True

    return wait if kind[0] == "try_wait" else run


@op("cp")
def copy(t: Block, i: Instruction) -> Any:
    return _bulk(t, i) if i.name[2] == "bulk" else copy_async(t, i)


def _parts(operand: str) -> tuple[str, list[str]]:
    found = re.fullmatch(r"\[\s*([%\w]+)\s*,\s*\{([^}]*)\}\s*\]", operand)
    if not found:
        raise EmulationError(f"operand {operand} is no descriptor with coordinates")
    return found[1], [c.strip() for c in found[2].split(",")]


def _bulk(t: Block, i: Instruction) -> Any:
    s = _state(t)
    if "tensor" not in i.name:
        return _groups(t, i, s)
    if "multicast::cluster" in i.name:
        raise EmulationError(f"{i.text}: copies to several CTAs are not known here")
    to_shared = i.name[5] == "shared::cluster"
    described, coordinates = _parts(i.operands[1 if to_shared else 0])

    def start(m: Lanes) -> None:
        handles = t.value(described, m, np.uint64)
        values = [t.value(c, m, np.int32) for c in coordinates]
        shared = t.address(i.operands[0 if to_shared else 1], m).astype(np.int64)
        barriers = t.address(i.operands[2], m).astype(np.int64) if to_shared else shared
        for n, lane in enumerate(np.arange(t.count)[m]):
            where = t.descriptors.get(int(handles[n]))
            if where is None:
                raise EmulationError(f"{i.text}: {handles[n]:#x} is no TMA descriptor")
            at, given = int(shared[n]), [int(v[n]) for v in values]
            if at % 128:
                raise EmulationError(f"{i.text}: shared memory must be a multiple of 128, got {at}")
            if to_shared:
                s.barrier(int(barriers[n]), i.text)
                s.loads.append(lambda w=where, a=at, g=given, b=int(barriers[n]): _load(t, s, i, w, a, g, b))
                if t.schedule.early:
                    s.land()
            else:
                s.stores.setdefault(int(lane), []).append(lambda w=where, a=at, g=given: _store(t, i, w, a, g))

    return start


def _load(t: Block, s: State, i: Instruction, m: TensorMap, at: int, given: list[int], barrier: int) -> None:
    def read(address: np.ndarray) -> np.ndarray:
        return t.memory.read(address.astype(np.uint64), m.dtype.itemsize, i.text)

    found = read_box(m, given, read)
    to = swizzled(m, at, len(found))
    if to.max() >= len(t.shared):
        raise EmulationError(f"{i.text}: outside the {len(t.shared)} bytes of shared memory")
    t.shared[to] = found
    b = s.barrier(barrier, i.text)
    b.bytes -= found.size
    b.settle()


def _store(t: Block, i: Instruction, m: TensorMap, at: int, given: list[int]) -> None:
    address, inside = places(m, given, m.box)
    data = t.shared[swizzled(m, at, len(address) // m.box[-1])].reshape(len(address), -1)
    if inside.any():
        t.memory.write(address[inside].astype(np.uint64), data[inside], i.text)


def _groups(t: Block, i: Instruction, s: State) -> Any:
    """Commits, which change nothing here, and waits, after which the thread's stores have been written."""

    def run(m: Lanes) -> None:
        if i.name[3] == "commit_group":
            return
        for lane in np.arange(t.count)[m]:
            waiting = s.stores.get(int(lane), [])
            while waiting:
                waiting.pop(0)()

    return run
