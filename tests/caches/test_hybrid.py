# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Managers of models with several kinds of layers: windows, chunks, pages of several sizes, shared layers and prefixes.

Memory is compared with plans made by hand for the shapes of known models; random lives with a simple model, in which
every slot holds a fingerprint of the prefix that its token ends.
"""

from __future__ import annotations

import os
import re
import zlib
from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.random_caches import random_values

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.paging.manager import InsufficientBlocksError

TINY = kv.KVCacheStaticParams(1, 1)
# Random steps of the last test; a million were run before a release.
STEPS = int(os.environ.get("KVARN_TEST_STEPS", "6000"))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def group(layers: Any, pages: int, page: int = 4, **options: Any) -> kv.LayerGroup:
    return kv.LayerGroup(layers, **{"params": TINY, "num_pages": pages, "page_size": page, "dtype": "i32", **options})


def serve(m: Any, name: Any, most: int | None = None) -> Any:
    """A step of one request; its inputs."""
    m.alloc(name, most)
    inputs = m.runtime_inputs([name])
    m.step([name])
    m.check()
    return inputs


# --- pages behind a window -------------------------------------------------------------------------


def test_pages_behind_a_window_are_given_back_and_their_entries_name_the_null_page():
    m = kv.PagedKVCacheManager(params=TINY, num_layers=1, num_pages=4, page_size=4, dtype="i32", window=6)
    m.claim("a", list(range(100)))
    for done in range(2, 100, 2):
        inputs = serve(m, "a", 2)
        behind = max(0, done - 6 + 1) // 4  # the next query stands at ``done`` and sees ``done - 5`` on
        pages = m.pages("a")
        assert [p == m.null_page for p in pages] == [i < behind for i in range(cdiv(done, 4))]
        assert m.num_free_pages == 4 - (len(pages) - behind)
        seen_before = max(0, done - 2 - 6 + 1) // 4
        table = inputs.lookup_table[0]
        assert (table[:seen_before] == m.null_page).all()
        assert (table[seen_before : cdiv(done, 4)] != m.null_page).all()
    m.release("a")
    m.check()
    assert m.num_free_pages == 4


@pytest.mark.parametrize("position", range(0, 30))
def test_a_chunk_ends_where_the_next_begins(position):
    m = kv.PagedKVCacheManager(params=TINY, num_layers=1, num_pages=9, page_size=2, dtype="i32", chunk=6)
    m.claim("a", list(range(position + 1)))
    if position:
        for _ in range(position):
            serve(m, "a", 1)
    assert sum(p != m.null_page for p in m.pages("a")) == cdiv(position, 2) - position // 6 * 6 // 2


@pytest.mark.parametrize("reach", [{"window": 7}, {"window": 1}, {"chunk": 8}, {"chunk": 5}])
def test_attention_over_what_is_left_is_attention_over_everything(reach):
    """A decode and a chunked prefill on a pool that is too small for the sequence, poison in every page given out."""
    rng, page, total = np.random.default_rng(1), 4, 45
    m = kv.PagedKVCacheManager(
        params=kv.KVCacheStaticParams(1, 16), num_layers=1, num_pages=5, page_size=page, dtype="f32", **reach
    )
    m.blocks[...] = np.nan
    keys, values, query = (random_values(rng, (total, 1, 16), dtypes.f32) for _ in range(3))
    span = {"window": reach["window"]} if "window" in reach else {"mask": "chunked_causal", "chunk": reach["chunk"]}
    m.claim("a", list(range(total)))
    found, owned = [], set()
    while m.active("a"):
        m.alloc("a", 1 if m.processed("a") % 3 else 4)
        for p in set(m.pages("a")) - owned - {m.null_page}:
            m.blocks[p] = np.nan  # what it held before is none of this request's business
        owned = set(m.pages("a"))
        inputs = m.runtime_inputs(["a"])
        start, new = m.processed("a"), int(inputs.row_offsets[1])
        rows = slice(start, start + new)
        kv.ops.append(inputs.collection, 0, keys[rows], values[rows], inputs.row_offsets)
        found.append(kv.ops.attention(inputs.collection, 0, query[rows], inputs.row_offsets, **span))
        m.step(["a"])
    mask = "sliding_window" if "window" in reach else "chunked_causal"
    seen = reference.visible(mask, np.arange(total), np.arange(total), next(iter(reach.values())))
    scores = np.where(seen, query[:, 0] @ keys[:, 0].T / 4, -np.inf).astype(np.float64)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    wanted = weights @ values[:, 0] / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(np.concatenate(found)[:, 0], wanted, rtol=1e-4, atol=1e-5)


def test_a_sequence_may_be_longer_than_its_windows_pool():
    m = kv.PagedKVCacheManager(params=TINY, num_layers=1, num_pages=3, page_size=4, dtype="i32", window=5)
    m.claim("a", [1] * 400)
    for _ in range(100):
        serve(m, "a", 4)
    m.claim("b", [1] * 13)
    with pytest.raises(InsufficientBlocksError, match="needs 4 more pages"):
        m.alloc("b")


def test_a_fork_shares_what_is_left_of_a_window():
    m = kv.PagedKVCacheManager(params=TINY, num_layers=1, num_pages=8, page_size=4, dtype="i32", window=6)
    m.claim("a", list(range(30)))
    for _ in range(15):
        serve(m, "a", 2)
    m.fork("a", "b")
    m.check()
    assert m.pages("b") == m.pages("a")
    for name in "ab":
        m.extend(name, [5, 6, 7])
        serve(m, name)
    assert m.pages("a")[-2] != m.pages("b")[-2]  # both wrote to it
    m.release("a")
    m.release("b")
    m.check()
    assert m.num_free_pages == 8


# --- prefixes --------------------------------------------------------------------------------------


def test_a_windows_prefix_is_a_hit_when_what_is_seen_of_it_is_cached():
    m = kv.PagedKVCacheManager(
        params=TINY, num_layers=1, num_pages=6, page_size=4, dtype="i32", window=6, prefix_caching=True
    )
    prompt = list(range(41))
    m.claim("a", prompt)
    for _ in range(10):
        serve(m, "a", 4)  # ten pages, of which all but the last are evicted by later ones or given back
    m.claim("b", prompt)
    assert m.alloc("b") == 40
    assert [p == m.null_page for p in m.pages("b")[:10]] == [True] * 8 + [False] * 2  # 35 to 39 are seen
    m.check()
    m.claim("c", [*prompt[:12], 99, 98])  # the first pages are gone
    assert m.alloc("c", 4) == 0


def test_a_prefix_is_reused_as_far_as_every_group_has_it():
    """The full group keeps the whole prefix, the window's pool only its end: so no shorter prefix is a hit."""
    m = kv.HybridKVCacheManager(
        [group([0, 2], 30, 4), group([1, 3], 6, 2, window=5)], prefix_caching=True
    )  # the second evicts
    prompt = list(range(33))
    m.claim("a", prompt)
    while m.active("a") > 1:
        serve(m, "a", min(4, m.active("a") - 1))
    m.claim("b", prompt)
    assert m.alloc("b") == 32
    m.check()
    m.release("b")
    m.claim("c", [*prompt[:17], 70, 71])
    assert m.managers[0]._longest_hit(m.managers[0]._get("c"), 18)[0] == 16  # the full group alone would have it
    assert m.alloc("c", 4) == 0
    m.check()


