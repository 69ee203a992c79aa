# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The PTX interpreter: runs the grid of a kernel on the caller's arrays.

It supports the instructions of kvarn's kernels, and executes all threads of a block at once in NumPy: each step runs
the threads at the lowest instruction, so threads reconverge after a branch. It checks what the hardware leaves to the
program: accesses outside the given memory, misaligned accesses, partial warps at instructions that need whole ones,
reads of accumulators and writes to inputs of a pending product, reads of shared memory by the async proxy without a
fence, uses of mbarriers that are not visible, accesses to memory that an earlier kernel of the stream may still use,
deadlocks. Shared memory is initialised to NaN. An :class:`Order` sets the order of warps and the completion of
asynchronous copies: a kernel with a missing barrier or wait gives other results under another order. The blocks of a
cluster run together, clusters one after another; caches and the order in which other threads see writes to device
memory are not modelled. A ``kvarn.emulator.report.Report`` counts what was executed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .block import OPS, TYPES, WARP, Block, Lanes, Wait, op
from .cluster import MORE_STEPS, Cluster, Order, Steps
from .memory import Field, Fields, Memory
from .ptx_parser import EmulationError, Instruction, Kernel, parse, parts
from .report import Report
from .stream import Launched

__all__ = [
    "OPS", "ORDERS", "RANDOM", "TYPES", "WARP", "Around", "Block", "Cluster", "EmulationError", "Instruction", "Kernel",
    "Lanes", "Memory", "Order", "Wait", "launch", "op", "parse", "parts",
]  # fmt: skip

ORDERS = tuple(Order(warps, copies) for warps in ("together", "forward", "backward") for copies in ("late", "early"))
RANDOM = tuple(Order("random", "random", seed) for seed in range(2))

_parsed = functools.lru_cache(64)(parse)


@dataclass(frozen=True)
class Around:
    """The observers and the context of a launch.

    Attributes
    ----------
    report : Report, optional
        Counts, and receives the hazards.
    fields : sequence of Field
        Parts of the arguments, by which the report classifies accesses.
    variables : mapping, optional
        Values of the code's variables of 8 bytes.
    launched : callable, optional
        Returns the kernel's place in its stream, for its memory.
    """

    report: Report | None = None
    fields: Sequence[Field] = ()
    variables: Mapping[str, int] | None = None
    launched: Callable[[Memory], Launched | None] | None = None


def launch(
    text: str, entry: str, grid: Sequence[int], block: Sequence[int], values: Sequence[Any],
    arrays: Sequence[np.ndarray], shared_bytes: int = 0, order: Order | None = None,
    cluster: Sequence[int] | None = None, around: Around = Around(),
) -> None:  # fmt: skip
    """Run a kernel's grid.

    Parameters
    ----------
    text, entry : str
        PTX and the kernel's name.
    grid, block : 3 int
    values : sequence of int or TensorMap
        The bits of each parameter, with host addresses; a TMA descriptor is given as its description.
    arrays : sequence of numpy.ndarray
        All memory that the kernel may access.
    shared_bytes : int
        Dynamic shared memory.
    order : Order
    cluster : 3 int, optional
        Blocks per cluster; by default the PTX's.
    around : Around
    """
    report, launched = around.report, around.launched
    kernel = _parsed(text, entry)
    kernel.launches += 1
    for name, value in (around.variables or {}).items():
        place = kernel.symbols[name] - kernel.constants.ctypes.data
        kernel.constants[place : place + 8] = np.array([value], np.int64).view(np.uint8)
    descriptors = {(0xDE5C << 48) + i: v for i, v in enumerate(values) if not isinstance(v, int | np.integer)}
    handles = {id(v): handle for handle, v in descriptors.items()}
    numbers: list[Any] = [handles.get(id(v), v) for v in values]
    memory, params = Memory([*arrays, kernel.constants]), dict(zip(kernel.params, numbers, strict=True))
    shape = tuple(cluster or kernel.cluster or (1, 1, 1))
    if any(g % c for g, c in zip(grid, shape, strict=True)):
        raise EmulationError(f"a grid of {tuple(grid)} is not a multiple of clusters of {shape}")
    place = None if launched is None or not np.prod(grid) else launched(memory)
    ahead = place if place is not None and place.running else None
    counts = None
    if report is not None:
        counts = report.counts(kernel, entry)
        counts.blocks += int(np.prod(grid))
    tell = functools.partial(report.tell, kernel) if report is not None and report.races else None
    named, spare, steps = Fields(around.fields), (), Steps(order or Order())
    if int(np.prod([int(n) for n in grid], dtype=object)) > steps.most:
        raise EmulationError(f"a grid of {tuple(grid)} takes more than {steps.most} steps: {MORE_STEPS}")
    for z in range(0, grid[2], shape[2]):
        for y in range(0, grid[1], shape[1]):
            for x in range(0, grid[0], shape[0]):
                blocks = Cluster(
                    kernel, memory, params, descriptors, grid, block, shape, shared_bytes, order or Order(), (x, y, z),
                    counts=counts, fields=named, tell=tell, ahead=ahead, spare=spare, steps=steps,
                )  # fmt: skip
                blocks.run()
                spare = blocks.blocks


# These modules register instructions.
from . import barriers, calls, instructions, tma, wgmma  # noqa: E402, F401
