# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The cache operations as cases call them, each beside what its model does; see ``reference.cache_case``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.dialect.ops.weight_groups import PACKED

from . import foreign, model
from .cache_case import COMPUTED, QUANTIZED, Call, Model
from .case import sentinel
from .random_caches import random_problem, random_values
from .weights import random_groups

POSITIONS = 96  # rows of tables of angles


def on_stored_tokens(function: Callable[..., Model]) -> Callable[..., Model]:
    """Marks an operation that changes tokens of the step, which are stored before it."""
    function.stored = True  # type: ignore[attr-defined]
    return function


def angles(rng: np.random.Generator, turned: int, positions: int = POSITIONS) -> np.ndarray:
    """(cos, sin) pairs of random angles."""
    angle = rng.uniform(0, 2 * np.pi, (positions, turned // 2))
    return np.stack([np.cos(angle), np.sin(angle)], -1).reshape(positions, turned).astype(np.float32)


# --- stores ------------------------------------------------------------------------------------------


def append(a: Call, *, source: Any = None, scales: str = "", tensor_scales: Any = None) -> Model:
    """New tokens; of 8 bits some are too large, and granules of zeros. ``scales`` of a type are given."""
    source = source or (a.wide if a.spec.quantized else None)
    key, value = a.rows(source, spread=2.0), None if a.spec.is_mla else a.rows(source, spread=2.0)
    given: dict[str, Any] = {}
    a.most = QUANTIZED if a.spec.quantized else 0.0
    if a.spec.dtype.bits == 8 and dtypes.of(key.dtype).bits > 8 and len(key) > 1:
        key[0] = 0
        key[1::2] *= 400
        if not a.spec.quantized:
            key[1, 0, :3] = np.array([6e4, -6e4, np.inf], key.dtype)
    if scales:
        shape = (len(key), a.spec.num_heads, a.p.collection.head_dim_granularity)
        given = {f"{half}_scale": np.abs(random_values(a.rng, shape, dtypes.of(scales))) / 300
                 for half in ("key", "value")}  # fmt: skip
        given["key_scale"][0], given["value_scale"][1] = 0, 1e-7  # which becomes 1; with which values saturate
    if tensor_scales:
        given["tensor_scales"], a.most = np.array(tensor_scales, np.float32), QUANTIZED
    a(kv.ops.append, a.c, a.layer, key, value, a.offsets, **given)
    inner = [x if x is None else a.of_tokens(x) for x in (key, value)]
    return lambda e: model.append(e, a.of, *inner, a.p.row_offsets, **given)


def store_ragged(a: Call) -> Model:
    x = a.rows()
    a(kv.ops.store_ragged, a.value(), x, a.offsets)
    return lambda e: model.store_ragged(e.get_value_cache(a.of), a.of_tokens(x), a.p.row_offsets)


def store_padded(a: Call, *, valid: Any = None, more: int = 3) -> Model:
    """``valid`` lengths may be past the padding, where a call is not checked; kernels take them as signed."""
    x = a.padded(more)
    valid = np.asarray(a.p.new if valid is None else valid, np.int64).astype(np.uint32)
    a(kv.ops.store_padded, a.key(), x, valid)
    return lambda e: model.store_padded(e.get_key_cache(a.of), x, valid.view(np.int32).clip(0))


# --- rotations and norms -----------------------------------------------------------------------------


def _gammas(a: Call, dtype: Any = "f32") -> dict[str, np.ndarray]:
    extent = (a.spec.head_size,)
    return {name: random_values(a.rng, extent, dtypes.of(dtype)) for name in ("q_gamma", "k_gamma")}


def _positions(a: Call, positions: str, pairs: int, shape: Sequence[int]) -> dict[str, Any]:
    """Positions that are not those of the cache: given ones, or of three sections."""
    if not positions:
        return {}
    sections = [pairs // 2, pairs - pairs // 2 - 1, 1] if positions == "sections" else None
    ids = a.rng.integers(0, POSITIONS, (3 if sections else 1, *shape)).astype(np.int32)
    return {"position_ids": ids, "mrope_section": sections}


def rope_append(a: Call, *, turned: int = 16, interleaved: bool = True, gamma: str = "", heads: int = 6,
                inplace: bool = False) -> Model:  # fmt: skip
    """``gamma``: the type of norms' weights, if there are norms; ``inplace``: the query is its own output."""
    source = "f32" if a.spec.quantized else a.wide
    query, key, value = a.rows(source, heads), a.rows(source), a.rows(source)
    a.most = COMPUTED
    freqs, options = angles(a.rng, turned), {"eps": 1e-3, **_gammas(a, gamma)} if gamma else {}
    out = a.put(query.copy()) if inplace else a.empty(query)
    back = a(
        kv.ops.rope_append, a.c, a.layer, out if inplace else query, key, value, a.offsets, freqs, query_out=out,
        interleaved=interleaved, **options,
    )  # fmt: skip
    assert back is out

    def expected(e: Any) -> Any:
        inner = map(a.of_tokens, (query, key, value))
        turned_rows = model.rope_append(e, a.of, *inner, a.p.row_offsets, freqs, interleaved=interleaved, **options)
        return [(out, a.beside(query, turned_rows))]

    return expected


@on_stored_tokens
def rope(a: Call, *, turned: int = 12, interleaved: bool = True, positions: str = "", size: int = 16,
         source: Any = None) -> Model:  # fmt: skip
    """``size``: of the query's heads, which need not be that of the keys."""
    query, freqs, a.most = a.rows(source or "f32", 3, size), angles(a.rng, turned), COMPUTED
    given = {"interleaved": interleaved, **_positions(a, positions, turned // 2, (a.p.tokens,))}
    out = a.empty(query)
    a(kv.ops.rope, a.c, a.layer, query, a.offsets, freqs, query_out=out, **given)
    return lambda e: [(out, model.rope_in_place(e, a.of, query, a.p.row_offsets, freqs, **given))]


@on_stored_tokens
def rope_padded(a: Call, *, turned: int = 16, interleaved: bool = True, positions: str = "", size: int = 16,
                more: int = 1, valid: Any = None, source: Any = None) -> Model:  # fmt: skip
    query, freqs, a.most = a.padded(more, source or a.wide, 3, size), angles(a.rng, turned), COMPUTED
    valid = np.asarray(a.p.new if valid is None else valid, np.uint32)
    given = {"interleaved": interleaved, **_positions(a, positions, turned // 2, query.shape[:2])}
    out = a.empty(query)
    assert a(kv.ops.rope_padded, a.c, a.layer, query, valid, freqs, query_out=out, **given) is out
    return lambda e: [(out, model.rope_padded(e, a.of, query, valid, freqs, out=sentinel(query), **given))]


@on_stored_tokens
def qk_norm(a: Call, *, turned: int = 0, interleaved: bool = True, offset: float = 0.0, heads: int = 6,
            inplace: bool = False, gamma: str = "f32", source: Any = None) -> Model:  # fmt: skip
    query, gammas, a.most = a.rows(source or a.wide, heads), list(_gammas(a, gamma).values()), COMPUTED
    freqs = angles(a.rng, turned) if turned else None
    rotation = {"interleaved": interleaved} if turned else {}
    out = a.put(query.copy()) if inplace else a.empty(query)
    back = a(
        kv.ops.qk_norm, a.c, a.layer, out if inplace else query, a.offsets, *gammas, freqs_cis=freqs, query_out=out,
        eps=1e-3, weight_offset=offset, **rotation,
    )  # fmt: skip
    assert back is out
    options = {"eps": 1e-3, "weight_offset": offset, "freqs": freqs, **rotation}
    return lambda e: [(out, model.qk_norm(e, a.of, query, a.p.row_offsets, *gammas, **options))]


@on_stored_tokens
def qk_norm_with_index(a: Call, *, turned: int = 0, heads: int = 6, index_heads: int = 2) -> Model:
    """Heads of an indexer in the same launch: of a cache with pages and elements of its own."""
    shape = {"num_heads": 1, "is_mla": True, "page_size": 32, "cached": a.p.cached, "new": a.p.new}
    other = random_problem(a.rng, "paged", "f32", poison=1.0, **shape).collection
    query, index_query, a.most = a.rows(None, heads), a.rows("f32", index_heads), COMPUTED
    main, index = (list(_gammas(a).values()) for _ in range(2))
    freqs, placed = angles(a.rng, turned) if turned else None, a.place.collection(other)
    heads_of_index = kv.ops.IndexHeads(placed, a.put(index_query), *map(a.put, index))
    out, index_out = a(
        kv.ops.qk_norm, a.c, a.layer, query, a.offsets, *main, index=heads_of_index, freqs_cis=freqs
    )  # fmt: skip

    def expected(e: Any) -> Any:
        wanted = model.qk_norm(e, a.of, query, a.p.row_offsets, *main, freqs=freqs)
        of_index = model.qk_norm(other, a.of, index_query, a.p.row_offsets, *index, freqs=freqs)
        return [(out, wanted), (index_out, of_index), (placed.blocks, other.blocks)]

    return expected


@on_stored_tokens
def rms_norm(a: Call, *, size: int = 16, gamma: Any = None, offset: float = 0.5, before_cast: bool = True,
             total: int | None = None) -> Model:  # fmt: skip
    """``total``: a hint of how many tokens there are, of which only 0 changes anything."""
    weight, a.most = random_values(a.rng, (size,), dtypes.of(gamma or a.spec.dtype)), COMPUTED
    options = {"weight_offset": offset, "multiply_before_cast": before_cast}
    a(kv.ops.rms_norm, a.value(), weight, 1e-5, a.offsets, total_tokens=total, **options)
    if total == 0:
        return lambda e: None
    return lambda e: model.rms_norm(e.get_value_cache(a.of), weight, 1e-5, a.p.row_offsets, **options)


# --- sums --------------------------------------------------------------------------------------------


@on_stored_tokens
def radd(a: Call, *, first: int = 0, last: int | None = None, more: int = 0) -> Model:
    """To a slice of the batch; ``more`` rows belong to no token."""
    offsets = np.ascontiguousarray(a.p.row_offsets[first : None if last is None else last + 1])
    tokens = int(offsets[-1] - offsets[0])
    x = random_values(a.rng, (tokens + more, 2 * a.spec.row_size), a.spec.dtype)
    a(kv.ops.radd, a.c, a.layer, x, offsets, first)
    return lambda e: model.radd(e, a.of, x[:tokens], offsets, first)


@on_stored_tokens
def iadd_2m(a: Call, *, m: int | None = None, sequences: int | None = None, more: int = 0) -> Model:
    """To the first ``m`` tokens, of the first sequences alone where the others are not named."""
    m = a.p.tokens if m is None else m
    offsets = np.ascontiguousarray(a.p.row_offsets[: None if sequences is None else sequences + 1])
    x = random_values(a.rng, (2 * (m + more), a.spec.row_size), a.spec.dtype)
    a(kv.ops.iadd_2m, a.c, a.layer, x, offsets)
    kept = np.concatenate([x[:m], x[m + more : 2 * m + more]])
    return lambda e: model.iadd_2m(e, a.of, kept, offsets)


# --- copies ------------------------------------------------------------------------------------------


def gather(a: Call, *, half: str = "key", ids: Any = None, offsets: Any = None) -> Model:
    """Rows of tokens; the third sequence has none, and the output's last row is of no sequence."""
    offsets = np.array([0, 2, 5, 5, 7] if offsets is None else offsets, np.uint32)
    if ids is None:
        of = a.p.cached[model.token_sequences(offsets)]
        ids = np.stack([a.rng.integers(0, n, 5) for n in of] or np.zeros((0, 5)))
    ids = np.concatenate([ids, np.ones((1, np.shape(ids)[1]))]).astype(np.int32)
    cache = getattr(a.c, f"get_{half}_cache")(a.layer)
    out = a.empty(np.zeros((*ids.shape, a.spec.num_heads, a.spec.head_size), a.spec.dtype.numpy))
    assert a(kv.ops.gather, cache, ids, offsets, out) is out

    def expected(e: Any) -> Any:
        want = sentinel(a.place.get(out))
        want[:-1] = model.gather_rows(getattr(e, f"get_{half}_cache")(a.of), ids[:-1], offsets)
        return [(out, want)]

    return expected


PATHS = [[0, 2, 5, 8], [], [0], [], [0, 1, 2, 3, 4, 6, 9, 33, 64, 69]]
DRAFTS: dict[str, Any] = {"cached": [5, 9, 0, 30, 3], "new": [9, 0, 1, 6, 70], "num_layers": 3}


@on_stored_tokens
def commit(a: Call, *, paths: Any = None, layer: int | None = None, end: int = -1, most: int = 12,
           at_rows: bool = False) -> Model:  # fmt: skip
    """``end``: what stands behind a path; ``at_rows``: lists stand at the rows of the step."""
    paths = PATHS if paths is None else paths
    given = np.full((len(paths), max(most, *map(len, paths))) if most else (len(paths), 0), end, np.int32)
    for of, path in zip(given, paths, strict=True):
        of[: len(path)] = path
        of[len(path) + 1 :] = 0 if end != -1 else -1  # what lies behind the end does not count
    if at_rows:
        given = np.full(a.p.tokens, -1, np.int32)
        for start, path in zip(a.p.row_offsets, paths, strict=False):
            given[start : start + len(path)] = path
    a(kv.ops.commit, a.c, layer, given, a.p.row_offsets)
    return lambda e: model.commit(e, layer, paths)


def copy_pages(a: Call, *, count: int | None = None) -> Model:
    """Of which the last four pairs name no page."""
    n = a.p.collection.num_blocks
    pairs = [(0, n - 1), (1, 4), (n - 2, 3), (999, 5), (-1, 5), (2, n), (n, 5)][:count]
    source, destination = (np.array([pair[i] for pair in pairs], np.int32) for i in range(2))
    a(kv.ops.copy_pages, a.c, source, destination)
    return lambda e: model.copy_pages(e, source, destination)


def transfer_pages(a: Call, *, layer: int | None = None, count: int | None = None, of: str = "") -> Model:
    """From another pool of the same spec, or of a layout; the last four pairs name no page."""
    spec, c = a.spec, a.p.collection
    shape: dict[str, Any] = {
        "num_heads": spec.num_heads, "head_size": spec.head_size, "is_mla": spec.is_mla, "cached": a.p.cached,
        "new": a.p.new, "num_layers": c.num_layers, "page_size": spec.page_size, "spare_pages": 7,
    }  # fmt: skip
    if spec.quantized:
        shape |= {"scale_dtype": spec.scale_dtype, "granularity": c.quantization_granularity}
    other = random_problem(a.rng, spec.kind, spec.dtype, **shape).collection
    n, m = other.num_blocks, c.num_blocks
    pairs = [(0, m - 1), (1, 0), (n - 1, 1), (2, 2), (n, 3), (-1, 3), (0, m), (1, -2)][:count]
    ids, (placed, _, unchanged) = [np.array([p[i] for p in pairs], np.int32) for i in range(2)], _placed(a, other, of)
    a(kv.ops.transfer_pages, placed, a.c, *ids, layer)

    def expected(e: Any) -> Any:
        model.transfer_pages(other, e, *ids, layer)
        return unchanged

    return expected


def _placed(a: Call, other: Any, layout: str) -> tuple[Any, Any, list[Any]]:
    """A collection to read, as it is or in a layout, its keys, and what its buffers are to hold afterwards."""
    if layout:
        pool = foreign.pool_of(a.place, layout, other)
        return pool.collection, pool.key, list(zip(pool.buffers, pool.expected(other), strict=True))
    placed = a.place.collection(other)
    return placed, placed.get_key_cache(0), [(placed.blocks, np.asarray(other.blocks))]


def convert(a: Call, *, source: Mapping[str, Any], of: str = "", stray: bool = False) -> Model:
    """Every cached token of another cache, of a layout where there is ``of``, into the values.

    ``stray``: the other cache's table has an entry that names no page.
    """
    shape = {"num_heads": a.spec.num_heads, "head_size": a.spec.head_size, "cached": a.p.cached,
             "new": [1] * len(a.p.cached), "num_layers": 1, "page_size": 8, **source}  # fmt: skip
    other = random_problem(a.rng, **shape).collection
    if stray:
        other.lookup_table[0, 1] = other.num_blocks
    a.most = QUANTIZED if a.spec.quantized or other.scales is not None else 0.0
    _, key, unchanged = _placed(a, other, of)
    a(kv.ops.convert, key, a.value())

    def expected(e: Any) -> Any:
        target, from_ = e.get_value_cache(a.of), other.get_key_cache(0)
        kept = [target.load(0, np.arange(a.spec.num_heads)[:, None], t, np.arange(a.spec.head_size)) for t in
                range(8, min(16, int(a.p.cached[0])))] if stray else []  # fmt: skip
        model.convert(from_, target)
        for t, x in enumerate(kept, 8):
            model.write(target, np.array([0]), np.array([t]), x[None])
        return unchanged

    return expected


# --- projections -------------------------------------------------------------------------------------


def exact(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Small multiples of 1/4, whose products add up exactly in any order."""
    return (rng.integers(-4, 5, tuple(shape)) / 4).astype(np.float32).astype(dtypes.of(dtype).numpy)


def _factors(a: Call, rows: int, columns: int, k: int, x_type: Any, scaling: str, groups: Any) -> tuple[Any, ...]:
    """Rows and a weight as they are given, with their scales, and the values that they have.

    ``scaling``: of 8-bit elements, one a tensor, a row, or a block of 128 columns; ``groups``: of
    :func:`.weights.random_groups`, of the weight, and of the rows too where there is ``own``.
    """
    if groups:
        size, element, scale, more = groups["size"], groups["element"], groups["scale"], dict(groups.get("more", {}))
        weight = random_groups(a.rng, columns, k, size, element, scale, **more)
        options: dict[str, Any] = {"weight_scale": weight.scales, "weight_min": weight.minima}
        options["weight_format"] = element if element in PACKED else "plain"
        if groups.get("own"):
            x = random_groups(a.rng, rows, k, size, element, scale, **more)
            options |= {"x_scale": x.scales, "tensor_scale": np.full((1, 1), 0.25, np.float32)}
            return x.elements, weight.elements, options, x.values / 4, weight.values
        x = (a.rng.integers(-2, 3, (rows, k)) / 2).astype(np.float32).astype(dtypes.of(x_type).numpy)
        return x, weight.elements, options, x, weight.values
    x, weight = exact(a.rng, (rows, k), x_type), exact(a.rng, (columns, k), x_type)
    if not scaling:
        return x, weight, {}, x, weight
    shapes = {"tensor": ((1, 1), (1, 1)), "row": ((rows, 1), (columns, 1)),
              "block": ((rows, k // 128), (-(-columns // 128), k // 128))}[scaling]  # fmt: skip
    scales = [2.0 ** a.rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]
    spread = [np.repeat(s.astype(np.float64), k // s.shape[1], axis=1) for s in scales]
    if scaling == "block":
        spread[1] = np.repeat(spread[1], 128, axis=0)[:columns]
    values = [v.astype(np.float64) * s for v, s in zip((x, weight), spread, strict=True)]
    return x, weight, {"x_scale": scales[0], "weight_scale": scales[1]}, *values


def project(a: Call, *, k: int = 64, heads: int = 4, element: Any = None, query_size: int = 0, bias: Any = None,
            turned: int = 0, interleaved: bool = True, norm: bool = False, scaling: str = "", groups: Any = None,
            spare: int = 0, values: bool = True) -> Model:  # fmt: skip
    """Rows by a weight of queries, keys and values; ``spare`` rows behind the batch are of nobody.

    ``element``: what products are rounded to, by default the cache's; ``bias``: of a type, or a number in all columns.
    """
    made, size = dtypes.of(element or a.wide), query_size or a.spec.head_size
    a.most = COMPUTED if turned or norm or a.spec.quantized else 0.0
    columns = heads * size + a.spec.row_size * (1 if a.spec.is_mla or not values else 2)
    x_type = "f8e4m3" if scaling else made
    x, weight, scales, x_values, weight_values = _factors(a, a.p.tokens + spare, columns, k, x_type, scaling, groups)
    options: dict[str, Any] = {}
    if bias is not None:
        large = isinstance(bias, int)
        options["bias"] = np.full(columns, bias, np.float32) if large else exact(a.rng, (columns,), bias)
    if norm:
        options |= {"eps": 1e-3, **{n: exact(a.rng, (a.spec.head_size,), "f32") for n in ("q_gamma", "k_gamma")}}
    freqs = angles(a.rng, turned) if turned else None
    out = a.empty(np.zeros((a.p.tokens + spare, heads, size), made.numpy)) if heads else None
    back = a(
        kv.ops.project_append, a.c, a.layer, x, weight, a.p.row_offsets, query_out=out, freqs_cis=freqs,
        interleaved=interleaved, **options, **scales,
    )  # fmt: skip
    assert back is out

    def expected(e: Any) -> Any:
        queries, _ = model.project_append(
            e, a.of, x_values, weight_values, a.p.row_offsets, made.numpy, query_heads=heads, query_size=size,
            freqs=freqs, interleaved=interleaved, **options,
        )  # fmt: skip
        return [(out, a.beside(a.place.get(out), queries[: a.p.tokens]))] if heads else None

    return expected


def project_padded(a: Call, *, k: int = 64, heads: int = 4, turned: int = 0, groups: Any = None) -> Model:
    """A padded batch: queries of every row, keys and values of valid tokens."""
    steps, size = int(a.p.new.max(initial=0)) + 1, a.spec.head_size
    columns, rows = heads * size + 2 * a.spec.row_size, len(a.p.new) * steps
    x, weight, scales, x_values, weight_values = _factors(a, rows, columns, k, a.wide, "", groups)
    freqs, a.most = angles(a.rng, turned) if turned else None, COMPUTED if turned else 0.0
    shape = (len(a.p.new), steps, heads, size)
    out = a.empty(np.zeros(shape, a.wide.numpy))
    x = x.reshape(len(a.p.new), steps, -1)
    a(kv.ops.project_append_padded, a.c, a.layer, x, weight, a.p.new.astype(np.uint32), query_out=out,
      freqs_cis=freqs, **scales)  # fmt: skip
    kept = np.concatenate([np.arange(n) + b * steps for b, n in enumerate(a.p.new)]).astype(int)

    def expected(e: Any) -> Any:
        model.project_append(
            e, a.of, x_values[kept], weight_values, a.p.row_offsets, a.wide.numpy, query_heads=heads, freqs=freqs
        )
        queries = x_values.astype(np.float64) @ weight_values[: heads * size].astype(np.float64).T
        queries = queries.astype(np.float32).astype(a.wide.numpy).reshape(rows, heads, size)
        if freqs is not None:
            positions = (a.p.cached[:, None] + np.arange(steps)).reshape(-1)
            queries = model.rope(queries, positions, freqs)
        return [(out, queries.reshape(shape))]

    return expected


def project_with_index(a: Call, *, heads: int = 3, index_heads: int = 5, turned: int = 16) -> Model:
    """An indexer's bands of columns go to a cache of its own."""
    shape = {"num_heads": 1, "head_size": 24, "is_mla": True, "page_size": 8, "cached": a.p.cached, "new": a.p.new}
    other = random_problem(a.rng, "paged", a.spec.dtype, **shape).collection
    size, freqs, a.most = a.spec.head_size, angles(a.rng, turned), COMPUTED
    x = exact(a.rng, (a.p.tokens, 64), a.wide)
    weight = exact(a.rng, (heads * size + 2 * a.spec.row_size + index_heads * 24 + 24, 64), a.wide)
    index, index_out = a.place.collection(other), a.empty(np.zeros((a.p.tokens, index_heads, 24), x.dtype))
    out = a(kv.ops.project_append, a.c, a.layer, x, weight, a.p.row_offsets, freqs_cis=freqs, index_collection=index,
            index_query_out=index_out)  # fmt: skip

    def expected(e: Any) -> Any:
        of_index: Any = (other, index_heads)
        wanted, queries = model.project_append(
            e, a.of, x, weight, a.p.row_offsets, x.dtype, query_heads=heads, freqs=freqs, index=of_index
        )
        assert queries is not None
        return [(out, wanted), (index_out, queries), (index.blocks, other.blocks)]

    return expected
