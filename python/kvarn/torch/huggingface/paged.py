# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A transformers cache with keys and values in kvarn's pages."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kvarn import ops
from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect import layout

from .given import Rows, check_tensor, read
from .masks import Mask, one_run

_OWN = "use the model's own cache (leave past_key_values out)"
_NO_TENSORS = f"PagedCache: keys and values are in pages, not in tensors of a layer: {_OWN}"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SHARES = "DummyLayer"  # a layer of transformers' caches that reads another layer's keys, or has none
_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)


class PagedLayer(CacheLayerMixin):
    """A layer of a :class:`PagedCache`."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: PagedCache, number: int) -> None:
        super().__init__()
        self._cache, self._number = cache, number

    @property
    def keys(self) -> Any:
        """Refused: keys and values are not tensors of a layer."""
        raise NotImplementedError(_NO_TENSORS)

    @keys.setter
    def keys(self, given: Any) -> None:
        """Ignored: transformers initialises a layer with None."""

    values = keys

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record the new keys and values, [B, H, S, D], for the following attention, and return them."""
        self._cache.note(self._number, key_states, value_states)
        self.is_initialized = True
        key_states.kvarn_layer = value_states.kvarn_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(self, query: Any, key: Any, value: Any, mask: Any, how: dict[str, Any]) -> torch.Tensor:
        """Append the new tokens and attend: [B, S, Hq, D]."""
        if getattr(value, "kvarn_layer", None) is not self:
            raise NotImplementedError(
                "PagedCache: the model gives attention other values than it gave the cache, which stores each once: "
                + _OWN
            )
        return self._cache.attend(self._number, query, key, value, mask, how)

    def failed(self) -> None:
        """Undo a step that raised an error."""
        self._cache.failed(self._number)

    def get_seq_length(self) -> int:
        """Tokens of a sequence so far, including padding."""
        return self._cache.tokens_of(self._number)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.max_length

    get_max_cache_shape = get_max_length


