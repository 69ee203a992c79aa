# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products read stages that threads wrote without a proxy fence: the emulator says so of every tile that is converted."""

SYMBOL = "kvarn.lowering.tile_memory:Stages.wait"
OLD = "ptx.fence_proxy_async()"
NEW = "pass"
CAUGHT_BY = ("tests/unit/test_attention_tiles.py",)
