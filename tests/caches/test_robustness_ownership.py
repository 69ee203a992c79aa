# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What broke other systems, of which owners and slots tell: each is planted, and found by kv.sanitize.

It is found at the access or, where that is within the sequence's own pages, at the first one that is misled by it.
"""

from __future__ import annotations

import numpy as np
from reference.ownership import D, H, P, reads, reported, vectors

import kvarn as kv


def problem(lengths=(5, 2), new=(2, 1)):
    """A watched collection with three pages a sequence: the last one is the null page."""
    blocks = np.zeros((7, 2, 1, P, H, D), np.float32)
    table = np.full((2, 8), 6, np.uint32)
    table[0, :3], table[1, :3] = (4, 0, 3), (2, 5, 1)
    c = kv.PagedKVCacheCollection(blocks, np.array(lengths, np.uint32), table, max(new), max(lengths) + max(new))
    return c, np.cumsum([0, *new]).astype(np.uint32), vectors(np.random.default_rng(0), sum(new))


def test_entries_past_the_used_ones_may_hold_anything():
    c, offsets, x = problem()
    with kv.sanitize(c):
        c.lookup_table[:, 3:] = 999_999
        kv.ops.append(c, 0, x, x, offsets)
        reads(c.get_key_cache(0), 0, 6)


def test_entries_that_became_the_null_page_are_found():
    c, offsets, x = problem()
    with kv.sanitize(c):
        c.lookup_table[:] = 6
        with reported("foreign", page=6):
            kv.ops.append(c, 0, x, x, offsets)


def test_tokens_that_were_stored_at_the_wrong_place_are_missed_at_their_own():
    c, offsets, x = problem()
    with kv.sanitize(c):
        c.cache_lengths[:] = 0
        kv.ops.append(c, 0, x, x, offsets)  # over cached tokens
        c.cache_lengths[:] = 5, 2
        with reported("unwritten"):
            reads(c.get_key_cache(0), 0, 5)


def test_tokens_of_a_padded_batch_past_the_valid_ones_are_missed():
    c, _, _ = problem()
    with kv.sanitize(c):
        keys = c.get_key_cache(0)
        kv.ops.store_padded(keys, np.ones((2, 2, H, D), np.float32), np.array([1, 2], np.uint32))
        reads(keys, 0, 5)
        reads(keys, 1, 3)
        with reported("unwritten", sequence=0, token=6):
            reads(keys, 0, 6)


def test_the_tail_of_a_partly_filled_page_is_found():
    c, _, _ = problem()
    with kv.sanitize(c):
        for b, length in ((0, 5), (1, 2)):
            reads(c.get_value_cache(0), b, length - 1)
            with reported("unwritten", sequence=b, token=length):
                reads(c.get_value_cache(0), b, length)
