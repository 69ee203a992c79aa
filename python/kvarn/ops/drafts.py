# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Speculative decoding: what follows a step of drafts."""

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
    """Move the accepted tokens of a step together, in place: what speculative decoding keeps of a tree of drafts.

    A step's tokens of sequence b lie at positions ``cache_lengths[b]`` and on. Afterwards the token at position
    ``cache_lengths[b] + i`` is what new token ``accepted[b, i]`` was: keys, values and scales as they are stored. What
    lies behind the accepted tokens stays, and counts no more once the lengths say so. One launch, which a CUDA graph
    may hold: lists are read on the device.

    Parameters
    ----------
    collection : KV cache collection
        With the lengths from before the step.
    layer : int or None
        None: all layers.
    accepted : int32 array-like [B, M] or [T]
        The new tokens that stay, by their number in the sequence's step, 0 to n - 1, in ascending order: a path of the
        tree from its root on. A list ends before its first entry that is no such number, such as -1. [T]: the list of
        sequence b stands from ``row_offsets[b]`` on.
    row_offsets : uint32 or int32 array-like [B + 1]
        Of the step: sequence b has ``row_offsets[b + 1] - row_offsets[b]`` new tokens.
    """
    operands = (collection, accepted, row_offsets)
    if layer is not None:
        operands = (*operands, layer_of(collection, layer, "kv.ops.commit"))
    _COMMIT(operands, (), schedule, stream)


# --- trees -----------------------------------------------------------------------------------------


def with_tree(
    seen: tuple[Any, ...], tree: Any, collection: Any, query: Any, offsets: Any, title: str
) -> tuple[Any, ...]:
    """(mask, window, chunk) of an attention whose own tokens form a tree, of ``seen``, the one without.

    ``offsets``: the row offsets, or None of a padded batch.
    """
    mask, window, chunk = seen
    rows = checks.shape_of(query, f"{title}: query")[:-2]
    bits = _as_words(tree, rows, title)
    made = masks.tree(int(bits.shape[-1]), offsets is None)
    own = (bits, *(() if offsets is None else (offsets,)), collection.cache_lengths)
    other, *arrays = mask if isinstance(mask, tuple) and mask else (mask,)
    if isinstance(other, str):
        if arrays:
            return seen  # which is refused as any mask of this form
        (_, name), (_, span) = checks.masked(other, window, chunk, title)
        named = None if name == "causal" else masks.named(name, span)  # the bits say all of it
        return (made if named is None else named & made, *own), None, None
    if not callable(other):
        return seen
    both = other & made if isinstance(other, masks.Mask) else masks.Mask(other) & made
    return (both, *arrays, *own), window, chunk


def _as_words(tree: Any, rows: tuple[int, ...], title: str) -> Any:
    """Bits of every row as words of 32: one of 64 is two."""
    shape = checks.shape_of(tree, f"{title}: tree")
    if shape == rows and str(getattr(tree, "dtype", "")).rpartition(".")[2] in ("int64", "uint64"):
        wide, word = tree[..., None], "int32"
        return wide.view(sys.modules["torch"].int32 if is_torch(type(tree)) else word)
    if shape[:-1] != rows or not shape[-1]:
        wanted = ", ".join(map(str, rows))
        raise ValueError(f"{title}: tree must be int32 [{wanted}, W], or uint64 [{wanted}], got shape {list(shape)}")
    return tree
