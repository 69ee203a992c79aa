# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Page numbers of a pool: reference counts, content hashes, and the eviction order.

The content of a page is identified by a hash of its tokens chained to the hash of the previous page, so one hash
identifies a whole prefix.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvarn.caches import KVCacheStaticParams
from kvarn.caches.checks import count, positive
from kvarn.dialect import records
from kvarn.dialect.records import Record


def new_pool(
    params: KVCacheStaticParams | None, num_layers: int | None, num_pages: int | None, page_size: int, dtype: Any,
    scale_dtype: Any, granularity: int,
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    """A zeroed pool of ``num_pages`` pages and the null page, and its scales, if any."""
    if params is None or num_layers is None or num_pages is None:
        raise ValueError("a manager needs blocks, or params, num_layers and num_pages to allocate them")
    if not isinstance(params, KVCacheStaticParams):
        raise TypeError(f"params must be KVCacheStaticParams, got {type(params).__name__}")
    num_pages, num_layers = positive(num_pages, "num_pages"), positive(num_layers, "num_layers")
    page_size, granularity = positive(page_size, "page_size"), positive(granularity, "quantization_granularity")
    outer = (num_pages + 1, 1 if params.is_mla else 2, num_layers, page_size, params.num_heads)
    record = records.named(dtype) if scale_dtype is None else Record(dtype, scale_dtype, granularity)
    stored, columns = record.row_shape(params.head_size)
    blocks = np.zeros((*outer, columns), stored.numpy)
    of_scales = record.scales_shape(params.head_size)
    return blocks, None if of_scales is None else np.zeros((*outer, of_scales[1]), of_scales[0].numpy)


class InsufficientBlocksError(RuntimeError):
    """The pool has too few free pages. The manager has not changed: release requests and try again.

    Attributes
    ----------
    needed, free : int
        Numbers of pages.
    """

    def __init__(self, message: str, needed: int, free: int) -> None:
        super().__init__(message)
        self.needed, self.free = needed, free


@dataclass(frozen=True)
class AttentionSpan:
    """The attention span of a pool's layers: which earlier keys a query sees.

    Attributes
    ----------
    window : int or None
        A query sees the last ``window`` keys, including its own.
    chunk : int or None
        A query sees the keys of its chunk of ``chunk`` positions.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            span = getattr(self, name)
            if span is not None:
                positive(span, name)
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"layers have a window or chunks, got {self.window} and {self.chunk}")

    @property
    def limited(self) -> bool:
        return self.window is not None or self.chunk is not None

    def first_visible(self, position: int) -> int:
        """The first token that a query at this position or later may see."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk


class Hit(NamedTuple):
    """Cached pages with which a request can continue after its committed ones."""

    tokens: int  # processed tokens after the hit
    pages: list[int | None]  # None: before the window, and so not needed
    digests: list[bytes]


NO_HIT = Hit(0, [], [])


class Plan(NamedTuple):
    """The plan of an allocation, before it is applied."""

    hits: list[int | None]  # cached pages to continue with; None: before the window, and so not needed
    digests: list[bytes]  # the hashes of ``hits``
    kept: int  # pages of the request that stay
    copied: list[int]  # indices among the kept pages of shared ones that the step writes
    fresh: int  # number of pages to take
    processed: int
    new: int


@dataclass
class Request:
    """The manager's record of a request. A page before the window is the null page."""

    tokens: list[int | None]  # None: not known yet
    root: bytes
    pages: list[int] = field(default_factory=list)
    processed: int = 0  # tokens whose keys and values are in the pages
    planned: int = 0  # tokens of the next step
    hashes: list[bytes] = field(default_factory=list)  # of the committed pages, a prefix of ``pages``
    dummy: bool = False
    given_back: int = 0  # number of freed leading pages, before the window


class PagePool:
    """Page numbers of a pool: their reference counts and content hashes, and the free pages in eviction order.

    A page can be both free and cached: its content is valid until the page is allocated again.
    """

    def __init__(self, total: int) -> None:
        self.references = [0] * total
        self.generations = [0] * total  # how often each page was allocated
        self.version = 0  # incremented by every change
        self.hash_of: dict[int, bytes] = {}
        self.page_of: dict[bytes, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))

    def take(self) -> int:
        """Allocate the next free page in eviction order; its cached content is dropped."""
        page, _ = self.free.popitem(last=False)
        self.forget(page)
        self.references[page] = 1
        self.generations[page] += 1
        self.version += 1
        return page

    def share(self, page: int) -> None:
        """Add a user of a page, which is then not free."""
        if self.references[page] == 0:
            del self.free[page]
        self.references[page] += 1
        self.version += 1

    def drop(self, page: int) -> None:
        """Remove a user of a page. A free page with cached content is evicted last, one without content first."""
        self.references[page] -= 1
        self.version += 1
        if self.references[page] == 0:
            self.free[page] = None
            if page not in self.hash_of:
                self.free.move_to_end(page, last=False)

    def commit(self, page: int, digest: bytes) -> None:
        self.hash_of[page], self.page_of[digest] = digest, page
        self.version += 1

    def forget(self, page: int) -> None:
        digest = self.hash_of.pop(page, None)
        if digest is not None:
            del self.page_of[digest]
            self.version += 1


