# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Page ownership checks: the ownership records of pools, and the report of violations.

``with kv.sanitize(manager):`` compiles kernels launched inside with ``check-kv-ownership`` and records, next to the
pool, the owner and generation of each page, and which slots were written. Violations are raised after the launch on the
host and in the emulator; on a GPU at the next step, at ``check()`` and at the end of the context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import kvarn
from kvarn.caches import ForeignPages, KVCacheCollection
from kvarn.dialect import layout, ownership_layout as at
from kvarn.dialect.layout import cdiv
from kvarn.env import OWNERSHIP
from kvarn.paging.hybrid import HybridKVCacheManager
from kvarn.paging.manager import PagedKVCacheManager
from kvarn.paging.page_pool import Request
from kvarn.runtime import buffers, ownership
from kvarn.runtime.binding import ordinal_of
from kvarn.runtime.buffers import BufferView
from kvarn.runtime.mirror import Memory

KINDS = {
    at.UNWRITTEN: "unwritten", at.SHARED: "shared", at.FREE: "free", at.FOREIGN: "foreign", at.BEYOND: "beyond",
    at.ENDED: "released", at.OUTSIDE: "outside",
}  # fmt: skip
_SHOWN = 8  # violations listed in an error


@dataclass(frozen=True)
class Violation:
    """An access that violated a rule. Equal violations of several threads are reported once.

    Attributes
    ----------
    kind : str
        ``"foreign"``: the page does not belong to the sequence, or no longer. ``"released"``: the sequence has ended.
        ``"beyond"``: it has no page for the token. ``"free"``: the page has no owner. ``"outside"``: the sequence, the
        token or the page does not exist. ``"shared"``: a store to a page that other requests read. ``"unwritten"``: a
        load of a slot that was not written since the page was allocated.
    access : str
        The line, the op and the kernel; for loads by address, the operation.
    verb : str
        ``"reads"``, ``"writes"``, or one of these with ``" the scales of"``.
    sequence, token, head : int
        Indices of the access.
    request : hashable
        The sequence's name if a manager made the table; else None.
    page, slot : int
        The table's entry, and the slot in the page.
    expected_page : int or None
        The sequence's page for the token; None if it has none or it is unknown.
    generation : int
        How often the page was allocated.
    owners : tuple of hashable
        The requests that own the page when the violation is reported.
    """

    kind: str
    access: str
    verb: str
    sequence: int
    token: int
    head: int
    request: Hashable
    page: int
    slot: int
    expected_page: int | None
    generation: int
    owners: tuple[Hashable, ...]

    def __str__(self) -> str:
        return self.text([self.head])

    def text(self, heads: Sequence[int]) -> str:
        """The message for the same access of several heads."""
        which = f"head {heads[0]}" if len(heads) == 1 else f"{len(heads)} heads"
        who = f"sequence {self.sequence}" + (f" (request {self.request!r})" if self.request is not None else "")
        where = f"page {self.page}, slot {self.slot}"
        owners = " and ".join(repr(o) for o in self.owners)
        owned = f"page {self.page} belongs to {owners or 'no request'}"
        has = "it has no page there" if self.expected_page is None else f"its page there is {self.expected_page}"
        why = {
            "unwritten": f"which was not written since the page was allocated ({owned})",
            "shared": f"which other requests read: {owned}, or is cached as a prefix; call alloc after a fork",
            "free": "which has no owner: it was freed",
            "foreign": f"which is not its own: {has}; {owned}",
            "beyond": "where the sequence has no page: the token is past the allocated pages, or before its window",
            "released": f"after the request has ended: {owned}",
            "outside": "which does not exist: the sequence, the token or the table's entry is out of range",
        }[self.kind]
        return f"{self.access}: {self.verb} token {self.token} of {who}, {which}, in {where}, {why}"


