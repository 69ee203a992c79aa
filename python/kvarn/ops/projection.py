# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Projections that write keys and values to the cache: project_append, project_append_padded."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from kvarn.dialect.layout import CacheSpec, cdiv
from kvarn.dialect.ops.projection import BLOCK, SCALED, bands_of, rounded_to
from kvarn.dialect.ops.weight_groups import ATOM, FORMATS, PACKED, PLAIN, PLAIN_TYPES, groups_of
from kvarn.dispatch import FixedSchedule, Missed, Operation, Schedule
from kvarn.runtime import buffers
from kvarn.runtime.buffers import BufferView

from . import checks
from .checks import layer_of
from .forms import of_padded_batches, parameters_of


def _packed(view: BufferView, name: str) -> None:
    """Check that rows are contiguous in memory, one after another."""
    if view.shape[0] > 1 and view.strides[0] != view.shape[1]:
        raise ValueError(
            f"{name} must have contiguous rows, got strides {list(view.strides)} (elements) for shape "
            f"{list(view.shape)}; use .contiguous()"
        )


def _check(seen: SimpleNamespace) -> None:
    spec, title = checks.spec_of(seen), seen.title
    rows = "B * S" if hasattr(seen, "valid_lengths") else "T"
    grouped = seen.attributes["scaling"] == "group"
    for name in ("x", "weight"):
        checks.array(seen, name, (rows if name == "x" else "N", "K"), () if grouped else (*checks.FLOATS, SCALED))
        _packed(getattr(seen, name), f"{title}: {name}")
    (tokens, k), (columns, _) = seen.x.shape, seen.weight.shape
    most = seen.schedule.get("max_tokens", tokens)
    if tokens > most:
        raise ValueError(f"{title}: x must have no more than the schedule's max_tokens = {most} rows, got {tokens}")
    if grouped:
        _check_groups(seen)
    elif k < 1 or seen.weight.shape[1] != k:
        raise ValueError(f"{title}: weight must have the K = {k} of x, at least 1, got shape {list(seen.weight.shape)}")
    else:
        checks.like(seen, "weight", "x")
    for name in ("query_out", "index_query_out"):
        checks.array(seen, name, (tokens, "Hq", "Dq"), checks.FLOATS)
    checks.together(seen, "index_collection", "index_query_out")
    index = None
    if seen.index_collection is not None:
        checks.with_values(seen)
        index = seen.index_collection.spec.cache, tuple(seen.index_query_out.shape[1:])
        if seen.index_collection.batch_size != seen.collection.batch_size:
            raise ValueError(
                f"{title}: index_collection must have the {seen.collection.batch_size} sequences of collection, got "
                f"{seen.index_collection.batch_size}"
            )
        if not seen.layer < seen.index_collection.num_layers:
            raise IndexError(f"{title}: layer must be one of index_collection, got {seen.layer}")
    query = None if seen.query_out is None else tuple(seen.query_out.shape[1:])
    found = bands_of(spec, columns, query, index)
    if isinstance(found, str):
        raise ValueError(f"{title}: {found}")
    _check_types(seen, spec)
    checks.array(seen, "bias", (columns,), checks.FLOATS)
    if not grouped:
        _check_scales(seen)
    checks.together(seen, "q_gamma", "k_gamma")
    if seen.freqs is not None or seen.q_gamma is not None:
        checks.with_values(seen)
        if seen.query_out is None:
            raise ValueError(f"{title}: freqs_cis and gammas need queries, got a weight of keys and values alone")
        checks.array(seen, "query_out", (tokens, "Hq", spec.head_size))
        checks.rotation(seen, spec.head_size)
        checks.gammas(seen, spec.head_size, "q_gamma", "k_gamma")
    checks.row_table(seen)


