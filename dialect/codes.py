# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Codes of a user's own elements, by their names in types: what ``kv.Code`` registers, and kernels and NumPy look up.

IR with such a name can be parsed, printed and verified in any process, but compiled only where the code was made.
"""

from __future__ import annotations

from typing import Any

registered: dict[str, Any] = {}


def of(name: str) -> Any:
    """The code of a name; ValueError if this process has none."""
    if name not in registered:
        raise ValueError(
            f"code {name!r} must have been made in this process by kv.Code, got a name only: the IR does not hold its "
            "functions; import the module that makes it"
        )
    return registered[name]


__all__ = ["of", "registered"]
