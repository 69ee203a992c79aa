# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expansions of tier-1 operations: each writes its kernels in the DSL and launches them from the operation's place.

An expansion is a function ``expand(op, at)`` declared with :func:`expands`; ``at`` is the :class:`Expansion` that
traces kernels and records launches. Modules are imported when their operation is met.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from kvarn import settings

_MODULES = {
    "kv.append": "append", "kv.store_ragged": "append", "kv.store_padded": "append",
    "kv.project_append": "projection", "kv.project_append_padded": "projection",
    "kv.rope_append": "rope", "kv.rope": "rope_in_place", "kv.rope_padded": "rope_in_place",
    "kv.qk_norm": "rope_in_place", "kv.rms_norm": "norm",
    "kv.gather": "copies", "kv.copy_pages": "copies", "kv.convert": "convert",
    "kv.radd": "updates", "kv.iadd_2m": "updates", "kv.increment_cache_lengths": "updates",
    "kv.cache_row_offsets": "indices", "kv.remap_sparse_indices": "indices", "kv.mla_prefill_plan": "indices",
    "kv.split_prefixes": "prefixes", "kv.commit": "drafts",
    "kv.sliced_add": "ragged", "kv.merge_ragged": "ragged", "kv.shift_tokens": "ragged",
    "kv.merge_attention": "ragged", "kv.summarize_pages": "pages", "kv.select_pages": "pages",
    "kv.index_scores": "indexer", "kv.select_tokens": "indexer",
    "kv.transfer_pages": "copies",
    "kv.block_mask": "block_mask",
    "kv.attention": "attention", "kv.attention_padded": "attention", "kv.operand_attention": "attention",
    "kv.mla_attention": "mla", "kv.mla_decompress": "mla", "kv.mla_prefill_chunk": "mla",
}  # fmt: skip
_found: dict[str, Callable[..., None]] = {}


def expands(*op_names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the expansion of operations."""

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        settings.declared(function)
        for name in op_names:
            _found[name] = function
        return function

    return declare


def expansion(op_name: str) -> Callable[[Any, Any], None] | None:
    """The expansion of an operation, or None."""
    if op_name not in _found and op_name in _MODULES:
        importlib.import_module("." + _MODULES[op_name], __name__)
    return _found.get(op_name)


def found() -> Mapping[str, Callable[..., None]]:
    """The expansions that have been imported or declared."""
    return _found


def operations() -> tuple[str, ...]:
    """Names of the operations that have an expansion."""
    return tuple(dict.fromkeys((*_MODULES, *_found)))