def _check_types(seen: SimpleNamespace, spec: CacheSpec) -> None:
    title = seen.title
    outs = [(n, getattr(seen, n)) for n in ("query_out", "index_query_out") if getattr(seen, n) is not None]
    rounded = rounded_to(spec, seen.x.dtype, outs[0][1].dtype if outs else None)
    for name, view in outs:
        if view.dtype != rounded:
            raise TypeError(f"{title}: {name} must have dtype {rounded.name}, got {view.dtype.name}")
    if seen.x.dtype.name in checks.FLOATS and seen.x.dtype != rounded:
        raise TypeError(
            f"{title}: x must have dtype {rounded.name}, which products are rounded to, got {seen.x.dtype.name}"
        )
    for name in ("collection", "index_collection"):
        handle = getattr(seen, name)
        if handle is not None and rounded.name not in checks.storable(handle.spec.cache):
            raise TypeError(
                f"{title}: {name} of {handle.spec.cache.dtype.name} cannot take the {rounded.name} that products are "
                "rounded to"
            )


def _check_groups(seen: SimpleNamespace) -> None:
    """Check a product with scales by groups: matching types, one K, and group scales of the right shape."""
    title, name, x, weight = seen.title, seen.attributes["weight_format"], seen.x, seen.weight
    checks.has_dtype(weight, ("u8", "i8") if name in PACKED else PLAIN_TYPES, f"{title}: weight")
    if x.dtype.name not in checks.FLOATS:
        same = x.dtype == weight.dtype and (name == "e2m1" or (name == PLAIN and x.dtype.name == SCALED))
        if not same:
            raise TypeError(
                f"{title}: x must be of floats, or {SCALED} as its weight, or bytes as a weight of e2m1, got "
                f"{x.dtype.name} with a weight of {weight.dtype.name} and weight_format {name!r}"
            )
    k, of_weight = (v.shape[1] * (2 if name in PACKED and v.dtype.bits == 8 else 1) for v in (x, weight))
    if k != of_weight:
        raise ValueError(f"{title}: weight must have the K = {k} of x, got rows of {of_weight} elements")
    if seen.weight_scale is None or (seen.x_scale is None) != (x.dtype.name in checks.FLOATS):
        raise ValueError(f"{title}: weight_scale must be given, and x_scale if x has no floats, and only then")
    for what, scale, rows in (
        ("x_scale", seen.x_scale, x.shape[0]),
        ("weight_scale", seen.weight_scale, weight.shape[0]),
    ):
        if scale is not None:
            found = groups_of(scale.shape, scale.dtype.name, rows, k, f"{title}: {what}")
            if isinstance(found, str):
                raise ValueError(found)
    checks.array(seen, "weight_min", tuple(seen.weight_scale.shape), (seen.weight_scale.dtype.name,))
    checks.array(seen, "tensor_scale", (1, 1), ("f32",))


def _check_scales(seen: SimpleNamespace) -> None:
    title = seen.title
    checks.together(seen, "x_scale", "weight_scale")
    if seen.x_scale is None:
        return
    if seen.x.dtype.name != SCALED:
        raise TypeError(f"{title}: x_scale and weight_scale go with x of dtype {SCALED}, got {seen.x.dtype.name}")
    scaling, (tokens, k), n = seen.attributes["scaling"], seen.x.shape, seen.weight.shape[0]
    wanted = {
        "tensor": ((1, 1), (1, 1)),
        "row": ((tokens, 1), (n, 1)),
        "block": ((tokens, cdiv(k, BLOCK)), (cdiv(n, BLOCK), cdiv(k, BLOCK))),
    }[scaling]
    for name, shape in zip(("x_scale", "weight_scale"), wanted, strict=True):
        checks.array(seen, name, shape, ("f32",))


_STATIC = {
    "x": 1, "weight": 0, "query_out": 1, "bias": 0, "x_scale": 1, "weight_scale": 0, "weight_min": 0, "tensor_scale": 0,
    "freqs": 1, "q_gamma": 0,
    "k_gamma": 0, "index_query_out": 1,
}  # fmt: skip
_WRITTEN = ("query_out", "index_query_out")
_SINGLE = ("bias", "x_scale", "weight_scale", "weight_min", "tensor_scale")
_RAGGED = Operation("kv.project_append", _STATIC, _check, _WRITTEN, single=_SINGLE)
_PADDED = Operation("kv.project_append_padded", _STATIC, _check, _WRITTEN, single=_SINGLE)