def test_hits_end_at_whole_pages_of_every_group():
    m = kv.HybridKVCacheManager([group([0], 30, 4), group([1], 30, 6)], prefix_caching=True)
    m.claim("a", list(range(40)))
    serve(m, "a")
    m.claim("b", [*range(31), 90])
    assert m.alloc("b") == 24  # 28 and 30 are each one group's, 24 is both's
    m.check()


# --- several groups --------------------------------------------------------------------------------


def test_every_layer_finds_its_pool_and_shared_layers_that_of_another():
    m = kv.HybridKVCacheManager(
        [group([0, 1, 3], 8, 4, window=4), group([2, 5], 8, 8, params=kv.KVCacheStaticParams(2, 8))],
        shared_layers={4: 2, 6: 3},
    )
    m.claim("a", [1, 2, 3])
    inputs = serve(m, "a")
    for layer, (which, local) in {0: (0, 0), 3: (0, 2), 2: (1, 0), 5: (1, 1), 4: (1, 0), 6: (0, 2)}.items():
        collection, index = inputs.of_layer(layer)
        assert collection is inputs.groups[which].collection
        assert index == local
    assert inputs.of_layer(4)[0].head_size == 8
    with pytest.raises(IndexError, match="layer must be one of the groups"):
        inputs.of_layer(7)


