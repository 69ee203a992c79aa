# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Conversion of cache handles to arguments of torch operators and back: lists of tensors, a name and numbers.

A torch operator takes tensors, numbers and strings. A handle (a collection, a cache, an operand of attention) becomes
its memory, which operations may write, its tables, which are read-only, the name of its class and the numbers of its
constructor. :func:`flat` runs while torch traces, so it only reads attributes; :func:`made` runs in the operator and
caches handles, without keeping tensors alive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from kvarn.caches import (
    ContinuousBatchingKVCache,
    ContinuousBatchingKVCacheCollection,
    ForeignPages,
    KVCacheMHAOperand,
    KVCacheScalesMHAOperand,
    LayoutTensorMHAOperand,
    PagedKVCache,
    PagedKVCacheCollection,
    PagedKVCacheFA3FallbackCollection,
    RaggedMHAOperand,
    checks,
)
from kvarn.caches.collections import KVCacheCollection
from kvarn.caches.views import KVCache
from kvarn.dialect import dtypes, layout
from kvarn.dialect.layout import KEY
from kvarn.runtime import buffers

Flat = tuple[list[Any], list[Any], str, list[int]]  # memory, tables, kind, numbers
_REMEMBER = 1024

_COLLECTIONS: dict[str, Any] = {
    c.name_str: c
    for c in (PagedKVCacheCollection, ContinuousBatchingKVCacheCollection, PagedKVCacheFA3FallbackCollection)
}
_CACHES: dict[str, Any] = {c.kind: c for c in (PagedKVCache, ContinuousBatchingKVCache)}
_NAMES = {"paged": "paged", "continuous": "continuous_batching", "fa3": "paged_fa3_fallback"}  # a cache's collection


def flat(handle: Any) -> Flat:
    """The tensors, the kind and the numbers of a handle.

    Raises
    ------
    TypeError
        For any other object.
    """
    if handle is None:
        return [], [], "", []
    if isinstance(handle, ForeignPages):
        data, scales = _several(handle.blocks), _several(handle.scales)
        numbers = [handle.max_seq_length, handle.max_cache_length, *[n or 0 for n in handle.given_extents], len(data)]
        return data + scales, [handle.cache_lengths, handle.lookup_table], "foreign:" + handle.dims, numbers
    if isinstance(handle, KVCacheCollection):
        memory = [handle.blocks] if handle.scales is None else [handle.blocks, handle.scales]
        numbers = [handle.max_seq_length, handle.max_cache_length, handle.quantization_granularity]
        return memory, [handle.cache_lengths, handle.lookup_table], handle.name_str, numbers
    if isinstance(handle, KVCache):
        return _flat_cache(handle)
    if isinstance(handle, (KVCacheMHAOperand, KVCacheScalesMHAOperand)):
        memory, tables, kind, numbers = _flat_cache(handle.cache)
        return memory, tables, ("operand:" if isinstance(handle, KVCacheMHAOperand) else "scales:") + kind, numbers
    if isinstance(handle, (LayoutTensorMHAOperand, RaggedMHAOperand)):
        owners = [view.owner for view in handle._keep]
        split = 2 if handle.quantization_enabled else 1
        kind = "dense" if isinstance(handle, LayoutTensorMHAOperand) else "ragged"
        return owners[:split], owners[split:], kind, []
    raise TypeError(f"torch can trace operations over caches, collections and operands, got {type(handle).__name__}")


def _several(buffer: Any) -> list[Any]:
    """A buffer, a pair or None as a list."""
    return [] if buffer is None else list(buffer) if isinstance(buffer, (list, tuple)) else [buffer]


def _flat_cache(cache: Any) -> Flat:
    owners = [view.owner for view in cache._keep]  # blocks, lengths, table and, if any, scales
    memory, tables = [owners[0], *owners[3:]], owners[1:3]
    at = cache._at
    if layout.packed(cache.spec) != cache.spec:
        raise TypeError(
            "torch cannot trace caches of ForeignPages, whose layout only the collection has: use an operation that "
            "takes the collection"
        )
    numbers = [at["max_seq_length"], at["max_cache_length"], cache.quantization_granularity]
    if "layer_idx" in at:
        return memory, tables, "cache:" + _NAMES[cache.kind], [*numbers, at["layer_idx"], at["kv_idx"]]
    return memory, tables, "cache:" + cache.kind, [*numbers, int(cache.is_mla)]


_made: dict[Any, Any] = {}


