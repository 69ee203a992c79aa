# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The blocks of one cluster, which run in turns: their barriers, what is under way, and the report of a hang.

An address of shared memory holds the block's rank from bit 24 on, so that an mbarrier has one address in the cluster.
A wait at one parks its threads until its phase is over; a copy under way lands when it is started (early), when
nobody can go on (late), or at random. When nobody can go on and nothing is under way, the waits end without success
once, as the hardware's do after a while; then it is a hang, and the report names every barrier that is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvarn.env import env

from .block import OFFSET, RANK, WARP, Block, Wait
from .clocks import Clocks
from .ptx_parser import EmulationError, Instruction, Kernel
from .races import Races

WARPS = ("together", "forward", "backward", "random")
COPIES = ("late", "early", "random")
MORE_STEPS = "steps= of kv.emulated and emulate, or KVARN_EMULATOR_STEPS, allow more"
_PATIENCE = 20_000  # turns after which something lands though threads go on: they may wait in a loop of their own


@dataclass(frozen=True)
class Order:
    """What the hardware may choose, and a kernel must not depend on.

    Attributes
    ----------
    warps : {"together", "forward", "backward", "random"}
        The warps of a block step by step, or each as far as it gets, from the first or from the last, or in turns that
        ``seed`` gives.
    copies : {"late", "early", "random"}
        Asynchronous copies land when nobody can go on, when they are started, or at any time in between.
    seed : int
    steps : int, optional
        What a launch may take at most, blocks and turns of their threads; default: ``KVARN_EMULATOR_STEPS``.
    """

    warps: str = "together"
    copies: str = "late"
    seed: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("warps", WARPS), ("copies", COPIES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int | np.integer) or self.seed < 0:
            raise ValueError(f"seed must be a non-negative int, got {self.seed!r}")
        if self.steps is not None and (isinstance(self.steps, bool) or self.steps < 1):
            raise ValueError(f"steps must be a positive int, got {self.steps!r}")


class Steps:
    """What a launch may still take: a kernel that does not end, or a grid that nobody waits for, is an error."""

    def __init__(self, order: Order) -> None:
        self.most = self.left = env.emulator_steps if order.steps is None else order.steps

    def take(self, waits: Callable[[], Sequence[str]] = tuple) -> None:
        self.left -= 1
        if self.left < 0:
            lines = "".join(f"\n  {line}" for line in waits())
            raise EmulationError(f"the kernel does not end within {self.most} steps: {MORE_STEPS}{lines}")


