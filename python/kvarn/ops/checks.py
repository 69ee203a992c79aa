# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks of the operands of cache operations, run once per signature of a call."""

from __future__ import annotations

import operator
import sys
from types import SimpleNamespace
from typing import Any

from kvarn.dialect.buffers import FLOATS, INTEGERS, extents_of, queryable as queryable, storable as storable
from kvarn.dialect.dtypes import DType, bf16, f8e4m3, f32, i32
from kvarn.dialect.layout import SCALES, CacheSpec
from kvarn.runtime import buffers
from kvarn.runtime.allocation import empty
from kvarn.runtime.binding import is_torch
from kvarn.runtime.buffers import BufferView

MASKS = ("causal", "null", "sliding_window", "chunked", "chunked_causal")
_SPANS = {"sliding_window": "window", "chunked": "chunk", "chunked_causal": "chunk"}


def layer_of(collection: Any, layer: Any, title: str) -> int:
    """A layer number of a collection; bools and numbers out of range are refused."""
    if layer.__class__ is not int:
        if isinstance(layer, bool) or not hasattr(layer, "__index__"):
            raise TypeError(f"{title}: layer must be an integer, got {layer!r}")
        layer = operator.index(layer)
    layers = getattr(collection, "num_layers", None)
    if layers is None:
        raise TypeError(f"{title}: collection must be a KV cache collection, got {type(collection).__name__}")
    if not 0 <= layer < layers:
        raise IndexError(f"{title}: layer must be in [0, {layers}), got {layer}")
    return layer


def _no_bool(value: Any, name: str, title: str) -> None:
    """Refuse a bool where a number is expected."""
    if isinstance(value, bool):
        raise TypeError(f"{title}: {name} must be a number, got {value!r}")


def number(value: Any, name: str, title: str) -> float:
    """A host number as a finite Python float."""
    _no_bool(value, name, title)
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{title}: {name} must be a number, got {value!r}") from None
    if found != found or found in (float("inf"), float("-inf")):
        raise ValueError(f"{title}: {name} must be finite, got {found}")
    return found


def count(value: Any, name: str, title: str, least: int = 0) -> int:
    """An integer in [``least``, 2**31)."""
    _no_bool(value, name, title)
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{title}: {name} must be an integer, got {value!r}") from None
    if not least <= found < 2**31:
        raise ValueError(f"{title}: {name} must be in [{least}, {2**31 - 1}], got {found}")
    return found


def shape_of(array: Any, name: str, rank: int | None = None) -> tuple[int, ...]:
    """The shape of a caller's array, before it is checked otherwise. ``name`` starts the error message."""
    try:
        shape = tuple(array.shape)
    except Exception:  # not an array, or one without a numeric shape, such as a nested tensor
        shape = buffers.view(array, name=name).shape
    if rank is not None and len(shape) != rank:
        raise ValueError(f"{name} must have {rank} dimension{'s' * (rank > 1)}, got shape {list(shape)}")
    return shape


def has_shape(view: BufferView, expected: tuple[int | str, ...], name: str) -> None:
    """Check a shape; a string in ``expected`` matches any extent and names it. ``name`` starts the error message.

    For example "kv.ops.append: key".
    """
    shape = tuple(view.shape)
    if len(shape) != len(expected) or any(e != s for e, s in zip(expected, shape, strict=True) if isinstance(e, int)):
        raise ValueError(f"{name} must have shape [{', '.join(map(str, expected))}], got {list(shape)}")


def operand_of_keys(seen: SimpleNamespace, spec: Any) -> None:
    """The operand for keys shows keys."""
    if spec.kind == SCALES:
        raise TypeError(f"{seen.title}: keys must be an operand of keys, got one that shows a cache's scales")


def no_kv_offsets(seen: SimpleNamespace, spec: Any) -> None:
    """No offsets are given for operands that define the number of keys themselves."""
    if seen.kv_offsets is not None and not spec.of_cache:
        raise ValueError(
            f"{seen.title}: kv_offsets must be None for {spec.kind} operands, which define the number of keys"
        )


