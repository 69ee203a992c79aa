# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random lives of many requests on a small pool, with a simulated model that reads and writes the pages.

Each slot is given a fingerprint of the whole prefix that its token ends. Whatever the manager shares, copies, evicts
and hands out again, every request must find the fingerprints of its own tokens.
"""

import copy
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarn.caches import KVCacheStaticParams
from kvarn.manager import InsufficientBlocksError, PagedKVCacheManager

PAGE = 4


def fingerprint(salt, tokens):
    return zlib.crc32(salt.encode() + np.array(tokens, np.int64).tobytes()) & 0x7FFFFFFF


class Lives(RuleBasedStateMachine):
    """``truth`` holds the real tokens of each request, which the manager is told late or never."""

    @initialize(pages=st.integers(3, 9), prefix_caching=st.booleans())
    def start(self, pages, prefix_caching):
        self.m = PagedKVCacheManager(
            params=KVCacheStaticParams(1, 4), num_layers=1, num_pages=pages, page_size=PAGE, dtype="i32",
            prefix_caching=prefix_caching,
        )  # fmt: skip
        self.truth, self.planned, self.salts, self.names = {}, set(), {}, 0

    def pick(self, data, names=None):
        return data.draw(st.sampled_from(sorted(self.truth if names is None else names)))

    def new_name(self):
        self.names += 1
        return self.names

    @precondition(lambda self: len(self.truth) < 5)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        known=st.booleans(),
        salt=st.sampled_from(["", "x"]),
    )
    def claim(self, tokens, known, salt):
        name = self.new_name()
        self.m.claim(name, tokens if known else len(tokens), salt=salt)
        self.truth[name], self.salts[name] = tokens, salt

    @precondition(lambda self: self.truth)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), known=st.booleans())
    def extend(self, data, tokens, known):
        name = self.pick(data)
        self.m.extend(name, tokens if known else len(tokens))
        self.truth[name] = self.truth[name] + tokens

    @precondition(lambda self: self.truth)
    @rule(data=st.data(), most=st.integers(0, 4))
    def realise(self, data, most):
        name = self.pick(data)
        unknown = [i for i, t in enumerate(self.m.tokens(name)) if t is None][:most]
        self.m.realise(name, [self.truth[name][i] for i in unknown])
        known = [t for t in self.m.tokens(name) if t is not None]
        assert len(known) <= len(self.truth[name])

    @precondition(lambda self: any(self.m.active(name) for name in self.truth))
    @rule(data=st.data(), limit=st.none() | st.integers(1, 6), drafts=st.integers(0, 2))
    def alloc(self, data, limit, drafts):
        name = self.pick(data, [n for n in self.truth if self.m.active(n)])
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
        assert self.m.processed(name) == processed + saved
        assert saved == 0 or self.m.prefix_caching
        assert self.m.active(name) >= 1, "a request must keep a token to process"
        if saved:
            assert (processed + saved) % PAGE == 0
            assert waiting - saved == self.m.active(name)

    def snapshot(self):
        return copy.deepcopy((self.m._requests, vars(self.m._pages)))

    @precondition(lambda self: self.planned)
    @rule(data=st.data())
    def run(self, data):
        batch = sorted(data.draw(st.sets(st.sampled_from(sorted(self.planned)), min_size=1)))
        if self.planned_shares_a_page(batch):
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

    def planned_shares_a_page(self, batch):
        """Whether a request was forked between its alloc and its step, in the middle of a page."""
        for name in batch:
            done = self.m.processed(name)
            page = self.m.pages(name)[done // PAGE]
            others = [n for n in self.truth if n != name and page in self.m.pages(n)]
            if others or page in self.m._pages.hash_of:
                assert done % PAGE, "only a partly filled page can be shared for writing"
                return True
        return False

    @precondition(lambda self: self.truth and len(self.truth) < 6)
    @rule(data=st.data())
    def fork(self, data):
        name, child = self.pick(data), self.new_name()
        self.m.fork(name, child)
        self.truth[child], self.salts[child] = list(self.truth[name]), self.salts[name]
        assert self.m.processed(child) == self.m.processed(name)

    @precondition(lambda self: self.truth)
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
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLives = Lives.TestCase
