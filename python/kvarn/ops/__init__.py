# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The built-in cache operations, on the caller's buffers: torch, CuPy, JAX and NumPy arrays, or any DLPack object.

The arguments are a cache or collection, then data, then lengths or offsets. In shapes, T is the number of new tokens in
a batch, B of sequences, H of KV heads, Hq of query heads, D the head size, G the number of granules (elements with one
scale) of a head. Operations on NumPy buffers run on the CPU and return when they are done; on CUDA buffers they run on
the buffers' GPU, in the caller's current stream. An operation is compiled at the first call with new element types,
head shapes or attributes (the disk cache keeps the code); numbers of tokens and sequences do not matter. All arguments
are checked before anything runs. After the first call with its shapes an operation allocates nothing and can be
captured in a CUDA graph.
"""

from . import forms
from .convert import convert
from .copies import copy_pages, gather, transfer_pages
from .drafts import commit
from .indexer import index_scores, select_tokens
from .indices import MlaPrefillPlan, cache_row_offsets, mla_prefill_plan, remap_sparse_indices
from .masks import block_mask
from .mla import mla_attention, mla_decompress, mla_prefill, mla_prefill_chunk
from .pages import select_pages, summarize_pages
from .projection import project_append, project_append_padded
from .ragged import merge_attention, merge_ragged, shift_tokens, sliced_add
from .reads import attention, attention_padded
from .rotary import IndexHeads, qk_norm, rope, rope_padded
from .show import print_cache
from .updates import iadd_2m, increment_cache_lengths, radd, rms_norm
from .writes import append, rope_append, store_padded, store_ragged

__all__ = [
    "IndexHeads",
    "MlaPrefillPlan",
    "append",
    "attention",
    "attention_padded",
    "block_mask",
    "cache_row_offsets",
    "commit",
    "convert",
    "copy_pages",
    "gather",
    "iadd_2m",
    "increment_cache_lengths",
    "index_scores",
    "merge_attention",
    "merge_ragged",
    "mla_attention",
    "mla_decompress",
    "mla_prefill",
    "mla_prefill_chunk",
    "mla_prefill_plan",
    "print_cache",
    "project_append",
    "project_append_padded",
    "qk_norm",
    "radd",
    "remap_sparse_indices",
    "rms_norm",
    "rope",
    "rope_append",
    "rope_padded",
    "select_pages",
    "select_tokens",
    "shift_tokens",
    "sliced_add",
    "store_padded",
    "store_ragged",
    "summarize_pages",
    "transfer_pages",
]

for _name in __all__:  # adds the sections that all operations share; NamedTuples document themselves
    if not isinstance(globals()[_name], type):
        forms.document(globals()[_name])
