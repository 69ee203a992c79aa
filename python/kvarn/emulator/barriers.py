# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Barriers and what arrives at them: barriers of a block, of some of its threads and of a cluster; local and remote
mbarriers; asynchronous copies of single threads; proxy fences; and the registers that warpgroups reallocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvarn.dialect.chips import REGISTERS

from .block import OFFSET, RANK, TYPES, WARP, Block, Lanes, Wait, op
from .cluster import Barrier, Parked
from .ptx_parser import EmulationError, Instruction, parts

# --- barriers of threads -------------------------------------------------------------------------


@op("bar", "barrier")
def barrier(t: Block, i: Instruction) -> Any:
    if i.name[1] == "warp":
        return lambda m: t.warps(m, i.text)
    if i.name[1] == "cluster":
        return _cluster_barrier(t, i)
    kind = next((n for n in i.name if n in ("sync", "arrive")), None)
    if kind is None:
        raise EmulationError(f"unknown form: {i.text}")
    number, *rest = i.operands

    def run(m: Lanes) -> None:
        lanes = t.lanes[m]
        numbers = t.value(number, m, np.uint32)
        threads = t.value(rest[0], m, np.uint32) if rest else None
        for n in np.unique(numbers):
            mine = numbers == n
            if n > 15:
                raise EmulationError(f"{i.text}: barriers are numbered 0 to 15, got {n}")
            if threads is None:
                if kind == "arrive" or n:
                    raise EmulationError(f"{i.text}: must give the number of threads")
                t.stop(lanes[mine], Wait.BLOCK)
            else:
                _come(t, i, kind, int(n), threads[mine], lanes[mine])

    return run


