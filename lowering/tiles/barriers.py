# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Barriers of tile kernels, for distribute-kv-tiles.

PTX requires converged warps at ``bar.sync`` and ``bar.arrive``. Lanes that left a loop or a branch at different times
may have diverged until ``bar.warp.sync`` reconverges them. So every barrier of these kernels is emitted by this module,
after a ``bar.warp.sync``, which is left out if the ops before it in the same block prove that the warp is converged.
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
BLOCK_BARRIER = "gpu.barrier"  # the op of a barrier of all threads
_WAITS = ("nvvm.bar.warp.sync", "nvvm.barrier", BLOCK_BARRIER)  # after which a warp is converged


def sync_all() -> None:
    """Synchronize all threads of the block."""
    _reconverge()
    kv_gpu.barrier()


def sync(number: Any, threads: int) -> None:
    """Synchronize ``threads`` threads (whole warps) at a named barrier."""
    _reconverge()
    ptx.named_barrier(number, threads)


def arrive(number: Any, threads: int) -> None:
    """Arrive at a named barrier of ``threads`` threads without waiting."""
    _reconverge()
    ptx.named_barrier_arrive(number, threads)


def sync_consumers(threads: Threads) -> None:
    """Synchronize the consumer warpgroups; their writes to shared memory are then visible to all of them."""
    sync(CONSUMERS_BARRIER, threads.consumers * WARPGROUP)


def sync_group(threads: Threads) -> None:
    """Synchronize the warps of a warpgroup."""
    sync(threads.group + GROUP_BARRIER, WARPGROUP)


def sync_rows(threads: Threads) -> None:
    """Synchronize the threads that share rows of tiles: a warpgroup, or all consumers."""
    if threads.share_all:
        sync_consumers(threads)
    else:
        sync_group(threads)


def sync_for_products(threads: Threads) -> None:
    """Make writes to shared memory visible to the products of all threads that share the rows."""
    threads.fence()
    sync_rows(threads)


def turn_of(group: Value, threads: Threads) -> Value:
    """The named barrier of a warpgroup's ping-pong turn, numbered after the barriers of the warpgroups."""
    return group + (GROUP_BARRIER + threads.consumers)


def wait_for_groups(pending: int) -> None:
    """Wait for the cp.async groups of all threads, except the last ``pending`` of each thread."""
    ptx.cp_async_wait(pending)
    sync_all()


def _reconverge() -> None:
    if not _is_whole(ir.InsertionPoint.current):
        ptx.syncwarp()


def _is_whole(point: ir.InsertionPoint) -> bool:
    """Whether a warp is known to be converged: at the start of the kernel, or after a barrier in the same block.

    kv ops that are not lowered yet may become loops and branches. The polling loop of an mbarrier keeps a warp
    converged: all lanes test the same barrier and phase, and leave it together.
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
