# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Page-sparse attention: summaries of pages, and the selection of pages by them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvarn.caches.summaries import PageSummaries
from kvarn.dispatch import Operation, Schedule

from . import checks
from .checks import layer_of


def check_pages(seen: SimpleNamespace) -> None:
    """Check the page lists of an attention against its checked query."""
    title = seen.title
    if getattr(seen, "pages", None) is None:
        if getattr(seen, "page_counts", None) is not None:
            raise ValueError(f"{title}: page_counts must be None without pages")
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
    """Compute the summaries of the pages that contain a step's new tokens, from all tokens of these pages.

    Call it after the step's keys are stored, i.e. after :func:`append`, :func:`rope_append` or another write (including
    in-place norms). The pages are read again, so a summary depends only on the stored, rounded and quantized keys: a
    step may be repeated, its tokens may be dropped, and pages may be reused.

    For pages filled earlier, call it with a collection whose ``cache_lengths`` are 0 and row offsets of all tokens. For
    copied pages, copy the summaries: ``summaries.data[to] = summaries.data[page]``.

    Parameters
    ----------
    collection : KV cache collection
        With pages, and with values (not MLA).
    layer : int
    summaries : PageSummaries
        For the collection's pool. Minima and maxima are rounded outwards. A NaN makes the affected summary NaN.
    row_offsets : uint32 or int32 array-like [B + 1]
        Sequence b has ``row_offsets[b + 1] - row_offsets[b]`` new tokens. Pages of sequences without new tokens keep
        their summaries.
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
    """Select the pages that may have the largest scores for a step's queries, as lists for ``attention(pages=)``.

    The score of a page for a KV head is the maximum, over the sequence's new tokens and the head's query heads, of an
    upper bound on q . k for the page's keys: the sum over d of max(q[d] * least[d], q[d] * largest[d]) (Quest; Tang et
    al., 2024), or, with summaries of means, of q . mean. Results are deterministic and stay on the device, so a CUDA
    graph can capture the call.

    Parameters
    ----------
    collection : KV cache collection
        With pages, and with values (not MLA). Lengths include the step's new tokens, as in its attention.
    layer : int
    query : f32, f16 or bf16 array-like [T, Hq, D]
        The query of the attention; Hq is a multiple of the KV heads.
    row_offsets : uint32 or int32 array-like [B + 1]
    summaries : PageSummaries
        Up to date for every page with tokens.
    count : int, optional
        K, the largest number of pages per list; required without ``pages``. A sequence with at most K pages lists all.
    first, last : int
        Numbers of pages at the start and at the end of a sequence that are always selected, within the K; by default
        only the last page, which has the step's own tokens.
    pages : int32 array-like [B, H, K], optional
        Output lists: ascending, padded with -1. By default allocated by the query's library.
    page_counts : int32 array-like [B, H], optional
        Output numbers of pages per list; allocated in the same way.

    Returns
    -------
    tuple of array-like
        ``pages`` and ``page_counts``. Among equal scores the first pages are selected; NaN ranks above any number. A
        sequence without new tokens has empty lists.
    """
    title = "kv.ops.select_pages"
    layer = layer_of(collection, layer, title)
    attributes = (("first", checks.count(first, "first", title)), ("last", checks.count(last, "last", title)))
    heads = (collection.batch_size, collection.num_heads)
    pages, page_counts = checks.lists(query, heads, count, pages, page_counts, "pages", title)
    operands = (collection, layer, query, row_offsets, _data(summaries, title), pages, page_counts)
    _SELECT(operands, attributes, schedule, stream)
    return pages, page_counts
