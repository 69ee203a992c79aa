# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Projections whose keys and values go straight into the cache: project_append, project_append_padded."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvarn.dialect.layout import CacheSpec, cdiv
from kvarn.dialect.ops.projection import BLOCK, SCALED, bands_of, rounded_to
from kvarn.dialect.ops.weight_groups import ATOM, FORMATS, PACKED, PLAIN, PLAIN_TYPES, groups_of
from kvarn.dispatch import FixedSchedule, Operation, Schedule
from kvarn.runtime import buffers
from kvarn.runtime.buffers import BufferView

from . import checks
from .checks import layer_of


def _packed(view: BufferView, name: str) -> None:
    """Rows lie one behind the other."""
    if view.shape[0] > 1 and view.strides[0] != view.shape[1]:
        raise ValueError(
            f"{name} must have its rows one behind the other, got strides {list(view.strides)} (elements) for shape "
            f"{list(view.shape)}; use .contiguous()"
        )


def _check(seen: SimpleNamespace, title: str, rows: str) -> None:
    spec = checks.spec_of(seen)
    grouped = seen.attributes["scaling"] == "group"
    for name in ("x", "weight"):
        view = getattr(seen, name)
        checks.has_shape(view, (rows if name == "x" else "N", "K"), f"{title}: {name}")
        if not grouped:
            checks.has_dtype(view, (*checks.FLOATS, SCALED), f"{title}: {name}")
        _packed(view, f"{title}: {name}")
    (tokens, k), (columns, _) = seen.x.shape, seen.weight.shape
    most = seen.schedule.get("max_tokens", tokens)
    if tokens > most:
        raise ValueError(f"{title}: x must have no more than the schedule's max_tokens = {most} rows, got {tokens}")
    if grouped:
        _check_groups(seen, title)
    elif k < 1 or seen.weight.shape[1] != k:
        raise ValueError(f"{title}: weight must have the K = {k} of x, at least 1, got shape {list(seen.weight.shape)}")
    elif seen.weight.dtype != seen.x.dtype:
        raise TypeError(f"{title}: weight must have the dtype of x, {seen.x.dtype.name}, got {seen.weight.dtype.name}")
    queries = {n: getattr(seen, n) for n in ("query_out", "index_query_out")}
    for name, view in queries.items():
        if view is not None:
            checks.has_shape(view, (tokens, "Hq", "Dq"), f"{title}: {name}")
            checks.has_dtype(view, checks.FLOATS, f"{title}: {name}")
    if (seen.index_collection is None) != (seen.index_query_out is None):
        raise ValueError(f"{title}: index_collection and index_query_out must be given together or not at all")
    index = None
    if seen.index_collection is not None:
        checks.with_values(spec, title)
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
    _check_types(seen, spec, title)
    if seen.bias is not None:
        checks.has_shape(seen.bias, (columns,), f"{title}: bias")
        checks.has_dtype(seen.bias, checks.FLOATS, f"{title}: bias")
    if not grouped:
        _check_scales(seen, title)
    if (seen.q_gamma is None) != (seen.k_gamma is None):
        raise ValueError(f"{title}: q_gamma and k_gamma must be given together or not at all")
    if seen.freqs is None and seen.q_gamma is None:
        return
    checks.with_values(spec, title)
    if seen.query_out is None:
        raise ValueError(f"{title}: freqs_cis and gammas need queries, got a weight of keys and values alone")
    checks.has_shape(seen.query_out, (tokens, "Hq", spec.head_size), f"{title}: query_out")
    if seen.freqs is not None:
        checks.rotation(seen.freqs, spec.head_size, f"{title}: freqs_cis")
    for name in ("q_gamma", "k_gamma"):
        if getattr(seen, name) is not None:
            checks.has_shape(getattr(seen, name), (spec.head_size,), f"{title}: {name}")
            checks.has_dtype(getattr(seen, name), checks.FLOATS, f"{title}: {name}")


def _check_types(seen: SimpleNamespace, spec: CacheSpec, title: str) -> None:
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


def _check_groups(seen: SimpleNamespace, title: str) -> None:
    """Elements with scales by groups: types that go together, one K, and scales of its groups."""
    name, x, weight = seen.attributes["weight_format"], seen.x, seen.weight
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
    if seen.weight_min is not None:
        checks.has_shape(seen.weight_min, tuple(seen.weight_scale.shape), f"{title}: weight_min")
        checks.has_dtype(seen.weight_min, (seen.weight_scale.dtype.name,), f"{title}: weight_min")
    if seen.tensor_scale is not None:
        checks.has_shape(seen.tensor_scale, (1, 1), f"{title}: tensor_scale")
        checks.has_dtype(seen.tensor_scale, ("f32",), f"{title}: tensor_scale")


def _check_scales(seen: SimpleNamespace, title: str) -> None:
    if (seen.x_scale is None) != (seen.weight_scale is None):
        raise ValueError(f"{title}: x_scale and weight_scale must be given together or not at all")
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
        checks.has_shape(getattr(seen, name), shape, f"{title}: {name}")
        checks.has_dtype(getattr(seen, name), ("f32",), f"{title}: {name}")