def _come(t: Block, i: Instruction, kind: str, number: int, threads: np.ndarray, lanes: np.ndarray) -> None:
    """Threads arrive at a barrier of some threads of the block; the last one opens it."""
    expected, came = t.named.get(number, (0, 0))
    expected = expected or int(threads[0])
    if expected % WARP or not 0 < expected <= -(-t.count // WARP) * WARP:
        raise EmulationError(f"{i.text}: threads must be a multiple of {WARP} up to {t.count}, got {expected}")
    if (threads != expected).any():
        raise EmulationError(f"{i.text}: barrier {number} is used with {expected} threads elsewhere")
    came += len(lanes)
    if t.clocks is not None:
        t.clocks.arrive((t.rank, number), t.clocks.warps_of(t, lanes))
    if came > expected:
        raise EmulationError(f"{i.text}: more threads than that arrive here")
    t.named[number] = (expected, came)
    if kind == "sync":
        t.stop(lanes, Wait.NAMED, number)
    if came == expected:
        t.named[number] = (0, 0)
        woken = (t.wait == Wait.NAMED) & (t.which == number)
        t.wait[woken] = Wait.NONE
        if t.clocks is not None:
            t.clocks.open((t.rank, number))
            t.clocks.passed((t.rank, number), t.clocks.warps_of(t, woken))
        t.cluster.progress += 1


def _cluster_barrier(t: Block, i: Instruction) -> Any:
    def arrive(m: Lanes) -> None:
        c, mine = t.cluster, t.threads[m]
        if (c.arrived[mine] > c.opened).any():
            raise EmulationError(f"{i.text}: arrives again without a wait after the first arrival")
        c.arrived[mine] = c.opened + 1
        if c.unfenced and "relaxed" not in i.name:
            c.show_barriers(mine, fence=False)
        if t.clocks is not None:
            t.clocks.arrive("cluster", t.clocks.warps_of(t, m))
        c.open_barrier()

    def wait(m: Lanes) -> None:
        c, lanes = t.cluster, t.lanes[m]
        early = lanes[c.arrived[t.threads[lanes]] > c.opened]
        if len(early):
            t.stop(early, Wait.CLUSTER)
        if t.clocks is not None and len(early) < len(lanes):
            t.clocks.passed("cluster", t.clocks.warps_of(t, np.setdiff1d(lanes, early)))

    return arrive if i.name[2] == "arrive" else wait


# --- mbarriers -----------------------------------------------------------------------------------


@op("mbarrier")
def mbarrier(t: Block, i: Instruction) -> Any:
    kind, ops = i.name[1], i.operands
    if kind in ("try_wait", "test_wait"):
        return _wait(t, i)
    if kind not in ("init", "inval", "arrive", "expect_tx", "complete_tx"):
        raise EmulationError(f"unknown form: {i.text}")
    where = next(k for k, o in enumerate(ops) if o.startswith("["))
    remote = "shared::cluster" in i.name

    def run(m: Lanes) -> None:
        c, address = t.cluster, t.address(ops[where], m).astype(np.int64) & 0xFFFF_FFFF
        rest = [t.value(o, m, np.uint32) for o in ops[where + 1 :]]
        phases = np.zeros(len(address), np.uint64)
        warps = None if t.clocks is None else t.clocks.of(t.threads[m])
        for n, a in enumerate(address.tolist()):
            _check_place(t, i, a, remote)
            lane, given = t.lanes[m][n], int(rest[0][n]) if rest else 1
            if a >> RANK == t.rank:
                _touch(t, i, a, lane, kind in ("init", "inval"))
            else:
                check_set_up(t, i, a, lane)
            if kind == "init":
                c.barriers[a] = Barrier(given, given, int(t.threads[lane]))
                c.unfenced.append(c.barriers[a])
                c.names.pop(a, None)
            elif kind == "inval":
                c.barrier(a, i.text)
                del c.barriers[a]
            if i.barrier:
                c.names.setdefault(a, i.barrier)
            if kind in ("arrive", "expect_tx", "complete_tx"):
                phases[n] = c.barrier(a, i.text).phase
                transaction = kind != "arrive" or "expect_tx" in i.name
                bytes = given if transaction else 0
                c.arrive(
                    a,
                    kind == "arrive" and (1 if transaction else given),
                    -bytes if kind == "complete_tx" else bytes,
                    i.text,
                    None if warps is None else warps[n : n + 1],
                )
        if where:
            t.put(ops[0], m, phases)

    return run


def _check_place(t: Block, i: Instruction, address: int, remote: bool) -> None:
    if address % 8:
        raise EmulationError(f"{i.text}: a barrier must start at a multiple of 8, got {address & OFFSET}")
    if not remote and address >> RANK != t.rank:
        raise EmulationError(f"{i.text}: a barrier of another block needs .shared::cluster")


def _touch(t: Block, i: Instruction, address: int, lane: Any, sets_up: bool) -> None:
    """Check that a thread that uses a barrier knows of its initialisation."""
    if t.races is None:
        return
    block = t.cluster.alive(address >> RANK, i.text)
    at = (address & OFFSET) + np.arange(8)[None]
    threads = t.threads[np.array([lane])]
    if sets_up:
        t.races.write(block, at, np.zeros((1, 8), np.uint8), threads, i.index)
    elif address in t.cluster.barriers:
        t.races.read(block, at, threads, i.index)


def check_set_up(t: Block, i: Instruction, address: int, lane: Any, copies: bool = False) -> None:
    """Check that a barrier's initialisation is visible to bulk copies and other blocks; ``copies``: the user is one."""
    c = t.cluster
    b = c.barrier(address, i.text)
    if not (b.fenced or (b.released and not copies)):
        raise EmulationError(
            f"{i.short}: {c.place(address)} was initialised by thread {b.by % 1024} without a later fence.mbarrier_init"
        )
    _touch(t, i, address, lane, False)


def _wait(t: Block, i: Instruction) -> Any:
    """Threads park until the phase ends; a test does not park."""
    ops = i.operands

    def run(m: Lanes) -> None:
        c, lanes = t.cluster, t.lanes[m]
        address = t.address(ops[1], m).astype(np.int64) & 0xFFFF_FFFF
        parity = t.value(ops[2], m, np.uint32).astype(np.int64) & 1
        done = np.zeros(len(lanes), bool)
        pairs = address * 2 + parity
        for a, p in [divmod(int(pair), 2) for pair in np.unique(pairs)] if len(pairs) else ():
            _check_place(t, i, a, False)
            mine = (address == a) & (parity == p)
            _touch(t, i, a, lanes[mine][0], False)
            done[mine] = c.barrier(a, i.text).phase != p
            if i.barrier:
                c.names.setdefault(a, i.barrier)
            if t.clocks is not None and done[mine].any():
                t.clocks.passed(a, t.clocks.warps_of(t, lanes[mine]))
            if not done[mine].any() and i.name[1] == "try_wait":
                c.parked.append(Parked(t, lanes[mine], ops[0], a, p))
                t.stop(lanes[mine], Wait.MBARRIER, a)
        t.put(ops[0], m, done)

    return run


@op("mapa", "getctarank")
def map_address(t: Block, i: Instruction) -> Any:
    """The address of the same offset in another block of the cluster; or the block of an address."""
    d, a, *rank = i.operands
    dtype = TYPES[i.name[-1]]

    def run(m: Lanes) -> None:
        address = t.value(a, m, dtype).astype(np.int64)
        if not rank:
            t.put(d, m, (address >> RANK).astype(np.uint32))
            return
        to = t.value(rank[0], m, np.uint32).astype(np.int64)
        if (to >= len(t.cluster.blocks)).any():
            raise EmulationError(f"{i.text}: the cluster has {len(t.cluster.blocks)} blocks, got rank {to.max()}")
        t.put(d, m, (address & OFFSET | to << RANK).astype(dtype))

    return run


# --- asynchronous copies of single threads ---------------------------------------------------------


class _Copies(NamedTuple):
    """Asynchronous copies of an instruction, one per thread: ``counts`` bytes each, zero-filled to ``size``."""

    to: np.ndarray
    source: np.ndarray
    counts: np.ndarray
    size: int
    instruction: Instruction


_Copy = tuple[_Copies, int]  # that of one thread


def _land(t: Block, lanes: Sequence[int], copies: Sequence[_Copy]) -> None:
    """Execute copies in order; copies of one instruction together."""
    by: dict[int, tuple[list[int], list[_Copy]]] = {}
    for lane, copy in zip(lanes, copies, strict=True):
        whose, found = by.setdefault(copy[0].instruction.index, ([], []))
        whose.append(lane)
        found.append(copy)
    for whose, found in by.values():
        first, i, size = found[0][0], found[0][0].instruction, found[0][0].size
        if all([of is first for of, _ in found]):
            which = np.array([n for _, n in found])
            to, source, counts = first.to[which], first.source[which], first.counts[which]
        else:
            to = np.array([of.to[n] for of, n in found], np.uint64)
            source = np.array([of.source[n] for of, n in found], np.uint64)
            counts = np.array([of.counts[n] for of, n in found])
        if np.count_nonzero(counts == size) == len(found):
            data = t.memory.read(source, size, i.text)
        else:
            data, some = np.zeros((len(found), size), np.uint8), counts > 0
            if some.any():
                read = t.memory.read(source[some], size, i.text)
                data[some] = np.where(np.arange(size) < counts[some][:, None], read, 0)
        t.write_shared(t.place(to, size, i.text), data, i, t.threads[np.array(whose)])


def _flush(t: Block, lanes: Sequence[int], keep: int, pending: bool) -> None:
    """Execute the copies of threads: all groups except the last ``keep``, and copies in no group yet."""
    found: list[_Copy] = []
    whose: list[int] = []
    for lane in lanes:
        groups, before = t.groups[lane], len(found)
        while len(groups) > keep:
            found += groups.pop(0)
        if pending:
            found += t.pending[lane]
            t.pending[lane] = []
        whose += [lane] * (len(found) - before)
    if found:
        _land(t, whose, found)


def copy_async(t: Block, i: Instruction) -> Any:
    """All forms of ``cp.async`` except those of the TMA."""
    kind = i.name[2] if i.name[2] in ("commit_group", "wait_group", "wait_all", "mbarrier") else "copy"
    if kind == "copy":
        a, b, size, *rest = i.operands
        if "L2::cache_hint" in i.name:
            rest.pop()  # L2 eviction policies do not affect results

        def start(m: Lanes) -> None:
            to, source, lanes = t.address(a, m), t.address(b, m), t.lanes[m]
            counts = t.value(rest[0], m, np.uint32).copy() if rest else np.full(len(to), int(size))
            for bytes in np.unique(counts[counts > 0]):
                t.note("global", source[counts == bytes], int(bytes), i, lanes[counts == bytes], False)
            made = _Copies(to, source, counts, int(size), i)
            now = np.full(len(lanes), t.order.copies == "early")
            if t.order.copies == "random":
                now = t.cluster.random.integers(2, size=len(lanes)) > 0
            for lane, n in zip(lanes[~now].tolist(), np.flatnonzero(~now).tolist(), strict=True):
                t.pending[lane].append((made, n))
            if now.any():
                _land(t, lanes[now].tolist(), [(made, n) for n in np.flatnonzero(now).tolist()])

        return start
    if kind == "mbarrier":
        return _report_copies(t, i)
    if kind == "commit_group":

        def commit(m: Lanes) -> None:
            for lane in t.lanes[m]:
                t.groups[lane].append(t.pending[lane])
                t.pending[lane] = []

        return commit

    def wait(m: Lanes) -> None:
        keep = int(i.operands[0]) if kind == "wait_group" else 0
        _flush(t, t.lanes[m].tolist(), keep, kind == "wait_all")

    return wait


def _report_copies(t: Block, i: Instruction) -> Any:
    """``cp.async.mbarrier.arrive``: arrives when all earlier copies of the thread are complete."""
    extra = 0 if "noinc" in i.name else 1

    def run(m: Lanes) -> None:
        c = t.cluster
        for lane, a in zip(t.lanes[m].tolist(), t.address(i.operands[0], m).tolist(), strict=True):
            a &= 0xFFFF_FFFF
            _check_place(t, i, a, False)
            c.barrier(a, i.text).pending += extra
            if i.barrier:
                c.names.setdefault(a, i.barrier)
            # Removed from the groups, so that waits for groups do not complete them: threads that wait for the barrier
            # may only
            # rely on the barrier. A wait for the groups stays correct, since it is the same thread's.
            copies = [copy for group in t.groups[lane] for copy in group] + t.pending[lane]

            def land(lane: int = lane, a: int = a, copies: list = copies) -> None:
                waiting = (*t.groups[lane], t.pending[lane])
                still = {id(copy) for group in waiting for copy in group}
                now = [copy for copy in copies if id(copy) in still]
                if now:
                    _land(t, [lane] * len(now), now)
                    landed = {id(copy) for copy in now}
                    for group in waiting:
                        group[:] = [copy for copy in group if id(copy) not in landed]
                c.arrive(a, 1, 0, i.text, None if t.clocks is None else t.clocks.warps_of(t, [lane]))

            c.start(land)

    return run


def store_async(t: Block, i: Instruction) -> Any:
    """``st.async``: a store to the cluster that an mbarrier of the same block counts."""
    a, d, bar = i.operands
    kind = np.dtype(f"u{np.dtype(TYPES[i.name[-1]]).itemsize}").type

    def run(m: Lanes) -> None:
        columns = [t.value(r, m, kind) for r in parts(d)]
        data = np.ascontiguousarray(np.stack(columns, 1)).view(np.uint8).reshape(len(columns[0]), -1)
        barriers, lanes = t.address(bar, m).astype(np.int64) & 0xFFFF_FFFF, t.lanes[m]
        for n, (address, b) in enumerate(zip(t.address(a, m), barriers.tolist(), strict=True)):
            if int(address) >> RANK != b >> RANK:
                raise EmulationError(f"{i.text}: the barrier must be in the block that is written")
            if b >> RANK == t.rank:
                t.cluster.barrier(b, i.text)
            else:
                check_set_up(t, i, b, lanes[n])
            known = t.cluster.copy(t, int(lanes[n]), b)

            def land(at: Any = address, b: int = b, bytes: np.ndarray = data[n : n + 1], known: Any = known) -> None:
                t.cluster.write(np.array([at], np.uint64), bytes, i, None, known)
                t.cluster.arrive(b, 0, -bytes.size, i.text)

            t.cluster.start(land)

    return run


# --- fences and registers ------------------------------------------------------------------------


@op("fence")
def fence(t: Block, i: Instruction) -> Any:
    """A proxy fence: the async proxy sees the thread's writes, those it knows of, and its initialised mbarriers.

    Of other fences only ``fence.mbarrier_init`` has an effect.
    """
    if i.name[1] == "mbarrier_init":
        return lambda m: t.cluster.show_barriers(t.threads[m], fence=True)
    proxy = i.name[1] == "proxy" and i.name[2].startswith("async") and "global" not in i.name[2:]

    def run(m: Lanes) -> None:
        if t.cluster.unfenced:
            t.cluster.show_barriers(t.threads[m], fence=True)
        t.cluster.fences[t.threads[m]] += 1
        t.cluster.fences_of_all += 1
        t.cluster.fenced_at[t.threads[m]] = t.cluster.fences_of_all

    return run if proxy else lambda m: None


@op("setmaxnreg")
def set_registers(t: Block, i: Instruction) -> Any:
    """setmaxnreg: registers that warps release and request; a request waits until enough are free."""
    count, more = int(i.operands[0]), i.name[1] == "inc"
    if not 24 <= count <= 256 or count % 8:
        raise EmulationError(f"{i.text}: the count must be a multiple of 8 from 24 to 256, got {count}")

    def run(m: Lanes) -> None:
        state = registers_of(t)
        for lanes in t.warps(m, i.text):
            warp = int(lanes[0]) // WARP
            if warp // 4 * 4 + 4 > t.warp_count:
                raise EmulationError(f"{i.text}: needs a whole warpgroup, and warp {warp} is in none")
            t.trace[warp] = hash((int(t.trace[warp]), t.at))
            has = int(state.held[warp])
            if state.known[warp] and ((count < has) if more else (count > has)):
                raise EmulationError(
                    f"{i.text}: warp {warp} has {has} registers, which is {'more' if more else 'less'}"
                )
            state.claims[warp], state.known[warp] = count, True
            state.settle()
            if state.held[warp] != count:
                t.stop(lanes, Wait.REGISTERS, state.free)

    return run


class _Registers:
    """Registers of a block's warps, counted per thread."""

    def __init__(self, t: Block) -> None:
        self.block = t
        start = t.kernel.registers or min(255, REGISTERS // t.count // 8 * 8)
        self.held = np.full(t.warp_count, start)
        self.claims = self.held.copy()
        self.known = np.full(t.warp_count, t.kernel.registers is not None)
        self.total = min(start * t.warp_count, REGISTERS // WARP)
        t.cluster.at_end.append(lambda: check_together(t))

    @property
    def free(self) -> int:
        return self.total - int(self.held.sum())

    def settle(self) -> None:
        for warp in np.argsort(self.claims - self.held):  # releases come first
            if self.claims[warp] - self.held[warp] <= self.free:
                self.held[warp] = self.claims[warp]
        served = np.repeat(self.held == self.claims, WARP)[: self.block.count]
        self.block.wait[(self.block.wait == Wait.REGISTERS) & served] = Wait.NONE
        self.block.cluster.progress += 1


def registers_of(t: Block) -> _Registers:
    if t.held_registers is None:
        t.held_registers = _Registers(t)
    return t.held_registers


def check_together(t: Block) -> None:
    """Check that the warps of a warpgroup executed the same warpgroup instructions."""
    for first in range(0, t.warp_count, 4):
        if len(set(t.trace[first : first + 4].tolist())) > 1:
            raise EmulationError(
                f"block {t.index}: warps {first} to {first + 3} are a warpgroup, but did not run the same wgmma and "
                "setmaxnreg instructions"
            )
