# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn as the attention of a Hugging Face model, over a paged cache.

    import kvarn.torch.huggingface as kvhf
    model.set_attn_implementation("kvarn")
    model.generate(**inputs, past_key_values=kvhf.PagedCache(model.config, batch_size=4, max_length=2048))

Importing the module registers ``"kvarn"`` with transformers' interfaces of attention and of its masks. Keys and values
of a :class:`PagedCache` stay in pages: a layer's ``update`` only notes the new ones, and the attention that follows
appends and reads them. Without a cache, attention runs over the keys and values as the model gives them. Tokens that a
2-D attention mask leaves out are neither stored nor computed, wherever the padding is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

import kvarn.torch  # noqa: F401 (operations that torch can record)
from kvarn import ops
from kvarn.caches import LayoutTensorMHAOperand, PagedKVCacheCollection, RaggedMHAOperand
from kvarn.dialect import layout

NAME = "kvarn"


# --- masks ---------------------------------------------------------------------------------------


class Mask(NamedTuple):
    """What a model's layers of one kind see, in place of a mask of a value a score.

    Attributes
    ----------
    padding : bool Tensor [B, S] or None
        Which of the step's tokens there are; None: all.
    window, chunk : int or None
        As of ``kv.ops.attention``.
    """

    padding: torch.Tensor | None
    window: int | None = None
    chunk: int | None = None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Mask:
    """transformers' interface of masks: a :class:`Mask` for a causal one with a window or chunks."""
    window, chunk = _shape_of(mask_function)
    padding = None
    # A step of one token has no padding: what generate gives a sequence that has ended is computed like any other.
    if attention_mask is not None and q_length > 1:
        padding = attention_mask[:, -q_length:].bool()
        if padding.all():
            padding = None
    return Mask(padding, window, chunk)


def _shape_of(function: Any) -> tuple[int | None, int | None]:
    """Window and chunk of one of transformers' mask functions; NotImplementedError for anything but causal ones."""
    window = chunk = None
    causal = False
    for part in _parts(function):
        name = getattr(part, "__qualname__", repr(part))
        values = dict(zip(part.__code__.co_freevars, part.__closure__ or (), strict=True))
        if name == "causal_mask_function":
            causal = True
        elif name.startswith("sliding_window_overlay."):
            window = int(values["sliding_window"].cell_contents)
        elif name.startswith("chunked_overlay."):
            chunk = int(values["chunk_size"].cell_contents)
            padding = values["left_padding"].cell_contents
            if isinstance(padding, torch.Tensor) and padding.any():
                raise NotImplementedError(
                    "kvarn: a mask of chunks needs prompts of one length, or padding on the right"
                )
        else:
            raise NotImplementedError(
                f"kvarn: the model's mask must be causal, with or without a sliding window or chunks, got {name}: "
                'use attn_implementation="sdpa" for this model'
            )
    if not causal:
        raise NotImplementedError("kvarn: the model's mask must be causal, got one without a causal part")
    return window, chunk


def _parts(function: Any) -> list[Any]:
    """The mask functions that one is the intersection of."""
    if getattr(function, "__qualname__", "").startswith("and_masks."):
        (cell,) = function.__closure__
        return [part for f in cell.cell_contents for part in _parts(f)]
    return [function]