def _check_ragged(seen: SimpleNamespace) -> None:
    title = "kv.ops.project_append"
    _check(seen, title, "T")
    checks.offsets(seen.row_offsets, seen.collection.batch_size, f"{title}: row_offsets")


def _check_padded(seen: SimpleNamespace) -> None:
    title, batch = "kv.ops.project_append_padded", seen.collection.batch_size
    _check(seen, title, "B * S")
    checks.has_shape(seen.valid_lengths, (batch,), f"{title}: valid_lengths")


_STATIC = {
    "x": 1, "weight": 0, "query_out": 1, "bias": 0, "x_scale": 1, "weight_scale": 0, "weight_min": 0, "tensor_scale": 0,
    "freqs": 1, "q_gamma": 0,
    "k_gamma": 0, "index_query_out": 1,
}  # fmt: skip
_WRITTEN = ("query_out", "index_query_out")
_SINGLE = ("bias", "x_scale", "weight_scale", "weight_min", "tensor_scale")
_RAGGED = Operation("kv.project_append", _STATIC, _check_ragged, _WRITTEN, single=_SINGLE)
_PADDED = Operation("kv.project_append_padded", _STATIC, _check_padded, _WRITTEN, single=_SINGLE)


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
    """Multiply the new tokens by a weight; give the queries, and write keys and values to one layer.

    C = x @ weight.T + bias, in f32, rounded to the dtype of the queries. The rows of the weight are, one behind the
    other, those of the queries, of the keys (all of D of an MLA collection), of the values (not of an MLA one) and,
    with an index collection, of an indexer's queries and its keys. A weight of 2 * H * D rows has no queries, one of
    H * D keys alone. Queries and keys are then normalised and rotated, and all is written, as by :func:`rope_append`
    or, without angles and gammas, by :func:`append`.

    Parameters
    ----------
    collection : KV cache collection
    layer : int
    x : f32, f16, bf16 or f8e4m3 array-like [T, K]
        The dtype of the queries, or f8e4m3. Rows lie one behind the other. With scales by groups also uint8 [T, K / 2].
    weight : array-like [N, K]
        Of x's dtype, or with scales by groups; then of 8 bits, or uint8 [N, K / 2]. Rows lie one behind the other.
    row_offsets : uint32 or int32 array-like [B + 1]
    bias : f32, f16 or bf16 array-like [N], optional
    x_scale, weight_scale : f32 array-like, optional
        What products of f8e4m3 are multiplied by: [1, 1] both, [T, 1] and [N, 1], or, for blocks of 128,
        [T, ceil(K / 128)] and [ceil(N / 128), ceil(K / 128)]. By groups of the K of a weight of other elements than
        x: weight_scale [N, K / g] of f32, f16, bf16, f8e4m3 or f8e8m0, g a multiple of 8, or [ceil(N / 128),
        ceil(K / (4 g)), 32, 4, 4], as tensor cores of sm_100 read them: f8e8m0 of 32 or f8e4m3 of 16 elements. So are
        the x_scale of an x of the weight's elements: f8e4m3, or e2m1.
    weight_min : array-like, optional
        Of shape and dtype of a weight_scale by groups: a value is element * scale - minimum.
    tensor_scale : f32 array-like [1, 1], optional
        What products of values with scales by groups are multiplied by.
    weight_format : {"plain", "uint4b8", "int4", "uint4", "e2m1"}
        ``plain``: elements are those of the array (i8, f8e4m3, f8e5m2). Others are 4 bits, two a byte, the first in
        the low half: minus 8 (GPTQ), of two's complement, without a sign, and FP4. Values are rounded to x's dtype, of
        an x with scales by groups to bf16, before they are multiplied.
    freqs_cis, interleaved, q_gamma, k_gamma, eps
        As of :func:`rope_append`; each optional.
    query_out : array-like [T, Hq, Dq], optional
        When not given it is allocated by the library of x (torch, CuPy or NumPy), bf16 for x of f8e4m3 and a cache of 8
        bits. Of a weight without queries there is none.
    query_size : int, optional
        Dq of a ``query_out`` that is not given; by default D.
    index_collection : KV cache collection, optional
        The cache of an indexer's keys, for the batch of ``collection``.
    index_query_out : array-like [T, Hi, Di], optional
        With ``index_collection``.
    schedule, stream
        As of :func:`append`.

    Returns
    -------
    array-like [T, Hq, Dq] or None
        ``query_out``. Rows before the first offset and from the last on are not written.
    """
    product = _Product(x, weight, bias, x_scale, weight_scale, weight_min, tensor_scale, weight_format)
    heads = _Heads(
        freqs_cis, interleaved, q_gamma, k_gamma, eps, query_out, query_size, index_collection, index_query_out
    )
    return _run(_RAGGED, "kv.ops.project_append", collection, layer, row_offsets, product, heads, schedule, stream)


