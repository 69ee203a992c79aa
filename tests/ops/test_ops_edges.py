# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Edge rules of the cache operations: tokens without a page, lengths past the data, rows of no sequence, nothing to do.

Every byte of the pool is compared, on the host and in GPU code.
"""

from __future__ import annotations

import functools
import io
from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import assert_close, assert_same, bits
from reference.random_caches import clone, fill_cached, random_problem, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes

problem_of = functools.partial(stored_problem, page_size=8, cached=[5, 9], new=[7, 4])
FREQS = np.tile(np.array([0.6, 0.8], np.float32), (64, 8))
GAMMA = np.linspace(0.5, 1.5, 16, dtype=np.float32)


def without_pages(problem: Any) -> Any:
    """The problem's collection with two entries of its table that name no page."""
    c = problem.collection
    table = np.array(c.lookup_table)
    table[0, 1], table[1, 1] = c.num_blocks, 0xFFFFFFFF  # tokens 8 to 15 of both sequences
    return type(c)(c.blocks, c.cache_lengths, table, c.max_seq_length, c.max_cache_length)


# What writes, how it is called, and what its model does: (collection, place, random generator, problem).
def _store_ragged(c, place, rng, p):
    x = random_values(rng, (p.tokens, 2, 16), c.dtype)
    kv.ops.store_ragged(c.get_key_cache(0), place.put(x), place.put(p.row_offsets))
    return lambda e: model.store_ragged(e.get_key_cache(0), x, p.row_offsets)


def _store_padded(c, place, rng, p):
    x = random_values(rng, (2, 8, 2, 16), c.dtype)
    kv.ops.store_padded(c.get_key_cache(0), place.put(x), place.put(p.new.astype(np.uint32)))
    return lambda e: model.store_padded(e.get_key_cache(0), x, p.new)


def _radd(c, place, rng, p):
    a = random_values(rng, (p.tokens, 64), c.dtype)
    kv.ops.radd(c, 1, place.put(a), place.put(p.row_offsets))
    return lambda e: model.radd(e, 1, a, p.row_offsets)


def _iadd_2m(c, place, rng, p):
    a = random_values(rng, (2 * p.tokens, 32), c.dtype)
    kv.ops.iadd_2m(c, 1, place.put(a), place.put(p.row_offsets))
    return lambda e: model.iadd_2m(e, 1, a, p.row_offsets)


def _rms_norm(c, place, rng, p):
    kv.ops.rms_norm(c.get_value_cache(0), place.put(GAMMA), 1e-6, place.put(p.row_offsets))
    return lambda e: model.rms_norm(e.get_value_cache(0), GAMMA, 1e-6, p.row_offsets)


def _rope(c, place, rng, p):
    query = random_values(rng, (p.tokens, 3, 16), dtypes.f32)
    kv.ops.rope(c, 0, place.put(query), place.put(p.row_offsets), place.put(FREQS))
    return lambda e: model.rope_in_place(e, 0, query, p.row_offsets, FREQS)


def _rope_padded(c, place, rng, p):
    query = random_values(rng, (2, 9, 3, 16), dtypes.f32)
    kv.ops.rope_padded(c, 0, place.put(query), place.put(p.new.astype(np.int32)), place.put(FREQS))
    return lambda e: model.rope_padded(e, 0, query, p.new, FREQS)


def _qk_norm(c, place, rng, p):
    query = random_values(rng, (p.tokens, 3, 16), dtypes.f32)
    given = place.put(GAMMA)
    kv.ops.qk_norm(c, 1, place.put(query), place.put(p.row_offsets), given, given, freqs_cis=place.put(FREQS))
    return lambda e: model.qk_norm(e, 1, query, p.row_offsets, GAMMA, GAMMA, freqs=FREQS)


WRITERS = [_store_ragged, _store_padded, _radd, _iadd_2m, _rms_norm, _rope, _rope_padded, _qk_norm]


@pytest.mark.parametrize("write", WRITERS, ids=[w.__name__.strip("_") for w in WRITERS])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_token_without_a_page_is_dropped(place, write, dtype):
    """Neither another page nor the null page is touched, from which its old value is read."""
    rng, problem = problem_of(1, dtype=dtype)
    changed = without_pages(problem)
    found, expected = place.collection(changed), clone(changed)
    null = bits(np.array(expected.blocks[-1]))
    write(found, place, rng, problem)(expected)
    assert_close(place, found, expected)
    np.testing.assert_array_equal(bits(place.buffers(found)[0][-1]), null)
    before = clone(changed)
    assert (bits(place.buffers(found)[0]) != bits(before.blocks)).any()  # tokens that have a page were written


