# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Drafts that form a tree: ``tree=`` of attention, and what is left after ``kv.ops.commit``.

What holds no cached token is NaN, and an access outside the buffers is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference, emulated
from reference.attention_functions import problem_of, query_of, run
from reference.random_caches import Problem, clone

import kvarn as kv
from kvarn.caches import KVCacheMHAOperand, PagedKVCacheCollection
from kvarn.ops import reads

# The parent of every draft of a sequence; -1: of none, so that it sees the cached tokens alone.
PARENTS = [[-1, 0, 0, 1, 1, 2, 5], [], [-1], [-1, -1, 0, 1, 3], list(range(-1, 39))]
SHAPE = {"cached": [150, 9, 0, 126, 30], "new": [len(p) for p in PARENTS], "num_heads": 1}


def path(parents: list[int], node: int) -> list[int]:
    """The drafts that a draft sees, itself the last, from the root on."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def bits_of(words: int = 2) -> np.ndarray:
    rows = [path(parents, node) for parents in PARENTS for node in range(len(parents))]
    found = np.zeros((len(rows), 32 * words), np.uint8)
    for row, seen in zip(found, rows, strict=True):
        row[seen] = 1
    return np.packbits(found, axis=1, bitorder="little").view(np.int32)


@pytest.fixture(params=["host", "sm_90a"])
def anywhere(request, monkeypatch):
    """``kv.ops.attention`` of NumPy arrays runs on the host, or as a GPU's code in the interpreter."""
    for name in ("_ATTENTION", "_ATTENTION_PADDED") if request.param != "host" else ():
        real = getattr(reads, name)

        def interpreted(operands: Any, attributes: Any, schedule: Any, stream: Any, real: Any = real, **_: Any) -> None:
            emulated.run(real, operands, attributes, {"kind": "tile"}, request.param)

        monkeypatch.setattr(reads, name, interpreted)
    return request.param


def single_decodes(problem: Problem, query: np.ndarray) -> np.ndarray:
    """Every draft as the last token of a sequence that has its path alone, which commit moves into place."""
    found, rows = np.zeros(query.shape), iter(range(len(query)))
    for b, parents in enumerate(PARENTS):
        for node in range(len(parents)):
            one = clone(problem.collection)
            seen = path(parents, node)
            accepted = np.full((len(PARENTS), 64), -1, np.int32)
            accepted[b, : len(seen)] = seen
            kv.ops.commit(one, 1, accepted, problem.row_offsets)
            lengths = problem.cached.copy()
            lengths[b] += len(seen) - 1
            c = type(one)(one.blocks, lengths.astype(np.uint32), one.lookup_table, 1, one.max_cache_length)
            offsets = (np.arange(len(PARENTS) + 1) > b).astype(np.uint32)
            row = next(rows)
            found[row] = reference.attention(c, 1, query[row : row + 1], offsets)[0][0]
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group", [1, 4])
def test_a_tree_is_a_single_decode_of_each_draft(anywhere, group):
    rng, problem = problem_of(1, **SHAPE)
    query = query_of(rng, problem, group)
    want = single_decodes(problem, query)
    for bits in (bits_of(), bits_of().view(np.uint64)[:, 0]):
        out = kv.ops.attention(problem.collection, 1, query, problem.row_offsets, tree=bits)
        np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


@pytest.mark.sampled(4)
def test_bits_may_have_any_number_of_words_and_what_they_leave_out_is_not_seen(anywhere):
    rng, problem = problem_of(2, **SHAPE)
    query = query_of(rng, problem, 2)
    c, offsets = problem.collection, problem.row_offsets
    two = kv.ops.attention(c, 1, query, offsets, tree=bits_of(2))
    np.testing.assert_array_equal(kv.ops.attention(c, 1, query, offsets, tree=bits_of(6)), two)
    own = np.concatenate([np.arange(len(p)) for p in PARENTS])
    one = kv.ops.attention(c, 1, query, offsets, tree=np.ascontiguousarray(bits_of(2)[:, :1]))
    np.testing.assert_array_equal(one[own < 32], two[own < 32])
    assert np.abs(one[own > 33].astype(np.float32) - two[own > 33]).max() > 0.01


@pytest.mark.sampled(4)
def test_a_tree_goes_with_a_window_a_score_and_other_masks(anywhere):
    rng, problem = problem_of(3, **SHAPE)
    query, slopes = query_of(rng, problem, 2), np.array([0.5, -0.25], np.float32)
    score = (lambda s, b, h, q, k, slopes: s + slopes[h] * kv.f32(k - q), slopes)
    start, bits = problem.cached, np.unpackbits(bits_of().view(np.uint8), axis=1, bitorder="little")

    def seen(b, h, q, k, window=12):
        token = np.clip(k - start[b], 0, 63)
        row = np.clip(problem.row_offsets[b].astype(np.int64) + q - start[b], 0, len(bits) - 1)
        return (q - k < window) & (k <= q) & ((k < start[b]) | (bits[row, token] != 0))

    want, _ = reference.function_attention(
        problem.collection, 1, query, problem.row_offsets, mask=seen,
        score=lambda x, b, h, q, k: x + slopes[h] * (k - q),
    )  # fmt: skip
    c, offsets = problem.collection, problem.row_offsets
    for options in ({"window": 12}, {"mask": kv.masks.sliding_window(12)}):
        out = kv.ops.attention(c, 1, query, offsets, tree=bits_of(), score=score, **options)
        np.testing.assert_allclose(out.astype(np.float64), want, rtol=4e-3, atol=4e-3)


