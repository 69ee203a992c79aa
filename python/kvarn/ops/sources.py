# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One attention over several sources of keys: lists of sources, and shared prefixes.

The sources are attended to one after another. The unrounded f32 result of one is the ``prior`` of the next, whose
kernels combine the two, so no launch is added to those of the attentions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvarn.dialect.dtypes import f32

from . import checks
from .prefixes import parts_of

# Arguments that may be a list with one entry per source. The others describe the queries, and so apply to all sources.
OF_A_SOURCE = (
    "score", "mask", "window", "chunk", "softcap", "kv_offsets", "alibi_slopes", "tree", "pages", "page_counts",
    "block_mask", "schedule", "indices", "topk_lengths", "inline_scales",
)  # fmt: skip

_OF_POSITIONS = (
    "score", "window", "chunk", "kv_offsets", "alibi_slopes", "pages", "page_counts", "block_mask", "indices",
    "topk_lengths",
)  # fmt: skip


def options_of(names: tuple[str, ...], given: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    """The keyword arguments of an attention, after its four positional ones; ``names`` are the names of ``given``."""
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
    """``attend``, e.g. :func:`kvarn.ops.attention`, over a list of collections or operands, or over shared prefixes.

    ``options`` are the call's keyword arguments; those in :data:`OF_A_SOURCE` may be lists with one entry per source.
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
            f"{title}: layers, or values, must be a list of {len(sources)} entries, one per source, got {got}"
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
    """``attend``, :func:`kvarn.ops.attention` or :func:`kvarn.ops.mla_attention`, for a batch with shared prefixes.

    The prefixes are attended to first, group by group.
    """
    prefixes, suffixes = parts_of(shared, collection, title)
    rest = dict(options)
    # The whole prefix is visible, and neither part counts positions from the start of the sequence.
    if rest["mask"] not in ("causal", "null"):
        raise ValueError(f"{title}: mask must be causal or null with shared prefixes, got {rest['mask']!r}")
    for name in _OF_POSITIONS:
        if rest.pop(name, None) is not None:
            raise ValueError(f"{title}: {name} must be None with shared prefixes, which change positions")
    schedule = rest.pop("schedule")
    schedules = schedule if isinstance(schedule, list) else [None, schedule]
    if len(schedules) != 2:
        raise ValueError(
            f"{title}: with shared prefixes a list of schedules must have 2 entries, prefixes and remaining tokens, "
            f"got {len(schedules)}"
        )
    for entries in schedules:
        if isinstance(entries, Mapping) and entries.get("batch_invariant"):
            raise ValueError(f"{title}: batch_invariant must be left out with shared prefixes of a batch")
    of_all = {
        name: rest[name] for name in ("scale", "softcap", "stream", "value_size", "inline_scales") if name in rest
    }
    prior = attend(
        prefixes, layer, query, shared.row_offsets, mask="null", kv_offsets=shared.no_keys, prior=rest.pop("prior"),
        out=_unrounded(query, title, rest.get("value_size")), return_lse=True, schedule=schedules[0], **of_all,
    )  # fmt: skip
    return attend(suffixes, layer, query, row_offsets, prior=prior, schedule=schedules[1], **rest)


def _unrounded(query: Any, title: str, value_size: int | None = None) -> Any:
    """A new f32 output, to be combined with another source; by default with the query's columns."""
    *rows, size = checks.shape_of(query, f"{title}: query")
    columns = size if value_size is None else value_size
    return checks.empty(query, (*rows, columns), f32, "the result between two sources", title)