@pytest.mark.parametrize("write", WRITERS, ids=[w.__name__.strip("_") for w in WRITERS])
def test_a_token_past_its_region_is_dropped(place, write):
    rng = np.random.default_rng(2)
    blocks = rng.standard_normal((3, 2, 2, 14, 2, 16)).astype(np.float32)
    table, lengths = np.array([2, 0], np.uint32), np.array([5, 9], np.uint32)
    whole = kv.ContinuousBatchingKVCacheCollection(blocks, lengths, table, 7, 13)
    short = kv.ContinuousBatchingKVCacheCollection(blocks[:, :, :, :10].copy(), lengths, table, 7, 10)
    found, expected = place.collection(short), clone(whole)
    problem = random_problem(rng, cached=[5, 9], new=[7, 4])
    state = rng.bit_generator.state
    write(place.collection(whole), place, rng, problem)(expected)
    rng.bit_generator.state = state
    with place.unchecked():
        write(found, place, rng, problem)
    kept = kv.ContinuousBatchingKVCacheCollection(expected.blocks[:, :, :, :10].copy(), lengths, table, 7, 10)
    assert_close(place, found, kept)


def test_valid_lengths_past_the_padding_write_the_padding_only(place):
    rng, problem = problem_of(3)
    c, found, expected = problem.collection, place.collection(problem.collection), clone(problem.collection)
    x = random_values(rng, (2, 3, 2, 16), c.dtype)
    for valid in ([900, 2], [0xFFFFFFFF, 0]):  # lengths are 32-bit and signed in kernels: the largest are negative
        given = np.array(valid, np.uint32)
        with place.unchecked():
            kv.ops.store_padded(found.get_key_cache(0), place.put(x), place.put(given))
        model.store_padded(expected.get_key_cache(0), x, given.view(np.int32).clip(0))
    assert_same(place, found, expected)


@pytest.mark.parametrize("shape", [(2, 0), (0, 4)])
def test_a_padded_batch_of_nothing_writes_nothing(place, shape):
    batch, tokens = shape
    problem = random_problem(np.random.default_rng(4), cached=[5] * batch, new=[0] * batch)
    found = place.collection(problem.collection)
    x = place.put(np.ones((batch, tokens, 2, 16), np.float32))
    with place.unchecked():
        kv.ops.store_padded(found.get_key_cache(0), x, place.put(np.full(batch, 4, np.uint32)))
    assert_same(place, found, problem.collection)


def test_rows_to_add_past_the_offsets_are_left_out(place):
    """More rows than tokens: of radd at the end, of iadd_2m in both halves."""
    rng, problem = problem_of(5)
    c, tokens = problem.collection, problem.tokens
    found, expected = place.collection(c), clone(c)
    a = random_values(rng, (tokens + 5, 64), c.dtype)
    kv.ops.radd(found, 0, place.put(a), place.put(problem.row_offsets))
    model.radd(expected, 0, a[:tokens], problem.row_offsets)
    rows = random_values(rng, (2 * (tokens + 3), 32), c.dtype)
    kv.ops.iadd_2m(found, 1, place.put(rows), place.put(problem.row_offsets))
    kept = np.concatenate([rows[:tokens], rows[tokens + 3 : 2 * tokens + 3]])
    model.iadd_2m(expected, 1, kept, problem.row_offsets)
    assert_same(place, found, expected)


def test_iadd_2m_takes_the_offsets_of_the_first_sequences(place):
    """The rows of LoRA requests come first: the other sequences need not be named."""
    rng, problem = problem_of(6, cached=[5, 9, 2], new=[7, 4, 3])
    c, found, expected = problem.collection, place.collection(problem.collection), clone(problem.collection)
    rows = random_values(rng, (2 * 9, 32), c.dtype)  # the first nine tokens: all of one sequence, two of the next
    kv.ops.iadd_2m(found, 0, place.put(rows), place.put(problem.row_offsets[:3].copy()))
    model.iadd_2m(expected, 0, rows, problem.row_offsets[:3])
    assert_same(place, found, expected)


