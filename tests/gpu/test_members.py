# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every member of the caches and collections, and tiles populated from their tables, on a GPU, over torch tensors."""

import importlib

import numpy as np
import pytest

import kvarn as kv

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


SUITE = "caches.test_members"
pytest.register_assert_rewrite(SUITE)
suite = importlib.import_module(SUITE)
globals().update({n: f for n, f in vars(suite).items() if n.startswith("test_")})

populate = importlib.import_module("caches.test_populate")


@pytest.mark.parametrize(("tile", "page_size", "alignment", "table"), populate.SHAPES)
def test_rows_are_those_of_the_definition(place, tile, page_size, alignment, table):
    host = populate.pool(page_size)
    parts = [place.put(np.ascontiguousarray(b)) for b in (host.blocks, *host.buffers[1:])]
    cache = kv.PagedKVCache(*parts, 1, 1024)
    out = place.put(np.full((2, 1024 // tile * tile), -1, np.int32))
    populate.kernel_of(tile, alignment)[(2, 1024 // tile), 32](cache, out, 0)
    packed = kv.PagedKVCache(np.ascontiguousarray(host.blocks), *host.buffers[1:], 1, 1024)
    np.testing.assert_array_equal(place.get(out), populate.expected(packed, out.shape[1]))


def test_a_table_that_starts_between_is_refused(place):
    host = populate.pool(16)
    blocks, lengths, table = (place.put(np.ascontiguousarray(b)) for b in (host.blocks, *host.buffers[1:]))
    wide = torch.zeros((2, table.shape[1] + 1), dtype=torch.int32, device="cuda")
    wide[:, 1:] = table
    out = place.put(np.zeros((2, 128), np.int32))
    for shifted in (wide[:, 1:], wide):
        with pytest.raises(ValueError, match="lookup table whose rows start at multiples of 16 bytes"):
            populate.kernel_of(128, 128)[(2, 1), 32](kv.PagedKVCache(blocks, lengths, shifted, 1, 1024), out, 0)
