# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of tokens between caches of different formats: convert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvarn.dialect.layout import PAGED, CacheSpec
from kvarn.dispatch import Operation, Schedule


def _check_convert(seen: SimpleNamespace) -> None:
    title = "kv.ops.convert"
    a, b = seen.source.spec, seen.destination.spec
    for spec, name in ((a, "source"), (b, "destination")):
        if spec.quantized and spec.kind != PAGED:
            raise ValueError(f"{title}: {name} must be paged to have scales")
        if spec.rotation:
            raise ValueError(
                f"{title}: {name} has rotated blocks, whose loads give rotated values: append its tokens anew"
            )
    if (a.num_heads, a.head_size) != (b.num_heads, b.head_size):
        raise ValueError(
            f"{title}: source and destination must have the same heads and head size, got "
            f"{a.num_heads} x {a.head_size} and {b.num_heads} x {b.head_size}"
        )
    batches = seen.source.batch_size, seen.destination.batch_size
    if batches[0] != batches[1]:
        raise ValueError(
            f"{title}: source and destination must have the same sequences, got {batches[0]} and {batches[1]}"
        )
    exact = a.dtype == b.dtype and not a.quantized and not b.quantized
    for spec, name in ((a, "source"), (b, "destination")):
        if not exact and spec.dtype.is_integer and not spec.quantized:
            raise ValueError(f"{title}: {name} stores {spec.dtype.name} without scales, which converts only to itself")


_CONVERT = Operation("kv.convert", {"source": 1, "destination": 1}, _check_convert)


def convert(source: Any, destination: Any, *, schedule: Schedule = None, stream: Any = None) -> None:
    """Copy every cached token of one cache to the same position of another, of any kind, layout, page size and dtype.

    Tokens ``[0, cache_lengths[b])`` of the source are read, dequantized if it has scales, and written as by
    :func:`append`: quantized if the destination has scales, saturating for 8-bit types. The destination's own lengths
    are not read. A token without a page in either lookup table is skipped.

    Parameters
    ----------
    source, destination : KV cache
        Caches with equal heads, head size and number of sequences, and without shared memory, even if the tables name
        different pages of it. Pages of other libraries are caches too: ``kv.ForeignPages.flashinfer(...).key``.
    """
    title = "kv.ops.convert"
    for name, side in (("source", source), ("destination", destination)):
        if not isinstance(getattr(side, "spec", None), CacheSpec):
            instead = ": convert its caches one by one" if hasattr(side, "get_key_cache") else ""
            raise TypeError(f"{title}: {name} must be a KV cache, got {type(side).__name__}{instead}")
    _CONVERT((source, destination), (), schedule, stream)
