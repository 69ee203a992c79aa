# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of cached tokens and pages: gather, copy_pages, transfer_pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarn.dialect.layout import FA3, CollectionSpec, packed
from kvarn.dispatch import Operation, Schedule
from kvarn.runtime import buffers, ownership, streams, transfers
from kvarn.runtime.binding import ordinal_of

from . import checks

_GATHER = Operation("kv.gather", {"out": 2}, checks.declared)


def gather(
    cache: Any, token_ids: Any, row_offsets: Any, out: Any = None, *, schedule: Schedule = None, stream: Any = None
) -> Any:
    """Copy tokens out of one cache, bit for bit (for a quantized cache, its stored values).

    Of a cache of 4-bit elements the last dimension of ``out`` has their bytes, uint8 [D / 2].

    Parameters
    ----------
    cache : KV cache
    token_ids : int32 or uint32 array-like [R, Ns]
        Positions of cached tokens in the row's sequence.
    row_offsets : uint32 or int32 array-like [B + 1]
        Rows of sequence b: ``row_offsets[b]`` to ``row_offsets[b + 1]``.
    out : array-like [R, Ns, H, D] or [R, Ns, H * D], optional
        The cache's dtype. By default allocated, as [R, Ns, H, D], by the library of the cache's blocks (torch, CuPy or
        NumPy).

    Returns
    -------
    array-like
        out: ``out[r, j] = cache(b(r), :, token_ids[r, j], :)``. Rows that belong to no sequence are not written.
    """
    spec = getattr(cache, "spec", None)
    if spec is None or not hasattr(spec, "num_heads"):
        raise TypeError(f"kv.ops.gather: cache must be a KV cache, got {type(cache).__name__}")
    if out is None:
        shape = (*checks.shape_of(token_ids, "kv.ops.gather: token_ids", 2), spec.num_heads, spec.stored_size)
        out = checks.empty(cache.buffers[0], shape, None, "out", "kv.ops.gather")
    _GATHER((cache, token_ids, row_offsets, _by_heads(out, spec)), (), schedule, stream)
    return out


def _by_heads(out: Any, spec: Any) -> Any:
    """Rows of H * D elements as [..., H, D], a view of the same memory: the last dimension is contiguous."""
    shape = getattr(out, "shape", ())
    if len(shape) != 3 or shape[2] != spec.num_heads * spec.stored_size:
        return out
    split = (*shape[:2], spec.num_heads, spec.stored_size)
    return out.view(split) if type(out).__module__.partition(".")[0] == "torch" else out.reshape(split)


_COPY_PAGES = Operation("kv.copy_pages", {}, checks.declared)


def copy_pages(
    collection: Any, source: Any, destination: Any, *, schedule: Schedule = None, stream: Any = None
) -> None:
    """Copy whole pages of a pool, all layers with keys, values and scales, in one launch.

    Parameters
    ----------
    collection : KV cache collection
        In a continuous collection, a page is the region of a sequence.
    source, destination : int32 or uint32 array-like [n]
        Page ``destination[i]`` becomes a copy of page ``source[i]``. Pairs with an id outside of the pool are skipped.
        The copies run in any order: a destination must not occur twice, nor be the source of another pair.
    """
    _COPY_PAGES((collection, source, destination), (), schedule, stream)
    ownership.copied(collection, source, destination)


_TRANSFER = Operation("kv.transfer_pages", {}, checks.declared, in_place=(("destination_pool", "source_pool"),))


def transfer_pages(
    source: Any,
    destination: Any,
    source_pages: Any,
    destination_pages: Any,
    layer: int | None = None,
    *,
    schedule: Schedule = None,
    stream: Any = None,
) -> None:
    """Copy pages between pools, also between a GPU and the host, e.g. to swap them out and in.

    Pools on one device: one launch. A pool on a GPU and one in host memory: asynchronous driver copies on the stream,
    one per contiguous range; the call returns at once only if the host memory is pinned (page-locked). With pinned
    memory many ranges are copied together: ranges below 32 KiB by a kernel that accesses the host memory directly,
    larger ones as a batch of the driver, if it supports batches and the stream is not the default stream.

    Parameters
    ----------
    source, destination : KV cache collection
        Of equal kind, dtypes, heads, head size, page size and number of layers, without shared memory. Their numbers of
        pages and their strides, also of tokens and heads, may differ (:class:`kvarn.ForeignPages`).
    source_pages, destination_pages : int32 or uint32 array-like [n]
        Page ``destination_pages[i]`` of the destination becomes a copy of page ``source_pages[i]`` of the source. Pairs
        with an id outside of its pool are skipped. If one pool is in host memory, the ids must be too: a sequence of
        integers, or an array of any integer dtype. If that pool is pinned, ids may also be on the GPU: the kernel then
        reads them, and the call can be captured.
    layer : int, optional
        Copy this layer only; by default all layers.
    """
    _transfer(source, destination, source_pages, destination_pages, layer, schedule, stream)
    ownership.copied(destination, None, destination_pages)


