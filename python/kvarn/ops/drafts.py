# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Speculative decoding: the compaction of accepted draft tokens."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from kvarn.dispatch import Operation, Schedule
from kvarn.dsl import masks
from kvarn.runtime.binding import is_torch

from . import checks
from .checks import layer_of


def _check_commit(seen: SimpleNamespace) -> None:
    if len(seen.accepted.shape) != 1:
        checks.array(seen, "accepted", (seen.collection.batch_size, "M"))
        checks.few_enough(seen.accepted.shape, f"{seen.title}: accepted")
    checks.row_table(seen)


_COMMIT = Operation("kv.commit", {}, _check_commit)


def commit(
    collection: Any,
    layer: int | None,
    accepted: Any,
    row_offsets: Any,
    *,
    schedule: Schedule = None,
    stream: Any = None,
) -> None:
    """Move the accepted draft tokens of a step together, in place, after the verification of a tree of drafts.

    The step's tokens of sequence b are at positions ``cache_lengths[b]`` and on. Afterwards position
    ``cache_lengths[b] + i`` has the keys, values and scales of new token ``accepted[b, i]``, as stored. Positions
    behind the accepted tokens are unchanged; the new lengths exclude them. The operation is one launch that reads the
    lists on the device, so a CUDA graph can capture it.

    Parameters
    ----------
    collection : KV cache collection
        With the lengths from before the step.
    layer : int or None
        None: all layers.
    accepted : int32 array-like [B, M] or [T]
        Indices of the accepted tokens among the sequence's new tokens, 0 to n - 1, ascending: a path of the tree from
        its root. A list ends before its first invalid index, such as -1. With shape [T], the list of sequence b starts
        at ``row_offsets[b]``.
    row_offsets : uint32 or int32 array-like [B + 1]
        Row offsets of the step: sequence b has ``row_offsets[b + 1] - row_offsets[b]`` new tokens.
    """
    operands = (collection, accepted, row_offsets)
    if layer is not None:
        operands = (*operands, layer_of(collection, layer, "kv.ops.commit"))
    _COMMIT(operands, (), schedule, stream)


# --- trees -----------------------------------------------------------------------------------------


def with_tree(
    seen: tuple[Any, ...], tree: Any, collection: Any, query: Any, offsets: Any, title: str
) -> tuple[Any, ...]:
    """(mask, window, chunk) of an attention over a tree of new tokens; ``seen`` are these arguments without the tree.

    ``offsets``: the row offsets, or None for a padded batch.
    """
    mask, window, chunk = seen
    rows = checks.shape_of(query, f"{title}: query")[:-2]
    bits = _as_words(tree, rows, title)
    made = masks.tree(int(bits.shape[-1]), offsets is None)
    own = (bits, *(() if offsets is None else (offsets,)), collection.cache_lengths)
    other, *arrays = mask if isinstance(mask, tuple) and mask else (mask,)
    if isinstance(other, str):
        if arrays:
            return seen  # the mask's own check refuses it
        (_, name), (_, span) = checks.masked(other, window, chunk, title)
        named = None if name == "causal" else masks.named(name, span)  # the tree's bits imply causality
        return (made if named is None else named & made, *own), None, None
    if not callable(other):
        return seen
    both = other & made if isinstance(other, masks.Mask) else masks.Mask(other) & made
    return (both, *arrays, *own), window, chunk


def _as_words(tree: Any, rows: tuple[int, ...], title: str) -> Any:
    """The bits of every row as 32-bit words; a 64-bit element becomes two."""
    shape = checks.shape_of(tree, f"{title}: tree")
    if shape == rows and str(getattr(tree, "dtype", "")).rpartition(".")[2] in ("int64", "uint64"):
        wide, word = tree[..., None], "int32"
        return wide.view(sys.modules["torch"].int32 if is_torch(type(tree)) else word)
    if shape[:-1] != rows or not shape[-1]:
        wanted = ", ".join(map(str, rows))
        raise ValueError(f"{title}: tree must be int32 [{wanted}, W], or uint64 [{wanted}], got shape {list(shape)}")
    return tree
