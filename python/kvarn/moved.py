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
    "kvarn.bundle": "kvarn.artifact.bundle",
    "kvarn.cache": "kvarn.compilation.disk_cache",
    "kvarn.compiled": "kvarn.compilation.kernel",
    "kvarn.compiler": "kvarn.compilation.driver",
    "kvarn.drafts": "kvarn.paging.drafts",
    "kvarn.emulator.ptx": "kvarn.emulator.grid",
    "kvarn.emulator.text": "kvarn.emulator.ptx_parser",
    "kvarn.extensions": "kvarn.compilation.extensions",
    "kvarn.hybrid": "kvarn.paging.hybrid",
    "kvarn.manager": "kvarn.paging.manager",
    "kvarn.ownership": "kvarn.sanitizer.ownership",
    "kvarn.page_pool": "kvarn.paging.page_pool",
    "kvarn.prefixes": "kvarn.paging.prefixes",
    "kvarn.specialisation": "kvarn.compilation.specialisation",
    "kvarn.stage_files": "kvarn.compilation.stage_files",
    "kvarn.step_inputs": "kvarn.paging.step_inputs",
    "kvarn.timeline_drawing": "kvarn.timeline.drawing",
    "kvarn.timelines": "kvarn.timeline.recording",
    "kvarn.tools.arrays": "kvarn.measure.arrays",
    "kvarn.tools.attention_problem": "kvarn.measure.attention_problem",
    "kvarn.tools.explain": "kvarn.inspect.explain",
    "kvarn.tools.passport": "kvarn.inspect",
    "kvarn.tools.passport.describe": "kvarn.inspect.describe",
    "kvarn.tools.passport.facts": "kvarn.inspect.facts",
    "kvarn.tools.passport.figures": "kvarn.inspect.figures",
    "kvarn.tools.passport.machine": "kvarn.inspect.machine",
    "kvarn.tools.passport.page": "kvarn.inspect.page",
    "kvarn.tools.passport.places": "kvarn.inspect.places",
    "kvarn.tools.passport.shared": "kvarn.inspect.shared",
    "kvarn.tools.passport.stages": "kvarn.inspect.stages",
    "kvarn.tools.passport.work": "kvarn.inspect.work",
    "kvarn.tools.rest": "kvarn.tools.reference_lowering",
    "kvarn.tools.spaces": "kvarn.measure.spaces",
    "kvarn.tools.timing": "kvarn.measure.timing",
    "kvarn.tools.timing_log": "kvarn.measure.timing_log",
    "kvarn.tools.tune": "kvarn.measure.tune",
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
