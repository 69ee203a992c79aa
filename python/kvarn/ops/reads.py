# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over collections and operands of caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from kvarn.block_mask import BlockMask
from kvarn.caches import MHAOperand
from kvarn.dialect import schedules
from kvarn.dialect.layout import DENSE
from kvarn.dialect.ops.attention import BLOCK_TILE
from kvarn.dialect.schedules import row_class
from kvarn.dispatch import FixedSchedule, Missed, Operation, Schedule, Specialisation, alignment_of, refuse_tracing
from kvarn.runtime.binding import is_torch

from . import checks, functions, sources
from .block_lists import check_block_mask, mask_of
from .checks import layer_of
from .drafts import with_tree
from .forms import of_padded_batches, parameters_of
from .pages import check_pages

FEW = 16  # new tokens per sequence up to which compiled code depends on their bound
_VECTORS = ("query", "out", "key", "value", "prior")  # operands whose rows are accessed in vectors


class RowsOperation(Operation):
    """An operation whose code depends on the alignment of ``_VECTORS`` only."""

    def specialisation(
        self, operands: Any, attributes: Any = (), schedule: Any = (), target: str | None = None
    ) -> tuple[Specialisation, list[Any]]:
        what, given = super().specialisation(operands, attributes, schedule, target)
        views = dict(zip((name for name, _ in what.operands), given, strict=True))
        return dataclasses.replace(what, alignment=min(alignment_of(views[n]) for n in _VECTORS if n in views)), given


def check_rows(seen: SimpleNamespace, columns: int, value_size: int, more: tuple[str, ...] = ()) -> None:
    """Check the query, the output and the row table; ``more`` are allowed types of an output besides the query's."""
    spec = checks.spec_of(seen)
    checks.read_as_floats(seen)
    narrow = checks.multiplied(spec) if more else ()  # if the output may have another type
    checks.array(seen, "query", (*checks.leading(seen), "Hq", columns), (*checks.queryable(spec), *narrow))
    checks.query_heads(seen, spec)
    outputs = dict.fromkeys((*checks.outputs_of(seen.query.dtype), *more))
    checks.array(seen, "out", (*seen.query.shape[:-1], value_size), tuple(outputs))
    checks.row_table(seen)


def _check_attention(seen: SimpleNamespace) -> None:
    size, batch = checks.spec_of(seen).head_size, checks.handle_of(seen).batch_size
    checks.with_values(seen)
    check_rows(seen, size, size, ("f32",))
    most = seen.schedule.get("max_batch", batch)
    if most < batch:
        raise ValueError(f"{seen.title}: the schedule's max_batch must be at least the {batch} sequences, got {most}")
    check_ends(seen, size)
    check_keys(seen)
    check_pages(seen)
    check_block_mask(seen)


def check_keys(seen: SimpleNamespace) -> None:
    """Check the operands that determine the number of keys, and the arrays of functions."""
    if seen.kv_offsets is not None:
        checks.offsets(seen.kv_offsets, checks.handle_of(seen).batch_size, f"{seen.title}: kv_offsets")
    for i, name in enumerate(functions.ARRAYS):
        functions.check(getattr(seen, name), f"{seen.title}: array {i} of the score and the mask")


def check_ends(seen: SimpleNamespace, value_size: int) -> None:
    """Check the f32 operands: those that modify scores, and those combined with the result."""
    rows = tuple(seen.query.shape[:-1])
    if (seen.prior is None) != (seen.prior_lse is None):
        raise ValueError(f"{seen.title}: prior must be an output and its log-sum-exp, got one of them")
    shapes = {"sinks": rows[-1:], "alibi_slopes": rows[-1:], "lse": rows, "prior": (*rows, value_size)}
    for name, shape in {**shapes, "prior_lse": rows}.items():  # MLA has no slopes
        checks.array(seen, name, shape, ("f32",))


def _check_operands(seen: SimpleNamespace) -> None:
    title = seen.title = "kv.ops.attention"
    spec = seen.keys.spec.cache
    if seen.values.spec != seen.keys.spec:
        raise TypeError(
            f"{title}: keys and values must have the same parameters, got {spec} and {seen.values.spec.cache}"
        )
    checks.operand_of_keys(seen, spec)
    if seen.values.batch_size != seen.keys.batch_size:
        raise ValueError(
            f"{title}: values must have the {seen.keys.batch_size} sequences of the keys, got {seen.values.batch_size}"
        )
    if spec.kind == DENSE and seen.values.capacity != seen.keys.capacity:
        raise ValueError(
            f"{title}: values must have the {seen.keys.capacity} tokens of the keys in dimension 1, "
            f"got {seen.values.capacity}"
        )
    checks.no_kv_offsets(seen, spec)
    _check_attention(seen)


