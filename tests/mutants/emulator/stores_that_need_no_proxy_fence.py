# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What ordinary stores wrote is read by the asynchronous proxy without a fence: a missing one goes unseen."""

SYMBOL = "kvarn.emulator.block:Block.read_async"
OLD = "if unfenced.any():"
NEW = "if False:"
CAUGHT_BY = (
    "tests/emulator/test_ptx_interpreter_wgmma.py::test_what_ordinary_stores_wrote_needs_a_proxy_fence_of_the_writer",
)
