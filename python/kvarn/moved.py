# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Old names of modules and their members, which work for one release with a DeprecationWarning.

The old and the new name of a module import one module object, so declarations made through either are shared.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
    "kvarn.tools.passport.places": "kvarn.inspect.source_map",
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
    """Finds old module names, before the finders that look for files."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in MOVED:
            return ModuleSpec(name, self)  # pyright: ignore[reportArgumentType]
        package = name.rpartition(".")[0]
        if package in MOVED:  # a file of the new folder would be imported a second time
            raise ModuleNotFoundError(f"No module named {name!r}: {package} is {MOVED[package]} now", name=name)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warnings.warn(f"{name} is {MOVED[name]} now; the old name goes with the next release", DeprecationWarning, 2)
        sys.modules[name] = importlib.import_module(MOVED[name])


def renamed(module: str, name: str, names: Mapping[str, Any]) -> Any:
    """The member of a module under an old name, with a warning; AttributeError for any other name."""
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module])
    new = names[name].__name__
    warnings.warn(f"{module}.{name} is {new} now; the old name goes with the next release", DeprecationWarning, 3)
    return names[name]


def install() -> None:
    """Make old module names importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
