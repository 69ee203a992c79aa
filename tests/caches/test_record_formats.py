# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Records of f4e2m1 and of codebooks: append, gather, convert and attention against NumPy."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference import six_bits
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
)

import kvarn as kv
from kvarn.caches import numerics
from kvarn.caches.numerics import decode, encode
from kvarn.dialect import codes, dtypes, layout, records

BOOK = (-1, -0.7, -0.53, -0.4, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1)
FORMATS = {
    "mxfp4": records.NAMED["mxfp4"],
    "nvfp4": records.NAMED["nvfp4"],
    "mxfp4 rotated": kv.Record("e2m1", "f8e8m0", 32, rotation=32),
    "e2m1, a scale of f32 per head": kv.Record("e2m1", "f32", 128, rotation=128),
    "e2m1, scales of f16": kv.Record("e2m1", "f16", 64),
    "a codebook, scales of bf16": kv.Record(BOOK, "bf16", 64),
    "6 bits": kv.Record(six_bits.CODE, "f16", 32),
    "6 bits, groups of 64": kv.Record(six_bits.CODE, "f8e8m0", 64),
    "a codebook, groups of 16": kv.Record(BOOK, "f8e4m3", 16, rotation=16),
}


# --- declarations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("e2m1",), "elements of f4e2m1 need scales, got none"),
        (("e2m1", "f8e8m0", 24), "a group of f4e2m1 must be a multiple of 16 elements, 8 bytes, got 24"),
        (("e2m1", "f16", 32, True), "elements of u4, and no others, have zeros, .*got f4e2m1 with scales of f16 and"),
        (("e2m1", "i8", 32), "scale dtype must be one of f32, f16, bf16, f8e8m0, f8e4m3, got i8"),
        (("e2m1", "f8e8m0", 32, False, 24), "got 24 in groups of 32 of f4e2m1"),
        ((six_bits.CODE, "f8e8m0", 64, False, 64), "a rotation needs elements of u4, f4e2m1 or a codebook.*of e2m3"),
        ((BOOK[:15], "f16", 32), "a codebook must have 16 ascending numbers that f16 tells apart"),
        (((*BOOK[:15], 1e6), "f16", 32), "a codebook must have 16 ascending numbers that f16 tells apart"),
        (((*BOOK[:15], 0.72001), "f16", 32), "a codebook must have 16 ascending numbers that f16 tells apart"),
    ],
)
def test_a_record_that_no_kernel_reads_is_refused_where_it_is_declared(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv.Record(*given)


def test_heads_of_4_bits_are_whole_16_bytes() -> None:
    with pytest.raises(ValueError, match="a head of f4e2m1 must be a multiple of 32 elements, 16 bytes, got 48"):
        layout.CacheSpec("paged", dtypes.f4e2m1, 8, 48, 16, scale_dtype=kv.f8e4m3, granularity=16)


def test_a_codebook_is_one_type_however_it_is_made() -> None:
    found = dtypes.codebook(BOOK)
    assert found is dtypes.codebook(found.table)
    assert found is pickle.loads(pickle.dumps(found))
    assert found is dtypes.stored_by_mlir(found.mlir)
    assert found is dtypes.element_by_name(found.name)


def test_numbers_are_rounded_as_in_their_format() -> None:
    e2m1, x = dtypes.f4e2m1, np.linspace(-8, 8, 1 + 16 * 64, dtype=np.float32)  # all ties, and more
    want = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(numerics.numbers(numerics.rounded(x, e2m1), e2m1), want)
    book = dtypes.codebook(BOOK)
    found = numerics.numbers(numerics.rounded(x, book), book)
    distances = np.abs(x[:, None] - np.array(book.table))
    np.testing.assert_array_equal(np.abs(x - found), distances.min(-1))


def test_elements_of_a_code_are_those_of_its_functions() -> None:
    code, x = six_bits.CODE, np.linspace(-9, 9, 8 * 50, dtype=np.float32).reshape(50, 8)
    want = np.clip(x, -7.5, 7.5).astype(ml_dtypes.float6_e2m3fn)
    data = code.to_bytes(x)
    np.testing.assert_array_equal(code.to_numbers(data), want.astype(np.float32))
    bits = np.unpackbits(data, axis=-1, bitorder="little").reshape(50, 8, 6)
    np.testing.assert_array_equal(np.packbits(bits, axis=-1, bitorder="little")[..., 0], want.view(np.uint8))


def test_a_code_is_one_type_of_equal_functions_and_needs_them() -> None:
    code = six_bits.CODE
    again = kv.Code("e2m3", 6, 7.5, six_bits.encode, six_bits.decode)
    other = kv.Code("e2m3", 6, 7.5, six_bits.encode, lambda data: six_bits.decode(data))
    assert again.coded is code.coded
    assert other.coded is not code.coded
    assert code.coded is dtypes.stored_by_mlir(code.coded.mlir)
    assert code.coded is pickle.loads(pickle.dumps(code.coded))
    with pytest.raises(ValueError, match=r"code 'e9@0' must have been made in this process by kv.Code"):
        codes.of("e9@0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "bits of a code must be from 2 to 7, got 8"),
        ({"name": "e2,m3"}, "name of a code must be of letters, digits and underscores"),
        ({"largest": 0.0}, "largest of a code must be positive and finite, got 0.0"),
        ({"decode": 3}, "decode of a code must be a function, got 3"),
    ],
)
def test_a_code_that_no_kernel_runs_is_refused(change: Any, message: str) -> None:
    given = {"name": "e2m3", "bits": 6, "largest": 7.5, "encode": six_bits.encode, "decode": six_bits.decode, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        kv.Code(**given)


def test_functions_of_a_code_must_give_whole_eights() -> None:
    code = kv.Code("short", 6, 7.5, six_bits.encode, lambda data: kv.from_lanes([kv.f32(data[0])] * 4, kv.f32))
    with pytest.raises(Exception, match="decode of the code short must give a vector of 8 f32, got 4 of f32"):
        code.to_numbers(np.zeros((1, 6), np.uint8))


def test_the_decode_kernel_refuses_codes_by_name() -> None:
    found = collection_of(FORMATS["6 bits"], (5,), (1,), np.random.default_rng(0))
    query = np.zeros((1, 8, SIZE), ml_dtypes.bfloat16)
    with (
        kv.emulated("sm_90a"),
        pytest.raises(Exception, match="needs elements that it knows, got those of the code e2m3@"),
    ):
        kv.ops.attention(found, 1, query, offsets_of((1,)), scale=1.0, schedule={"kind": "decode"})


# --- operations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FORMATS)
def test_append_and_loads_are_those_of_numpy(place: str, name: str) -> None:
    rng, record, cached, new = np.random.default_rng(1), FORMATS[name], (5, 0, 20), (3, 1, 7)
    found, offsets = collection_of(record, cached, new, rng), offsets_of(new)
    key, value = (rng.standard_normal((11, HEADS, SIZE)).astype(ml_dtypes.bfloat16) for _ in range(2))
    key[0], key[1], key[2] = 0, 5, 1e-6 * key[2]  # the scale of zeros, a tie, scales below their type
    value[0, 0] *= 1e6  # beyond the largest scale of f16 and f8e4m3
    value[1, 0, 7] = 300
    with at(place):
        kv.ops.append(found, 1, key, value, offsets)
    for cache, given in ((found.get_key_cache(1), key), (found.get_value_cache(1), value)):
        stored, scales = encode(record, given)
        for b in range(3):
            rows, positions = slice(*offsets[b : b + 2]), cached[b] + np.arange(new[b])
            got = held(cache, b, positions)
            np.testing.assert_array_equal(got[0], stored[rows])
            np.testing.assert_array_equal(got[1].view(np.uint8), scales[rows].view(np.uint8))
            values = decode(kv.Record(record.elements, record.scale, record.group), *got)  # loads leave them rotated
            for d in range(0, SIZE, record.group):
                t, h = positions[:, None], np.arange(HEADS)
                loaded = cache.load(b, h, t, d, record.group)
                np.testing.assert_array_equal(loaded, values[..., d : d + record.group])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "record", [kv.Record("u4", "f16", 256, True), kv.Record("e2m1", "f32", 256, rotation=256)], ids=["u4", "e2m1"]
)
def test_a_group_may_be_a_wide_head(place: str, record: kv.Record) -> None:
    rng, new = np.random.default_rng(8), (2,)
    found, offsets = collection_of(record, (0,), new, rng, 256), offsets_of(new)
    key, value = (rng.standard_normal((2, HEADS, 256)).astype(np.float32) for _ in range(2))
    with at(place):
        kv.ops.append(found, 0, key, value, offsets)
    for cache, given in ((found.get_key_cache(0), key), (found.get_value_cache(0), value)):
        stored, scales = encode(record, given)
        got = held(cache, 0, range(2))
        np.testing.assert_array_equal(got[0], stored)
        np.testing.assert_array_equal(got[1].view(np.uint8), scales.view(np.uint8))


