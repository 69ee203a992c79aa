# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The decode kernel of a divided batch lets the tile kernel start before it has waited for the kernels before it, for
which the tile kernel does not wait by itself.
"""

SYMBOL = "kvarn.lowering.kernels.attention.decode.kernel:decode_kernel"
OLD = "        kv.griddepcontrol_wait()\n        kv.griddepcontrol_launch_dependents()"
NEW = "        kv.griddepcontrol_launch_dependents()\n        kv.griddepcontrol_wait()"
CAUGHT_BY = ("tests/ops/test_divided_batches.py::test_batches_of_one_shape_change_class[bf16]",)