def project_append(
    collection: Any,
    layer: int,
    x: Any,
    weight: Any,
    row_offsets: Any,
    *,
    bias: Any = None,
    x_scale: Any = None,
    weight_scale: Any = None,
    weight_min: Any = None,
    tensor_scale: Any = None,
    weight_format: str = PLAIN,
    freqs_cis: Any = None,
    interleaved: bool = True,
    q_gamma: Any = None,
    k_gamma: Any = None,
    eps: float = 1e-6,
    query_out: Any = None,
    query_size: int | None = None,
    index_collection: Any = None,
    index_query_out: Any = None,
    schedule: Schedule = None,
    stream: Any = None,
) -> Any:
    """Multiply the new tokens by a weight, return the queries, and write keys and values to one layer.

    C = x @ weight.T + bias, in f32, rounded to the dtype of the queries. The weight's rows are, in order, those of the
    queries, the keys (all D columns for an MLA collection), the values (not for MLA) and, with an index collection, the
    indexer's queries and keys. A weight of 2 * H * D rows has no queries, a weight of H * D rows only keys. Queries and
    keys are then normalised and rotated, and keys and values written, as by :func:`rope_append` or, without angles and
    gammas, by :func:`append`.

    Parameters
    ----------
    collection : KV cache collection
    layer : int
    x : f32, f16, bf16 or f8e4m3 array-like [T, K]
        The dtype of the queries, or f8e4m3. Rows are contiguous. With scales by groups also uint8 [T, K / 2].
    weight : array-like [N, K]
        The dtype of x. With scales by groups also another 8-bit type, or uint8 [N, K / 2]. Rows are contiguous.
    row_offsets : uint32 or int32 array-like [B + 1]
    bias : f32, f16 or bf16 array-like [N], optional
    x_scale, weight_scale : f32 array-like, optional
        Factors of f8e4m3 products: [1, 1] both (per tensor), [T, 1] and [N, 1] (per row), or [T, ceil(K / 128)] and
        [ceil(N / 128), ceil(K / 128)] (per block of 128). Scales by groups of g elements along K: weight_scale is
        [N, K / g] of f32, f16, bf16, f8e4m3 or f8e8m0, g a multiple of 8, or [ceil(N / 128), ceil(K / (4 g)), 32, 4, 4]
        in the layout of sm_100's tensor cores: f8e8m0 for 32 or f8e4m3 for 16 elements. x_scale has the same form if x
        has the weight's elements, f8e4m3 or e2m1.
    weight_min : array-like, optional
        The shape and dtype of a weight_scale by groups: a value is element * scale - minimum.
    tensor_scale : f32 array-like [1, 1], optional
        A factor of all products with scales by groups.
    weight_format : {"plain", "uint4b8", "int4", "uint4", "e2m1"}
        ``plain``: the array's own elements (i8, f8e4m3, f8e5m2). The other formats have 4 bits, two elements per byte,
        the first in the low half: offset by 8 (GPTQ), two's complement, unsigned, and FP4. Values are rounded to x's
        dtype before multiplication, or to bf16 if x has scales by groups.
    freqs_cis, interleaved, q_gamma, k_gamma, eps
        As in :func:`rope_append`; each is optional.
    query_out : array-like [T, Hq, Dq], optional
        By default allocated by the library of x (torch, CuPy or NumPy), with bf16 for an f8e4m3 x and an 8-bit cache.
        None for a weight without queries.
    query_size : int, optional
        Dq of an allocated ``query_out``; by default D.
    index_collection : KV cache collection, optional
        The cache of an indexer's keys, with the sequences of ``collection``.
    index_query_out : array-like [T, Hi, Di], optional
        Required with ``index_collection``.

    Returns
    -------
    array-like [T, Hq, Dq] or None
        ``query_out``. Rows before the first offset and from the last on are not written.
    """
    given = (
        collection, layer, x, weight, row_offsets, bias, x_scale, weight_scale, weight_min, tensor_scale,
        weight_format, freqs_cis, interleaved, q_gamma, k_gamma, eps, query_out, query_size, index_collection,
        index_query_out, schedule,
    )  # fmt: skip
    return _run(_RAGGED, given, stream)


