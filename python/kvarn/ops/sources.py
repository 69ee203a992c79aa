# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One attention over several sources of keys: lists of them, and shared prefixes. Each is attended to in turn.

What one leaves, in f32 and unrounded, is the ``prior`` of the next, whose kernels combine both as they end: there is
no launch besides those of the attentions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvarn.dialect.dtypes import f32

from . import checks
from .prefixes import parts_of

# What a list is given for: an entry a source. Everything else is of the queries, and so of all of them.
OF_A_SOURCE = (
    "score", "mask", "window", "chunk", "softcap", "kv_offsets", "alibi_slopes", "tree", "pages", "page_counts",
    "block_mask", "schedule", "indices", "topk_lengths", "inline_scales",
)  # fmt: skip

_OF_POSITIONS = (
    "score", "window", "chunk", "kv_offsets", "alibi_slopes", "pages", "page_counts", "block_mask", "indices",
    "topk_lengths",
)  # fmt: skip


def options_of(names: tuple[str, ...], given: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    """The arguments by keyword of an attention, which follow the four by position; ``names`` are those of ``given``."""
    options = dict(zip(names[4:], given[4:], strict=True))
    del options["shared"]
    return {**options, **more}


def attention(
    attend: Callable[..., Any],
    sources: Any,
    layers: Any,
    query: Any,
    extents: Any,
    shared: Any,
    options: Mapping[str, Any],
    title: str,
) -> Any:
    """:func:`kvarn.ops.attention` or another, ``attend``, over a list of collections or operands, or shared prefixes.

    ``options`` are the keyword arguments of the call, of those in :data:`OF_A_SOURCE` lists for each source its own.
    """
    if sources.__class__ is not list:
        return _attention_shared(attend, sources, layers, query, extents, shared, options, title)
    if shared is not None:
        raise ValueError(f"{title}: shared must be None for a list of sources")
    if not sources:
        raise ValueError(f"{title}: a list of sources must have at least one, got none")
    if not isinstance(layers, list) or len(layers) != len(sources):
        got = f"{len(layers)} entries" if isinstance(layers, list) else f"a {type(layers).__name__}"
        raise ValueError(
            f"{title}: layers, or values, must be a list of {len(sources)} entries, one a source, got {got}"
        )
    each: list[dict[str, Any]] = [{} for _ in sources]
    whole = dict(options)
    for name in OF_A_SOURCE:
        given = whole.pop(name, None)
        if isinstance(given, list) and len(given) != len(sources):
            raise ValueError(
                f"{title}: {name} must be one for all sources or a list of {len(sources)}, got a list of {len(given)}"
            )
        for i, of_source in enumerate(each):
            value = given[i] if isinstance(given, list) else given
            if value is not None:
                of_source[name] = value
    of_last = {name: whole.pop(name) for name in ("sinks", "out", "return_lse", "lse")}
    prior = whole.pop("prior")
    for source, layer, of_source in zip(sources[:-1], layers[:-1], each[:-1], strict=True):
        prior = attend(
            source, layer, query, extents, **whole, **of_source, prior=prior,
            out=_unrounded(query, title, whole.get("value_size")), return_lse=True,
        )  # fmt: skip
    return attend(sources[-1], layers[-1], query, extents, **whole, **each[-1], **of_last, prior=prior)


def _attention_shared(
    attend: Callable[..., Any],
    collection: Any,
    layer: Any,
    query: Any,
    row_offsets: Any,
    shared: Any,
    options: Mapping[str, Any],
    title: str,
) -> Any:
    """:func:`kvarn.ops.attention` or :func:`kvarn.ops.mla_attention`, ``attend``, of a batch that shares prefixes.

    These come first, a group at a time.
    """
    prefixes, suffixes = parts_of(shared, collection, title)
    rest = dict(options)
    # The prefix is seen whole, and positions in both parts are not those of the sequence.
    if rest["mask"] not in ("causal", "null"):
        raise ValueError(f"{title}: mask must be causal or null with shared prefixes, got {rest['mask']!r}")
    for name in _OF_POSITIONS:
        if rest.pop(name, None) is not None:
            raise ValueError(f"{title}: {name} must be None with shared prefixes, where positions begin anew")
    schedule = rest.pop("schedule")
    schedules = schedule if isinstance(schedule, list) else [None, schedule]
    if len(schedules) != 2:
        raise ValueError(
            f"{title}: a list of schedules must have 2 with shared prefixes, of these and of the rest, "
            f"got {len(schedules)}"
        )
    for entries in schedules:
        if isinstance(entries, Mapping) and entries.get("batch_invariant"):
            raise ValueError(f"{title}: batch_invariant cannot be kept with shared prefixes, which are of a batch")
    of_all = {
        name: rest[name] for name in ("scale", "softcap", "stream", "value_size", "inline_scales") if name in rest
    }
    prior = attend(
        prefixes, layer, query, shared.row_offsets, mask="null", kv_offsets=shared.no_keys, prior=rest.pop("prior"),
        out=_unrounded(query, title, rest.get("value_size")), return_lse=True, schedule=schedules[0], **of_all,
    )  # fmt: skip
    return attend(suffixes, layer, query, row_offsets, prior=prior, schedule=schedules[1], **rest)


def _unrounded(query: Any, title: str, value_size: int | None = None) -> Any:
    """A new output in f32, for what another source is combined with; of as many columns as the query by default."""
    *rows, size = checks.shape_of(query, f"{title}: query")
    return checks.empty(
        query, (*rows, size if value_size is None else value_size), f32, "what lies between two sources", title
    )
