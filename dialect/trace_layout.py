# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The memory layout of traced kernels' marks, for the kernels that write them and the code that reads them.

A kernel finds the *switch* through a module variable, and through it the buffer of marks, if launches are traced. Each
warp takes a record of the buffer when it starts: its identity, times of two clocks, and a ring of its last marks.
"""

from __future__ import annotations

# Name of the module variable with the switch's address; 0 turns tracing off. MLIR's JIT looks for this prefix.
SYMBOL = "_mlir_kv_trace"
ATTRIBUTE = "trace"  # of an artifact's entry: its kernel number, and the labels of its marks

# All fields are 8-byte words. The switch: the buffer's address or 0, and the launch number (on the host).
BUFFER, LAUNCH, SWITCH_WORDS = range(3)
# The buffer: records taken so far, its capacity, marks per ring (a power of two); records start at word RECORDS.
TAKEN, CAPACITY, MARKS, RECORDS = 0, 1, 2, 8
# A record: launch, kernel, block, warp and multiprocessor; nanoseconds and clock at the start and at the end (0 where
# the warp did not reach the kernel's end); the number of marks made; and the ring of the last marks.
(GRID, KERNEL, BLOCK, WARP, PROCESSOR, BEGIN_NS, BEGIN_CLOCK, END_NS, END_CLOCK, COUNT, RING) = range(11)
# A mark: the clock from bit 16 up, then the label's index times two, plus 1 for an end mark.
CLOCK_SHIFT = 16
MOST_LABELS = 1 << (CLOCK_SHIFT - 1)


def record_words(marks: int) -> int:
    """Words of a record whose ring has this many marks."""
    return RING + marks
