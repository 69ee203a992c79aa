# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Printing a cache: print_cache."""

from __future__ import annotations

from typing import Any, TextIO

import numpy as np

from kvarn.runtime import buffers

from . import checks
from .copies import gather

FEW = 7  # elements of a head in a compact listing


def print_cache(
    collection: Any, layer: int, valid_lengths: Any = None, *, compact: bool = True, file: TextIO | None = None
) -> None:
    """Print the keys and values of one layer, token by token, for debugging. Waits for the device.

    Parameters
    ----------
    collection : KV cache collection
        On the host or a GPU. For a quantized collection the stored values are printed.
    layer : int
    valid_lengths : uint32 or int32 array-like [B], optional
        New tokens of each sequence, which are printed after the cached ones.
    compact : bool
        Print only the first 7 elements of each head.
    file : text file, optional
        Default: standard output.
    """
    title = "kv.ops.print_cache"
    layer = checks.layer_of(collection, layer, title)
    lengths = _on_host(collection.cache_lengths).astype(np.int64)
    if valid_lengths is not None:
        new = _on_host(valid_lengths)
        if new.shape != lengths.shape or new.dtype.kind not in "iu":
            raise ValueError(
                f"{title}: valid_lengths must be integers of shape {list(lengths.shape)}, got {new.dtype} of shape "
                f"{list(new.shape)}"
            )
        lengths = lengths + new
    halves = [("key", collection.get_key_cache(layer))]
    if not collection.is_mla:
        halves.append(("value", collection.get_value_cache(layer)))
    # One row of token ids per sequence; ids past its length repeat the last token and are not printed.
    longest = int(lengths.max(initial=0))
    ids = np.minimum(np.arange(longest), np.maximum(lengths[:, None] - 1, 0)).astype(np.int32)
    offsets = np.arange(len(lengths) + 1, dtype=np.int32)
    for name, cache in halves:
        if longest:
            rows = _on_host(gather(cache, _beside(ids, collection), _beside(offsets, collection)))
        for b, length in enumerate(lengths.tolist()):
            print(f"layer {layer} {name} sequence {b}: {length} tokens", file=file)
            for t in range(length):
                for h in range(cache.num_heads):
                    shown = rows[b, t, h, : FEW if compact else None]
                    more = " ..." if compact and cache.head_size > FEW else ""
                    print(f"  token {t} head {h}: {' '.join(f'{float(x):g}' for x in shown)}{more}", file=file)


def _beside(array: np.ndarray, collection: Any) -> Any:
    """Copy an array to the collection's device, as an array of its library."""
    if collection.device[0] == "cpu":
        return array
    from kvarn.dialect import dtypes

    made = checks.empty(collection.buffers[0], array.shape, dtypes.i32, "ids", "kv.ops.print_cache")
    if hasattr(made, "set"):  # CuPy
        made.set(array)
    else:
        made.copy_(made.new_tensor(array.tolist()).reshape(made.shape))
    return made


def _on_host(array: Any) -> np.ndarray:
    """An array of any library as a NumPy array; waits for its device."""
    found = array
    if hasattr(found, "cpu"):  # torch
        found = found.cpu()
    elif type(found).__module__.partition(".")[0] == "cupy":
        found = found.get()
    return buffers.host_array(buffers.view(found))
