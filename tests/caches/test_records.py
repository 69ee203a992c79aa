# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Records of 4-bit elements: declarations, and append, gather, copies and attention against NumPy."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference.records import (
    HEADS,
    PAGE,
    PLACES,
    SIZE,
    at,
    attended,
    check_rope_append,
    collection_of,
    held,
    offsets_of,
    record_of,
)

import kvarn as kv
from kvarn.caches.numerics import decode, encode, packed, rotated, unpacked
from kvarn.dialect import layout
from kvarn.dialect.dtypes import u4

GROUPS = (128, 64, 32)


# --- declarations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"group": 24}, "a group of u4 must be a multiple of 32 elements, 16 bytes, got 24"),
        ({"group": 0}, "granularity must be positive, got 0"),
        ({"scale": "bf16"}, "with scales of f16, got u4 with scales of bf16 and zeros"),
        ({"scale": "f64"}, "scale dtype must be one of f32, f16, bf16, f8e8m0, f8e4m3, got f64"),
        ({"scale": None, "zero": False}, "got u4 with no scales without zeros"),
        ({"elements": "i8"}, "elements of u4, and no others, have zeros"),
        ({"rotation": 96}, "blocks of a power of two that divides the group, got 96 in groups of 128 of u4"),
        ({"group": 96, "rotation": 64}, "got 64 in groups of 96 of u4"),
        (
            {"elements": "i8", "zero": False, "rotation": 64},
            "a rotation needs elements of u4, f4e2m1 or a codebook.*of i8",
        ),
        ({"elements": "bf16"}, "a quantized cache must store an 8-bit type, got bf16"),
        ({"elements": "f64", "scale": None, "zero": False}, "cache dtype must be f32.*got f64"),
    ],
)
def test_a_record_that_no_kernel_reads_is_refused_where_it_is_declared(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv.Record(**{"elements": "u4", "scale": "f16", "group": 128, "zero": True, **given})


def test_groups_of_a_record_must_divide_the_head() -> None:
    with pytest.raises(ValueError, match="groups of u4 must divide the head, got groups of 96 in a head of 128"):
        layout.CacheSpec("paged", u4, 8, 128, 16, scale_dtype=kv.f16, granularity=96, zero=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": np.zeros((2, 2, 1, 16, 2, 64), np.int8)}, "must be uint8, bytes that elements share, got i8"),
        ({"scales": None}, "needs its scales, got none"),
        ({"scales": np.zeros((2, 2, 1, 16, 2, 1), np.float16)}, r"scales must have shape \(2, 2, 1, 16, 2, 2\)"),
        ({"scales": np.zeros((2, 2, 1, 16, 2, 2), np.float32)}, "must be kv.f16, got f32"),
        ({"quantization_granularity": 64}, "is that of the record, 128, got 64"),
        ({"record": None, "quantization_granularity": 32}, "cache dtype must be f32.*got u8"),
    ],
)
def test_buffers_that_are_not_those_of_the_record_are_refused(change: Any, message: str) -> None:
    given = {
        "blocks": np.zeros((2, 2, 1, 16, 2, 64), np.uint8), "scales": np.zeros((2, 2, 1, 16, 2, 2), np.float16),
        "record": "int4", **change,
    }  # fmt: skip
    lengths, table = np.zeros(1, np.uint32), np.zeros((1, 24), np.uint32)
    with pytest.raises(ValueError, match=message):
        kv.PagedKVCacheCollection(given.pop("blocks"), lengths, table, 1, 16, **given)


def test_records_of_whole_elements_are_those_of_the_specs() -> None:
    spec = layout.CacheSpec("paged", kv.f8e4m3, 8, 96, 16, scale_dtype=kv.f32, granularity=64)
    assert spec.record == kv.Record("f8e4m3", "f32", 64)
    assert spec.record.scales_shape(96) == (kv.f32, 2)
    assert layout.CacheSpec("paged", kv.bf16, 8, 128, 16).record == kv.Record("bf16")


def test_bytes_have_the_even_element_in_the_low_half() -> None:
    assert packed(np.array([1, 2, 15, 0], np.uint8)).tolist() == [0x21, 0x0F]
    assert unpacked(np.array([0x21, 0x0F], np.uint8)).tolist() == [1, 2, 15, 0]


def test_a_manager_allocates_pools_of_a_record() -> None:
    params = kv.KVCacheStaticParams(num_heads=2, head_size=128)
    manager = kv.PagedKVCacheManager(params=params, num_layers=3, num_pages=7, page_size=16, dtype="int4")
    assert manager.blocks.shape == (8, 2, 3, 16, 2, 64)
    assert manager.blocks.dtype == np.uint8
    assert manager.scales.shape == (8, 2, 3, 16, 2, 2)
    manager.claim("a", [1, 2, 3])
    manager.alloc("a")
    found = manager.runtime_inputs(["a"]).collection
    assert found is not None
    assert found.cache_spec.record == kv.Record("u4", "f16", 128, zero=True)


