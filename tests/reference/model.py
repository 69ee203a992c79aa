# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reference models of the operations that write, copy and re-index caches.

They take collections and caches over NumPy buffers and change them in place. Arithmetic is float64, but for the
quantization scales, which are float32 as a kernel's are. T is the new tokens of the batch, H the KV heads, D the head
size, B the sequences. Attention is in ``reference.attention``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarn.caches import KVCache, KVCacheCollection, saturating_cast
from kvarn.dialect import layout
from kvarn.dialect.layout import CacheSpec

# --- the ragged batch ------------------------------------------------------------------------------


def token_sequences(row_offsets: Any) -> np.ndarray:
    """The sequence of each row g: the largest b with row_offsets[b] <= g. Rows before the first offset have none."""
    offsets = np.asarray(row_offsets).astype(np.int64)
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def token_positions(row_offsets: Any, cache_lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    """Sequence [T] and cache position [T] of the new tokens: position cache_length(b) + i."""
    offsets = np.asarray(row_offsets).astype(np.int64)
    sequence = token_sequences(offsets)
    within = np.arange(offsets[0], offsets[-1]) - offsets[sequence]
    return sequence, np.asarray(cache_lengths).astype(np.int64)[sequence] + within


def cache_row_offsets(row_offsets: Any, cache_lengths: Any) -> np.ndarray:
    """uint32 [B+1]: row n begins after the cached and new tokens of the sequences before n."""
    totals = np.asarray(cache_lengths).astype(np.int64) + np.diff(np.asarray(row_offsets).astype(np.int64))
    return np.concatenate([[0], np.cumsum(totals)]).astype(np.uint32)


def increment_cache_lengths(cache_lengths: Any, row_offsets: Any) -> np.ndarray:
    """The lengths after the step, of the dtype given."""
    lengths = np.asarray(cache_lengths)
    return (lengths.astype(np.int64) + np.diff(np.asarray(row_offsets).astype(np.int64))).astype(lengths.dtype)


# --- elements --------------------------------------------------------------------------------------


def read(cache: KVCache, b: int, t: Any) -> np.ndarray:
    """Tokens of one sequence, float64 [n, H, D], dequantized."""
    tokens = np.atleast_1d(np.asarray(t, np.int64))[:, None, None]
    heads, dims = np.arange(cache.num_heads)[None, :, None], np.arange(cache.head_size)
    return (
        np.asarray(cache.load(b, heads, tokens, dims)).astype(np.float64).reshape(-1, cache.num_heads, cache.head_size)
    )


def write(cache: KVCache, sequence: np.ndarray, position: np.ndarray, stored: np.ndarray) -> None:
    """Store [n, H, D] values of the storage type; tokens without a page are dropped."""
    heads = np.arange(cache.num_heads)[None, :, None]
    cache.store(sequence[:, None, None], heads, position[:, None, None], np.arange(cache.head_size), stored)


def write_scales(cache: KVCache, sequence: np.ndarray, position: np.ndarray, scales: np.ndarray) -> None:
    """Store [n, H, G] scales."""
    heads = np.arange(cache.num_heads)[None, :, None]
    starts = np.arange(cache.head_dim_granularity) * cache.quantization_granularity
    cache.store_scale(sequence[:, None, None], heads, position[:, None, None], starts, scales)


def as_storage(x: Any, spec: CacheSpec) -> np.ndarray:
    """Values in the storage type of a cache without scales: kept, or converted (saturating to 8 bits)."""
    return saturating_cast(np.asarray(x), spec.dtype)


def quantize(x: Any, spec: CacheSpec, scale: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Quantize [..., D] values.

    Parameters
    ----------
    x : array-like [..., D]
    spec : CacheSpec
        With scales.
    scale : array-like [..., G], optional
        Scales to use; default, of each granule: its largest magnitude over the storage type's largest finite value,
        in float32, rounded to the scale type (upwards when that holds powers of two only); 1 where that is 0.

    Returns
    -------
    tuple of numpy.ndarray
        Stored values [..., D] and scales [..., G].
    """
    x = np.asarray(x).astype(np.float32)
    granules, size = spec.num_scales, spec.head_size
    if scale is None:
        padded = np.zeros((*x.shape[:-1], granules * spec.granularity), np.float32)
        padded[..., :size] = np.abs(x)
        largest = padded.reshape(*x.shape[:-1], granules, spec.granularity).max(-1)
        scale = largest / np.float32(spec.dtype.largest)
    stored_scale = as_scale(scale, spec)
    by_dim = np.repeat(stored_scale.astype(np.float32), spec.granularity, axis=-1)[..., :size]
    return saturating_cast(x / by_dim, spec.dtype), stored_scale


def as_scale(scale: Any, spec: CacheSpec) -> np.ndarray:
    """Scales in the scale type; zeros become 1."""
    assert spec.scale_dtype is not None
    scale = np.asarray(scale).astype(np.float32)
    if spec.scale_dtype.name == "f8e8m0":
        with np.errstate(divide="ignore"):
            exponent = np.clip(np.ceil(np.log2(scale.astype(np.float64))), -127, 127)
        return np.where(scale == 0, 1.0, np.exp2(exponent)).astype(spec.scale_dtype.numpy)
    stored = scale.astype(spec.scale_dtype.numpy)
    return np.where(stored == 0, np.ones((), stored.dtype), stored)


# --- stores ----------------------------------------------------------------------------------------


def store_ragged(cache: KVCache, x: Any, row_offsets: Any) -> None:
    """x [T, H, D] of the storage type to the new tokens' positions."""
    sequence, position = token_positions(row_offsets, cache.cache_lengths_nd())
    write(cache, sequence, position, np.asarray(x)[: len(sequence)])


def store_padded(cache: KVCache, x: Any, valid_lengths: Any) -> None:
    """x [B, Smax, H, D]; tokens t >= valid_lengths[b] are skipped."""
    x = np.asarray(x)
    for b, (cached, valid) in enumerate(zip(cache.cache_lengths_nd(), np.asarray(valid_lengths), strict=True)):
        token = np.arange(min(int(valid), x.shape[1]))
        write(cache, np.full(len(token), b), int(cached) + token, x[b, : len(token)])


def append_to_cache(cache: KVCache, x: Any, row_offsets: Any, scale: Any = None, tensor_scale: Any = None) -> None:
    """x [T, H, D] to one cache: quantized, divided by the scale of a tensor, converted, or as it is."""
    sequence, position = token_positions(row_offsets, cache.cache_lengths_nd())
    x = np.asarray(x)[: len(sequence)]
    if tensor_scale is not None:
        x = x.astype(np.float32) / np.float32(tensor_scale)
    if not cache.spec.quantized:
        write(cache, sequence, position, as_storage(x, cache.spec))
        return
    stored, scales = quantize(x, cache.spec, None if scale is None else np.asarray(scale)[: len(sequence)])
    write(cache, sequence, position, stored)
    write_scales(cache, sequence, position, scales)


def append(
    collection: KVCacheCollection, layer: int, key: Any, value: Any, row_offsets: Any, key_scale: Any = None,
    value_scale: Any = None, tensor_scales: Any = (None, None),
) -> None:  # fmt: skip
    """key and value [T, H, D] of the new tokens; value is None for an MLA collection."""
    append_to_cache(collection.get_key_cache(layer), key, row_offsets, key_scale, tensor_scales[0])
    if not collection.is_mla:
        append_to_cache(collection.get_value_cache(layer), value, row_offsets, value_scale, tensor_scales[1])


# --- rotary embedding and normalisation ------------------------------------------------------------


def rope(x: Any, positions: Any, freqs: Any, *, interleaved: bool = True, mrope_section: Any = None) -> np.ndarray:
    """Rotate rows by their positions.

    Parameters
    ----------
    x : array-like [T, heads, D]
    positions : array-like [T], or [sections, T] with ``mrope_section``
    freqs : array-like [positions, R]
        (cos, sin) pairs interleaved. R <= D even.
    interleaved : bool
        Pairs (2k, 2k+1) of the *last* R dims; else pairs (k, k + R/2) of the *first* R.
    mrope_section : sequence of int, optional
        Pairs that each section of positions turns, in order.

    Returns
    -------
    numpy.ndarray
        float64 [T, heads, D].
    """
    out = np.asarray(x).astype(np.float64)
    positions, freqs = np.asarray(positions).astype(np.int64), np.asarray(freqs).astype(np.float64)
    turned = freqs.shape[1]
    if mrope_section is None:
        row = freqs[positions]
    else:
        section = np.repeat(np.arange(len(mrope_section)), mrope_section)  # of each pair
        row = np.empty((positions.shape[1], turned))
        for pair, of in enumerate(section):
            row[:, 2 * pair : 2 * pair + 2] = freqs[positions[of]][:, 2 * pair : 2 * pair + 2]
    turn = (row[:, 0::2] + 1j * row[:, 1::2])[:, None, :]
    size = out.shape[-1]
    re, im = (
        (slice(size - turned, None, 2), slice(size - turned + 1, None, 2))
        if interleaved
        else (slice(0, turned // 2), slice(turned // 2, turned))
    )
    rotated = (out[..., re] + 1j * out[..., im]) * turn
    out[..., re], out[..., im] = rotated.real, rotated.imag
    return out


def rms_normalize(x: Any, gamma: Any, eps: float, weight_offset: float = 0.0) -> np.ndarray:
    """x * rsqrt(mean(x^2) + eps) * (gamma + weight_offset) over the last dimension, float64."""
    x = np.asarray(x).astype(np.float64)
    scale = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * scale * (np.asarray(gamma).astype(np.float64) + weight_offset)


def rope_append(
    collection: KVCacheCollection, layer: int, query: Any, key: Any, value: Any, row_offsets: Any, freqs: Any, *,
    interleaved: bool = True, q_gamma: Any = None, k_gamma: Any = None, eps: float = 1e-6,
) -> np.ndarray:  # fmt: skip
    """Write the rotated key and the value of the new tokens; give the rotated query, float64 [T, Hq, D].

    With gammas, query and key are RMS-normalised over the head first.
    """
    _, position = token_positions(row_offsets, collection.get_key_cache(layer).cache_lengths_nd())
    tokens = len(position)
    query, key = np.asarray(query)[:tokens], np.asarray(key)[:tokens]
    if q_gamma is not None:
        query, key = rms_normalize(query, q_gamma, eps), rms_normalize(key, k_gamma, eps)
    append(collection, layer, rope(key, position, freqs, interleaved=interleaved), value, row_offsets)
    return rope(query, position, freqs, interleaved=interleaved)


def rope_in_place(
    collection: KVCacheCollection, layer: int, query: Any, row_offsets: Any, freqs: Any, *, interleaved: bool = True,
    position_ids: Any = None, mrope_section: Any = None,
) -> np.ndarray:  # fmt: skip
    """Rotate the cached keys of the new tokens in place and give the rotated query, float64 [T, Hq, Dq].

    A key head larger than the query's, or the reverse, turns its own last (interleaved) or first (split) R dims.
    """
    cache = collection.get_key_cache(layer)
    sequence, position = token_positions(row_offsets, cache.cache_lengths_nd())
    angles = position if position_ids is None else np.asarray(position_ids)
    if position_ids is not None and mrope_section is None:
        angles = np.atleast_2d(position_ids)[0]
    options: dict[str, Any] = {"interleaved": interleaved, "mrope_section": mrope_section}
    keys = np.concatenate([np.zeros((0, cache.num_heads, cache.head_size))] + [
        read(cache, b, t) for b, t in zip(sequence, position, strict=True)
    ])  # fmt: skip
    write(cache, sequence, position, as_storage(rope(keys, angles, freqs, **options), cache.spec))
    return rope(np.asarray(query)[: len(position)], angles, freqs, **options)


def rope_padded(
    collection: KVCacheCollection, layer: int, query: Any, valid_lengths: Any, freqs: Any, *, interleaved: bool = True,
    position_ids: Any = None, mrope_section: Any = None, out: Any = None,
) -> np.ndarray:  # fmt: skip
    """:func:`rope_in_place` of a padded batch, sequence by sequence; what is skipped is that of ``out``.

    query: [B, Smax, Hq, Dq]; position_ids: [sections, B, Smax].
    """
    query = np.asarray(query)
    result = query.astype(np.float64) if out is None else np.asarray(out).astype(np.float64)
    for b, valid in enumerate(np.asarray(valid_lengths).astype(np.int64)):
        tokens = min(int(valid), query.shape[1])
        offsets = np.where(np.arange(len(query) + 1) > b, tokens, 0)
        ids = None if position_ids is None else np.asarray(position_ids)[:, b, :tokens]
        result[b, :tokens] = rope_in_place(
            collection, layer, query[b, :tokens], offsets, freqs, interleaved=interleaved, position_ids=ids,
            mrope_section=mrope_section,
        )  # fmt: skip
    return result


def qk_norm(
    collection: KVCacheCollection, layer: int, query: Any, row_offsets: Any, q_gamma: Any, k_gamma: Any, *,
    freqs: Any = None, interleaved: bool = False, eps: float = 1e-6, weight_offset: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Normalise, and with freqs rotate, the new tokens' keys in place and their queries, float64 [T, Hq, D].

    One rounding, of what is stored.
    """
    cache = collection.get_key_cache(layer)
    sequence, position = token_positions(row_offsets, cache.cache_lengths_nd())

    def done(x: np.ndarray, gamma: Any) -> np.ndarray:
        x = rms_normalize(x, gamma, eps, weight_offset)
        return x if freqs is None else rope(x, position, freqs, interleaved=interleaved)

    keys = np.concatenate([np.zeros((0, cache.num_heads, cache.head_size))] + [
        read(cache, b, t) for b, t in zip(sequence, position, strict=True)
    ])  # fmt: skip
    write(cache, sequence, position, as_storage(done(keys, k_gamma), cache.spec))
    return done(np.asarray(query)[: len(position)], q_gamma)


def rms_norm(
    cache: KVCache,
    gamma: Any,
    eps: float,
    row_offsets: Any,
    weight_offset: float = 0.0,
    multiply_before_cast: bool = True,
) -> None:
    """Normalise the new tokens of a cache in place, over the first C dims of each head, or over the whole row.

    gamma: [C]; C <= D, or C = H*D. ``multiply_before_cast``: one rounding, after the weight; else one before it too.
    """
    gamma = np.asarray(gamma).astype(np.float64)
    sequence, position = token_positions(row_offsets, cache.cache_lengths_nd())
    heads, size = cache.num_heads, cache.head_size
    for b, t in zip(sequence, position, strict=True):
        row = read(cache, int(b), t)[0]
        part = row[:, : len(gamma)] if len(gamma) <= size else row.reshape(1, heads * size)
        if multiply_before_cast:
            new = rms_normalize(part, gamma, eps, weight_offset)
        else:
            once = as_storage(rms_normalize(part, np.ones_like(gamma), eps), cache.spec).astype(np.float64)
            new = once * (gamma + weight_offset)
        part[...] = new
        write(cache, np.array([b]), np.array([t]), as_storage(row, cache.spec)[None])


# --- copies and sums -------------------------------------------------------------------------------


def gather_rows(cache: KVCache, token_ids: Any, row_offsets: Any) -> np.ndarray:
    """Stored values [R, Ns, H, D] of tokens: out[r, j] = cache(b(r), :, token_ids[r, j], :)."""
    token_ids = np.asarray(token_ids)
    sequence = token_sequences(row_offsets)
    rows, per_row = token_ids.shape
    shape = (rows, per_row, cache.num_heads, cache.head_size)
    b, t = sequence[:, None, None, None], token_ids.astype(np.int64)[:, :, None, None]
    if 0 in shape:
        return np.empty(shape, cache.dtype.numpy)
    load = cache.load_raw if cache.quantization_enabled else cache.load
    return np.asarray(load(b, np.arange(cache.num_heads)[:, None], t, np.arange(cache.head_size)))


def transfer_pages(
    source: KVCacheCollection, destination: KVCacheCollection, source_pages: Any, destination_pages: Any,
    layer: int | None = None,
) -> None:  # fmt: skip
    """Copy pages between pools, of one layer or all; pairs with an id outside of its pool are skipped."""
    axis = 1 if source.cache_spec.kind == layout.FA3 else 0
    for a, b in ((source.blocks, destination.blocks), (source.scales, destination.scales)):
        if a is None:
            continue
        by_page = [np.moveaxis(np.asarray(x), axis, 0) for x in (a, b)]
        layers = slice(None) if layer is None else layer
        for s, d in zip(np.asarray(source_pages).tolist(), np.asarray(destination_pages).tolist(), strict=True):
            if 0 <= s < source.num_blocks and 0 <= d < destination.num_blocks:
                by_page[1][d][:, layers] = by_page[0][s][:, layers]


def commit(collection: KVCacheCollection, layer: int | None, paths: list[list[int]]) -> None:
    """New token i of sequence b becomes what new token paths[b][i] was; of one layer, or of all."""
    layers = range(collection.num_layers) if layer is None else [layer]
    lengths = np.asarray(collection.cache_lengths).astype(np.int64)
    for n in layers:
        for cache in [collection.get_key_cache(n)] + ([] if collection.is_mla else [collection.get_value_cache(n)]):
            for b, path in enumerate(paths):
                if not path:
                    continue
                at, to = lengths[b] + np.array(path), lengths[b] + np.arange(len(path))
                heads, whose = np.arange(cache.num_heads)[None, :, None], np.full(len(path), b)
                read = cache.load_quantized if cache.spec.quantized else cache.load
                rows = np.array(read(b, heads, at[:, None, None], np.arange(cache.head_size)))
                scales = None
                if cache.spec.quantized:
                    starts = np.arange(cache.head_dim_granularity) * cache.quantization_granularity
                    scales = np.array(cache.load_scale(b, heads, at[:, None, None], starts))
                write(cache, whose, to, rows)
                if scales is not None:
                    write_scales(cache, whose, to, scales)


def copy_pages(collection: KVCacheCollection, source: Any, destination: Any) -> None:
    """Copy whole pages, all layers, K and V and scales; pairs with an id out of [0, N) are skipped."""
    pages = collection.num_blocks
    axis = 1 if collection.cache_spec.kind == layout.FA3 else 0
    for buffer in (collection.blocks, collection.scales):
        if buffer is None:
            continue
        by_page = np.moveaxis(np.asarray(buffer), axis, 0)
        for s, d in zip(np.asarray(source).tolist(), np.asarray(destination).tolist(), strict=True):
            if 0 <= s < pages and 0 <= d < pages:
                by_page[d] = by_page[s]


def convert(source: KVCache, destination: KVCache) -> None:
    """Copy every cached token to the same position of another cache, in its kind, page size and dtype."""
    for b, length in enumerate(source.cache_lengths_nd()):
        if length:
            t = np.arange(int(length))
            x = read(source, b, t)
            sequence = np.full(len(t), b)
            if destination.spec.quantized:
                stored, scales = quantize(x, destination.spec)
                write_scales(destination, sequence, t, scales)
            else:
                stored = as_storage(x, destination.spec)
            write(destination, sequence, t, stored)


def _add(cache: KVCache, sequence: np.ndarray, position: np.ndarray, x: np.ndarray) -> None:
    for b, t, row in zip(sequence, position, x, strict=True):
        total = read(cache, int(b), t) + row.astype(np.float64)[None]
        write(cache, np.array([b]), np.array([t]), as_storage(total, cache.spec))


def radd(collection: KVCacheCollection, layer: int, a: Any, row_offsets: Any, batch_offset: int = 0) -> None:
    """Add a [Tn, 2*H*D] (K half, then V half) to the tokens of a slice of the batch.

    ``row_offsets`` is a slice of the batch's offsets, whose first may be positive; row 0 of ``a`` belongs to it.
    ``batch_offset`` is the slice's first sequence.
    """
    a = np.asarray(a)
    offsets = np.asarray(row_offsets).astype(np.int64)
    lengths = collection.get_key_cache(layer).cache_lengths_nd()[batch_offset:]
    sequence, position = token_positions(offsets, lengths[: len(offsets) - 1])
    half, shape = a.shape[1] // 2, (-1, collection.num_heads, collection.head_size)
    _add(collection.get_key_cache(layer), sequence + batch_offset, position, a[: len(sequence), :half].reshape(shape))
    _add(collection.get_value_cache(layer), sequence + batch_offset, position, a[: len(sequence), half:].reshape(shape))


def iadd_2m(collection: KVCacheCollection, layer: int, kv: Any, row_offsets: Any) -> None:
    """Add kv [2m, H*D]: rows [0, m) to K, [m, 2m) to V, of the first m new tokens of the batch."""
    kv = np.asarray(kv)
    m = len(kv) // 2
    key = collection.get_key_cache(layer)
    sequence, position = token_positions(row_offsets, key.cache_lengths_nd()[: len(row_offsets) - 1])
    shape = (m, collection.num_heads, collection.head_size)
    _add(key, sequence[:m], position[:m], kv[:m].reshape(shape))
    _add(collection.get_value_cache(layer), sequence[:m], position[:m], kv[m:].reshape(shape))


# --- indices ---------------------------------------------------------------------------------------


def remap_sparse_indices(
    logical: Any, row_offsets: Any, lookup_table: Any, page_size: int, invalid_id: int
) -> np.ndarray:
    """int32 [R, Ks]: logical tokens as page*P + slot.

    A negative token stays as it is; a page past the table, or an entry >= ``invalid_id``, gives -1.
    """
    logical, table = np.asarray(logical).astype(np.int64), np.asarray(lookup_table).astype(np.int64)
    sequence = token_sequences(row_offsets)
    out = np.empty(logical.shape, np.int32)
    for (row, column), t in np.ndenumerate(logical):
        b = sequence[row] if row < len(sequence) else table.shape[0]
        page = t // page_size
        if t < 0:
            out[row, column] = t
        elif b >= table.shape[0] or page >= table.shape[1] or not 0 <= table[b, page] < invalid_id:
            out[row, column] = -1
        else:
            out[row, column] = table[b, page] * page_size + t % page_size
    return out


def mla_prefill_plan(
    row_offsets: Any, cache_lengths: Any, buffer_tokens: int, max_chunks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place the sequences' cached + new tokens, end to end, in chunks of ``buffer_tokens``.

    Returns
    -------
    tuple of numpy.ndarray
        int32 buffer_row_offsets [C, B+1], cache_offsets [C, B] (tokens of b placed in earlier chunks), and
        buffer_lengths [C], -1 past the last chunk.
    """
    totals = np.asarray(cache_lengths).astype(np.int64) + np.diff(np.asarray(row_offsets).astype(np.int64))
    starts = np.concatenate([[0], np.cumsum(totals)])
    chunk = np.arange(max_chunks)[:, None]
    # Where a global token falls in chunk c: before it, 0; after it, the end; else its place.
    row = np.clip(starts[None, :] - chunk * buffer_tokens, 0, buffer_tokens)
    placed = np.clip(chunk * buffer_tokens - starts[None, :-1], 0, totals[None, :])
    end = starts[-1]
    lengths = np.clip(end - chunk[:, 0] * buffer_tokens, 0, buffer_tokens)
    lengths[chunk[:, 0] > end // buffer_tokens] = -1
    return row.astype(np.int32), placed.astype(np.int32), lengths.astype(np.int32)


def mla_decompress_rows(cache: KVCache, buffer_row_offsets: Any, cache_offsets: Any, buffer_length: int) -> np.ndarray:
    """Stored latent rows of a chunk [n, D]: out[i] = K(b, 0, i - row_offsets[b] + cache_offsets[b])."""
    offsets = np.asarray(buffer_row_offsets).astype(np.int64)
    out = np.zeros((buffer_length, cache.head_size), cache.dtype.numpy)
    for b in range(len(offsets) - 1):
        rows = np.arange(offsets[b], min(offsets[b + 1], buffer_length))
        if len(rows):
            t = rows - offsets[b] + int(np.asarray(cache_offsets)[b])
            out[rows] = gather_rows(cache, t[None], [0] * (b + 1) + [1])[0, :, 0]
    return out


def project_append(
    collection: KVCacheCollection, layer: int, x: Any, weight: Any, row_offsets: Any, rounded: Any, *,
    query_heads: int = 0, query_size: int | None = None, bias: Any = None, scales: Any = None, freqs: Any = None,
    interleaved: bool = True, q_gamma: Any = None, k_gamma: Any = None, eps: float = 1e-6,
    index: tuple[KVCacheCollection, int] | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    """Write keys and values of x weight^T, and give the queries [T, Hq, Dq] and an indexer's, float64.

    ``rounded``: the dtype that products are rounded to; ``scales``: what each is multiplied by before; ``index``: the
    collection of an indexer and its query heads.
    """
    spec = collection.spec.cache
    c = np.asarray(x).astype(np.float64) @ np.asarray(weight).astype(np.float64).T
    c = c if scales is None else c * scales
    c = c if bias is None else c + np.asarray(bias).astype(np.float64)
    c = c.astype(np.float32).astype(rounded)
    size = spec.head_size if query_size is None else query_size
    extents = [(query_heads, size), (spec.num_heads, spec.head_size)]
    if not spec.is_mla and c.shape[1] != spec.row_size:
        extents.append((spec.num_heads, spec.head_size))
    if index is not None:
        of_index = index[0].spec.cache
        extents += [(index[1], of_index.head_size), (of_index.num_heads, of_index.head_size)]
    ends = np.cumsum([heads * d for heads, d in extents])
    parts = [part.reshape(len(c), *shape) for part, shape in zip(np.split(c, ends[:-1], axis=1), extents, strict=True)]
    index_query = None
    if index is not None:
        index_query, index_key = parts[-2:]
        parts = parts[:-2]
        append_to_cache(index[0].get_key_cache(layer), index_key, row_offsets)
    query, key = parts[:2]
    _, position = token_positions(row_offsets, collection.get_key_cache(layer).cache_lengths_nd())
    if q_gamma is not None:
        query, key = rms_normalize(query, q_gamma, eps), rms_normalize(key, k_gamma, eps)
    if freqs is not None:
        rows = np.zeros(len(query), np.int64)  # of rows that are no tokens nothing is looked at
        rows[: len(position)] = position
        query, key = (rope(part, rows, freqs, interleaved=interleaved) for part in (query, key))
    tokens = slice(0, len(position))
    append_to_cache(collection.get_key_cache(layer), key[tokens], row_offsets)
    if len(parts) > 2:
        append_to_cache(collection.get_value_cache(layer), parts[2][tokens], row_offsets)
    return query.astype(np.float64), index_query
