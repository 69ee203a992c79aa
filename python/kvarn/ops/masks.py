# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block masks: a mask function evaluated once per step for all layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from kvarn import settings
from kvarn.block_mask import BlockMask
from kvarn.caches import MHAOperand
from kvarn.dialect import schedules
from kvarn.dialect.dtypes import i32
from kvarn.dispatch import Operation, Schedule
from kvarn.dsl.functions import registered
from kvarn.dsl.masks import named
from kvarn.lowering.target import of_capability
from kvarn.runtime import buffers, device
from kvarn.runtime.binding import HOST, ordinal_of

from . import checks, functions, mla, reads
from .block_lists import blocks_shape, check_blocks
from .drafts import with_tree
from .pages import check_pages

TITLE = "kv.ops.block_mask"


def _check(seen: SimpleNamespace) -> None:
    spec, c = checks.spec_of(seen), seen.collection
    checks.operand_of_keys(seen, spec)
    checks.no_kv_offsets(seen, spec)
    padded = seen.valid_lengths is not None
    leading = (c.batch_size, "S") if padded else ("T",)
    # The query of an MLA collection may differ from the row's elements in its number of columns.
    checks.array(seen, "query", (*leading, "Hq", "D" if spec.is_mla else spec.head_size))
    checks.query_heads(seen, spec)
    checks.array(seen, "valid_lengths", (c.batch_size,))
    if not padded:
        checks.offsets(seen.row_offsets, c.batch_size, f"{TITLE}: row_offsets")
    if seen.kv_offsets is not None:
        checks.offsets(seen.kv_offsets, c.batch_size, f"{TITLE}: kv_offsets")
    for i, name in enumerate(functions.ARRAYS):
        functions.check(getattr(seen, name), f"{TITLE}: array {i} of the mask")
    check_pages(seen)
    tile, by_head = (seen.attributes["rows"], seen.attributes["keys"]), registered(seen.attributes["mask"]).by_head
    if seen.pages is not None and spec.page_size % tile[1]:
        raise ValueError(f"{TITLE}: keys must divide the {spec.page_size} tokens of a listed page, got {tile[1]}")
    check_blocks(seen, "blocks", tile, by_head)


_ARRAYS = dict.fromkeys(functions.ARRAYS, 0)  # of any shape
# For collections, and for operands.
_BLOCK_MASK = Operation(
    "kv.block_mask", {"query": 1, **_ARRAYS}, _check, written=("blocks",), single=("query", *_ARRAYS),
    unread=("query",), handles={"collection": ("collection", "operand")},
)  # fmt: skip


