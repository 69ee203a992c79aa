# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of pages between a pool on a GPU and one in host memory.

The ids are known on the host, so each contiguous range is one asynchronous driver copy; ranges that are adjacent in
both pools are merged. Starting many copies takes longer than copying: if the GPU can access the host memory, which is
then page-locked, a kernel copies small ranges, and the driver takes the others as one batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvarn.dialect import dtypes, layout
from kvarn.dialect.layout import FA3

from . import device as devices, driver, streams
from .buffers import BufferView

SMALL, MANY = 32 << 10, 8  # more ranges than MANY, of fewer than SMALL bytes on average, are copied by a kernel


class Runs(NamedTuple):
    """Copies, one per entry: addresses and bytes, int64 [n]."""

    source: np.ndarray
    destination: np.ndarray
    bytes: np.ndarray

    def listed(self) -> list[tuple[int, int, int]]:
        """As a list of (source, destination, bytes)."""
        return list(zip(*(x.tolist() for x in self), strict=True))


def page_runs(
    source: Any, destination: Any, source_pages: np.ndarray, destination_pages: np.ndarray, layer: int | None
) -> Runs:
    """The copies for pairs of pages, of one layer or of all, K and V and scales.

    Parameters
    ----------
    source, destination : KV cache collection
        With equal specs, except for the strides of tokens and heads.
    source_pages, destination_pages : numpy.ndarray
        int64 [n]. Pairs with an id outside of its pool are skipped.
    """
    specs = [c.cache_spec for c in (source, destination)]
    spec = specs[0]
    fields = [
        dict(zip((f.name for f in layout.collection_fields(spec)), c.fields(), strict=True))
        for c in (source, destination)
    ]
    # Layers of an fa3 pool share its pages.
    layers = 1 if spec.kind == FA3 or layer is not None else fields[0]["num_layers"]
    inside = np.ones(len(source_pages), bool)
    for at, pages in zip(fields, (source_pages, destination_pages), strict=True):
        inside &= (pages >= 0) & (pages < at["num_blocks"])
    # (address, prefix of the strides, elements of a head, strides of tokens and heads, dtype) of elements and scales.
    pools = [("blocks", "", spec.head_size, [(s.token_stride, s.head_stride) for s in specs], spec.dtype)]
    if spec.scale_dtype is not None:
        packed = [(spec.scales_token_stride, spec.num_scales)] * 2
        pools.append(("scales", "scales_", spec.num_scales, packed, spec.scale_dtype))
    found: list[Runs] = []
    for base, prefix, size, inner, dtype in pools:

        def of_both(name: str, prefix: str = prefix) -> tuple[int, ...]:
            return tuple(at[prefix + name] for at in fields)

        run, rest = layout.joined(size, [
            (fields[0]["capacity"], tuple(s[0] for s in inner)), (spec.num_heads, tuple(s[1] for s in inner)),
            (spec.kv_dim, of_both("kv_stride")), (layers, of_both("layer_stride")),
        ])  # fmt: skip
        first, second = (
            at[base]
            + dtype.bytes_of(
                _offsets(
                    pages[inside] * of_both("stride0")[i] + (layer or 0) * of_both("layer_stride")[i],
                    [(n, strides[i]) for n, strides in reversed(rest)],
                )
            )
            for i, (at, pages) in enumerate(zip(fields, (source_pages, destination_pages), strict=True))
        )
        found.append(merged(first, second, dtype.bytes_of(run)))
    return Runs(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _offsets(pages: np.ndarray, dims: list[tuple[int, int]]) -> np.ndarray:
    """Offsets within pages, for dimensions (extent, stride), the last the fastest."""
    for extent, stride in dims:
        pages = pages[..., None] + np.arange(extent) * stride
    return pages.ravel()


def merged(source: np.ndarray, destination: np.ndarray, size: int) -> Runs:
    """Copies of ``size`` bytes each; ranges that are adjacent in both source and destination are merged."""
    if not len(source):
        return Runs(*[np.zeros(0, np.int64)] * 3)
    continues = (np.diff(source) == size) & (np.diff(destination) == size)
    first = np.concatenate([[0], np.flatnonzero(~continues) + 1])
    counts = np.diff(np.concatenate([first, [len(source)]]))
    return Runs(source[first], destination[first], counts * size)


def run(runs: Runs, ordinal: int, stream: int, to_host: bool) -> None:
    """Start each copy on a stream of a device."""
    device = devices.device(ordinal)
    name = "cuMemcpyDtoHAsync" if to_host else "cuMemcpyHtoDAsync"
    with device.active():
        device.check_stream(stream)
        handle = driver.require().CUstream(stream)
        for source, destination, size in runs.listed():
            driver.call(name, destination, source, size, handle)


def takes_batches(runs: Runs, stream: int) -> bool:
    """Whether the driver supports the copies as one batch: not on default streams, and not on all drivers."""
    return len(runs.bytes) > MANY and stream > streams.LAST_SPECIAL and driver.has("cuMemcpyBatchAsync")


def run_batch(runs: Runs, ordinal: int, stream: int) -> None:
    """Start the copies as one batch; the host memory is page-locked."""
    device, b = devices.device(ordinal), driver.require()
    with device.active():
        device.check_stream(stream)
        attributes = b.CUmemcpyAttributes()
        attributes.srcAccessOrder = b.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        to, of = ([b.CUdeviceptr(x) for x in y.tolist()] for y in (runs.destination, runs.source))
        count = len(runs.bytes)
        driver.call("cuMemcpyBatchAsync", to, of, runs.bytes.tolist(), count, [attributes], [0], 1, b.CUstream(stream))


# --- by a kernel -----------------------------------------------------------------------------------


class Reached:
    """A pool in page-locked host memory, which a GPU accesses at the same addresses."""

    def __init__(self, pool: Any, device: tuple[str, int]) -> None:
        self.spec, self.cache_spec, self.readonly = pool.spec, pool.cache_spec, pool.readonly
        self.buffers, self.device, self.num_layers = pool.buffers, device, pool.num_layers
        self._fields = pool.fields()

    def fields(self) -> tuple[int, ...]:
        """The pool's fields."""
        return self._fields


def for_a_kernel(runs: Runs) -> bool:
    """Whether the ranges are many and small."""
    count = len(runs.bytes)
    return count > MANY and int(runs.bytes.sum()) < SMALL * count


def reaches(ordinal: int, buffers: Sequence[BufferView]) -> bool:
    """Whether a GPU can access host memory directly: both ends of every buffer are page-locked."""
    if not driver.status().usable:
        return False
    bindings = driver.require()
    wanted = bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    with devices.device(ordinal).active():
        for view in buffers:
            for address in (view.data, view.data + view.span * view.dtype.itemsize - 1):
                code, found = bindings.cuPointerGetAttribute(wanted, address)
                if int(code) or int(found) != address:
                    return False
    return True


def captures(ordinal: int, stream: int) -> bool:
    """Whether a stream is being captured: the sources of copies must then outlive the call."""
    bindings = driver.require()
    with devices.device(ordinal).active():
        code, status = bindings.cuStreamIsCapturing(bindings.CUstream(stream))
        none = bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return bool(int(code)) or status != none


@contextlib.contextmanager
def on_device(ids: Sequence[np.ndarray], ordinal: int, stream: int) -> Iterator[list[BufferView]]:
    """Ids as int32 device buffers, for work started on the stream within the context."""
    flat = np.concatenate(ids)
    flat = np.where((flat >= 0) & (flat < 2**31), flat, -1).astype(np.int32)  # other ids are not pages
    device = devices.device(ordinal)
    with device.active():
        device.check_stream(stream)
        handle = driver.require().CUstream(stream)
        address = int(driver.call("cuMemAllocAsync", flat.nbytes, handle))
        try:
            driver.call("cuMemcpyHtoDAsync", address, flat.ctypes.data, flat.nbytes, handle)
            count = len(flat) // len(ids)
            yield [
                BufferView(address + 4 * count * i, (count,), (1,), dtypes.i32, ("cuda", ordinal), False, None)
                for i in range(len(ids))
            ]
        finally:
            driver.call("cuMemFreeAsync", address, handle)