# --- attention -----------------------------------------------------------------------------------


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface of attention.

    Parameters
    ----------
    query : Tensor [B, Hq, S, D]
    key, value : Tensor [B, H, S, D]
        Of the step's new tokens.
    attention_mask : Mask or None
    dropout : float
        Must be 0.
    scaling, softcap : float, optional
    sliding_window : int, optional
    s_aux : Tensor [Hq], optional
        Sinks.

    Returns
    -------
    tuple
        Tensor [B, S, Hq, D], zeros where the mask has no token; and None.
    """
    if dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise RuntimeError("kvarn: attention has no derivative: call the model under torch.no_grad(), in eval mode")
    if options.get("position_bias") is not None:
        raise NotImplementedError("kvarn: attention takes no position_bias")
    if attention_mask is None:
        attention_mask = Mask(None, sliding_window)
    if not isinstance(attention_mask, Mask):
        raise NotImplementedError(
            f"kvarn: the attention mask must be of two dimensions or None, got {type(attention_mask).__name__}"
        )
    if query.shape[-1] != value.shape[-1]:
        raise NotImplementedError(
            f"kvarn: query and value must have one head size, got {query.shape[-1]} and {value.shape[-1]}"
        )
    how: dict[str, Any] = {
        "scale": scaling,
        "window": attention_mask.window,
        "chunk": attention_mask.chunk,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    layer = getattr(key, "kvarn_layer", None)
    if layer is not None:
        return layer.attend(query, key, value, attention_mask.padding, how), None
    rows = Rows.of(query, attention_mask.padding)
    operands = [rows.operand(x) for x in (key, value)]
    return rows.spread(ops.attention(*operands, rows.packed(query), rows.offsets, **how)), None


class Rows:
    """The tokens of a step one after the other, without those that are padding.

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
        """Of a step's [B, H, S, D]."""
        batch, tokens = x.shape[0], x.shape[2]
        if padding is None:
            offsets = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=x.device)
            return cls(batch, tokens, None, offsets)
        offsets = torch.zeros(batch + 1, dtype=torch.int32, device=x.device)
        offsets[1:] = padding.sum(1).cumsum(0)
        return cls(batch, tokens, padding.flatten().nonzero().squeeze(1), offsets)

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, S, D] as [T, H, D]."""
        rows = x.transpose(1, 2).reshape(self.batch * self.tokens, x.shape[1], x.shape[3])
        return rows if self.index is None else rows[self.index]

    def operand(self, x: torch.Tensor) -> Any:
        """[B, H, S, D] as keys or values of attention."""
        if self.index is None:
            return LayoutTensorMHAOperand(x.transpose(1, 2).contiguous())
        return RaggedMHAOperand(self.packed(x).contiguous(), self.offsets)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] as [B, S, H, D]."""
        if self.index is not None:
            found = x.new_zeros((self.batch * self.tokens, *x.shape[1:]))
            found[self.index] = x
            x = found
        return x.reshape(self.batch, self.tokens, *x.shape[1:])


# --- the cache -----------------------------------------------------------------------------------


class PagedLayer(CacheLayerMixin):
    """A layer of a :class:`PagedCache`."""

    is_sliding = False

    def __init__(self, cache: PagedCache, number: int) -> None:
        super().__init__()
        self._cache, self._number = cache, number
        self.seen, self._waits = 0, False  # tokens, padding counted; whether attention has still to come

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Note the new keys and values, [B, H, S, D], for the attention that follows; gives them back."""
        if self._waits:
            raise RuntimeError(
                "PagedCache: no attention read the keys and values of the last step from their pages: call "
                f'model.set_attn_implementation("{NAME}"); a model that changes keys after the cache cannot use it'
            )
        self.is_initialized = self._waits = True
        key_states.kvarn_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(self, query: Any, key: Any, value: Any, padding: Any, how: dict[str, Any]) -> torch.Tensor:
        """Append and attend."""
        rows, collection = self._cache.step(self._number, query, padding)
        ops.append(collection, self._number, rows.packed(key), rows.packed(value), rows.offsets)
        out = ops.attention(collection, self._number, rows.packed(query), rows.offsets, **how)
        self.seen, self._waits = self.seen + rows.tokens, False
        return rows.spread(out)

    def get_seq_length(self) -> int:
        """Tokens of a sequence so far, padding counted."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.max_length

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.seen, self._waits = 0, False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("PagedCache: beams are not supported: they would share pages that are written")