def test_copies_keep_the_record() -> None:
    found = collection_of(record_of(64), (3,), (1,), np.random.default_rng(0))
    assert copy.deepcopy(found).cache_spec == found.cache_spec
    assert found.with_tables(found.cache_lengths, found.lookup_table).cache_spec == found.cache_spec


def test_other_operations_refuse_packed_elements_by_name() -> None:
    found = collection_of(record_of(128), (3,), (1,), np.random.default_rng(0))
    with pytest.raises(
        kv.KernelError, match=r"'kv.summarize_pages' op takes no cache of u4.*convert to a cache of bf16"
    ):
        kv.ops.summarize_pages(found, 0, kv.PageSummaries(found), offsets_of((1,)))
    scales = np.ones((1, HEADS, 2), np.float32)
    heads = np.zeros((1, HEADS, SIZE), np.float32)
    turned = collection_of(record_of(128, 64), (3,), (1,), np.random.default_rng(0)).get_key_cache(0)
    with pytest.raises(ValueError, match=r"convert: source has rotated blocks.*append its tokens anew"):
        kv.ops.convert(turned, found.get_key_cache(0))
    with pytest.raises(ValueError, match="key_scale must be None: append computes scales and zeros of u4 itself"):
        kv.ops.append(found, 0, heads, heads, offsets_of((1,)), key_scale=scales, value_scale=scales)


# --- operations ------------------------------------------------------------------------------------


def test_single_elements_are_those_of_vectors() -> None:
    cache = collection_of(record_of(32), (5,), (1,), np.random.default_rng(0)).get_value_cache(1)
    stored, scales = held(cache, 0, [4])
    whole = decode(cache.spec.record, stored, scales)[0, 1]
    assert [float(cache.load(0, 1, 4, d)) for d in range(SIZE)] == whole.tolist()
    assert cache.load(0, 1, 4, 32, 32).tolist() == whole[32:64].tolist()
    assert cache.block_paged_ptr(0, 4, 1, 2).tolist() == [stored[0, 1, 1:].tolist()]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("group", "rotation", "heads"),
    [
        (128, 0, HEADS), (64, 0, HEADS), (32, 0, HEADS), (128, 128, HEADS), (128, 4, HEADS), (32, 32, HEADS),
        (128, 128, 8), (64, 0, 8), (32, 32, 8), (128, 64, 5),
    ],
)  # fmt: skip
def test_append_quantizes_as_numpy(place: str, group: int, rotation: int, heads: int) -> None:
    """With more heads a thread has more elements, up to 32; 5 heads leave lanes of a warp without any."""
    rng, record, cached, new = np.random.default_rng(group), record_of(group, rotation), (5, 0, 20), (3, 1, 7)
    found, offsets = collection_of(record, cached, new, rng, heads=heads), offsets_of(new)
    key, value = (rng.standard_normal((11, heads, SIZE)).astype(ml_dtypes.bfloat16) for _ in range(2))
    key[0], key[1], key[2] = 0, 5, 1e-6 * key[2]
    value[0, 0] *= 1e6  # beyond f16: scale and zero saturate
    value[1, 0, 7] = 300
    with at(place):
        kv.ops.append(found, 1, key, value, offsets)
    for cache, given in ((found.get_key_cache(1), key), (found.get_value_cache(1), value)):
        stored, scales = encode(record, given)
        for b in range(3):
            rows = slice(*offsets[b : b + 2])
            got = held(cache, b, cached[b] + np.arange(new[b]))
            np.testing.assert_array_equal(got[0], stored[rows])
            np.testing.assert_array_equal(got[1], scales[rows])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rotation", [0, 256])
def test_groups_may_be_longer_than_what_a_thread_holds_of_other_types(place: str, rotation: int) -> None:
    rng, record = np.random.default_rng(0), record_of(256, rotation)
    found, offsets = collection_of(record, (5,), (3,), rng, 256), offsets_of((3,))
    key, value = (rng.standard_normal((3, HEADS, 256)).astype(ml_dtypes.bfloat16) for _ in range(2))
    with at(place):
        kv.ops.append(found, 1, key, value, offsets)
    np.testing.assert_array_equal(held(found.get_key_cache(1), 0, [5, 6, 7])[0], encode(record, key)[0])


def test_a_rotation_spreads_outliers_and_is_its_own_inverse() -> None:
    values = np.random.default_rng(0).standard_normal((50, SIZE)).astype(np.float32)
    np.testing.assert_allclose(rotated(rotated(values, 32), 32), values, atol=1e-5)
    np.testing.assert_allclose(rotated(np.eye(4, dtype=np.float32), 4)[1], [0.5, -0.5, 0.5, -0.5])
    values[:, 5] *= 30
    errors = [np.square(decode(r, *encode(r, values)) - values).mean() for r in (record_of(128), record_of(128, 128))]
    assert errors[1] < errors[0] / 5


