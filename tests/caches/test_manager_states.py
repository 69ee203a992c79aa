# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random lives of many requests on a small pool, with a simulated model that reads and writes the pages.

Each slot is given a fingerprint of the whole prefix that its token ends. Whatever the manager shares, copies, evicts
and hands out again, every request must find the fingerprints of its own tokens.
"""

import copy
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from reference.edges import ALL

from kvarn.caches import KVCacheStaticParams
from kvarn.paging.manager import InsufficientBlocksError, PagedKVCacheManager

PAGE = 4
# Few prompts, all alike for a while: requests must meet in the cache.
PROMPTS = st.builds(lambda n, tail: [1] * n + tail, st.integers(1, 14), st.lists(st.integers(0, 1), max_size=2))
MOSTLY = st.sampled_from([True, True, True, False])


def fingerprint(salt, tokens):
    return zlib.crc32(salt.encode() + np.array(tokens, np.int64).tobytes()) & 0x7FFFFFFF


class Lives(RuleBasedStateMachine):
    """``truth`` holds the real tokens of each request, which the manager is told late or never."""

    @initialize(
        pages=st.integers(3, 12),
        prefix_caching=st.sampled_from([True, True, False]),
        first=st.lists(PROMPTS, min_size=2, max_size=3),
    )
    def start(self, pages, prefix_caching, first):
        self.m = PagedKVCacheManager(
            params=KVCacheStaticParams(1, 4), num_layers=1, num_pages=pages, page_size=PAGE, dtype="i32",
            prefix_caching=prefix_caching,
        )  # fmt: skip
        self.truth, self.planned, self.salts, self.names = {}, set(), {}, 0
        for tokens in first:
            self.claim(tokens, True, "")

    def pick(self, data):
        if not self.truth:
            self.claim([1] * 9, True, "")
        return data.draw(st.sampled_from(sorted(self.truth)))

    def new_name(self):
        self.names += 1
        return self.names

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        known=st.booleans(),
        salt=st.sampled_from(["", "x"]),
    )
    def claim(self, tokens, known, salt):
        name = self.new_name()
        self.m.claim(name, tokens if known else len(tokens), salt=salt)
        self.truth[name], self.salts[name] = tokens, salt

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), known=MOSTLY)
    def extend(self, data, tokens, known):
        name = self.pick(data)
        self.m.extend(name, tokens if known else len(tokens))
        self.truth[name] = self.truth[name] + tokens

    @rule(data=st.data(), most=st.integers(0, 4))
    def realise(self, data, most):
        name = self.pick(data)
        unknown = [i for i, t in enumerate(self.m.tokens(name)) if t is None][:most]
        self.m.realise(name, [self.truth[name][i] for i in unknown])
        known = [t for t in self.m.tokens(name) if t is not None]
        assert len(known) <= len(self.truth[name])

    @rule(data=st.data(), limit=st.none() | st.integers(1, 6), drafts=st.integers(0, 2))
    def alloc(self, data, limit, drafts):
        self.try_alloc(self.pick(data), limit, drafts)

    def try_alloc(self, name, limit=None, drafts=0):
        if not self.m.active(name):
            return
        before = self.snapshot()
        processed, waiting = self.m.processed(name), self.m.active(name)
        failure = None
        try:
            saved = self.m.alloc(name, limit, num_draft=drafts)
        except InsufficientBlocksError as error:
            failure = error
        if failure is not None:
            assert failure.needed > failure.free or len(self.truth[name]) + drafts > PAGE * self.m.total_num_pages
            assert self.snapshot() == before, "a failed alloc must change nothing"
            return
        self.planned.add(name)
        assert not self.shares_a_page(name), "what the step writes must be the request's own"
        assert saved >= 0
        assert self.m.processed(name) == processed + saved
        assert saved == 0 or self.m.prefix_caching
        assert self.m.active(name) >= 1, "a request must keep a token to process"
        if saved:
            assert (processed + saved) % PAGE == 0
            assert waiting - saved == self.m.active(name)

    def snapshot(self):
        return copy.deepcopy((self.m._requests, vars(self.m._pages)))

    @rule(data=st.data())
    def run(self, data):
        if self.planned:
            self.run_batch(sorted(data.draw(st.sets(st.sampled_from(sorted(self.planned)), min_size=1))))

    @rule(data=st.data(), then=st.lists(st.integers(0, 1), max_size=2))
    def serve(self, data, then):
        """A whole step of one request, as most are."""
        name = self.pick(data)
        self.try_alloc(name)
        if name in self.planned:
            self.run_batch([name])
        self.m.extend(name, then)
        self.truth[name] = self.truth[name] + then

    @rule(data=st.data(), end=MOSTLY)
    def branch(self, data, end):
        """A fork whose sides go on differently; the first may end before the second goes on."""
        if len(self.truth) > 5:
            return
        name, child = self.pick(data), self.new_name()
        self.m.fork(name, child)
        self.truth[child], self.salts[child] = list(self.truth[name]), self.salts[name]
        for side, token in ((name, 0), (child, 1)):
            self.m.extend(side, [token] * 4)
            self.truth[side] = self.truth[side] + [token] * 4
        self.try_alloc(name)
        if name in self.planned:
            self.run_batch([name])
        if end:
            self.m.release(name)
            del self.truth[name], self.salts[name]
            self.planned.discard(name)
        self.try_alloc(child)

    @rule()
    def serve_all(self):
        for name in sorted(self.truth):
            self.try_alloc(name)
        if self.planned:
            self.run_batch(sorted(self.planned))

    def run_batch(self, batch):
        if any(self.shares_a_page(name) for name in batch):
            with pytest.raises(ValueError, match="call alloc again after a fork"):
                self.m.runtime_inputs(batch)
            self.planned -= set(batch)
            return
        inputs = self.m.runtime_inputs(batch)
        assert (np.diff(inputs.row_offsets.astype(int)) >= 1).all()
        cache = inputs.collection.get_key_cache(0)
        for row, name in enumerate(batch):
            start, tokens = int(inputs.cache_lengths[row]), self.truth[name]
            new = int(inputs.row_offsets[row + 1] - inputs.row_offsets[row])
            for t in range(start):
                assert (cache.load(row, 0, t, 0, width=4) == fingerprint(self.salts[name], tokens[: t + 1])).all()
            for t in range(start, start + new):
                page = int(inputs.lookup_table[row, t // PAGE])
                holders = [n for n in self.truth if page in self.m.pages(n)]
                assert page != self.m.null_page
                assert holders == [name], "a written page must belong to one request"
                value = fingerprint(self.salts[name], tokens[: t + 1])
                cache.store(row, 0, t, 0, np.full(4, value, np.int32), oob="trap")
        self.m.step(batch)
        self.planned -= set(batch)

    def shares_a_page(self, name):
        """Whether the next token's page is read by others: a fork since alloc, in the middle of a page."""
        done = self.m.processed(name)
        page = self.m.pages(name)[done // PAGE]
        shared = page in self.m._pages.hash_of or any(page in self.m.pages(n) for n in self.truth if n != name)
        assert done % PAGE or not shared, "only a partly filled page can be shared for writing"
        return shared

    @rule(data=st.data())
    def fork(self, data):
        if len(self.truth) > 5:
            return
        name, child = self.pick(data), self.new_name()
        self.m.fork(name, child)
        self.truth[child], self.salts[child] = list(self.truth[name]), self.salts[name]
        assert self.m.processed(child) == self.m.processed(name)

    @rule(data=st.data())
    def release(self, data):
        name = self.pick(data)
        self.m.release(name)
        del self.truth[name], self.salts[name]
        self.planned.discard(name)

    @invariant()
    def every_request_finds_its_own_tokens(self):
        if not hasattr(self, "m"):
            return
        for name, tokens in self.truth.items():
            pages = self.m.pages(name)
            for t in range(self.m.processed(name)):
                value = fingerprint(self.salts[name], tokens[: t + 1])
                assert (self.m.blocks[pages[t // PAGE], 0, 0, t % PAGE] == value).all()

    @invariant()
    def records_agree(self):
        if hasattr(self, "m"):
            self.m.check()
            assert (self.m.blocks[self.m.null_page] == 0).all()
            used = {page for name in self.truth for page in self.m.pages(name)}
            assert self.m.num_free_pages + len(used) == self.m.total_num_pages
            assert self.m.prefix_caching or self.m.num_cached_pages == 0


Lives.TestCase.settings = settings(
    max_examples=250 if ALL else 80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLives = Lives.TestCase
