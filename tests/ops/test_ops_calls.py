# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls of the cache operations: what is refused and how, what is compiled when, what is kept where."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from reference import model
from reference.random_caches import clone, random_problem, random_values, same_buffers

import kvarn as kv
from kvarn import dispatch
from kvarn.dialect import dtypes
from kvarn.ops import indices, writes


@pytest.fixture
def problem():
    return random_problem(np.random.default_rng(0), "paged", "f32", cached=[3, 5], new=[2, 1], num_layers=2)


def tokens(problem: Any, dtype: str = "f32", **change: Any) -> np.ndarray:
    shape = (change.get("tokens", problem.tokens), change.get("heads", 2), change.get("size", 16))
    return np.ones(shape, dtypes.of(dtype).numpy)


def refuses(kind: type[Exception], message: str) -> Any:
    return pytest.raises(kind, match=re.escape(message))


# --- what is refused -----------------------------------------------------------------------------


def test_append_checks_layer(problem):
    c, x = problem.collection, tokens(problem)
    for layer in (2, -1):
        with refuses(IndexError, f"kv.ops.append: layer must be in [0, 2), got {layer}"):
            kv.ops.append(c, layer, x, x, problem.row_offsets)
    for layer in (1.0, True, "0"):
        with refuses(TypeError, "kv.ops.append: layer must be an integer"):
            kv.ops.append(c, layer, x, x, problem.row_offsets)
    kv.ops.append(c, np.int64(1), x, x, problem.row_offsets)
    with refuses(TypeError, "kv.ops.append: collection must be a KV cache collection, got ndarray"):
        kv.ops.append(x, 0, x, x, problem.row_offsets)


def test_append_checks_shapes(problem):
    c, x, off = problem.collection, tokens(problem), problem.row_offsets
    cases = [
        (tokens(problem, heads=3), x, off, "kv.ops.append: key must have shape [T, 2, 16], got [3, 3, 16]"),
        (x, tokens(problem, size=8), off, "kv.ops.append: value must have shape [T, 2, 16], got [3, 2, 8]"),
        (x[0], x, off, "kv.ops.append: key must have shape [T, 2, 16], got [2, 16]"),
        (x, tokens(problem, tokens=4), off, "kv.ops.append: value must have the 3 tokens of key, got 4"),
        (x, x, off[:2], "kv.ops.append: row_offsets must have shape [3], got [2]"),
        (x, x, off[None], "kv.ops.append: row_offsets must have shape [3], got [1, 3]"),
        (np.asfortranarray(x), x, off, "kv.ops.append: key must be contiguous in its last dimension"),
        (x, None, off, "kv.ops.append: value must be given for a collection with values, got None"),
    ]
    for key, value, offsets, message in cases:
        with refuses(ValueError, message):
            kv.ops.append(c, 0, key, value, offsets)


def test_append_checks_dtypes(problem):
    c, x, off = problem.collection, tokens(problem), problem.row_offsets
    half = tokens(problem, "f16")
    cases = [
        (half, half, off, "kv.ops.append: key must have dtype f32, got f16"),
        (x, half, off, "kv.ops.append: value must have dtype f32, got f16"),
        (x, x, off.astype(np.int64), "kv.ops.append: row_offsets must be int32 or uint32, got i64"),
        (x.tolist(), x, off, "kv.ops.append: key: must be a NumPy array"),
        (None, x, off, "kv.ops.append: key must be given, got None"),
    ]
    for key, value, offsets, message in cases:
        with refuses(TypeError, message):
            kv.ops.append(c, 0, key, value, offsets)
    eight = random_problem(np.random.default_rng(1), "paged", "f8e4m3", cached=[3, 5], new=[2, 1]).collection
    with refuses(TypeError, "kv.ops.append: value must have the dtype of key, f32, got f16"):
        kv.ops.append(eight, 0, x, half, off)


