# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Warnings about old names, which are accepted for one release."""

from __future__ import annotations

import sys
import warnings

_OWN = ("kvarn", "contextlib", "dataclasses")  # packages whose frames are between the caller and the warning


def warn(text: str) -> None:
    """Emit a DeprecationWarning at the line that called kvarn."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in _OWN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, DeprecationWarning, stacklevel=level)


def warn_renamed(what: str, old: str, new: str) -> None:
    """Warn that a name is an old one: ``what`` says of what, such as "the schedule entry"."""
    warn(f"{what} {old!r} is {new!r} now; the old name goes with the next release")