class PagedCache(Cache):
    """A cache of transformers whose keys and values lie in kvarn's pages.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Gives the layers, the KV heads and the head size.
    batch_size : int
        Sequences B.
    max_length : int
        Longest sequence, padding counted.
    page_size : int
        Tokens of a page.
    pages : int, optional
        Pages of the pool, the null page 0 not counted; default: as many as B sequences of ``max_length`` fill. Pages
        are given to sequences as they grow.
    dtype : torch.dtype, optional
        Of the stored keys and values; default: the model's. An 8-bit float type saturates, or is scaled:
    granularity : int, optional
        Elements that share a scale of an 8-bit type, float32; default: no scales.
    device : torch.device, optional

    Attributes
    ----------
    sequences : int
        B.
    blocks : Tensor [pages + 1, 2, L, page_size, H, D]
    lengths : int32 Tensor [B]
        Tokens of each sequence, without padding, of all steps but the last.
    table : int32 Tensor [B, columns]
        Page ids.

    Notes
    -----
    For inference, with greedy search or sampling: beams share keys, and pages are written in place.
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
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        super().__init__(layers=[PagedLayer(self, i) for i in range(config.num_hidden_layers)])
        for name, given in (("batch_size", batch_size), ("max_length", max_length), ("page_size", page_size)):
            if not isinstance(given, int) or given < 1:
                raise ValueError(f"PagedCache: {name} must be a positive integer, got {given!r}")
        columns = math.ceil(max_length / page_size)
        pages = batch_size * columns if pages is None else pages
        self.max_length, self.page_size, self.sequences = max_length, page_size, batch_size
        shape = (pages + 1, 2, config.num_hidden_layers, page_size, heads, size)
        dtype = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
        self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        self.scales = None
        if granularity is not None:
            granules = math.ceil(size / granularity)
            self.scales = torch.ones((*shape[:-1], granules), dtype=torch.float32, device=device)
        self._quantized = {} if granularity is None else {"quantization_granularity": granularity}
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        shape = (batch_size, layout.lookup_columns(max_length, page_size))
        self.table = torch.zeros(shape, dtype=torch.int32, device=device)
        self._rows: Rows | None = None
        self._collection: Any = None
        self._collections: dict[Any, Any] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        for layer in self.layers:
            layer.reset()
        self.lengths.zero_()
        self.table.zero_()
        self._free = list(range(self.blocks.shape[0] - 1, 0, -1))
        self._columns = self._longest = 0  # columns of the table that name pages; tokens before the step
        self._begun: set[int] = set()  # layers that the step has reached
        self._offsets: torch.Tensor | None = None  # of the step that has begun

    def step(self, layer: int, query: torch.Tensor, padding: Any) -> tuple[Rows, PagedKVCacheCollection]:
        """The rows and the collection of the step that a layer is at; a layer that comes again begins the next."""
        if self._offsets is None or layer in self._begun:
            self._begin(query, padding)
        self._begun.add(layer)
        assert self._rows is not None
        return self._rows, self._collection

    def _begin(self, query: torch.Tensor, padding: Any) -> None:
        if query.shape[0] != self.sequences:
            raise ValueError(f"PagedCache: made for {self.sequences} sequences, got a batch of {query.shape[0]}")
        if self._offsets is not None:
            ops.increment_cache_lengths(self.lengths, self._offsets)
            assert self._rows is not None
            self._longest += self._rows.tokens
        tokens = query.shape[2]
        longest = self._longest + tokens
        if longest > self.max_length:
            raise ValueError(f"PagedCache: max_length is {self.max_length}, got {longest} tokens: make it larger")
        self._grow(math.ceil(longest / self.page_size))
        if padding is None and self._rows is not None and self._rows.index is None and self._rows.tokens == tokens:
            pass  # the rows of the step before
        else:
            self._rows = Rows.of(query, padding)
        self._offsets = self._rows.offsets
        self._begun = set()
        # Few collections serve all steps: a call of an operation looks its collection's numbers up.
        bound = min(1 << max(longest - 1, self.page_size - 1).bit_length(), self.max_length)
        key = tokens, bound
        if key not in self._collections:
            self._collections[key] = PagedKVCacheCollection(
                self.blocks, self.lengths, self.table, tokens, bound, self.scales, **self._quantized
            )
        self._collection = self._collections[key]

    def _grow(self, columns: int) -> None:
        """Give every sequence pages for so many columns of the table."""
        for column in range(self._columns, columns):
            if len(self._free) < self.sequences:
                raise RuntimeError(
                    f"PagedCache: the pool of {self.blocks.shape[0] - 1} pages is full at {column} pages a sequence"
                )
            given = [self._free.pop() for _ in range(self.sequences)]
            self.table[:, column] = torch.tensor(given, dtype=torch.int32, device=self.table.device)
        self._columns = max(columns, self._columns)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)

__all__ = ["NAME", "Mask", "PagedCache", "PagedLayer", "attention"]