def test_values_are_within_half_a_step() -> None:
    values = np.random.default_rng(0).standard_normal((50, SIZE)).astype(np.float32)
    for group in GROUPS:
        record = record_of(group)
        stored, scales = encode(record, values)
        steps = scales.astype(np.float32).reshape(50, -1, 2)[..., 0].repeat(group, -1)
        assert (np.abs(decode(record, stored, scales) - values) <= 0.51 * steps).all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("group", [128, 32])
def test_rows_are_gathered_converted_and_copied(place: str, group: int) -> None:
    rng, record, cached = np.random.default_rng(1), record_of(group), (40, 17, 3)
    found, other = (collection_of(record, cached, (1, 1, 1), rng) for _ in range(2))
    keys, ids = found.get_key_cache(1), np.array([[0, 5, 39], [16, 1, 1], [2, 0, 1]], np.int32)
    plain = kv.PagedKVCacheCollection(
        np.full((*found.blocks.shape[:-1], SIZE), np.nan, np.float32), found.cache_lengths, found.lookup_table, 1, 41
    )
    with at(place):
        gathered = kv.ops.gather(keys, ids, offsets_of((1, 1, 1)))
        kv.ops.convert(keys, plain.get_key_cache(0))
        kv.ops.convert(plain.get_key_cache(0), other.get_value_cache(0))
    for b, length in enumerate(cached):
        stored, scales = held(keys, b, range(length))
        np.testing.assert_array_equal(gathered[b], stored[ids[b]])
        t, h = np.arange(length)[:, None], np.arange(HEADS)
        values = plain.get_key_cache(0).load(b, h, t, 0, SIZE)
        np.testing.assert_array_equal(values, decode(record, stored, scales))
        np.testing.assert_array_equal(held(other.get_value_cache(0), b, range(length))[0], encode(record, values)[0])
    pages = np.array([0, 1], np.int32), np.array([2, 3], np.int32)
    with at(place):
        kv.ops.copy_pages(found, *pages)
        kv.ops.transfer_pages(found, other, *pages)
    for copied in (found, other):
        np.testing.assert_array_equal(copied.blocks[[2, 3]], found.blocks[[0, 1]])
        np.testing.assert_array_equal(copied.scales[[2, 3]], found.scales[[0, 1]])


@pytest.mark.parametrize("place", PLACES)
def test_rope_append_quantizes_rotated_heads(place: str) -> None:
    check_rope_append(record_of(64), np.random.default_rng(2), place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("group", "rotation"), [(128, 0), (64, 0), (32, 0), (128, 128), (64, 32)])
@pytest.mark.parametrize("new", [(1, 1, 1), (3, 1, 17)], ids=["decode", "prefill"])
def test_attention_reads_the_values_that_elements_stand_for(place: str, group: int, rotation: int, new: Any) -> None:
    rng, record, cached = np.random.default_rng(group), record_of(group, rotation), (5, 40, 130)
    found, offsets = collection_of(record, cached, new, rng), offsets_of(new)
    key, value, query = (
        rng.standard_normal((int(offsets[-1]), n, SIZE)).astype(ml_dtypes.bfloat16) for n in (HEADS, HEADS, 4 * HEADS)
    )
    with at(place):
        kv.ops.append(found, 1, key, value, offsets)
        out = kv.ops.attention(found, 1, query, offsets, scale=SIZE**-0.5)
    np.testing.assert_allclose(out.astype(np.float64), attended(found, 1, query, offsets), atol=2e-2, rtol=1e-2)


PROMPTS: dict[str, dict[str, Any]] = {
    "a group per head": {},
    "groups of 32, head of 64, pages of 8": {"group": 32, "size": 64, "page": 8},
    "groups of 32, head of 96": {"group": 32, "size": 96},
    "head of 256": {"size": 256},
    "f16 queries, pages of 5": {"group": 64, "page": 5, "query": np.float16},
    "few tokens of some sequences": {"schedule": {}},
    "rotated heads": {"rotation": 128},
    "rotated blocks of 32, few tokens of some sequences": {"group": 32, "rotation": 32, "schedule": {}},
    "rotated blocks of 4": {"rotation": 4},
}


