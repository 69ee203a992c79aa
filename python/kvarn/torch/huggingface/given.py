# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over a model's own keys and values, with the masks of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.utils.import_utils import is_tracing

from kvarn import ops
from kvarn.caches import LayoutTensorMHAOperand, RaggedMHAOperand
from kvarn.torch import library

from .masks import Mask, one_run

# --- the tokens of a step ------------------------------------------------------------------------


class Rows:
    """The tokens of a step in one ragged batch, without padding.

    Attributes
    ----------
    offsets : int32 Tensor [B + 1]
    batch, tokens : int
        B and S of the padded step.
    """

    def __init__(self, batch: int, tokens: int, index: torch.Tensor | None, offsets: torch.Tensor) -> None:
        self.batch, self.tokens, self.index, self.offsets = batch, tokens, index, offsets

    @classmethod
    def of(cls, x: torch.Tensor, padding: torch.Tensor | None) -> Rows:
        """The rows of a step's [B, H, S, D]."""
        batch, tokens = x.shape[0], x.shape[2]
        if padding is None:
            offsets = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=x.device)
            return cls(batch, tokens, None, offsets)
        offsets = torch.zeros(batch + 1, dtype=torch.int32, device=x.device)
        offsets[1:] = padding.sum(1).cumsum(0)
        return cls(batch, tokens, padding.flatten().nonzero().squeeze(1), offsets)

    @property
    def empty(self) -> bool:
        """Whether there are no tokens."""
        return self.index is not None and not self.index.numel()

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, S, D] as [T, H, D]."""
        rows = x.transpose(1, 2).reshape(self.batch * self.tokens, x.shape[1], x.shape[3])
        return rows if self.index is None else rows[self.index]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] as [B, S, H, D]."""
        if self.index is not None:
            found = x.new_zeros((self.batch * self.tokens, *x.shape[1:]))
            found[self.index] = x
            x = found
        return x.reshape(self.batch, self.tokens, *x.shape[1:])


# --- tensor masks --------------------------------------------------------------------------------


def _seen(b: Any, h: Any, q: Any, k: Any, seen: Any, first: Any) -> Any:
    return seen[b, h, q - first[0], k] != 0


def _added(score: Any, b: Any, h: Any, q: Any, k: Any, bias: Any, first: Any) -> Any:
    return score + bias[b, h, q - first[0], k]


def _seen_at(b: Any, h: Any, q: Any, k: Any, seen: Any, first: Any, at: Any) -> Any:
    return seen[b, h, at[b, q] - first[0], at[b, k]] != 0


def _added_at(score: Any, b: Any, h: Any, q: Any, k: Any, bias: Any, first: Any, at: Any) -> Any:
    return score + bias[b, h, at[b, q] - first[0], at[b, k]]


def read(mask: torch.Tensor, first: int, at: torch.Tensor | None = None) -> dict[str, Any]:
    """The keywords of ``kv.ops.attention`` for a tensor mask of transformers.

    Parameters
    ----------
    mask : Tensor [B or 1, H or 1, queries, keys]
        Booleans, or floats that are added to the scores. (Array indices are clamped, so an extent of 1 broadcasts.)
    first : int
        Position of the mask's first query.
    at : int32 Tensor [B, keys], optional
        Column of the mask for each position of the cache. Default: the position.
    """
    arrays = (torch.tensor([first], dtype=torch.int32, device=mask.device), *(() if at is None else (at,)))
    if mask.dtype == torch.bool:
        return {"mask": (_seen if at is None else _seen_at, mask.contiguous().view(torch.int8), *arrays)}
    return {"mask": "null", "score": (_added if at is None else _added_at, mask.float().contiguous(), *arrays)}


