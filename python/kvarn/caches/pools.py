# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pools of pages or regions with their tables: the checks and members shared by caches and collections.

The dimensions of a pool are a word with one letter per dimension, from the slowest to the fastest: N pages or regions,
2 keys and values, L layers, P token slots, H heads, D elements of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvarn.dialect import layout, records
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CONTINUOUS, FA3, PAGED, CacheSpec
from kvarn.dialect.members import CacheMembers
from kvarn.dialect.records import Record
from kvarn.runtime.binding import is_torch
from kvarn.runtime.buffers import BufferView

from . import checks

AS_MANY_AS_FIT: Any = "as many as fit"  # in place of a bound: the table's capacity; a constant for torch.compile
WRITABLE = ("blocks", "values", "scales", "value_scales")  # views of buffers that kernels may write
# Names of the dimensions of pools by kind and word (added kinds use those of paged pools), and of lookup tables.
_POOLS = {
    (PAGED, "NPHD"): ("pages", "page_size", "heads", "head_size"),
    (PAGED, "N2LPHD"): ("pages", "2 (1 for MLA)", "layers", "page_size", "heads", "head_size"),
    (CONTINUOUS, "NPHD"): ("regions", "slots", "heads", "head_size"),
    (CONTINUOUS, "N2LPHD"): ("regions", "2 (1 for MLA)", "layers", "slots", "heads", "head_size"),
    (FA3, "2NPHD"): ("2", "pages", "page_size", "heads", "head_size"),
}
_TABLES = {CONTINUOUS: ("sequences",), FA3: ("layers", "sequences", "columns")}
_ROWS = ("sequences", "columns")
Pool = tuple[CacheSpec, dict[str, BufferView], dict[str, int]]  # parameters, buffers by name, fields by name