def test_append_checks_scales():
    rng = np.random.default_rng(2)
    q = random_problem(rng, "paged", "f8e4m3", cached=[3, 5], new=[2, 1], scale_dtype="f32", granularity=8)
    x, scale = tokens(q), np.ones((3, 2, 2), np.float32)
    cases = [
        ({"key_scale": scale}, "kv.ops.append: key_scale and value_scale must be given together or not at all"),
        (
            {"key_scale": scale, "value_scale": scale[:, :, :1]},
            "kv.ops.append: value_scale must have shape [T, 2, 2], got [3, 2, 1]",
        ),
        (
            {"key_scale": scale[:2], "value_scale": scale},
            "kv.ops.append: key_scale must have the 3 tokens of key, got 2",
        ),
    ]
    for scales, message in cases:
        with refuses(ValueError, message):
            kv.ops.append(q.collection, 0, x, x, q.row_offsets, **scales)
    plain = random_problem(rng, "paged", "f8e4m3", cached=[3, 5], new=[2, 1])
    with refuses(ValueError, "kv.ops.append: key_scale needs a collection with scales, got one without"):
        kv.ops.append(plain.collection, 0, x, x, q.row_offsets, key_scale=scale, value_scale=scale)
    wide = random_problem(rng, "paged", "bf16", cached=[3, 5], new=[2, 1])
    with refuses(ValueError, "kv.ops.append: tensor_scales needs a collection of at most 8 bits without zeros"):
        stored = tokens(wide, "bf16")
        kv.ops.append(wide.collection, 0, stored, stored, wide.row_offsets, tensor_scales=np.ones(2, np.float32))
    with refuses(ValueError, "kv.ops.append: key_scale must be None with tensor_scales"):
        both = {"key_scale": scale, "value_scale": scale, "tensor_scales": np.ones(2, np.float32)}
        kv.ops.append(q.collection, 0, x, x, q.row_offsets, **both)
    with refuses(ValueError, "kv.ops.append: tensor_scales must have shape [2], got [3]"):
        kv.ops.append(plain.collection, 0, x, x, q.row_offsets, tensor_scales=np.ones(3, np.float32))
    with refuses(TypeError, "kv.ops.append: key must have dtype f32 or f16 or bf16, got f8e4m3"):
        stored = tokens(q, "f8e4m3")
        kv.ops.append(q.collection, 0, stored, stored, q.row_offsets)


def test_mla_collections_have_no_values():
    q = random_problem(np.random.default_rng(3), "paged", "f32", num_heads=1, is_mla=True, cached=[3], new=[2])
    x, off = tokens(q, heads=1), q.row_offsets
    with refuses(ValueError, "kv.ops.append: value must be None for an MLA collection"):
        kv.ops.append(q.collection, 0, x, x, off)
    with refuses(ValueError, "kv.ops.rope_append: needs a collection with values"):
        kv.ops.rope_append(q.collection, 0, x, x, x, off, np.ones((8, 16), np.float32))
    with refuses(ValueError, "kv.ops.radd: needs a collection with values"):
        kv.ops.radd(q.collection, 0, np.ones((2, 32), np.float32), off)


def test_rope_append_checks_angles(problem):
    c, x, off = problem.collection, tokens(problem), problem.row_offsets
    cases = [
        (
            np.ones((5, 16), np.float32),
            ValueError,
            "freqs_cis must have a row for each of the collection's max_cache_length = 6 positions, got 5",
        ),
        (np.ones((6, 18), np.float32), ValueError, "kv.ops.rope_append: freqs_cis must have an even R in [2, 16]"),
        (np.ones((6, 7), np.float32), ValueError, "kv.ops.rope_append: freqs_cis must have an even R in [2, 16]"),
        (np.ones((6, 8), np.float64), TypeError, "kv.ops.rope_append: freqs_cis must have dtype f32, got f64"),
    ]
    for freqs, kind, message in cases:
        with refuses(kind, message):
            kv.ops.rope_append(c, 0, x, x, x, off, freqs)
    good = np.ones((6, 16), np.float32)
    with refuses(ValueError, "kv.ops.rope_append: q_gamma and k_gamma must be given together or not at all"):
        kv.ops.rope_append(c, 0, x, x, x, off, good, q_gamma=np.ones(16, np.float32))
    with refuses(ValueError, "kv.ops.rope_append: eps must be finite, got nan"):
        kv.ops.rope_append(c, 0, x, x, x, off, good, eps=float("nan"))
    with refuses(ValueError, "kv.ops.rope_append: query_out must have shape [3, 2, 16], got [3, 1, 16]"):
        kv.ops.rope_append(c, 0, x, x, x, off, good, query_out=np.ones((3, 1, 16), np.float32))