def test_remapping_rows_of_sequences_without_a_table_gives_minus_one(place):
    table = np.array([[4, 7, 9]], np.uint32)
    logical = np.array([[0, 17, 31, -1], [5, 6, -9, 7], [1, 2, 3, 4]], np.int32)
    offsets = np.array([0, 1, 2], np.uint32)  # row 1 is of a sequence past the table, row 2 of none
    out = place.put(logical.copy())
    kv.ops.remap_sparse_indices(out, place.put(offsets), place.put(table), 16, 9, out=out)
    assert place.get(out).tolist() == [[64, 113, 127, -1], [-1, -1, -9, -1], [-1, -1, -1, -1]]
    expected = model.remap_sparse_indices(logical, offsets, table, 16, 9)
    np.testing.assert_array_equal(place.get(out), expected)


def test_remapping_past_the_table_or_to_the_null_page_gives_minus_one(place):
    table = np.array([[4, 9, 0xFFFFFFFF]], np.uint32)  # a page, the null page, none
    logical = np.array([[15, 16, 32, 48, 2**31 - 1]], np.int32)
    given = [place.put(x) for x in (logical, np.array([0, 1], np.int32), table)]
    found = kv.ops.remap_sparse_indices(*given, 16, 9)
    assert place.get(found).tolist() == [[79, -1, -1, -1, -1]]


def test_lengths_of_no_sequence_stay_so(place):
    none, offsets = place.put(np.zeros(0, np.uint32)), place.put(np.zeros(1, np.uint32))
    kv.ops.increment_cache_lengths(none, offsets)
    assert place.get(kv.ops.cache_row_offsets(offsets, none)).tolist() == [0]


def test_offsets_of_a_slice_count_from_its_first_row(place):
    """row_offsets whose first entry is above 0: the sums still begin at 0."""
    offsets, lengths = np.array([4, 6, 6, 9], np.uint32), np.array([7, 0, 3], np.uint32)
    found = kv.ops.cache_row_offsets(place.put(offsets), place.put(lengths))
    assert place.get(found).tolist() == [0, 9, 9, 15]
    grown = place.put(lengths.copy())
    kv.ops.increment_cache_lengths(grown, place.put(offsets))
    assert place.get(grown).tolist() == [9, 0, 6]


# --- print_cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["paged", "continuous", "fa3"])
def test_print_cache_shows_cached_and_new_tokens(place, kind):
    problem = random_problem(np.random.default_rng(7), kind, "bf16", page_size=4, cached=[5, 0, 2], new=[1, 0, 2])
    fill_cached(np.random.default_rng(8), problem, problem.cached + problem.new)
    found, out = place.collection(problem.collection), io.StringIO()
    kv.ops.print_cache(found, 1, place.put(problem.new.astype(np.uint32)), file=out)
    lines = out.getvalue().splitlines()
    titles = [f"layer 1 {half} sequence {b}: {n} tokens" for half in ("key", "value") for b, n in enumerate([6, 0, 4])]
    assert [line for line in lines if line.startswith("layer")] == titles
    assert len(lines) == 6 + 2 * 10 * 2
    cache = problem.collection.get_value_cache(1)
    at = lines.index(titles[5]) + 1 + 3 * 2 + 1  # token 3, head 1 of the last sequence
    shown = " ".join(f"{float(x):g}" for x in cache.load(2, 1, 3, 0, width=7))
    assert lines[at] == f"  token 3 head 1: {shown} ..."
    whole = io.StringIO()
    kv.ops.print_cache(found, 1, compact=False, file=whole)
    lines = whole.getvalue().splitlines()
    assert len(lines) == 6 + 2 * 7 * 2
    shown = " ".join(f"{float(x):g}" for x in problem.collection.get_key_cache(1).load(0, 0, 4, 0, width=16))
    assert f"  token 4 head 0: {shown}" in lines


def test_print_cache_of_nothing_says_so(place):
    problem = random_problem(np.random.default_rng(9), cached=[0], new=[3])
    out = io.StringIO()
    kv.ops.print_cache(place.collection(problem.collection), 0, file=out)
    assert out.getvalue().splitlines() == [f"layer 0 {half} sequence 0: 0 tokens" for half in ("key", "value")]
    with pytest.raises(ValueError, match=r"valid_lengths must be integers of shape \[1\], got int32 of shape \[2\]"):
        kv.ops.print_cache(problem.collection, 0, np.zeros(2, np.int32))
