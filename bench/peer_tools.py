# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the modules of peers share: tolerances, and libraries that are loaded once a process."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import Row

BF16, FP8, FP8_QUERY = 0.02, 0.06, 0.12  # tolerances; the last where the query is rounded to 8 bits too
_state: dict[str, Any] = {}  # libraries and workspaces, loaded once a process


def once(name: str, make: Callable[[], Any]) -> Any:
    if name not in _state:
        _state[name] = make()
    return _state[name]


def is_fp8(p: Any) -> bool:
    return of_8_bits(p.row)


def of_8_bits(row: Row) -> bool:
    return row.dtype != "bf16"


def vllm_library(pattern: str) -> None:
    """Load one of vLLM's compiled libraries, which registers torch operators."""

    def load() -> bool:
        folders = [Path(os.environ["PEERS_DIR"], "vllm_so")] if os.environ.get("PEERS_DIR") else []
        installed = importlib.util.find_spec("vllm")
        if installed is not None and installed.submodule_search_locations:
            root = Path(next(iter(installed.submodule_search_locations)))
            folders += [root, root / "vllm_flash_attn"]
        found = [path for folder in folders for path in sorted(folder.glob(pattern))]
        if not found:
            raise ImportError(f"vLLM's {pattern} is not here")
        importlib.import_module("torch").ops.load_library(str(found[0]))
        return True

    once(pattern, load)