@pytest.mark.sampled(4)
def test_a_padded_batch_has_bits_by_sequence_and_token(anywhere):
    rng, problem = problem_of(4, **SHAPE)
    query = query_of(rng, problem, 2)
    want = kv.ops.attention(problem.collection, 1, query, problem.row_offsets, tree=bits_of())
    padded, rows = reference.padded(query, problem.row_offsets, 40, np.nan), np.zeros((len(PARENTS), 40, 2), np.int32)
    for b, first in enumerate(problem.row_offsets[:-1]):
        rows[b, : len(PARENTS[b])] = bits_of()[first : first + len(PARENTS[b])]
    lengths = problem.new.astype(np.uint32)
    out = kv.ops.attention_padded(problem.collection, 1, padded, lengths, tree=rows)
    found = np.concatenate([out[b, : len(p)] for b, p in enumerate(PARENTS)])
    np.testing.assert_allclose(found.astype(np.float32), want.astype(np.float32), rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(4)
def test_where_pages_lie_does_not_matter_to_a_bit(anywhere):
    rng, problem = problem_of(5, **SHAPE)
    query, c = query_of(rng, problem, 2), problem.collection
    out = kv.ops.attention(c, 1, query, problem.row_offsets, tree=bits_of())
    order = rng.permutation(len(c.blocks))
    table = np.argsort(order)[c.lookup_table].astype(np.uint32)
    moved = PagedKVCacheCollection(c.blocks[order], c.cache_lengths, table, c.max_seq_length, c.max_cache_length)
    np.testing.assert_array_equal(kv.ops.attention(moved, 1, query, problem.row_offsets, tree=bits_of()), out)
    assert np.isfinite(out).all()  # though all that is not cached is NaN


def test_a_small_tree_is_a_decode():
    """The kernel for few query rows reads bits too, of a cache of 8 bits."""
    parents, rng = [-1, 0, 0, 2], np.random.default_rng(10)
    _, problem = problem_of(11, dtype="f8e4m3", cached=[70, 5], new=[4, 0], num_heads=1)
    query, bits = query_of(rng, problem, 2), np.zeros((4, 1), np.int32)
    for node in range(4):
        bits[node] = sum(1 << seen for seen in path(parents, node))
    mask = (kv.masks.tree(1), bits, problem.row_offsets, problem.collection.cache_lengths)
    found, _ = run(problem, query, mask=mask, schedule={"kind": "decode", "max_queries": 4, "max_batch": 2})
    want = kv.ops.attention(problem.collection, 1, query, problem.row_offsets, tree=bits)
    np.testing.assert_allclose(found.astype(np.float32), want.astype(np.float32), rtol=4e-3, atol=4e-3)


def test_cached_keys_are_not_masked_tile_by_tile():
    """The bits are read in tiles that have tokens of the step, no others."""
    rng, problem = problem_of(6, **SHAPE)
    query = query_of(rng, problem, 2)
    c, offsets = problem.collection, problem.row_offsets
    mask = (kv.masks.tree(2), bits_of(), offsets, c.cache_lengths)
    attributes, arrays = reads._modified(None, mask, None, None, None, "")
    operands = (c, 1, query, offsets, 0.1, query.copy(), *[None] * 6, *arrays)
    text = reads._ATTENTION.compile(operands, attributes, None, "sm_90a").stages["narrow-kv-tiles"]
    loop = text[text.index("scf.for") :]
    assert "kv.tile_gather" in loop
    assert "kv.tile_gather" not in loop[: loop.index("else {")], "outside of the branch that masks"


def test_what_is_no_tree_is_refused():
    rng, problem = problem_of(7, **SHAPE)
    query, c, offsets = query_of(rng, problem, 2), problem.collection, problem.row_offsets
    operand = KVCacheMHAOperand(c.get_key_cache(1))
    for call, error, message in (
        (
            lambda: kv.ops.attention(c, 1, query, offsets, tree=bits_of()[:-1]),
            ValueError,
            r"tree must be int32 \[53, W\]",
        ),
        (lambda: kv.ops.attention(c, 1, query, offsets, tree=bits_of()[:, 0]), ValueError, "or uint64"),
        (lambda: kv.ops.attention(c, 1, query, offsets, tree=bits_of().astype(np.float64)), TypeError, "dtype"),
        (lambda: kv.ops.attention(operand, operand, query, offsets, tree=bits_of()), ValueError, "None for operands"),
        (lambda: kv.ops.attention(c, 1, query, offsets, tree=bits_of(), kv_offsets=offsets), ValueError, "kv_offsets"),
        (
            lambda: kv.ops.attention(c, 1, query, offsets, tree=bits_of(), mask="wide"),
            ValueError,
            "mask must be one of",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def test_of_several_sources_the_one_with_the_drafts_has_the_tree():
    rng, problem = problem_of(8, **SHAPE)
    query, c, offsets = query_of(rng, problem, 2), problem.collection, problem.row_offsets
    _, other = problem_of(9, **SHAPE)
    options = {"mask": ["null", "causal"], "tree": [None, bits_of()]}
    out = kv.ops.attention([other.collection, c], [1, 1], query, offsets, **options)
    lse = np.empty(query.shape[:2], np.float32)
    first = kv.ops.attention(
        other.collection,
        1,
        query,
        offsets,
        mask="null",
        out=np.empty(query.shape, np.float32),
        lse=lse,
        return_lse=True,
    )
    want = kv.ops.attention(c, 1, query, offsets, tree=bits_of(), prior=first)
    np.testing.assert_array_equal(out, want)
