# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The PTX interpreter: what runs a kernel's grid on the caller's arrays.

It runs the instructions that kvarn's kernels use, all threads of a block at once in NumPy: at every step the threads
that stand at the lowest instruction go on together, which brings threads together again after a branch. What the
hardware leaves to the program is checked: an access outside the given memory, a misaligned one, a warp that is not
whole at an instruction that needs it, a read of what a product under way will write, a write to what it reads, shared
memory that the asynchronous proxy reads without a fence, an mbarrier that it was not shown, memory that a kernel ahead
in the stream may still use, a hang. Shared memory starts as NaNs. An :class:`Order` says in which order warps run and
when asynchronous copies land: a kernel with a missing barrier or wait gives other results under another one. The blocks
of a cluster run together, clusters one after another; caches and the order in which other threads see writes to device
memory are not modelled. A ``kvarn.emulator.report.Report`` counts what was done.
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
    """What a launch is seen by, and what was before it.

    Attributes
    ----------
    report : Report, optional
        Counts, and gets the hazards.
    fields : sequence of Field
        Parts of the arguments, by which the report tells accesses.
    variables : mapping, optional
        What the code's variables of 8 bytes hold.
    launched : callable, optional
        Gives the kernel's place in its stream, for its memory.
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
        The bits of each parameter; addresses are those of the host. A TMA descriptor as its description.
    arrays : sequence of numpy.ndarray
        All memory that the kernel may touch.
    shared_bytes : int
        Dynamic shared memory.
    order : Order
    cluster : 3 int, optional
        Blocks of a cluster; by default what the PTX says.
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
        raise EmulationError(f"a grid of {tuple(grid)} has no whole clusters of {shape}")
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


# For the instructions that they declare.
from . import barriers, calls, instructions, tma, wgmma  # noqa: E402, F401
