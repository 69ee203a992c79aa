# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The one exception that the demo turns into a message instead of a traceback."""


class DemoError(Exception):
    """The demo cannot go on; the text says why and what to do."""