class OwnershipError(RuntimeError):
    """Kernels accessed pages that they must not access, or slots that were never written.

    Attributes
    ----------
    violations : tuple of Violation
    """

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        of_heads: dict[Violation, list[int]] = {}
        for v in self.violations:
            of_heads.setdefault(dataclasses.replace(v, head=0), []).append(v.head)
        lines = [v.text(heads) for v, heads in list(of_heads.items())[:_SHOWN]]
        more = len(of_heads) - _SHOWN
        super().__init__("\n".join([*lines, *([f"and {more} more"] if more > 0 else [])]))


# --- a pool ----------------------------------------------------------------------------------------


class _Table(NamedTuple):
    """A lookup table of a step, and the expected contents of its entries."""

    low: int
    high: int
    shape: tuple[int, int]  # rows, and words from row to row
    columns: int
    names: tuple[Hashable, ...]
    requests: tuple[Any, ...]
    expected: Memory
    owner: Any  # keeps the memory from being reused for another table


class _Watched:
    """The ownership records of one pool. Subclasses define the users of a page.

    Its memory is given as views [N, 2, L, P, H, D or G], each with a flag for scales; a view may have extent 1 in
    dimension 1.
    """

    def __init__(self, spec: Any, ranges: Sequence[tuple[BufferView, bool]], base: int, count: int) -> None:
        self.spec, self.count, self.base, self._ranges = spec, count, base, tuple(ranges)
        views = [view for view, _ in ranges]
        self.ordinal = ordinal_of(views[0].device, "a watched pool")
        self.pages = Memory(2 * count, np.int32, self.ordinal)
        self.table_words = Memory(at.MOST_TABLES * at.TABLE_WORDS, np.int64, self.ordinal)
        self.tables: dict[int, _Table] = {}
        self.violations: dict[Violation, None] = {}
        self.written = [self._written(view, of_scales) for view, of_scales in ranges]
        self.regions = [
            [v.data, v.data + v.span * v.dtype.itemsize, w.address, self.pages.address, count,
             self.table_words.address, at.MOST_TABLES]
            for v, w in zip(views, self.written, strict=True)
        ]  # fmt: skip
        self._seen: Any = None
        ownership.registry(self.ordinal).add(self.regions, self)

    def close(self) -> None:
        """Stop watching the pool, after running kernels have finished."""
        ownership.registry(self.ordinal).drop(self.regions, self)

    def _written(self, view: BufferView, of_scales: bool) -> Memory:
        row = at.granule(self.spec, of_scales) // view.dtype.itemsize
        if any(s % row for s in view.strides[:-1]):
            raise ValueError(
                f"a watched pool must have strides of whole rows of a head ({row} elements), got {view.strides}"
            )
        return Memory(view.span // row + 1, np.int32, self.ordinal)

    def slots(self, which: int) -> np.ndarray:
        """The generation in which each slot was written, [N, 2, L, P, H]: the host's copy, which ``pull`` updates."""
        (view, of_scales), memory = self._ranges[which], self.written[which]
        row = at.granule(self.spec, of_scales) // view.dtype.itemsize
        strides = tuple(s // row * 4 for s in view.strides[:-1])
        return np.lib.stride_tricks.as_strided(memory.array, view.shape[:-1], strides)

    @property
    def generations(self) -> np.ndarray:
        return self.pages.array.reshape(-1, 2)[:, 0]

    def _state(self) -> tuple[np.ndarray, np.ndarray]:
        """Generation and number of users of every page."""
        raise NotImplementedError

    def _version(self) -> Any:
        """A value that changes with the state."""
        raise NotImplementedError

    def _expected(self, table: _Table, row: int) -> list[int]:
        """The pages that a row must name, or one of ``ANY_PAGE`` and ``RELEASED`` for the whole row."""
        raise NotImplementedError

    def _owners(self, page: int) -> tuple[Hashable, ...]:
        return ()

    # --- records ---

    def refresh(self) -> None:
        version = self._version()
        if version == self._seen:
            return
        generations, users = self._state()
        self.pages.array.reshape(-1, 2)[:] = np.stack([generations, users], 1)
        self.pages.push()
        for table in self.tables.values():
            self._expect(table)
        self._seen = version

    def _expect(self, table: _Table) -> None:
        rows, words = table.shape
        pages = table.expected.array.reshape(rows, words)
        pages[:] = at.NO_PAGE
        for b in range(rows):
            found = self._expected(table, b)[: table.columns]
            pages[b, : len(found)] = found
        table.expected.push()

    def declare(self, array: Any, names: Sequence[Hashable], requests: Sequence[Any]) -> None:
        """From now on, row b of a lookup table belongs to sequence ``requests[b]``; an fa3 table has its layers one
        after another."""
        view = buffers.view(array, name="a lookup table")
        rows, words, columns = _rows_of(view)
        high = view.data + 4 * ((rows - 1) * words + columns)
        if not rows:
            return
        for low in [t.low for t in self.tables.values() if t.low < high and view.data < t.high]:
            del self.tables[low]  # the new table reuses its memory
        while len(self.tables) >= at.MOST_TABLES:
            del self.tables[next(iter(self.tables))]
        made = _Table(
            view.data, high, (rows, words), columns, tuple(names), tuple(requests),
            Memory(rows * words, np.int32, self.ordinal), array,
        )  # fmt: skip
        self.tables[made.low] = made
        self._seen = None
        words_ = self.table_words.array
        words_[:] = 0
        for i, table in enumerate(self.tables.values()):
            words_[i * at.TABLE_WORDS :][: at.TABLE_WORDS] = table.low, table.high, table.expected.address
        self.table_words.push()

    def mark(self, pages: Any, slots: Any = slice(None)) -> None:
        """Mark the contents of pages as written, in all layers."""
        self.refresh()
        for n, memory in enumerate(self.written):
            memory.pull()
            view = self.slots(n)
            for page in np.atleast_1d(pages).tolist():
                view[page][:, :, slots] = self.generations[page]
            memory.push()

    def copied(self, base: int, source: np.ndarray | None, destination: np.ndarray) -> None:
        if base != self.base:
            return
        if source is None:
            self.mark([p for p in destination.tolist() if 0 <= p < self.count])
            return
        self.refresh()
        for n, memory in enumerate(self.written):
            memory.pull()
            view = self.slots(n)
            for a, b in zip(source.tolist(), destination.tolist(), strict=True):
                if 0 <= a < self.count and 0 <= b < self.count:
                    view[b] = np.where(view[a] == self.generations[a], self.generations[b], 0)
            memory.push()

    def arrays(self) -> list[np.ndarray]:
        memories = [self.pages, self.table_words, *self.written, *(t.expected for t in self.tables.values())]
        return [m.array for m in memories]

    # --- violations ---

    def take_violations(self, found: Sequence[Sequence[int]]) -> list[int]:
        registry, taken = ownership.registry(self.ordinal), []
        for i, words in enumerate(found):
            region = registry.region_at(words[at.REGION])
            if region is None or not any(region is own for own in self.regions):
                continue
            taken.append(i)
            self.violations[self._violation(words)] = None
        return taken

    def _violation(self, words: Sequence[int]) -> Violation:
        access, _, verb = ownership.titles.get(words[at.ACCESS], "an access|accesses").partition("|")
        table, b, page = self.tables.get(words[at.TABLE]), words[at.SEQUENCE], words[at.PAGE]
        request = table.names[b] if table is not None and 0 <= b < len(table.names) else None
        expected, token = words[at.EXPECTED_PAGE], words[at.TOKEN]
        return Violation(
            KINDS[words[at.KIND]], access, verb, b, token, words[at.HEAD], request, page,
            token % self.spec.page_size if self.spec.paged else token, expected if expected >= 0 else None,
            words[at.GENERATION], self._owners(page),
        )  # fmt: skip

    def raise_violations(self) -> None:
        if self.violations:
            found, self.violations = list(self.violations), {}
            raise OwnershipError(found)


def _rows_of(view: BufferView) -> tuple[int, int, int]:
    """Rows of a lookup table, elements from one to the next, and columns."""
    *outer, columns = view.shape if len(view.shape) > 1 else (*view.shape, 1)
    words = view.strides[len(outer) - 1] if outer[-1] > 1 else columns
    if len(outer) > 1 and outer[0] > 1 and view.strides[0] != outer[1] * words:
        raise ValueError(f"layers of a watched lookup table must be contiguous, got strides {view.strides}")
    return int(np.prod(outer)), words, columns


def _ranges_of(collection: Any) -> Iterator[tuple[BufferView, bool]]:
    """A collection's memory, as views for :class:`_Watched`."""
    views, spec = collection._views, collection.cache_spec
    for first, second, of_scales in (("blocks", "values", False), ("scales", "value_scales", True)):
        if first not in views:
            continue
        view = views[first]
        if spec.kind == layout.FA3:  # [2, N, P, H, D]: layers share the pages
            two, pages, *inner = zip(view.shape, view.strides, strict=True)
            yield _with_dims(view, [pages, two, (1, 0), *inner]), of_scales
        elif not isinstance(collection, ForeignPages):
            yield view, of_scales
        else:  # keys, and values, each [L, N, P, H, D], interleaved or in separate buffers
            halves = sorted((views[n] for n in (first, second) if n in views), key=lambda v: v.data)
            distances = [(v.data - halves[0].data) // v.dtype.itemsize for v in halves]
            together = len(halves) == 2 and distances[1] < halves[0].span
            for half in halves[:1] if together else halves:
                layers, pages, *inner = zip(half.shape, half.strides, strict=True)
                two = (2, distances[1]) if together else (1, 0)
                yield _with_dims(half, [pages, two, layers, *inner]), of_scales


def _with_dims(view: BufferView, dims: Sequence[tuple[int, int]]) -> BufferView:
    """The same memory with other extents and strides."""
    return view._replace(shape=tuple(n for n, _ in dims), strides=tuple(step for _, step in dims))


class _OfManager(_Watched):
    """The pool of a manager, whose records define the owners."""

    def __init__(self, manager: PagedKVCacheManager) -> None:
        views = [buffers.view(b) for b in (manager.blocks, manager.scales) if b is not None]
        ranges = list(zip(views, (False, True), strict=False))
        self.manager: PagedKVCacheManager = weakref.proxy(manager)
        self._ends: dict[int, tuple[Request, int]] = {}  # by request: the end of its last step
        super().__init__(manager.cache_spec, ranges, views[0].data, manager.total_num_pages + 1)
        self.refresh()
        processed = [(r.pages, r.processed) for r in manager._requests.values() if not r.dummy]
        self.mark(list(manager._pages.hash_of))
        for pages, tokens in processed:
            full, rest = divmod(tokens, manager.page_size)
            self.mark(pages[:full])
            if rest:
                self.mark(pages[full], slice(rest))
        self._copy: Callable[[np.ndarray, np.ndarray], Any] | None = manager._copy_pages
        if self._copy is not None:
            manager._copy_pages = self._copy_pages
        self._before, manager._watcher = manager._watcher, self

    def close(self) -> None:
        with contextlib.suppress(ReferenceError):  # the manager has been freed
            if self.manager._watcher is self:
                self.manager._watcher, self.manager._copy_pages = self._before, self._copy
        super().close()

    def _copy_pages(self, source: np.ndarray, destination: np.ndarray) -> None:
        assert self._copy is not None
        self._copy(source, destination)
        self.copied(self.base, source, destination)

    def step(self, names: Sequence[Hashable], requests: Sequence[Request], new: Sequence[int], collection: Any) -> None:
        """Called when the manager has made the tables of a step, with the number of new tokens of each request."""
        ownership.after(self.ordinal)
        self._forget_rejected(requests)
        live = {id(r) for r in self.manager._requests.values()}
        self._ends = {key: found for key, found in self._ends.items() if key in live}
        self._ends |= {id(r): (r, r.processed + n) for r, n in zip(requests, new, strict=True) if not r.dummy}
        if collection is not None:
            self.declare(collection.lookup_table, names, requests)
            self.refresh()  # launching a captured graph does not refresh the records

    def _forget_rejected(self, requests: Sequence[Request]) -> None:
        """Mark tokens of the previous step that were not accepted as not written."""
        rejected = [(r, self._ends[id(r)][1]) for r in requests if id(r) in self._ends]
        rejected = [(r, end) for r, end in rejected if r.processed < end]
        if not rejected:
            return
        size = self.manager.page_size
        for n, memory in enumerate(self.written):
            memory.pull()
            view = self.slots(n)
            for r, end in rejected:
                for token in range(r.processed, min(end, len(r.pages) * size)):
                    if not self.manager._is_shared(r.pages[token // size]):
                        view[r.pages[token // size]][:, :, token % size] = 0
            memory.push()

    def _version(self) -> Any:
        return self.manager._pages.version

    def _state(self) -> tuple[np.ndarray, np.ndarray]:
        pool = self.manager._pages
        users = np.array([*pool.references, at.NOBODYS], np.int32)
        users[list(pool.hash_of)] += at.CACHED
        return np.array([*pool.generations, -1], np.int32), users

    def _expected(self, table: _Table, row: int) -> list[int]:
        request: Request = table.requests[row]
        if self.manager._requests.get(table.names[row]) is not request:
            return [at.RELEASED] * table.columns
        if request.dummy:
            return [at.ANY_PAGE] * table.columns
        return [at.NO_PAGE if page == self.manager.null_page else page for page in request.pages]

    def _owners(self, page: int) -> tuple[Hashable, ...]:
        return tuple(name for name, r in self.manager._requests.items() if page in r.pages and not r.dummy)


class _OfCollection(_Watched):
    """A pool without a manager: its lookup table at the start of watching defines the owners."""

    def __init__(self, collection: Any) -> None:
        spec = collection.cache_spec
        if spec.kind not in layout.KINDS:
            raise TypeError(f"a watched collection must be one of {', '.join(layout.KINDS)}, got {spec.kind}")
        count = collection.num_blocks
        views = [collection._views[n] for n in ("lookup_table", "cache_lengths")]
        table, lengths = (ownership.host_copy(v).astype(np.int64) for v in views)
        self.batch = table.shape[-2] if spec.paged else len(table)
        table = table.reshape(-1, table.shape[-1] if spec.paged else 1)
        lengths = np.pad(lengths, (0, self.batch - len(lengths)))
        lengths = np.tile(lengths, len(table) // self.batch if self.batch else 0)  # fa3: for each layer
        size = spec.page_size if spec.paged else collection.max_cache_length
        rooms = [cdiv(collection.max_cache_length, size) if spec.paged else 1] * len(table)
        has_null = spec.kind == layout.PAGED and not isinstance(collection, ForeignPages)
        self.null = count - 1 if has_null else -1
        if spec.paged and not has_null:  # no null page: entries past the step's tokens may be anything
            rooms = [min(cdiv(n + collection.max_seq_length, size), rooms[0]) for n in lengths.tolist()]
        self.rows = [
            [int(p) if 0 <= p < count and p != self.null else at.NO_PAGE for p in r[:room]]
            for r, room in zip(table, rooms, strict=True)
        ]
        super().__init__(spec, list(_ranges_of(collection)), collection.pools[0].data, count)
        self.declare(collection.lookup_table, [i % self.batch for i in range(len(self.rows))], self.rows)
        for row, length in zip(self.rows, lengths.tolist(), strict=True):
            for i, page in enumerate(row):
                if page >= 0 and length > i * size:
                    self.mark(page, slice(min(size, length - i * size)))

    def _version(self) -> Any:
        return 0

    def _state(self) -> tuple[np.ndarray, np.ndarray]:
        users = np.zeros(self.count, np.int32)
        for row in self.rows:
            users[[p for p in set(row) if p >= 0]] += 1
        if self.null >= 0:
            users[self.null] = at.NOBODYS
        return np.ones(self.count, np.int32), users

    def _expected(self, table: _Table, row: int) -> list[int]:
        return self.rows[row]

    def _owners(self, page: int) -> tuple[Hashable, ...]:
        found = [divmod(i, self.batch) for i, row in enumerate(self.rows) if page in row]
        of_layers = self.spec.kind == layout.FA3
        return tuple(f"sequence {b}" + (f" in layer {layer}" if of_layers else "") for layer, b in found)


# --- public functions -------------------------------------------------------------------------------


class Sanitizer:
    """The object that ``kv.sanitize`` yields: the watched pools, and methods that update their records."""

    def __init__(self, watched: Sequence[Any]) -> None:
        self._pools: list[_Watched] = []
        try:
            for one in watched:
                self.watch(one)
        except BaseException:
            self.close()
            raise

    def watch(self, pool: Any) -> None:
        """Watch a manager's pools, or a collection's: see :func:`sanitize`."""
        if isinstance(pool, HybridKVCacheManager):
            self._pools += [_OfManager(m) for m in pool.managers]
        elif isinstance(pool, PagedKVCacheManager):
            self._pools.append(_OfManager(pool))
        elif isinstance(pool, KVCacheCollection):
            self._pools.append(_OfCollection(pool))
        else:
            raise TypeError(f"kv.sanitize watches managers and collections, got {type(pool).__name__}")

    def check(self) -> None:
        """Wait for running kernels, and raise :class:`OwnershipError` for their violations."""
        for ordinal in dict.fromkeys(p.ordinal for p in self._pools):
            ownership.registry(ordinal).collect()
        found = [v for p in self._pools for v in p.violations]
        for pool in self._pools:
            pool.violations.clear()
        if found:
            raise OwnershipError(found)

    def written(self, pages: Any, pool: int = 0) -> None:
        """Mark pages as written by other means than kernels, e.g. a copy from another pool or another library."""
        self._pools[pool].mark(pages)

    def declare(self, lookup_table: Any, requests: Sequence[Hashable], pool: int = 0) -> None:
        """Declare that row b of the caller's lookup table belongs to request ``requests[b]`` of the manager."""
        found = self._pools[pool]
        if not isinstance(found, _OfManager):
            raise TypeError("requests need a manager: watching a collection declares its table")
        names, batch = found.manager._batch(requests)
        found.declare(lookup_table, names, batch)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        self._pools.clear()


@contextlib.contextmanager
def sanitize(*pools: Any) -> Iterator[Sanitizer]:
    """Check every access of the kernels launched inside against the owners of pages.

    Kernels and operations that this thread launches inside are compiled with ``check-kv-ownership``: each access
    through a cache is checked, when it runs, for the sequence's pages, the page's generation and users, whether the
    slot was written since the page was allocated, and, for a store, whether other requests see it. Attention's own
    loads, which go by address, are checked by a kernel that runs before it.

    Parameters
    ----------
    *pools : PagedKVCacheManager, HybridKVCacheManager or KVCacheCollection
        Managers, whose records define the owners from step to step; or a collection, whose current lookup table and
        lengths do: a page that two rows name is shared.

    Yields
    ------
    Sanitizer

    Raises
    ------
    OwnershipError
        At the launch on the host and in the emulator; on a GPU at the manager's next ``runtime_inputs``, at
        ``Sanitizer.check`` and at the end of the context.
    """
    with kvarn.pipeline(check=OWNERSHIP):
        found = Sanitizer(pools)
        try:
            yield found
            found.check()
        finally:
            found.close()


def watch(manager: PagedKVCacheManager) -> None:
    """Watch a manager for its lifetime, for ``KVARN_CHECK=ownership``."""
    weakref.finalize(manager, _OfManager(manager).close)


__all__ = ["OwnershipError", "Sanitizer", "Violation", "sanitize", "watch"]
