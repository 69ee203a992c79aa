# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.sanitize finds every access to a page that is not the sequence's, or to what was never written, and no other."""

from __future__ import annotations

import contextlib
import gc
import random
from pathlib import Path

import numpy as np
import pytest
from reference import ownership as reference
from reference.ownership import D, H, P, Step, emulated, line_of, read, reads, reported, vectors, write
from reference.random_caches import random_problem

import kvarn as kv
from kvarn.env import env
from kvarn.runtime import ownership
from kvarn.runtime.binding import HOST
from kvarn.sanitizer.ownership import OwnershipError


@pytest.fixture(params=["host", "sm_90a"])
def anywhere(request):
    """Launches run on the host, or in the emulator."""
    with emulated() if request.param != "host" else contextlib.nullcontext():
        yield


# --- planted faults --------------------------------------------------------------------------------


def test_a_report_names_the_line_the_sequence_the_page_and_its_owner(anywhere):
    s = Step()
    with kv.sanitize(s.m):
        s.begin("a", 3)
        s.begin("b", 6)
        cache, _ = s.inputs("a", "b")
        page = s.m.pages("b")[1]
        with reported("unwritten", sequence=1, request="b", token=5, page=page, slot=1, owners=("b",)):
            reads(cache, 1, 5)
        with pytest.raises(OwnershipError) as found:
            reads(cache, 1, 5)
        line = line_of("out[kv.thread_id.x] = cache.load")
        assert f"{Path(reference.__file__).name}:{line}:" in str(found.value)
        assert (
            f"kv.load of kernel read: reads token 5 of sequence 1 (request 'b'), 2 heads, in page {page}, slot 1, "
            f"which was not written since the page was allocated (page {page} belongs to 'b')"
        ) in str(found.value)
        assert {v.head for v in found.value.violations} == {0, 1}


def test_reading_past_what_was_written_is_found_and_reading_it_is_not(anywhere):
    s = Step()
    with kv.sanitize(s.m):
        s.begin("a", 6)
        s.fill("a")
        s.more("a")
        cache, inputs = s.inputs("a")
        for t in range(6):
            reads(cache, 0, t)
        with reported("unwritten", token=6):
            reads(cache, 0, 6)
        with reported("unwritten", token=3):  # keys of the layer, which nobody wrote
            reads(inputs.collection.get_key_cache(1), 0, 3)
        with reported("beyond", expected_page=None):  # of the table's padding
            reads(cache, 0, 8)
        with reported("beyond"):
            write[H, D](cache, 0, 8)


def test_pages_that_were_handed_out_again_are_found_in_a_step_of_before(anywhere):
    s = Step(num_pages=2)
    with kv.sanitize(s.m):
        s.begin("old", 5)
        stale = s.fill("old")
        s.m.release("old")
        with reported("released", "page 0 belongs to no request", request="old"):
            reads(stale, 0, 2)
        s.begin("new", 5)
        s.fill("new")
        with reported("released", "page 0 belongs to 'new'", request="old", generation=2):
            reads(stale, 0, 2)
        with reported("released"):
            write[H, D](stale, 0, 4)
        s.more("new")
        reads(s.inputs("new")[0], 0, 4)


def test_contents_of_a_pages_last_owner_are_unwritten_for_the_next():
    s = Step(num_pages=1)
    with kv.sanitize(s.m):
        s.begin("old", 4)
        s.fill("old")
        s.m.release("old")
        s.begin("new", 4)
        with reported("unwritten", request="new", generation=2):
            reads(s.inputs("new")[0], 0, 0)


def test_a_table_with_rows_in_the_wrong_order_is_found():
    s = Step()
    with kv.sanitize(s.m):
        s.begin("a", 4)
        s.begin("b", 4)
        s.fill("a", "b")
        for name in "ab":
            s.more(name)
        cache, inputs = s.inputs("a", "b")
        pages = s.m.pages("a")[0], s.m.pages("b")[0]
        inputs.lookup_table[:] = inputs.lookup_table[::-1].copy()
        with reported("foreign", "belongs to 'b'", sequence=0, request="a", page=pages[1], expected_page=pages[0]):
            reads(cache, 0, 0)
        with reported("foreign", request="b", owners=("a",)):
            write[H, D](cache, 1, 4)