ARRAYS = dict.fromkeys(functions.ARRAYS, 0)  # of any shape
_ROWS = {"query": 1, "out": 1, "sinks": 0, "lse": 1, "alibi_slopes": 0, "prior": 1, "prior_lse": 1, **ARRAYS}
_PADDED = {**_ROWS, **dict.fromkeys(("query", "out", "lse", "prior", "prior_lse"), 2)}
_ATTENTION = RowsOperation("kv.attention", _ROWS, _check_attention)
_OPERAND_ATTENTION = RowsOperation("kv.operand_attention", _ROWS, _check_operands)
_ATTENTION_PADDED = RowsOperation("kv.attention_padded", _PADDED, _check_attention)


def attention(
    collection: Any,
    layer: Any,
    query: Any,
    row_offsets: Any,
    *,
    scale: float | None = None,
    score: Any = None,
    mask: Any = "causal",
    window: int | None = None,
    chunk: int | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    out: Any = None,
    return_lse: bool = False,
    lse: Any = None,
    kv_offsets: Any = None,
    alibi_slopes: Any = None,
    prior: Any = None,
    tree: Any = None,
    pages: Any = None,
    page_counts: Any = None,
    block_mask: BlockMask | None = None,
    shared: Any = None,
    schedule: Any = None,
    stream: Any = None,
) -> Any:
    """softmax(scale * Q K^T + mask) V for a step's new tokens, over one layer of a collection or over operands.

    The new tokens' keys and values must be stored already. Query i of sequence b is at position ``cache_lengths[b] +
    i``; masks compare absolute positions. Slots without a token have no influence on any row, nor do keys and finite
    values on rows that do not see them. A NaN or infinite value has none on such rows on the host and with kind
    ``simt``; with kinds ``tile`` and ``decode`` it can reach other rows of the same tile (8 to 256 query rows, i.e.
    tokens times the group) or of the same decode step, since 0 times NaN is NaN. A key that causality, a window or a
    chunk hides from all rows of a tile is not multiplied; one that only a function hides is. The host computes in f32.
    GPUs accumulate in f32; probabilities and converted keys have the query's type (table in docs/operations.md).

    Lists of collections and layers, or of keys and values, are sources of one softmax: a query attends to the keys of
    all, e.g. ``kv.ops.attention([window_cache, memory], [layer, 0], query, row_offsets)``. Each source has its own
    lengths, kind and element type, and query i is at position ``cache_lengths[b] + i`` of each. ``score``, ``mask``,
    ``window``, ``chunk``, ``softcap``, ``kv_offsets``, ``alibi_slopes``, ``pages``, ``page_counts`` and ``schedule``
    may be lists with one entry per source; otherwise they apply to all. The sources are processed in order, the last
    with the sinks, and combined in f32; the result is rounded once.

    ``kv.ops.attention(keys, values, query, row_offsets)`` takes keys and values as operands. Operands of caches
    (``KVCacheMHAOperand``) behave like the layer. Dense and ragged operands (``LayoutTensorMHAOperand``,
    ``RaggedMHAOperand``) have every key: sequence b has ``keys.cache_length(b)`` keys, and its n queries are the last
    positions, query i at ``keys.cache_length(b) - n + i``.

    Parameters
    ----------
    collection : KV cache collection, or attention operand
        A collection with values (not MLA), of a float type or with scales; or the operand of keys.
    layer : int, or attention operand
        The layer; or the operand of values, with the parameters and lengths of the keys.
    query : array-like [T, Hq, D]
        Hq is a multiple of the KV heads. The cache's dtype, or f32, f16 or bf16 over an 8-bit cache.
    row_offsets : uint32 or int32 array-like [B + 1]
        Rows of sequence b: ``row_offsets[b]`` to ``row_offsets[b + 1]``; may be empty.
    scale : float, optional
        Default D ** -0.5.
    score : function, or tuple of a function and its arrays, optional
        ``score(score, b, h, q, k, *arrays)`` returns the new score, f32, from the scaled one (after softcap and
        slopes), for sequence b, query head h, and absolute positions q and k (docs/attention-functions.md). Finite
        scores are weighted as usual: -1e9 or -1e30 hides a key if the row sees another. Minus infinity hides a key like
        a mask; plus infinity and NaN make the row NaN.
    mask : str, function, or tuple of a function and its arrays
        ``"causal"`` (k <= q), ``"null"`` (every key), ``"sliding_window"`` (k <= q and q - k < window), ``"chunked"``
        (q and k in one chunk of positions), ``"chunked_causal"`` (and k <= q). ``"causal"`` with a window or chunk
        means the causal one of these. Or a function ``mask(b, h, q, k, *arrays)`` that returns whether a query sees a
        key, such as those of ``kv.masks``, combined with ``&``, ``|`` and ``~``. On a GPU values of keys that only a
        function hides must be finite; values before a window of ``kv.masks`` may be anything.
    window, chunk : int, optional
        Positions, at least 1; for the masks that have one.
    sinks : f32 array-like [Hq], optional
        One more logit in the denominator of each head's rows.
    softcap : float, optional
        Positive: scores become softcap * tanh(score / softcap), with an error of at most 1e-5 max(1, |score|).
    out : array-like [T, Hq, D], optional
        The query's dtype, or f32. By default allocated by the query's library (torch, CuPy or NumPy).
    return_lse : bool
        Return the log-sum-exp too.
    lse : f32 array-like [T, Hq], optional
        Output of the log-sum-exp; allocated if it is needed and not given.
    kv_offsets : uint32 or int32 array-like [B + 1], optional
        Cross attention: sequence b has ``cache_lengths[b] + kv_offsets[b + 1] - kv_offsets[b]`` keys. Default:
        ``row_offsets``. Not for dense and ragged operands.
    alibi_slopes : f32 array-like [Hq], optional
        ALiBi (Press et al., 2021): slope * (key position - query position) is added to each score, after the softcap.
    prior : tuple of f32 array-like [T, Hq, D] and f32 array-like [T, Hq], optional
        Output and log-sum-exp of the same queries over other keys. The result covers all keys, as by
        :func:`merge_attention` but rounded once. Rows with a log-sum-exp of minus infinity are not read. Neither array
        may share memory with ``out`` or ``lse``.
    tree : int32 array-like [T, W], or uint64 array-like [T], optional
        A tree of draft tokens: bit j % 32 of word j // 32 of a query's row says whether it sees new token j of its
        sequence, counted from 0; tokens from 32 W on are hidden. Cached keys are visible subject to ``mask`` and
        window; ``"causal"`` has no effect. A token's position is that of its slot. See :func:`commit`. With a function
        (``kv.masks.tree``) it uses three of the four arrays. Not for operands, nor with ``kv_offsets``.
    pages : int32 array-like [B, H, K], optional
        For each sequence and KV head the pages that its queries see, for example from :func:`select_pages`; for
        collections with pages. A page is a column of the sequence's row of the lookup table: page p has the tokens from
        ``p * page_size`` on, subject to mask and length. Lists have any order; negative entries are skipped; a page
        that is listed twice counts twice.
    page_counts : int32 array-like [B, H], optional
        Number of valid entries of each list; later entries are not read. Default: K.
    block_mask : BlockMask, optional
        Result of :func:`block_mask` for this step, and for this collection or operand of keys; for a list of sources
        one per source. It replaces mask, tree, pages, window and chunk, which :func:`block_mask` takes.
    shared : SharedPrefixes, optional
        Shared prefixes, planned for this collection (with pages), whose keys are read once. Only for masks ``"causal"``
        and ``"null"``; the result equals that without, up to rounding. A list of two schedules applies to the prefixes
        and to the remaining tokens.
    schedule : mapping, optional
        ``kind`` (on a GPU ``"decode"``, ``"tile"``, ``"simt"``) and the entries of that kernel. No sequence may have
        more than ``max_queries`` new tokens, by default the collection's ``max_seq_length``; a ``max_seq_length`` of 0
        (a collection that gets no tokens) sets no bound. ``batch_invariant=True``: a sequence's result does not depend,
        bit for bit, on the rest of the batch or on the other sequences' numbers of new tokens: without ``max_queries``
        its own number decides which kernel computes it, and splits of its keys depend on its own length only.
        ``early=True``: the previous kernel on the stream writes neither cache lengths, row offsets, the table nor
        tokens that ``cache_lengths`` counts, so a decode may read these before that kernel ends.
    stream : optional
        An int, or an object with ``__cuda_stream__``; default: the current stream of the arguments' library.

    Returns
    -------
    array-like [T, Hq, D], or with ``return_lse`` a tuple of that and f32 [T, Hq]
        Rows that see no key are zeros. The log-sum-exp is natural, includes the sink, and is minus infinity for an
        empty sum. Rows before the first offset and from the last on are not written.
    """
    if out is None and is_torch(query.__class__) and collection.__class__ is not list and shared is None:
        out = checks.empty_result(query, "out", "kv.ops.attention")
    given = (
        collection, layer, query, row_offsets, scale, score, mask, window, chunk, sinks, softcap, out, lse,
        kv_offsets, alibi_slopes, prior, tree, pages, page_counts, shared, schedule,
    )  # fmt: skip
    answer = None
    if out is not None and block_mask is None and not (return_lse and lse is None):
        answer = _ATTENTION.try_cached_launch(given, stream)
        if answer is True:
            return (out, lse) if return_lse else out
    return _attend(False, given, answer, return_lse, block_mask, stream)


