# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copying the tokens of one cache into another: convert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvarn.caches.foreign import PageView
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import PAGED
from kvarn.programs import Operation, Schedule
from kvarn.runtime.buffers import BufferView
from kvarn.runtime.overlap import Apart

from . import checks

DTYPES = ("f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i8", "i16", "i32")


def _check_convert(seen: SimpleNamespace) -> None:
    title = "kv.ops.convert"
    (a, a_shape, a_batch, a_scaled), (b, b_shape, b_batch, b_scaled) = (
        _side(seen, name, title) for name in ("source", "destination")
    )
    if a_shape != b_shape:
        raise ValueError(
            f"{title}: source and destination must have the same heads and head size, got "
            f"{a_shape[0]} x {a_shape[1]} and {b_shape[0]} x {b_shape[1]}"
        )
    if a_batch != b_batch:
        raise ValueError(f"{title}: source and destination must have the same sequences, got {a_batch} and {b_batch}")
    exact = a == b and not a_scaled and not b_scaled
    for dtype, scaled, name in ((a, a_scaled, "source"), (b, b_scaled, "destination")):
        if not exact and dtype.is_integer and not scaled:
            raise ValueError(f"{title}: {name} stores {dtype.name} without scales, which converts only to itself")


def _side(seen: SimpleNamespace, name: str, title: str) -> tuple[DType, tuple[int, int], int, bool]:
    """(dtype, heads and head size, sequences, whether it has scales) of a side."""
    side = getattr(seen, name)
    if isinstance(side, BufferView):
        checks.has_dtype(side, DTYPES, f"{title}: {name}")
        return side.dtype, (side.shape[2], side.shape[3]), getattr(seen, f"{name}_table").shape[0], False
    spec = side.spec
    if spec.quantized and spec.kind != PAGED:
        raise ValueError(f"{title}: {name} must be paged to have scales")
    return spec.dtype, (spec.num_heads, spec.head_size), side.batch_size, spec.quantized


_CONVERT = Operation(
    "kv.convert", {"source": 1, "destination": 1}, _check_convert, apart=(Apart("destination", "source"),)
)


def convert(source: Any, destination: Any, *, schedule: Schedule = None, stream: Any = None) -> None:
    """Copy every cached token of one cache to the same position of another, of any kind, page size and dtype.

    Either side may be pages in the layout of another library: ``kv.ForeignPages.flashinfer(...).key`` and its likes.
    Tokens ``[0, cache_lengths[b])`` of the source are read, dequantized where it has scales, and written as
    :func:`append` would: quantized where the destination has scales, saturating to 8 bits. The destination's
    own lengths are not read.

    Parameters
    ----------
    source, destination : KV cache, or PageView of :class:`kvarn.ForeignPages`
        The same heads, head size and number of sequences; no memory in common, also where the tables name
        different pages of it. A token whose page the table of a
        ``PageView`` does not name is skipped.
    schedule, stream
        As of :func:`append`.
    """
    title = "kv.ops.convert"
    for name, side in (("source", source), ("destination", destination)):
        if not isinstance(side, PageView) and not hasattr(getattr(side, "spec", None), "num_heads"):
            instead = ": convert its caches one by one" if hasattr(side, "get_key_cache") else ""
            raise TypeError(f"{title}: {name} must be a KV cache or a PageView, got {type(side).__name__}{instead}")
    if not isinstance(source, PageView) and not isinstance(destination, PageView):
        _CONVERT((source, destination), (), schedule, stream)
        return
    _CONVERT(
        (
            source.data if isinstance(source, PageView) else source,
            destination.data if isinstance(destination, PageView) else destination,
            source.lookup_table if isinstance(source, PageView) else None,
            destination.lookup_table if isinstance(destination, PageView) else None,
            source.cache_lengths if isinstance(source, PageView) else None,
        ),
        (), schedule, stream,
    )  # fmt: skip
