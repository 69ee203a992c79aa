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
        Of specs that are equal but for the strides of tokens and heads.
    source_pages, destination_pages : numpy.ndarray
        int64 [n]. Pairs with an id outside of its pool are skipped.
    """
    specs = [c.cache_spec for c in (source, destination)]
    spec = specs[0]
    fields = [dict(zip((f.name for f in layout.collection_fields(spec)), c.fields(), strict=True))
              for c in (source, destination)]  # fmt: skip
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
    found: list[Run] = []
    for base, prefix, size, inner, dtype in pools:

        def of_both(name: str, prefix: str = prefix) -> tuple[int, ...]:
            return tuple(at[prefix + name] for at in fields)

        run, rest = layout.joined(size, [
            (fields[0]["capacity"], tuple(s[0] for s in inner)), (spec.num_heads, tuple(s[1] for s in inner)),
            (spec.kv_dim, of_both("kv_stride")), (layers, of_both("layer_stride")),
        ])  # fmt: skip
        first, second = (
            at[base] + dtype.itemsize * _offsets(
                pages[inside] * of_both("stride0")[i] + (layer or 0) * of_both("layer_stride")[i],
                [(n, strides[i]) for n, strides in reversed(rest)],
            )
            for i, (at, pages) in enumerate(zip(fields, (source_pages, destination_pages), strict=True))
        )  # fmt: skip
        found += merged(first, second, run * dtype.itemsize)
    return found


def _offsets(pages: np.ndarray, dims: list[tuple[int, int]]) -> np.ndarray:
    """Those of pages, in each of them by dimensions (extent, stride), the last the fastest."""
    for extent, stride in dims:
        pages = pages[..., None] + np.arange(extent) * stride
    return pages.ravel()


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