APART = ("return_lse", "block_mask", "stream")  # not part of the native launch cache's key
_GIVEN = tuple(name for name in parameters_of(attention) if name not in APART)
_GIVEN_PADDED = tuple("valid_lengths" if name == "row_offsets" else name for name in _GIVEN)
_OUT, _LSE = _GIVEN.index("out"), _GIVEN.index("lse")


@of_padded_batches(attention, without=("shared",), apart=APART, layer="int", schedule="Schedule")
def attention_padded(given: tuple[Any, ...], return_lse: bool, block_mask: BlockMask | None, stream: Any) -> Any:
    """:func:`attention` for a padded batch.

    Parameters
    ----------
    query : array-like [B, S, Hq, D]
        Token t of sequence b is at position ``cache_lengths[b] + t``. Hq is a multiple of the KV heads. The cache's
        dtype, or f32, f16 or bf16 over an 8-bit cache.
    valid_lengths : uint32 or int32 array-like [B]
        New tokens of each sequence. Tokens t >= ``valid_lengths[b]`` are skipped: their query is not read, and their
        output is not written.
    out : array-like [B, S, Hq, D], optional
        The query's dtype, or f32. By default allocated by the query's library (torch, CuPy or NumPy), with undefined
        contents for skipped tokens.
    lse : f32 array-like [B, S, Hq], optional
        Output of the log-sum-exp; allocated if it is needed and not given.
    kv_offsets : uint32 or int32 array-like [B + 1], optional
        Cross attention: sequence b has ``cache_lengths[b] + kv_offsets[b + 1] - kv_offsets[b]`` keys. Default:
        ``cache_lengths[b] + valid_lengths[b]``.
    prior : tuple of f32 array-like [B, S, Hq, D] and f32 array-like [B, S, Hq], optional
        As in :func:`attention`.
    tree : int32 array-like [B, S, W], or uint64 array-like [B, S], optional
        As in :func:`attention`, for token t of a sequence.

    Returns
    -------
    array-like [B, S, Hq, D], or with ``return_lse`` a tuple of that and f32 [B, S, Hq]
        As in :func:`attention`.
    """
    answer, out, lse = None, given[_OUT], given[_LSE]
    if out is not None and block_mask is None and not (return_lse and lse is None):
        answer = _ATTENTION_PADDED.try_cached_launch(given, stream)
        if answer is True:
            return (out, lse) if return_lse else out
    return _attend(True, given, answer, return_lse, block_mask, stream)


