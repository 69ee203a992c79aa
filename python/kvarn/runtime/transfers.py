# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of pages between a pool on a GPU and one in host memory, by the driver.

No kernel runs: the ids are known on the host, so that every run of bytes is one asynchronous copy, and runs that are
neighbours in both pools are one run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvarn.dialect import layout
from kvarn.dialect.layout import FA3

from . import device as devices
from . import driver


class Run(NamedTuple):
    """One copy: addresses and bytes."""

    source: int
    destination: int
    bytes: int


def page_runs(
    source: Any, destination: Any, source_pages: np.ndarray, destination_pages: np.ndarray, layer: int | None
) -> list[Run]:
    """What to copy for pairs of pages, of one layer or of all, K and V and scales.

    Parameters
    ----------
    source, destination : KV cache collection
        Of equal spec.
    source_pages, destination_pages : numpy.ndarray
        int64 [n]. Pairs with an id outside of its pool are skipped.
    """
    spec = source.cache_spec
    fields = [dict(zip((f.name for f in layout.collection_fields(spec)), c.fields(), strict=True))
              for c in (source, destination)]  # fmt: skip
    inside = np.ones(len(source_pages), bool)
    for at, pages in zip(fields, (source_pages, destination_pages), strict=True):
        inside &= (pages >= 0) & (pages < at["num_blocks"])
    halves = np.arange(spec.kv_dim)
    # Layers of an fa3 pool share its pages.
    layers = np.arange(1 if spec.kind == FA3 else fields[0]["num_layers"]) if layer is None else np.array([layer])
    pools = [("blocks", "", spec.token_stride, spec.dtype)]
    if spec.scale_dtype is not None:
        pools.append(("scales", "scales_", spec.scales_token_stride, spec.scale_dtype))
    found: list[Run] = []
    for base, prefix, per_slot, dtype in pools:
        names = (base, *(f"{prefix}{name}" for name in ("stride0", "kv_stride", "layer_stride")))
        first, second = (
            _addresses([at[n] for n in names], pages[inside], halves, layers, dtype.itemsize)
            for at, pages in zip(fields, (source_pages, destination_pages), strict=True)
        )
        found += merged(first, second, fields[0]["capacity"] * per_slot * dtype.itemsize)
    return found


def _addresses(at: list[int], pages: np.ndarray, halves: np.ndarray, layers: np.ndarray, itemsize: int) -> np.ndarray:
    """Of each page, half and layer, in this order; ``at``: the pool's address, strides of pages, halves and layers."""
    base, page, half, layer = at
    element = pages[:, None, None] * page + halves[:, None] * half + layers * layer
    return element.ravel() * itemsize + base


def merged(source: np.ndarray, destination: np.ndarray, size: int) -> list[Run]:
    """Runs of ``size`` bytes each from address to address; those that continue one another in both become one."""
    if not len(source):
        return []
    continues = (np.diff(source) == size) & (np.diff(destination) == size)
    first = np.concatenate([[0], np.flatnonzero(~continues) + 1])
    counts = np.diff(np.concatenate([first, [len(source)]]))
    return [Run(int(source[i]), int(destination[i]), size * int(n)) for i, n in zip(first, counts, strict=True)]


def run(runs: list[Run], ordinal: int, stream: int, to_host: bool) -> None:
    """Start the copies on a stream of a device."""
    device = devices.device(ordinal)
    name = "cuMemcpyDtoHAsync" if to_host else "cuMemcpyHtoDAsync"
    with device.active():
        device.check_stream(stream)
        handle = driver.require().CUstream(stream)
        for part in runs:
            driver.call(name, part.destination, part.source, part.bytes, handle)
