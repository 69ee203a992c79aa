# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What ends the demo."""


class DemoError(Exception):
    """The demo cannot go on; the text says why and what to do."""
