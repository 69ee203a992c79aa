# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The demo's exception."""


class DemoError(Exception):
    """The demo cannot continue; the message gives the reason and the remedy."""
