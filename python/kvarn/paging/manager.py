# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A manager of the pages of a paged cache's pool.

:class:`PagedKVCacheManager` allocates pages to requests, builds the lookup tables of a step, shares pages between
requests with equal prefixes (prefix caching) or between forks, and frees pages. It runs on the host and handles page
*numbers* only; the pool may be on any device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

import kvarn
from kvarn.caches import KVCacheStaticParams, PagedKVCacheCollection
from kvarn.caches.checks import count, positive
from kvarn.caches.pools import pool_of
from kvarn.dialect import layout
from kvarn.dialect.layout import PAGED, cdiv
from kvarn.dialect.records import NAMED, Record
from kvarn.env import OWNERSHIP, env
from kvarn.paging.drafts import CommitsDrafts
from kvarn.paging.page_pool import (
    NO_HIT,
    AttentionSpan,
    Hit,
    InsufficientBlocksError,
    PagePool,
    Plan,
    Request,
    as_bytes,
    broken_rules,
    chain,
    chain_root,
    copy_on_host,
    new_pool,
    token_list,
)
from kvarn.paging.step_inputs import RuntimeInputs, upper_bound
from kvarn.runtime.copying import NoShallowCopies, needs_copies


class PagedKVCacheManager(CommitsDrafts, NoShallowCopies):
    """Manages the pages of one pool (one replica). Not thread-safe.

    The life cycle of a request::

        manager.claim(r, prompt_tokens)
        while not finished:
            manager.alloc(r)                              # pages for unprocessed tokens; reuses cached prefixes
            inputs = manager.runtime_inputs([r, ...])     # tables of this step
            ...                                           # run the model: inputs.collection, inputs.row_offsets
            manager.extend(r, [next_token])
            manager.step([r, ...])                        # the step's tokens are now in the pages
        manager.release(r)

    Parameters
    ----------
    blocks : array-like [N + 1, 2, L, P, H, D], optional
        The pool (extent 1 in dimension 1: MLA), on any device, with N usable pages. Page N is the *null page*, which is
        never allocated and pads the lookup tables. By default a zeroed NumPy pool is allocated from ``params`` to
        ``dtype``.
    params : KVCacheStaticParams, optional
    num_layers : int, optional
    num_pages : int, optional
        N: usable pages; one more is allocated.
    page_size : int
        Tokens per page, P.
    dtype : DType, an argument of ``dtypes.of``, or Record or its name, such as ``"int4"``
        What a token and head stores.
    scales : array-like [N + 1, 2, L, P, H, G], optional
        With ``blocks``: its quantization scales. With blocks of 4-bit elements, ``dtype`` is their record.
    scale_dtype : DType, optional
        Without ``blocks``: quantize, with scales of this type.
    quantization_granularity : int
        Elements of a head that share a scale; it must divide D.
    max_batch_size : int, optional
        Largest number of requests per step.
    prefix_caching : bool
        Share full pages between requests with equal prefixes, also after their release.
    window, chunk : int, optional
        The attention span of the layers: a sliding window of keys, or chunks of positions. Pages that no later query
        sees are freed after a step, and the tables then have the null page for them; a prefix is reused if the pages
        that its last token sees are cached.
    salt : str or bytes
        Requests of managers or claims with different salts never share pages (tenants, adapters, model versions).
    copy_pages : callable, optional
        ``copy_pages(source, destination)``, with int32 arrays [n] of page numbers, copies whole pages, all layers,
        before any later launch on the pool. Required for forks; the default for a NumPy pool copies in place.
    upload : callable, optional
        ``upload(array)`` copies a NumPy array to the pool's device. It is called for the lookup table, the lengths and
        the row offsets of each step. These arrays are never written again, so it may copy asynchronously, and into
        buffers that a captured graph reads. The default, for a pool on the host, returns the array itself.
    table_dtype : numpy dtype
        uint32 or int32, of tables, lengths and offsets.

    Raises
    ------
    ValueError, TypeError
        If the parameters do not match, or the pool is not one that a collection accepts.
    """

    def __init__(
        self,
        blocks: Any = None,
        *,
        params: KVCacheStaticParams | None = None,
        num_layers: int | None = None,
        num_pages: int | None = None,
        page_size: int = 128,
        dtype: Any = "bf16",
        scales: Any = None,
        scale_dtype: Any = None,
        quantization_granularity: int = 1,
        max_batch_size: int | None = None,
        prefix_caching: bool = False,
        window: int | None = None,
        chunk: int | None = None,
        salt: str | bytes = b"",
        copy_pages: Callable[[np.ndarray, np.ndarray], Any] | None = None,
        upload: Callable[[np.ndarray], Any] | None = None,
        table_dtype: Any = np.uint32,
    ) -> None:
        if blocks is None:
            granularity = quantization_granularity
            blocks, own = new_pool(params, num_layers, num_pages, page_size, dtype, scale_dtype, granularity)
            scales = scales if own is None else own
        elif params is not None or num_layers is not None or num_pages is not None or scale_dtype is not None:
            raise ValueError("params, num_layers, num_pages and scale_dtype are given by blocks")
        record = dtype if isinstance(dtype, Record) or dtype in NAMED else None
        spec, views, at = pool_of(PAGED, "N2LPHD", blocks, scales, quantization_granularity, record=record)
        if spec.quantized and spec.head_size % spec.granularity:
            raise ValueError(
                f"quantization_granularity must divide the head size {spec.head_size}, got {spec.granularity}"
            )
        if at["num_blocks"] < 2:
            raise ValueError(f"blocks must have a page besides the null page, got {at['num_blocks']} in all")
        if not any(_is_dtype(table_dtype, d) for d in (np.uint32, np.int32)):
            raise TypeError(f"table_dtype must be uint32 or int32, got {table_dtype!r}")
        if max_batch_size is not None:
            positive(max_batch_size, "max_batch_size")
        self.span = AttentionSpan(window, chunk)
        on_numpy = all(isinstance(v.owner, np.ndarray) for v in views.values())
        self.blocks, self.scales, self.cache_spec = blocks, scales, spec
        self.page_size, self.num_layers = spec.page_size, at["num_layers"]
        self.total_num_pages = self.null_page = at["num_blocks"] - 1
        self.max_batch_size, self.prefix_caching = max_batch_size, prefix_caching
        self.table_dtype = np.dtype(table_dtype)
        self._salt = as_bytes(salt)
        self._copy_pages = copy_pages or (partial(copy_on_host, blocks, scales) if on_numpy else None)
        self._upload = upload or (_as_it_is if views["blocks"].on_host else None)
        self._bound = [n for n, f in (("copy_pages", copy_pages), ("upload", upload)) if f is not None]
        self._owners = [view.owner for view in views.values()]
        self._pages = PagePool(self.total_num_pages)
        self._requests: dict[Hashable, Request] = {}
        self._watcher: Any = None  # the record of kv.sanitize
        if env.check == OWNERSHIP:
            kvarn.ownership.watch(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        what = type(self).__name__
        if self._bound or self._watcher is not None:
            by = " and ".join(self._bound) or "kv.sanitize"
            raise TypeError(
                f"{what} has no copies and cannot be pickled while {by} is bound to its memory: make another manager "
                "over a pool of its own, and claim the requests there"
            )
        for owner in self._owners:
            needs_copies(owner, what)
        return super().__reduce_ex__(protocol)

    # --- queries ---

    @property
    def num_free_pages(self) -> int:
        """Pages without users; some may still be cached."""
        return len(self._pages.free)

    @property
    def num_cached_pages(self) -> int:
        """Pages, used or free, whose content is identified by its tokens."""
        return len(self._pages.page_of)

    def __contains__(self, request: Hashable) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def pages(self, request: Hashable) -> tuple[int, ...]:
        """Page numbers of a request, in the order of its tokens; the null page for pages before the window."""
        return tuple(self._get(request).pages)

    def processed(self, request: Hashable) -> int:
        """Tokens of a request that are in its pages."""
        return self._get(request).processed

    def active(self, request: Hashable) -> int:
        """Tokens of a request that are still to be processed."""
        found = self._get(request)
        return len(found.tokens) - found.processed

    def tokens(self, request: Hashable) -> tuple[int | None, ...]:
        """Tokens of a request; None for tokens that are not known yet."""
        return tuple(self._get(request).tokens)

    # --- life cycle of a request ---

    def claim(
        self, request: Hashable, tokens: Iterable[int] | int = (), *, salt: str | bytes = b"", dummy: bool = False
    ) -> None:
        """Register a request.

        Parameters
        ----------
        request : hashable
            Its name.
        tokens : sequence of int, or int
            The prompt; an int stands for that many unknown tokens (which are never shared).
        salt : str or bytes
            Appended to the manager's.
        dummy : bool
            A request that pads a batch: it has the null page and one token per step, and never grows.

        Raises
        ------
        ValueError
            If the request is already claimed.
        """
        if request in self._requests:
            raise ValueError(f"request {request!r} must not be claimed twice; release it first")
        root = chain_root(self._salt, as_bytes(salt))
        found = token_list(tokens)
        if dummy:
            if found or isinstance(tokens, (int, np.integer)):
                raise ValueError("a dummy request takes no tokens")
            self._requests[request] = Request([None], root, [self.null_page], dummy=True)
            return
        self._requests[request] = Request(found, root)

    def extend(self, request: Hashable, tokens: Iterable[int] | int) -> None:
        """Append tokens to a request; an int stands for that many tokens that are not known yet."""
        found = self._get(request)
        if not found.dummy:
            found.tokens.extend(token_list(tokens))

    def realise(self, request: Hashable, tokens: Iterable[int]) -> None:
        """Set the first tokens that are not known yet.

        Raises
        ------
        ValueError
            If fewer tokens are unknown.
        """
        found, tokens = self._get(request), list(tokens)
        unknown = [i for i, token in enumerate(found.tokens) if token is None]
        if len(tokens) > len(unknown):
            raise ValueError(
                f"tokens must be at most the {len(unknown)} that request {request!r} awaits, got {len(tokens)}"
            )
        for i, token in zip(unknown, token_list(tokens), strict=False):
            found.tokens[i] = token

    def alloc(self, request: Hashable, max_new: int | None = None, *, num_draft: int = 0) -> int:
        """Allocate the pages of a request's next step.

        It takes cached pages with the tokens that the request would process next (always leaving one token to process),
        copies shared pages that the step would write, and adds free pages.

        Parameters
        ----------
        request : hashable
        max_new : int, optional
            Largest number of tokens to process in the step (chunked prefill); default all.
        num_draft : int
            Additional speculative tokens that need slots.

        Returns
        -------
        int
            Tokens taken from cached pages: ``processed`` has grown by this number.

        Raises
        ------
        InsufficientBlocksError
            If the request would not fit in the whole pool, or too few pages are free. Nothing has changed in that case.
        ValueError
            If the request is not claimed or has nothing to process.
        """
        found = self._get(request)
        if found.dummy:
            found.planned = 1
            return 0
        self._check_alloc(request, found, max_new, num_draft)
        plan = self._plan(request, found, max_new, num_draft, self._longest_hit(found, len(found.tokens) - 1))
        self._own_copies(found, plan.copied)
        return self._carry_out(found, plan)

    def _check_alloc(self, request: Hashable, found: Request, max_new: int | None, num_draft: int) -> None:
        if max_new is not None:
            positive(max_new, "max_new")
        count(num_draft, "num_draft")
        if found.processed >= len(found.tokens):
            raise ValueError(f"request {request!r} has no token to process; extend it first")

    def runtime_inputs(
        self,
        requests: Iterable[Hashable],
        *,
        num_draft: int = 0,
        max_prompt_length: int | None = None,
        max_cache_length: int | None = None,
    ) -> RuntimeInputs:
        """The tables of a step, for requests that were allocated for it.

        Parameters
        ----------
        requests : iterable of hashable
            In the order of the batch.
        num_draft : int
            Additional speculative tokens that each request processes.
        max_prompt_length, max_cache_length : int, optional
            Upper bounds in place of the actual maxima, so that a captured graph is valid for later steps.

        Raises
        ------
        ValueError
            If a request is not claimed, repeated, or not allocated for the step; the batch exceeds ``max_batch_size``;
            a bound is below the actual maximum, or beyond the pool.
        """
        names, batch = self._batch(requests)
        if self.max_batch_size is not None and len(batch) > self.max_batch_size:
            raise ValueError(
                f"a step must have at most max_batch_size = {self.max_batch_size} requests, got {len(batch)}"
            )
        count(num_draft, "num_draft")
        for name, request in zip(names, batch, strict=True):
            self._check_ready(name, request, num_draft)
        lengths = [request.processed for request in batch]
        new = [request.planned + (0 if request.dummy else num_draft) for request in batch]
        longest_new = upper_bound(max(new, default=0), max_prompt_length, "max_prompt_length")
        totals = [c + n for c, n in zip(lengths, new, strict=True)]
        longest = upper_bound(max(totals, default=0), max_cache_length, "max_cache_length")
        if not self.span.limited and cdiv(longest, self.page_size) > self.total_num_pages:
            raise ValueError(
                f"max_cache_length must fit the pool's {self.total_num_pages * self.page_size} tokens, got {longest}"
            )
        columns = layout.lookup_columns(longest, self.page_size)
        table = np.full((len(batch), columns), self.null_page, self.table_dtype)
        for row, request, total in zip(table, batch, totals, strict=True):
            used = request.pages[: cdiv(total, self.page_size)]
            row[: len(used)] = used
        cache_lengths, offsets = np.array(lengths, self.table_dtype), np.zeros(len(batch) + 1, self.table_dtype)
        np.cumsum(new, out=offsets[1:])
        collection = uploaded = None
        if self._upload is not None:
            collection = PagedKVCacheCollection(
                self.blocks, self._upload(cache_lengths), self._upload(table), longest_new, longest, self.scales,
                self.cache_spec.granularity, record=self.cache_spec.record if self.cache_spec.packed else None,
            )  # fmt: skip
            uploaded = self._upload(offsets)
        if self._watcher is not None:
            self._watcher.step(names, batch, new, collection)
        inputs = table, cache_lengths, offsets, longest_new, longest, self.null_page, collection, uploaded
        return RuntimeInputs(*inputs, None if self.span.limited else self.cache_spec, self._upload)

    def step(self, requests: Iterable[Hashable], accepted: Mapping[Hashable, int] | None = None) -> None:
        """Mark the step's tokens as stored: the step has run, or runs before any later use of the pool.

        With prefix caching, pages that are full of known tokens become shared; if another page already caches the same
        content, the request takes that page and frees its own.

        Parameters
        ----------
        requests : iterable of hashable
            The requests of the step.
        accepted : mapping, optional
            Number of stored tokens of a request, if it differs from what ``alloc`` planned: fewer tokens, or additional
            accepted drafts (which must have been added with ``extend``).

        Raises
        ------
        ValueError
            If a request is not claimed, or more tokens are accepted than it has.
        """
        names, batch = self._batch(requests)
        for request, done in zip(batch, self._accepted(names, batch, accepted), strict=True):
            request.planned = 0
            if not request.dummy:
                request.processed += done
                if self.prefix_caching:
                    self._commit(request)
                self._give_back(request)

    def _accepted(self, names: list[Hashable], batch: list[Request], accepted: Any) -> list[int]:
        """Number of stored tokens of a step, per request."""
        counts = []
        for name, request in zip(names, batch, strict=True):
            done = request.planned if accepted is None or name not in accepted else count(accepted[name], "accepted")
            room = min(len(request.tokens), len(request.pages) * self.page_size) - request.processed
            if not request.dummy and done > room:
                raise ValueError(f"accepted tokens of request {name!r} must be at most {room}, got {done}")
            counts.append(done)
        return counts

    def fork(self, request: Hashable, child: Hashable) -> None:
        """Register a request that continues another one from its current state, with the same tokens and pages.

        Both read the shared pages; the first to write to one gets a copy from ``alloc``.

        Raises
        ------
        ValueError
            If ``request`` is not claimed, ``child`` is, or the last page is partly filled and there is no
            ``copy_pages``.
        """
        found = self._get(request)
        if child in self._requests:
            raise ValueError(f"request {child!r} must not be claimed twice; release it first")
        if found.dummy:
            raise ValueError(f"request {request!r} is a dummy, which cannot be forked")
        if found.processed % self.page_size and self._copy_pages is None:
            raise ValueError(
                "forking a request whose last page is partly filled needs copy_pages: pass it to the manager, such as "
                "lambda s, d: kv.ops.copy_pages(collection, upload(s), upload(d))"
            )
        pages = found.pages[: cdiv(found.processed, self.page_size)]
        for page in pages[found.given_back :]:
            self._pages.share(page)
        self._requests[child] = Request(
            list(found.tokens), found.root, pages, found.processed, hashes=list(found.hashes),
            given_back=found.given_back,
        )  # fmt: skip

    def release(self, request: Hashable) -> None:
        """Remove a request and free its pages. Its last pages are evicted first.

        Raises
        ------
        ValueError
            If the request is not claimed.
        """
        found = self._get(request)
        del self._requests[request]
        if not found.dummy:
            for page in reversed(found.pages[found.given_back :]):
                self._pages.drop(page)

    # --- internal ---

    def _get(self, request: Hashable) -> Request:
        try:
            return self._requests[request]
        except KeyError:
            raise ValueError(f"request {request!r} must be claimed first") from None

    def _batch(self, requests: Iterable[Hashable]) -> tuple[list[Hashable], list[Request]]:
        names = list(requests)
        if len(set(names)) != len(names):
            raise ValueError(f"requests must differ from one another, got {names}")
        return names, [self._get(name) for name in names]

    def _is_shared(self, page: int) -> bool:
        """Whether a write to a page would affect another request, or the cache."""
        return self._pages.references[page] > 1 or page in self._pages.hash_of

    def _check_ready(self, name: Hashable, request: Request, num_draft: int) -> None:
        if request.dummy:
            request.planned = 1
            return
        if not request.planned:
            raise ValueError(f"request {name!r} must be allocated for the step: call alloc before runtime_inputs")
        end = request.processed + request.planned + num_draft
        if len(request.pages) * self.page_size < end:
            raise ValueError(
                f"request {name!r} must have pages for {end} tokens, got {len(request.pages)} of {self.page_size}; "
                f"call alloc with num_draft = {num_draft}"
            )
        if any(
            self._is_shared(p) for p in request.pages[request.processed // self.page_size : cdiv(end, self.page_size)]
        ):
            raise ValueError(f"request {name!r} shares a page that the step writes: call alloc again after a fork")

    def _digests(self, request: Request, limit: int) -> Iterable[bytes]:
        """Hashes of the request's full pages after its committed ones, up to ``limit`` known tokens."""
        return chain(
            request.hashes[-1] if request.hashes else request.root,
            request.tokens[len(request.hashes) * self.page_size : limit],
            self.page_size,
        )

    def _longest_hit(self, request: Request, most: int) -> Hit:
        """The cached pages with which a request can continue, up to token ``most``; no tokens if none are cached.

        With a window only the pages that the next query sees must be cached. A request needs a token to process, for
        logits to sample from: callers pass a ``most`` that leaves one.
        """
        if not self.prefix_caching or most <= request.processed:
            return NO_HIT
        digests = list(self._digests(request, most))
        pages = [self._pages.page_of.get(digest) for digest in digests]
        first = len(request.hashes)
        if not self.span.limited:
            del pages[next((i for i, page in enumerate(pages) if page is None), len(pages)) :]
        while pages:
            tokens = (first + len(pages)) * self.page_size
            if tokens <= request.processed:
                break
            needed = max(self.span.first_visible(tokens) // self.page_size - first, 0)
            missing = next((i for i in range(len(pages) - 1, needed - 1, -1) if pages[i] is None), None)
            if missing is None:  # visible committed pages are always present: only pages before the window are freed
                return Hit(tokens, [None] * min(needed, len(pages)) + pages[needed:], digests[: len(pages)])
            del pages[missing:]
        return NO_HIT

    def _plan(self, name: Hashable, found: Request, max_new: int | None, num_draft: int, hit: Hit) -> Plan:
        """The plan of a request's next step; InsufficientBlocksError if pages are missing."""
        tokens, hits, digests = hit
        kept = len(found.hashes) if hits else len(found.pages)
        processed = tokens if hits else found.processed
        new = min(len(found.tokens) - processed, sys.maxsize if max_new is None else max_new)
        wanted = cdiv(processed + new + num_draft, self.page_size)
        behind = self.span.first_visible(processed) // self.page_size
        references = self._pages.references
        # After a hit the step starts on a fresh page. Otherwise it may start in a page that a fork or the cache shares.
        copied = (
            [] if hits else [i for i in range(processed // self.page_size, kept) if self._is_shared(found.pages[i])]
        )
        fresh = max(0, wanted - kept - len(hits))
        needed, wanted_hits = fresh + len(copied), [page for page in hits if page is not None]
        # A page of the request itself may be a hit, if the other side of a fork filled it: it stays in use.
        dropped = [*found.pages[found.given_back : min(behind, kept)], *found.pages[max(kept, found.given_back) :]]
        released = sum(references[page] == 1 for page in dropped if page not in wanted_hits)
        available = len(self._pages.free) + released - sum(references[page] == 0 for page in wanted_hits)
        if wanted - behind > self.total_num_pages or needed > available:
            raise InsufficientBlocksError(
                f"request {name!r} needs {needed} more pages for {processed + new + num_draft} tokens "
                f"({wanted - behind} pages of {self.page_size}), but {available} of {self.total_num_pages} are free; "
                f"release requests, or allocate a larger pool",
                needed,
                available,
            )
        return Plan(hits, digests, kept, copied, fresh, processed, new)

    def _carry_out(self, found: Request, plan: Plan) -> int:
        """Apply a plan, except its copies; the number of tokens taken from cached pages."""
        for page in plan.hits:
            if page is not None:
                self._pages.share(page)
        for page in reversed(found.pages[max(plan.kept, found.given_back) :]):
            self._pages.drop(page)
        del found.pages[plan.kept :]
        found.pages += [self.null_page if page is None else page for page in plan.hits]
        found.hashes += plan.digests
        saved, found.processed, found.planned = plan.processed - found.processed, plan.processed, plan.new
        if plan.hits:
            found.given_back = min(found.given_back, plan.kept)
            self._give_back(found)
        found.pages += [self._pages.take() for _ in range(plan.fresh)]
        return saved

    def _give_back(self, request: Request) -> None:
        """Free the pages that no later query of the request sees."""
        behind = min(self.span.first_visible(request.processed) // self.page_size, len(request.pages))
        for i in range(request.given_back, behind):
            if request.pages[i] != self.null_page:
                self._pages.drop(request.pages[i])
                request.pages[i] = self.null_page
        request.given_back = max(request.given_back, behind)

    def _own_copies(self, request: Request, indices: list[int]) -> None:
        """Replace shared pages by copies that only the request uses."""
        if not indices:
            return
        source = [request.pages[i] for i in indices]
        copies = [self._pages.take() for _ in indices]
        try:
            assert self._copy_pages is not None, "fork checks for it"
            self._copy_pages(np.array(source, np.int32), np.array(copies, np.int32))
        except BaseException:
            for page in copies:
                self._pages.drop(page)
            raise
        for i, page in zip(indices, copies, strict=True):
            self._pages.drop(request.pages[i])
            request.pages[i] = page

    def _commit(self, request: Request) -> None:
        for digest in self._digests(request, min(request.processed, len(request.tokens))):
            index = len(request.hashes)
            own, cached = request.pages[index], self._pages.page_of.get(digest)
            if own == self.null_page:  # freed before its tokens were known
                pass
            elif cached is None:
                self._pages.commit(own, digest)
            elif cached != own:
                self._pages.share(cached)
                request.pages[index] = cached
                self._pages.drop(own)
            request.hashes.append(digest)

    def check(self) -> None:
        """Verify that the records are consistent; for tests and debugging.

        Raises
        ------
        RuntimeError
            With the violated rules.
        """
        for rule in broken_rules(self._pages, self._requests.values(), self.null_page):
            raise RuntimeError(rule)


def _is_dtype(given: Any, wanted: type[np.generic]) -> bool:
    try:
        return given is not None and np.dtype(given) == np.dtype(wanted)
    except TypeError:  # not a dtype of NumPy
        return False


def _as_it_is(array: np.ndarray) -> np.ndarray:
    """The default upload, for a pool on the host."""
    return array
