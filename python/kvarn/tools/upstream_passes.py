# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The names of the passes compiled into MLIR's Python bindings.

The API cannot list them. Each name is a string in the bindings' library, so every string that could be a name is
offered to the pipeline parser, which knows; that takes a fraction of a second.
"""

from __future__ import annotations

import re
from pathlib import Path

from mlir import _mlir_libs, ir
from mlir.passmanager import PassManager

_STRING = re.compile(rb"[a-z][a-z0-9-]{2,59}\0")
_UNKNOWN = "does not refer to a registered pass"


def names() -> list[str]:
    """The names of passes and of registered pipelines, sorted."""
    candidates: set[str] = set()
    for path in Path(_mlir_libs.__file__).parent.glob("*.so*"):
        for found in set(_STRING.findall(path.read_bytes())):
            string = found[:-1].decode()
            candidates.update(string[i:] for i in range(len(string) - 2))  # linkers store a string in another's end
    context = ir.Context()
    context.enable_multithreading(False)
    context.emit_error_diagnostics = False
    with context:
        return sorted(name for name in candidates if _is_pass(name))


def _is_pass(name: str) -> bool:
    try:
        PassManager("any").add(name)
    except ValueError as error:
        return _UNKNOWN not in str(error)
    return True
