# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A phase of an mbarrier is over before the bytes that it expects have come: kernels read stages that copies have yet
to fill.
"""

SYMBOL = "kvarn.emulator.cluster:Cluster.arrive"
OLD = "b.pending == 0 and b.bytes == 0"
NEW = "b.pending == 0"
CAUGHT_BY = ("tests/emulator/test_ptx_interpreter_barriers.py::test_a_bulk_copy_counts_bytes",)