@pytest.mark.parametrize("place", PLACES)
def test_nvfp4_has_a_second_scale_per_tensor(place: str) -> None:
    rng, record, new = np.random.default_rng(2), records.NAMED["nvfp4"], (3,)
    found, offsets = collection_of(record, (5,), new, rng), offsets_of(new)
    key, value = (1e-3 * rng.standard_normal((3, HEADS, SIZE)).astype(np.float32) for _ in range(2))
    scales = np.array([np.abs(x).max() / (6 * 448) for x in (key, value)], np.float32)
    with at(place):
        kv.ops.append(found, 0, key, value, offsets, tensor_scales=scales)
    for cache, given, scale in zip(
        (found.get_key_cache(0), found.get_value_cache(0)), (key, value), scales, strict=True
    ):
        got = held(cache, 0, 5 + np.arange(3))
        want = encode(record, given / scale)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1].view(np.uint8), want[1].view(np.uint8))
        error = np.square(decode(record, *got) * scale - given).mean() / np.square(given).mean()
        assert error < 0.012  # without the second scale every element would be zero


PAIRS = [("mxfp4", "nvfp4"), ("nvfp4", "a codebook, scales of bf16"), ("6 bits", "mxfp4"), ("nvfp4", "6 bits")]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_rows_are_gathered_and_converted(place: str, source: str, destination: str) -> None:
    rng, cached = np.random.default_rng(3), (40, 17, 3)
    found, other = (collection_of(FORMATS[x], cached, (1, 1, 1), rng) for x in (source, destination))
    keys, values = found.get_key_cache(1), other.get_value_cache(0)
    ids = np.array([[0, 5, 39], [16, 1, 1], [2, 0, 1]], np.int32)
    with at(place):
        gathered = kv.ops.gather(keys, ids, offsets_of((1, 1, 1)))
        kv.ops.convert(keys, values)
    for b, length in enumerate(cached):
        held_here = held(keys, b, range(length))
        np.testing.assert_array_equal(gathered[b], held_here[0][ids[b]])
        want = encode(FORMATS[destination], decode(FORMATS[source], *held_here))
        got = held(values, b, range(length))
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1].view(np.uint8), want[1].view(np.uint8))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["nvfp4", "6 bits"])
def test_pages_are_copied_with_their_scales(place: str, name: str) -> None:
    rng, cached, pages = np.random.default_rng(7), (40, 17), (np.array([0, 1], np.int32), np.array([2, 3], np.int32))
    found, other = (collection_of(FORMATS[name], cached, (1, 1), rng) for _ in range(2))
    with at(place):
        kv.ops.copy_pages(found, *pages)
        kv.ops.transfer_pages(found, other, *pages)
    for copied in (found, other):
        np.testing.assert_array_equal(copied.blocks[pages[1]], found.blocks[pages[0]])
        np.testing.assert_array_equal(copied.scales.view(np.uint8)[pages[1]], found.scales.view(np.uint8)[pages[0]])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["mxfp4", "6 bits, groups of 64"])
