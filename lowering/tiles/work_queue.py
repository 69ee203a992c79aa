# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Queues of work items for persistent blocks, in shared memory: for distribute-kv-tiles."""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir

from kvarn.dialect import ops
from kvarn.dialect.dtypes import i32
from kvarn.dsl import gpu as kv_gpu, ptx
from kvarn.dsl.memory import SHARED, Pointer
from kvarn.dsl.values import Value

from .ir import BARRIER_BYTES
from .threads import buffer_of

QUEUE_SLOTS = 2  # a power of two, for slots and parities


@dataclass
class Queue:
    """Work items on the way from a counter to the roles of a block: slots with mbarriers ``full`` and ``empty``."""

    counter: Pointer
    readers: int
    slots: Pointer
    full: Pointer
    empty: Pointer

    @staticmethod
    def allocate(counter: ir.Value, readers: int) -> Queue:
        slots = Pointer(ops.alloc_shared(QUEUE_SLOTS * BARRIER_BYTES, BARRIER_BYTES), SHARED)
        barriers = Pointer(ops.alloc_shared(2 * QUEUE_SLOTS * BARRIER_BYTES, BARRIER_BYTES), SHARED)
        address = buffer_of(counter).address(0)
        return Queue(address, readers, slots, barriers, barriers + QUEUE_SLOTS * BARRIER_BYTES)

    def initialize(self, consumers: int) -> None:
        for slot in range(QUEUE_SLOTS):
            ptx.mbarrier_init(self.full + slot * BARRIER_BYTES, 1)
            ptx.mbarrier_init(self.empty + slot * BARRIER_BYTES, self.readers)

    def fetch(self, n: Value, count: Value) -> None:
        """Take the next work item, by one thread. The counter wraps to 0 when every block has fetched in vain once."""
        slot, parity = n & 1, (n >> 1) & 1
        ptx.mbarrier_wait(self.empty + slot * BARRIER_BYTES, parity ^ 1, name="empty_queue")
        taken = self.counter.atomic("inc", count - 1)
        (self.slots + slot * BARRIER_BYTES).store(taken + kv_gpu.grid_dim.x)
        ptx.mbarrier_arrive(self.full + slot * BARRIER_BYTES)

    def next(self, n: Value, lane: Value, sleep: int = 0) -> Value:
        slot, parity = n & 1, (n >> 1) & 1
        ptx.mbarrier_wait(self.full + slot * BARRIER_BYTES, parity, sleep, "full_queue")
        number = (self.slots + slot * BARRIER_BYTES).load(i32)
        ptx.syncwarp()
        ptx.mbarrier_arrive(self.empty + slot * BARRIER_BYTES, lane == 0)
        return kv_gpu.shuffle_idx(number, 0)
