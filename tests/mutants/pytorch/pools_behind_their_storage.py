# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An operator that torch records takes a pool whose storage has become shorter, and reads what lies behind it."""

SYMBOL = "kvarn.torch.handles:made"
OLD = 'checks.pool_view(t, "a cache\'s tensor")'
NEW = "buffers.view(t)"
CAUGHT_BY = ("tests/pytorch/test_graphs.py::test_an_operator_refuses_a_pool_whose_storage_has_become_shorter_than_it",)