def test_a_page_that_was_looked_up_for_another_sequence_is_found():
    @kv.kernel
    def wrong(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
        page = cache.page(0, 0)
        out[0] = cache.load(1, 0, 0, 0, page=page)

    s = Step()
    with kv.sanitize(s.m):
        s.begin("a", 4)
        s.begin("b", 4)
        cache, _ = s.inputs("a", "b")
        for b in range(2):
            write[H, D](cache, b, 0)
        with reported("foreign", request="b", owners=("a",)):
            wrong[1, 1](cache, np.zeros(1, np.float32))


@pytest.mark.parametrize("disabled", [[], ["check-kv-access"]])
def test_entries_outside_of_the_pool_and_the_batch_are_found_as_such(anywhere, disabled):
    """Also where KVARN_CHECK's own checks end the kernel."""
    s = Step()
    with kv.sanitize(s.m), kv.pipeline(disable=disabled):
        s.begin("a", 4)
        cache, inputs = s.inputs("a")
        reach = inputs.lookup_table.shape[1] * s.m.page_size
        for entry in (999_999, s.m.total_num_pages + 1, 2**32 - 1):
            inputs.lookup_table[0, 0] = entry
            with reported("outside", page=int(np.uint32(entry).astype(np.int32))):
                write[H, D](cache, 0, 0)
        for batch, token in ((1, 0), (-1, 0), (2**31 - 1, 0), (0, reach), (0, 2**31 - 1), (0, -1)):
            with reported("outside", sequence=batch, token=token):
                reads(cache, batch, token)


def test_a_store_to_a_page_that_a_fork_shares_is_found_and_to_its_copy_is_not(anywhere):
    s = Step()
    with kv.sanitize(s.m):
        s.begin("a", 6)
        old = s.fill("a")
        s.m.fork("a", "child")
        with reported("shared", "'a' and 'child'", token=5):
            write[H, D](old, 0, 5)
        reads(old, 0, 5)
        s.more("child")
        cache, _ = s.inputs("child")
        write[H, D](cache, 0, 6)
        reads(cache, 0, 5)  # which the copy brought
        with reported("shared", token=0):
            write[H, D](cache, 0, 0)


def test_a_fork_whose_page_was_not_copied_is_found():
    s = Step(copy_pages=lambda source, destination: None)
    with kv.sanitize(s.m) as sanitizer:
        s.begin("a", 6)
        s.fill("a")
        s.m.fork("a", "child")
        s.m.extend("child", [1])
        watched = sanitizer._pools[0]
        s.m._copy_pages = watched._copy  # forgets to tell, as it forgets to copy
        s.m.alloc("child")
        with reported("unwritten", token=5, request="child"):
            reads(s.inputs("child")[0], 0, 5)


def test_a_prefix_that_others_may_reuse_is_not_to_be_written():
    s = Step(prefix_caching=True)
    with kv.sanitize(s.m):
        s.begin("a", list(range(6)))
        cache = s.fill("a")
        write[H, D](cache, 0, 4)
        with reported("shared", "cached as a prefix", token=3):
            write[H, D](cache, 0, 3)
        s.m.release("a")
        s.begin("b", list(range(6)))
        assert s.m.processed("b") == P
        cache, _ = s.inputs("b")
        for t in range(P):
            reads(cache, 0, t)  # written by the request before
        with reported("unwritten", token=4):
            reads(cache, 0, 4)


def test_a_page_given_up_for_an_equal_one_is_found_in_a_step_of_before():
    s = Step(prefix_caching=True)
    with kv.sanitize(s.m):
        for name in ("a", "b"):
            s.begin(name, list(range(5)))
        caches = s.fill("a", "b")
        assert s.m.pages("a")[0] == s.m.pages("b")[0]
        with reported("foreign", request="b", owners=()):
            reads(caches, 1, 0)


def test_pages_behind_a_window_are_found():
    s = Step(window=P)
    with kv.sanitize(s.m):
        s.begin("a", 10)
        cache = s.fill("a")
        with reported("beyond", "before its window", token=0):
            reads(cache, 0, 0)
        reads(cache, 0, 9)


def test_pages_that_nobody_has_are_found_through_a_table_that_nobody_declared():
    s = Step()
    with kv.sanitize(s.m) as sanitizer:
        s.begin("a", 4)
        s.fill("a")
        s.more("a")
        _, inputs = s.inputs("a")
        table = inputs.lookup_table.copy()
        table[0, 2] = 7
        own = kv.PagedKVCacheCollection(s.m.blocks, inputs.cache_lengths, table, 1, 12).get_value_cache(1)
        reads(own, 0, 0)
        with reported("free", page=7, request=None):
            reads(own, 0, 8)
        sanitizer.declare(table, ["a"])
        with reported("beyond", page=7, request="a"):
            reads(own, 0, 8)


def test_scales_have_a_record_of_their_own():
    m = kv.PagedKVCacheManager(
        params=kv.KVCacheStaticParams(H, D), num_layers=1, num_pages=4, page_size=P, dtype="f8e4m3", scale_dtype="f32",
        quantization_granularity=8,
    )  # fmt: skip

    @kv.kernel
    def store(cache: kv.KVCache, scale: kv.i32):
        if scale > 0:
            cache.store_scale(0, 0, 0, 0, 1.0)
        else:
            cache.store(0, 0, 0, 0, kv.f8e4m3(1.0))

    with kv.sanitize(m):
        m.claim("a", 2)
        m.alloc("a")
        keys, values = (getattr(m.runtime_inputs(["a"]).collection, f"get_{x}_cache")(0) for x in ("key", "value"))
        store[1, 1](values, 0)
        store[1, 1](keys, 1)
        with reported("unwritten", verb="reads the scales of", head=0):
            read[1, D](values, 0, 0, np.zeros(D, np.float32))
        with reported("unwritten", verb="reads", head=0):
            read[1, D](keys, 0, 0, np.zeros(D, np.float32))
        store[1, 1](values, 1)
        read[1, D](values, 0, 0, np.zeros(D, np.float32))


def test_drafts_that_were_not_accepted_are_unwritten():
    s = Step()
    with kv.sanitize(s.m):
        s.begin("a", 3)
        s.m.extend("a", 2)
        s.m.alloc("a", 3, num_draft=2)
        cache = s.m.runtime_inputs(["a"], num_draft=2).collection.get_value_cache(1)
        for t in range(5):
            write[H, D](cache, 0, t)
        reads(cache, 0, 4)
        s.m.step(["a"], {"a": 4})
        s.m.alloc("a")
        cache, _ = s.inputs("a")
        reads(cache, 0, 3)
        with reported("unwritten", token=4):
            reads(cache, 0, 4)


def test_groups_of_a_hybrid_manager_are_watched_each():
    groups = [
        kv.LayerGroup([0], params=kv.KVCacheStaticParams(H, D), num_pages=8, page_size=P, dtype="f32", window=P),
        kv.LayerGroup([1], params=kv.KVCacheStaticParams(H, D), num_pages=8, page_size=P, dtype="f32"),
    ]
    m = kv.HybridKVCacheManager(groups)
    with kv.sanitize(m):
        m.claim("a", 10)
        m.alloc("a")
        step = m.runtime_inputs(["a"])
        caches = [c.get_key_cache(i) for c, i in map(step.of_layer, (0, 1))]
        for cache in caches:
            for t in range(10):
                write[H, D](cache, 0, t)
        m.step(["a"])
        reads(caches[1], 0, 0)
        with reported("beyond", "before its window"):
            reads(caches[0], 0, 0)


# --- tiles and operations --------------------------------------------------------------------------


def test_attention_is_held_to_the_record(anywhere):
    """It reads by address: what it will read is checked before it."""
    rng, s = np.random.default_rng(0), Step()
    x, query = vectors(rng, 9), vectors(rng, 9, 4)
    with kv.sanitize(s.m):
        s.begin("a", 6)
        s.begin("b", 3)
        _, inputs = s.inputs("a", "b")
        c, offsets = inputs.collection, inputs.row_offsets
        kv.ops.append(c, 0, x, x, offsets)
        kv.ops.attention(c, 0, query, offsets)
        with reported("unwritten", "kv.attention: reads", verb="reads"):
            kv.ops.attention(c, 1, query, offsets)
        s.m.release("b")
        with reported("released", "kv.store", request="b"):
            kv.ops.append(c, 0, x, x, offsets)


def test_masks_that_are_functions_may_leave_out_pages_behind_a_window():
    rng, s = np.random.default_rng(0), Step(window=P)
    x, one = vectors(rng, 12), vectors(rng, 1)

    def sliding(b, h, q, k):
        return (k <= q) & (q - k < P)

    with kv.sanitize(s.m):
        s.begin("a", 12)
        _, inputs = s.inputs("a")
        kv.ops.append(inputs.collection, 0, x, x, inputs.row_offsets)
        s.m.step(["a"])
        s.more("a")
        _, inputs = s.inputs("a")
        assert inputs.lookup_table[0, 0] == s.m.null_page
        with reported("unwritten", token=12):
            kv.ops.attention(inputs.collection, 0, one, inputs.row_offsets, mask=sliding)
        kv.ops.append(inputs.collection, 0, one, one, inputs.row_offsets)
        kv.ops.attention(inputs.collection, 0, one, inputs.row_offsets, mask=sliding)


def test_operations_that_list_tokens_are_held_to_the_record():
    s = Step()
    with kv.sanitize(s.m):
        s.begin("a", 6)
        s.begin("b", 3)
        cache, _ = s.inputs("a", "b")
        for b, t in ((0, 1), (1, 2)):
            write[H, D](cache, b, t)
        offsets = np.array([0, 1, 2], np.uint32)
        kv.ops.gather(cache, np.array([[1], [2]], np.int32), offsets)
        with reported("unwritten", "kv.load", request="b", token=1):
            kv.ops.gather(cache, np.array([[1], [1]], np.int32), offsets)


def test_tiles_of_kernels_are_checked_between_their_first_and_last_token(anywhere):
    @kv.kernel(block=128)
    def load(cache: kv.KVCache, first: kv.i32, count: kv.i32, out: kv.Buffer[kv.f32, 2]):
        out.store_rows(kv.tile_index(64), value=cache.tile(0, 0, first, count, rows=64))

    s = Step(num_pages=20)
    out = np.zeros((64, D), np.float32)
    with kv.sanitize(s.m) as sanitizer:
        s.begin("a", 70)
        cache, _ = s.inputs("a")
        sanitizer.written(s.m.pages("a")[:17])
        load[1, 128](cache, 0, 68, out)
        load[1, 128](cache, 64, 68, out)
        with reported("unwritten", "kv.tile_load", head=0, token=68):
            load[1, 128](cache, 64, 69, out)


def test_pages_that_operations_copy_are_written_where_their_sources_were():
    s = Step()
    with kv.sanitize(s.m) as sanitizer:
        s.begin("a", 2)
        s.begin("b", 8)
        cache, inputs = s.inputs("a", "b")
        write[H, D](cache, 0, 0)
        (a,), (b, other) = s.m.pages("a"), s.m.pages("b")
        kv.ops.copy_pages(inputs.collection, np.array([a], np.int32), np.array([b], np.int32))
        reads(cache, 1, 0)
        with reported("unwritten", token=1):
            reads(cache, 1, 1)
        sanitizer.written([other])
        reads(cache, 1, 5)


# --- what is right is not reported ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_of_a_manager_is_not_reported(seed):
    """Prompts that share beginnings, chunks, forks, drafts, releases, requests that fill up a batch."""
    rng, x = random.Random(seed), np.random.default_rng(seed)
    s = Step(num_pages=24, prefix_caching=True, window=(None, 6)[seed])
    live, count = [], 0
    s.m.claim("dummy", dummy=True)
    with kv.sanitize(s.m):
        for _ in range(30):
            if rng.random() < 0.5 or not live:
                count += 1
                s.m.claim(count, [rng.randrange(2) for _ in range(rng.randrange(1, 12))])
                live.append(count)
            if live and rng.random() < 0.3 and not s.m.active(live[-1]):
                count += 1
                s.m.fork(live[-1], count)
                live.append(count)
            batch = []
            for name in rng.sample(live, min(len(live), 3)):
                if not s.m.active(name):
                    s.m.extend(name, [rng.randrange(2)])
                with contextlib.suppress(kv.InsufficientBlocksError):
                    s.m.alloc(name, rng.choice([None, 3]))
                    batch.append(name)
            if batch:
                names = [*batch, "dummy"]
                s.m.alloc("dummy")
                inputs = s.m.runtime_inputs(names)
                c, offsets = inputs.collection, inputs.row_offsets
                tokens = int(offsets[-1])
                kv.ops.append(c, 0, vectors(x, tokens), vectors(x, tokens), offsets)
                mask = {"mask": "sliding_window", "window": 6} if seed else {}
                kv.ops.attention(c, 0, vectors(x, tokens, 4), offsets, **mask)
                s.m.step(names)
            if live and rng.random() < 0.3:
                s.m.release(live.pop(rng.randrange(len(live))))
    assert count > 10


@pytest.mark.parametrize("kind", ["paged", "continuous"])
def test_a_collection_without_a_manager_is_held_to_its_table(kind):
    p = random_problem(np.random.default_rng(3), kind, "f32", cached=[5, 9], new=[2, 1], head_size=D)
    c = p.collection
    heads = c.num_heads
    with kv.sanitize(c):
        cache = c.get_value_cache(0)
        read[heads, D](cache, 1, 8, np.zeros(D, np.float32))
        with reported("unwritten", token=9):
            read[heads, D](cache, 1, 9, np.zeros(D, np.float32))
        write[heads, D](cache, 1, 9)
        read[heads, D](cache, 1, 9, np.zeros(D, np.float32))
        c.lookup_table[1] = c.lookup_table[0]
        with reported("foreign", owners=("sequence 0",), sequence=1):
            read[heads, D](cache, 1, 0, np.zeros(D, np.float32))


def test_rows_of_a_watched_collection_that_name_one_page_share_it():
    blocks = np.zeros((4, 2, 1, P, H, D), np.float32)
    table = np.full((2, 8), 3, np.uint32)
    table[:, 0], table[:, 1] = 2, (0, 1)
    c = kv.PagedKVCacheCollection(blocks, np.array([5, 4], np.uint32), table, 1, 6)
    cache = c.get_key_cache(0)
    with kv.sanitize(c):
        reads(cache, 1, 0)
        write[H, D](cache, 1, 4)
        with reported("shared", "sequence 0' and 'sequence 1"):
            write[H, D](cache, 0, 0)


# --- switching -------------------------------------------------------------------------------------


def test_nothing_is_checked_outside_and_nothing_is_left_behind():
    s = Step()
    before = len(ownership.registry(HOST).states)
    with kv.sanitize(s.m):
        s.begin("a", 4)
        cache, _ = s.inputs("a")
        with reported("unwritten"):
            reads(cache, 0, 0)
    reads(cache, 0, 0)
    assert s.m._watcher is None
    assert len(ownership.registry(HOST).states) == before
    with kv.pipeline(check="ownership"):
        reads(cache, 0, 0)  # with the checks, of a pool that nobody watches


def test_watching_may_begin_in_the_middle_of_requests():
    s = Step(prefix_caching=True)
    s.begin("a", list(range(6)))
    s.fill("a")
    s.more("a")
    with kv.sanitize(s.m):
        cache, _ = s.inputs("a")
        for t in range(6):
            reads(cache, 0, t)
        with reported("unwritten", token=6):
            reads(cache, 0, 6)


def test_the_environment_watches_every_manager_as_long_as_it_lives(monkeypatch):
    monkeypatch.setenv("KVARN_CHECK", "ownership")
    before = len(ownership.registry(HOST).states)
    s = Step()
    s.begin("a", 4)
    cache, _ = s.inputs("a")
    with reported("unwritten", request="a"):
        reads(cache, 0, 0)
    del s, cache, _
    gc.collect()
    assert len(ownership.registry(HOST).states) == before
    monkeypatch.setenv("KVARN_CHECK", "sometimes")
    with pytest.raises(ValueError, match="KVARN_CHECK must be 1, 0 or ownership, got 'sometimes'"):
        _ = env.check


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(TypeError, match="watches managers and collections, got int"):
        with kv.sanitize(3):
            pass
    table = np.zeros((4, 1, 2), np.uint32)[::2]  # every other layer of a larger one
    blocks, lengths = np.zeros((2, 4, P, H, D), np.float32), np.array([3], np.uint32)
    with pytest.raises(ValueError, match="layers of a watched lookup table must be contiguous"):
        with kv.sanitize(kv.PagedKVCacheFA3FallbackCollection(blocks, lengths, table, 1, 4)):
            pass
    with pytest.raises(ValueError, match='check must be True, False or "ownership", got 2'):
        with kv.pipeline(check=2):  # type: ignore[arg-type]
            pass
    with pytest.raises(ValueError, match="check must be True, False or \"ownership\", got 'access'"):
        kv.compile(write, kv.CacheSpec("paged", kv.f32, H, D, P), kv.i32, kv.i32, target="host", check="access")