def _attend(
    padded: bool, given: tuple[Any, ...], answer: Any, return_lse: bool, block_mask: BlockMask | None, stream: Any
) -> Any:
    """:func:`attention` or :func:`attention_padded` with the arguments in the order of ``_GIVEN``.

    ``answer`` is the result of :meth:`Operation.try_cached_launch`. The public functions call it themselves: a cached
    launch takes as long as two more Python calls would.
    """
    (
        collection, layer, query, table, scale, score, mask, window, chunk, sinks, softcap, out, lse, kv_offsets,
        alibi_slopes, prior, tree, pages, page_counts, shared, schedule,
    ) = given  # fmt: skip
    title = "kv.ops.attention_padded" if padded else "kv.ops.attention"
    if collection.__class__ is list or shared is not None:
        attend = attention_padded if padded else attention
        options = sources.options_of(_GIVEN, given, return_lse=return_lse, block_mask=block_mask, stream=stream)
        return sources.attention(attend, collection, layer, query, table, shared, options, title)
    of_operands = not padded and isinstance(collection, MHAOperand)
    if block_mask is not None:
        mask = mask_of(block_mask, (mask, window, chunk, tree, pages), title)
    if of_operands and not isinstance(layer, MHAOperand):
        raise TypeError(f"{title}: values must be an operand like the keys, got {type(layer).__name__}")
    if not of_operands:
        layer = layer_of(collection, layer, title)
    if tree is not None:
        if of_operands or kv_offsets is not None:
            refused = "with kv_offsets" if padded else "for operands and with kv_offsets"
            raise ValueError(f"{title}: tree must be None {refused}: it describes new tokens")
        of_rows = None if padded else table
        mask, window, chunk = with_tree((mask, window, chunk), tree, collection, query, of_rows, title)
    attributes, arrays = _modified(score, mask, window, chunk, softcap, title)
    scale = collection.head_size**-0.5 if scale is None else checks.number(scale, "scale", title)
    if out is None:
        out = checks.empty_result(query, "out", title)
    if return_lse and lse is None:
        lse = checks.empty_lse(query, title)
    operands = (collection, layer, query, table, scale, out, sinks, lse, kv_offsets, alibi_slopes)
    operands = (*operands, *((None, None) if prior is None else prior_of(prior, title)), *arrays)
    if of_operands:
        if pages is not None or page_counts is not None:
            raise ValueError(
                f"{title}: pages and page_counts must be None for operands: they select pages of a collection"
            )
        if block_mask is not None:
            operands, attributes = with_blocks(_OPERAND_ATTENTION, operands, attributes, block_mask)
        _OPERAND_ATTENTION(operands, attributes, schedule, stream)
    else:
        if not (pages is None and page_counts is None and block_mask is None):
            operands, attributes = with_lists(operands, attributes, pages, page_counts, block_mask)
        operation, names = (_ATTENTION_PADDED, _GIVEN_PADDED) if padded else (_ATTENTION, _GIVEN)
        missed = Missed(names, given, answer) if answer else None
        operation(operands, attributes, scheduled(collection, query, schedule), stream, missed=missed)
    return (out, lse) if return_lse else out


