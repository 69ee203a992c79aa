# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the suites of the other folders that are run here as well find in place of the host."""

import pytest
from reference import places


@pytest.fixture
def place():
    """A GPU."""
    return places.Torch()
