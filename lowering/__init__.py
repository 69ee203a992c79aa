# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lowering of the kv dialect to PTX and to host code.

``registry.py`` knows the passes by name, ``pipeline.py`` their order. ``passes/`` has them, one per file, ``kernels/``
the kernels of operations, ``schedules/`` the choice among these, and ``tiles/`` what passes over tiles share.
"""

from .registry import NAMES, Pass, check_name, find, module_of, names, register

__all__ = ["NAMES", "Pass", "check_name", "find", "module_of", "names", "register"]
