# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The operations of the kv dialect: their classes, and wrapper functions of the same name.

Tier 2, used inside kernels: :mod:`metadata`, :mod:`addressing`, :mod:`access`, :mod:`tiles`, :mod:`tma`.
Tier 1, used outside kernels: :mod:`operations`, :mod:`rotary`, :mod:`attention`, :mod:`mla`, :mod:`ragged`.
"""

from .access import cast, load, load_raw, load_scale, store, store_scale
from .addressing import (
    block_ptr,
    buffer_address,
    get_row,
    load_pages,
    make_rows,
    page,
    populate,
    raw_page,
    row_index,
    scale_block_ptr,
    scales_base,
    tma_row,
)
from .attention import AttentionOp, AttentionPaddedOp, OperandAttentionOp
from .metadata import (
    cache_length,
    cache_lengths,
    device_attribute,
    field,
    is_empty,
    key_cache,
    make_cache,
    make_collection,
    max_context_length,
    max_prompt_length,
    num_rows,
    operand,
    value_cache,
)
from .mla import MlaAttentionOp, MlaDecompressOp, MlaPrefillChunkOp, MlaPrefillPlanOp
from .tiles import alloc_shared, load_tile, store_tile
from .tma import (
    tma_expect,
    tma_init_barrier,
    tma_load,
    tma_load_tile,
    tma_prefetch,
    tma_store,
    tma_wait,
    tma_wait_stores,
)

__all__ = [
    "AttentionOp", "AttentionPaddedOp", "MlaAttentionOp", "MlaDecompressOp", "MlaPrefillChunkOp",
    "MlaPrefillPlanOp", "OperandAttentionOp",
    "alloc_shared", "block_ptr",
    "buffer_address", "cache_length", "cache_lengths", "cast", "device_attribute", "field", "get_row", "is_empty",
    "key_cache", "load", "load_pages", "load_raw", "load_scale", "load_tile", "make_cache", "make_collection",
    "make_rows", "max_context_length", "max_prompt_length", "num_rows", "operand", "page", "populate", "raw_page",
    "row_index", "scale_block_ptr", "scales_base", "store", "store_scale", "store_tile",
    "tma_expect", "tma_init_barrier", "tma_load", "tma_load_tile", "tma_prefetch", "tma_row", "tma_store", "tma_wait",
    "tma_wait_stores", "value_cache",
]  # fmt: skip
