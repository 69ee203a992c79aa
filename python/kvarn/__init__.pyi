# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What type checkers and editors see of ``import kvarn as kv``; at run time names are imported when they are used.

A dtype is three things: the annotation of a scalar argument, a cast, and a value that other functions take. Here it is
a class of scalars whose metaclass is a DType. A cache class annotates arguments of kernels and is the host's class: it
has the methods of both. A test holds the names against those of the run time.
"""

from collections.abc import Callable
from typing import Any, overload
from typing import Optional as Optional

from kvarn import artifact as artifact
from kvarn import bundle as bundle
from kvarn import caches as caches
from kvarn import compiled as compiled
from kvarn import compiler as compiler
from kvarn import dialect as dialect
from kvarn import dispatch as dispatch
from kvarn import dsl as dsl
from kvarn import emulator as emulator
from kvarn import env as env
from kvarn import errors as errors
from kvarn import hybrid as hybrid
from kvarn import lowering as lowering
from kvarn import manager as manager
from kvarn import ops as ops
from kvarn import ownership as ownership
from kvarn import parallel as parallel
from kvarn import pipelines as pipelines
from kvarn import runtime as runtime
from kvarn import tools as tools
from kvarn import weights as weights
from kvarn._version import __version__ as __version__
from kvarn.block_mask import (
    BlockMask as BlockMask,
)
from kvarn.caches import (
    ForeignPages as ForeignPages,
)
from kvarn.caches import (
    KVCacheMHAOperand as KVCacheMHAOperand,
)
from kvarn.caches import (
    KVCacheScalesMHAOperand as KVCacheScalesMHAOperand,
)
from kvarn.caches import (
    KVCacheStaticParams as KVCacheStaticParams,
)
from kvarn.caches import (
    LayoutTensorMHAOperand as LayoutTensorMHAOperand,
)
from kvarn.caches import (
    PageSummaries as PageSummaries,
)
from kvarn.caches import (
    RaggedMHAOperand as RaggedMHAOperand,
)
from kvarn.compiled import (
    Kernel as Kernel,
)
from kvarn.compiled import (
    load as load,
)
from kvarn.compiler import (
    compile as compile,
)
from kvarn.dialect.dtypes import DType as DType
from kvarn.dialect.layout import CacheSpec as CacheSpec
from kvarn.dialect.layout import CollectionSpec as CollectionSpec
from kvarn.dialect.layout import OperandSpec as OperandSpec
from kvarn.dsl import masks as masks
from kvarn.dsl import math as math
from kvarn.dsl import scores as scores
from kvarn.dsl import tma as tma
from kvarn.dsl.calls import (
    func as func,
)
from kvarn.dsl.calls import (
    intrinsic as intrinsic,
)
from kvarn.dsl.calls import (
    static as static,
)
from kvarn.dsl.functional import (
    for_ as for_,
)
from kvarn.dsl.functional import (
    if_ as if_,
)
from kvarn.dsl.functional import (
    loop as loop,
)
from kvarn.dsl.functional import (
    when as when,
)
from kvarn.dsl.functional import (
    while_ as while_,
)
from kvarn.dsl.gpu import (
    barrier as barrier,
)
from kvarn.dsl.gpu import (
    block_dim as block_dim,
)
from kvarn.dsl.gpu import (
    block_id as block_id,
)
from kvarn.dsl.gpu import (
    device_assert as device_assert,
)
from kvarn.dsl.gpu import (
    grid_dim as grid_dim,
)
from kvarn.dsl.gpu import (
    lane_id as lane_id,
)
from kvarn.dsl.gpu import (
    linear_thread_id as linear_thread_id,
)
from kvarn.dsl.gpu import (
    printf as printf,
)
from kvarn.dsl.gpu import (
    shuffle_down as shuffle_down,
)
from kvarn.dsl.gpu import (
    shuffle_idx as shuffle_idx,
)
from kvarn.dsl.gpu import (
    shuffle_up as shuffle_up,
)
from kvarn.dsl.gpu import (
    shuffle_xor as shuffle_xor,
)
from kvarn.dsl.gpu import (
    thread_id as thread_id,
)
from kvarn.dsl.gpu import (
    warp_id as warp_id,
)
from kvarn.dsl.gpu import (
    warp_reduce as warp_reduce,
)
from kvarn.dsl.handles import (
    Cache as Cache,
)
from kvarn.dsl.handles import (
    Collection as Collection,
)
from kvarn.dsl.handles import (
    Operand as Operand,
)
from kvarn.dsl.handles import (
    Rows as Rows,
)
from kvarn.dsl.handles import (
    buffer_operand as buffer_operand,
)
from kvarn.dsl.handles import (
    operand as operand,
)
from kvarn.dsl.kernel import (
    KernelFunction as KernelFunction,
)
from kvarn.dsl.memory import (
    Buffer as Buffer,
)
from kvarn.dsl.memory import (
    BufferSpec as BufferSpec,
)
from kvarn.dsl.memory import (
    Pointer as Pointer,
)
from kvarn.dsl.memory import (
    ReadOnlyBuffer as ReadOnlyBuffer,
)
from kvarn.dsl.memory import (
    Shared as Shared,
)
from kvarn.dsl.memory import (
    atomic_add as atomic_add,
)
from kvarn.dsl.memory import (
    fence as fence,
)
from kvarn.dsl.memory import (
    pointer_of as pointer_of,
)
from kvarn.dsl.memory import (
    shared as shared,
)
from kvarn.dsl.memory import (
    take_round as take_round,
)
from kvarn.dsl.ptx import (
    ballot as ballot,
)
from kvarn.dsl.ptx import (
    cluster_barrier as cluster_barrier,
)
from kvarn.dsl.ptx import (
    cluster_rank as cluster_rank,
)
from kvarn.dsl.ptx import (
    cp_async as cp_async,
)
from kvarn.dsl.ptx import (
    cp_async_bulk as cp_async_bulk,
)
from kvarn.dsl.ptx import (
    cp_async_bulk_prefetch as cp_async_bulk_prefetch,
)
from kvarn.dsl.ptx import (
    cp_async_commit as cp_async_commit,
)
from kvarn.dsl.ptx import (
    cp_async_mbarrier_arrive as cp_async_mbarrier_arrive,
)
from kvarn.dsl.ptx import (
    cp_async_wait as cp_async_wait,
)
from kvarn.dsl.ptx import (
    cvt_e4m3x2_to_f16x2 as cvt_e4m3x2_to_f16x2,
)
from kvarn.dsl.ptx import (
    cvt_e4m3x4_to_bf16x4 as cvt_e4m3x4_to_bf16x4,
)
from kvarn.dsl.ptx import (
    cvt_e4m3x4_to_f16x4 as cvt_e4m3x4_to_f16x4,
)
from kvarn.dsl.ptx import (
    cvt_e5m2x2_to_f16x2 as cvt_e5m2x2_to_f16x2,
)
from kvarn.dsl.ptx import (
    cvt_e5m2x4_to_f16x4 as cvt_e5m2x4_to_f16x4,
)
from kvarn.dsl.ptx import (
    cvt_i8x4_to_f16x4 as cvt_i8x4_to_f16x4,
)
from kvarn.dsl.ptx import (
    elect as elect,
)
from kvarn.dsl.ptx import (
    ex2 as ex2,
)
from kvarn.dsl.ptx import (
    fence_mbarrier_init as fence_mbarrier_init,
)
from kvarn.dsl.ptx import (
    fence_proxy_async as fence_proxy_async,
)
from kvarn.dsl.ptx import (
    globaltimer as globaltimer,
)
from kvarn.dsl.ptx import (
    griddepcontrol_launch_dependents as griddepcontrol_launch_dependents,
)
from kvarn.dsl.ptx import (
    griddepcontrol_wait as griddepcontrol_wait,
)
from kvarn.dsl.ptx import (
    l2_policy as l2_policy,
)
from kvarn.dsl.ptx import (
    ldmatrix as ldmatrix,
)
from kvarn.dsl.ptx import (
    load_cluster as load_cluster,
)
from kvarn.dsl.ptx import (
    load_nc as load_nc,
)
from kvarn.dsl.ptx import (
    load_once as load_once,
)
from kvarn.dsl.ptx import (
    mbarrier_arrive as mbarrier_arrive,
)
from kvarn.dsl.ptx import (
    mbarrier_arrive_expect_tx as mbarrier_arrive_expect_tx,
)
from kvarn.dsl.ptx import (
    mbarrier_init as mbarrier_init,
)
from kvarn.dsl.ptx import (
    mbarrier_try_wait as mbarrier_try_wait,
)
from kvarn.dsl.ptx import (
    mbarrier_wait as mbarrier_wait,
)
from kvarn.dsl.ptx import (
    mma_m16n8k8_tf32 as mma_m16n8k8_tf32,
)
from kvarn.dsl.ptx import (
    mma_m16n8k16 as mma_m16n8k16,
)
from kvarn.dsl.ptx import (
    movmatrix as movmatrix,
)
from kvarn.dsl.ptx import (
    named_barrier as named_barrier,
)
from kvarn.dsl.ptx import (
    named_barrier_arrive as named_barrier_arrive,
)
from kvarn.dsl.ptx import (
    nanosleep as nanosleep,
)
from kvarn.dsl.ptx import (
    pack_bf16x2 as pack_bf16x2,
)
from kvarn.dsl.ptx import (
    pack_f16x2 as pack_f16x2,
)
from kvarn.dsl.ptx import (
    prmt as prmt,
)
from kvarn.dsl.ptx import (
    rcp as rcp,
)
from kvarn.dsl.ptx import (
    setmaxnreg as setmaxnreg,
)
from kvarn.dsl.ptx import (
    smid as smid,
)
from kvarn.dsl.ptx import (
    stmatrix as stmatrix,
)
from kvarn.dsl.ptx import (
    syncwarp as syncwarp,
)
from kvarn.dsl.ptx import (
    tanh_approx as tanh_approx,
)
from kvarn.dsl.staging import (
    staged as staged,
)
from kvarn.dsl.tiles import (
    Tile as Tile,
)
from kvarn.dsl.tiles import (
    beside as beside,
)
from kvarn.dsl.tiles import (
    dot as dot,
)
from kvarn.dsl.tiles import (
    full as full,
)
from kvarn.dsl.tiles import (
    masked as masked,
)
from kvarn.dsl.tiles import (
    tile_index as tile_index,
)
from kvarn.dsl.tiles import (
    two_terms as two_terms,
)
from kvarn.dsl.tma import (
    TensorMap as TensorMap,
)
from kvarn.dsl.tracing import (
    trace as trace,
)
from kvarn.dsl.values import (
    Value as Value,
)
from kvarn.dsl.values import (
    Vector as Vector,
)
from kvarn.dsl.values import (
    bitcast as bitcast,
)
from kvarn.dsl.values import (
    cast as cast,
)
from kvarn.dsl.values import (
    from_lanes as from_lanes,
)
from kvarn.dsl.values import (
    vector as vector,
)
from kvarn.dsl.values import (
    where as where,
)
from kvarn.dsl.wgmma import (
    wgmma as wgmma,
)
from kvarn.dsl.wgmma import (
    wgmma_descriptor as wgmma_descriptor,
)
from kvarn.dsl.wgmma import (
    wgmma_start as wgmma_start,
)
from kvarn.dsl.wgmma import (
    wgmma_wait as wgmma_wait,
)
from kvarn.emulator import (
    EmulationError as EmulationError,
)
from kvarn.emulator import (
    emulated as emulated,
)
from kvarn.errors import (
    KernelError as KernelError,
)
from kvarn.extensions import (
    extend as extend,
)
from kvarn.hybrid import (
    HybridKVCacheManager as HybridKVCacheManager,
)
from kvarn.hybrid import (
    LayerGroup as LayerGroup,
)
from kvarn.lowering.remarks import (
    remark as remark,
)
from kvarn.manager import (
    InsufficientBlocksError as InsufficientBlocksError,
)
from kvarn.manager import (
    PagedKVCacheManager as PagedKVCacheManager,
)
from kvarn.ops.prefixes import (
    plan_prefixes as plan_prefixes,
)
from kvarn.ownership import (
    OwnershipError as OwnershipError,
)
from kvarn.ownership import (
    sanitize as sanitize,
)
from kvarn.pipelines import (
    pipeline as pipeline,
)
from kvarn.prefixes import (
    SharedPrefixes as SharedPrefixes,
)
from kvarn.timelines import (
    tracing as tracing,
)
from kvarn.tools.passport import (
    Passport as Passport,
)

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
) -> Callable[[Callable[..., Any]], KernelFunction]: ...