def test_rope_append_quantizes_turned_heads(place: str, name: str) -> None:
    check_rope_append(FORMATS[name], np.random.default_rng(4), place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FORMATS)
def test_attention_of_prompts_reads_the_values_that_elements_stand_for(place: str, name: str) -> None:
    rng, new = np.random.default_rng(5), (3, 1)
    found, offsets = collection_of(FORMATS[name], (5, 13), new, rng), offsets_of(new)
    heads = (HEADS, HEADS, 4 * HEADS)
    key, value, query = (rng.standard_normal((4, n, SIZE)).astype(ml_dtypes.bfloat16) for n in heads)
    with at(place):
        kv.ops.append(found, 1, key, value, offsets)
        out = kv.ops.attention(found, 1, query, offsets, scale=SIZE**-0.5)
    np.testing.assert_allclose(out.astype(np.float64), attended(found, 1, query, offsets), atol=2e-2, rtol=1e-2)


def test_general_kernels_read_groups_that_are_narrower_than_their_loads() -> None:
    rng, new = np.random.default_rng(10), (2, 1)
    found, offsets = collection_of(FORMATS["nvfp4"], (5, 3), new, rng), offsets_of(new)
    query = rng.standard_normal((3, 2 * HEADS, SIZE)).astype(ml_dtypes.bfloat16)
    with kv.emulated("sm_90a"):
        kv.ops.append(found, 1, query[:, :HEADS].copy(), query[:, HEADS:].copy(), offsets)
        out = kv.ops.attention(found, 1, query, offsets, scale=SIZE**-0.5, schedule={"kind": "simt"})
    np.testing.assert_allclose(out.astype(np.float64), attended(found, 1, query, offsets), atol=2e-2, rtol=1e-2)


