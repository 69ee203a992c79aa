# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A PTX interpreter, so that kernels for GPUs are tested where there is none.

It runs the instructions that kvarn's kernels use, all threads of a block at once in NumPy: at every step the threads
that stand at the lowest instruction go on together, which brings threads together again after a branch. What the
hardware leaves to the program is checked: an access outside the given memory, a misaligned one, a warp that is not
whole at an instruction that needs it, a read of what a product under way will write, a write to what it reads, shared
memory that the asynchronous proxy reads without a fence, a hang. Shared memory starts as NaNs. A :class:`Schedule` says
in which order warps run and when asynchronous copies land: a kernel with a missing barrier or wait gives other results
under another schedule. The blocks of a cluster run together, clusters one after another; caches and the order in which
other threads see writes are not modelled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from .ptx_block import OPS, TYPES, WARP, Block, Lanes, Wait, op
from .ptx_cluster import Cluster, Schedule
from .ptx_text import EmulationError, Instruction, Kernel, parse, parts

__all__ = [
    "OPS", "ORDERS", "RANDOM", "TYPES", "WARP", "Block", "Cluster", "EmulationError", "Instruction", "Kernel", "Lanes",
    "Memory", "Schedule", "Wait", "launch", "op", "parse", "parts",
]  # fmt: skip

ORDERS = tuple(Schedule(order, early) for order in ("together", "forward", "backward") for early in (False, True))
RANDOM = tuple(Schedule("random", None, seed) for seed in range(2))


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


def launch(
    text: str, entry: str, grid: Sequence[int], block: Sequence[int], values: Sequence[Any],
    arrays: Sequence[np.ndarray], shared_bytes: int = 0, schedule: Schedule | None = None,
    cluster: Sequence[int] | None = None,
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
    cluster : 3 int, optional
        Blocks of a cluster; by default what the PTX says.
    """
    kernel = parse(text, entry)
    descriptors = {(0xDE5C << 48) + i: v for i, v in enumerate(values) if not isinstance(v, int | np.integer)}
    handles = {id(v): handle for handle, v in descriptors.items()}
    numbers = [handles.get(id(v), v) for v in values]
    memory, params = Memory(arrays), dict(zip(kernel.params, numbers, strict=True))
    shape = tuple(cluster or kernel.cluster or (1, 1, 1))
    if any(g % c for g, c in zip(grid, shape, strict=True)):
        raise EmulationError(f"a grid of {tuple(grid)} has no whole clusters of {shape}")
    for z in range(0, grid[2], shape[2]):
        for y in range(0, grid[1], shape[1]):
            for x in range(0, grid[0], shape[0]):
                Cluster(
                    kernel, memory, params, descriptors, grid, block, shape, shared_bytes, schedule or Schedule(),
                    (x, y, z),
                ).run()  # fmt: skip


# For the instructions that they declare.
from . import ptx_barriers, ptx_instructions, ptx_tma, ptx_wgmma  # noqa: E402, F401