@dataclass(frozen=True)
class KVCacheStaticParams:
    """What a cache stores per token.

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
            checks.positive(getattr(self, name), name)
        if self.is_mla and self.num_heads != 1:
            raise ValueError(f"num_heads of an MLA cache must be 1, got {self.num_heads}")


class PoolMembers(CacheMembers):
    """Members of caches and collections that describe their buffers."""

    __slots__ = ()
    device: tuple[str, int]
    readonly: bool
    buffers: tuple[Any, ...]
    _at: dict[str, int]
    _fields: tuple[int, ...]
    _words: tuple[bytes, tuple[Any, int] | None] | None
    _memory: tuple[Any, int] | None

    def _keep_views(
        self, spec: CacheSpec, views: Mapping[str, BufferView], at: dict[str, int], fields: Iterable[layout.Field]
    ) -> None:
        """Set the common members of caches and collections.

        Parameters
        ----------
        views : mapping
            The buffers by name.
        at : dict of str to int
            The run-time fields by name; ``fields`` selects a kernel's parameters among them.
        """
        self._spec, self._at = spec, at
        self._fields = tuple(at[f.name] for f in fields)
        self.device = views["blocks"].device
        self.readonly = any(views[n].readonly for n in WRITABLE if n in views)
        self.buffers = tuple(v.owner for v in views.values())
        self._words = None  # the native form of these fields, made on demand
        self._memory = memory_of(views["blocks"])

    def fields(self) -> tuple[int, ...]:
        """The kernel's parameters, in the order of ``layout.cache_fields``; pointers as integers.

        For a collection, in the order of ``layout.collection_fields``.
        """
        memory = self._memory
        if memory is not None and memory[0].data_ptr() != memory[1]:
            raise moved(self, memory[0])
        return self._fields

    @property
    def kv_params(self) -> KVCacheStaticParams:
        """What is stored per token."""
        return KVCacheStaticParams(self._spec.num_heads, self._spec.head_size, self._spec.is_mla)

    @property
    def batch_size(self) -> int:
        """B, the number of sequences."""
        return self._at["batch"]

    @property
    def num_blocks(self) -> int:
        """N, the number of pages, including the null page, or of regions."""
        return self._at["num_blocks"]


def memory_of(pool: BufferView) -> tuple[Any, int] | None:
    """The tensor and address by which a change of a pool's memory is detected; None for other arrays.

    A tensor can be given other memory, or none, by ``untyped_storage().resize_``, ``set_`` or ``.data``, as in FSDP.
    """
    if not is_torch(type(pool.owner)):
        return None
    return pool.owner, pool.data or -1  # -1 for an address of 0, which a recorded (fake) tensor has


def moved(thing: Any, tensor: Any) -> ValueError:
    """The error for a cache, collection or operand over a tensor whose memory has changed."""
    now = "elsewhere" if tensor.data_ptr() else "without memory"
    return ValueError(
        f"the memory of the {type(thing).__name__} is gone: its tensor has been resized, set anew or freed since it "
        f"was made, and is {now}; make another one over the tensor"
    )


def pool_of(
    kind: str, dims: str, blocks: Any, scales: Any = None, granularity: int = 1, *, is_mla: bool = False,
    record: Record | str | None = None,
) -> Pool:  # fmt: skip
    """Check a pool and its scales, if any.

    Parameters
    ----------
    kind : str
    dims : str
        The dimensions of ``blocks``. Scales have G granules in place of the last.
    granularity : int
        Consecutive elements that share a scale.
    is_mla : bool
        Whether these are latent keys; if dims have ``2``, the extent of that dimension decides.
    record : Record or name, optional
        What a token and head stores; by default the elements of ``blocks``, with ``granularity`` of them per scale.
    """
    of = None if record is None else records.named(record)
    names, outer = _POOLS.get((kind, dims)) or _POOLS[PAGED, dims], len(dims) - 3
    data, strides = checks.pool(blocks, "blocks", names, outer)
    if of is not None:
        granularity = _of_record(data, scales, granularity, of)
    dtype = data.dtype if of is None else of.elements
    _whole_steps(dtype, data, strides)
    strides = tuple(dtype.elements(s) for s in strides)
    shape, pages = data.shape, dims.index("N")
    slots, heads, size = *shape[-3:-1], dtype.elements(shape[-1])
    at = {"stride0": strides[pages], "num_blocks": shape[pages], "capacity": slots}
    half, layer = dims.find("2"), dims.find("L")
    if half < 0:
        at["base"] = data.data
    else:
        is_mla = shape[half] == 1
        if shape[half] != 2 and (kind == FA3 or not is_mla):
            wanted = "2 (K and V)" if kind == FA3 else "2 (K and V) or 1 (MLA)"
            raise ValueError(f"blocks must have extent {wanted} in dimension {half}, got shape {tuple(shape)}")
        at["blocks"], at["kv_stride"], at["lookup_layer_stride"] = data.data, strides[half], 0
        at["num_layers"], at["layer_stride"] = (0, 0) if layer < 0 else (shape[layer], strides[layer])
    checks.aligned(data, 16, "blocks")
    views, scale_dtype = {"blocks": data}, None
    checks.positive(granularity, "quantization_granularity")
    if scales is not None:
        zero = of is not None and of.zero
        buffer, strides = _scales_of(data, scales, (size, granularity, zero), (*names[:-1], "granules"))
        at["scales"], at["scales_stride0"] = buffer.data, strides[pages]
        if half >= 0:
            at["scales_kv_stride"], at["scales_layer_stride"] = strides[half], strides[layer]
        views["scales"], scale_dtype = buffer, buffer.dtype
        if of is not None and of.scale != scale_dtype:
            raise ValueError(f"scales of {of} must be {of.scale}, got {scale_dtype.name}")
    elif granularity != 1:
        raise ValueError(f"quantization_granularity needs scales, got {granularity} without any")
    spec = layout.spec_of(
        kind, dtype, heads, size, page_size=0 if kind == CONTINUOUS else slots, is_mla=is_mla,
        scale_dtype=scale_dtype, granularity=granularity, zero=of is not None and of.zero,
        rotation=0 if of is None else of.rotation,
    )  # fmt: skip
    return spec, views, at


def _whole_steps(dtype: DType, data: BufferView, strides: tuple[int, ...]) -> None:
    """Check that heads and strides of a buffer are whole elements."""
    if any(n % dtype.step_units for n in (data.shape[-1], *strides[:-1])):
        raise ValueError(
            f"rows and strides of {dtype.name} must be multiples of {dtype.step_units} bytes, {dtype.step} elements, "
            f"got rows of {data.shape[-1]} and strides {tuple(strides[:-1])}"
        )


def _of_record(data: BufferView, scales: Any, granularity: int, record: Record) -> int:
    """The elements per scale of a record, if the buffers are those of one."""
    if data.dtype != record.elements.unit:
        what = "bytes that elements share" if record.packed else "its elements"
        raise ValueError(f"blocks of {record} must be {record.elements.unit.foreign}, {what}, got {data.dtype.name}")
    if (scales is not None) != record.quantized:
        needs = "needs its scales" if record.quantized else "has no scales"
        raise ValueError(f"{record} {needs}, got {'none' if scales is None else 'some'}")
    if granularity not in (1, record.group):
        raise ValueError(f"quantization_granularity is that of the record, {record.group}, got {granularity}")
    return record.group


def _scales_of(
    data: BufferView, scales: Any, groups: tuple[int, int, bool], names: tuple[str, ...]
) -> tuple[BufferView, tuple[int, ...]]:
    """The view of a pool's scales, and their strides; ``groups`` is (head size, elements per scale, zeros or not)."""
    outer, (size, granularity, zero) = len(names) - 3, groups
    buffer, strides = checks.pool(scales, "scales", names, outer, row_major=False)
    expected = (*data.shape[:-1], layout.cdiv(size, granularity) * (1 + zero))
    if tuple(buffer.shape) != expected:
        raise ValueError(
            f"scales must have shape {expected}: that of blocks with {'twice ' * zero}cdiv(head_size {size}, "
            f"quantization_granularity {granularity}) granules last, got {tuple(buffer.shape)}"
        )
    checks.aligned_granules(buffer, strides, names, outer)
    return buffer, strides