def test_read_only_buffers_are_not_written(problem):
    c, x, off = problem.collection, tokens(problem), problem.row_offsets
    fixed = clone(c)
    fixed.blocks.flags.writeable = False
    fixed = type(c)(fixed.blocks, fixed.cache_lengths, fixed.lookup_table, 2, 6)
    calls = [
        lambda: kv.ops.append(fixed, 0, x, x, off),
        lambda: kv.ops.store_ragged(fixed.get_key_cache(0), x, off),
        lambda: kv.ops.copy_pages(fixed, off, off),
        lambda: kv.ops.rms_norm(fixed.get_key_cache(0), np.ones(16, np.float32), 1e-5, off),
        lambda: kv.ops.radd(fixed, 0, np.ones((3, 64), np.float32), off),
        lambda: kv.ops.convert(c.get_key_cache(0), fixed.get_key_cache(0)),
    ]
    for call in calls:
        with refuses(ValueError, "read-only"):
            call()
    out = np.zeros((1, 2, 2, 16), np.float32)
    out.flags.writeable = False
    with refuses(ValueError, "read-only"):
        kv.ops.gather(fixed.get_key_cache(0), np.ones((1, 2), np.int32), np.array([0, 1, 1], np.int32), out)
    assert (
        kv.ops.gather(fixed.get_key_cache(0), np.ones((1, 2), np.int32), np.array([0, 1, 1], np.int32)).shape
        == out.shape
    )


def test_other_operations_check_their_arguments(problem):
    c, off = problem.collection, problem.row_offsets
    cache = c.get_key_cache(0)
    cases = [
        (lambda: kv.ops.gather(c, np.ones((1, 1), np.int32), off, np.ones((1, 1, 2, 16), np.float32)), "kv.ops.gather"),
        (
            lambda: kv.ops.gather(cache, np.ones(3, np.int32), off, np.ones((1, 1, 2, 16), np.float32)),
            "kv.ops.gather: token_ids must have shape [R, Ns], got [3]",
        ),
        (lambda: kv.ops.copy_pages(c, off, off[:2]), "kv.ops.copy_pages: destination must have shape [3], got [2]"),
        (
            lambda: kv.ops.rms_norm(cache, np.ones(17, np.float32), 1e-5, off),
            "kv.ops.rms_norm: gamma must have C elements, 1 <= C <= 16",
        ),
        (
            lambda: kv.ops.radd(c, 0, np.ones((3, 63), np.float32), off),
            "kv.ops.radd: a must have shape [Tn, 64], got [3, 63]",
        ),
        (
            lambda: kv.ops.radd(c, 0, np.ones((3, 64), np.float32), off, 1),
            "kv.ops.radd: batch_offset + the 2 sequences of row_offsets must be at most",
        ),
        (
            lambda: kv.ops.iadd_2m(c, 0, np.ones((3, 32), np.float32), off),
            "kv.ops.iadd_2m: kv must have an even number of rows, got 3",
        ),
        (
            lambda: kv.ops.remap_sparse_indices(np.ones((2, 2), np.int32), off, off, 16, 5),
            "kv.ops.remap_sparse_indices: lookup_table must have shape [B, columns], got [3]",
        ),
        (
            lambda: kv.ops.remap_sparse_indices(np.ones((2, 2), np.int32), off, c.lookup_table, 0, 5),
            "kv.ops.remap_sparse_indices: page_size must be in [1,",
        ),
        (
            lambda: kv.ops.mla_prefill_plan(off, c.cache_lengths, 0, 4),
            "kv.ops.mla_prefill_plan: buffer_tokens must be in [1,",
        ),
        (
            lambda: kv.ops.store_padded(cache, np.ones((1, 2, 2, 16), np.float32), off[:2]),
            "kv.ops.store_padded: x must have shape [2, S, 2, 16], got [1, 2, 2, 16]",
        ),
        (
            lambda: kv.ops.cache_row_offsets(off[:2], c.cache_lengths),
            "kv.ops.cache_row_offsets: row_offsets must have shape [3], got [2]",
        ),
        (
            lambda: kv.ops.increment_cache_lengths(c.cache_lengths, off[:2]),
            "kv.ops.increment_cache_lengths: row_offsets must have shape [3], got [2]",
        ),
    ]
    for call, message in cases:
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            call()


