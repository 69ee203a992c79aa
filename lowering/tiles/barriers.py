# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where threads of a kernel over tiles wait for one another: for distribute-kv-tiles.

PTX asks for whole warps at ``bar.sync`` and ``bar.arrive``. Lanes that left a loop or a branch at different times are
not a whole warp until ``bar.warp.sync`` makes them one, so every barrier of these kernels is emitted here, behind one.
It is left out where the ops before the barrier, in its own block, show that no lane can be elsewhere.
"""

from __future__ import annotations

from typing import Any

from mlir import ir

from kvarn.dsl import gpu as kv_gpu, ptx
from kvarn.dsl.values import Value

from .ir import WARPGROUP
from .threads import Threads

CONSUMERS_BARRIER = 1  # the named barrier of all consumers
GROUP_BARRIER = 2  # the named barriers of the consumer warpgroups, one each
_WAITS = ("nvvm.bar.warp.sync", "nvvm.barrier", "gpu.barrier")  # at which a whole warp stands


def sync_all() -> None:
    """All threads of the block wait for one another."""
    _reconverge()
    kv_gpu.barrier()


def sync(number: Any, threads: int) -> None:
    """So many threads, whole warps, wait for one another at a named barrier."""
    _reconverge()
    ptx.named_barrier(number, threads)


def arrive(number: Any, threads: int) -> None:
    """A warp counts at a named barrier of so many threads, and goes on."""
    _reconverge()
    ptx.named_barrier_arrive(number, threads)


def sync_consumers(threads: Threads) -> None:
    """All consumers see what each of them wrote to shared memory."""
    sync(CONSUMERS_BARRIER, threads.consumers * WARPGROUP)


def sync_group(threads: Threads) -> None:
    """The warps of a warpgroup wait for one another."""
    sync(threads.group + GROUP_BARRIER, WARPGROUP)


def sync_rows(threads: Threads) -> None:
    """Those that share rows of tiles wait for one another: a warpgroup, or all."""
    if threads.share_all:
        sync_consumers(threads)
    else:
        sync_group(threads)


def sync_for_products(threads: Threads) -> None:
    """What those that share rows wrote to shared memory is there for their products."""
    threads.fence()
    sync_rows(threads)


def turn_of(group: Value, threads: Threads) -> Value:
    """The named barrier of a warpgroup's turn: they follow those of the warpgroups."""
    return group + (GROUP_BARRIER + threads.consumers)


def wait_for_groups(pending: int) -> None:
    """All threads see the copies by cp.async of all, each one's last ``pending`` groups left out."""
    ptx.cp_async_wait(pending)
    sync_all()


def _reconverge() -> None:
    if not _is_whole(ir.InsertionPoint.current):
        ptx.syncwarp()


def _is_whole(point: ir.InsertionPoint) -> bool:
    """Whether a warp is known to be whole at a point: at a kernel's start, and where it has waited in the same block.

    Ops that are yet to be lowered may become loops and branches. A wait for an mbarrier is a loop that lanes leave
    together: it asks the same barrier for the same phase in all of them.
    """
    before = []
    for op in point.block.operations:
        if point.ref_operation is not None and op.operation == point.ref_operation.operation:
            break
        before.append(op.operation)
    for op in reversed(before):
        if op.name in _WAITS:
            return True
        if op.name.startswith("kv.") or (len(op.regions) and "kv.barrier" not in op.attributes):
            return False
    return point.block.owner.operation.name == "gpu.func"


__all__ = [
    "CONSUMERS_BARRIER",
    "GROUP_BARRIER",
    "arrive",
    "sync",
    "sync_all",
    "sync_consumers",
    "sync_for_products",
    "sync_group",
    "sync_rows",
    "turn_of",
    "wait_for_groups",
]