@dataclass(eq=False)
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for.

    Who set it up (``by``) shows it to bulk copies with a fence, and to threads of other blocks with that or with a
    barrier of the cluster that releases.
    """

    count: int
    pending: int
    by: int
    bytes: int = 0
    phase: int = 0
    fenced: bool = False
    released: bool = False


@dataclass(eq=False)
class Parked:
    """Threads that wait at an mbarrier for the end of a phase; ``predicate`` tells them whether it came."""

    block: Block
    lanes: np.ndarray
    predicate: str
    address: int
    parity: int


@dataclass(eq=False)
class Cluster:
    """Blocks with what they share."""

    kernel: Kernel
    memory: Any
    params: dict[str, int]
    descriptors: dict[int, Any]  # what stands for a TMA descriptor in a register: the description
    grid: Sequence[int]
    block: Sequence[int]
    shape: Sequence[int]
    shared_bytes: int
    order: Order
    first: Sequence[int]  # the index of its first block
    counts: Any = None  # of kvarn.emulator.report
    fields: Any = None  # of kvarn.emulator.memory
    tell: Any = None  # gets hazards
    ahead: Any = None  # of kvarn.emulator.stream: the kernel, where others may still run
    spare: Sequence[Block] = ()  # of a cluster of the launch that has ended
    steps: Steps = field(default_factory=lambda: Steps(Order()))
    progress: int = 0  # counts what may wake others
    under_way: list[Callable[[], None]] = field(default_factory=list)
    barriers: dict[int, Barrier] = field(default_factory=dict)
    unfenced: list[Barrier] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    parked: list[Parked] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)  # what is checked when all threads have ended

    def __post_init__(self) -> None:
        count = int(np.prod(self.shape))
        self.fences = np.zeros(count * 1024, np.int32)  # proxy fences by thread
        self.fences_of_all = 0
        self.fenced_at = np.zeros(count * 1024, np.int32)  # by thread: how many there were at its last
        self.arrived = np.zeros(count * 1024, np.int64)  # how often threads came to the barrier of the cluster
        self.opened = 0  # how often it let them go on
        self.failed: dict[tuple[int, int], int] = {}  # the progress when a wait of a thread last ended without success
        self.over = False
        self.random = np.random.default_rng((self.order.seed, *self.first))
        self.races = None if self.tell is None else Races(self, self.tell)
        self.clocks: Any = Clocks(self) if self.races is None and self.ahead is not None else self.races
        self.blocks: list[Block] = []
        for rank in range(count):
            place = (
                rank % self.shape[0],
                rank // self.shape[0] % self.shape[1],
                rank // self.shape[0] // self.shape[1],
            )
            index = [f + p for f, p in zip(self.first, place, strict=True)]
            spare = self.spare[rank] if self.spare else None
            self.blocks.append(Block(self, rank, index) if spare is None else spare.again(self, index))

    # --- running

    @np.errstate(all="ignore")
    def run(self) -> None:
        """All threads to their ends."""
        last = 0  # turns since something landed
        while True:
            self.steps.take(self.waits)
            alive = [b for b in self.blocks if not b.ended]
            if not alive:
                self.finish()
                return
            last += 1
            if self.under_way and (
                last > _PATIENCE or (self.order.copies == "random" and self.random.integers(8) == 0)
            ):
                self.land()
                last = 0
            ordered = alive[::-1] if self.order.warps == "backward" else alive
            if self.order.warps == "random":
                ordered = [alive[k] for k in self.random.permutation(len(alive))]
            if self.order.warps == "together":
                if any([b.turn() for b in ordered]):
                    continue
            elif any(b.turn() for b in ordered):
                continue
            if any(b.ended for b in ordered) or self.open_barrier():
                continue
            if self.under_way:
                self.land()
            elif not self.give_up():
                raise EmulationError(self.hang())

    def choose(self, warps: np.ndarray) -> int:
        """The warp that goes on."""
        if self.order.warps == "random":
            return int(warps[self.random.integers(len(warps))])
        return int(warps[0 if self.order.warps == "forward" else -1])

    # --- what is under way

    def start(self, land: Callable[[], None]) -> None:
        """Something that happens at a time of its own."""
        if self.order.copies == "early":
            land()
        else:
            self.under_way.append(land)

    def land(self) -> None:
        """One thing that is under way happens."""
        at = int(self.random.integers(len(self.under_way))) if self.order.copies == "random" else 0
        self.under_way.pop(at)()
        self.progress += 1

    # --- mbarriers

    def barrier(self, address: int, what: str) -> Barrier:
        if address not in self.barriers:
            raise EmulationError(f"{what}: no barrier was set up at {self.place(address)}")
        self.alive(address >> RANK, what)
        return self.barriers[address]

    def show_barriers(self, threads: np.ndarray, fence: bool) -> None:
        """Threads show the mbarriers that they set up, by a fence or as they come to the cluster's barrier."""
        mine = set(threads.tolist())
        for b in self.unfenced:
            if b.by in mine:
                b.released, b.fenced = True, fence
        self.unfenced = [b for b in self.unfenced if not b.fenced]

    def arrive(self, address: int, count: int, bytes: int, what: str, warps: np.ndarray | None = None) -> None:
        """``count`` arrivals, and ``bytes`` more to wait for (fewer, when some have come), of warps of the cluster."""
        b = self.barrier(address, what)
        if self.clocks is not None and warps is not None:
            self.clocks.arrive(address, warps)
        b.bytes += bytes
        b.pending -= count
        if b.pending < 0:
            raise EmulationError(f"{what}: more than {b.count} arrivals at {self.place(address)}")
        self.progress += 1
        if b.pending == 0 and b.bytes == 0:
            b.phase, b.pending = b.phase ^ 1, b.count
            if self.clocks is not None:
                self.clocks.open(address, copies=True)
            waiting = [p for p in self.parked if p.address == address and p.parity != b.phase]
            self.wake(waiting, True)

    def wake(self, waiting: list[Parked], success: bool) -> None:
        for p in waiting:
            self.parked.remove(p)
            p.block.put(p.predicate, p.lanes, np.full(len(p.lanes), success))
            p.block.wait[p.lanes] = Wait.NONE
            if success and self.clocks is not None:
                self.clocks.passed(p.address, self.clocks.warps_of(p.block, p.lanes))

    def give_up(self) -> bool:
        """End the waits without success that have not ended so since something happened; whether there were any."""
        waiting = [p for p in self.parked if self.failed.get((p.block.rank, int(p.lanes[0]))) != self.progress]
        for p in waiting:
            self.failed[p.block.rank, int(p.lanes[0])] = self.progress
        self.wake(waiting, False)
        return bool(waiting)

    def finish(self) -> None:
        """What must hold when all threads have ended."""
        self.over = True
        while self.under_way:
            self.land()
        for address, b in self.barriers.items():
            if b.bytes or b.pending != b.count:
                raise EmulationError(
                    f"the barrier at {self.place(address)} still waits for {b.bytes} bytes and {b.pending} of "
                    f"{b.count} arrivals at the end"
                )
        for check in self.at_end:
            check()
        if self.ahead is not None:
            self.ahead.ended(self)

    # --- the barrier of the cluster

    def open_barrier(self) -> bool:
        """Open the cluster's barrier if all threads that have not ended came to it; whether it was opened."""
        threads = np.concatenate([b.threads[b.pc < len(self.kernel.code)] for b in self.blocks])
        if not len(threads) or (self.arrived[threads] <= self.opened).any():
            return False
        self.opened += 1
        self.progress += 1
        if self.clocks is not None:
            self.clocks.open("cluster")
        for b in self.blocks:
            woken = (b.wait == Wait.CLUSTER) & (self.arrived[b.threads] <= self.opened)
            b.wait[woken] = Wait.NONE
            if self.clocks is not None:
                self.clocks.passed("cluster", self.clocks.warps_of(b, woken))
        return True

    # --- shared memory of the cluster

    def alive(self, rank: int, what: str) -> Block:
        if rank >= len(self.blocks):
            raise EmulationError(f"{what}: the cluster has no block {rank}")
        found = self.blocks[rank]
        if not self.over and not np.count_nonzero(found.pc < len(self.kernel.code)):
            raise EmulationError(f"{what}: block {rank} of the cluster has ended, and its shared memory with it")
        return found

    def _by_rank(self, address: np.ndarray) -> Any:
        ranks = (address & np.uint64(0xFFFF_FFFF)).astype(np.int64) >> RANK
        return ((int(r), np.flatnonzero(ranks == r)) for r in np.unique(ranks))

    def read(self, address: np.ndarray, size: int, i: Instruction, threads: np.ndarray) -> np.ndarray:
        found = np.empty((len(address), size), np.uint8)
        for rank, mine in self._by_rank(address):
            block = self.alive(rank, i.text)
            found[mine] = block.read_shared(block.place(address[mine], size, i.text), threads[mine], i)
        return found

    def write(
        self, address: np.ndarray, data: np.ndarray, i: Instruction, threads: np.ndarray | None,
        copy: tuple[int, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        for rank, mine in self._by_rank(address):
            block = self.alive(rank, i.text)
            by = None if threads is None else threads[mine]
            block.write_shared(block.place(address[mine], data.shape[1], i.text), data[mine], i, by, copy)

    def copy(self, block: Block, lane: int, barrier: int) -> tuple[int, np.ndarray] | None:
        """What is kept of who starts a copy that reports to an mbarrier."""
        if self.races is None:
            return None
        return barrier, self.races.snapshot(int(self.races.of(block.threads[lane])))

    # --- reports

    def place(self, address: int) -> str:
        """A barrier by its name, if it has one, and address."""
        found = self.kernel.symbol(address & OFFSET)
        if len(self.blocks) > 1:
            found += f" of block {address >> RANK}"
        named = self.names.get(address)
        return f"{named} (at {found})" if named else found

    def hang(self) -> str:
        return "no warp can go on:" + "".join(f"\n  {line}" for line in self.waits())

    def waits(self) -> list[str]:
        """What every warp waits for."""
        found: list[str] = []
        for b in self.blocks:
            groups: dict[tuple[int, int, int, int], list[int]] = {}
            for lane in np.flatnonzero(b.pc < len(self.kernel.code)):
                parity = -1
                if b.wait[lane] == Wait.MBARRIER:
                    parity = next(p.parity for p in self.parked if p.block is b and lane in p.lanes)
                key = (int(b.pc[lane]), int(b.wait[lane]), int(b.which[lane]), parity)
                groups.setdefault(key, []).append(int(lane))
            for (pc, wait, which, parity), lanes in sorted(groups.items(), key=lambda g: g[1]):
                found.append(f"block {b.index} {_warps(lanes)}: {self._why(b, pc, Wait(wait), which, parity)}")
        return found

    def _why(self, b: Block, pc: int, wait: Wait, which: int, parity: int) -> str:
        i = self.kernel.code[pc if wait in (Wait.NONE, Wait.WARP) else pc - 1]
        at = f"{i.short} ({i.where})"
        if wait is Wait.MBARRIER:
            bar = self.barriers[which]
            return (
                f"waits at {self.place(which)} for the end of its phase {parity}: waits for {bar.bytes} bytes and "
                f"{bar.pending} arrivals that never come, of {bar.count}; {at}"
            )
        if wait is Wait.NAMED:
            threads, came = b.named.get(which, (0, 0))
            name = f" {i.barrier}" if i.barrier else ""
            return f"waits at barrier {which}{name}: {came} of {threads} threads came; {at}"
        why = {
            Wait.BLOCK: "waits for all threads of the block",
            Wait.WARP: "the rest of the warp never comes here",
            Wait.CLUSTER: "waits for all threads of the cluster",
            Wait.REGISTERS: f"waits for registers: {which} of a thread are free",
            Wait.NONE: "goes on",
        }[wait]
        return f"{why}; {at}"


def _warps(lanes: list[int]) -> str:
    whole = len(lanes) % WARP == 0 and all(x % WARP == k % WARP for k, x in enumerate(lanes))
    if not whole:
        return f"threads {lanes[0]} to {lanes[-1]} ({len(lanes)} of them)" if len(lanes) > 1 else f"thread {lanes[0]}"
    warps = [x // WARP for x in lanes[::WARP]]
    return f"warp{'s' if len(warps) > 1 else ''} {', '.join(map(str, warps))}"
