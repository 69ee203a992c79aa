# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""TMA tiles of caches and operands as descriptors say them, and members that a kind does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.member_pools import cache_of, made

import kvarn as kv


@pytest.mark.parametrize("name", [
    "create_tma_tile", "create_ragged_tma_tile", "create_gather4_tma_tile", "create_rope_tma_tile",
    "create_rope_gather4_tma_tile",
])  # fmt: skip
def test_tiles_of_an_operand_are_those_of_its_cache(name):
    latent = made("mla", dtype="f8e4m3", head_size=32, page_size=8).collection
    cache = cache_of(latent if "rope" in name or "gather" in name else made("paged", head_size=64).collection)
    options = {
        "create_ragged_tma_tile": {"before_is_mapped": True}, "create_rope_tma_tile": {"swizzle": "none"},
    }.get(name, {})  # fmt: skip
    of_cache, of_operand = (getattr(x, name)(**TILES[name], **options) for x in (cache, kv.KVCacheMHAOperand(cache)))
    assert of_operand.spec == of_cache.spec
    assert of_operand.description == of_cache.description
    assert of_operand.readonly, "operands are not written"


def test_tiles_of_a_continuous_cache_describe_its_rows():
    c = made("continuous", num_heads=1, head_size=64).collection
    cache = cache_of(c, 1, "value")
    rows, base = cache.num_kv_rows(), cache.blocks.ctypes.data
    ragged = cache.create_ragged_tma_tile(tile_rows=8, before_is_mapped=True).description
    assert (ragged.dims, ragged.strides) == ((rows + 1, 1, 8, 64), (64, 64, 64, 1))
    assert ragged.base == base - 8 * 64 * 2
    gathered = cache.create_gather4_tma_tile(tile_width=32, tile_stride=64).description
    assert (gathered.dims, gathered.strides, gathered.base) == ((rows, 64), (64, 1), base)


def test_gathers_of_operands_over_buffers_describe_their_rows():
    data, offsets = np.zeros((3, 5, 1, 64), np.float16), np.array([0, 4, 15], np.int32)
    dense, rows = kv.LayoutTensorMHAOperand(data), kv.RaggedMHAOperand(data.reshape(15, 1, 64), offsets)
    for operand in (dense, rows):
        tile = operand.create_gather4_tma_tile(tile_width=32).description
        assert (tile.dims, tile.strides, tile.base) == ((15, 64), (64, 1), data.ctypes.data)


# --- what a kind does not have ---------------------------------------------------------------------

SCALE_MEMBERS = ("load_scale", "store_scale", "load_quantized", "scales_block_paged_ptr")
ROW_MEMBERS = ("get_tma_row", "num_kv_rows", "row_idx", "populate")


def test_members_that_a_kind_does_not_have_raise():
    flat, fa3 = cache_of(made("continuous").collection), cache_of(made("fa3").collection)
    args = {"get_tma_row": (0,), "num_kv_rows": (), "row_idx": (0, 0), "populate": (0, 0, 8)}
    for cache in (flat, fa3):
        assert cache.scales is None
        assert cache.scales_raw_ptr() is None
        for name in SCALE_MEMBERS:
            value = (np.float32(1),) if name == "store_scale" else ()
            with pytest.raises(TypeError, match=f"{name.replace('quantized', 'raw')}: needs a quantized cache"):
                getattr(cache, name)(0, 0, 0, 0, *value)
    for name in ROW_MEMBERS:
        with pytest.raises(TypeError, match=f"{name}: an fa3 cache has no rows"):
            getattr(fa3, name)(*args[name])


TILES: dict[str, dict[str, Any]] = {
    "create_tma_tile": {"tile_rows": 8}, "create_ragged_tma_tile": {"tile_rows": 8},
    "create_gather4_tma_tile": {"tile_width": 32},
    "create_rope_tma_tile": {"tile_rows": 8, "rope": 8, "padded_depth": 16},
    "create_rope_gather4_tma_tile": {"padded_depth": 16, "tile_width": 8},
}  # fmt: skip
