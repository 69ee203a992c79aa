# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pools of pages or regions with their tables: what caches and collections of every kind check and keep.

A pool's dimensions are a word with a letter for each, slow to fast: N pages or regions, 2 keys and values, L layers,
P token slots, H heads, D elements of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvarn.dialect import layout
from kvarn.dialect.layout import CONTINUOUS, FA3, CacheSpec
from kvarn.dialect.members import CacheMembers
from kvarn.runtime.buffers import BufferView

from . import checks

WRITABLE = ("blocks", "values", "scales", "value_scales")  # the views of what a kernel may write
_NAMES = {"N": "pages", "L": "layers", "P": "page_size", "H": "heads", "D": "head_size"}
_REGIONS = {**_NAMES, "N": "regions", "P": "slots"}


@dataclass(frozen=True)
class KVCacheStaticParams:
    """What a cache stores of each token.

    Parameters
    ----------
    num_heads : int
        KV heads H.
    head_size : int
        Elements of a head D.
    is_mla : bool
        One latent head and no values.
    """

    num_heads: int
    head_size: int
    is_mla: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_size"):
            if checks.count(getattr(self, name), name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.is_mla and self.num_heads != 1:
            raise ValueError(f"num_heads of an MLA cache must be 1, got {self.num_heads}")


class PoolMembers(CacheMembers):
    """What caches and collections keep of their buffers, and say of them."""

    __slots__ = ()
    device: tuple[str, int]
    readonly: bool
    buffers: tuple[Any, ...]
    _at: dict[str, int]
    _fields: tuple[int, ...]
    _words: bytes | None

    def _keep_views(
        self, spec: CacheSpec, views: Mapping[str, BufferView], at: dict[str, int], fields: Iterable[layout.Field]
    ) -> None:
        """Set what caches and collections have in common.

        Parameters
        ----------
        views : mapping
            The buffers by name.
        at : dict of str to int
            The run-time fields by name, of which ``fields`` are a kernel's parameters.
        """
        self._spec, self._at = spec, at
        self._fields = tuple(at[f.name] for f in fields)
        self.device = views["blocks"].device
        self.readonly = any(views[n].readonly for n in WRITABLE if n in views)
        self.buffers = tuple(v.owner for v in views.values())
        self._words = None  # what the native part makes of all of it

    def fields(self) -> tuple[int, ...]:
        """The kernel's parameters, in the order of ``layout.cache_fields``; pointers as integers.

        Those of a collection in the order of ``layout.collection_fields``.
        """
        return self._fields

    @property
    def kv_params(self) -> KVCacheStaticParams:
        """What is stored of each token."""
        return KVCacheStaticParams(self._spec.num_heads, self._spec.head_size, self._spec.is_mla)

    @property
    def batch_size(self) -> int:
        """B, sequences."""
        return self._at["batch"]

    @property
    def num_blocks(self) -> int:
        """N, pages with the null page counted, or regions."""
        return self._at["num_blocks"]


class Pool(NamedTuple):
    """A pool that was checked: its parameters, the views of its buffers by name, and the fields that it gives."""

    spec: CacheSpec
    views: dict[str, BufferView]
    at: dict[str, int]


def pool_of(
    kind: str, dims: str, blocks: Any, scales: Any = None, granularity: int = 1, *, is_mla: bool = False
) -> Pool:
    """Check a pool and its scales, if there are any.

    Parameters
    ----------
    kind : str
    dims : str
        The dimensions of ``blocks``. Scales have G granules in place of the last.
    granularity : int
        Consecutive elements that share a scale.
    is_mla : bool
        Whether these are latent keys; where dims have ``2``, that dimension says it.
    """
    names = {**(_REGIONS if kind == CONTINUOUS else _NAMES), "2": "2" if kind == FA3 else "2 (1 for MLA)"}
    named = tuple(names[x] for x in dims)
    outer = len(dims) - 3
    data, strides = checks.pool(blocks, "blocks", named, outer)
    extents, steps = dict(zip(dims, data.shape, strict=True)), dict(zip(dims, strides, strict=True))
    if "2" in dims:
        is_mla = extents["2"] == 1
        if extents["2"] != 2 and (kind == FA3 or not is_mla):
            wanted = "2 (K and V)" if kind == FA3 else "2 (K and V) or 1 (MLA)"
            raise ValueError(
                f"blocks must have extent {wanted} in dimension {dims.index('2')}, got shape {tuple(data.shape)}"
            )
    checks.aligned(data, 16, "blocks")
    at = {"stride0": steps["N"], "num_blocks": extents["N"], "capacity": extents["P"]}
    if "2" in dims:
        at |= {
            "blocks": data.data, "num_layers": extents.get("L", 0), "lookup_layer_stride": 0,
            "kv_stride": steps["2"], "layer_stride": steps.get("L", 0),
        }  # fmt: skip
    else:
        at["base"] = data.data
    views, described = {"blocks": data}, {}
    if checks.count(granularity, "quantization_granularity") < 1:
        raise ValueError(f"quantization_granularity must be positive, got {granularity}")
    if scales is not None:
        views["scales"], steps = _scales_of(data, scales, granularity, dims, (*named[:-1], "granules"))
        at |= {"scales": views["scales"].data, "scales_stride0": steps["N"]}
        if "2" in dims:
            at |= {"scales_kv_stride": steps["2"], "scales_layer_stride": steps["L"]}
        described = {"scale_dtype": views["scales"].dtype, "granularity": granularity}
    elif granularity != 1:
        raise ValueError(f"quantization_granularity needs scales, got {granularity} without any")
    page_size = 0 if kind == CONTINUOUS else extents["P"]
    spec = layout.spec_of(kind, data.dtype, extents["H"], extents["D"], page_size=page_size, is_mla=is_mla, **described)
    return Pool(spec, views, at)


def _scales_of(
    data: BufferView, scales: Any, granularity: int, dims: str, named: tuple[str, ...]
) -> tuple[BufferView, dict[str, int]]:
    """The view of a pool's scales, and their strides by dimension."""
    outer, size = len(dims) - 3, data.shape[-1]
    buffer, strides = checks.pool(scales, "scales", named, outer, row_major=False)
    expected = (*data.shape[:-1], layout.cdiv(size, granularity))
    if tuple(buffer.shape) != expected:
        raise ValueError(
            f"scales must have shape {expected}: that of blocks with cdiv(head_size {size}, "
            f"quantization_granularity {granularity}) granules last, got {tuple(buffer.shape)}"
        )
    checks.aligned_granules(buffer, strides, named, outer)
    return buffer, dict(zip(dims, strides, strict=True))


def with_sequences(
    pool: Pool,
    cache_lengths: Any,
    lookup_table: Any,
    max_seq_length: Any,
    max_cache_length: Any,
    name: str = "blocks",
) -> Pool:
    """A pool with the tables of sequences: all views and fields of a cache or collection.

    Parameters
    ----------
    max_seq_length, max_cache_length : int
        `AS_MANY_AS_FIT` for what the table has room for.
    name : str
        What to call the pool where buffers lie on different devices.
    """
    spec, views, at = pool
    lengths, _ = checks.table(cache_lengths, "cache_lengths", ("sequences",))
    columns = ("columns",) if spec.paged else ()
    layers = ("layers",) if spec.kind == FA3 else ()
    table, strides = checks.table(lookup_table, "lookup_table", (*layers, "sequences", *columns))
    if layers and table.shape[0] < 1:
        raise ValueError(f"lookup_table must have at least one layer, got shape {tuple(table.shape)}")
    views = {"blocks": views["blocks"], "cache_lengths": lengths, "lookup_table": table, **views}
    checks.same_device((name if key == "blocks" else key, view) for key, view in views.items())
    batch = checks.sequences(lengths, table.shape[len(layers)], "lookup_table")
    longest = _length(max_cache_length, "max_cache_length", table.shape[-1] * spec.page_size)
    if spec.paged:
        checks.table_covers(table.shape[-1], spec.page_size, longest, batch)
    else:
        checks.region_holds(at["capacity"], longest, batch)
    at = at | {
        "lookup": table.data, "lookup_stride": strides[-2] if spec.paged else 1,
        "lookup_columns": table.shape[-1] if spec.paged else 1, "lengths": lengths.data, "batch": batch,
        "max_seq_length": _length(max_seq_length, "max_seq_length", longest), "max_cache_length": longest,
    }  # fmt: skip
    if layers:
        at |= {"num_layers": table.shape[0], "lookup_layer_stride": strides[0]}
    return Pool(spec, views, at)


AS_MANY_AS_FIT: Any = object()


def _length(given: Any, name: str, room: int) -> int:
    return room if given is AS_MANY_AS_FIT else checks.count(given, name)
