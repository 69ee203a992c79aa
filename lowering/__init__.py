# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lowering of the kv dialect to PTX and to host code.

``registry.py`` finds passes by name; ``pipeline.py`` has their order. ``passes/`` has one pass per file, ``kernels/``
the kernels of fused operations, ``schedules/`` the choice among them, and ``tiles/`` what the tile passes share.
"""

from .registry import NAMES, Pass, check_name, find, module_of, names, register

__all__ = ["NAMES", "Pass", "check_name", "find", "module_of", "names", "register"]
