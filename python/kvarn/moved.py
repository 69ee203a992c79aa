# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Modules that have another name now: the old one still imports, with a DeprecationWarning, for one release.

Both names are one module: what was declared through the old one is there under the new one.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "kvarn.lowering.distribute_kv_tiles": "kvarn.lowering.passes.tiles.distribute_kv_tiles",
    "kvarn.lowering.expand": "kvarn.lowering.kernels",
    "kvarn.lowering.expand.attention_common": "kvarn.lowering.kernels.attention.case",
    "kvarn.lowering.expand.attention_tiles": "kvarn.lowering.kernels.attention.kernel",
    "kvarn.lowering.expand.base": "kvarn.lowering.kernels.base",
    "kvarn.lowering.lower_kv_access": "kvarn.lowering.passes.kv.lower_kv_access",
    "kvarn.lowering.lower_kv_casts": "kvarn.lowering.passes.backend.lower_kv_casts",
    "kvarn.lowering.lower_kv_tma": "kvarn.lowering.passes.kv.lower_kv_tma",
    "kvarn.lowering.rewrites": "kvarn.lowering.rewrite_counts",
    "kvarn.lowering.tile_ir": "kvarn.lowering.tiles.ir",
}


class _Finder:
    """Finds the old names, before anything looks for files of theirs."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in MOVED:
            return ModuleSpec(name, self)  # pyright: ignore[reportArgumentType]
        package = name.rpartition(".")[0]
        if package in MOVED:  # whose folder is the new one's: a file found there would be a second module
            raise ModuleNotFoundError(f"No module named {name!r}: {package} is {MOVED[package]} now", name=name)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warnings.warn(f"{name} is {MOVED[name]} now; the old name goes with the next release", DeprecationWarning, 2)
        sys.modules[name] = importlib.import_module(MOVED[name])


def install() -> None:
    """Let the old names import."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