def chain_root(*salts: bytes) -> bytes:
    """The root of the hash chain: zeros without salt."""
    if not any(salts):
        return bytes(32)
    # Lengths are hashed too, so that ("ab", "c") and ("a", "bc") differ.
    return hashlib.sha256(b"".join(b"%d:" % len(salt) + salt for salt in salts)).digest()


def chain(digest: bytes, tokens: Sequence[int | None], page_size: int) -> Iterator[bytes]:
    """Hashes of the full pages of ``tokens`` that follow a page with hash ``digest``, up to the first unknown token."""
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = tokens[start : start + page_size]
        if None in page:
            return
        packed = array.array("q", page)  # type: ignore[arg-type]
        if sys.byteorder == "big":
            packed.byteswap()
        digest = hashlib.sha256(digest + packed.tobytes()).digest()
        yield digest


def copy_on_host(blocks: np.ndarray, scales: np.ndarray | None, source: np.ndarray, destination: np.ndarray) -> None:
    """Copy pages, int32 [n], of a NumPy pool."""
    blocks[destination] = blocks[source]
    if scales is not None:
        scales[destination] = scales[source]


def as_bytes(salt: str | bytes) -> bytes:
    if not isinstance(salt, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"salt must be a str or bytes, got {type(salt).__name__}")
    return salt.encode() if isinstance(salt, str) else bytes(salt)


def token_list(tokens: Iterable[int] | int) -> list[int | None]:
    if isinstance(tokens, (int, np.integer)):
        return [None] * count(tokens, "tokens")
    listed = [int(token) for token in tokens]
    if any(not -(2**63) <= token < 2**63 for token in listed):
        raise ValueError("tokens must fit 64 bits")
    return list(listed)


def broken_rules(pool: PagePool, requests: Iterable[Request], null_page: int) -> list[str]:
    """The violated rules of a pool's records and its requests; empty if they are consistent."""
    held = [[page for page in r.pages if page != null_page] for r in requests if not r.dummy]
    used: dict[int, int] = {}
    for pages in held:
        for page in pages:
            used[page] = used.get(page, 0) + 1
    total = len(pool.references)
    rules = {
        "a page's references must be the requests that hold it": pool.references
        == [used.get(page, 0) for page in range(total)],
        "a page must be free or used": set(pool.free) == set(range(total)) - set(used),
        "cached pages and hashes must name one another": {h: p for p, h in pool.hash_of.items()} == pool.page_of,
        "a request must hold a page once": all(len(set(pages)) == len(pages) for pages in held),
        "committed pages must be a cached prefix": all(
            page == null_page or pool.hash_of.get(page) == digest
            for r in requests
            for page, digest in zip(r.pages, r.hashes, strict=False)
        ),
        "what is given back must be the null page, and nothing else": all(
            r.dummy or [page == null_page for page in r.pages] == [i < r.given_back for i in range(len(r.pages))]
            for r in requests
        ),
    }
    return [rule for rule, holds in rules.items() if not holds]
