# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pages of other libraries, used in place: strides of tokens and heads are part of the cache's spec.

A layout is a word with one letter per dimension of a buffer, from the slowest to the fastest, as shapes are written:

    N pages    P tokens of a page    H heads    D elements of a head    L layers    2 keys, then values
    S token slots of all pages (N * P)    C a head's key followed by its value (2 * D)    W all heads of a token (H * D)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvarn.dialect import layout
from kvarn.dialect.layout import PAGED
from kvarn.runtime.buffers import BufferView, view
from kvarn.runtime.overlap import of_buffer, share

from . import checks
from .collections import PagedKVCacheCollection
from .pools import AS_MANY_AS_FIT, Pool, with_sequences
from .views import PagedKVCache

_NAMES = {
    "N": "pages", "P": "page_size", "H": "heads", "D": "head_size", "L": "layers", "2": "2", "S": "slots",
    "C": "2 * head_size", "W": "heads * head_size",
}  # fmt: skip
_CANONICAL = "LNPHD"
_VLLM = {"NHD": "2NPHD", "HND": "2NHPD", "packed": "NHPC"}


class ForeignPages(PagedKVCacheCollection):
    """Pages in another library's layout, as a collection: every operation runs on them in place.

    Use the constructors below, or describe a layout by the letters of ``dims``. Buffers may have any strides, so a
    permuted view of another order works; only the elements of a head must be contiguous. Buffers are not copied, nor
    read when a collection is made.

    ``cache_lengths`` are the tokens cached *before* the step's own; subtract those from lengths that include them
    (vLLM's ``seq_lens``). Such a pool has no null page: an invalid table entry reads the last page, which has no effect
    on results, since tokens past the lengths are masked.

    Parameters
    ----------
    data : array-like, or a pair of them
        A buffer of keys and values; or a pair (keys, values) of buffers of equal shapes and strides, with neither ``2``
        nor ``C`` in dims. One buffer without ``2`` and ``C`` has latent keys only (MLA, one head).
    cache_lengths : uint32 or int32 array-like [B]
    lookup_table : uint32 or int32 array-like [B, columns]
        Page ids, one row per sequence.
    dims : str
        One letter per dimension, such as ``"N2PHD"``: N pages, P tokens of a page, H heads, D elements of a head, L
        layers, 2 keys and values, S slots of all pages, C = 2 * D, W = H * D.
    page_size : int, optional
        P, if dims have S.
    num_heads : int, optional
        H, if dims have W.
    max_seq_length, max_cache_length : int, optional
        As in :class:`PagedKVCacheCollection`; by default the capacity of the table. Pass the largest number of new
        tokens if it is known: attention uses decode kernels only if it is small.
    scales : array-like, or a pair of them, optional
        Quantization scales of an 8-bit pool: a pair (of keys, of values) of [N, P, H, G], packed except for the pages,
        with L in front if dims have it; one buffer for latent rows. Each scale covers cdiv(D, G) consecutive elements.

    Raises
    ------
    ValueError, TypeError
        With the requirement and the actual value: extents, overlapping or unaligned strides, dtypes, devices.
    """

    def __init__(
        self,
        data: Any,
        cache_lengths: Any,
        lookup_table: Any,
        dims: str,
        *,
        page_size: int | None = None,
        num_heads: int | None = None,
        max_seq_length: int | None = None,
        max_cache_length: int | None = None,
        scales: Any = None,
    ) -> None:
        self.scales, self.dims, self.given_extents = scales, dims, (page_size, num_heads)
        self._pool = _pool_of(data, dims, {"P": page_size, "H": num_heads}, scales)
        most = (AS_MANY_AS_FIT if n is None else n for n in (max_seq_length, max_cache_length))
        self._with_sequences(data, cache_lengths, lookup_table, *most)

    def _with_sequences(self, data: Any, cache_lengths: Any, lookup_table: Any, new: Any, most: Any) -> None:
        """Set the tables of sequences, and all that depends on them."""
        self.blocks, self.cache_lengths, self.lookup_table = data, cache_lengths, lookup_table
        spec, views, at = self._pool
        self._bind(*with_sequences((spec, views, dict(at)), cache_lengths, lookup_table, new, most, name="keys"))

    def _made_of(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        page_size, num_heads = self.given_extents
        options = {
            "page_size": page_size, "num_heads": num_heads, "max_seq_length": self.max_seq_length,
            "max_cache_length": self.max_cache_length, "scales": self.scales,
        }  # fmt: skip
        return (self.blocks, self.cache_lengths, self.lookup_table, self.dims), options, self._views.values()

    def with_tables(
        self,
        cache_lengths: Any,
        lookup_table: Any,
        *,
        max_seq_length: int | None = None,
        max_cache_length: int | None = None,
    ) -> ForeignPages:
        """As in :class:`PagedKVCacheCollection`."""
        made = object.__new__(ForeignPages)
        made.scales, made.dims, made.given_extents, made._pool = self.scales, self.dims, self.given_extents, self._pool
        made._with_sequences(self.blocks, cache_lengths, lookup_table, *self._bounds(max_seq_length, max_cache_length))
        return made

    @property
    def key(self) -> PagedKVCache:
        """The keys of layer 0."""
        return self.get_key_cache(0)

    @property
    def value(self) -> PagedKVCache:
        """The values of layer 0."""
        return self.get_value_cache(0)

    @classmethod
    def flashinfer(
        cls, data: Any, cache_lengths: Any, lookup_table: Any, layout: str = "NHD", **options: Any
    ) -> ForeignPages:
        """FlashInfer's paged KV cache.

        Parameters
        ----------
        data : array-like, or a pair of them
            [N, 2, P, H, D] for layout NHD or [N, 2, H, P, D] for HND; or a pair (keys, values) of [N, P, H, D] or
            [N, H, P, D].
        cache_lengths : uint32 or int32 array-like [B]
            Cached tokens of each sequence.
        lookup_table : uint32 or int32 array-like [B, columns]
            Page ids, one row per sequence: FlashInfer's ``indices`` between two entries of ``indptr``.
        layout : {"NHD", "HND"}
        **options
            ``max_seq_length`` and ``max_cache_length`` of the class.
        """
        return cls._named(data, cache_lengths, lookup_table, layout, {"NHD": "N2PHD", "HND": "N2HPD"}, options)

    @classmethod
    def vllm(
        cls, data: Any, cache_lengths: Any, lookup_table: Any, layout: str = "NHD", **options: Any
    ) -> ForeignPages:
        """vLLM's paged KV cache of a layer.

        Parameters
        ----------
        data : array-like, or a pair of them
            [2, N, P, H, D] for layout NHD or [2, N, H, P, D] for HND; from vLLM 0.26 on [N, H, P, 2 D], packed, also as
            a permuted view of [N, P, H, 2 D]; [N, P, D] for layout MLA. NHD and HND may be a pair (keys, values), as in
            :meth:`flashinfer`, which also takes the cache of vLLM's FlashInfer backend.
        cache_lengths, lookup_table, **options
            As in :meth:`flashinfer`. vLLM's block table is the lookup table; its sequence lengths include the step's
            own tokens, which cache lengths do not.
        layout : {"NHD", "HND", "packed", "MLA"}
        """
        return cls._named(data, cache_lengths, lookup_table, layout, {**_VLLM, "MLA": "NPD"}, options)

    @classmethod
    def sglang(
        cls, data: Any, cache_lengths: Any, lookup_table: Any, page_size: int = 1, **options: Any
    ) -> ForeignPages:
        """SGLang's token pool of a layer.

        Parameters
        ----------
        data : array-like, or a pair of them
            A pair (keys, values) of [slots, H, D], or one buffer [slots, 1, D] of latent keys. Slots past the last
            whole page are not used.
        cache_lengths, **options
            As in :meth:`flashinfer`.
        lookup_table : uint32 or int32 array-like [B, columns]
            With page size 1, the rows of SGLang's ``req_to_token`` (slots); otherwise every page_size-th entry of them,
            divided by the page size.
        page_size : int
        """
        return cls(data, cache_lengths, lookup_table, "SHD", page_size=page_size, **options)

    @classmethod
    def tensorrt_llm(
        cls, data: Any, cache_lengths: Any, lookup_table: Any, layout: str = "HND", **options: Any
    ) -> ForeignPages:
        """TensorRT-LLM's paged KV cache.

        Parameters
        ----------
        data : array-like
            A layer's buffers [N, 2, H, P, D] for layout HND or [N, 2, P, H, D] for NHD, from ``get_buffers`` of its
            cache manager; or the pool of all layers, [N, L, 2, H, P, D] or [N, L, 2, P, H, D].
        cache_lengths, **options
            As in :meth:`flashinfer`.
        lookup_table : uint32 or int32 array-like [B, columns]
            Block ids (``get_batch_cache_indices``), not the pool offsets that TensorRT-LLM's kernels take.
        layout : {"HND", "NHD"}
        """
        layered = "L" if getattr(data, "ndim", 5) == 6 else ""
        words = {"HND": f"N{layered}2HPD", "NHD": f"N{layered}2PHD"}
        return cls._named(data, cache_lengths, lookup_table, layout, words, options)

    @classmethod
    def lmcache(
        cls,
        data: Any,
        cache_lengths: Any,
        lookup_table: Any,
        num_heads: int | None = None,
        layout: str = "KV_2LTD",
        **options: Any,
    ) -> ForeignPages:
        """A pool of LMCache's chunks; a chunk is a page.

        Parameters
        ----------
        data : array-like
            [N, 2, L, T, H * D] for layout KV_2LTD, [N, 2, T, H * D] for KV_2TD, [N, T, 2, H * D] for KV_T2D, with N
            chunks of T tokens; or with a dimension of heads, [..., H, D].
        cache_lengths, **options
            As in :meth:`flashinfer`.
        lookup_table : uint32 or int32 array-like [B, columns]
            Chunk ids of each sequence.
        num_heads : int, optional
            H, for data without a dimension of heads.
        layout : {"KV_2LTD", "KV_2TD", "KV_T2D"}
        """
        heads = "HD" if num_heads is None else "W"
        words = {"KV_2LTD": f"N2LP{heads}", "KV_2TD": f"N2P{heads}", "KV_T2D": f"NP2{heads}"}
        return cls._named(data, cache_lengths, lookup_table, layout, words, {**options, "num_heads": num_heads})

    @classmethod
    def _named(
        cls, data: Any, lengths: Any, table: Any, name: str, words: dict[str, str], options: dict[str, Any]
    ) -> ForeignPages:
        if name not in words:
            *most, last = words
            raise ValueError(f"layout must be {', '.join(most)} or {last}, got {name!r}")
        dims = words[name].replace("2", "") if _is_pair(data) else words[name]
        return cls(data, lengths, table, dims, **options)


def _pool_of(data: Any, dims: str, given: dict[str, int | None], scales: Any) -> Pool:
    """Check the buffers of a pool; ``given`` are the extents by letter that dims do not have."""
    halves = [_canonical(half, name, given) for half, name in _halves(data, dims)]
    key, is_mla = halves[0], len(halves) == 1
    _same(halves)
    strides = _checked(key, is_mla)
    layers, pages, slots, heads, size = key.shape
    found = None if scales is None else _scales(scales, key, is_mla)
    quantized = {} if found is None else {"scale_dtype": found.views[0].dtype, "granularity": found.granularity}
    spec = layout.spec_of(
        PAGED, key.dtype, heads, size, page_size=slots, is_mla=is_mla, strides=strides[2:4], **quantized
    )
    for half, name in zip(halves, ("keys", "values"), strict=False):
        checks.aligned(half, layout.element_alignment(key.dtype, size) * key.dtype.itemsize, name)
    views = {"blocks": key}
    if not is_mla:
        views["values"] = halves[1]
    at = {
        "blocks": key.data, "stride0": strides[1], "num_blocks": pages, "capacity": slots, "num_layers": layers,
        "kv_stride": (halves[-1].data - key.data) // key.dtype.itemsize, "layer_stride": strides[0],
        "lookup_layer_stride": 0,
    }  # fmt: skip
    if found is not None:
        views |= dict(zip(("scales", "value_scales"), found.views, strict=False))
        at |= found.fields
    _apart(views)
    return spec, views, at


class _Scales(NamedTuple):
    """Scales of keys and values: their buffers, elements per scale, and the collection's fields."""

    views: list[BufferView]
    granularity: int
    fields: dict[str, int]


def _scales(scales: Any, key: BufferView, is_mla: bool) -> _Scales:
    """Check the scales of a pool [L, N, P, H, D]."""
    given = list(scales) if _is_pair(scales) else [scales]
    if len(given) != (1 if is_mla else 2):
        raise ValueError(f"scales must be {'one buffer' if is_mla else 'a pair of buffers'}, got {len(given)}")
    views, strides = [], []
    for x in given:
        dims = ("pages", "page_size", "heads", "granules")
        if view(x, name="scales").rank == 5:
            dims = ("layers", *dims)
        buffer, steps = checks.pool(x, "scales", dims, len(dims) - 3, row_major=False)
        if len(dims) == 4:
            buffer, steps = buffer._replace(shape=(1, *buffer.shape), strides=(0, *steps)), (0, *steps)
        granularity = layout.cdiv(key.shape[4], buffer.shape[4])
        if buffer.shape[:4] != key.shape[:4] or layout.cdiv(key.shape[4], granularity) != buffer.shape[4]:
            raise ValueError(
                f"scales must be {list(key.shape[:4])} (layers, pages, page_size, heads) with G for "
                f"cdiv({key.shape[4]}, G) elements each, got {list(buffer.shape)}"
            )
        checks.aligned_granules(buffer, steps, ("layers", *dims[-4:]), 2)
        views.append(buffer)
        strides.append(steps)
    first, last = views[0], views[-1]
    if strides[0] != strides[-1] or first.dtype != last.dtype or (last.data - first.data) % first.dtype.itemsize:
        raise ValueError(
            f"scales of keys and values must have one dtype and the same strides, got {first.dtype.name} {strides[0]} "
            f"and {last.dtype.name} {strides[-1]}"
        )
    names: list[str] = ["scales", "scales_stride0", "scales_kv_stride", "scales_layer_stride"]
    apart = (last.data - first.data) // first.dtype.itemsize
    fields = dict(zip(names, (first.data, strides[0][1], apart, strides[0][0]), strict=True))
    return _Scales(views, layout.cdiv(key.shape[4], first.shape[4]), fields)


def _is_pair(data: Any) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, BufferView)