class PagedCache(Cache):
    """A transformers cache with keys and values in kvarn's pages.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Defines the layers, the KV heads and the head size, which must be equal in all layers. Every layer has
        attention, or shares the keys of an earlier one.
    batch_size : int
        Sequences B.
    max_length : int
        Length of the longest sequence, including padding.
    page_size : int
        Tokens per page.
    pages : int, optional
        Pages of the pool without the null page 0; by default enough for B sequences of ``max_length``. Pages are
        allocated to sequences as they grow.
    dtype : torch.dtype, optional
        Of the stored keys and values; default: the model's. An 8-bit float type saturates, or is scaled:
    granularity : int, optional
        Elements per float32 scale of an 8-bit type; default: no scales.
    device : torch.device, optional

    Attributes
    ----------
    sequences : int
        B.
    blocks : Tensor [pages + 1, 2, L, page_size, H, D]
    lengths : int32 Tensor [B]
        Tokens of each sequence, without padding, from all steps but the last.
    table : int32 Tensor [B, columns]
        Page ids.

    Notes
    -----
    For inference, with greedy search or sampling: beams share keys, and pages are written in place. Tokens masked by a
    mask of two dimensions are not stored. A copy (``copy.deepcopy``, pickle) has its own pages.

    A refused step changes nothing; a valid step may follow.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        max_length: int,
        *,
        page_size: int = 16,
        pages: int | None = None,
        dtype: torch.dtype | None = None,
        granularity: int | None = None,
        device: Any = None,
    ) -> None:
        config = config.get_text_config(decoder=True)
        own = _layers_of(config)
        kinds, self._windows = [type(layer) for layer in own], [getattr(x, "sliding_window", None) for x in own]
        heads, size = _heads_of(config)
        super().__init__(layers=[k() if k.__name__ == _SHARES else PagedLayer(self, i) for i, k in enumerate(kinds)])
        batch_size = _positive(batch_size, "batch_size")
        max_length, page_size = _positive(max_length, "max_length"), _positive(page_size, "page_size")
        columns = math.ceil(max_length / page_size)
        pages = batch_size * columns if pages is None else _positive(pages, "pages")
        if pages < batch_size:
            raise ValueError(f"PagedCache: pages must be at least one for each of {batch_size} sequences, got {pages}")
        of_model = getattr(config, "dtype", None) or torch.get_default_dtype()
        of_model = getattr(torch, of_model, of_model) if isinstance(of_model, str) else of_model
        dtype = _dtype_of(of_model if dtype is None else dtype, granularity)
        self.max_length, self.page_size, self.sequences = max_length, page_size, batch_size
        shape = (pages + 1, 2, len(kinds), page_size, heads, size)
        self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        self.scales = None
        if granularity is not None:
            granules = math.ceil(size / _positive(granularity, "granularity"))
            self.scales = torch.ones((*shape[:-1], granules), dtype=torch.float32, device=device)
        self._quantized = {} if granularity is None else {"quantization_granularity": granularity}
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        shape = (batch_size, layout.lookup_columns(max_length, page_size))
        self.table = torch.zeros(shape, dtype=torch.int32, device=device)
        self._there = torch.ones((batch_size, max_length), dtype=torch.bool, device=device)  # False: not stored
        self._rows: Rows | None = None
        self._collections: dict[Any, Any] = {}
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        # A collection contains addresses, which are invalid for a copy; masks belong to a finished step.
        return {**self.__dict__, "_collections": {}, "_how": []}

    def reset(self) -> None:
        """Drop all tokens; the memory stays allocated."""
        self.lengths.zero_()
        self.table.zero_()
        self._there.fill_(True)
        self._free = list(range(self.blocks.shape[0] - 1, 0, -1))
        self._columns = self._seen = 0  # columns of the table with pages; tokens of finished steps
        self._padded = False  # whether some token is not stored
        self._forget_step()

    def _forget_step(self) -> None:
        self._begun: set[int] = set()  # layers that the step has reached
        self._step: tuple[int, int] | None = None  # the parameters of the current step's collection
        self._waits: int | None = None  # the layer whose attention is pending
        self._inside = False  # whether that attention has started the step
        self._how: list[tuple[Any, dict[str, Any]]] = []  # the step's masks, with their keywords

    # --- a step ----------------------------------------------------------------------------------

    def note(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Record a layer's keys and values of a step, before its attention."""
        waits = self._waits
        if waits is not None:
            self.failed(layer)
            raise RuntimeError(
                f"PagedCache: no attention read the keys and values of layer {waits} from their pages: call "
                f'model.set_attn_implementation("kvarn"). If that was called, the model changes cached keys, '
                f"or has attention of its own: {_OWN}"
            )
        shape = tuple(self.blocks.shape[4:])
        for name, x in (("keys", key), ("values", value)):
            if (x.shape[1], x.shape[3]) != shape:
                self.failed(layer)
                raise NotImplementedError(
                    f"PagedCache: keys and values must have the {shape[0]} heads of {shape[1]} that the pages have, "
                    f"got {name} of {x.shape[1]} heads of {x.shape[3]}: {_OWN}"
                )
        self._waits = layer

    def failed(self, layer: int) -> None:
        """Undo a step that raised an error in a layer."""
        if self._inside or layer not in self._begun:
            self._forget_step()
        self._waits, self._inside = None, False

    def attend(self, layer: int, query: Any, key: Any, value: Any, mask: Any, how: dict[str, Any]) -> torch.Tensor:
        """Append a layer's new keys and values, if any, and attend to all stored ones."""
        new, tokens = self._waits == layer, query.shape[2]
        if new:
            if self._step is None or layer in self._begun:
                self._begin(query, mask)
            self._begun.add(layer)
            self._inside = True
        rows = self._rows
        assert rows is not None
        if tokens != rows.tokens or layer not in self._begun:
            raise NotImplementedError(
                f"PagedCache: a layer that shares keys must have the queries of the whole step, {rows.tokens} per "
                f"sequence, got {tokens}: {_OWN}"
            )
        window, says = self._windows[layer], isinstance(mask, Mask) and bool(mask.window or mask.chunk)
        if window and self._seen >= window and not says and not isinstance(mask, torch.Tensor):
            raise NotImplementedError(
                f"PagedCache: the model's mask must say that layer {layer} has a window: its own cache drops all but "
                f"{window - 1} tokens, and this one drops none: {_OWN}"
            )
        if rows.empty:
            out = query.new_zeros((rows.batch, tokens, query.shape[1], query.shape[3]))
        else:
            seen, collection = self._keywords(mask), self._collection()
            if new:
                ops.append(collection, layer, rows.packed(key), rows.packed(value), rows.offsets)
            out = rows.spread(ops.attention(collection, layer, rows.packed(query), rows.offsets, **seen, **how))
        self._waits, self._inside = None, False
        return out

    def _begin(self, query: torch.Tensor, mask: Any) -> None:
        """Start the next step; nothing changes before it is certain to fit."""
        batch, tokens = query.shape[0], query.shape[2]
        if batch != self.sequences:
            raise ValueError(f"PagedCache: made for {self.sequences} sequences, got a batch of {batch}")
        seen = self._seen + (self._rows.tokens if self._step is not None and self._rows is not None else 0)
        end = seen + tokens
        if end > self.max_length:
            raise ValueError(f"PagedCache: max_length is {self.max_length}, got {end} tokens: make it larger")
        columns = math.ceil(end / self.page_size)
        have = self._columns + len(self._free) // self.sequences
        if columns > have:
            raise RuntimeError(
                f"PagedCache: the pool of {self.blocks.shape[0] - 1} pages is full at {have} pages per sequence"
            )
        padding = mask.there(seen, end) if isinstance(mask, Mask) and not mask.complete(end) else None
        if padding is not None and padding.all():
            padding = None
        self._settle()
        self._grow(columns)
        self._padded = self._padded or padding is not None
        if self._padded:
            self._there[:, seen:end] = True if padding is None else padding
        if padding is not None or self._rows is None or self._rows.index is not None or self._rows.tokens != tokens:
            self._rows = Rows.of(query, padding)
        # Bucketed, so that few collections serve all steps: calls of operations cache per collection.
        self._step = tokens, min(1 << max(end - 1, self.page_size - 1).bit_length(), self.max_length)

    def _settle(self) -> None:
        """Count the tokens of the current step as cached."""
        if self._step is not None:
            assert self._rows is not None
            ops.increment_cache_lengths(self.lengths, self._rows.offsets)
            self._seen += self._rows.tokens
        self._forget_step()

    def _collection(self) -> PagedKVCacheCollection:
        """The collection of the current step."""
        assert self._step is not None
        if self._step not in self._collections:
            self._collections[self._step] = PagedKVCacheCollection(
                self.blocks, self.lengths, self.table, *self._step, self.scales, **self._quantized
            )
        return self._collections[self._step]

    def _grow(self, columns: int) -> None:
        """Allocate pages to every sequence up to a number of table columns."""
        for column in range(self._columns, columns):
            given = [self._free.pop() for _ in range(self.sequences)]
            self.table[:, column] = torch.tensor(given, dtype=torch.int32, device=self.table.device)
        self._columns = max(columns, self._columns)

    # --- masks over stored tokens ----------------------------------------------------------------

    def _keywords(self, mask: Any) -> dict[str, Any]:
        """The keywords of ``kv.ops.attention`` for a mask of the current step."""
        for known, keywords in self._how:
            if known is mask:
                return keywords
        found = self._read(mask)
        self._how.append((mask, found))
        return found

    def _read(self, mask: Any) -> dict[str, Any]:
        assert self._rows is not None
        tokens = self._rows.tokens
        end = self._seen + tokens
        there = self._there[:, :end]
        if isinstance(mask, bool):
            self._all_stored()
            return {"mask": "causal" if mask else "null"}
        if isinstance(mask, Mask):
            if (mask.queries, mask.keys, mask.q_offset, mask.kv_offset) == (tokens, end, self._seen, 0):
                known = mask.there(0, end)
                same = (known is not None and known.equal(there)) if self._padded else mask.complete(end)
                if same and (not self._padded or not (mask.window or mask.chunk) or one_run(there)):
                    return mask.named()
            mask = mask.seen()
        check_tensor(mask, tokens, end, _OWN)
        if not self._padded:
            return read(mask, self._seen)
        shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if (shown & ~there[:, None, None] & there[:, None, self._seen :, None]).any():
            self._all_stored()
        return read(mask, self._seen, (~there).int().argsort(dim=1, stable=True).int())

    def _all_stored(self) -> None:
        if self._padded:
            raise ValueError(
                "PagedCache: the mask shows tokens that an earlier mask hid, which are not stored: pass "
                f"attention_mask [B, S] of all tokens so far, or {_OWN}"
            )

    # --- transformers' cache interface -----------------------------------------------------------

    def tokens_of(self, layer: int) -> int:
        """Tokens of a sequence in a layer, including padding."""
        if layer not in self._begun:
            return self._seen
        assert self._rows is not None
        return self._seen + self._rows.tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens of every sequence, including padding; their pages stay."""
        self._settle()
        count = -operator.index(tokens_to_remove)
        if not 0 <= count <= self._seen:
            raise ValueError(
                f"PagedCache: crop takes minus the number of tokens to drop, from {-self._seen} to 0, "
                f"got {tokens_to_remove}"
            )
        first = self._seen - count
        gone = self._there[:, first : self._seen]
        self.lengths -= gone.sum(1, dtype=torch.int32)
        gone.fill_(True)
        self._seen = first

    def __iter__(self) -> Any:
        raise NotImplementedError(_NO_TENSORS)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("PagedCache: beams are not supported: they would share pages that are written")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError(f"PagedCache: sequences cannot be repeated: make it for all of them, or {_OWN}")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise NotImplementedError(f"PagedCache: sequences cannot be removed: {_OWN}")


# --- parameters of a cache -------------------------------------------------------------------------


def _positive(given: Any, name: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"PagedCache: {name} must be a positive integer, got {given!r}")
    return given


def _dtype_of(dtype: Any, granularity: Any) -> torch.dtype:
    known = _FLOATS + _NARROW
    if dtype not in known:
        names = ", ".join(str(d) for d in known)
        raise TypeError(f"PagedCache: dtype must be one of {names}, got {dtype!r}")
    if granularity is not None and dtype not in _NARROW:
        raise ValueError(f"PagedCache: granularity is for the scales of an 8-bit dtype, got {dtype}")
    return dtype


def _heads_of(config: Any) -> tuple[int, int]:
    """KV heads and head size, equal in all layers."""
    found = {_heads_of_layer(layer) for layer in getattr(config, "per_layer_config", None) or (config,)}
    text = " and ".join(f"{heads} heads of {size}" for heads, size in sorted(found, key=repr))
    if len(found) != 1 or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in next(iter(found))):
        raise ValueError(
            "PagedCache: all layers must have one number of KV heads and one head size, got "
            f"{type(config).__name__} with {text}: {_OWN}"
        )
    return found.pop()


def _heads_of_layer(config: Any) -> tuple[Any, Any]:
    all_heads = getattr(config, "num_attention_heads", None)
    heads, size = getattr(config, "num_key_value_heads", None) or all_heads, getattr(config, "head_dim", None)
    if size is None and isinstance(all_heads, int) and isinstance(getattr(config, "hidden_size", None), int):
        size = config.hidden_size // all_heads
    return heads, size


def _layers_of(config: Any) -> list[Any]:
    """The layers of the model's own cache."""
    layers = DynamicCache(config=config).layers
    kinds = [type(layer) for layer in layers]
    for number, kind in enumerate(kinds):
        if kind.__name__ not in ("DynamicLayer", "DynamicSlidingWindowLayer", _SHARES):
            raise ValueError(
                "PagedCache: every layer must have keys and values and nothing else, got "
                f"{type(config).__name__}, whose layer {number} has a {kind.__name__}: {_OWN}"
            )
    if not kinds:
        raise ValueError(f"PagedCache: the model must have layers of attention, got {type(config).__name__}: {_OWN}")
    return list(layers)


__all__ = ["PagedCache", "PagedLayer"]