_GIVEN = tuple("freqs" if n == "freqs_cis" else n for n in parameters_of(project_append) if n != "stream")
_X, _QUERY_OUT, _INDEX_QUERY_OUT = (_GIVEN.index(n) for n in ("x", "query_out", "index_query_out"))
_NAMES = {_RAGGED: _GIVEN, _PADDED: tuple("valid_lengths" if n == "row_offsets" else n for n in _GIVEN)}


@of_padded_batches(project_append)
def project_append_padded(arguments: tuple[Any, ...], stream: Any) -> Any:
    """:func:`project_append` for a padded batch; T is B * S.

    Parameters
    ----------
    x : array-like [B, S, K]
        Contiguous. Token t of sequence b is at position ``cache_lengths[b] + t``.
    valid_lengths : uint32 or int32 array-like [B]
        Keys and values of tokens t >= ``valid_lengths[b]`` are not written; queries of all tokens are.
    query_out, index_query_out : array-like [B, S, Hq, Dq], optional
        Contiguous.

    Returns
    -------
    array-like [B, S, Hq, Dq] or None
        ``query_out``.
    """
    given, name = list(arguments), f"{_PADDED.title}: "
    queries, shape = given[_QUERY_OUT], checks.shape_of(given[_X], name + "x", 3)
    given[_X] = _as_rows(given[_X], (shape[0] * shape[1], shape[2]), name + "x")
    for i in (_QUERY_OUT, _INDEX_QUERY_OUT):
        if given[i] is not None:
            given[i] = _as_queries(given[i], shape, name + _GIVEN[i])
    found = _run(_PADDED, tuple(given), stream)
    if queries is not None or found is None:
        return queries
    return found.reshape(*shape[:2], *found.shape[1:])


def _as_queries(array: Any, shape: tuple[int, ...], name: str) -> Any:
    got = checks.shape_of(array, name, 4)
    if got[:2] != shape[:2]:
        raise ValueError(f"{name} must have shape [{shape[0]}, {shape[1]}, Hq, Dq], got {list(got)}")
    return _as_rows(array, (got[0] * got[1], *got[2:]), name)


def _as_rows(array: Any, shape: tuple[int, ...], name: str) -> Any:
    """An array with its first two dimensions merged: a view of the same memory, or an error."""
    view = buffers.view(array, name=name)
    if not view.contiguous:
        raise ValueError(f"{name} must be contiguous, got strides {list(view.strides)} (elements)")
    return array.reshape(shape)


def _run(operation: Operation, given: tuple[Any, ...], stream: Any) -> Any:
    """:func:`project_append` or its padded form with the arguments in the order of ``_GIVEN``."""
    (
        collection, layer, x, weight, table, bias, x_scale, weight_scale, weight_min, tensor_scale, weight_format,
        freqs, interleaved, q_gamma, k_gamma, eps, query_out, query_size, index_collection, index_query_out, schedule,
    ) = given  # fmt: skip
    answer, title = None, operation.title
    if query_out is not None:
        answer = operation.try_cached_launch(given, stream)
        if answer is True:
            return query_out
    layer = layer_of(collection, layer, title)
    if freqs is not None:
        checks.positions_cover(freqs, collection, title)
    if eps.__class__ is not float or eps - eps != 0:
        eps = checks.number(eps, "eps", title)
    if query_out is None:
        query_out = _queries(collection, x, weight, query_size, index_collection, index_query_out, title)
    if weight_format not in FORMATS:
        raise ValueError(f"{title}: weight_format must be one of {', '.join(FORMATS)}, got {weight_format!r}")
    scaling = _scaling(x, weight, x_scale, weight_scale, weight_format, title)
    if scaling != "group" and not (weight_min is tensor_scale is None):
        raise ValueError(f"{title}: weight_min and tensor_scale go with scales by groups, got scales of {scaling}")
    attributes = (
        ("scaling", scaling),
        ("weight_format", weight_format),
        ("interleaved", bool(interleaved)),
        ("eps", eps),
    )
    operands = (
        collection, layer, x, weight, table, query_out, bias, x_scale, weight_scale, weight_min, tensor_scale, freqs,
        q_gamma, k_gamma, index_collection, index_query_out,
    )  # fmt: skip
    missed = Missed(_NAMES[operation], given, answer) if answer else None
    operation(operands, attributes, _scheduled(collection, x, schedule, title), stream, missed=missed)
    return query_out


