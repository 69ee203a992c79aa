# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations in place on the layouts of other libraries, on a GPU, over torch tensors."""

import importlib

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SUITE = "ops.test_foreign"
# What does not look at the place.
NOT_HERE = (
    "test_the_model_finds_what_numpy_indexing_finds",
    "test_what_does_not_fit_is_refused_by_name",
    "test_a_packed_layout_is_the_native_type",
    "test_a_kernel_for_one_layout_refuses_another_by_name",
)
pytest.register_assert_rewrite(SUITE)
_suite = vars(importlib.import_module(SUITE))
globals().update({n: f for n, f in _suite.items() if n.startswith("test_") and n not in NOT_HERE})
