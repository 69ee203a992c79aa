# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What type checkers and editors see of ``import kvarn as kv``; at run time names are imported when they are used.

A dtype is three things: the annotation of a scalar argument, a cast, and a value that other functions take. Here it is
a class of scalars whose metaclass is a DType. A cache class annotates arguments of kernels and is the host's class: it
has the methods of both. A test holds the names against those of the run time.
"""

from collections.abc import Callable, Mapping
from typing import Any, Optional as Optional, overload

from kvarn import (
    artifact as artifact,
    caches as caches,
    dialect as dialect,
    dispatch as dispatch,
    dsl as dsl,
    emulator as emulator,
    env as env,
    errors as errors,
    lowering as lowering,
    ops as ops,
    parallel as parallel,
    pipelines as pipelines,
    runtime as runtime,
    testing as testing,
    tools as tools,
    weights as weights,
)
from kvarn._version import __version__ as __version__
from kvarn.artifact import bundle as bundle
from kvarn.block_mask import BlockMask as BlockMask
from kvarn.caches import (
    ForeignPages as ForeignPages,
    KVCacheMHAOperand as KVCacheMHAOperand,
    KVCacheScalesMHAOperand as KVCacheScalesMHAOperand,
    KVCacheStaticParams as KVCacheStaticParams,
    LayoutTensorMHAOperand as LayoutTensorMHAOperand,
    PageSummaries as PageSummaries,
    RaggedMHAOperand as RaggedMHAOperand,
)
from kvarn.compilation import driver as _compiler, kernel as _compiled
from kvarn.compilation.driver import compile as compile
from kvarn.compilation.extensions import extend as extend
from kvarn.compilation.kernel import Kernel as Kernel, load as load
from kvarn.dialect.dtypes import DType as DType
from kvarn.dialect.layout import CacheSpec as CacheSpec, CollectionSpec as CollectionSpec, OperandSpec as OperandSpec
from kvarn.dialect.records import Record as Record
from kvarn.dsl import masks as masks, math as math, scores as scores, tma as tma
from kvarn.dsl.calls import *  # noqa: F403
from kvarn.dsl.functional import *  # noqa: F403
from kvarn.dsl.gpu import *  # noqa: F403
from kvarn.dsl.handles import (
    Cache as Cache,
    Collection as Collection,
    Operand as Operand,
    Rows as Rows,
    buffer_operand as buffer_operand,
    operand as operand,
)
from kvarn.dsl.kernel import KernelFunction as KernelFunction
from kvarn.dsl.memory import *  # noqa: F403
from kvarn.dsl.ptx import *  # noqa: F403
from kvarn.dsl.staging import *  # noqa: F403
from kvarn.dsl.tiles import *  # noqa: F403
from kvarn.dsl.tma import TensorMap as TensorMap
from kvarn.dsl.tracing import *  # noqa: F403
from kvarn.dsl.values import (
    Value as Value,
    Vector as Vector,
    bitcast as bitcast,
    cast as cast,
    from_lanes as from_lanes,
    vector as vector,
    where as where,
)
from kvarn.dsl.wgmma import *  # noqa: F403
from kvarn.emulator import EmulationError as EmulationError, emulated as emulated
from kvarn.errors import KernelError as KernelError
from kvarn.inspect import KernelReport as KernelReport
from kvarn.lowering.remarks import remark as remark
from kvarn.measure.autotune import autotune as autotune
from kvarn.ops.codes import Code as Code
from kvarn.ops.prefixes import plan_prefixes as plan_prefixes
from kvarn.paging import hybrid as hybrid, manager as manager
from kvarn.paging.hybrid import HybridKVCacheManager as HybridKVCacheManager, LayerGroup as LayerGroup
from kvarn.paging.manager import (
    InsufficientBlocksError as InsufficientBlocksError,
    PagedKVCacheManager as PagedKVCacheManager,
)
from kvarn.paging.prefixes import SharedPrefixes as SharedPrefixes
from kvarn.pipelines import pipeline as pipeline
from kvarn.sanitizer import ownership as ownership
from kvarn.sanitizer.ownership import OwnershipError as OwnershipError, sanitize as sanitize
from kvarn.timeline.recording import tracing as tracing

compiler = _compiler
compiled = _compiled

class _Scalar(DType, type):
    def __call__(cls, x: Any) -> Any: ...

class bf16(Value, metaclass=_Scalar): ...
class f8e4m3(Value, metaclass=_Scalar): ...
class f8e5m2(Value, metaclass=_Scalar): ...
class f8e8m0(Value, metaclass=_Scalar): ...
class f16(Value, metaclass=_Scalar): ...
class f32(Value, metaclass=_Scalar): ...
class f64(Value, metaclass=_Scalar): ...
class i8(Value, metaclass=_Scalar): ...
class i16(Value, metaclass=_Scalar): ...
class i32(Value, metaclass=_Scalar): ...
class i64(Value, metaclass=_Scalar): ...
class u8(Value, metaclass=_Scalar): ...
class u16(Value, metaclass=_Scalar): ...
class u32(Value, metaclass=_Scalar): ...
class u64(Value, metaclass=_Scalar): ...
class bool(Value, metaclass=_Scalar): ...

bool_ = bool

class KVCache(Cache): ...
class KVCacheCollection(Collection): ...
class PagedKVCache(Cache, caches.PagedKVCache): ...  # pyright: ignore[reportGeneralTypeIssues]
class ContinuousBatchingKVCache(Cache, caches.ContinuousBatchingKVCache): ...  # pyright: ignore[reportGeneralTypeIssues]
class PagedKVCacheFA3Fallback(Cache, caches.PagedKVCacheFA3Fallback): ...  # pyright: ignore[reportGeneralTypeIssues]
class MHAOperand(Operand, caches.MHAOperand): ...  # pyright: ignore[reportGeneralTypeIssues]

class PagedKVCacheCollection(caches.PagedKVCacheCollection):
    def get_key_cache(self, layer: Any) -> PagedKVCache: ...
    def get_value_cache(self, layer: Any) -> PagedKVCache: ...
    def cache_length(self, b: Any) -> Any: ...

class ContinuousBatchingKVCacheCollection(caches.ContinuousBatchingKVCacheCollection):
    def get_key_cache(self, layer: Any) -> ContinuousBatchingKVCache: ...
    def get_value_cache(self, layer: Any) -> ContinuousBatchingKVCache: ...
    def cache_length(self, b: Any) -> Any: ...

class PagedKVCacheFA3FallbackCollection(caches.PagedKVCacheFA3FallbackCollection):
    def get_key_cache(self, layer: Any) -> PagedKVCacheFA3Fallback: ...
    def get_value_cache(self, layer: Any) -> PagedKVCacheFA3Fallback: ...
    def cache_length(self, b: Any) -> Any: ...

@overload
def kernel(function: Callable[..., Any], /) -> KernelFunction: ...
@overload
def kernel(
    *,
    max_threads: int | None = None,
    block: int | tuple[int, ...] | None = None,
    min_blocks: int | None = None,
    max_registers: int | None = None,
    cluster: int | tuple[int, ...] | None = None,
    schedule: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], KernelFunction]: ...