def few_enough(shape: tuple[int, ...], name: str) -> None:
    """Check that the rows of the first two dimensions can be counted in 32 bits."""
    if shape[0] * shape[1] >= 2**31:
        raise ValueError(f"{name} must have fewer than 2**31 rows, got {shape[0]} * {shape[1]}: split the call")


def has_dtype(view: BufferView, allowed: tuple[str, ...], name: str) -> None:
    """Check that the element type is one of ``allowed``."""
    if view.dtype.name not in allowed:
        raise TypeError(f"{name} must have dtype {' or '.join(allowed)}, got {view.dtype.name}")


def array(
    seen: SimpleNamespace, name: str, expected: tuple[int | str, ...], allowed: tuple[str, ...] = (), said: str = ""
) -> None:
    """Check the shape and, if ``allowed`` is given, the element type of an operand that may be absent.

    ``said`` is the caller's name of the operand if it differs.
    """
    view, about = getattr(seen, name, None), f"{seen.title}: {said or name}"
    if view is not None:
        has_shape(view, expected, about)
        if allowed:
            has_dtype(view, allowed, about)


def like(seen: SimpleNamespace, name: str, other: str, said: str = "") -> None:
    """Check that an operand has the element type of another."""
    got, wanted = getattr(seen, name).dtype, getattr(seen, other).dtype
    if got != wanted:
        raise TypeError(f"{seen.title}: {name} must have the dtype of {said or other}, {wanted.name}, got {got.name}")


def together(seen: SimpleNamespace, *names: str) -> None:
    """Check that operands that depend on each other are given together."""
    if len({getattr(seen, name) is None for name in names}) > 1:
        raise ValueError(f"{seen.title}: {' and '.join(names)} must be given together or not at all")


def query_heads(seen: SimpleNamespace, spec: CacheSpec) -> None:
    """Check that the query heads, the last but one dimension, are a multiple of the KV heads."""
    heads, dimension = seen.query.shape[-2], len(seen.query.shape) - 2
    if heads < 1 or heads % spec.num_heads:
        raise ValueError(
            f"{seen.title}: query must have a multiple of the {spec.num_heads} KV heads in dimension {dimension}, got "
            f"{heads}"
        )


def multiplied(spec: CacheSpec) -> tuple[str, ...]:
    """The 8-bit element type in which queries are multiplied by a cache's stored elements without conversion."""
    return (spec.dtype.name,) if spec.dtype is f8e4m3 and not spec.quantized else ()


def outputs_of(query: DType) -> tuple[str, ...]:
    """The element types allowed for the output of attention."""
    return FLOATS if query.bits == 8 else (query.name,)


def same_tokens(seen: SimpleNamespace, *names: str) -> None:
    """Check that buffers with one row per token have the same number of rows."""
    first, *rest = [n for n in names if getattr(seen, n) is not None]
    tokens = getattr(seen, first).shape[0]
    for name in rest:
        if (got := getattr(seen, name).shape[0]) != tokens:
            raise ValueError(f"{seen.title}: {name} must have the {tokens} tokens of {first}, got {got}")


def offsets(view: BufferView, batch: int | None, name: str) -> None:
    """Check row offsets of shape [B + 1]."""
    has_shape(view, ("B + 1" if batch is None else batch + 1,), name)
    if view.shape[0] < 1:
        raise ValueError(f"{name} must have at least one element, got none")


def some_offsets(seen: SimpleNamespace) -> None:
    """Check row offsets [n + 1] of n of the batch's sequences."""
    name, batch, got = f"{seen.title}: row_offsets", seen.collection.batch_size, seen.row_offsets.shape[0] - 1
    offsets(seen.row_offsets, None, name)
    if got > batch:
        raise ValueError(f"{name} must have at most the collection's {batch} sequences, got {got}")


def leading(seen: SimpleNamespace) -> tuple[int | str, ...]:
    """The dimensions of a call's rows: tokens, or sequences and tokens of a padded batch."""
    return (handle_of(seen).batch_size, "S") if hasattr(seen, "valid_lengths") else ("T",)


