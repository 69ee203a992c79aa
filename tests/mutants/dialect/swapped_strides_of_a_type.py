# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The text of a type has the stride of heads where that of tokens belongs: kernels of pools of other libraries read
other elements.
"""

SYMBOL = "kvarn.dialect.types:_spec_text"
OLD = "{spec.strides[0]}, {spec.strides[1]}"
NEW = "{spec.strides[1]}, {spec.strides[0]}"
CAUGHT_BY = ("tests/ops/test_foreign.py::test_a_kernel_of_ones_own_runs_on_every_layout",)
