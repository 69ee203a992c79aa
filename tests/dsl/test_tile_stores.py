# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows of a tile that are stored to a cache with scales are quantized as kv.ops.append quantizes them, bit by bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kvarn as kv

HEADS, SIZE, TOKENS, PAGE = 2, 64, 40, 16
ELEMENTS = {"f8e4m3": ml_dtypes.float8_e4m3fn, "i8": np.int8}
RECORDS = {
    "f8e4m3, a scale per head": kv.Record("f8e4m3", "f32", SIZE),
    "i8, groups of 16": kv.Record("i8", "f16", 16),
    "4 bits with zeros": kv.Record("u4", "f16", 32, zero=True),
    "mxfp4, rotated": kv.Record("e2m1", "f8e8m0", 32, rotation=32),
}


def collection_of(record):
    """An empty collection of one sequence, and its arrays of elements and of scales."""
    outer = (4, 2, 1, PAGE, HEADS)
    rows, (dtype, scales) = record.row_shape(SIZE)[1], record.scales_shape(SIZE)
    held = (
        np.zeros((*outer, rows), ELEMENTS.get(record.elements.name, np.uint8)),
        np.zeros((*outer, scales), dtype.numpy),
    )
    table = np.array([[2, 0, 3, 1]], np.uint32)
    made = kv.PagedKVCacheCollection(held[0], np.zeros(1, np.uint32), table, TOKENS, 64, held[1], record=record)
    return made, held


@kv.kernel(block=128)
def stored(x: kv.Buffer[kv.bf16, 3], cache: kv.KVCache):
    h, i = kv.block_id.x, kv.tile_index(64)
    cache.store_tile_rows(0, h, 0, x.load_rows(i, h, mask=i < x.shape[0], columns=SIZE), count=x.shape[0])


@pytest.mark.parametrize("place", ["host", "sm_90a"])
@pytest.mark.parametrize("name", RECORDS)
def test_rows_are_quantized_as_append_does(name, place):
    record = RECORDS[name]
    x = np.random.default_rng(0).standard_normal((TOKENS, HEADS, SIZE)).astype(ml_dtypes.bfloat16)
    x[3], x[5, 1, :7] = 0, 300
    (want, theirs), (got, mine) = (collection_of(record) for _ in range(2))
    kv.ops.append(want, 0, x, x, np.array([0, TOKENS], np.uint32))
    cache = got.get_key_cache(0)
    if place == "host":
        stored[HEADS, 128](x, cache)
    else:
        report = kv.compile(stored, kv.Buffer[kv.bf16, 3], cache, target=place).emulate(HEADS, 128, x, cache)
        assert not report.hazards
    for a, b in zip(mine, theirs, strict=True):
        assert b[:, 0].any()
        np.testing.assert_array_equal(a[:, 0].view(np.uint8), b[:, 0].view(np.uint8))
