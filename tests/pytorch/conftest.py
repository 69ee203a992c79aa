# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the tests with torch run: on tensors of the CPU, and of a GPU where there is one."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param
