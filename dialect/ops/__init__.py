# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The operations of the kv dialect: their classes, and wrapper functions of the same name.

Tier 2, used inside kernels: :mod:`metadata`, :mod:`addressing`, :mod:`access`, :mod:`tiles`, :mod:`tma`; over values
of the whole block :mod:`tile` and :mod:`terms`, and what passes make of those :mod:`staging`, :mod:`tables` and
:mod:`weights`.
Tier 1, used outside kernels: :mod:`operations`, :mod:`rotary`, :mod:`attention`, :mod:`mla`, :mod:`pages`,
:mod:`drafts`, :mod:`ragged`.
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
from .attention import AttentionOp, AttentionPaddedOp, BlockMaskOp, OperandAttentionOp
from .metadata import (
    buffer_operand,
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
from .pages import IndexScoresOp, SelectPagesOp, SelectTokensOp, SummarizePagesOp
from .shared import alloc_shared, load_tile, store_tile
from .sharing import tile_beside
from .staging import take_round, tile_stage
from .terms import tile_terms
from .tile import (
    dot,
    tile_broadcast,
    tile_gather,
    tile_index,
    tile_load,
    tile_load_rows,
    tile_mask,
    tile_reduce,
    tile_scatter,
    tile_store_rows,
)
from .tma import (
    tensor_map,
    tma_expect,
    tma_init_barrier,
    tma_load,
    tma_load_box,
    tma_load_tile,
    tma_prefetch,
    tma_store,
    tma_wait,
    tma_wait_stores,
)
from .trace import trace_mark

__all__ = [
    "AttentionOp",
    "AttentionPaddedOp",
    "BlockMaskOp",
    "IndexScoresOp",
    "MlaAttentionOp",
    "MlaDecompressOp",
    "MlaPrefillChunkOp",
    "MlaPrefillPlanOp",
    "OperandAttentionOp",
    "SelectPagesOp",
    "SelectTokensOp",
    "SummarizePagesOp",
    "alloc_shared",
    "block_ptr",
    "buffer_address",
    "buffer_operand",
    "cache_length",
    "cache_lengths",
    "cast",
    "device_attribute",
    "dot",
    "field",
    "get_row",
    "is_empty",
    "key_cache",
    "load",
    "load_pages",
    "load_raw",
    "load_scale",
    "load_tile",
    "make_cache",
    "make_collection",
    "make_rows",
    "max_context_length",
    "max_prompt_length",
    "num_rows",
    "operand",
    "page",
    "populate",
    "raw_page",
    "row_index",
    "scale_block_ptr",
    "scales_base",
    "store",
    "store_scale",
    "store_tile",
    "take_round",
    "tensor_map",
    "tile_beside",
    "tile_broadcast",
    "tile_gather",
    "tile_index",
    "tile_load",
    "tile_load_rows",
    "tile_mask",
    "tile_reduce",
    "tile_scatter",
    "tile_stage",
    "tile_store_rows",
    "tile_terms",
    "tma_expect",
    "tma_init_barrier",
    "tma_load",
    "tma_load_box",
    "tma_load_tile",
    "tma_prefetch",
    "tma_row",
    "tma_store",
    "tma_wait",
    "tma_wait_stores",
    "trace_mark",
    "value_cache",
]  # fmt: skip
