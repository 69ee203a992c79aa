# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the tests with torch run: on tensors of the CPU, and of a GPU where there is one."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def pytest_configure(config):
    for warning in (
        "ignore:`torch.jit:DeprecationWarning",  # inductor's own imports, when the first test uses it
        "ignore:The CUDA Graph is empty:UserWarning",  # cudagraph_trees begins with one
    ):
        config.addinivalue_line("filterwarnings", warning)
