# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One block of the interpreter in ``kvarn.emulator.grid``: registers, shared memory, and the scheduling of its threads.

The threads of a block run until none can: each that cannot has a :class:`Wait`. Barriers and asynchronous operations
belong to the cluster (``kvarn.emulator.cluster``), which runs its blocks round-robin.
"""

from __future__ import annotations

import functools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .ptx_parser import GUARDED, JUMP, LOCAL, TOGETHER, EmulationError, Instruction

if TYPE_CHECKING:
    from .cluster import Cluster

WARP = 32
RANK = 24  # bits of a shared address from here on are the block's rank in its cluster
OFFSET = (1 << RANK) - 1
TYPES = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "s8": np.int8,
    "s16": np.int16, "s32": np.int32, "s64": np.int64, "pred": np.bool_,
    **{f"{k}{n}": np.dtype(f"u{n // 8}").type for k in "ub" for n in (8, 16, 32, 64)},
}  # fmt: skip
Lanes = Any  # the active threads: a slice, or an index array where they do not lie side by side
_BANK = 128  # registers that are made at once
_UNWRITTEN = 0xFFFF_FFFF_FFFF_FFFF  # a register that nothing was written to
_least, _most, _COUNT = np.minimum.reduce, np.maximum.reduce, np.arange(64)
# By bytes: what holds the bits of an element.
_BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def aligned(address: np.ndarray, size: int) -> bool:
    """Whether all addresses are multiples of a size."""
    power = not size & (size - 1)  # a multiple is then recognized without a division
    return not np.count_nonzero(address & address.dtype.type(size - 1) if power else address % address.dtype.type(size))


def side_by_side(lanes: np.ndarray) -> Lanes:
    """Threads, in order, as a slice if no other is between them: NumPy then copies no operands."""
    first, end = int(lanes[0]), int(lanes[-1]) + 1
    return slice(first, end) if end - first == len(lanes) else lanes


class Wait(IntEnum):
    """The reason why a thread does not continue."""

    NONE = 0
    BLOCK = 1  # at the barrier of all threads
    NAMED = 2  # at a barrier of some threads
    WARP = 3  # before an instruction that the rest of the warp must reach
    MBARRIER = 4
    CLUSTER = 5
    REGISTERS = 6  # for registers that others must release


# As numbers: NumPy takes as long to find that a member is one as to compare an array.
_GOES, _AT_WARP, _AT_BLOCK = int(Wait.NONE), int(Wait.WARP), int(Wait.BLOCK)


class _Registers:
    """Registers of all threads, allocated on first use."""

    def __init__(self, count: int) -> None:
        self.count, self.used, self.banks = count, 0, [np.empty((0, count), np.uint64)]

    def new(self) -> np.ndarray:
        if self.used == len(self.banks[-1]):
            self.banks.append(np.full((_BANK, self.count), _UNWRITTEN, np.uint64))
            self.used = 0
        self.used += 1
        return self.banks[-1][self.used - 1]

    def forget(self) -> None:
        """Mark all registers as unwritten."""
        for bank in self.banks:
            bank.fill(_UNWRITTEN)


class Block:
    """The threads of one block.

    When they have ended, the object can be reused for a block of the same rank in another cluster of the launch; it
    keeps everything that does not depend on the block.
    """

    def __init__(self, cluster: Cluster, rank: int, index: Any) -> None:
        kernel, block = cluster.kernel, cluster.block
        self.kernel, self.memory, self.params = kernel, cluster.memory, cluster.params
        self.order, self.rank = cluster.order, rank
        self.base = rank << RANK  # base address of its shared memory
        self.count = int(np.prod(block))
        self.warp_count = -(-self.count // WARP)
        self.special = _special(self.count, block, cluster, rank, index, kernel.launches)
        self.registers: dict[str, np.ndarray] = {}
        self.file = _Registers(self.count)
        self.views: dict[tuple[str, type], np.ndarray] = {}  # of operands, as elements of a type; to read only
        self.places: dict[str, np.ndarray] = {}  # of symbols that addresses name
        self.lanes = np.arange(self.count)
        self.lanes.flags.writeable = False
        self.threads = rank * 1024 + self.lanes  # numbers in the cluster
        self.tracked = kernel.tracked
        self.tracked_bits = np.full((len(self.tracked), self.count), _UNWRITTEN, np.uint64)
        self.registers |= {name: self.tracked_bits[n] for name, n in self.tracked.items()}
        self.compiled: list[Callable[[Lanes], None] | None] = [None] * len(kernel.code)
        self._begin(cluster, index)

    def again(self, cluster: Cluster, index: Any) -> Block:
        """Reset the object for a block of another cluster."""
        now = _special(self.count, cluster.block, cluster, self.rank, index, self.kernel.launches)
        for name, values in now.items():
            self.special[name][:] = values
        self.file.forget()
        self.tracked_bits.fill(_UNWRITTEN)
        self.__dict__.pop("own", None)
        self._begin(cluster, index)
        return self

    def _begin(self, cluster: Cluster, index: Any) -> None:
        kernel = self.kernel
        self.cluster, self.index = cluster, tuple(index)
        self.issued = np.zeros(self.count, np.int64)
        # In units of 16 bytes, as a load of three words reads four.
        self.shared = np.full(-(-max(kernel.shared_bytes, cluster.shared_bytes) // 16) * 16, 0xFF, np.uint8)
        self.version = 0  # incremented by writes to shared memory
        # Per byte: the last thread that wrote it through the generic proxy (0: none), and that thread's proxy fences
        # then.
        self.writer = np.zeros(len(self.shared), np.int16)
        self.written = np.zeros(len(self.shared), np.int32)
        self.written_at = np.zeros(len(self.shared), np.int32)  # how many proxy fences of all threads came before
        # By thread: copies in no group, and groups.
        self.pending: dict[int, list[Any]] = defaultdict(list)
        self.groups: dict[int, list[list[Any]]] = defaultdict(list)
        self.named: dict[int, tuple[int, int]] = {}  # barriers of some threads: (expected, arrived)
        self.counts, self.races, self.clocks = cluster.counts, cluster.races, cluster.clocks
        self.lets_start = self.knows_ahead = False  # the next kernel may start; earlier ones are over
        # State of the block in the modules wgmma, barriers and tma, made on demand.
        self.products: Any = None
        self.held_registers: Any = None
        self.stores: Any = None
        self.trace = np.zeros(self.warp_count, np.int64)  # hash of the executed warpgroup instructions
        self.pc = np.zeros(self.count, np.int64)
        self.wait = np.zeros(self.count, np.int8)
        self.which = np.zeros(self.count, np.int64)  # the barrier at which a thread waits
        self.ended = self.stopped = False
        self.at = self.began = 0  # the instruction that runs, and the first that its threads ran without a pause

    # --- values

    def value(self, operand: str, m: Lanes, dtype: type) -> np.ndarray:
        """An operand of the active threads, not to be written to; what a later :meth:`put` writes may show in it."""
        view = self.view(operand, dtype)
        if self.products is not None and operand in self.products.flying:
            self.products.check_read(operand, m)
        return view[m].astype(bool) if dtype is np.bool_ else view[m]

    def reader(self, operand: str, dtype: type) -> Callable[[Lanes], np.ndarray]:
        """What gives the :meth:`value` of an operand, for an instruction that may run often."""
        if operand in self.tracked:
            return lambda m: self.value(operand, m, dtype)
        view = self.view(operand, dtype)
        if dtype is np.bool_:
            return lambda m: view[m].astype(bool)
        return view.__getitem__

    def view(self, operand: str, dtype: type) -> np.ndarray:
        """An operand of all threads, to read only."""
        found = self.views.get((operand, dtype))
        if found is None:
            found = self.views[operand, dtype] = self._view(operand, dtype)
        return found

    def _view(self, operand: str, dtype: type) -> np.ndarray:
        """An operand of all threads, as elements of a type (predicates: as the bits of their registers)."""
        bits = self.special.get(operand)
        if bits is None and (operand.startswith("%") or operand in self.registers):
            bits = self.register(operand)
        if bits is None:
            found = np.full(self.count, self.literal(operand, dtype))
        elif dtype is np.bool_:
            found = bits[:]
        else:
            kind = _BITS[np.dtype(dtype).itemsize]
            found = bits.view(kind)[:: 8 // kind.itemsize].view(dtype)  # the low bytes
        found.flags.writeable = False
        return found

    def register(self, name: str) -> np.ndarray:
        """A register of all threads."""
        found = self.registers.get(name)
        if found is None:
            # LLVM leaves a register unwritten if its value is undefined.
            found = self.registers[name] = self.file.new()
        return found

    def rows_of(self, names: Iterable[str]) -> np.ndarray:
        """The rows [n, 1] of wgmma registers in ``tracked_bits``."""
        return np.array([self.tracked[name] for name in names])[:, None]

    def literal(self, text: str, dtype: type) -> Any:
        size = np.dtype(dtype).itemsize
        if text in self.kernel.shared:
            number = self.kernel.shared[text] + self.base
        elif text in self.params:
            number = self.params[text]
        elif text in self.kernel.symbols:
            number = self.kernel.symbols[text]
        elif re.fullmatch("0[fFdD][0-9A-Fa-f]+", text):
            number = int(text[2:], 16)
        else:
            try:
                number = int(text.rstrip("U"), 0)
            except ValueError:
                raise EmulationError(f"unknown operand {text!r}") from None
        if dtype is np.bool_:
            return np.bool_(number != 0)
        return np.array(number & ((1 << 8 * size) - 1), np.uint64).astype(f"u{size}").view(dtype)[()]

    def put(self, operand: str, m: Lanes, array: np.ndarray) -> None:
        """Write the bits of a result to a register."""
        if operand == "_":
            return
        bits = array if array.dtype == bool else array.view(_BITS[array.dtype.itemsize])
        if self.products is not None and operand in self.tracked:
            self.products.note_write(operand, m, bits.astype(np.uint64))
        self.register(operand)[m] = bits

    def putter(self, operand: str, dtype: Any) -> Callable[[Lanes, np.ndarray], None]:
        """What does :meth:`put` with elements of a type, for an instruction that may run often."""
        if operand == "_" or operand in self.tracked:
            return lambda m, array: self.put(operand, m, array)
        register, kind = self.register(operand), np.dtype(dtype)
        if kind.kind in "ub":
            return register.__setitem__
        bits = _BITS[kind.itemsize]

        def write(m: Lanes, array: np.ndarray) -> None:
            register[m] = array.view(bits)

        return write

    def address(self, operand: str, m: Lanes) -> np.ndarray:
        """Addresses in an operand, of the active threads."""
        base, offset = self.kernel.addresses.get(operand) or self.kernel.address(operand)
        found = self.registers.get(base)
        if found is None:
            found = self.places.get(base)
            if found is None:
                found = self.places[base] = np.full(self.count, self.literal(base, np.uint64))
        return found[m] + offset

    # --- memory

    def place(self, address: np.ndarray, size: int, what: str) -> np.ndarray:
        """Offsets [n, size] of bytes in this block's shared memory."""
        at = (address & np.uint64(0xFFFF_FFFF)).astype(np.int64) - self.base
        if not aligned(at, size):
            raise EmulationError(f"{what}: misaligned address for {size} bytes of shared memory")
        if len(at) and (_least(at) < 0 or _most(at) + size > len(self.shared)):
            raise EmulationError(f"{what}: outside the {len(self.shared)} bytes of shared memory")
        return at[:, None] + _COUNT[:size] if size <= len(_COUNT) else at[:, None] + np.arange(size)

    def place_own(self, address: np.ndarray, size: int, what: str) -> np.ndarray:
        """Offsets [n, size] of bytes in a thread's local memory, whose address is the same in every thread."""
        at = address.astype(np.int64) - LOCAL
        if ((at < 0) | (at + size > self.kernel.local_bytes)).any():
            raise EmulationError(f"{what}: outside the {self.kernel.local_bytes} bytes of a thread's own memory")
        return at[:, None] + np.arange(size)

    @functools.cached_property
    def own(self) -> np.ndarray:
        """The local memory of each thread, [threads, bytes]."""
        return np.full((self.count, self.kernel.local_bytes), 0xFF, np.uint8)

    def read(self, space: str, address: np.ndarray, size: int, i: Instruction, lanes: np.ndarray) -> np.ndarray:
        """Bytes [n, size] as the threads ``lanes`` read them."""
        self.note(space, address, size, i, lanes, False)
        if space == "cluster":
            return self.cluster.read(address, size, i, self.threads[lanes])
        if space == "global":
            return self.memory.read(address, size, i.text)
        if space == "local":
            return self.own[lanes[:, None], self.place_own(address, size, i.text)]
        return self.read_shared(self.place(address, size, i.text), self.threads[lanes], i)

    def read_shared(self, at: np.ndarray, threads: np.ndarray, i: Instruction) -> np.ndarray:
        if self.races is not None and i.name[0] != "atom":
            self.races.read(self, at, threads, i.index)
        return self.shared[at]

    def write(self, space: str, address: np.ndarray, data: np.ndarray, i: Instruction, lanes: np.ndarray) -> None:
        """Write [n, size] as the threads ``lanes``, through the generic proxy."""
        self.note(space, address, data.shape[1], i, lanes, True)
        if space == "cluster":
            self.cluster.write(address, data, i, self.threads[lanes])
        elif space == "shared":
            self.write_shared(self.place(address, data.shape[1], i.text), data, i, self.threads[lanes])
        elif space == "local":
            self.own[lanes[:, None], self.place_own(address, data.shape[1], i.text)] = data
        else:
            self.memory.write(address, data, i.text)

    def note(self, space: str, address: np.ndarray, size: int, i: Instruction, lanes: np.ndarray, write: bool) -> None:
        """Count an access of threads, and check that no earlier kernel may still use its address."""
        if space == "global" and self.cluster.ahead is not None:
            self.cluster.ahead.check(self, i, address, size, lanes, write)
        if self.counts is None or not len(lanes) or space == "local":
            return
        if space == "global":
            self.counts.device(i.index, self.cluster.fields, address, size, lanes, write)
        else:
            self.counts.shared(i.index, address, size, lanes)

    def write_shared(
        self, at: np.ndarray, data: np.ndarray, i: Instruction, threads: np.ndarray | None = None,
        copy: tuple[int, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        """Write to shared memory; without ``threads`` the write is the async proxy's.

        ``copy`` is then the mbarrier that the copy signals, and the clock of the thread that started it.
        """
        if self.races is not None and i.name[0] != "atom":
            if threads is not None:
                self.races.write(self, at, data, threads, i.index)
            elif copy is not None:
                self.races.write_async(self, at, data, *copy, i.index)
        threads = None if threads is None else threads[:, None]
        self.shared[at] = data
        self.version += 1
        if not self.kernel.reads_async:
            return
        if threads is None:
            self.writer[at] = 0
        else:
            self.writer[at] = threads + 1
            self.written[at] = self.cluster.fences[threads]
            self.written_at[at] = self.cluster.fences_of_all

    def read_async(self, at: np.ndarray, i: Instruction, thread: int | None = None) -> np.ndarray:
        """Bytes of shared memory as the async proxy reads them for a thread.

        Writes through the generic proxy must be followed by a proxy fence: of the writer, or of the reader after the
        barrier that ordered the write before it.
        """
        what = i.short
        if at.min() < 0 or at.max() >= len(self.shared):
            raise EmulationError(f"{what}: outside the {len(self.shared)} bytes of shared memory")
        writer = self.writer[at]
        if np.count_nonzero(writer):
            unfenced = (writer > 0) & (self.written[at] == self.cluster.fences[writer - 1])
            if thread is not None:
                unfenced &= self.written_at[at] >= self.cluster.fenced_at[self.threads[thread]]
            if unfenced.any():
                first = int(at[unfenced][0])
                raise EmulationError(
                    f"{what}: reads {self.kernel.symbol(first)}, which thread {int(writer[unfenced][0] - 1) % 1024} "
                    "wrote by an ordinary store without a fence.proxy.async after it"
                )
        if thread is not None:
            self.note_read(at, i, thread)
        return self.shared[at]

    def note_read(self, at: np.ndarray, i: Instruction, thread: int) -> None:
        """Record a read of the async proxy for a thread."""
        if self.races is not None:
            rows = at.reshape(-1, at.shape[-1])
            self.races.read(self, rows, np.full(len(rows), self.threads[thread]), i.index)

    # --- running

    def turn(self) -> bool:
        """Run some threads for a while; whether any could."""
        n, wait, pc = len(self.kernel.code), self.wait, self.pc
        running = pc < n
        if not np.count_nonzero(running):
            self.ended = True
            return False
        ready = running
        if np.count_nonzero(wait):
            if np.count_nonzero(wait == _AT_WARP) and self.release(running):
                return True
            ready = running & (wait == _GOES)
            if not np.count_nonzero(ready):
                if np.count_nonzero((wait == _AT_BLOCK) | ~running) == self.count:
                    if self.clocks is not None:
                        self.clocks.synchronize(self.clocks.warps_of(self, running))
                    wait[:] = _GOES
                    self.cluster.progress += 1
                    return True
                return False
        if self.order.warps != "together":
            warps = np.flatnonzero(np.bincount(np.flatnonzero(ready) // WARP))
            ready = ready & (self.lanes // WARP == self.cluster.choose(warps))
        at = pc[ready]
        here = int(_least(at))
        first = at == here
        together = np.count_nonzero(first)
        stop = n if together == len(at) else int(_least(at[~first]))
        if self.order.warps == "random":
            stop = min(stop, here + int(self.cluster.random.integers(1, 64)))
        self.advance(here, stop, slice(None) if together == self.count else side_by_side(np.flatnonzero(ready)[first]))
        return True

    def advance(self, at: int, stop: int, lanes: Lanes) -> None:
        """Run some threads from one instruction to a jump, a wait, or where others stand."""
        every = self.lanes[lanes]
        end = self._advance(at, stop, lanes, every)
        if self.kernel.has_clock:
            self.issued[lanes] += end - at
        if self.counts is not None:
            self.counts.ran(at, end, int(np.count_nonzero(np.diff(every // WARP))) + 1, len(every))

    def clock(self, m: Lanes) -> np.ndarray:
        """Instructions that each thread has issued: the emulator's time."""
        return self.issued[m] + (self.at - self.began)

    def _advance(self, at: int, stop: int, lanes: Lanes, every: np.ndarray) -> int:
        """The instruction after the last one that was run."""
        code, kinds, compiled, whole = self.kernel.code, self.kernel.kinds, self.compiled, None
        i, self.began = code[at], at
        try:
            while at < stop:
                i, kind, active = code[at], kinds[at], lanes
                if kind & GUARDED:
                    name, negated = i.guard  # type: ignore[misc]
                    bits = self.registers[name][lanes]
                    taken = bits == 0 if negated else bits != 0
                    active = lanes if np.count_nonzero(taken) == len(every) else every[taken]
                    if self.counts is not None:
                        self._note_guard(at, i, every, every if active is lanes else active)
                if kind & JUMP:
                    self.pc[lanes] = at + 1
                    self.pc[active] = self.kernel.labels[i.operands[0]] if i.name[0] == "bra" else len(code)
                    return at + 1
                if kind & TOGETHER:
                    whole = self.whole(every) if whole is None else whole
                    if not whole:
                        self.pc[lanes] = at
                        self.wait[lanes] = _AT_WARP
                        return at
                if active is lanes or len(active):
                    self.at = at
                    (compiled[at] or self._compile(at, i))(active)
                at += 1
                if self.stopped:
                    self.stopped = False
                    break
        except EmulationError as error:
            raise EmulationError(f"{error} ({i.where})") from None
        except Exception as error:
            raise EmulationError(f"{i.text}: {type(error).__name__}: {error} ({i.where})") from error
        self.pc[lanes] = at
        return at

    def _compile(self, at: int, i: Instruction) -> Callable[[Lanes], None]:
        maker = OPS.get(i.name[0])
        if maker is None:
            raise EmulationError(f"unknown instruction: {i.text}")
        try:
            found = self.compiled[at] = maker(self, i)
        except (KeyError, ValueError, IndexError, StopIteration) as error:
            raise EmulationError(f"unknown form of an instruction: {i.text}") from error
        return found

    def _note_guard(self, at: int, i: Instruction, every: np.ndarray, active: np.ndarray) -> None:
        """Count the effect of a guard: threads that it disables, or warps that a branch splits."""
        if i.name[0] != "bra":
            self.counts.threads[at] -= len(every) - len(active)
            return
        took = np.bincount(active // WARP, minlength=self.warp_count)
        here = np.bincount(every // WARP, minlength=self.warp_count)
        self.counts.diverged[at] += int(((took > 0) & (took < here)).sum())

    def stop(self, lanes: Lanes, why: Wait, which: int = 0) -> None:
        """Stop the threads at the current instruction."""
        self.wait[lanes], self.which[lanes] = why, which
        self.stopped = True

    def release(self, running: np.ndarray) -> bool:
        """Release the warps whose threads all wait before the same instruction."""
        full = np.full(self.warp_count * WARP, -1)
        full[: self.count] = np.where(self.wait == _AT_WARP, self.pc, -1)
        at, alive = full.reshape(-1, WARP), np.zeros(self.warp_count * WARP, bool)
        alive[: self.count] = running
        alive = alive.reshape(-1, WARP)
        first = np.where(alive, at, -1).max(1)
        together = (first >= 0) & ((at == first[:, None]) | ~alive).all(1)
        if not together.any():
            return False
        where = int(first[together].min())
        i = self.kernel.code[where]
        lanes = (np.flatnonzero(together & (first == where))[:, None] * WARP + np.arange(WARP)).ravel()
        if not running[lanes].all():
            raise EmulationError(f"{i.text}: some threads of the warp have ended ({i.where})")
        self.wait[lanes] = _GOES
        self.advance(where, where + 1, side_by_side(lanes))
        return True

    @staticmethod
    def whole(lanes: np.ndarray) -> bool:
        """Whether threads, in order, are whole warps."""
        if len(lanes) % WARP:
            return False
        first = lanes[::WARP]
        return not np.count_nonzero(first % WARP) and not np.count_nonzero(lanes[WARP - 1 :: WARP] - first != WARP - 1)

    def warps(self, m: Lanes, what: str) -> np.ndarray:
        """The active threads as whole warps [w, 32]."""
        if isinstance(m, slice) and m.start is None and self.count % WARP == 0:  # all threads
            return self.lanes.reshape(-1, WARP)
        lanes = self.lanes[m]
        if not self.whole(lanes):
            raise EmulationError(f"{what}: needs whole warps, got {len(lanes)} threads")
        return lanes.reshape(-1, WARP)


def _special(count: int, block: Any, cluster: Cluster, rank: int, index: Any, launch: int) -> dict[str, np.ndarray]:
    lanes, of = np.arange(count), cluster.shape
    ids = (lanes % block[0], lanes // block[0] % block[1], lanes // (block[0] * block[1]))
    found = {"%laneid": lanes % WARP, "%warpid": lanes // WARP}
    constants = {
        "%smid": index[0], "%globaltimer": time.time_ns(), "%gridid": launch,  # time stands still within a block
        "%cluster_ctarank": rank, "%cluster_nctarank": int(np.prod(of)), "%is_explicit_cluster": int(np.prod(of) > 1),
    }  # fmt: skip
    for k, axis in enumerate("xyz"):
        found[f"%tid.{axis}"] = ids[k]
        for name, value in (
            ("ntid", block[k]), ("nctaid", cluster.grid[k]), ("ctaid", index[k]), ("cluster_ctaid", index[k] % of[k]),
            ("cluster_nctaid", of[k]), ("clusterid", index[k] // of[k]), ("nclusterid", cluster.grid[k] // of[k]),
        ):  # fmt: skip
            constants[f"%{name}.{axis}"] = value
    found |= {name: np.full(count, value) for name, value in constants.items()}
    return {n: v.astype(np.uint64) for n, v in found.items()}


# --- instructions, by the first part of their names ---------------------------------------------------

OPS: dict[str, Callable[[Block, Instruction], Callable[[Lanes], None]]] = {}


def op(*names: str) -> Any:
    """Register the compiler of an instruction. Its result outlives a run of the block and must not keep the cluster."""

    def declare(function: Any) -> Any:
        for name in names:
            OPS[name] = function
        return function

    return declare