def made(memory: list[Any], tables: list[Any], kind: str, numbers: list[int]) -> Any:
    """The handle from the result of :func:`flat`."""
    if not kind:
        return None
    tensors = (*memory, *tables)
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    key = (kind, tuple(numbers), len(memory), *places)
    found = _made.get(key)
    if found is None:
        if len(_made) >= _REMEMBER:
            _made.clear()
        views = [checks.pool_view(t, "a cache's tensor")._replace(owner=None) for t in tensors]
        found = _made[key] = _make(views[: len(memory)], views[len(memory) :], kind, numbers)
    return found


def _make(memory: list[Any], tables: list[Any], kind: str, numbers: list[int]) -> Any:
    outer, _, inner = kind.rpartition(":")
    if outer == "foreign":
        seq, cached, page_size, heads, split = numbers
        data, scales = (x[0] if len(x) == 1 else tuple(x) or None for x in (memory[:split], memory[split:]))
        given = {"page_size": page_size or None, "num_heads": heads or None, "scales": scales}
        return ForeignPages(data, *tables, inner, max_seq_length=seq, max_cache_length=cached, **given)
    if outer in ("operand:cache", "scales:cache"):
        cache = _make(memory, tables, "cache:" + inner, numbers)
        return (KVCacheMHAOperand if outer.startswith("operand") else KVCacheScalesMHAOperand)(cache)
    if kind == "dense":
        return LayoutTensorMHAOperand(*_with_scales(memory), *tables)
    if kind == "ragged":
        return RaggedMHAOperand(memory[0], tables[0], *memory[1:])
    longest, granularity = numbers[:2], numbers[2]
    scales = {"scales": memory[1], "quantization_granularity": granularity} if len(memory) > 1 else {}
    if not outer:
        return _COLLECTIONS[inner](memory[0], *tables, *longest, **scales)
    if inner in _COLLECTIONS and len(numbers) == 5:
        collection = _COLLECTIONS[inner](memory[0], *tables, *longest, **scales)
        layer, half = numbers[3:]
        return collection.get_key_cache(layer) if half == KEY else collection.get_value_cache(layer)
    mla = {"is_mla": True} if numbers[3] else {}
    return _CACHES[inner](memory[0], *tables, *longest, **scales, **mla)


def _with_scales(memory: list[Any]) -> list[Any]:
    return [memory[0], memory[1] if len(memory) > 1 else None]


# --- handles made while torch traces ---------------------------------------------------------------

# A table of torch's dtypes only: dynamo cannot read a dictionary with NumPy keys, as that of ``buffers`` may be.
_DTYPES = {getattr(torch, d.numpy.name): d for d in dtypes.ALL if hasattr(torch, d.numpy.name)}


def _without_address(tensor: Any, *, name: str = "buffer") -> buffers.BufferView:
    """The view of a tensor without memory: everything but the address."""
    return buffers.BufferView(
        0,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        _DTYPES.get(tensor.dtype) or buffers._dtype(tensor.dtype, name),
        buffers._torch_device(tensor.device, name),
        False,
        tensor,
    )


def _read(tensor: Any, name: str) -> buffers.BufferView:
    if not torch._C._len_torch_dispatch_stack():  # torch is not tracing
        raise buffers.without_memory(tensor, name)
    return _without_address(tensor, name=name)


for _cls in (FakeTensor, FunctionalTensor):
    buffers._readers[_cls] = _read
torch.compiler.substitute_in_graph(buffers.view, skip_signature_check=True)(_without_address)


@torch.compiler.substitute_in_graph(checks.no_overlap, skip_signature_check=True)
def _later(buffer: Any, strides: Any, name: str) -> None:
    """Extents may be symbolic: the handle made by the operator is checked."""


@torch.compiler.substitute_in_graph(layout.spec_of, skip_signature_check=True)
def _static_spec(kind: str, dtype: Any, num_heads: Any, head_size: Any, **rest: Any) -> Any:
    """Make a spec's numbers static, since kernels are specialised for it: a graph is valid for one spec."""
    static = {n: guard_scalar(v) if n in ("page_size", "granularity") else v for n, v in rest.items()}
    if static.get("strides") is not None:
        static["strides"] = tuple([guard_scalar(s) for s in static["strides"]])
    scale = static.pop("scale_dtype", None)
    heads, size = guard_scalar(num_heads), guard_scalar(head_size)
    return layout.spec_class(kind)(kind, dtype, heads, size, scale_dtype=scale, **static)


__all__ = ["flat", "made"]