def row_table(seen: SimpleNamespace) -> None:
    """Check the operand that says which rows are tokens: row offsets, or the lengths of a padded batch."""
    batch = handle_of(seen).batch_size
    if not hasattr(seen, "valid_lengths"):
        offsets(seen.row_offsets, batch, f"{seen.title}: row_offsets")
        return
    if hasattr(seen, "query"):
        few_enough(seen.query.shape, f"{seen.title}: query")
    array(seen, "valid_lengths", (batch,))


def without_scales(seen: SimpleNamespace, instead: str = "", spec: CacheSpec | None = None) -> None:
    if (spec or spec_of(seen)).quantized:
        raise ValueError(f"{seen.title}: needs a cache without scales, got one with{'; ' + instead if instead else ''}")


def floats_in_place(seen: SimpleNamespace, spec: CacheSpec, instead: str = "") -> None:
    """Check that a cache's elements are floats, which can be changed in place."""
    without_scales(seen, instead, spec)
    if not spec.dtype.is_float:
        raise ValueError(f"{seen.title}: needs a cache of floats, got {spec.dtype.name}")


def read_as_floats(seen: SimpleNamespace) -> None:
    spec = spec_of(seen)
    if not spec.dtype.is_float and not spec.quantized:
        raise TypeError(
            f"{seen.title}: collection must have float elements, or scales, got {spec.dtype.name} without scales"
        )


def with_values(seen: SimpleNamespace) -> None:
    if spec_of(seen).is_mla:
        raise ValueError(f"{seen.title}: needs a collection with values, got an MLA one, which has latent keys only")


def gammas(seen: SimpleNamespace, size: int, *names: str) -> None:
    """Check the weights of the norms of query and key heads, which are given together or not at all."""
    together(seen, *names)
    for name in names:
        array(seen, name, (size,), FLOATS)


def rotation(seen: SimpleNamespace, head_size: int) -> None:
    """Check freqs_cis, if given: [positions, R] f32, R even and at most the head size."""
    array(seen, "freqs", ("positions", "R"), ("f32",), "freqs_cis")
    if seen.freqs is None:
        return
    view, name = seen.freqs, f"{seen.title}: freqs_cis"
    size = view.shape[1]
    if not 0 < size <= head_size or size % 2:
        raise ValueError(f"{name} must have an even R in [2, {head_size}] (the head size) in dimension 1, got {size}")
    if view.shape[0] < 1:
        raise ValueError(f"{name} must have at least one position, got none")


def positions_cover(freqs: Any, collection: Any, title: str) -> None:
    """Check that the table of angles has a row for every position of the step."""
    try:
        positions = freqs.shape[0]
    except (AttributeError, IndexError, RuntimeError):
        positions = shape_of(freqs, f"{title}: freqs_cis", 2)[0]
    if positions < collection.max_cache_length:
        raise ValueError(
            f"{title}: freqs_cis must have a row for each of the collection's max_cache_length = "
            f"{collection.max_cache_length} positions, got {positions}"
        )


def declared(seen: SimpleNamespace, apart: bool = False) -> None:
    """Check a call's buffers against the declaration of its op: dtypes, and one extent per dimension name.

    ``apart``: the caller compares the extents of the call's own buffers.
    """
    known: dict[str, int] = {}
    spec = None
    if hasattr(seen, "collection") or hasattr(seen, "cache"):
        spec = spec_of(seen)
        known = {**extents_of(spec), "B": handle_of(seen).batch_size}
    for name, buffer in seen.buffers.items():
        view, about, elements = getattr(seen, name), f"{seen.title}: {name}", buffer.elements
        if view is None:
            continue
        plain = [(n.removesuffix(" + 1"), n.endswith(" + 1"), n) for n in buffer.names]
        has_shape(view, tuple(known[n] + more if n in known else title for n, more, title in plain), about)
        if not apart:
            known |= {n: extent - more for (n, more, _), extent in zip(plain, view.shape, strict=True)}
        if buffer.counted:
            few_enough(view.shape, about)
        if isinstance(elements, str):
            elements = (getattr(seen, elements).dtype.name,)
        elif elements is not None and not isinstance(elements, tuple):
            found = elements(spec)
            elements = found if isinstance(found, tuple) else (found.name,)
        if elements is not None and elements is not INTEGERS:
            has_dtype(view, elements, about)