def with_sequences(
    pool: Pool, cache_lengths: Any, lookup_table: Any, max_seq_length: Any, max_cache_length: Any, name: str = "blocks"
) -> Pool:
    """A pool with the tables of sequences: all views and fields of a cache or collection.

    Parameters
    ----------
    max_seq_length, max_cache_length : int
        Or `AS_MANY_AS_FIT`.
    name : str
        The pool's name in the error for buffers on different devices.
    """
    spec, views, at = pool
    lengths, _ = checks.table(cache_lengths, "cache_lengths", ("sequences",))
    kind, page_size = spec.kind, spec.page_size
    table, strides = checks.table(lookup_table, "lookup_table", _TABLES.get(kind, _ROWS))
    shape = table.shape
    if kind == FA3 and shape[0] < 1:
        raise ValueError(f"lookup_table must have at least one layer, got shape {tuple(shape)}")
    views = {"blocks": views["blocks"], "cache_lengths": lengths, "lookup_table": table, **views}
    checks.same_device(views.items() if name == "blocks" else {name: views["blocks"], **views}.items())
    batch = checks.sequences(lengths, shape[1] if kind == FA3 else shape[0], "lookup_table")
    columns, row = (1, 1) if kind == CONTINUOUS else (shape[-1], strides[-2])
    longest = _length(max_cache_length, "max_cache_length", columns * page_size)
    if kind == CONTINUOUS:
        checks.region_holds(at["capacity"], longest, batch)
    else:
        checks.table_covers(columns, page_size, longest, batch)
    at |= {
        "lookup": table.data, "lookup_stride": row, "lookup_columns": columns, "lengths": lengths.data, "batch": batch,
        "max_seq_length": _length(max_seq_length, "max_seq_length", longest), "max_cache_length": longest,
    }  # fmt: skip
    if kind == FA3:
        at["num_layers"], at["lookup_layer_stride"] = shape[0], strides[0]
    return spec, views, at


def _length(given: Any, name: str, room: int) -> int:
    return room if isinstance(given, str) and given == AS_MANY_AS_FIT else checks.count(given, name)
