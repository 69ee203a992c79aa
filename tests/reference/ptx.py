# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A PTX interpreter, so that kernels for GPUs are tested where there is none.

It runs the instructions that kvarn's kernels use, all threads of a block at once in NumPy: at every step the threads
that stand at the lowest instruction go on together, which brings threads together again after a branch. What the
hardware leaves to the program is checked: an access outside the given memory, a misaligned one, a warp that is not
whole at an instruction that needs it. Shared memory starts as NaNs. A :class:`Schedule` says in which order warps run
and when asynchronous copies land: a kernel with a missing barrier or wait gives other results under another schedule.
Blocks run one after another; caches and the order in which other threads see writes are not modelled.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

WARP = 32
TYPES = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "s8": np.int8,
    "s16": np.int16, "s32": np.int32, "s64": np.int64, "pred": np.bool_,
    **{f"{k}{n}": np.dtype(f"u{n // 8}").type for k in "ub" for n in (8, 16, 32, 64)},
}  # fmt: skip
Lanes = Any  # the active threads: an index array, or a slice for all


class EmulationError(Exception):
    """The kernel did what no kernel may, or uses an instruction that is not known here."""


@dataclass
class Instruction:
    text: str
    name: tuple[str, ...]  # the opcode's parts
    operands: list[str]
    guard: tuple[str, bool] | None


@dataclass
class Kernel:
    """The parsed entry of a PTX text."""

    params: list[str]
    code: list[Instruction]
    labels: dict[str, int]
    shared: dict[str, int] = field(default_factory=dict)  # offsets of shared variables
    shared_bytes: int = 0


# --- parsing -----------------------------------------------------------------------------------------


