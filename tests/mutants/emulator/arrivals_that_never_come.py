# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A kernel may end while an mbarrier waits for arrivals: a producer and a consumer that count differently go unseen."""

SYMBOL = "kvarn.emulator.cluster:Cluster.finish"
OLD = "b.bytes or b.pending != b.count"
NEW = "b.bytes"
CAUGHT_BY = (
    "tests/emulator/test_ptx_interpreter_barriers.py::test_a_hang_names_the_mbarrier_its_phase_and_what_is_missing",
)
