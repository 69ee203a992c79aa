# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The blocks of a cluster, run round-robin: their barriers, asynchronous operations, and the report of a deadlock.

An address of shared memory has the block's rank from bit 24 on, so an mbarrier has one address in the cluster. A wait
parks its threads until the phase ends. An asynchronous copy completes when it is started (early), when no thread can
run (late), or at random. If no thread can run and no copy is pending, the waits time out once, as in hardware; after
that it is a deadlock, and the report lists every barrier with waiting threads.
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
_PATIENCE = 20_000  # scheduling steps after which a copy completes although threads run (they may poll)


@dataclass(frozen=True)
class Order:
    """The choices of the hardware on which a kernel must not depend.

    Attributes
    ----------
    warps : {"together", "forward", "backward", "random"}
        The warps of a block run in lockstep, or each as far as possible, from the first or from the last, or in a
        random order given by ``seed``.
    copies : {"late", "early", "random"}
        Asynchronous copies complete when no thread can run, when they are started, or at any time in between.
    seed : int
    steps : int, optional
        Step limit of a launch (blocks and scheduling steps of threads); default: ``KVARN_EMULATOR_STEPS``.
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
    """The remaining steps of a launch: a kernel that does not end, or a huge grid, is an error."""

    def __init__(self, order: Order) -> None:
        self.most = self.left = env.emulator_steps if order.steps is None else order.steps

    def take(self, waits: Callable[[], Sequence[str]] = tuple) -> None:
        self.left -= 1
        if self.left < 0:
            lines = "".join(f"\n  {line}" for line in waits())
            raise EmulationError(f"the kernel does not end within {self.most} steps: {MORE_STEPS}{lines}")


@dataclass(eq=False)
class Barrier:
    """An mbarrier: the arrivals and bytes that its phase still expects.

    The thread that initialised it (``by``) makes it visible to bulk copies by a fence, and to threads of other blocks
    by that fence or by a cluster barrier with release semantics.
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
    """Threads that wait at an mbarrier for the end of a phase; ``predicate`` receives the result."""

    block: Block
    lanes: np.ndarray
    predicate: str
    address: int
    parity: int


@dataclass(eq=False)
class Cluster:
    """Blocks with their shared state."""

    kernel: Kernel
    memory: Any
    params: dict[str, int]
    descriptors: dict[int, Any]  # handles of TMA descriptors -> their descriptions
    grid: Sequence[int]
    block: Sequence[int]
    shape: Sequence[int]
    shared_bytes: int
    order: Order
    first: Sequence[int]  # the index of its first block
    counts: Any = None  # from kvarn.emulator.report
    fields: Any = None  # from kvarn.emulator.memory
    tell: Any = None  # receives hazards
    ahead: Any = None  # from kvarn.emulator.stream: the kernel, if earlier ones may still run
    spare: Sequence[Block] = ()  # blocks of a finished cluster of the launch, for reuse
    steps: Steps = field(default_factory=lambda: Steps(Order()))
    progress: int = 0  # incremented by events that may wake threads
    under_way: list[Callable[[], None]] = field(default_factory=list)
    barriers: dict[int, Barrier] = field(default_factory=dict)
    unfenced: list[Barrier] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    parked: list[Parked] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)  # checks run when all threads have ended

    def __post_init__(self) -> None:
        count = int(np.prod(self.shape))
        self.fences = np.zeros(count * 1024, np.int32)  # number of proxy fences by thread
        self.fences_of_all = 0
        self.fenced_at = np.zeros(count * 1024, np.int32)  # by thread: the total number of fences at its last one
        self.arrived = np.zeros(count * 1024, np.int64)  # arrivals of each thread at the cluster barrier
        self.opened = 0  # number of completed phases of the cluster barrier
        self.failed: dict[tuple[int, int], int] = {}  # the progress when a wait of a thread last timed out
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
        """Run all threads to their ends."""
        last = 0  # steps since the last completed copy
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
        """The warp to run next."""
        if self.order.warps == "random":
            return int(warps[self.random.integers(len(warps))])
        return int(warps[0 if self.order.warps == "forward" else -1])

    # --- asynchronous operations

    def start(self, land: Callable[[], None]) -> None:
        """Start an operation that completes at a time of its own."""
        if self.order.copies == "early":
            land()
        else:
            self.under_way.append(land)

    def land(self) -> None:
        """Complete one pending operation."""
        at = int(self.random.integers(len(self.under_way))) if self.order.copies == "random" else 0
        self.under_way.pop(at)()
        self.progress += 1

    # --- mbarriers

    def barrier(self, address: int, what: str) -> Barrier:
        if address not in self.barriers:
            raise EmulationError(f"{what}: no barrier was initialised at {self.place(address)}")
        self.alive(address >> RANK, what)
        return self.barriers[address]

    def show_barriers(self, threads: np.ndarray, fence: bool) -> None:
        """Make mbarriers that threads initialised visible, by a fence or an arrival at the cluster barrier."""
        mine = set(threads.tolist())
        for b in self.unfenced:
            if b.by in mine:
                b.released, b.fenced = True, fence
        self.unfenced = [b for b in self.unfenced if not b.fenced]

    def arrive(self, address: int, count: int, bytes: int, what: str, warps: np.ndarray | None = None) -> None:
        """Record ``count`` arrivals of warps, and ``bytes`` more expected bytes (negative for received ones)."""
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
        """Time out the waits that have not timed out since the last progress; whether there were any."""
        waiting = [p for p in self.parked if self.failed.get((p.block.rank, int(p.lanes[0]))) != self.progress]
        for p in waiting:
            self.failed[p.block.rank, int(p.lanes[0])] = self.progress
        self.wake(waiting, False)
        return bool(waiting)

    def finish(self) -> None:
        """Checks after all threads have ended."""
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

    # --- the cluster barrier

    def open_barrier(self) -> bool:
        """Complete the cluster barrier if all running threads have arrived; whether it was completed."""
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
        """The part of the state of a copy's starter that is kept for a copy that signals an mbarrier."""
        if self.races is None:
            return None
        return barrier, self.races.snapshot(int(self.races.of(block.threads[lane])))

    # --- reports

    def place(self, address: int) -> str:
        """A barrier by its name, if any, and address."""
        found = self.kernel.symbol(address & OFFSET)
        if len(self.blocks) > 1:
            found += f" of block {address >> RANK}"
        named = self.names.get(address)
        return f"{named} (at {found})" if named else found

    def hang(self) -> str:
        return "no warp can continue:" + "".join(f"\n  {line}" for line in self.waits())

    def waits(self) -> list[str]:
        """A description of every waiting warp."""
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