def test_a_group_without_room_leaves_all_groups_as_they_were():
    m = kv.HybridKVCacheManager([group([0], 20), group([1], 2, window=4)])
    m.claim("a", [1] * 4)
    serve(m, "a")
    m.extend("a", [1] * 30)
    before = [m.pages("a", g) for g in range(2)], m.num_free_pages, m.processed("a")
    with pytest.raises(InsufficientBlocksError, match=re.escape("group 1: request 'a' needs")) as raised:
        m.alloc("a")
    assert raised.value.needed > raised.value.free
    assert ([m.pages("a", g) for g in range(2)], m.num_free_pages, m.processed("a")) == before
    m.check()
    while m.active("a"):
        serve(m, "a", 1)


def test_what_does_not_fit_is_refused_by_name():
    cases = [
        (lambda: kv.HybridKVCacheManager([]), "groups must have a group of layers"),
        (lambda: kv.HybridKVCacheManager([group([0, 1], 4), group([1], 4)]), "layer 1 must be in one group"),
        (lambda: kv.HybridKVCacheManager([group([0], 4)], shared_layers={0: 0}), "shared layer 0 must be in no group"),
        (lambda: kv.HybridKVCacheManager([group([0], 4)], shared_layers={1: 2}), "and read one that is, got 2"),
        (lambda: group([], 4), "a group must have a layer"),
        (lambda: kv.HybridKVCacheManager([group([0], 4, window=0)]), "window must be positive, got 0"),
        (lambda: kv.HybridKVCacheManager([group([0], 4, window=2, chunk=2)]), "have a window or chunks, got 2 and 2"),
        (lambda: kv.HybridKVCacheManager([kv.LayerGroup([0, 1], np.zeros((3, 2, 1, 4, 1, 8), np.float32))]),
         "blocks must have the group's 2 layers, got 1"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


# --- memory as planned by hand ---------------------------------------------------------------------

# (layers, KV heads, head size, page size, window, chunk) of each group, and bytes of an element.
MODELS: dict[str, list[tuple[int, int, int, int, int | None, int | None]]] = {
    # 62 layers: five with a window of 1024 to each full one.
    "Gemma 3 27B": [(52, 16, 128, 16, 1024, None), (10, 16, 128, 16, None, None)],
    # 36 layers, every other one with a window of 128.
    "gpt-oss 120B": [(18, 8, 64, 16, 128, None), (18, 8, 64, 64, None, None)],
    # 48 layers: three in chunks of 8192 to each full one.
    "Llama 4 Scout": [(36, 8, 128, 32, None, 8192), (12, 8, 128, 32, None, None)],
}
CONTEXTS = [20_000, 700, 8_192, 8_193, 3_000, 1]


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_what_is_planned_by_hand(name):
    """After prompts in chunks of 2048 and some steps: pages of what the next query sees, and no more."""
    groups, planned = MODELS[name], []
    steps = 3
    for _, _, _, page, window, chunk in groups:
        used = 0
        for context in CONTEXTS:
            position = context + steps  # where the next query stands
            first = 0 if window is None else max(0, position - (window - 1))
            first = first if chunk is None else position - position % chunk
            used += cdiv(position, page) - first // page
        planned.append(used)
    most = [sum(cdiv(c + steps, g[3]) for c in CONTEXTS) for g in groups]
    m = kv.HybridKVCacheManager([
        kv.LayerGroup(range(100 * i, 100 * i + 1), params=TINY, num_pages=most[i], page_size=page, dtype="i8",
                      **({"window": window} if window else {"chunk": chunk} if chunk else {}))
        for i, (_, _, _, page, window, chunk) in enumerate(groups)
    ])  # fmt: skip
    for b, context in enumerate(CONTEXTS):
        m.claim(b, context)
        while m.active(b):
            m.alloc(b, 2048)
            m.step([b])
    for _ in range(steps):
        for b in range(len(CONTEXTS)):
            m.extend(b, 1)
            m.alloc(b)
        m.runtime_inputs(range(len(CONTEXTS)))
        m.step(range(len(CONTEXTS)))
    m.check()
    used = [n - free for n, free in zip(most, m.num_free_pages, strict=True)]
    assert used == planned

    def bytes_of(pages):
        return sum(n * layers * 2 * heads * size * page * 2
                   for n, (layers, heads, size, page, _, _) in zip(pages, groups, strict=True))  # fmt: skip

    saved = 1 - bytes_of(used) / bytes_of(most)
    assert saved > {"Gemma 3 27B": 0.7, "gpt-oss 120B": 0.45, "Llama 4 Scout": 0.3}[name]
    for b in range(len(CONTEXTS)):
        m.release(b)
    m.check()
    assert m.num_free_pages == tuple(most)


# --- random lives ----------------------------------------------------------------------------------


def fingerprint(tokens: list[int], end: int) -> int:
    return zlib.crc32(np.array(tokens[: end + 1], np.int64).tobytes()) & 0x7FFFFFFF


class Lives:
    """Requests on three small pools, and what is known of them: their tokens, and how many are processed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.reach = [{}, {"window": int(self.rng.integers(1, 12))}, {"chunk": int(self.rng.integers(1, 12))}]
        self.pages = [int(self.rng.integers(6, 16)) for _ in range(3)]
        self.page = [4, 2, 3]
        self.m = kv.HybridKVCacheManager(
            [group([i], self.pages[i], self.page[i], **self.reach[i]) for i in range(3)],
            prefix_caching=bool(self.rng.integers(2)),
        )
        self.truth: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}
        self.names = 0
        self.counts = dict.fromkeys(("steps", "hits", "full", "forks", "given back"), 0)

    def tokens(self, most: int) -> list[int]:
        return self.rng.integers(0, 2, int(self.rng.integers(1, most + 1))).tolist()

    def claim(self) -> None:
        self.names += 1
        start = [1] * int(self.rng.integers(0, 12))
        self.truth[self.names], self.done[self.names] = [*start, *self.tokens(3)], 0
        self.m.claim(self.names, self.truth[self.names])

    def visible(self, g: int, position: int) -> range:
        """Tokens that a query at a position sees, its own not counted."""
        first = max(0, position - self.reach[g]["window"] + 1) if "window" in self.reach[g] else 0
        if "chunk" in self.reach[g]:
            first = position - position % self.reach[g]["chunk"]
        return range(first, position)

    def step(self, name: int) -> None:
        """Some tokens of a request: what they see is its own prefix, and what they write is seen."""
        waiting = len(self.truth[name]) - self.done[name]
        most = int(self.rng.integers(1, 6))
        free = self.m.num_free_pages
        try:
            saved = self.m.alloc(name, most)
        except InsufficientBlocksError:
            saved = -1
        if saved < 0:
            assert self.m.num_free_pages == free
            self.counts["full"] += 1
            self.m.release(name)
            del self.truth[name], self.done[name]
            return
        self.counts["hits"] += saved > 0
        self.done[name] += saved
        new = min(most, waiting - saved)
        inputs = self.m.runtime_inputs([name])
        assert int(inputs.cache_lengths[0]) == self.done[name]
        assert int(inputs.row_offsets[1]) == new
        tokens = self.truth[name]
        for g in range(3):
            blocks, table, page = self.m.managers[g].blocks, inputs.groups[g].lookup_table[0], self.page[g]
            seen = self.visible(g, self.done[name])
            for t in seen:
                assert blocks[table[t // page], 0, 0, t % page, 0, 0] == fingerprint(tokens, t), (g, t)
            for t in range(self.done[name], self.done[name] + new):
                assert table[t // page] != self.m.managers[g].null_page
                blocks[table[t // page], 0, 0, t % page, 0, 0] = fingerprint(tokens, t)
        self.m.step([name])
        self.done[name] += new
        for g in range(3):  # nothing that is not seen is held
            held = [i for i, p in enumerate(self.m.pages(name, g)) if p != self.m.managers[g].null_page]
            first = self.visible(g, self.done[name]).start // self.page[g]
            assert not held or held[0] >= first
            self.counts["given back"] += first

    def once(self) -> None:
        self.counts["steps"] += 1
        what = self.rng.random()
        if not self.truth or (what < 0.08 and len(self.truth) < 5):
            self.claim()
            return
        name = int(self.rng.choice(list(self.truth)))
        if what < 0.12:
            self.m.release(name)
            del self.truth[name], self.done[name]
        elif what < 0.16 and len(self.truth) < 5:
            self.names += 1
            self.m.fork(name, self.names)
            self.truth[self.names], self.done[self.names] = list(self.truth[name]), self.done[name]
            self.counts["forks"] += 1
        elif len(self.truth[name]) - self.done[name] < 1 or what < 0.3:
            more = self.tokens(4)
            self.m.extend(name, more)
            self.truth[name] += more
        else:
            self.step(name)

    def end(self) -> None:
        """Every page comes back."""
        for name in list(self.truth):
            self.m.release(name)
        self.m.check()
        assert self.m.num_free_pages == tuple(self.pages)


def test_no_page_is_lost_in_random_lives():
    """Against a simple model: what a query sees is the prefix of its own request, in every group."""
    counts: dict[str, int] = {}
    for seed in range(max(1, STEPS // 1000)):
        lives = Lives(seed)
        for i in range(1000):
            lives.once()
            if i % 10 == 0:
                lives.m.check()
        lives.end()
        counts = {n: counts.get(n, 0) + c for n, c in lives.counts.items()}
    assert all(counts.values()), counts  # every kind of life was led


def test_iterators_reach_every_group_as_they_do_a_single_pool():
    m = kv.HybridKVCacheManager((group(layers, 20) for layers in ([0], [1])), prefix_caching=True)
    m.claim("r", iter([1, 2, 3]))
    m.claim("s", [1])
    m.extend("r", (n for n in (4, 5)))
    m.extend("r", np.int64(2))
    m.realise("r", iter([6, 7]))
    assert {g.tokens("r") for g in m.managers} == {(1, 2, 3, 4, 5, 6, 7)}
    for name in "rs":
        m.alloc(name)
    made = m.runtime_inputs(iter(["r", "s"]))
    assert [g.lookup_table.shape[0] for g in made.groups] == [2, 2]
    m.step(iter(["r", "s"]), {"r": 7})
    assert m.processed("r") == 7
    m.check()


def test_groups_are_layer_groups():
    for groups in (["x"], [[0]], [group([0], 4), None]):
        with pytest.raises(TypeError, match=r"groups must be kv\.LayerGroup objects, got a \w+ as group \d"):
            kv.HybridKVCacheManager(groups)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["single", "hybrid"])
@pytest.mark.parametrize(
    ("requests", "accepted", "message"),
    [
        (["a", "b"], {"b": 9}, "accepted tokens of request 'b' must be at most 3, got 9"),
        (["a", "b", "c"], None, "'c' must be claimed first"),
        (["a", "b", "a"], None, "differ from one another"),
    ],
)
def test_a_step_that_is_refused_leaves_every_request_as_it_was(kind, requests, accepted, message):
    single = kv.PagedKVCacheManager(params=TINY, num_layers=1, num_pages=20, page_size=4, dtype="i32", window=2)
    m: Any = single if kind == "single" else kv.HybridKVCacheManager([group([0], 20), group([1], 20, window=2)])
    for name in "ab":
        m.claim(name, [1, 2, 3])
        m.alloc(name, num_draft=5)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            m.step(requests, accepted)
        assert [(m.processed(name), m.active(name)) for name in "ab"] == [(0, 3)] * 2
        m.check()
    m.step(["a", "b"], {"b": 2})
    assert [m.processed(name) for name in "ab"] == [3, 2]
    m.check()