def with_lists(
    operands: tuple[Any, ...], attributes: tuple[Any, ...], pages: Any, page_counts: Any, block_mask: BlockMask | None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The operands of an attention, with its lists after the functions' arrays, and its attributes."""
    operands = (*operands, *(None,) * (_FIRST_LIST - len(operands)), pages, page_counts)
    return (operands, attributes) if block_mask is None else with_blocks(_ATTENTION, operands, attributes, block_mask)


def with_blocks(
    operation: Operation, operands: tuple[Any, ...], attributes: tuple[Any, ...], block_mask: BlockMask
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The operands of an attention including its block mask, and the attributes with its tile sizes."""
    missing = operation.operands.index("block_mask") - len(operands)
    extents = zip(BLOCK_TILE, (block_mask.rows, block_mask.keys), strict=True)
    return (*operands, *(None,) * missing, block_mask.blocks), (*attributes, *extents)


_FIRST_LIST = _ATTENTION.operands.index("pages")


def prior_of(prior: Any, title: str) -> tuple[Any, Any]:
    """The output and log-sum-exp of a prior result."""
    if not isinstance(prior, (tuple, list)) or len(prior) != 2:
        raise TypeError(f"{title}: prior must be a tuple of an output and its log-sum-exp, got {type(prior).__name__}")
    if prior[0] is None or prior[1] is None:
        raise TypeError(f"{title}: prior must be an output and its log-sum-exp, got None for one of them")
    return prior[0], prior[1]


def _modified(
    score: Any, mask: Any, window: Any, chunk: Any, softcap: float | None, title: str
) -> tuple[tuple[tuple[str, Any], ...], tuple[Any, ...]]:
    """The attributes of an attention and the arrays of its functions; attributes of named masks are cached."""
    if score is None and mask.__class__ is str and window is None and chunk is None and softcap is None:
        key: Any = mask
    elif score is not None or type(mask) is not str or not {type(window), type(chunk), type(softcap)} <= _PLAIN:
        return _attributes(score, mask, window, chunk, softcap, title)
    else:
        key = (mask, window, chunk, softcap, type(window), type(chunk))
    found = _plain_masks.get(key)
    if found is None:
        found = _attributes(score, mask, window, chunk, softcap, title)
        if len(_plain_masks) < _MASKS_REMEMBERED:
            _plain_masks[key] = found
    return found


_PLAIN = {int, float, type(None)}
_MASKS_REMEMBERED = 1024
_plain_masks: dict[Any, Any] = {}


def _attributes(
    score: Any, mask: Any, window: Any, chunk: Any, softcap: float | None, title: str
) -> tuple[tuple[tuple[str, Any], ...], tuple[Any, ...]]:
    """The attributes of an attention, and the arrays of its functions."""
    seen, scored, arrays = functions.seen_and_scored(score, mask, window, chunk, title)
    return (*seen, ("softcap", _cap(softcap, title)), *scored), arrays


def _cap(softcap: float | None, title: str) -> float:
    """The attribute of a softcap; 0 for none."""
    if softcap is None:
        return 0.0
    cap = checks.number(softcap, "softcap", title)
    if cap <= 0:
        raise ValueError(f"{title}: softcap must be positive, got {cap}; omit it for none")
    if cap > 3.4028234663852886e38:
        raise ValueError(f"{title}: softcap must fit in f32, got {cap}; omit it for none")
    return cap


def scheduled(collection: Any, query: Any, schedule: Schedule) -> Schedule:
    """The schedule with the bounds that code depends on: new tokens per sequence and, on a GPU, sequences.

    Bounds take few values, so few programs serve all batches; on the host they only distinguish decode from prefill. On
    a GPU, tiles of more tokens depend only on the class of a sequence's number of rows. With batch invariance no bound
    is taken from the batch: decode and prefill kernels differ, and the longest sequence of a step would select the
    kernel.
    """
    try:
        shape = getattr(query, "shape", ())
    except RuntimeError:  # a nested tensor, which the operation refuses
        shape = ()
    heads = shape[-2] if len(shape) > 2 else 0
    if heads.__class__ is not int:
        refuse_tracing("kv.ops.attention")
    if schedule is None:
        known = collection._own_bounds  # the inputs of these bounds are immutable
        if known is None or known[0] != heads:
            known = collection._own_bounds = heads, _with_bounds(collection, heads, None)
        return known[1]
    return _with_bounds(collection, heads, schedule)


def _with_bounds(collection: Any, heads: int, schedule: Schedule) -> Schedule:
    if not (schedule is None or isinstance(schedule, Mapping)):
        return schedule
    schedule = schedules.current("kv.attention", schedule)
    if schedule and schedule.get("batch_invariant") is True and not {"max_queries", "kind"} & set(schedule):
        return schedule if collection.device[0] == "cpu" else {**_most_sequences(collection.batch_size), **schedule}
    if collection.max_seq_length == 0:  # a collection that gets no tokens sets no bound on the number of queries
        return schedule
    if collection.device[0] == "cpu":
        if collection.max_seq_length > 1:
            return schedule
        known = _ONE_QUERY
    elif collection.max_seq_length > FEW and not (schedule and "max_queries" in schedule):
        spec = collection.cache_spec
        rows = row_class(collection.max_seq_length * (heads // spec.num_heads), spec.head_size)
        known = _expected(rows, collection.batch_size)
    else:
        known = _bounds(min(collection.max_seq_length, FEW), collection.batch_size)
    return known if schedule is None else {**known, **schedule}


USUAL_BATCH = 1024  # sequences
_ONE_QUERY = FixedSchedule(max_queries=1)


def _bounds(queries: int, batch: int) -> FixedSchedule:
    return _fixed_bounds(queries, batch)


@functools.cache
def _fixed_bounds(queries: int, batch: int) -> FixedSchedule:
    return FixedSchedule(max_queries=1 << max(queries - 1, 0).bit_length(), max_batch=_batch_class(batch))


@functools.cache
def _expected(rows: int | None, batch: int) -> FixedSchedule:
    """The bounds of a batch that may have many new tokens, of up to ``rows`` query rows of a sequence and KV head.

    ``batch``: the sequences, of which a kernel of its own may have those of few new tokens.
    """
    of_rows = {} if rows is None else {"expected_rows": rows}
    return FixedSchedule(**of_rows, max_batch=_batch_class(batch))


@functools.cache
def _most_sequences(batch: int) -> FixedSchedule:
    """The bound of the sequences alone: one for all usual batches, of which no bit may depend."""
    return FixedSchedule(max_batch=_batch_class(max(batch, USUAL_BATCH)))


def _batch_class(batch: int) -> int:
    """Up to how many sequences code is compiled for: few numbers, so that few programs serve all batches."""
    return next((n for n in (1, 4, 8, 16, 128, USUAL_BATCH) if batch <= n), 1 << max(batch - 1, 0).bit_length())