def parse(text: str, entry: str) -> Kernel:
    """The entry of a name."""
    text = re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.S))
    found = re.search(r"\.entry\s+" + re.escape(entry) + r"\s*\(([^)]*)\)", text)
    if not found:
        raise EmulationError(f"the PTX has no entry {entry}")
    params = re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", found[1].strip())
    start = text.index("{", found.end())
    depth, end = 1, start + 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    kernel = Kernel(params, [], {})
    offset = 0
    for align, name, size in re.findall(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d*)\]", text):
        offset = -(-offset // int(align)) * int(align)
        kernel.shared[name] = offset
        offset += int(size or 0)
    kernel.shared_bytes = offset
    for statement in text[start + 1 : end - 1].split(";"):
        rest = statement.strip()
        while rest:
            label = re.match(r"([$\w]+):(?!:)\s*", rest)
            if label:
                kernel.labels[label[1]] = len(kernel.code)
                rest = rest[label.end() :]
            elif rest[0] in "{}":
                rest = rest[1:].strip()
            elif rest.startswith((".loc", ".pragma")) and "\n" in rest:
                rest = rest.split("\n", 1)[1].strip()
            elif rest.startswith("."):
                rest = ""
            else:
                kernel.code.append(_instruction(rest))
                rest = ""
    return kernel


def _instruction(text: str) -> Instruction:
    guard, body = None, text
    if text.startswith("@"):
        predicate, body = text.split(None, 1)
        guard = (predicate.lstrip("@!"), "!" in predicate)
    name, _, rest = body.strip().partition(" ") if " " in body.strip() else (body.strip(), "", "")
    name, _, more = name.partition("\t")
    rest = (more + " " + rest).strip()
    operands = [m[0].strip() for m in re.finditer(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]
    return Instruction(text, tuple(name.split(".")), operands, guard)


# --- memory ------------------------------------------------------------------------------------------


class Memory:
    """Device memory: the caller's arrays, at their own addresses."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        spans = sorted({_span(a) for a in arrays if a.size})
        merged: list[list[int]] = []
        for low, high in spans:
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
            else:
                merged.append([low, high])
        self.lows = np.array([m[0] for m in merged], np.uint64)
        self.highs = np.array([m[1] for m in merged], np.uint64)
        self.bytes = [np.frombuffer((ctypes.c_uint8 * (h - lo)).from_address(lo), np.uint8) for lo, h in merged]

    def _place(self, address: np.ndarray, size: int, what: str) -> tuple[np.ndarray, np.ndarray]:
        if (address % np.uint64(size)).any():
            raise EmulationError(f"{what}: misaligned address for {size} bytes")
        which = np.searchsorted(self.lows, address, "right").astype(np.int64) - 1
        bad = (which < 0) | (address + np.uint64(size) > self.highs[np.maximum(which, 0)])
        if bad.any():
            raise EmulationError(
                f"{what}: thread {np.flatnonzero(bad)[0]} of the active ones is outside the given memory"
            )
        return which, (address - self.lows[which]).astype(np.int64)

    def read(self, address: np.ndarray, size: int, what: str) -> np.ndarray:
        """Bytes [n, size]."""
        which, at = self._place(address, size, what)
        out = np.empty((len(address), size), np.uint8)
        for w in np.unique(which):
            mine = which == w
            out[mine] = self.bytes[w][at[mine][:, None] + np.arange(size)]
        return out

    def write(self, address: np.ndarray, data: np.ndarray, what: str) -> None:
        size = data.shape[1]
        which, at = self._place(address, size, what)
        for w in np.unique(which):
            mine = which == w
            self.bytes[w][at[mine][:, None] + np.arange(size)] = data[mine]


def _span(a: np.ndarray) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(a) if hasattr(np.lib, "array_utils") else np.byte_bounds(a)
    return int(low), int(high)


@dataclass(frozen=True)
class Schedule:
    """What the hardware may choose, and a kernel must not depend on.

    Attributes
    ----------
    order : {"together", "forward", "backward"}
        The warps of a block step by step, or each as far as it gets, from the first or from the last.
    early : bool
        Asynchronous copies happen when they are started, else when they are waited for.
    """

    order: str = "together"
    early: bool = False


ORDERS = tuple(Schedule(order, early) for order in ("together", "forward", "backward") for early in (False, True))


# --- one block ---------------------------------------------------------------------------------------


class Block:
    """The threads of one block."""

    def __init__(
        self,
        kernel: Kernel,
        memory: Memory,
        params: dict[str, int],
        grid: Any,
        block: Any,
        index: Any,
        shared: int,
        schedule: Schedule,
        descriptors: dict[int, Any] | None = None,
    ):
        self.kernel, self.memory, self.params, self.schedule = kernel, memory, params, schedule
        self.count = int(np.prod(block))
        lanes = np.arange(self.count)
        self.special = {"%laneid": lanes % WARP, "%warpid": lanes // WARP}
        ids = (lanes % block[0], lanes // block[0] % block[1], lanes // (block[0] * block[1]))
        for axis, i in zip("xyz", range(3), strict=True):
            self.special[f"%tid.{axis}"] = ids[i]
            for name, value in (("ntid", block), ("nctaid", grid), ("ctaid", index)):
                self.special[f"%{name}.{axis}"] = np.full(self.count, value[i])
        self.special["%smid"] = np.full(self.count, index[0])
        self.special["%globaltimer"] = np.full(self.count, time.time_ns())  # a block takes no time
        self.special = {n: v.astype(np.uint64) for n, v in self.special.items()}
        self.registers: dict[str, np.ndarray] = {}
        # In units of 16 bytes, as a load of three words reads four.
        self.shared = np.full(-(-max(kernel.shared_bytes, shared) // 16) * 16, 0xFF, np.uint8)
        self.pending: list[list[tuple]] = [[] for _ in range(self.count)]
        self.groups: list[list[list[tuple]]] = [[] for _ in range(self.count)]
        self.descriptors = descriptors or {}  # what stands for a TMA descriptor in a register: the description
        self.polling = np.zeros(self.count, bool)  # waits in a loop: others go first
        self.at_end: list[Callable[[], None]] = []  # what is checked when all threads have ended
        self.compiled: list[Callable[[Lanes], None] | None] = [None] * len(kernel.code)

    # --- values

    def value(self, operand: str, m: Lanes, dtype: type) -> np.ndarray:
        """An operand of the active threads."""
        size = np.dtype(dtype).itemsize
        if operand.startswith("%") and operand in self.special:
            bits = self.special[operand][m]
        elif operand.startswith("%") or operand in self.registers:
            # One that nothing was written to is what LLVM makes of a value that does not matter.
            bits = self.registers.setdefault(operand, np.full(self.count, 0xFFFF_FFFF_FFFF_FFFF, np.uint64))[m]
        else:
            n = self.count if isinstance(m, slice) else len(m)
            return np.full(n, self.literal(operand, dtype))
        return bits.astype(bool) if dtype is np.bool_ else bits.astype(f"u{size}").view(dtype)

    def literal(self, text: str, dtype: type) -> Any:
        size = np.dtype(dtype).itemsize
        if text in self.kernel.shared:
            number = self.kernel.shared[text]
        elif text in self.params:
            number = self.params[text]
        elif re.fullmatch("0[fFdD][0-9A-Fa-f]+", text):
            number = int(text[2:], 16)
        else:
            try:
                number = int(text.rstrip("U"), 0)
            except ValueError:
                raise EmulationError(f"operand {text!r} is not known") from None
        if dtype is np.bool_:
            return np.bool_(number != 0)
        return np.array(number & ((1 << 8 * size) - 1), np.uint64).astype(f"u{size}").view(dtype)[()]

    def put(self, operand: str, m: Lanes, array: np.ndarray) -> None:
        """Write bits of a result to a register."""
        array = np.ascontiguousarray(array)
        if array.dtype == bool:
            array = array.astype(np.uint64)
        bits = array.view(f"u{array.dtype.itemsize}").astype(np.uint64)
        if operand == "_":
            return
        found = self.registers.get(operand)
        if found is None:
            found = self.registers[operand] = np.full(self.count, 0xFFFF_FFFF_FFFF_FFFF, np.uint64)
        found[m] = bits

    def address(self, operand: str, m: Lanes) -> np.ndarray:
        inner = operand.strip("[]").strip()
        base, sign, offset = inner.partition("+")
        if not sign and "-" in inner[1:]:
            base, _, offset = inner.rpartition("-")
            offset = "-" + offset
        base = base.strip()
        if base in self.kernel.shared:
            found = np.full(self.count, self.kernel.shared[base], np.uint64)[m]
        else:
            found = self.registers[base][m]
        return (found.astype(np.int64) + (int(offset, 0) if offset else 0)).astype(np.uint64)

    # --- shared memory

    def _shared_at(self, address: np.ndarray, size: int, what: str) -> np.ndarray:
        at = (address & np.uint64(0xFFFF_FFFF)).astype(np.int64)
        if (at % size).any():
            raise EmulationError(f"{what}: misaligned address for {size} bytes of shared memory")
        if (at + size > len(self.shared)).any():
            raise EmulationError(f"{what}: outside the {len(self.shared)} bytes of shared memory")
        return at[:, None] + np.arange(size)

    def read(self, space: str, address: np.ndarray, size: int, what: str) -> np.ndarray:
        return (
            self.shared[self._shared_at(address, size, what)]
            if space == "shared"
            else self.memory.read(address, size, what)
        )

    def write(self, space: str, address: np.ndarray, data: np.ndarray, what: str) -> None:
        if space == "shared":
            self.shared[self._shared_at(address, data.shape[1], what)] = data
        else:
            self.memory.write(address, data, what)

    # --- running

    def run(self, limit: int = 5_000_000) -> None:
        """All threads to their ends."""
        n = len(self.kernel.code)
        self.pc = np.zeros(self.count, np.int64)
        self.at_barrier = np.zeros(self.count, bool)
        self.at_named = np.zeros(self.count, np.int64)  # the number of the barrier that the thread waits at, above 0
        self.at_sync = np.zeros(self.count, bool)  # before an instruction that the rest of the warp must reach
        for _ in range(limit):
            running = self.pc < n
            if not running.any():
                for check in self.at_end:
                    check()
                return
            if (self.at_barrier | ~running).all():
                self.at_barrier[:] = False
                continue
            ready = running & ~self.at_barrier & ~self.at_sync & (self.at_named == 0)
            if (ready & ~self.polling).any():
                ready &= ~self.polling
            self.polling[ready] = False
            if self.at_sync.any() and self.release(running):
                continue
            if not ready.any():
                stuck = self.kernel.code[int(self.pc[running & (self.at_sync | (self.at_named > 0))].min())]
                raise EmulationError(f"{stuck.text}: the rest of the warp never comes here")
            if self.schedule.order != "together":
                warps = np.flatnonzero(ready.reshape(-1, WARP).any(1))
                ready &= np.arange(self.count) // WARP == warps[0 if self.schedule.order == "forward" else -1]
            here = int(self.pc[ready].min())
            mask = ready & (self.pc == here)
            others = self.pc[ready & ~mask]
            self.advance(
                here, int(others.min()) if len(others) else n, slice(None) if mask.all() else np.flatnonzero(mask)
            )
        raise EmulationError("the kernel does not end")

    def advance(self, at: int, stop: int, lanes: Lanes) -> None:
        """Run some threads from one instruction to a jump, a wait, or where others stand."""
        every = np.arange(self.count)[lanes]
        while at < stop:
            i = self.kernel.code[at]
            active = lanes
            if i.guard is not None:
                active = every[self.registers[i.guard[0]][lanes].astype(bool) ^ i.guard[1]]
            if i.name[0] in ("bra", "ret", "exit"):
                self.pc[lanes] = at + 1
                self.pc[active] = self.kernel.labels[i.operands[0]] if i.name[0] == "bra" else len(self.kernel.code)
                return
            if i.name[:2] in (("bar", "sync"), ("barrier", "sync")):
                self.pc[lanes] = at + 1
                if i.operands[0] != "0":
                    self.wait_named(i, lanes)
                else:
                    self.at_barrier[lanes] = True
                return
            if "sync" in i.name and not self.whole(every):
                self.pc[lanes] = at
                self.at_sync[lanes] = True
                return
            if len(every[active] if isinstance(active, slice) else active):
                self.step(at, i, active)
            at += 1
            self.pc[lanes] = at

    def wait_named(self, i: Instruction, lanes: Lanes) -> None:
        """Threads come to a barrier of some threads of the block; the last of them opens it."""
        number, threads = (int(operand, 0) for operand in i.operands)
        self.at_named[lanes] = number
        there = self.at_named == number
        if there.sum() > threads:
            raise EmulationError(f"{i.text}: more threads than that come here")
        if there.sum() == threads:
            self.at_named[there] = 0

    def release(self, running: np.ndarray) -> bool:
        """Let the warps go on of which all threads wait before the same instruction."""
        at = np.where(self.at_sync, self.pc, -1).reshape(-1, WARP)
        alive = running.reshape(-1, WARP)
        first = np.where(alive, at, -1).max(1)
        together = (first >= 0) & ((at == first[:, None]) | ~alive).all(1)
        if not together.any():
            return False
        where = int(first[together].min())
        lanes = (np.flatnonzero(together & (first == where))[:, None] * WARP + np.arange(WARP)).ravel()
        if not running[lanes].all():
            raise EmulationError(f"{self.kernel.code[where].text}: some threads of the warp have ended")
        self.at_sync[lanes] = False
        self.step(where, self.kernel.code[where], lanes)
        self.pc[lanes] = where + 1
        return True

    @staticmethod
    def whole(lanes: np.ndarray) -> bool:
        """Whether threads, in order, are whole warps."""
        if len(lanes) % WARP:
            return False
        rows = lanes.reshape(-1, WARP)
        return bool((rows[:, 0] % WARP == 0).all() and (rows[:, -1] - rows[:, 0] == WARP - 1).all())

    def step(self, at: int, i: Instruction, m: Lanes) -> None:
        run = self.compiled[at]
        if run is None:
            maker = OPS.get(i.name[0])
            if maker is None:
                raise EmulationError(f"unknown instruction: {i.text}")
            run = self.compiled[at] = maker(self, i)
        try:
            with np.errstate(all="ignore"):
                run(m)
        except EmulationError:
            raise
        except Exception as error:
            raise EmulationError(f"{i.text}: {type(error).__name__}: {error}") from error

    def warps(self, m: Lanes, what: str) -> np.ndarray:
        """The active threads as whole warps [w, 32]."""
        lanes = np.arange(self.count)[m]
        if not self.whole(lanes):
            raise EmulationError(f"{what}: needs whole warps, got {len(lanes)} threads")
        return lanes.reshape(-1, WARP)


# --- the instructions, by the first part of their names ---------------------------------------------

OPS: dict[str, Callable[[Block, Instruction], Callable[[Lanes], None]]] = {}


def op(*names: str) -> Any:
    def declare(function: Any) -> Any:
        for name in names:
            OPS[name] = function
        return function

    return declare


def launch(
    text: str, entry: str, grid: Sequence[int], block: Sequence[int], values: Sequence[Any],
    arrays: Sequence[np.ndarray], shared_bytes: int = 0, schedule: Schedule | None = None,
) -> None:  # fmt: skip
    """Run a kernel's grid.

    Parameters
    ----------
    text, entry : str
        PTX and the kernel's name.
    grid, block : 3 int
    values : sequence of int or TensorMap
        The bits of each parameter; addresses are those of the host. A TMA descriptor as its description.
    arrays : sequence of numpy.ndarray
        All memory that the kernel may touch.
    shared_bytes : int
        Dynamic shared memory.
    schedule : Schedule
    """
    kernel = parse(text, entry)
    descriptors = {(0xDE5C << 48) + i: v for i, v in enumerate(values) if not isinstance(v, int | np.integer)}
    handles = {id(v): handle for handle, v in descriptors.items()}
    numbers = [handles.get(id(v), v) for v in values]
    memory, params = Memory(arrays), dict(zip(kernel.params, numbers, strict=True))
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                one = Block(
                    kernel, memory, params, grid, block, (x, y, z), shared_bytes, schedule or Schedule(), descriptors
                )
                one.run()
