# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expansions of fused operations: each writes its kernels in the DSL and launches them in place of the operation.

An expansion is a function ``expand(op, at)`` that is declared with :func:`expands`; ``at`` is the :class:`Expansion`,
which traces kernels and records launches. A family with a choice of kernels also declares, by :func:`schedules_of`,
which entries complete a schedule. A module is imported when its operation is first scheduled or expanded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvarn import settings

_MODULES = {
    "kv.append": "append.append", "kv.store_ragged": "append.append", "kv.store_padded": "append.append",
    "kv.project_append": "projection.expansion", "kv.project_append_padded": "projection.expansion",
    "kv.rope_append": "rope.rope_append", "kv.rope": "rope.in_place", "kv.rope_padded": "rope.in_place",
    "kv.qk_norm": "rope.in_place", "kv.rms_norm": "rope.rms_norm",
    "kv.gather": "copies.pages", "kv.copy_pages": "copies.pages", "kv.convert": "copies.convert",
    "kv.radd": "append.updates", "kv.iadd_2m": "append.updates", "kv.increment_cache_lengths": "append.updates",
    "kv.cache_row_offsets": "tables.indices", "kv.remap_sparse_indices": "tables.indices",
    "kv.mla_prefill_plan": "tables.indices",
    "kv.split_prefixes": "tables.prefixes", "kv.commit": "copies.commit",
    "kv.sliced_add": "copies.ragged", "kv.merge_ragged": "copies.ragged", "kv.shift_tokens": "copies.ragged",
    "kv.merge_attention": "copies.ragged", "kv.summarize_pages": "select.pages", "kv.select_pages": "select.pages",
    "kv.index_scores": "select.indexer", "kv.select_tokens": "select.indexer",
    "kv.transfer_pages": "copies.pages",
    "kv.block_mask": "attention.block_mask",
    "kv.attention": "attention.expansion", "kv.attention_padded": "attention.expansion",
    "kv.operand_attention": "attention.expansion",
    "kv.mla_attention": "mla.expansion", "kv.mla_decompress": "mla.expansion", "kv.mla_prefill_chunk": "mla.expansion",
}  # fmt: skip
# Operations with a choice of kernels. Other operations have only entries such as ``threads``, which expansions read.
_CHOSEN = {
    "kv.attention": "attention.entries", "kv.attention_padded": "attention.entries",
    "kv.operand_attention": "attention.entries",
    "kv.mla_attention": "mla.entries", "kv.mla_prefill_chunk": "mla.entries",
    "kv.project_append": "projection.entries", "kv.project_append_padded": "projection.entries",
}  # fmt: skip
_found: dict[str, Callable[..., None]] = {}
_entries: dict[str, Callable[..., dict[str, Any]]] = {}


def expands(*op_names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the expansion of one or more operations."""

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


def schedules_of(*op_names: str) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., dict[str, Any]]]:
    """Declare what completes the schedules of one or more operations: ``entries(op, at, without)``, where passes
    ``without`` will not run.
    """

    def declare(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        _entries.update(dict.fromkeys(op_names, function))
        return function

    return declare


def entries(op_name: str) -> Callable[[Any, Any, Collection[str]], dict[str, Any]] | None:
    """What completes the schedule of an operation; None for one without a choice of kernels."""
    if op_name not in _entries and op_name in _CHOSEN:
        importlib.import_module("." + _CHOSEN[op_name], __name__)
    return _entries.get(op_name)


def found() -> Mapping[str, Callable[..., None]]:
    """The expansions that have been imported or declared so far."""
    return _found


def operations() -> tuple[str, ...]:
    """Names of the operations that have an expansion."""
    return tuple(dict.fromkeys((*_MODULES, *_found)))
