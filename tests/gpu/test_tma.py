# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The suite of tiles copied by the tensor memory accelerator on a GPU, over torch tensors."""

import importlib

import numpy as np
import pytest
from reference import places, tma_kernels as kernels

import kvarn as kv
from kvarn.runtime import device

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SUITE = "caches.test_tma_copies"
# Gathers and pairs are of sm_100a; orders and mistakes are the interpreter's.
NOT_HERE = ("gather", "pair", "mistakes", "tile_after_tile")
pytest.register_assert_rewrite(SUITE)
suite = importlib.import_module(SUITE)
globals().update({
    n: f for n, f in vars(suite).items() if n.startswith("test_") and not any(word in n for word in NOT_HERE)
})  # fmt: skip


@pytest.fixture(autouse=True)
def _needs_tma():
    if device.device(0).capability < (9, 0):
        pytest.skip("the GPU has no tensor memory accelerator")


def test_rows_beyond_2_to_31(place):
    """2,048 rows from page to page, 2**20 + 8 pages: the last page's rows are past what an int32 counts."""
    pages, layers, page_size, size = 2**20 + 8, 64, 16, 16
    needed = pages * 2 * layers * page_size * size
    if torch.cuda.mem_get_info()[0] < needed + 2**30:
        pytest.skip(f"needs {needed >> 30} GiB of free memory")
    blocks = torch.empty((pages, 2, layers, page_size, 1, size), dtype=torch.int8, device="cuda")
    mine = torch.arange(page_size * size, dtype=torch.int32, device="cuda").to(torch.int8).view(page_size, 1, size)
    blocks[-1].fill_(99)
    blocks[0].fill_(55)
    blocks[-1, 1, 63] = mine
    table = torch.full((1, 24), pages - 1, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([16], dtype=torch.int32, device="cuda")
    cache = kv.PagedKVCacheCollection(blocks, lengths, table, 1, 16).get_value_cache(63)
    assert (pages - 1) * 2 * layers * page_size > 2**31
    map = cache.create_tma_tile("none", tile_rows=16)
    out = torch.zeros((1, 16, size), dtype=torch.int8, device="cuda")
    place.launch(kernels.copy_tile, 1, kernels.THREADS, kv.KVCacheMHAOperand(cache), map, out, 0, 0, 16, 0, 16, "zero")
    np.testing.assert_array_equal(place.get(out)[0], place.get(mine)[:, 0])
    with pytest.raises(ValueError, match=r"rows must be below 2\*\*31"):
        cache.create_tma_tile("none", tile_rows=16, paged=False)


def test_a_box_goes_to_every_block_of_a_cluster(place):
    """Each of two blocks loads half of a tile for both; each barrier counts what comes to it."""
    c = suite.pool(head_size=128)
    cache = place.collection(c).get_value_cache(2)
    map = cache.create_tma_tile(tile_rows=16)
    out = place.put(np.zeros((2, 64, 128), kv.bf16.numpy))
    place.launch(kernels.copy_to_both, 2, kernels.THREADS, cache, map, out, 0, 1, 64)
    expected = suite.expected_tile(c.get_value_cache(2), 1, 0, 0, 64, 64, 0, map)
    for rank in range(2):
        np.testing.assert_array_equal(places.bits(place.get(out))[rank], expected, f"block {rank}")


def test_a_descriptor_serves_prepared_launches_and_keeps_its_pool(place):
    c = suite.pool()
    cache = place.collection(c).get_key_cache(1)
    map = cache.create_tma_tile(tile_rows=16)
    assert map.device == ("cuda", 0)
    assert map.buffers[0] is cache.buffers[0]
    operand, out = kv.KVCacheMHAOperand(cache), place.put(np.zeros((2, 16, 64), kv.bf16.numpy))
    args = (operand, map, out, 0, 16, 16, 0, 16, "zero")
    made = kv.compile(kernels.copy_tile, *kernels.copy_tile.specs_of(args))
    run = made.prepare(2, kernels.THREADS, *kernels.copy_tile.passed(args))
    out.zero_()
    run()
    for head in range(2):
        expected = suite.expected_tile(c.get_key_cache(1), head, 0, 16, 16, 16, 0, map)
        np.testing.assert_array_equal(places.bits(place.get(out))[head], expected)
