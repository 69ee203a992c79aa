# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which pages of a sequence its queries see: summaries of pages, and the choice by them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvarn.caches.summaries import PageSummaries
from kvarn.dispatch import Operation, Schedule

from . import checks
from .checks import layer_of


def check_pages(seen: SimpleNamespace) -> None:
    """What lists of pages must be, of a query that was checked."""
    title = seen.title
    if getattr(seen, "pages", None) is None:
        if getattr(seen, "page_counts", None) is not None:
            raise ValueError(f"{title}: page_counts must be None without pages, whose entries it counts")
        return
    spec, batch = checks.spec_of(seen), checks.handle_of(seen).batch_size
    if not spec.paged:
        raise ValueError(f"{title}: pages needs a collection with pages, got a {spec.kind} one")
    checks.array(seen, "pages", (batch, spec.num_heads, "K"))
    if not 1 <= seen.pages.shape[2] < 2**31 // spec.page_size:
        raise ValueError(
            f"{title}: pages must have at least one entry a list, which may be -1, and fewer than 2**31 tokens, got "
            f"{seen.pages.shape[2]} entries"
        )
    checks.array(seen, "page_counts", (batch, spec.num_heads))


def _check_summaries(seen: SimpleNamespace) -> None:
    spec, c = checks.spec_of(seen), seen.collection
    if not spec.paged:
        raise ValueError(f"{seen.title}: collection must have pages, got a {spec.kind} one")
    checks.with_values(seen)
    shape = (c.num_blocks, c.num_layers, spec.num_heads, "R", spec.head_size)
    checks.array(seen, "summaries", shape, checks.FLOATS)


def _check_summarize(seen: SimpleNamespace) -> None:
    _check_summaries(seen)
    checks.row_table(seen)


_SUMMARIZE = Operation("kv.summarize_pages", {"summaries": 2}, _check_summarize, written=("summaries",))


def summarize_pages(
    collection: Any, layer: int, summaries: PageSummaries, row_offsets: Any, *, schedule: Schedule = None,
    stream: Any = None,
) -> None:  # fmt: skip
    """Make the summaries of the pages that a step's new tokens lie in, of all their tokens.

    To be called where the step's keys are stored, after :func:`append`, :func:`rope_append` or whatever else writes
    them (norms in place too). The pages are read again: a summary depends on what is stored, rounded and quantized,
    and on nothing else, so that a step may be repeated, its tokens given up, and pages used again.

    Pages that were filled before there were summaries: the same with a collection whose ``cache_lengths`` are 0, and
    row offsets of all tokens. Those that are copied: ``summaries.data[to] = summaries.data[page]``.

    Parameters
    ----------
    collection : KV cache collection
        With pages, and with values (not MLA).
    layer : int
    summaries : PageSummaries
        Of the collection's pool. Least and largest elements are rounded outwards where they must be rounded. A NaN
        makes what it is part of NaN.
    row_offsets : uint32 or int32 array-like [B + 1]
        New tokens of sequence b: ``row_offsets[b + 1] - row_offsets[b]``. Sequences without any are left alone.
    """
    title = "kv.ops.summarize_pages"
    layer = layer_of(collection, layer, title)
    _SUMMARIZE((collection, layer, _data(summaries, title), row_offsets), (), schedule, stream)


def _data(summaries: Any, title: str) -> Any:
    if not isinstance(summaries, PageSummaries):
        raise TypeError(f"{title}: summaries must be kv.PageSummaries, got {type(summaries).__name__}")
    return summaries.data


def _check_select(seen: SimpleNamespace) -> None:
    title, spec, c = seen.title, checks.spec_of(seen), seen.collection
    _check_summaries(seen)
    checks.array(seen, "query", ("T", "Hq", spec.head_size), checks.FLOATS)
    checks.query_heads(seen, spec)
    checks.row_table(seen)
    checks.array(seen, "pages", (c.batch_size, spec.num_heads, "K"))
    checks.array(seen, "page_counts", (c.batch_size, spec.num_heads))
    kept = seen.attributes["first"] + seen.attributes["last"]
    if kept > seen.pages.shape[2]:
        raise ValueError(
            f"{title}: first and last must be at most the {seen.pages.shape[2]} pages of a list together, got {kept}"
        )
    if c.batch_size * spec.num_heads * c.lookup_table.shape[-1] >= 2**31:
        raise ValueError(
            f"{title}: sequences times KV heads times columns of the lookup table must be less than 2**31, got "
            f"{c.batch_size} * {spec.num_heads} * {c.lookup_table.shape[-1]}: split the call"
        )


_SELECT = Operation("kv.select_pages", {"query": 1, "summaries": 2}, _check_select, written=("pages", "page_counts"))


def select_pages(
    collection: Any, layer: int, query: Any, row_offsets: Any, summaries: PageSummaries, count: int | None = None, *,
    first: int = 0, last: int = 1, pages: Any = None, page_counts: Any = None, schedule: Schedule = None,
    stream: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Choose the pages that a step's queries may find the largest scores in: what ``attention(pages=)`` takes.

    A page's score for a KV head is the largest, over the sequence's new tokens and the query heads that share it, of
    the bound that follows from the page's summary: the sum over d of max(q[d] * least[d], q[d] * largest[d]), which no
    q . k of a key in it exceeds (Quest; Tang et al., 2024), or of q . mean. Nothing is read back, and equal inputs give
    equal lists: it can be captured in a CUDA graph.

    Parameters
    ----------
    collection : KV cache collection
        With pages, and with values (not MLA). The step's new tokens count as its attention will count them.
    layer : int
    query : f32, f16 or bf16 array-like [T, Hq, D]
        Hq a multiple of the KV heads; as attention will get it.
    row_offsets : uint32 or int32 array-like [B + 1]
    summaries : PageSummaries
        Of every page that has tokens.
    count : int, optional
        K, the most pages of a list; not needed where ``pages`` is given. A sequence with no more has all of them.
    first, last : int
        How many pages from the start of a sequence and at its end are always chosen, by default the last one: it has
        the step's own tokens. They count among the K.
    pages : int32 array-like [B, H, K], optional
        Where the lists go: ascending, -1 behind their ends. When not given it is allocated by the query's library.
    page_counts : int32 array-like [B, H], optional
        Where their numbers of pages go; likewise.

    Returns
    -------
    tuple of array-like
        ``pages`` and ``page_counts``. Of pages with equal scores the first ones are chosen; a score that is NaN is
        larger than any other. A sequence without new tokens has empty lists.
    """
    title = "kv.ops.select_pages"
    layer = layer_of(collection, layer, title)
    attributes = (("first", checks.count(first, "first", title)), ("last", checks.count(last, "last", title)))
    heads = (collection.batch_size, collection.num_heads)
    pages, page_counts = checks.lists(query, heads, count, pages, page_counts, "pages", title)
    operands = (collection, layer, query, row_offsets, _data(summaries, title), pages, page_counts)
    _SELECT(operands, attributes, schedule, stream)
    return pages, page_counts