def project_append_padded(
    collection: Any,
    layer: int,
    x: Any,
    weight: Any,
    valid_lengths: Any,
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
    """:func:`project_append` of a padded batch.

    Parameters
    ----------
    x : array-like [B, S, K]
        Contiguous. Token t of sequence b stands at position ``cache_lengths[b] + t``.
    valid_lengths : uint32 or int32 array-like [B]
        Keys and values of tokens t >= ``valid_lengths[b]`` are not written; queries of all tokens are.
    query_out, index_query_out : array-like [B, S, Hq, Dq], optional
        Contiguous.
    collection, layer, weight, bias, x_scale, weight_scale, weight_min, tensor_scale, weight_format, freqs_cis
        As of :func:`project_append`; T is B * S.
    interleaved, q_gamma, k_gamma, eps, query_size, index_collection, schedule, stream
        As of :func:`project_append`.

    Returns
    -------
    array-like [B, S, Hq, Dq] or None
        ``query_out``.
    """
    title = "kv.ops.project_append_padded"
    shape = checks.shape_of(x, f"{title}: x", 3)
    rows = shape[0] * shape[1]
    x = _as_rows(x, (rows, shape[2]), f"{title}: x")
    given = query_out
    if query_out is not None:
        query_out = _as_queries(query_out, shape, f"{title}: query_out")
    if index_query_out is not None:
        index_query_out = _as_queries(index_query_out, shape, f"{title}: index_query_out")
    product = _Product(x, weight, bias, x_scale, weight_scale, weight_min, tensor_scale, weight_format)
    heads = _Heads(
        freqs_cis, interleaved, q_gamma, k_gamma, eps, query_out, query_size, index_collection, index_query_out
    )
    found = _run(_PADDED, title, collection, layer, valid_lengths, product, heads, schedule, stream)
    if given is not None or found is None:
        return given
    return found.reshape(*shape[:2], *found.shape[1:])


def _as_queries(array: Any, shape: tuple[int, ...], name: str) -> Any:
    got = checks.shape_of(array, name, 4)
    if got[:2] != shape[:2]:
        raise ValueError(f"{name} must have shape [{shape[0]}, {shape[1]}, Hq, Dq], got {list(got)}")
    return _as_rows(array, (got[0] * got[1], *got[2:]), name)


def _as_rows(array: Any, shape: tuple[int, ...], name: str) -> Any:
    """An array with its first two dimensions as one: the same memory, or an error."""
    view = buffers.view(array, name=name)
    if not view.contiguous:
        raise ValueError(f"{name} must be contiguous, got strides {list(view.strides)} (elements)")
    return array.reshape(shape)


class _Product(NamedTuple):
    """The operands of the product, as :func:`project_append` has them."""

    x: Any
    weight: Any
    bias: Any
    x_scale: Any
    weight_scale: Any
    weight_min: Any
    tensor_scale: Any
    weight_format: str


class _Heads(NamedTuple):
    """What is done with heads, and where they go besides the cache, as :func:`project_append` has it."""

    freqs: Any
    interleaved: bool
    q_gamma: Any
    k_gamma: Any
    eps: float
    query_out: Any
    query_size: int | None
    index_collection: Any
    index_query_out: Any


def _run(
    operation: Operation, title: str, collection: Any, layer: Any, table: Any, product: _Product, heads: _Heads,
    schedule: Schedule, stream: Any,
) -> Any:  # fmt: skip
    x, weight, bias, x_scale, weight_scale, weight_min, tensor_scale, weight_format = product
    freqs, interleaved, q_gamma, k_gamma, eps, query_out, query_size, index_collection, index_query_out = heads
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
    operation(operands, attributes, _scheduled(collection, x, schedule, title), stream)
    return query_out


_FEW = tuple(FixedSchedule(max_tokens=n) for n in (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024))


def _scheduled(collection: Any, x: Any, schedule: Schedule, title: str) -> Schedule:
    """The schedule with a bound of the tokens, where a GPU has few: they have kernels of their own."""
    if collection.device[0] == "cpu" or not (schedule is None or isinstance(schedule, Mapping)):
        return schedule
    tokens = checks.shape_of(x, f"{title}: x", 2)[0]
    if tokens > _FEW[-1]["max_tokens"]:
        return schedule
    known = next(found for found in _FEW if tokens <= found["max_tokens"])
    return known if schedule is None else {**known, **schedule}


def _scaling(x: Any, weight: Any, x_scale: Any, weight_scale: Any, weight_format: str, title: str) -> str:
    """What scales are of. Those by groups are told by their type and shape: no others are [N, more than one]."""
    if weight_scale is None or (x_scale is None and _dtype(x, f"{title}: x") not in checks.FLOATS):
        if weight_format != PLAIN:
            raise ValueError(f"{title}: weight_scale must be given with weight_format {weight_format!r}")
        return "none" if x_scale is weight_scale else "tensor"  # one alone is refused with the other checks
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
    """A new output for the queries of a weight; None where it has none."""
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
