# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.sanitize over the pools of fa3 and of other libraries, over lists of pages, and through addresses."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from reference.ownership import D, H, P, Step, emulated, reads, reported, vectors, write

import kvarn as kv
from kvarn.runtime import ownership


def fa3():
    """Two layers of two sequences of 5 and 3 tokens in pages of one pool, the last page among them."""
    table = np.array([[[2, 7, 0], [4, 0, 0]], [[1, 6, 0], [5, 0, 0]]], np.uint32)  # zeros: pages of no token
    blocks = np.zeros((2, 8, P, H, D), np.float32)
    return kv.PagedKVCacheFA3FallbackCollection(blocks, np.array([5, 3], np.uint32), table, 2, 7)


def test_layers_of_an_fa3_pool_have_pages_of_their_own():
    c = fa3()
    with kv.sanitize(c):
        for layer in range(2):
            for cache in (c.get_key_cache(layer), c.get_value_cache(layer)):
                reads(cache, 0, 4)
                reads(cache, 1, 2)
        second = c.get_value_cache(1)
        with reported("unwritten", token=3, page=5):
            reads(second, 1, 3)
        write[H, D](second, 1, 3)
        reads(second, 1, 3)
        with reported("unwritten", token=3):
            reads(c.get_key_cache(1), 1, 3)
        for access in (lambda: reads(second, 1, 8), lambda: write[H, D](second, 1, 8)):
            with reported("beyond", page=0):
                access()
        c.lookup_table[1, 0, 1] = 7  # that of layer 0
        with reported("foreign", owners=("sequence 0 in layer 0",), expected_page=6, sequence=0):
            reads(second, 0, 4)


def test_attention_over_an_fa3_pool_is_held_to_the_record():
    c, offsets = fa3(), np.array([0, 1, 1], np.uint32)
    query = vectors(np.random.default_rng(0), 1, 4)
    with kv.sanitize(c):
        write[H, D](c.get_key_cache(1), 0, 5)
        with reported("unwritten", "kv.attention: reads", token=5, page=6, sequence=0):
            kv.ops.attention(c, 1, query, offsets)
        write[H, D](c.get_value_cache(1), 0, 5)
        kv.ops.attention(c, 1, query, offsets)
        c.lookup_table[1, 0, 0] = 2
        with reported("foreign", "kv.attention: reads", page=2, expected_page=1):
            kv.ops.attention(c, 1, query, offsets)


def test_attention_over_lists_of_pages_is_held_to_what_they_name():
    s, offsets = Step(), np.array([0, 1, 2], np.uint32)
    query = vectors(np.random.default_rng(0), 2, 4)
    lists = np.array([[[2, 0, -1], [0, 2, 90]], [[0, 1, 1], [1, 0, 1]]], np.int32)  # [sequence, head, entry]
    wrong, counts = lists.copy(), np.array([[3, 9], [3, 3]], np.int32)
    wrong[0, 1, 1] = 1
    with kv.sanitize(s.m) as sanitizer:
        s.begin("a", 10)
        s.begin("b", 5)
        _, inputs = s.inputs("a", "b")
        c, pages = inputs.collection, s.m.pages("a")
        c.cache_lengths[:] = 9, 4  # of each, one token is new
        sanitizer.written([pages[0], pages[2], *s.m.pages("b")])
        kv.ops.attention(c, 0, query, offsets, pages=lists, page_counts=counts)
        with reported("unwritten", "kv.attention: reads", request="a", head=1, page=pages[1]):
            kv.ops.attention(c, 0, query, offsets, pages=wrong, page_counts=counts)
        counts[0, 1] = 1
        kv.ops.attention(c, 0, query, offsets, pages=wrong, page_counts=counts)


@kv.kernel
def read_by_address(cache: kv.KVCache, b: kv.i32, t: kv.i32, rows: kv.i32, out: kv.Buffer[kv.f32, 1]):
    start = cache.block_paged_ptr(b, t, kv.block_id.x, 0)
    out[kv.thread_id.x] = (start + (rows * cache.num_heads * cache.head_size + kv.thread_id.x) * 4).load(kv.f32)


@kv.kernel
def write_by_address(cache: kv.KVCache, b: kv.i32, t: kv.i32, rows: kv.i32):
    start = cache.block_paged_ptr(b, t, kv.block_id.x, 0) + kv.thread_id.x * 4
    (start + rows * cache.num_heads * cache.head_size * 4).store(kv.f32(1.0))


