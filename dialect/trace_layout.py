# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the marks of traced kernels lie in memory, for the kernels that write them and for those who read them.

A kernel finds the *switch* by a variable of its module, and by that the buffer of marks, where launches are traced. A
warp takes a record of the buffer when it begins: who it is, times by two clocks, and a ring of its last marks.
"""

from __future__ import annotations

# The variable of a kernel's module with the switch's address; 0: nothing is traced. MLIR's JIT finds what is prefixed
# so.
SYMBOL = "_mlir_kv_trace"
ATTRIBUTE = "trace"  # of an artifact's entry: its number, and the labels of its marks

# Words of 8 bytes. The switch: the buffer's address or 0, and the number of the launch (on the host).
BUFFER, LAUNCH, SWITCH_WORDS = range(3)
# The buffer: records taken so far, how many there are, marks of a ring (a power of two), records from RECORDS on.
TAKEN, CAPACITY, MARKS, RECORDS = 0, 1, 2, 8
# A record: launch, kernel, block, warp and multiprocessor; nanoseconds and clock at the beginning and at the end (0
# where the warp did not come to the kernel's end); how many marks were made, and the last of them.
(GRID, KERNEL, BLOCK, WARP, PROCESSOR, BEGIN_NS, BEGIN_CLOCK, END_NS, END_CLOCK, COUNT, RING) = range(11)
# A mark: the clock from bit 16 on, twice the label's place in the list, and 1 for an end.
CLOCK_SHIFT = 16
MOST_LABELS = 1 << (CLOCK_SHIFT - 1)


def record_words(marks: int) -> int:
    """Words of a record with a ring of so many marks."""
    return RING + marks