def _halves(data: Any, dims: str) -> list[tuple[tuple[BufferView, str], str]]:
    """Keys and values: for each a buffer with its dimensions, and its name in messages."""
    _check_dims(dims)
    if _is_pair(data):
        if len(data) != 2:
            raise ValueError(f"data must be one buffer or a pair of keys and values, got {len(data)}")
        if set(dims) & {"2", "C"}:
            raise ValueError(f"dims of a pair of keys and values have no 2 and no C, got {dims!r}")
        return [
            ((_of_dims(checks.pool_view(x, name), dims, name), dims), name)
            for x, name in zip(data, ("keys", "values"), strict=True)
        ]
    whole = _of_dims(checks.pool_view(data, "data"), dims, "data")
    if "C" in dims:
        axis = dims.index("C")
        if whole.shape[axis] % 2:
            raise ValueError(f"data must have keys and values of one size in a row, got a row of {whole.shape[axis]}")
        whole, dims = _split(whole, axis, (2, whole.shape[axis] // 2)), dims.replace("C", "2D")
    if "2" not in dims:
        return [((whole, dims), "data")]
    axis = dims.index("2")
    rest = [i for i in range(whole.rank) if i != axis]
    step = whole.strides[axis] * whole.dtype.itemsize
    halves = [_reordered(whole._replace(data=whole.data + half * step), rest) for half in range(2)]
    return [((h, dims.replace("2", "")), n) for h, n in zip(halves, ("keys", "values"), strict=True)]


def _check_dims(dims: str) -> None:
    good = (
        isinstance(dims, str) and len(set(dims)) == len(dims) and set(dims) <= set(_NAMES)
        and ("S" in dims) != ("N" in dims and "P" in dims) and not ("S" in dims and set(dims) & {"N", "P"})
        and sum(x in dims for x in "DCW") == 1 and not {"2", "C"} <= set(dims) and not {"H", "W"} <= set(dims)
    )  # fmt: skip
    if not good:
        raise ValueError(
            "dims must name each dimension once: N and P (or S), H and D (or C; or W for both; D alone for one head), "
            f"and perhaps L and 2, got {dims!r}"
        )


def _of_dims(buffer: BufferView, dims: str, name: str) -> BufferView:
    """The buffer, after a check that its shape matches its dimensions."""
    wanted = f"{name} must be [{', '.join(_NAMES[x] for x in dims)}]"
    if buffer.rank != len(dims) or ("2" in dims and buffer.shape[dims.index("2")] != 2):
        instead = ""
        if dims.startswith("2N") and buffer.rank == len(dims) and buffer.shape[1] == 2:
            instead = "; ForeignPages.flashinfer takes [pages, 2, ...]"
        raise ValueError(f"{wanted}, got shape {list(buffer.shape)}{instead}")
    if min(buffer.shape) < 1:
        raise ValueError(f"{wanted}, every extent positive, got shape {list(buffer.shape)}")
    return buffer


def _canonical(half: tuple[BufferView, str], name: str, given: dict[str, int | None]) -> BufferView:
    """Keys or values as [L, N, P, H, D]."""
    buffer, dims = half
    for letter, parts, first in (("S", "NP", False), ("W", "HD", True)):
        if letter not in dims:
            continue
        axis, known = dims.index(letter), checks.count(given[parts[0 if first else 1]], _NAMES["H" if first else "P"])
        extent = buffer.shape[axis]
        if known < 1 or extent < known or (first and extent % known):
            raise ValueError(
                f"{name}: {_NAMES[letter]} must be {'a multiple of' if first else 'at least'} "
                f"{'num_heads' if first else 'page_size'} {known}, got {extent}"
            )
        extents = (known, extent // known) if first else (extent // known, known)
        buffer, dims = _split(buffer, axis, extents), dims.replace(letter, parts)
    for letter in "LH":  # a single layer, a single head
        if letter not in dims:
            buffer, dims = buffer._replace(shape=(1, *buffer.shape), strides=(0, *buffer.strides)), letter + dims
    return _reordered(buffer, [dims.index(x) for x in _CANONICAL])


def _split(buffer: BufferView, axis: int, extents: tuple[int, int]) -> BufferView:
    """Split a dimension into two; elements past their product are dropped."""
    stride = buffer.strides[axis]
    shape = (*buffer.shape[:axis], *extents, *buffer.shape[axis + 1 :])
    return buffer._replace(
        shape=shape, strides=(*buffer.strides[:axis], stride * extents[1], stride, *buffer.strides[axis + 1 :])
    )


def _reordered(data: BufferView, axes: Sequence[int]) -> BufferView:
    """Selected dimensions of a buffer, in another order. The view keeps the owner."""
    shape, strides = (tuple(x[i] for i in axes) for x in (data.shape, data.strides))
    return data._replace(shape=shape, strides=strides)


def _same(halves: Sequence[BufferView]) -> None:
    """Check that keys and values have equal strides, so that values are at a fixed distance from keys."""
    key, other = halves[0], halves[-1]
    if key.shape != other.shape or key.dtype != other.dtype:
        raise ValueError(
            f"keys and values must have one shape and dtype, got {key.dtype.name} {list(key.shape)} and "
            f"{other.dtype.name} {list(other.shape)} (layers, pages, page_size, heads, head_size)"
        )
    steps = [tuple(s for s, n in zip(h.strides, h.shape, strict=True) if n > 1) for h in (key, other)]
    if steps[0] != steps[1]:
        raise ValueError(f"keys and values must have the same strides, got {key.strides} and {other.strides}")
    if (other.data - key.data) % key.dtype.itemsize:
        raise ValueError(f"keys and values must lie whole elements apart, got {key.data:#x} and {other.data:#x}")


def _apart(views: dict[str, BufferView]) -> None:
    """Check that keys, values and scales do not share memory: a write to one would change another."""
    named = [({"blocks": "keys"}.get(name, name), v, of_buffer(v)) for name, v in views.items()]
    for (name, a, extent), (other, b, of_other) in itertools.combinations(named, 2):
        if share(extent, of_other, b.data - a.data):
            raise ValueError(
                f"{name} and {other} must not share memory, got elements of {name} from {a.data:#x} on by strides "
                f"{list(a.strides)}, and of {other} from {b.data:#x} on: give each bytes of its own"
            )


def _checked(key: BufferView, is_mla: bool) -> tuple[int, ...]:
    """The strides of [L, N, P, H, D]; dimensions of extent 1 have the stride of a packed buffer."""
    layers, pages, slots, heads, size = key.shape
    if is_mla and heads != 1:
        raise ValueError(
            f"data must hold keys and values (2 or C in dims, or a pair of buffers), or one head of latent keys, got "
            f"{heads} heads"
        )
    if size > 1 and key.strides[4] != 1:
        raise ValueError(f"keys must be contiguous in their last dimension, got strides {list(key.strides)} (elements)")
    layer, page, token, head, _ = key.strides
    head = size if heads == 1 else head
    if slots == 1:  # one row has all heads; page strides are counted in these rows if they are multiples of it
        token = heads * head if pages == 1 or page % (heads * head) == 0 else page
    span = max(slots * token, heads * head)
    page = span if pages == 1 else page
    strides = (max(span, pages * page) if layers == 1 else layer, page, token, head, 1)
    checks.no_overlap(key, strides, "keys")
    if page % token:
        raise ValueError(
            f"keys: the stride of pages must be a multiple of the {token} elements of a token's row, got {page}"
        )
    unit = layout.element_alignment(key.dtype, size)
    for stride, dim in zip(strides, ("layers", "pages"), strict=False):
        if stride % unit:
            raise ValueError(
                f"keys: strides must be multiples of {unit} elements (heads of {size} are read as vectors), got "
                f"{stride} for {dim}"
            )
    return strides
