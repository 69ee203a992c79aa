# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Prefixes that sequences share are read once, and the result stays that of the model."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.case import mostly_on_host
from reference.random_caches import Problem, random_query
from reference.shared_prefixes import LAYER, close, combined, groups_of, permuted, shared_problem

import kvarn as kv
from kvarn.paging.prefixes import groups

TOLERANCE = {"f32": 2e-5, "f16": 4e-3}
SENTINEL = 72.0
# A prefix of three sequences of which one has nothing behind it, a sequence of its own, a prefix of two without new
# tokens in one, and two sequences that share nothing.
MIXED = [(3, 5), (1, 0), (2, 2), (2, 0)]
BEHIND, NEW = [3, 0, 21, 6, 1, 9, 0, 2], [1, 1, 1, 1, 0, 1, 1, 1]


def attend(
    place: Any, problem: Problem, query: np.ndarray, groups_: Any, plans: int = 1, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp; of latent rows where ``options`` say how many of their columns are values."""
    c, offsets = place.collection(problem.collection), place.put(problem.row_offsets)
    shared, columns = kv.SharedPrefixes(*(place.put(x) for x in groups_)), options.get("value_size", query.shape[2])
    out, lse = (place.put(np.full((*query.shape[:2], *rest), SENTINEL, dtype))
                for rest, dtype in (((columns,), query.dtype), ((), np.float32)))  # fmt: skip
    given = {n: place.put(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    operation = kv.ops.mla_attention if "value_size" in options else kv.ops.attention
    with place.active():
        for _ in range(plans):
            shared.plan(c, offsets)
        operation(c, LAYER, place.put(query), offsets, shared=shared, out=out, lse=lse, **given)
    return place.get(out), place.get(lse)


@mostly_on_host
@pytest.mark.parametrize(("dtype", "options"), [("f32", {}), ("f16", {"mask": "null", "softcap": 2.0})], ids=str)
def test_a_shared_prefix_changes_roundings_only(place, dtype, options):
    rng, problem = shared_problem(MIXED, BEHIND, NEW, dtype=dtype)
    query = random_query(rng, problem, 4)
    if place.name != "host":
        options = {**options, "sinks": rng.standard_normal(4).astype(np.float32)}
    found = attend(place, problem, query, groups_of(MIXED), **options)
    want = reference.attention(problem.collection, LAYER, query, problem.row_offsets, **options)
    close(found, want, TOLERANCE[dtype])


LATENT = {"is_mla": True, "heads": 1}


@pytest.mark.parametrize(("dtype", "size", "value_size", "mask"), [("f32", 24, 16, None), ("f16", 144, 128, "null")])
def test_a_shared_prefix_of_latent_rows_changes_roundings_only(place, dtype, size, value_size, mask):
    rng, problem = shared_problem(MIXED, BEHIND, NEW, dtype=dtype, size=size, **LATENT)
    query = random_query(rng, problem, 4)
    options = {"value_size": value_size, "mask": mask}
    found = [attend(place, p, query, groups_of(MIXED), **options) for p in (problem, permuted(problem))]
    want = reference.attention(
        problem.collection, LAYER, query, problem.row_offsets, value_size=value_size, mask=mask or "causal"
    )
    close(found[0], want, TOLERANCE[dtype])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_latent_prefixes_end_with_sinks_and_a_prior_result(place):
    rng, problem = shared_problem([(2, 3), (1, 0)], [5, 0, 2], [3, 1, 2], dtype="f32", size=24, **LATENT)
    query, sinks = random_query(rng, problem, 4), rng.standard_normal(4).astype(np.float32)
    prior = rng.standard_normal((6, 4, 16), np.float32), rng.standard_normal((6, 4), np.float32)
    found = attend(
        place, problem, query, groups_of([(2, 3), (1, 0)]), value_size=16, sinks=sinks,
        prior=tuple(map(place.put, prior)),
    )  # fmt: skip
    want = reference.attention(problem.collection, LAYER, query, problem.row_offsets, value_size=16)
    want = combined(*want, np.zeros_like(want[0]), np.broadcast_to(sinks, want[1].shape))
    close(found, combined(*want, *prior), TOLERANCE["f32"])


def test_a_manager_of_latent_rows_finds_the_requests_that_share():
    rows = np.random.default_rng(1).standard_normal((20, 1, 1, 4, 1, 24)).astype(np.float32)
    manager = kv.PagedKVCacheManager(rows, prefix_caching=True)
    for name in "abc":
        manager.claim(name, [*range(13), ord(name)])
        manager.alloc(name)
        manager.runtime_inputs([name])
        manager.step([name])
        manager.extend(name, [1])
        manager.alloc(name)
    inputs = manager.runtime_inputs(sorted("abc", key=manager.pages))
    shared = inputs.shared_prefixes(least=1)
    assert shared is not None
    assert shared.lengths.tolist() == [12]
    query = np.random.default_rng(2).standard_normal((int(inputs.row_offsets[-1]), 4, 24)).astype(np.float32)
    call = (inputs.collection, 0, query, inputs.row_offsets)
    found = kv.ops.mla_attention(*call, value_size=16, shared=shared, return_lse=True)
    close(found, reference.attention(*call, value_size=16), TOLERANCE["f32"])
    for options, wrong in (({"indices": np.zeros((3, 2), np.int32)}, "indices"), ({"window": 3}, "window"),
                           ({"score": kv.scores.softcap(2.0)}, "score")):  # fmt: skip
        with pytest.raises(ValueError, match=f"mla_attention: {wrong} must be None with shared prefixes"):
            kv.ops.mla_attention(*call, value_size=16, shared=shared, **options)


def test_permuted_pages_give_identical_bits(place):
    rng, problem = shared_problem(MIXED, BEHIND, NEW, dtype="f32")
    query = random_query(rng, problem, 4)
    found = [attend(place, p, query, groups_of(MIXED)) for p in (problem, permuted(problem))]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "groups_", [[(1, 0)], [(1, 3)], [(3, 0)], [(2, 4)], [(0, 0), (2, 1), (0, 3), (1, 2), (0, 0)]], ids=str
)
def test_groups_may_be_of_one_sequence_or_none_and_share_nothing(groups_):
    """Groups without sequences, as in tables of a fixed size that a graph reads, leave nothing."""
    there = [g for g in groups_ if g[0]]
    batch = sum(n for n, _ in there)
    rng, problem = shared_problem(there, [2, 0, 5][:batch], [2, 1, 3][:batch], dtype="f32")
    query = random_query(rng, problem, 4)
    found = kv_attend(problem, query, groups_of(groups_))
    close(found, reference.attention(problem.collection, LAYER, query, problem.row_offsets), TOLERANCE["f32"])


def kv_attend(problem: Problem, query: np.ndarray, groups_: Any, **options: Any) -> tuple[Any, Any]:
    shared = kv.SharedPrefixes(*groups_)
    shared.plan(problem.collection, problem.row_offsets)
    return kv.ops.attention(
        problem.collection, LAYER, query, problem.row_offsets, shared=shared, return_lse=True, **options
    )


def test_drafts_of_a_tree_share_a_prefix():
    rng, problem = shared_problem([(2, 3)], [5, 2], [3, 3], dtype="f32")
    query, tree = random_query(rng, problem, 4), np.array([[1], [3], [5], [1], [2], [6]], np.int32)
    found = kv_attend(problem, query, groups_of([(2, 3)]), tree=tree)
    want = kv.ops.attention(problem.collection, LAYER, query, problem.row_offsets, tree=tree, return_lse=True)
    close(found, want, TOLERANCE["f32"])


def test_groups_that_do_not_cover_the_batch_end_with_it(place):
    """On a device nobody looks: the first group then begins with the batch and the last ends with it."""
    rng, problem = shared_problem([(3, 2)], [1, 2, 3], [1, 1, 1])
    query = random_query(rng, problem, 4)
    if place.name == "host":
        with pytest.raises(ValueError, match="sequences must ascend from 0 to the batch's 3"):
            attend(place, problem, query, (np.array([1, 2], np.int32), np.array([8], np.int32)))
    elif place.name == "torch":
        found = attend(place, problem, query, (np.array([1, 2], np.int32), np.array([8], np.int32)))
        close(found, reference.attention(problem.collection, LAYER, query, problem.row_offsets), TOLERANCE["f16"])


def test_a_plan_follows_what_its_arrays_hold():
    """As in a graph: what is planned again is read anew, into the same tables; appended tokens are seen."""
    rng, problem = shared_problem([(2, 4)], [3, 2], [1, 1], dtype="f32")
    c, query = problem.collection, random_query(rng, problem, 4)
    sequences, lengths = groups_of([(2, 4)])
    shared = kv.SharedPrefixes(sequences, lengths)
    shared.plan(c, problem.row_offsets)
    tables = [part.lookup_table for part in shared.parts]
    lengths[0] = 8  # two pages are enough
    c.cache_lengths[1] -= 1  # one token less
    shared.plan(c, problem.row_offsets)
    assert all(part.lookup_table is table for part, table in zip(shared.parts, tables, strict=True))
    assert shared.parts[0].cache_lengths.tolist() == [8]
    found = kv.ops.attention(c, LAYER, query, problem.row_offsets, shared=shared, return_lse=True)
    close(found, reference.attention(c, LAYER, query, problem.row_offsets), TOLERANCE["f32"])


def test_pages_of_other_libraries_share_prefixes():
    rng, problem = shared_problem([(2, 3)], [1, 2], [1, 1], dtype="f32")
    c, query = problem.collection, random_query(rng, problem, 4)
    foreign = kv.ForeignPages.vllm(
        np.ascontiguousarray(c.blocks[:, :, LAYER].swapaxes(0, 1)), c.cache_lengths, c.lookup_table
    )
    shared = kv.SharedPrefixes(*groups_of([(2, 3)]))
    shared.plan(foreign, problem.row_offsets)
    found = kv.ops.attention(foreign, 0, query, problem.row_offsets, shared=shared, return_lse=True)
    close(found, reference.attention(c, LAYER, query, problem.row_offsets), TOLERANCE["f32"])


def saved_at_most(common: list[int], least: int, page: int) -> int:
    """Pages that the best of all divisions into neighbours saves."""
    best = 0
    for cuts in itertools.product((False, True), repeat=len(common)):
        ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(common) + 1]
        saved = [(b - a - 1) * min(common[a : b - 1]) for a, b in itertools.pairwise(ends) if b - a > 1]
        best = max(best, sum(n for n in saved if n * page >= least))
    return best


def test_groups_are_neighbours_with_the_same_full_pages_and_save_the_most():
    rng, page = np.random.default_rng(0), 4
    for _ in range(200):
        batch, least = int(rng.integers(1, 8)), int(rng.integers(1, 30))
        table, lengths = rng.integers(0, 2, (batch, 6)).astype(np.uint32), rng.integers(0, 24, batch).astype(np.uint32)
        sequences, shared = groups(table, lengths, page, least)
        assert sequences[0] == 0
        assert sequences[-1] == batch
        saved = 0
        for first, end, tokens in zip(sequences, sequences[1:], shared, strict=False):
            assert end > first
            assert tokens % page == 0
            assert (lengths[first:end] >= tokens).all()
            assert (table[first:end, : tokens // page] == table[first, : tokens // page]).all()
            assert not tokens or (end - first - 1) * tokens >= least
            saved += (end - first - 1) * tokens // page
        full = lengths // page
        same = np.logical_and.accumulate(table[1:] == table[:-1], axis=1).sum(1)
        common = np.minimum(same, np.minimum(full[1:], full[:-1])).tolist()
        assert saved == saved_at_most(common, least, page)


def test_a_manager_finds_the_requests_that_share():
    blocks = np.random.default_rng(1).standard_normal((40, 2, 1, 4, 2, 16)).astype(np.float32)
    manager = kv.PagedKVCacheManager(blocks, prefix_caching=True)
    for request, prompt in enumerate(([1] * 14, [2] * 10, [1] * 14, [2] * 9, [1] * 13)):
        manager.claim(request, [*prompt, request])
        manager.alloc(request)
        manager.runtime_inputs([request])
        manager.step([request])
    manager.claim("long", [*[1] * 14, 7, 7, 7])
    for request in range(5):
        manager.extend(request, [9])
        manager.alloc(request)
    manager.alloc("long")
    batch = sorted([*range(5), "long"], key=manager.pages)
    inputs = manager.runtime_inputs(batch)
    assert inputs.shared_prefixes() is None, "so few tokens are not worth it"
    shared = inputs.shared_prefixes(least=1)
    assert shared is not None
    assert sorted(zip(np.diff(shared.sequences), shared.lengths, strict=True)) == [(2, 8), (4, 12)]
    query = np.random.default_rng(2).standard_normal((int(inputs.row_offsets[-1]), 4, 16)).astype(np.float32)
    found = kv.ops.attention(inputs.collection, 0, query, inputs.row_offsets, shared=shared, return_lse=True)
    close(found, reference.attention(inputs.collection, 0, query, inputs.row_offsets), TOLERANCE["f32"])
    windowed = kv.PagedKVCacheManager(blocks, prefix_caching=True, window=8)
    windowed.claim("a", [1] * 14)
    windowed.alloc("a")
    assert windowed.runtime_inputs(["a"]).shared_prefixes(least=1) is None


def test_what_cannot_be_shared_is_refused_by_name():
    rng, problem = shared_problem([(2, 3)], [1, 2], [1, 1], dtype="f32")
    c, query, offsets = problem.collection, random_query(rng, problem, 4), problem.row_offsets
    shared = kv.SharedPrefixes(*groups_of([(2, 3)]))
    attend = lambda **options: kv.ops.attention(c, LAYER, query, offsets, **{"shared": shared, **options})  # noqa: E731
    with pytest.raises(ValueError, match=r"must be planned for the step: call plan\(collection, row_offsets\) first"):
        attend()
    shared.plan(c, offsets)
    with pytest.raises(TypeError, match=r"shared must be a kv.SharedPrefixes, got a list"):
        attend(shared=[])
    with pytest.raises(ValueError, match="window must be None with shared prefixes"):
        attend(window=3)
    with pytest.raises(ValueError, match="mask must be causal or null with shared prefixes"):
        attend(mask="chunked", chunk=4)
    with pytest.raises(ValueError, match="alibi_slopes must be None with shared prefixes"):
        attend(alibi_slopes=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="batch_invariant must be left out with shared prefixes"):
        attend(schedule={"batch_invariant": True})
    other = c.with_tables(c.cache_lengths, c.lookup_table)
    with pytest.raises(ValueError, match="collection must be the one that shared was planned for"):
        kv.ops.attention(other, LAYER, query, offsets, shared=shared)
    with pytest.raises(ValueError, match=r"lengths must be cached in every sequence .* got 16 of group 0"):
        kv.SharedPrefixes(np.array([0, 2], np.int32), np.array([16], np.int32)).plan(c, offsets)
    c.lookup_table[1, 2] = c.lookup_table[0, 0]
    with pytest.raises(ValueError, match="sequences of group 0 must share their first 3 pages"):
        shared.plan(c, offsets)
    with pytest.raises(ValueError, match=r"sequences and lengths must be \[G \+ 1\] and \[G\]"):
        kv.SharedPrefixes(np.zeros(2, np.int32), np.zeros(2, np.int32))
    latent = kv.ContinuousBatchingKVCacheCollection(
        np.zeros((2, 2, 1, 8, 1, 16), np.float32), np.zeros(1, np.uint32), np.zeros(1, np.uint32), 1, 8
    )
    with pytest.raises(TypeError, match="needs a collection with pages"):
        shared.plan(latent, offsets)