def block_mask(
    collection: Any,
    query: Any,
    row_offsets: Any = None,
    mask: Any = None,
    *,
    score: Any = None,
    valid_lengths: Any = None,
    kv_offsets: Any = None,
    tree: Any = None,
    pages: Any = None,
    page_counts: Any = None,
    rows: int | None = None,
    keys: int | None = None,
    blocks: Any = None,
    schedule: Schedule = None,
    stream: Any = None,
) -> BlockMask:
    """Compute, on the device, which tiles of keys a step's queries see under a mask function.

    Unless position bounds determine a mask (as they do not for documents, or for masks that read arrays), attention
    must evaluate it for every key. With a block mask it visits only tiles of keys in which some key is seen, and
    evaluates the mask only in partly seen tiles. This operation evaluates the mask once per step, for every pair of
    positions that ``kv.masks.Mask.first`` does not exclude, and all layers use the result. It stays on the device, so a
    CUDA graph can capture the call.

    Parameters
    ----------
    collection : KV cache collection, or attention operand
        A collection (also MLA, for :func:`mla_attention`) or the operand of keys. Of it only lengths and shapes are
        used.
    query : array-like [T, Hq, D], or with ``valid_lengths`` [B, S, Hq, D]
        The query of the attention. Only its shape and dtype are used.
    row_offsets : uint32 or int32 array-like [B + 1]
        Alternatively ``valid_lengths``, uint32 or int32 [B], for a padded batch (:func:`attention_padded`).
    mask : function, or tuple of a function and its arrays
        As in :func:`attention`. Optional with a tree or pages; the default is then ``kv.masks.causal``.
    score : function, or tuple of a function and its arrays, optional
        The score of the attention, on which its tile sizes depend.
    kv_offsets : uint32 or int32 array-like [B + 1], optional
        As in the attention.
    tree : int32 array-like [T, W], or uint64 array-like [T], optional
        As in :func:`attention`, in conjunction with the mask.
    pages, page_counts : int32 array-like [B, H, K] and [B, H], optional
        As in :func:`attention`: only tiles of these pages are listed, in their order.
    rows, keys : int, optional
        Query rows and keys of a tile: by default those of the attention, or others that its schedule allows. On a GPU
        multiples of 16 keys and, for kind tile, of 64 rows; for kind decode at least the rows of a sequence per KV
        head. With pages, ``keys`` divides the page size.
    blocks : int32 array-like [tiles, 1 or H, 1 + most], optional
        The output: ``blocks`` of an earlier block mask for the same shapes. By default allocated by the query's
        library.
    schedule : mapping, optional
        The schedule of the attention, which determines the tile sizes; this operation has no entries of its own.
    stream : optional
        As in :func:`append`.

    Returns
    -------
    BlockMask
        For ``block_mask=`` of :func:`attention` with the same collection, queries, offsets and schedule.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as above, or the schedule does not fit; nothing was launched.
    """
    if (row_offsets is None) == (valid_lengths is None):
        raise ValueError(f"{TITLE}: row_offsets or valid_lengths must be given, and not both")
    if tree is not None:
        if isinstance(collection, MHAOperand) or kv_offsets is not None:
            raise ValueError(f"{TITLE}: tree must be None for operands and with kv_offsets: it describes new tokens")
        mask = "causal" if mask is None else mask
        mask, _, _ = with_tree((mask, None, None), tree, collection, query, row_offsets, TITLE)
    elif mask is None and pages is not None:
        mask = named("causal", 0)
    whole = mask if isinstance(mask, tuple) and mask else (mask,)
    if not callable(whole[0]):
        raise TypeError(f"{TITLE}: mask must be a function, such as kv.masks.causal, got {whole[0]!r}")
    name, arrays = functions.given(whole, "mask", TITLE)
    assert name is not None
    arrays = functions.joined((), arrays, TITLE)
    shape = checks.shape_of(query, f"{TITLE}: query", 3 if valid_lengths is None else 4)
    if rows is None or keys is None:
        case = {"mask": name, "score": functions.given(score, "score", TITLE)[0] or ""}
        case |= {"padded": valid_lengths is not None, "pages": pages is not None}
        found = _extents(collection, query, shape[-2], case, schedule)
        rows, keys = (f if given is None else given for given, f in zip((rows, keys), found, strict=True))
    rows, keys = (checks.count(n, what, TITLE, 2) for n, what in ((rows, "rows"), (keys, "keys")))
    if blocks is None:
        listed = None if pages is None else checks.shape_of(pages, f"{TITLE}: pages", 3)
        made = blocks_shape(collection, shape, (rows, keys), registered(name).by_head, listed)
        blocks = checks.empty(query, made, i32, "blocks", TITLE)
    operands = (collection, query, blocks, row_offsets, valid_lengths, kv_offsets, *arrays)
    if pages is not None or page_counts is not None:
        operands = (*operands, *(None,) * (len(functions.ARRAYS) - len(arrays)), pages, page_counts)
    _BLOCK_MASK(operands, (("mask", name), ("rows", rows), ("keys", keys)), None, stream)
    return BlockMask(blocks, rows, keys, whole)


def _extents(collection: Any, query: Any, heads: int, case: Mapping[str, Any], schedule: Schedule) -> tuple[int, int]:
    """Query rows and keys per tile of an attention with a schedule; ``case`` has its other properties."""
    of_operand = isinstance(collection, MHAOperand)
    if of_operand:
        entries = schedules.current("kv.operand_attention", schedule)
    elif collection.cache_spec.is_mla:
        entries = mla.scheduled(collection, schedule)
    else:
        entries = reads.scheduled(collection, query, schedule)
    if entries is not None and not isinstance(entries, Mapping):
        raise TypeError(f"{TITLE}: the schedule's entries must be given as a mapping, got {entries!r}")
    emulation, ordinal = settings.emulation(), ordinal_of(collection.device, f"{TITLE}: collection")
    if emulation is not None:
        target = emulation.target
    else:
        target = "host" if ordinal == HOST else of_capability(*device.device(ordinal).capability).name
    dtype = buffers.view(query, name=f"{TITLE}: query").dtype
    try:
        given = tuple(sorted((entries or {}).items()))
        spec = collection.spec.cache if of_operand else collection.cache_spec
        return _extents_of(spec, dtype, heads, tuple(case.items()), given, target, of_operand)
    except ValueError as error:
        raise ValueError(f"{TITLE}: {error}") from None


@functools.lru_cache(maxsize=1024)
def _extents_of(
    spec: Any, dtype: Any, heads: int, case: tuple[tuple[str, Any], ...], schedule: tuple[tuple[str, Any], ...],
    target: str, of_operands: bool,
) -> tuple[int, int]:  # fmt: skip
    """:func:`_extents` from hashable values, cached."""
    from kvarn.lowering.kernels.attention import expansion as attention
    from kvarn.lowering.kernels.attention.case import Case, Masking
    from kvarn.lowering.kernels.mla import expansion as mla
    from kvarn.lowering.target import by_name

    given = dict(case)
    made = dataclasses.replace(Case.plain(spec, dtype, heads), **{**given, "mask": Masking(given["mask"])})
    extents = mla.block_extents if spec.is_mla else attention.block_extents
    place = attention.Place(by_name(target), dict(schedule), attention.WIDEST_ROWS, of_operands)
    return extents(made, place)
