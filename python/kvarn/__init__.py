# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn: KV-cache operations as an MLIR dialect, lowered to PTX, run on device buffers.

``import kvarn as kv`` is cheap: modules that need MLIR or a GPU library are imported at first use. A fork waits for
imports of other threads, so that a child does not inherit a half-imported module.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from kvarn import forks as forks, moved
from kvarn._version import __version__
from kvarn.dialect import deprecated, dtypes as _dtypes
from kvarn.dialect.dtypes import *  # noqa: F403
from kvarn.dialect.layout import CacheSpec, CollectionSpec, OperandSpec
from kvarn.dialect.records import Record

bool = _dtypes.bool_  # kv.bool, as kv.f32

_LAZY = {
    "kvarn.caches": (
        "KVCacheStaticParams", "PagedKVCacheCollection", "ContinuousBatchingKVCacheCollection",
        "PagedKVCacheFA3FallbackCollection", "PagedKVCache", "ContinuousBatchingKVCache", "PagedKVCacheFA3Fallback",
        "KVCacheMHAOperand", "KVCacheScalesMHAOperand", "LayoutTensorMHAOperand", "MHAOperand",
        "RaggedMHAOperand", "ForeignPages", "PageSummaries",
    ),
    "kvarn.paging.manager": ("PagedKVCacheManager", "InsufficientBlocksError"),
    "kvarn.block_mask": ("BlockMask",),
    "kvarn.paging.prefixes": ("SharedPrefixes",),
    "kvarn.paging.hybrid": ("HybridKVCacheManager", "LayerGroup"),
    "kvarn.compilation.driver": ("compile",),
    "kvarn.compilation.kernel": ("Kernel", "load"),
    "kvarn.ops.codes": ("Code",),
    "kvarn.errors": ("KernelError",),
    "kvarn.pipelines": ("pipeline",),
    "kvarn.measure.autotune": ("autotune",),
    "kvarn.compilation.extensions": ("extend",),
    "kvarn.sanitizer.ownership": ("sanitize", "OwnershipError"),
    "kvarn.timeline.recording": ("tracing",),
    "kvarn.lowering.remarks": ("remark",),
    "kvarn.emulator": ("emulated", "EmulationError"),
}  # fmt: skip
# Names of the kernel language in earlier versions. For one release they are accepted.
_RENAMED = {"beside": "concatenate", "take_round": "take_work_item"}
_MODULES = {name: module for module, names in _LAZY.items() for name in names}
# Names from layers above, which methods of lower layers reach through this module instead of importing; not public.
_ABOVE = {"KernelReport": "kvarn.inspect", "Passport": "kvarn.inspect", "plan_prefixes": "kvarn.ops.prefixes"}
_SUBMODULES = (
    "ops", "compiler", "compiled", "dispatch", "caches", "dsl", "errors", "env", "runtime", "tools", "artifact",
    "hybrid", "manager", "dialect", "lowering", "emulator", "parallel", "testing", "weights",
)  # fmt: skip
# Non-public modules, listed so that `from kvarn import settings` does not look for a name of the DSL.
_INNER = (
    "block_mask", "bundle", "cache", "extensions", "files", "forks", "ownership", "page_pool", "pipelines", "prefixes",
    "settings", "stage_files", "timeline_drawing", "timelines",
)  # fmt: skip

moved.install()


def __getattr__(name: str) -> Any:
    """Import a public name on first use; other names belong to the DSL."""
    if name in _MODULES or name in _ABOVE:
        found = getattr(importlib.import_module(_MODULES.get(name) or _ABOVE[name]), name)
    elif name in _SUBMODULES or name in _INNER:
        try:
            return importlib.import_module(moved.MOVED.get(f"kvarn.{name}", f"kvarn.{name}"))
        except ImportError as error:
            if name != "parallel":  # the only module with optional dependencies
                raise
            raise AttributeError(str(error), name=name, obj=sys.modules[__name__]) from error
    elif name.startswith("_"):
        raise _missing(name)
    elif name in _RENAMED:
        deprecated.warn_renamed("the name of kvarn", name, _RENAMED[name])
        return __getattr__(_RENAMED[name])
    else:
        dsl = importlib.import_module("kvarn.dsl")
        if name not in dsl.__all__:
            raise _missing(name)
        found = getattr(dsl, name)
    globals()[name] = found
    return found


def _missing(name: str) -> AttributeError:
    return AttributeError(f"module 'kvarn' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


__all__ = ["CacheSpec", "CollectionSpec", "OperandSpec", "Record", "__version__", "bool", *_dtypes.__all__, *_MODULES]


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, *importlib.import_module("kvarn.dsl").__all__})