@pytest.mark.parametrize("name", PROMPTS)
def test_tiles_of_prompts_are_converted_from_packed_elements(name: str) -> None:
    """The bar is that of 16-bit keys and weights: every product's operands are rounded to the query's type."""
    case = {
        "group": 128, "rotation": 0, "size": SIZE, "page": PAGE, "query": ml_dtypes.bfloat16,
        "schedule": {"kind": "tile"}, **PROMPTS[name],
    }  # fmt: skip
    rng, new, size = np.random.default_rng(3), (70, 1, 3), case["size"]
    record = record_of(case["group"], case["rotation"])
    found = collection_of(record, (90, 0, 200), new, rng, size, page=case["page"])
    offsets = offsets_of(new)
    key, value, query = (
        rng.standard_normal((int(offsets[-1]), n, size)).astype(case["query"]) for n in (HEADS, HEADS, 4 * HEADS)
    )
    out = np.full(query.shape, np.nan, query.dtype)
    with kv.emulated("sm_90a"):
        kv.ops.append(found, 1, key, value, offsets)
        kv.ops.attention(found, 1, query, offsets, scale=size**-0.5, out=out, schedule=case["schedule"])
    want = attended(found, 1, query, offsets)
    error = out.astype(np.float64) - want
    assert np.sqrt(np.square(error).mean() / np.square(want).mean()) < 2.0**-7
    assert np.abs(error).max() < 2.0**-6 * np.abs(want).max()


def test_tiles_refuse_outputs_that_cannot_hold_rotated_queries() -> None:
    found = collection_of(record_of(128, 128), (90,), (70,), np.random.default_rng(3))
    query, out = (np.zeros((70, 4 * HEADS, SIZE), dtype) for dtype in (ml_dtypes.bfloat16, np.float32))
    with kv.emulated("sm_90a"), pytest.raises(kv.KernelError, match="an output of the query's type over rotated heads"):
        kv.ops.attention(found, 1, query, offsets_of((70,)), scale=1.0, out=out, schedule={"kind": "tile"})


DECODES: dict[str, dict[str, Any]] = {
    "rotated groups of 32": {"group": 32, "rotation": 32},
    "rotated heads": {"rotation": 128},
    "rotated groups of 64": {"group": 64, "rotation": 64},
    "rotated blocks of 32 of heads of 96": {"group": 96, "size": 96, "rotation": 32},
    "rotated heads of 512": {"group": 512, "size": 512, "rotation": 512},
    "groups of 64": {"group": 64},
    "a group per head": {},
    "head of 64": {"group": 64, "size": 64},
    "head of 96": {"group": 32, "size": 96},
    "head of 256": {"group": 64, "size": 256},
    "head of 512, query in shared memory": {"group": 128, "size": 512},
    "one query head per KV head": {"query_heads": HEADS},
    "16 query heads per KV head": {"query_heads": 16 * HEADS},
    "pages of one token": {"page": 1},
    "pages of 5": {"page": 5},
    "several new tokens": {"new": (4, 1, 3), "max_queries": 4, "group": 32},
    "fixed splits": {"cached": (700, 40, 1), "schedule": {"batch_invariant": True}},
    "fixed splits of one sequence": {"cached": (700,), "new": (1,), "schedule": {"batch_invariant": True}},
    "one sequence": {"cached": (700,), "new": (1,)},
    "f16 queries on sm_80": {"target": "sm_80", "query": np.float16},
}


@pytest.mark.parametrize("name", DECODES)
def test_the_decode_kernel_reads_packed_elements(name: str) -> None:
    """The bar is for an output in f32: elements, scales and zeros are exact, weights have the 11 bits of f16."""
    case = {
        "group": 128, "rotation": 0, "size": SIZE, "query_heads": 8, "page": PAGE, "cached": (5, 40, 130),
        "new": (1, 1, 1), "max_queries": 1, "schedule": {}, "target": "sm_90a", "query": ml_dtypes.bfloat16,
        **DECODES[name],
    }  # fmt: skip
    rng, record, size = np.random.default_rng(5), record_of(case["group"], case["rotation"]), case["size"]
    found = collection_of(record, case["cached"], case["new"], rng, size, page=case["page"])
    offsets = offsets_of(case["new"])
    key, value, query = (
        rng.standard_normal((int(offsets[-1]), n, size)).astype(case["query"])
        for n in (HEADS, HEADS, case["query_heads"])
    )
    bounds = {"kind": "decode", "max_queries": case["max_queries"], "max_batch": 4 if len(case["cached"]) > 1 else 1}
    out = np.full(query.shape, np.nan, np.float32)
    with kv.emulated(case["target"]):
        kv.ops.append(found, 1, key, value, offsets)
        kv.ops.attention(found, 1, query, offsets, scale=size**-0.5, out=out, schedule={**bounds, **case["schedule"]})
    want = attended(found, 1, query, offsets)
    largest = np.abs(rotated(want.astype(np.float32), case["rotation"])).max()  # of the values that weights multiply
    np.testing.assert_allclose(out, want, atol=1e-3 * largest, rtol=0)