def test_lists_are_no_arrays(problem):
    c, x, off = problem.collection, tokens(problem), problem.row_offsets
    cache, ids, freqs = c.get_key_cache(0), np.zeros((1, 1), np.int32), np.ones((6, 16), np.float32)
    gamma = np.ones(16, np.float32)
    calls = [
        lambda: kv.ops.gather(cache, [[1]], off),
        lambda: kv.ops.copy_pages(c, [1], [2]),
        lambda: kv.ops.radd(c, 0, np.ones((3, 64), np.float32), [0, 1]),
        lambda: kv.ops.rope_append(c, 0, x, x, x, off, [[1.0]]),
        lambda: kv.ops.rope_append(c, 0, [x], x, x, off, freqs),
        lambda: kv.ops.rope(c, 0, x, off, freqs, position_ids=[0, 1, 2]),
        lambda: kv.ops.rms_norm(c, gamma, 1e-5, off),
        lambda: kv.ops.rms_norm(cache, [1.0], 1e-5, off),
        lambda: kv.ops.cache_row_offsets([0, 1], c.cache_lengths),
        lambda: kv.ops.remap_sparse_indices([[1]], off, c.lookup_table, 16, 5),
        lambda: kv.ops.mla_prefill_plan(off, [1, 2], 8, 2),
        lambda: kv.ops.store_ragged(cache, [x], off),
        lambda: kv.ops.convert(cache, c),
        lambda: kv.ops.remap_sparse_indices(ids, off, c.lookup_table, 16, 5.5),
        lambda: kv.ops.increment_cache_lengths([1], off),
    ]
    for call in calls:
        with refuses(TypeError, "kv.ops."):
            call()


def test_rope_checks_sections(problem):
    c, x, off = problem.collection, tokens(problem), problem.row_offsets
    freqs, ids = np.ones((6, 16), np.float32), np.zeros((2, 3), np.int32)
    with refuses(ValueError, "kv.ops.rope: mrope_section must add up to the 8 pairs of freqs_cis, got [4, 3]"):
        kv.ops.rope(c, 0, x, off, freqs, position_ids=ids, mrope_section=[4, 3])
    with refuses(ValueError, "kv.ops.rope: position_ids must have shape [3, 3], got [2, 3]"):
        kv.ops.rope(c, 0, x, off, freqs, position_ids=ids, mrope_section=[4, 2, 2])
    with refuses(ValueError, "kv.ops.rope: mrope_section needs position_ids, got none"):
        kv.ops.rope(c, 0, x, off, freqs, mrope_section=[8])


def test_outputs_of_unknown_libraries_must_be_given(problem):
    class Foreign:
        """An array that only DLPack knows how to read."""

        def __init__(self, array):
            self.array, self.shape = array, array.shape

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    off = Foreign(np.array([0, 2, 3], np.int32))
    with refuses(TypeError, "kv.ops.cache_row_offsets: out must be given"):
        kv.ops.cache_row_offsets(off, problem.collection.cache_lengths)
    out = np.zeros(3, np.int32)
    assert kv.ops.cache_row_offsets(off, problem.collection.cache_lengths, out).tolist() == [0, 5, 11]


# --- what is compiled when -----------------------------------------------------------------------


@pytest.fixture
def compilations(monkeypatch):
    """The specialisations that are compiled meanwhile."""
    found = []
    compile_ = dispatch.compile_operation
    monkeypatch.setattr(dispatch, "compile_operation", lambda what, *more: found.append(what) or compile_(what, *more))
    return found


def forget(monkeypatch):
    """A new process, as far as compiled operations go."""
    monkeypatch.setattr(dispatch, "_programs", {})
    for operation in (writes._APPEND, indices._CACHE_ROW_OFFSETS):
        monkeypatch.setattr(operation, "_known", {})


def test_the_count_of_tokens_and_sequences_compiles_nothing_new(compilations):
    rng = np.random.default_rng(5)
    for new in ([2, 1], [1], [4, 0, 7, 3], [100]):
        q = random_problem(rng, "paged", "f32", num_heads=7, head_size=4, cached=[1] * len(new), new=new)
        expected, x = clone(q.collection), random_values(rng, (q.tokens, 7, 4), kv.f32)
        kv.ops.append(q.collection, 0, x, x, q.row_offsets)
        model.append(expected, 0, x, x, q.row_offsets)
        assert same_buffers(q.collection, expected)
    assert len(compilations) == 1


