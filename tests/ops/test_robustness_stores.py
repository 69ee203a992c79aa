# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Robustness of what writes and re-indexes caches, every byte compared, on the host and in GPU code.

============================================================ =====
store_ragged behind cached tokens                            10
store_padded of unequal lengths                              11
rows gathered out of pages of 32                             13
remap of sparse indices, with strides, of nothing            15
rotation and norm leave cached tokens as they are            25
============================================================ =====

Group 12 is in ``test_robustness_elements.py``, 14 in ``test_ops_updates.py``, more of 13 in ``test_ops_copies.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import assert_same, bits
from reference.random_caches import clone, random_problem, random_values, stored_problem

import kvarn as kv


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
def test_ragged_stores_follow_the_cached_tokens_and_leave_them(place, dtype):
    rng = np.random.default_rng(10)
    problem = random_problem(rng, "paged", dtype, cached=[100, 200, 300], new=[10, 33, 1], page_size=32)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    x = random_values(rng, (problem.tokens, 2, 16), problem.collection.dtype)
    kv.ops.store_ragged(found.get_key_cache(1), place.put(x), place.put(problem.row_offsets))
    after, before = place.buffers(found)[0], np.asarray(problem.collection.blocks)
    table, written = np.asarray(problem.collection.lookup_table), np.zeros(before.shape[:4], bool)
    row = 0
    for b, (cached, new) in enumerate(zip([100, 200, 300], [10, 33, 1], strict=True)):
        for t in range(cached, cached + new):  # token by token, by the definition alone
            page, slot = table[b, t // 32], t % 32
            np.testing.assert_array_equal(bits(after[page, 0, 1, slot]), bits(x[row]))
            written[page, 0, 1, slot] = True
            row += 1
    np.testing.assert_array_equal(bits(after)[~written], bits(before)[~written])
    model.store_ragged(expected.get_key_cache(1), x, problem.row_offsets)
    assert_same(place, found, expected)


def test_padded_stores_leave_slots_past_the_valid_ones_zero(place):
    valid, cached = [3, 1, 4], [5, 2, 0]
    rng = np.random.default_rng(11)
    problem = random_problem(rng, "paged", "f32", cached=cached, new=[4, 4, 4], page_size=4, poison=0.0)
    found = place.collection(problem.collection)
    x = random_values(rng, (3, 4, 2, 16), problem.collection.dtype)
    kv.ops.store_padded(found.get_value_cache(0), place.put(x), place.put(np.array(valid, np.uint32)))
    after, before = place.buffers(found)[0], np.asarray(problem.collection.blocks)
    table = np.asarray(problem.collection.lookup_table)
    for b in range(3):
        for t in range(cached[b] + 4):
            page, slot, i = table[b, t // 4], t % 4, t - cached[b]
            kept = before[page, 1, 0, slot] if i < 0 else x[b, i] if i < valid[b] else np.zeros((2, 16))
            np.testing.assert_array_equal(after[page, 1, 0, slot], kept, f"sequence {b}, token {t}")
    assert (after != before).sum() == sum(valid) * 32


@pytest.mark.parametrize(("is_mla", "half"), [(False, "key"), (False, "value"), (True, "key")])
def test_rows_are_gathered_from_pages_of_32_slots(place, is_mla, half):
    """Of one head, layer 1 of 3; the second sequence asks for none."""
    rng = np.random.default_rng(13)
    shape = {"num_heads": 1, "head_size": 40, "num_layers": 3, "page_size": 32, "is_mla": is_mla}
    problem = random_problem(rng, "paged", "bf16", cached=[70, 9, 33], new=[0, 0, 0], **shape)
    slots = np.stack([rng.integers(0, n, 7) for n in (70, 70, 33)]).astype(np.int32)
    offsets = np.array([0, 2, 2, 3], np.uint32)
    cache = getattr(place.collection(problem.collection), f"get_{half}_cache")(1)
    out = place.put(np.full((3, 7, 1, 40), 77, problem.collection.dtype.numpy))
    kv.ops.gather(cache, place.put(slots), place.put(offsets), out=out)
    c, which = problem.collection, half == "value"
    for row, (b, wanted) in enumerate(zip((0, 0, 2), slots, strict=True)):
        pages = np.asarray(c.lookup_table)[b, wanted // 32]
        expected = np.asarray(c.blocks)[pages, int(which), 1, wanted % 32]
        np.testing.assert_array_equal(bits(place.get(out)[row]), bits(expected))


# --- sparse indices --------------------------------------------------------------------------------

NONE = 99  # fills the table: no page of the pool, whose pages end before 21
TABLE = np.array([[10, 5, NONE, NONE], [3, 20, NONE, NONE]], np.uint32)


def test_remapping_gives_minus_one_where_there_is_no_token(place):
    """Of two sequences: a token, one of the second page, none, one past the sequence's pages; one of the other's."""
    logical, offsets = np.array([[0, 129, -1, 256], [200, 0, -1, 600]], np.int32), np.array([0, 1, 2], np.uint32)
    given = [place.put(x) for x in (logical, offsets, TABLE)]
    found = place.get(kv.ops.remap_sparse_indices(*given, 128, 21)).tolist()
    assert found[0] + found[1][:1] == [1280, 641, -1, -1, 2632]
    assert found[1][1:] == [384, -1, -1]


def test_remapping_reads_rows_that_lie_apart(place):
    rng = np.random.default_rng(15)
    wide = rng.integers(-2, 600, (6, 50)).astype(np.int32)
    offsets = np.array([0, 2, 6], np.uint32)
    logical, out = place.put(wide)[:, 3:24], place.put(np.full((6, 40), -77, np.int32))
    into = out[:, 5:26]
    kv.ops.remap_sparse_indices(logical, place.put(offsets), place.put(TABLE), 128, 21, out=into)
    expected = np.full((6, 40), -77)
    expected[:, 5:26] = model.remap_sparse_indices(wide[:, 3:24], offsets, TABLE, 128, 21)
    np.testing.assert_array_equal(place.get(out), expected)


# --- what a step changes ---------------------------------------------------------------------------

FREQS = np.tile(np.array([0.6, 0.8], np.float32), (80, 4))  # 8 of the 16 dims of a head turn
GAMMA = np.linspace(0.5, 1.5, 16, dtype=np.float32)


def _rope_first(c: Any, put: Any, query: Any, offsets: Any) -> slice:
    kv.ops.rope(c, 1, query, offsets, put(FREQS), interleaved=False)
    return slice(0, 8)


def _rope_last(c: Any, put: Any, query: Any, offsets: Any) -> slice:
    kv.ops.rope(c, 1, query, offsets, put(FREQS), interleaved=True)
    return slice(8, 16)


def _norm(c: Any, put: Any, query: Any, offsets: Any) -> slice:
    kv.ops.rms_norm(c.get_key_cache(1), put(GAMMA), 1e-6, offsets)
    return slice(0, 16)


def _norm_and_rope(c: Any, put: Any, query: Any, offsets: Any) -> slice:
    kv.ops.qk_norm(c, 1, query, offsets, put(GAMMA), put(GAMMA), freqs_cis=put(FREQS))
    return slice(0, 16)


CHANGES = [
    (_rope_first, "bf16"), (_rope_last, "bf16"), (_rope_first, "f8e4m3"), (_rope_last, "f8e4m3"), (_norm, "bf16"),
    (_norm_and_rope, "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "dtype"), CHANGES, ids=[f"{f.__name__.strip('_')}-{t}" for f, t in CHANGES])
def test_only_the_new_tokens_dims_of_the_keys_of_the_layer_change(place, change, dtype):
    """Bit for bit: cached tokens, values, other layers, dims that do not turn, unused slots and pages."""
    rng, problem = stored_problem(25, dtype=dtype, cached=[30, 0, 17], new=[5, 7, 1])
    found, before = place.collection(problem.collection), np.asarray(problem.collection.blocks)
    query = random_values(rng, (problem.tokens, 4, 16), kv.bf16)
    dims = change(found, place.put, place.put(query), place.put(problem.row_offsets))
    may, table = np.zeros(before.shape, bool), np.asarray(problem.collection.lookup_table)
    for b, (cached, new) in enumerate(zip(problem.cached, problem.new, strict=True)):
        for t in range(cached, cached + new):
            may[table[b, t // 16], 0, 1, t % 16, :, dims] = True
    after = place.buffers(found)[0]
    np.testing.assert_array_equal(bits(after)[~may], bits(before)[~may])
    changed = bits(after)[may] != bits(before)[may]
    assert changed.mean() > 0.5, "the new tokens are changed"
    assert np.isfinite(after[may].astype(np.float32)).all()