_FEW = tuple(FixedSchedule(max_tokens=n) for n in (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024))


def _scheduled(collection: Any, x: Any, schedule: Schedule, title: str) -> Schedule:
    """The schedule with a bound on the tokens, if they are few, on a GPU: few tokens have kernels of their own."""
    if collection.device[0] == "cpu" or not (schedule is None or isinstance(schedule, Mapping)):
        return schedule
    tokens = checks.shape_of(x, f"{title}: x", 2)[0]
    if tokens > _FEW[-1]["max_tokens"]:
        return schedule
    known = next(found for found in _FEW if tokens <= found["max_tokens"])
    return known if schedule is None else {**known, **schedule}


def _scaling(x: Any, weight: Any, x_scale: Any, weight_scale: Any, weight_format: str, title: str) -> str:
    """What the scales apply to. Type and shape identify scales by groups: no others are [N, more than one]."""
    if weight_scale is None or (x_scale is None and _dtype(x, f"{title}: x") not in checks.FLOATS):
        if weight_format != PLAIN:
            raise ValueError(f"{title}: weight_scale must be given with weight_format {weight_format!r}")
        return "none" if x_scale is weight_scale else "tensor"  # a missing one is refused by the other checks
    scale = buffers.view(weight_scale, name=f"{title}: weight_scale")
    rows = checks.shape_of(weight, f"{title}: weight", 2)[0]
    shape = scale.shape
    interleaved, of_rows = len(shape) == 2 + len(ATOM), len(shape) == 2 and shape[0] == rows and shape[1] > 1
    of_groups = interleaved or scale.dtype.name != "f32" or (of_rows and cdiv(rows, BLOCK) != rows)
    if weight_format != PLAIN or x_scale is None or of_groups:
        return "group"
    of_x, of_weight = (
        checks.shape_of(s, f"{title}: {n}", 2) for s, n in ((x_scale, "x_scale"), (weight_scale, "weight_scale"))
    )
    if of_x[1] > 1 or of_weight[1] > 1:
        return "block"
    return "tensor" if of_weight[0] == 1 else "row"


def _dtype(array: Any, name: str) -> str:
    return buffers.view(array, name=name).dtype.name


def _queries(
    collection: Any, x: Any, weight: Any, size: int | None, index: Any, index_query_out: Any, title: str
) -> Any:
    """A new output for the weight's queries; None if it has none."""
    spec = collection.spec.cache
    columns = checks.shape_of(weight, f"{title}: weight", 2)[0]
    rest = spec.row_size * (1 if spec.is_mla else 2)
    if index is not None and index_query_out is not None:
        _, heads, of_query = checks.shape_of(index_query_out, f"{title}: index_query_out", 3)
        rest += heads * of_query + index.spec.cache.row_size
    elif size is None and columns == spec.row_size:
        return None
    of_head = spec.head_size if size is None else checks.count(size, "query_size", title, 1)
    if columns == rest:
        return None
    if columns < rest or (columns - rest) % of_head:
        raise ValueError(
            f"{title}: weight must have {rest} rows besides those of query heads of {of_head}, got {columns}; give "
            "query_size, or query_out"
        )
    tokens: int = checks.shape_of(x, f"{title}: x", 2)[0]
    dtype = buffers.view(x, name=f"{title}: x").dtype
    rounded = rounded_to(spec, dtype, None)
    if dtype.name in checks.FLOATS:
        rounded = dtype
    return checks.empty(
        x, (tokens, (columns - rest) // of_head, of_head), None if rounded is dtype else rounded, "query_out", title
    )