def test_the_disk_cache_spares_the_compiler(compilations, monkeypatch):
    forget(monkeypatch)
    lengths, offsets = np.array([1, 2], np.uint32), np.array([0, 1, 2], np.uint32)
    kv.ops.cache_row_offsets(offsets, lengths)
    before = len(compilations)
    forget(monkeypatch)
    assert kv.ops.cache_row_offsets(offsets, lengths).tolist() == [0, 2, 5]
    assert len(compilations) == before


def test_a_collection_of_the_same_kind_is_the_same_program(problem, compilations):
    x, off = tokens(problem), problem.row_offsets
    kv.ops.append(problem.collection, 0, x, x, off)
    before, known = len(compilations), len(writes._APPEND._known)
    for _ in range(3):
        other = clone(problem.collection)
        kv.ops.append(other, 1, x, x, off)
    assert len(compilations) == before
    assert len(writes._APPEND._known) == known


def test_what_a_signature_holds_is_checked_again_when_it_changes(problem):
    """A good call does not make a bad one pass."""
    c, x, off = problem.collection, tokens(problem), problem.row_offsets
    kv.ops.append(c, 0, x, x, off)
    with refuses(ValueError, "value must have the 3 tokens of key"):
        kv.ops.append(c, 0, x, x[:2], off)
    with refuses(TypeError, "row_offsets must be int32 or uint32"):
        kv.ops.append(c, 0, x, x, off.astype(np.uint64))
    with refuses(ValueError, "row_offsets must have shape [3], got [4]"):
        kv.ops.append(c, 0, x, x, np.array([0, 1, 2, 3], np.uint32))


def test_unaligned_buffers_are_taken(problem):
    """Rows at any multiple of the element's size; the code for them moves less at a time."""
    rng = np.random.default_rng(6)
    memory = random_values(rng, (3 * 2 * 16 + 7,), kv.f32)
    for shift in (0, 1, 2):
        found, expected = clone(problem.collection), clone(problem.collection)
        x = memory[shift : shift + 96].reshape(3, 2, 16)
        kv.ops.append(found, 0, x, x, problem.row_offsets)
        model.append(expected, 0, x, x, problem.row_offsets)
        assert same_buffers(found, expected)


def test_threads_share_an_operation():
    rng = np.random.default_rng(7)
    q = random_problem(rng, "paged", "f32", num_heads=3, head_size=4, cached=[0] * 8, new=[3] * 8, num_layers=8)
    expected = clone(q.collection)
    x = [random_values(rng, (q.tokens, 3, 4), kv.f32) for _ in range(8)]
    errors = []

    def work(layer):
        try:
            for _ in range(20):
                kv.ops.append(q.collection, layer, x[layer], x[layer], q.row_offsets)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    for n in range(8):
        model.append(expected, n, x[n], x[n], q.row_offsets)
    assert same_buffers(q.collection, expected)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_code_for_gpus_moves_16_bytes_at_a_time(target):
    q = random_problem(np.random.default_rng(8), "paged", "bf16", num_heads=8, head_size=128, cached=[3], new=[2])
    x = tokens(q, "bf16", heads=8, size=128)
    made = writes._APPEND.compile((q.collection, 0, x, q.row_offsets, x), target=target)
    ptx = made.asm["ptx"]
    wide = r"\.global(\.nc)?\.(v4\.b32|v2\.b64|v4\.u32|v2\.u64)"
    assert len(re.findall(r"ld" + wide, ptx)) == 2  # one of keys, one of values
    assert len(re.findall(r"st" + wide, ptx)) == 2
    assert not re.search(r"\b(div|rem)\.[su]\d", ptx)
    assert ".local" not in ptx


def test_schedules_choose_the_block():
    q = random_problem(np.random.default_rng(9), "paged", "f32", cached=[3], new=[2])
    x = tokens(q)
    for threads in (64, 512):
        made = writes._APPEND.compile(
            (q.collection, 0, x, q.row_offsets, x), schedule={"threads": threads}, target="sm_90a"
        )
        assert made.artifact.steps[0].block == (threads, 1, 1)
    with pytest.raises(ValueError, match="threads must be a multiple of 32 from 32 to 1024, got 100"):
        writes._APPEND.compile((q.collection, 0, x, q.row_offsets, x), schedule={"threads": 100}, target="sm_90a")