@pytest.mark.parametrize("place", [contextlib.nullcontext, emulated], ids=["host", "sm_90a"])
def test_loads_and_stores_through_addresses_are_checked_where_they_lead(place):
    s, out = Step(), np.zeros(D, np.float32)
    with place(), kv.sanitize(s.m):
        s.begin("a", 6)
        s.begin("b", 6)
        cache, _ = s.inputs("a", "b")
        page = s.m.pages("b")[0]
        write_by_address[H, D](cache, 1, 1, 0)
        write_by_address[H, D](cache, 1, 1, 1)  # of the next token
        for t, rows in ((1, 0), (2, 0), (1, 1), (2, -1)):
            read_by_address[H, D](cache, 1, t, rows, out)
        reads(cache, 1, 2)
        with reported("unwritten", "load by address of kernel read_by_address: reads", token=3, page=page, slot=3):
            read_by_address[H, D](cache, 1, 1, 2, out)
        for launch in (
            lambda: read_by_address[H, D](cache, 1, 1, 3, out),
            lambda: write_by_address[H, D](cache, 1, 1, -2),
        ):
            with reported("outside", sequence=1):
                launch()
        s.m.release("b")
        with reported("released", request="b"):
            write_by_address[H, D](cache, 1, 1, 0)


def test_pages_of_others_and_shared_ones_are_found_through_addresses():
    s, out = Step(), np.zeros(D, np.float32)
    with kv.sanitize(s.m):
        s.begin("a", 4)
        cache = s.fill("a")
        s.m.fork("a", "child")
        read_by_address[H, D](cache, 0, 3, 0, out)
        with reported("shared", "'a' and 'child'", token=2, verb="writes"):
            write_by_address[H, D](cache, 0, 0, 2)
        s.more("a")
        cache, inputs = s.inputs("a")
        inputs.collection.lookup_table[0, 0] = 5
        with reported("foreign", page=5, request="a"):
            read_by_address[H, D](cache, 0, 0, 0, out)


def test_an_address_is_followed_in_pages_whose_heads_lie_apart():
    theirs = np.zeros((2, 4, H, P, D), np.float32)  # vLLM's, HND
    c = kv.ForeignPages.vllm(theirs, np.array([3], np.uint32), np.array([[2]], np.uint32), layout="HND")

    @kv.kernel
    def of_next_head(cache: kv.KVCache, t: kv.i32, rows: kv.i32, out: kv.Buffer[kv.f32, 1]):
        start = cache.block_paged_ptr(0, t, 0, 0) + (P * D + rows * D) * 4
        out[0] = start.load(kv.f32)

    with kv.sanitize(c):
        of_next_head[1, 1](c.get_key_cache(0), 1, 1, np.zeros(1, np.float32))
        with reported("unwritten", head=1, token=3):
            of_next_head[1, 1](c.get_key_cache(0), 1, 2, np.zeros(1, np.float32))


@pytest.mark.parametrize("dims", ["N2PHD", "2NHPD"])
def test_pools_of_other_libraries_are_watched(dims):
    """Keys and values between each other, or one behind the other; no page of theirs stands for none."""
    extents = {"N": 4, "2": 2, "P": P, "H": H, "D": D}
    table = np.array([[3, 0], [1, 0]], np.uint32)
    theirs = np.zeros([extents[x] for x in dims], np.float32)
    c = kv.ForeignPages(theirs, np.array([3, 2], np.uint32), table, dims, max_seq_length=1)
    keys, values = c.get_key_cache(0), c.get_value_cache(0)
    with kv.sanitize(c) as sanitizer:
        reads(keys, 0, 2)
        reads(values, 1, 1)
        write[H, D](values, 0, 3)
        reads(values, 0, 3)
        with reported("unwritten", sequence=0, token=3, page=3, owners=("sequence 0",)):
            reads(keys, 0, 3)
        with reported("beyond", sequence=1, page=0):
            write[H, D](keys, 1, P)
        sanitizer.written(3)
        reads(keys, 0, 3)
        table[1, 0] = 3
        with reported("foreign", sequence=1, page=3, expected_page=1):
            reads(keys, 1, 0)


def test_ids_of_copies_are_not_read_for_a_pool_that_nobody_watches(monkeypatch):
    """On a GPU reading them waits for all that runs; here it would fail."""

    def read(ids):
        raise AssertionError("ids of copies were read")

    watched, other = Step(), Step()
    other.begin("a", 3)
    other.begin("b", 3)
    _, inputs = other.inputs("a", "b")
    (a,), (b,) = other.m.pages("a"), other.m.pages("b")
    monkeypatch.setattr(ownership, "_on_host", read)
    with kv.sanitize(watched.m):
        kv.ops.copy_pages(inputs.collection, np.array([a], np.int32), np.array([b], np.int32))
    with kv.sanitize(other.m), pytest.raises(AssertionError, match="were read"):
        kv.ops.copy_pages(inputs.collection, np.array([a], np.int32), np.array([b], np.int32))