def handle_of(seen: SimpleNamespace) -> Any:
    """The call's collection, cache or operand of keys."""
    return next(getattr(seen, n) for n in ("collection", "cache", "keys") if hasattr(seen, n))


def spec_of(seen: SimpleNamespace) -> CacheSpec:
    """The spec of the call's collection, cache or operand of keys."""
    spec = handle_of(seen).spec
    return spec if isinstance(spec, CacheSpec) else spec.cache


# --- allocation of outputs ------------------------------------------------------------------------


def empty_like(array: Any, name: str, title: str) -> Any:
    """A new contiguous array of the same shape, dtype, device and library."""
    if is_torch(array.__class__):
        torch: Any = sys.modules["torch"]
        try:
            return torch.empty_like(array, memory_format=torch.contiguous_format)  # faster than new_empty
        except RuntimeError:
            refuse_unlike(array, name, title)
            raise
    return empty(array, shape_of(array, f"{title}: the array that {name} is allocated like"), None, name, title)


def refuse_unlike(array: Any, name: str, title: str) -> None:
    """Raise for a sparse or nested tensor, or one of another library, like which torch cannot allocate an output."""
    buffers.view(array, name=f"{title}: the array that {name} is allocated like")


def empty_result(query: Any, name: str, title: str, columns: int | None = None) -> Any:
    """A new output of attention, like the query, or bf16 for an 8-bit query.

    ``columns`` replaces the query's number of columns.
    """
    size = query.element_size() if is_torch(query.__class__) else getattr(getattr(query, "dtype", None), "itemsize", 0)
    if size != 1 and columns is None:
        return empty_like(query, name, title)
    shape = shape_of(query, f"{title}: the array that {name} is allocated like")
    return empty(query, (*shape[:-1], columns or shape[-1]), bf16 if size == 1 else None, name, title)


def empty_lse(query: Any, title: str) -> Any:
    """A new f32 buffer with one number per row and head, on the query's device."""
    library = type(query).__module__.partition(".")[0]
    if library == "torch":
        try:
            return query.new_empty(query.shape[:-1], dtype=sys.modules["torch"].float32)
        except RuntimeError:
            refuse_unlike(query, "lse", title)
            raise
    return empty(query, tuple(query.shape[:-1]), f32, "lse", title)


def lists(
    like: Any, of: tuple[int, ...], entries: int | None, given: Any, counts: Any, name: str, title: str
) -> tuple[Any, Any]:
    """The outputs for selected indices (one list per element of shape ``of``) and for their counts.

    Lists that are not ``given`` have ``entries`` entries (the caller's count), and are allocated like the
    array ``like``; so is ``counts``.
    """
    if given is None:
        if entries is None:
            raise ValueError(f"{title}: count must be given where {name} is not")
        given = empty(like, (*of, count(entries, "count", title, 1)), i32, name, title)
    elif entries is not None:
        raise ValueError(f"{title}: count must be None where {name} is given, whose extent it is, got {entries!r}")
    return given, empty(like, of, i32, "counts", title) if counts is None else counts


def masked(mask: str, window: Any, chunk: Any, title: str) -> tuple[tuple[str, Any], ...]:
    """The attributes of a mask; a window or chunk turns the causal mask into its windowed or chunked form."""
    if mask == "causal" and (window is not None or chunk is not None):
        mask = "sliding_window" if window is not None else "chunked_causal"
    if mask not in MASKS:
        raise ValueError(f"{title}: mask must be one of {', '.join(MASKS)}, got {mask!r}")
    span = 0
    for name, given in (("window", window), ("chunk", chunk)):
        if _SPANS.get(mask) == name:
            if given is None:
                raise ValueError(f"{title}: {name} must be given for mask {mask}, got None")
            span = count(given, name, title, 1)
        elif given is not None:
            raise ValueError(f"{title}: {name} must be None for mask {mask}, got {given!r}")
    return (("mask", mask), ("span", span))
