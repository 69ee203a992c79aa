# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernel that combines partial results does not wait for the one that writes them, beside which it is launched: it
may read what was in the workspace before.
"""

SYMBOL = "kvarn.lowering.kernels.attention.key_splits:combine_kernel"
OLD = "if programmatic:\n                kv.griddepcontrol_wait()  # partial"
NEW = "if False:\n                kv.griddepcontrol_wait()  # partial"
CAUGHT_BY = ("tests/ops/test_key_splits.py::test_splits_change_roundings_only",)
