# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernel language: ``@kv.kernel`` functions, and everything that they use.

``import kvarn as kv`` finds all of these names; ``from kvarn import dsl as kv`` is for the library itself.
"""

from kvarn.dialect.dtypes import (
    DType,
    bf16,
    bool_,
    f8e4m3,
    f8e5m2,
    f8e8m0,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)  # fmt: skip

from . import math
from .calls import func, static
from .functional import for_, if_, loop, when, while_
from .gpu import (
    barrier,
    block_dim,
    block_id,
    device_assert,
    grid_dim,
    lane_id,
    linear_thread_id,
    printf,
    shuffle_down,
    shuffle_idx,
    shuffle_up,
    shuffle_xor,
    thread_id,
    warp_id,
    warp_reduce,
)  # fmt: skip
from .handles import Cache, Collection, KVCache, KVCacheCollection, Operand, Rows, operand
from .kernel import KernelFunction, kernel
from .machine import *  # noqa: F403  one function an instruction: the list is that module's __all__
from .machine import __all__ as _machine
from .memory import Buffer, BufferSpec, Pointer, Shared, atomic_add, fence, pointer_of, shared
from .values import Value, Vector, bitcast, cast, from_lanes, vector, where

bool = bool_  # kv.bool, as kv.f32

__all__ = [
    "Buffer", "BufferSpec", "Cache", "Collection", "DType", "KVCache", "KVCacheCollection", "KernelFunction",
    "Operand", "Pointer", "Rows", "Shared", "Value", "Vector", "atomic_add", "barrier", "bf16", "bitcast",
    "block_dim", "block_id", "bool", "bool_", "cast", "device_assert", "f16", "f32", "f64", "f8e4m3", "f8e5m2",
    "f8e8m0", "fence", "for_", "from_lanes", "func", "grid_dim", "i16", "i32", "i64", "i8", "if_", "kernel",
    "lane_id", "linear_thread_id", "loop", "math", "operand", "pointer_of", "printf", "shared", "shuffle_down",
    "shuffle_idx", "shuffle_up", "shuffle_xor", "static", "thread_id", "u16", "u32", "u64", "u8", "vector", "warp_id",
    "warp_reduce", "when", "where", "while_", *_machine,
]  # fmt: skip
