# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables of a step's shared prefixes: ``kv.split_prefixes``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvarn import dispatch
from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect.dtypes import i32
from kvarn.dispatch import Operation
from kvarn.paging.prefixes import SharedPrefixes

from . import checks

_WRITTEN = ("prefix_table", "prefix_lengths", "prefix_rows", "prefix_keys", "suffix_table", "suffix_lengths")
_MOST = 2**31 - 1


def _check(seen: SimpleNamespace) -> None:
    checks.array(seen, "lookup_table", ("B", "columns"))
    checks.array(seen, "lengths", ("G",))
    (batch, columns), groups = seen.lookup_table.shape, seen.lengths.shape[0]
    if batch < 1 or groups < 1 or columns < 1:
        raise ValueError(f"{seen.title}: needs sequences, columns and groups, got {batch}, {columns} and {groups}")
    checks.declared(seen)


def _shapes(batch: int, columns: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the outputs."""
    return (groups, columns), (groups,), (groups + 1,), (groups + 1,), (batch, columns), (batch,)


_SPLIT = Operation("kv.split_prefixes", {}, _check, written=_WRITTEN)


def plan_prefixes(
    shared: Any, collection: Any, row_offsets: Any, tables: tuple[Any, ...], stream: Any
) -> tuple[tuple[PagedKVCacheCollection, PagedKVCacheCollection], tuple[Any, ...]]:
    """The collections of prefixes and of suffixes, and their tables; ``tables`` are reused if their shapes match."""
    title = "SharedPrefixes.plan"
    if not isinstance(collection, PagedKVCacheCollection):
        raise TypeError(f"{title}: needs a collection with pages, got a {type(collection).__name__}")
    columns, groups = checks.shape_of(collection.lookup_table, f"{title}: lookup_table", 2)[1], shared.lengths.shape[0]
    shapes = _shapes(collection.batch_size, columns, groups)
    if [tuple(t.shape) for t in tables] != list(shapes):
        tables = tuple(
            checks.empty(shared.lengths, shape, i32, name, title) for name, shape in zip(_WRITTEN, shapes, strict=True)
        )
    recorded = dispatch.recorder is not None and dispatch.recorder.recording()
    if collection.device[0] == "cpu" and not recorded:
        _check_groups(shared, collection, title)
    operands = (collection.lookup_table, collection.cache_lengths, row_offsets, shared.sequences, shared.lengths)
    _SPLIT((*operands, *tables), (("page_size", collection.page_size),), None, stream)
    table, lengths, _, _, suffix_table, suffix_lengths = tables
    rows = min(collection.max_seq_length * collection.batch_size, _MOST)
    prefixes = collection.with_tables(lengths, table, max_seq_length=rows)
    return (prefixes, collection.with_tables(suffix_lengths, suffix_table)), tables


def parts_of(shared: Any, collection: Any, title: str) -> tuple[PagedKVCacheCollection, PagedKVCacheCollection]:
    """The collections of prefixes and of suffixes, for the collection that they were planned for."""
    if not isinstance(shared, SharedPrefixes):
        raise TypeError(f"{title}: shared must be a kv.SharedPrefixes, got a {type(shared).__name__}")
    parts = shared.parts
    if shared.collection is not collection:
        raise ValueError(f"{title}: collection must be the one that shared was planned for: call plan for this one")
    return parts


def _check_groups(shared: Any, collection: PagedKVCacheCollection, title: str) -> None:
    """Refuse invalid groups if their tables are readable on the host."""
    sequences, lengths, table, cached = (
        np.asarray(x).astype(np.int64)
        for x in (shared.sequences, shared.lengths, collection.lookup_table, collection.cache_lengths)
    )
    if sequences[0] != 0 or sequences[-1] != len(table) or (np.diff(sequences) < 0).any():
        raise ValueError(f"{title}: sequences must ascend from 0 to the batch's {len(table)}, got {sequences.tolist()}")
    for g, length in enumerate(lengths):
        of_group = slice(sequences[g], sequences[g + 1])
        pages = length // collection.page_size
        if length < 0 or (cached[of_group] < pages * collection.page_size).any():
            raise ValueError(
                f"{title}: lengths must be cached in every sequence of their group, got {length} of group {g}, whose "
                f"sequences have {cached[of_group].tolist()}"
            )
        if (table[of_group, :pages] != table[of_group][:1, :pages]).any():
            raise ValueError(f"{title}: sequences of group {g} must share their first {pages} pages, and do not")
