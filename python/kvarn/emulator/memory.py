# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Device memory of the interpreter: the caller's arrays at their own addresses, and the names of their parts."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.artifact import Arg

from .block import aligned
from .ptx_parser import EmulationError

# What moves words of a size without a look at them.
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Marks:
    """For each byte from ``low`` to ``high``: the numbers of the kernels that last read and wrote it."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        # Zero pages that are never written take no memory.
        self.read, self.written = np.zeros(high - low, np.uint16), np.zeros(high - low, np.uint16)

    def of_words(self, size: int) -> np.ndarray:
        """Those of reads by words of ``size`` bytes [words, size]."""
        return self.read[: len(self.read) // size * size].reshape(-1, size)

    def take(self, other: Marks) -> None:
        """Copy another object's marks of the same bytes."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        if low < high:
            here, there = slice(low - self.low, high - self.low), slice(low - other.low, high - other.low)
            self.read[here], self.written[here] = other.read[there], other.written[there]


class Memory:
    """All memory that a kernel may access."""

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
        self.starts, self.ends = [m[0] for m in merged], [m[1] for m in merged]
        self.bytes = [np.ctypeslib.as_array((ctypes.c_uint8 * (h - lo)).from_address(lo)) for lo, h in merged]
        self.words: dict[tuple[int, int], np.ndarray] = {}  # the same memory, by piece and bytes of a word
        self.number, self.marks = 0, list[Marks]()

    def note(self, number: int, earlier: Sequence[Marks]) -> list[Marks]:
        """Start recording the reads and writes of kernel ``number``, in marks that continue earlier ones."""
        self.number, same = number, {(m.low, m.high): m for m in earlier}
        for low, high in zip(self.lows.tolist(), self.highs.tolist(), strict=True):
            found = same.get((low, high))
            if found is None:
                found = Marks(low, high)
                for other in same.values():
                    found.take(other)
            self.marks.append(found)
        return self.marks

    def _place(self, address: np.ndarray, size: int, what: str) -> tuple[np.ndarray, np.ndarray]:
        if not aligned(address, size):
            raise EmulationError(f"{what}: misaligned address for {size} bytes")
        which = self.lows.searchsorted(address, "right").astype(np.int64) - 1
        bad = (which < 0) | (address + np.uint64(size) > self.highs[np.maximum(which, 0)])
        if bad.any():
            raise EmulationError(
                f"{what}: thread {np.flatnonzero(bad)[0]} of the active ones is outside the given memory"
            )
        return which, (address - self.lows[which]).astype(np.int64)

    def _one(self, address: np.ndarray, size: int) -> tuple[int, np.ndarray] | None:
        """The piece that all of an access's bytes lie in, and where in it; None where they do not, or misaligned."""
        if not len(address):
            return None
        first, last = int(np.minimum.reduce(address)), int(np.maximum.reduce(address))
        which = bisect.bisect_right(self.starts, first) - 1
        if which < 0 or last + size > self.ends[which] or not aligned(address, size):
            return None
        return which, (address - self.lows[which]).astype(np.int64)

    def read(self, address: np.ndarray, size: int, what: str) -> np.ndarray:
        """Bytes [n, size]."""
        one = self._one(address, size)
        if one is not None:
            return self._read(*one, size)
        which, at = self._place(address, size, what)
        out = np.empty((len(address), size), np.uint8)
        for w in np.unique(which):
            mine = which == w
            out[mine] = self._read(int(w), at[mine], size)
        return out

    def _read(self, which: int, at: np.ndarray, size: int) -> np.ndarray:
        words = self._words(which, size)
        if words is None:
            place = at[:, None] + np.arange(size)
            if self.marks:
                self.marks[which].read[place] = self.number
            return self.bytes[which][place]
        index = at // size
        if self.marks:
            self.marks[which].of_words(size)[index] = self.number
        return words[index].view(np.uint8).reshape(len(at), size)

    def _words(self, which: int, size: int) -> np.ndarray | None:
        """The piece's bytes as words of a size that places in it are multiples of; None where they are not."""
        found = self.words.get((which, size))
        if found is None and size in _WORDS and self.starts[which] % size == 0:
            data = self.bytes[which]
            found = self.words[which, size] = data[: len(data) // size * size].view(_WORDS[size])
        return found

    def write(self, address: np.ndarray, data: np.ndarray, what: str) -> None:
        """Write bytes [n, size]."""
        size = data.shape[1]
        one = self._one(address, size)
        if one is not None:
            self._write(*one, data)
            return
        which, at = self._place(address, size, what)
        for w in np.unique(which):
            mine = which == w
            self._write(int(w), at[mine], data[mine])

    def _write(self, which: int, at: np.ndarray, data: np.ndarray) -> None:
        place = at[:, None] + np.arange(data.shape[1])
        self.bytes[which][place] = data
        if self.marks:
            self.marks[which].written[place] = self.number


def _span(a: np.ndarray) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(a)
    return int(low), int(high)


# --- parts of arguments ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """A part of an argument: addresses from ``low`` to ``high``; with a ``period``, the first ``extent`` bytes of each
    period after ``phase``.
    """

    name: str
    low: int
    high: int
    period: int = 0
    phase: int = 0
    extent: int = 0

    def holds(self, address: np.ndarray) -> np.ndarray:
        inside = (address >= self.low) & (address < self.high)
        if self.period:
            inside &= (address - self.low - self.phase) % self.period < self.extent
        return inside


class Fields:
    """The parts of a launch's arguments, by which accesses are classified."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(f for f in fields if f.high > f.low)
        self.names = (*(f.name for f in self.fields), "other memory")

    def of(self, address: np.ndarray) -> np.ndarray:
        """For each address the number of its part in ``names``: the first that contains it."""
        found = np.full(len(address), len(self.fields))
        for n in range(len(self.fields) - 1, -1, -1):
            found[self.fields[n].holds(address)] = n
        return found


def fields_of(arg: Arg, values: Sequence[Any]) -> list[Field]:
    """The parts of an argument, from the values of its fields."""
    at = dict(zip((f.name for f in arg.fields), values, strict=True))
    if arg.kind == "buffer":
        assert arg.dtype is not None
        strides = [*(at[f"stride{i}"] for i in range(arg.rank - 1)), 1]
        return [_strided(arg.name, at["data"], [at[f"shape{i}"] for i in range(arg.rank)], strides, arg.dtype.itemsize)]
    if arg.kind not in ("cache", "collection", "operand"):
        return []
    spec: Any = arg.spec
    found, rows = [], spec.num_heads * spec.head_size
    token = getattr(spec, "token_stride", rows)
    pools = [("", at["blocks" if "blocks" in at else "base"], "", token, spec.dtype)]
    if spec.scale_dtype is not None and "scales" in at:
        pools.append((".scales", at["scales"], "scales_", spec.scales_token_stride, spec.scale_dtype))
    for suffix, base, prefix, per_token, dtype in pools:
        page = dtype.bytes_of(at["capacity"] * per_token)
        stride = dtype.bytes_of(at.get(f"{prefix}stride0", at["stride0"]))
        pages = max(at["num_blocks"], 1)
        if arg.kind != "collection":
            name = arg.name + (suffix or ".blocks")
            found.append(Field(name, base, base + (pages - 1) * stride + page, stride, 0, page))
            continue
        half = dtype.bytes_of(at[f"{prefix}kv_stride"])
        layers = dtype.bytes_of((at["num_layers"] - 1) * at[f"{prefix}layer_stride"]) + page
        for n, what in enumerate(("keys",) if spec.is_mla else ("keys", "values")):
            low = base + n * half
            found.append(
                Field(f"{arg.name}.{what}{suffix}", low, low + (pages - 1) * stride + layers, stride, 0, layers)
            )
    if "lookup" in at:
        layers = at.get("num_layers", 1) - 1
        entries = layers * at.get("lookup_layer_stride", 0) + (at["batch"] - 1) * at["lookup_stride"]
        columns = at["lookup_columns"] if spec.paged else 1
        found.append(Field(f"{arg.name}.lookup_table", at["lookup"], at["lookup"] + 4 * (entries + columns)))
    for name, label, more in (("lengths", "cache_lengths", 0), ("offsets", "row_offsets", 1)):
        if at.get(name):
            found.append(Field(f"{arg.name}.{label}", at[name], at[name] + 4 * (at["batch"] + more)))
    return found


def _strided(name: str, base: int, shape: Sequence[int], strides: Sequence[int], size: int) -> Field:
    if 0 in shape:
        return Field(name, base, base)
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return Field(name, base, base + (last + 1) * size)


def arrays_of(operands: Sequence[Any]) -> list[np.ndarray]:
    """The memory of a launch's arguments."""
    found: list[Any] = []
    for operand in operands:
        if isinstance(operand, np.ndarray):
            found.append(operand)
        elif hasattr(operand, "buffers"):
            found += operand.buffers
        elif hasattr(operand, "owner"):  # a view, or a TMA descriptor
            found += arrays_of([operand.owner])
    return [np.asarray(a) for a in found]


__all__ = ["Field", "Fields", "Marks", "Memory", "arrays_of", "fields_of"]