TILED: dict[str, dict[str, int]] = {
    **{name: {} for name in ("nvfp4", "mxfp4", "a codebook, scales of bf16", "6 bits", "mxfp4 rotated")},
    "nvfp4, head of 64": {"size": 64},
    "mxfp4, head of 96": {"size": 96},
    "nvfp4, pages of 5": {"page": 5},
    "mxfp4, head of 256": {"size": 256},
}


@pytest.mark.parametrize("name", TILED)
def test_prompts_are_converted_for_tensor_cores(name: str) -> None:
    case = {"size": SIZE, "page": PAGE, **TILED[name]}
    rng, new, size = np.random.default_rng(9), (66, 2), case["size"]
    record = FORMATS[name.partition(", head")[0].partition(", pages")[0]]
    found = collection_of(record, (20, 5), new, rng, size, case["page"])
    offsets, heads = offsets_of(new), (HEADS, HEADS, 4 * HEADS)
    key, value, query = (rng.standard_normal((68, n, size)).astype(ml_dtypes.bfloat16) for n in heads)
    with kv.emulated("sm_90a"):
        kv.ops.append(found, 1, key, value, offsets)
        out = kv.ops.attention(found, 1, query, offsets, scale=size**-0.5, schedule={"kind": "tile"})
    want = attended(found, 1, query, offsets)
    error = out.astype(np.float64) - want  # every product's operands are rounded to the query's type
    assert np.sqrt(np.square(error).mean() / np.square(want).mean()) < 2.0**-7
    assert np.abs(error).max() < 2.0**-6 * np.abs(want).max()


DECODES: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in FORMATS if "6 bits" not in name},
    "nvfp4, head of 64": {"name": "nvfp4", "size": 64},
    "nvfp4, head of 512": {"name": "nvfp4", "size": 512},
    "mxfp4, head of 96, pages of 5": {"name": "mxfp4", "size": 96, "page": 5},
    "mxfp4, head of 512, query in shared memory": {"name": "mxfp4", "size": 512},
    "nvfp4, 16 query heads per KV head": {"name": "nvfp4", "query_heads": 16 * HEADS},
    "nvfp4, several new tokens": {"name": "nvfp4", "new": (4, 1, 3), "max_queries": 4},
    "nvfp4, one sequence": {"name": "nvfp4", "cached": (700,), "new": (1,)},
    "mxfp4, fixed splits": {"name": "mxfp4", "cached": (700, 40, 1), "schedule": {"batch_invariant": True}},
    "nvfp4, f16 queries on sm_80": {"name": "nvfp4", "target": "sm_80", "query": np.float16},
}


@pytest.mark.parametrize("name", DECODES)
def test_the_decode_kernel_reads_packed_elements(name: str) -> None:
    """The bar is for an output in f32: elements and scales are exact, weights have the 11 bits of f16."""
    case = {
        "size": SIZE, "query_heads": 8, "page": PAGE, "cached": (5, 40, 130), "new": (1, 1, 1), "max_queries": 1,
        "schedule": {}, "target": "sm_90a", "query": ml_dtypes.bfloat16, **DECODES[name],
    }  # fmt: skip
    rng, record, size = np.random.default_rng(6), FORMATS[case["name"]], case["size"]
    found = collection_of(record, case["cached"], case["new"], rng, size, page=case["page"])
    offsets = offsets_of(case["new"])
    heads = (HEADS, HEADS, case["query_heads"])
    key, value, query = (rng.standard_normal((int(offsets[-1]), n, size)).astype(case["query"]) for n in heads)
    bounds = {"kind": "decode", "max_queries": case["max_queries"], "max_batch": 4 if len(case["cached"]) > 1 else 1}
    out = np.full(query.shape, np.nan, np.float32)
    with kv.emulated(case["target"]):
        kv.ops.append(found, 1, key, value, offsets)
        kv.ops.attention(found, 1, query, offsets, scale=size**-0.5, out=out, schedule={**bounds, **case["schedule"]})
    want = attended(found, 1, query, offsets)
    largest = np.abs(numerics.rotated(want.astype(np.float32), record.rotation)).max()
    np.testing.assert_allclose(out, want, atol=1e-3 * largest, rtol=0)
