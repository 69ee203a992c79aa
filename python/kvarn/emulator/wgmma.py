# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Asynchronous products of warpgroups (wgmma), for the PTX interpreter.

A product is pending from ``wgmma.mma_async`` until a ``wgmma.wait_group`` covers its group. Until then reading or
writing an accumulator is an error that names the product; a move between registers renames the register, as assemblers
do, and a product of the same shape may add to it. Its inputs must not change: a write to a register of A, or a change
of shared memory between issue and wait, is an error, so that results do not depend on when the tensor cores read.
Registers written by ordinary instructions need a ``wgmma.fence`` before a product reads them. Each warp's 16 rows are
computed separately, at that warp's wait.

Accumulators of 8-bit products have the limited precision of the tensor cores (:func:`add_8_bits`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from .barriers import check_together
from .block import WARP, Block, Lanes, op
from .ptx_parser import EmulationError, Instruction, parts

_ELEMENTS = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
_ATOMS = (16, 128, 64, 32)  # bytes per row of a swizzle atom, by the descriptor's highest bits
FRACTION_BITS = 13  # fraction bits that are kept, relative to the largest of 32 8-bit products and the accumulator
_POISON = np.uint64(0x7FFF_DEAD)  # a NaN
_GROUP, _PLACE = np.arange(WARP) // 4, np.arange(WARP) % 4


@dataclass(eq=False)
class Accumulator:
    """The accumulators of one warp's chained products, and their current registers."""

    warp: int
    values: np.ndarray  # [16, N], from completed products
    names: dict[str, int]
    products: list[Product] = field(default_factory=list)  # pending


@dataclass(eq=False)
class Product:
    """One warp's part of a pending product."""

    instruction: Instruction
    accumulator: Accumulator
    a: np.ndarray  # [16, k]
    b: np.ndarray  # [N, k]
    registers: list[str]  # of A
    memory: list[tuple[np.ndarray, np.ndarray]]  # locations in shared memory, and the bytes there
    version: int


class Products:
    """The pending products of a block."""

    def __init__(self, t: Block) -> None:
        self.block = t
        self.flying: dict[str, dict[int, Accumulator]] = {}  # by register and warp
        self.sources: dict[str, dict[int, list[Product]]] = {}  # registers of A
        self.open: list[list[Product]] = [[] for _ in range(t.warp_count)]
        self.groups: list[list[list[Product]]] = [[] for _ in range(t.warp_count)]
        self.clock = 1
        self.fenced = np.zeros(t.warp_count, np.int64)  # the clock at each warp's fence
        self.written = np.zeros((len(t.tracked), t.count), np.int64)  # the clock when each thread wrote a register
        t.cluster.at_end += [self.finish, lambda: check_together(t)]

    # --- registers

    def check_read(self, name: str, m: Lanes) -> None:
        of = self.flying[name]
        for warp in np.unique(np.arange(self.block.count)[m] // WARP).tolist():
            if warp in of:
                raise EmulationError(
                    f"{self.block.kernel.code[self.block.at].short}: reads {name}, an accumulator of a product under "
                    f"way that no wgmma.wait_group covers: {_named(of[warp].products[-1].instruction)}"
                )

    def note_write(self, name: str, m: Lanes, bits: np.ndarray) -> None:
        """Record an ordinary write to a register."""
        t, lanes = self.block, np.arange(self.block.count)[m]
        self.written[t.tracked[name], lanes] = self.clock
        if name not in self.flying and name not in self.sources:
            return
        warps = lanes // WARP
        here = t.kernel.code[t.at].short
        for warp in np.unique(warps).tolist():
            reading = self.sources.get(name, {}).get(warp)
            mine = warps == warp
            if reading and (t.register(name)[lanes[mine]] != np.broadcast_to(bits, lanes.shape)[mine]).any():
                raise EmulationError(
                    f"{here}: overwrites {name}, which a product under way reads as A: "
                    f"{_named(reading[-1].instruction)}"
                )
            if warp in self.flying.get(name, {}):
                self.drop(name, warp)

    def forget(self, name: str, warp: int) -> None:
        self.flying[name].pop(warp, None)
        if not self.flying[name]:
            del self.flying[name]

    def drop(self, name: str, warp: int) -> None:
        """A register is overwritten: its accumulators must be in another register."""
        accumulator = self.flying[name][warp]
        self.forget(name, warp)
        k = accumulator.names.pop(name)
        if k not in accumulator.names.values():
            raise EmulationError(
                f"{self.block.kernel.code[self.block.at].short}: overwrites {name}, an accumulator of a product under "
                f"way: {_named(accumulator.products[-1].instruction)}"
            )

    def rename(self, d: str, a: str, m: Lanes) -> None:
        """A move between registers: ``d`` becomes another name of ``a``."""
        t, lanes = self.block, np.arange(self.block.count)[m]
        if a in self.flying:
            warps = lanes // WARP
            for warp in np.unique(warps).tolist():
                accumulator = self.flying.get(a, {}).get(warp)
                if accumulator is None:
                    continue
                mine = warps == warp
                if mine.sum() < WARP:
                    self.check_read(a, lanes[mine])
                if d != a and warp in self.flying.get(d, {}):
                    self.drop(d, warp)
                accumulator.names[d] = accumulator.names[a]
                self.flying.setdefault(d, {})[warp] = accumulator
                t.register(d)[lanes[mine]] = _POISON
                lanes, warps = lanes[~mine], warps[~mine]
        if len(lanes):
            bits = t.register(a)[lanes]
            self.note_write(d, lanes, bits)
            self.written[t.tracked[d], lanes] = self.written[t.tracked[a], lanes]
            t.register(d)[lanes] = bits

    # --- products

    def fence(self, lanes: np.ndarray) -> None:
        self.clock += 1
        self.fenced[lanes[:, 0] // WARP] = self.clock

    def check_fence(self, i: Instruction, names: list[str], rows: np.ndarray, lanes: np.ndarray) -> None:
        fenced = self.fenced[lanes[0] // WARP]
        if not fenced:
            raise EmulationError(f"{i.short}: a wgmma.fence must come before the first product of a warp")
        late = (self.written[rows, lanes] >= fenced).any(1)
        if late.any():
            raise EmulationError(
                f"{i.short}: {names[int(late.argmax())]} was written by an ordinary instruction, and no wgmma.fence "
                "came after that"
            )

    def start(self, product: Product) -> None:
        warp = product.accumulator.warp
        product.accumulator.products.append(product)
        self.open[warp].append(product)
        for name in product.registers:
            self.sources.setdefault(name, {}).setdefault(warp, []).append(product)

    def accumulator(self, i: Instruction, places: dict[str, int], lanes: np.ndarray, adds: bool) -> Accumulator:
        """The accumulators of a product, which owns them from now on; ``places``: their registers, numbered from 0."""
        t, warp, names = self.block, int(lanes[0]) // WARP, list(places)
        known = self.flying.get(names[0], {}).get(warp) if adds else None
        if known is not None and known.names == places:  # the accumulators of the product before
            return known
        for name in names if not adds else ():  # earlier accumulators there must have been renamed
            if warp in self.flying.get(name, {}):
                self.drop(name, warp)
        found = [self.flying.get(name, {}).get(warp) for name in names]
        first = found[0]
        if (
            first is None
            or any(f is not first for f in found)
            or [first.names[n] for n in names] != list(range(len(names)))
        ):
            wrong = next((f for f in found if f is not None), None)
            if wrong is not None:
                raise EmulationError(
                    f"{i.short}: its accumulators overlap a product in flight, and are not the same registers: "
                    f"{_named(wrong.products[-1].instruction)}"
                )
            values = np.zeros((16, 2 * len(names)), np.float32)
            if adds:
                values[_places(len(names))] = t.tracked_bits[t.rows_of(names), lanes].astype(np.uint32).view(np.float32)
            first = Accumulator(warp, values, {})
        elif first.values.shape[1] != 2 * len(names):
            raise EmulationError(f"{i.short}: another shape than {_named(first.products[-1].instruction)}")
        if first.names.keys() != set(names):
            for name in [n for n in first.names if n not in names]:
                self.forget(name, warp)  # it has the value from before this product, a NaN
            first.names = {name: k for k, name in enumerate(names)}
            for name in names:
                self.flying.setdefault(name, {})[warp] = first
            t.tracked_bits[t.rows_of(names), lanes] = _POISON
        return first

    def commit(self, lanes: np.ndarray) -> None:
        for warp in (lanes[:, 0] // WARP).tolist():
            self.groups[warp].append(self.open[warp])
            self.open[warp] = []

    def wait(self, lanes: np.ndarray, keep: int) -> None:
        for warp in (lanes[:, 0] // WARP).tolist():
            while len(self.groups[warp]) > keep:
                for product in self.groups[warp].pop(0):
                    self.complete(product)

    def complete(self, p: Product) -> None:
        t, acc = self.block, p.accumulator
        if t.version != p.version:
            for at, bytes in p.memory:
                if not np.array_equal(t.shared[at], bytes):
                    raise EmulationError(
                        f"{t.kernel.code[t.at].short}: shared memory at "
                        f"{t.kernel.symbol(int(at[t.shared[at] != bytes][0]))} was overwritten while a product under "
                        f"way read it: {_named(p.instruction)}"
                    )
        for at, _ in p.memory:  # end of the guarded interval
            t.note_read(at, p.instruction, acc.warp * WARP)
        for name in p.registers:
            self.sources[name][acc.warp].remove(p)
            if not self.sources[name][acc.warp]:
                del self.sources[name][acc.warp]
                if not self.sources[name]:
                    del self.sources[name]
        narrow = np.dtype(_ELEMENTS[p.instruction.name[6]]).itemsize == 1
        acc.values = add_8_bits(p.a, p.b, acc.values) if narrow else p.a @ p.b.T + acc.values
        acc.products.remove(p)
        if acc.products:
            return
        lanes = acc.warp * WARP + np.arange(WARP)
        rows, columns = _places(acc.values.shape[1] // 2)
        which = list(acc.names.values())
        t.tracked_bits[t.rows_of(acc.names), lanes] = acc.values[rows[which], columns[which]].view(np.uint32)
        for name in acc.names:
            self.forget(name, acc.warp)

    def finish(self) -> None:
        for waiting in (*self.open, *(g for groups in self.groups for g in groups)):
            for p in waiting:
                raise EmulationError(f"the kernel ends with a product without a wait: {_named(p.instruction)}")


def add_8_bits(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """C + A B^T of one k-step of 8-bit elements, as on sm_90: bits below 2^-13 of the largest term are truncated.

    This model agrees with an H200 to 0.002: sums of 65536 equal terms reach 0.466 of the exact value, by the model
    0.468.
    """
    terms = np.concatenate([c[:, :, None], a[:, None, :] * b[None]], axis=2, dtype=np.float64)
    unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(axis=2))[1] - 1 - FRACTION_BITS)
    return (np.trunc(terms / unit[..., None]).sum(axis=2) * unit).astype(np.float32)


def _named(i: Instruction) -> str:
    return f"{i.short} ({i.where})"


@functools.cache
def _places(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column [count, lane] of accumulators in the warp's 16 rows."""
    w = np.arange(count)[:, None]
    return _GROUP + 8 * (w % 4 // 2), w // 4 * 8 + 2 * _PLACE + w % 2


# --- instructions -----------------------------------------------------------------------------------


@op("wgmma")
def warpgroup_multiply(t: Block, i: Instruction) -> Any:
    simple: Any = {
        "fence": Products.fence,
        "commit_group": Products.commit,
        "wait_group": lambda s, lanes: s.wait(lanes, int(i.operands[0])),
    }.get(i.name[1])
    if simple is None and i.name[1] != "mma_async":
        raise EmulationError(f"unknown form: {i.text}")
    run = simple or _product(t, i)

    def together(m: Lanes) -> None:
        if t.products is None:
            t.products = Products(t)
        lanes = t.warps(m, i.short)
        warps = lanes[:, 0] // WARP
        if (warps // 4 * 4 + 4 > t.warp_count).any():
            raise EmulationError(f"{i.short}: needs a whole warpgroup, and warp {warps.max()} is in none")
        for warp in warps:
            t.trace[warp] = hash((int(t.trace[warp]), t.at))
        run(t.products, lanes)

    return together


def _product(t: Block, i: Instruction) -> Callable[[Products, np.ndarray], None]:
    if i.name[5] != "f32" or i.name[6] not in _ELEMENTS or i.name[7] not in _ELEMENTS or "sp" in i.name:
        raise EmulationError(f"unknown form: {i.short}")
    kind_a, kind_b = (np.dtype(_ELEMENTS[n]) for n in i.name[6:8])
    steps = 32 // kind_a.itemsize
    d, a = parts(i.operands[0]), parts(i.operands[1])
    columns, in_registers = 2 * len(d), i.operands[1].startswith("{")
    if i.name[4] != f"m64n{columns}k{steps}":
        raise EmulationError(f"{i.short}: {len(d)} accumulators are not those of {i.name[4]}")
    flags = [int(x) for x in i.operands[4:]]
    sign = flags[0] * flags[1]
    # After the signs: whether A, if in shared memory, and B are transposed; 16-bit elements only.
    trans_a, trans_b = ([0, 0, *flags[2:]] if kind_a.itemsize == 2 else [0, 0])[-2:]

    def matrix(register: str, lanes: np.ndarray, rows: int, dtype: Any, trans: int) -> tuple[np.ndarray, np.ndarray]:
        """Shared-memory locations of A as [row, k], or of B as [column, k], of a descriptor, and the bytes there."""
        descriptors = np.unique(t.value(register, lanes, np.uint64))
        if len(descriptors) > 1:
            raise EmulationError(f"{i.short}: all threads of a warp must give one descriptor")
        descriptor = int(descriptors[0])
        if descriptor >> 49 & 7:
            raise EmulationError(f"{i.short}: only atoms without a base offset are supported")
        at = descriptor_places(descriptor, rows, steps, dtype.itemsize, bool(trans))
        return at, t.read_async(at, i, int(lanes[0]))

    written = d + (a if in_registers else [])
    places, rows = {name: n for n, name in enumerate(d)}, t.rows_of(written)

    def run(s: Products, lanes: np.ndarray) -> None:
        cached: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

        def read(register: str, flat: np.ndarray, rows: int, dtype: Any, trans: int) -> Any:
            key = (register, int(t.register(register)[flat[0]]))
            if key not in cached or len(np.unique(t.register(register)[flat])) > 1:
                cached[key] = matrix(register, flat, rows, dtype, trans)
            return cached[key]

        for flat in lanes:
            s.check_fence(i, written, rows, flat)
            at_b, bytes_b = read(i.operands[2], flat, columns, kind_b, trans_b)
            memory = [(at_b, bytes_b)]
            if in_registers:
                x = _fragment(t, a, flat, kind_a, steps)
            else:
                at, bytes = read(a[0], flat, 64, kind_a, trans_a)
                mine = slice(flat[0] // WARP % 4 * 16, flat[0] // WARP % 4 * 16 + 16)
                memory.append((at[mine], bytes[mine]))
                x = _floats(bytes[mine], kind_a)
            adds = bool(t.value(i.operands[3], flat, np.bool_).all())
            accumulator = s.accumulator(i, places, flat, adds)
            s.start(
                Product(
                    i, accumulator, sign * x, _floats(bytes_b, kind_b), a if in_registers else [], memory, t.version
                )
            )

    return run


def _floats(bytes: np.ndarray, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(bytes).view(dtype)[..., 0].astype(np.float32)


def _fragment(t: Block, registers: list[str], flat: np.ndarray, dtype: Any, steps: int) -> np.ndarray:
    """A of a warp from its registers."""
    x, each = np.zeros((16, steps), np.float32), 4 // dtype.itemsize
    for which, r in enumerate(registers):
        words = np.ascontiguousarray(t.value(r, flat, np.uint32)).view(dtype).astype(np.float32).reshape(WARP, each)
        for j in range(each):
            x[_GROUP + 8 * (which % 2), each * _PLACE + j + 4 * each * (which // 2)] = words[:, j]
    return x


@functools.lru_cache(256)
def descriptor_places(descriptor: int, rows: int, steps: int, size: int, trans: bool) -> np.ndarray:
    """Shared-memory locations [row, k, byte] of the matrix of a descriptor; ``trans``: its rows are contiguous columns.

    The canonical layouts of the PTX manual: eight rows of an atom of 16, 32, 64 or 128 bytes; atoms are a leading or
    stride offset apart; the 16-byte chunks of a row are permuted by the address.
    """
    atom = _ATOMS[descriptor >> 62]
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    n, k = np.arange(rows)[:, None], np.arange(steps)[None, :]
    if trans:  # an atom has `atom` bytes of rows by eight values of k
        side, width = n * size, atom
        if atom == 16:
            at = start + side // 16 * stride + k // 8 * leading + k % 8 * 16 + side % 16
        else:
            at = start + side // width * leading + k // 8 * stride + k % 8 * width + side % width
    elif atom == 16:
        at = start + n // 8 * stride + k * size // 16 * leading + n % 8 * 16 + k * size % 16
    else:
        at = start + n // 8 * stride + n % 8 * atom + k * size
    at = at ^ (at >> 3 & (atom - 16))
    found = at[..., None] + np.arange(size)
    found.flags.writeable = False
    return found
