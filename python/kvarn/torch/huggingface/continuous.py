# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""transformers' continuous batching, ``generate_batch``, by kvarn in its own pages.

Layers that see all tokens are appended to and read in place. transformers keeps the keys of a sliding window in a ring,
which a chunk of a prompt overwrites while its first queries still need it: of those layers transformers writes and
gathers the keys, and kvarn attends to what it gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvarn import ops
from kvarn.caches import ForeignPages, RaggedMHAOperand

# transformers takes a name with "flash" in it for an implementation that needs no mask and gets the cache's indices.
NAME = "kvarn_flash"
FIRST = (5, 23)  # the first version of transformers whose cache has allocators, the parts of it that this module reads
_FULL = "full_attention"
_step: tuple[Any, dict[str, Any]] = (None, {})  # the indices of the step in progress, and its collections by layer type


def use_in_generate_batch(model: Any) -> Any:
    """Make a model's ``generate_batch`` attend by kvarn; ``set_attn_implementation`` undoes it.

    Parameters
    ----------
    model : transformers.PreTrainedModel

    Returns
    -------
    transformers.PreTrainedModel
        The model.

    Raises
    ------
    RuntimeError
        With a version of transformers before 5.23.
    """
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < FIRST:
        raise RuntimeError(f"kvarn: generate_batch needs transformers 5.23 or later, got {version}: use sdpa")
    # Not set_attn_implementation, which loads a library of FlashAttention for every such name.
    model.config._attn_implementation = NAME
    return model


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: dict[str, Any], given: dict[str, Any]
) -> torch.Tensor:
    """Store the step's keys and values and attend to all: [1, T, Hq, D].

    Parameters
    ----------
    module : Module
        ``layer_idx`` names the layer.
    query : Tensor [1, Hq, T, D]
    key, value : Tensor [1, H, T, D]
        The step's tokens, one sequence after another.
    how : dict
        ``scale``, ``softcap`` and ``sinks`` of ``kv.ops.attention``.
    given : dict
        What continuous batching gives to every layer: the cache, its indices and the offsets of sequences.
    """
    cache: PagedAttentionCache = given["cache"]
    if given.get("block_table") is not None:
        raise NotImplementedError("kvarn: generate_batch gave a block table, which it does for FlashAttention alone")
    allocator = cache.layer_to_allocator[module.layer_idx]
    rows, offsets = [_rows(x) for x in (query, key, value)], given["cu_seq_lens_q"].int()
    if allocator.layer_type == _FULL:
        pages, layer = _pages(cache, allocator, offsets, given), allocator.layer_indices.index(module.layer_idx)
        ops.append(pages, layer, rows[1], rows[2], offsets)
        return ops.attention(pages, layer, rows[0], offsets, **how)[None]
    options = dict(given)  # update() writes to it
    keys, values = cache.update(key, value, module.layer_idx, options)
    starts = options["cu_seq_lens_k"].int()
    operands = [RaggedMHAOperand(_rows(x), starts) for x in (keys, values)]
    return ops.attention(*operands, rows[0], offsets, window=allocator.sliding_window, **how)[None]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] as [T, H, D]."""
    return x[0].transpose(0, 1).contiguous()


def _pages(cache: PagedAttentionCache, allocator: Any, offsets: torch.Tensor, given: dict[str, Any]) -> ForeignPages:
    """The pages of all layers of an allocator, with the tables of a step, made once per step."""
    global _step
    step, kind = given["read_index"], allocator.layer_type
    if _step[0] is not step:
        _step = step, {}
    if kind in _step[1]:
        return _step[1][kind]
    size, block = allocator.tokens_per_page, allocator.block_physical_stride
    slots, starts = given["read_index"][allocator.index], given["cu_seq_lens_k"][kind].int()
    longest = given["max_length_k"][kind]
    if not slots.numel():  # nothing was cached before: the slots that are written are all
        slots, starts = given["write_index"][allocator.index], offsets
    firsts = torch.arange(0, max(longest, 1), size, device=slots.device)
    # Columns past a sequence's end name any page: the last slot stands for those past the last sequence's.
    at = (starts[:-1, None] + firsts).clamp(max=slots.numel() - 1)
    table = (slots[at] // block).int()
    lengths = starts.diff() - offsets.diff()
    heads, dim, layers = allocator.num_key_value_heads, allocator.head_dim, len(allocator.layer_indices)
    blocks = cache.cache_tensor.view(allocator.cache_dtype).view(-1, layers, 2, size, heads, dim)
    made = ForeignPages(
        blocks, lengths, table, dims="NL2PHD", max_seq_length=_bucket(given["max_length_q"]),
        max_cache_length=table.shape[1] * size,
    )  # fmt: skip
    _step[1][kind] = made
    return made


def _bucket(tokens: int) -> int:
    """A power of two above a number of new tokens, so that few programs serve all steps."""
    return 1 if tokens == 1 else 1 << (tokens - 1).bit_length()


__all__ = ["NAME", "PagedAttentionCache", "attend", "use_in_generate_batch"]
