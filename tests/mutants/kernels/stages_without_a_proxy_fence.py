# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products read stages that threads wrote without a proxy fence: tiles that were converted may be read too early."""

SYMBOL = "kvarn.lowering.tiles.memory:Stages.wait"
OLD = "ptx.fence_proxy_async()"
NEW = "pass"
CAUGHT_BY = ("tests/ops/test_attention_tiles.py::test_elements_of_8_bits_are_converted_and_scaled",)