def _transfer(
    source: Any, destination: Any, source_pages: Any, destination_pages: Any, layer: int | None, schedule: Schedule,
    stream: Any,
) -> None:  # fmt: skip
    title = "kv.ops.transfer_pages"
    for name, pool in (("source", source), ("destination", destination)):
        if not isinstance(getattr(pool, "spec", None), CollectionSpec):
            raise TypeError(f"{title}: {name} must be a KV cache collection, got {type(pool).__name__}")
    if packed(source.cache_spec) != packed(destination.cache_spec):
        raise ValueError(
            f"{title}: source and destination must have the same spec, got {source.cache_spec} and "
            f"{destination.cache_spec}"
        )
    shapes = [(c.num_layers, c.kv_cache_dynamic_shape[1]) for c in (source, destination)]
    if shapes[0][1] != shapes[1][1] or (source.cache_spec.kind != FA3 and shapes[0] != shapes[1]):
        raise ValueError(
            f"{title}: source and destination must have the same layers and slots of a page, got {shapes[0]} and "
            f"{shapes[1]}"
        )
    if layer is not None:
        if source.cache_spec.kind == FA3:
            raise ValueError(f"{title}: layer must be None for fa3 pools, whose layers share the pages, got {layer!r}")
        layer = checks.layer_of(source, layer, title)
    places = [pool.device[0] == "cpu" for pool in (source, destination)]
    if places[0] == places[1]:
        operands = (source, destination, source_pages, destination_pages, *(() if layer is None else (layer,)))
        _TRANSFER(operands, (), schedule, stream)
        return
    if destination.readonly:
        raise ValueError(f"{title}: destination is written, but its blocks are read-only")
    on_gpu, in_host = (source, destination) if places[1] else (destination, source)
    ordinal = ordinal_of(on_gpu.device, f"{title}: the pool")
    if _on_a_gpu(source_pages) and _on_a_gpu(destination_pages) and transfers.reaches(ordinal, in_host.pools):
        _by_kernel(source, destination, (source_pages, destination_pages), layer, on_gpu, schedule, stream)
        return
    ids = _host_ids(source_pages, f"{title}: source_pages"), _host_ids(destination_pages, f"{title}: destination_pages")
    if ids[0].shape != ids[1].shape:
        raise ValueError(f"{title}: destination_pages must have shape {list(ids[0].shape)}, got {list(ids[1].shape)}")
    handle = streams.current_stream(on_gpu.buffers, ordinal) if stream is None else streams.handle_of(stream)
    runs = transfers.page_runs(source, destination, *ids, layer)
    small = transfers.for_a_kernel(runs)
    together = (small or transfers.takes_batches(runs, handle)) and transfers.reaches(ordinal, in_host.pools)
    if not together or transfers.captures(ordinal, handle):
        transfers.run(runs, ordinal, handle, to_host=places[1])
        return
    if not small:
        transfers.run_batch(runs, ordinal, handle)
        return
    with transfers.on_device(ids, ordinal, handle) as given:
        _by_kernel(source, destination, given, layer, on_gpu, schedule, handle)


def _on_a_gpu(ids: Any) -> bool:
    return hasattr(ids, "shape") and not buffers.view(ids, name="ids").on_host


def _by_kernel(
    source: Any, destination: Any, ids: Any, layer: int | None, on_gpu: Any, schedule: Schedule, stream: Any
) -> None:
    """Copy pages between a GPU and pinned host memory by the kernel for pools on one device."""
    pools = [p if p is on_gpu else transfers.Reached(p, on_gpu.device) for p in (source, destination)]
    _TRANSFER((*pools, *ids, *(() if layer is None else (layer,))), (), schedule, stream)


def _host_ids(ids: Any, name: str) -> np.ndarray:
    """Page ids that are readable on the host, as int64 [n]."""
    if isinstance(ids, (list, tuple, range)) and not isinstance(ids, buffers.BufferView):
        if not all(isinstance(i, (int, np.integer)) for i in ids):
            raise TypeError(f"{name} must be integers [n], got {ids!r}")
        found = np.asarray(ids, np.int64)
    else:
        view = buffers.view(ids, name=name)
        if not view.on_host:
            raise TypeError(
                f"{name} must be in host memory when a pool is, got a buffer on {view.device[0]}: reading it would "
                "wait for the device"
            )
        found = buffers.host_array(view, name=name)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers [n], got {found.dtype} of shape {list(found.shape)}")
    return found.astype(np.int64)