def check_tensor(mask: Any, queries: int, keys: int, instead: str = 'use attn_implementation="sdpa"') -> None:
    """Check a tensor mask; ``instead`` ends the error message."""
    if not isinstance(mask, torch.Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        found = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise NotImplementedError(
            f"kvarn: the attention mask must be None, or a Tensor of booleans or floats, got {found}: {instead}"
        )
    if mask.dim() != 4 or tuple(mask.shape[2:]) != (queries, keys):
        raise NotImplementedError(
            f"kvarn: the attention mask must have the shape [B, H, {queries}, {keys}] (H may be 1), "
            f"got {list(mask.shape)}: {instead}"
        )


def chosen(mask: Mask | torch.Tensor | bool, indices: torch.Tensor) -> torch.Tensor:
    """The mask of queries that see only the keys ``indices``, [B, S, K], among those that ``mask`` shows."""
    tensor = mask.seen() if isinstance(mask, Mask) else mask
    if isinstance(tensor, bool) or tensor.dim() != 4:
        raise NotImplementedError('kvarn: indices need a mask of four dimensions: use attn_implementation="eager"')
    keep = torch.zeros((*indices.shape[:2], tensor.shape[-1]), dtype=torch.bool, device=indices.device)
    keep = keep.scatter_(-1, indices.long(), True)[:, None]
    return tensor & keep if tensor.dtype == torch.bool else tensor.masked_fill(~keep, torch.finfo(tensor.dtype).min)


def _recorded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    named: str,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over dense keys, with a tensor mask or a named mask with its window and chunk."""
    how = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if mask is not None:
        return _dense(query, key, value, read(mask, key.shape[2] - query.shape[2]), how)
    name, window, chunk = named.split()
    return _dense(query, key, value, {"mask": name, "window": int(window) or None, "chunk": int(chunk) or None}, how)


# A single operator while torch traces: score functions, mask functions and operands cannot be part of a graph.
_operator = torch.library.custom_op("kvarn::attention_of_given", _recorded, mutates_args=())


@_operator.register_fake
def _like(
    query: torch.Tensor, key: Any, value: Any, mask: Any, named: Any, scale: Any, softcap: Any, sinks: Any
) -> Any:
    batch, heads, tokens, size = query.shape
    return query.new_empty((batch, tokens, heads, size))


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: dict[str, Any], how: dict[str, Any]
) -> torch.Tensor:
    rows = Rows.of(query, None)
    operands = [LayoutTensorMHAOperand(x.transpose(1, 2).contiguous()) for x in (key, value)]
    return rows.spread(ops.attention(*operands, rows.packed(query).contiguous(), rows.offsets, **seen, **how))


# --- attention -----------------------------------------------------------------------------------


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask | torch.Tensor | bool, how: dict[str, Any]
) -> torch.Tensor:
    """Attention over all keys [B, H, keys, D].

    Parameters
    ----------
    query : Tensor [B, Hq, queries, D]
    key, value : Tensor [B, H, keys, D]
        The head sizes of keys and values may differ.
    mask : Mask, Tensor or bool
        A bool says whether attention is causal, with queries at the first positions.
    how : dict
        ``scale``, ``softcap`` and ``sinks`` of ``kv.ops.attention``.

    Returns
    -------
    Tensor [B, queries, Hq, D of the values]
        Undefined for padding queries.
    """
    size = value.shape[-1]
    query, key, value = _matched(query, key, value)
    queries, keys = query.shape[2], key.shape[2]
    if mask is True and keys > queries:  # transformers' sdpa drops the unwritten part of a static cache
        key, value = key[:, :, :queries], value[:, :, :queries]
    elif mask is True and keys < queries:  # it aligns keys with the first query, not the last
        mask = torch.ones((1, 1, queries, keys), dtype=torch.bool, device=key.device).tril()
    padding, named = None, {}
    if isinstance(mask, bool):
        named = {"mask": "causal" if mask else "null"}
    elif isinstance(mask, Mask) and (mask.queries, mask.keys) == (query.shape[2], key.shape[2]):
        padding, named = _by_name(mask)
    tensor = None
    if not named:
        tensor = mask.seen() if isinstance(mask, Mask) else mask
        check_tensor(tensor, query.shape[2], key.shape[2])
    if torch.compiler.is_compiling() or library.recording():
        text = f"{named['mask']} {named.get('window') or 0} {named.get('chunk') or 0}" if named else ""
        out = _operator(query, key, value, tensor, text, how["scale"], how["softcap"], how["sinks"])
    elif padding is not None:
        out = _ragged(query, key, value, padding, {**named, **how})
    else:
        seen = named if tensor is None else read(tensor, key.shape[2] - query.shape[2])
        out = _dense(query, key, value, seen, how)
    return out[..., :size]


def _ragged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor, how: dict[str, Any]
) -> torch.Tensor:
    """Attention among the tokens that are not padding."""
    rows = Rows.of(query, padding)
    if rows.empty:
        return query.new_zeros(query.shape).transpose(1, 2)
    operands = [RaggedMHAOperand(rows.packed(x).contiguous(), rows.offsets) for x in (key, value)]
    return rows.spread(ops.attention(*operands, rows.packed(query).contiguous(), rows.offsets, **how))


def _matched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Query, keys and values with one batch size, one type and one head size."""
    given = [query, key, value]
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # like sdpa
        given = [x.to(torch.get_autocast_dtype(kind)) if x.dtype in _CAST else x for x in given]
    batch, size = max(x.shape[0] for x in given), max(x.shape[3] for x in given)
    given = [x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in given]
    return [x if x.shape[3] == size else F.pad(x, (0, size - x.shape[3])) for x in given]


_CAST = (torch.float32, torch.float16, torch.bfloat16)


def _by_name(mask: Mask) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """The present tokens (None: all), and the keywords of the mask over them; no keywords if it has no name."""
    end = mask.kv_offset + mask.keys
    last = mask.q_offset + mask.queries == end and not (mask.chunk and mask.kv_offset % mask.chunk)
    named = mask.named() if last or not mask.causal else {}
    # Chunks start at the first present token, even if the keys begin later.
    there = mask.there(0 if mask.chunk else mask.kv_offset, end)
    if there is None:
        return None, named
    if is_tracing(there):  # its values are unknown
        return None, {}
    if there.all():
        return None, named
    if mask.queries != mask.keys or mask.q_offset or mask.kv_offset:
        return None, {}
    return (there, named) if not (mask.window or mask.chunk) or one_run(there) else (None, {})


__all__ = ["Rows", "attention", "check_tensor", "chosen", "read"]
