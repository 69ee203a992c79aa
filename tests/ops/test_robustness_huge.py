# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pools whose elements a 32-bit offset cannot number: every operation finds the pages at their end.

The pool is mapped memory of which only the named pages are ever touched. What an operation does there is what it does
in a small pool that holds the same pages.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import pytest
from reference.attention_cases import queries, sentinel
from reference.kinds import MMA
from reference.places import Place, bits
from reference.random_caches import fill_cached, random_problem, random_values

import kvarn as kv
from kvarn.caches import PagedKVCacheCollection

LAYERS, LAYER = 64, 63
ELEMENTS = 5 * 2**30  # of a pool: more than 32 bits count


def mapped(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that become memory page by page, as they are touched."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(memory, dtype).reshape(shape)


class Pools:
    """A small pool, and a huge one with its pages spread over it, the null page last.

    ``empty`` makes a buffer of a shape and a NumPy dtype.
    """

    def __init__(self, place: Place, dtype: str, is_mla: bool = False, empty: Any = mapped) -> None:
        rng = np.random.default_rng(31)
        options: dict[str, Any] = {"scale_dtype": "f32", "granularity": 16} if dtype == "i8" else {}
        self.problem = random_problem(
            rng, "paged", dtype, num_heads=1, head_size=160 if is_mla else 64, num_layers=1, is_mla=is_mla,
            cached=[60, 0, 17], new=[1, 2, 2], **options,
        )  # fmt: skip
        fill_cached(rng, self.problem, self.problem.cached + self.problem.new)
        self.rng, self.place, small = rng, place, self.problem.collection
        count, page = small.num_blocks, LAYERS * int(np.prod(np.asarray(small.blocks).shape[1:]))
        pages = -(-ELEMENTS // page)
        far = np.arange(pages * 9 // 10, pages - 1)  # nearly all beyond 32 bits
        self.ids = np.concatenate([[1], np.sort(rng.choice(far, count - 2, replace=False)), [pages - 1]])
        self.blocks, self.scales = (
            None if array is None else self._spread(np.asarray(array), pages, empty)
            for array in (small.blocks, small.scales)
        )
        table = self.ids[np.asarray(small.lookup_table)].astype(np.uint32)
        rest = () if self.scales is None else (self.scales, small.quantization_granularity)
        parts = [place.put(x) for x in (np.asarray(small.cache_lengths), table)]
        parts += [small.max_seq_length, small.max_cache_length]
        self.far = PagedKVCacheCollection(self.blocks, *parts, *rest)
        self.near = place.collection(small)
        self.offsets = place.put(self.problem.row_offsets)

    def _spread(self, array: np.ndarray, pages: int, empty: Any) -> Any:
        huge = empty((pages, array.shape[1], LAYERS, *array.shape[3:]), array.dtype)
        for own, far in enumerate(self.ids.tolist()):
            huge[far, :, LAYER] = self.place.put(np.ascontiguousarray(array[own, :, 0]))
        return huge

    def assert_same(self) -> None:
        """The pages of the two pools hold the same bits, and the layer before holds nothing."""
        for near, far in zip((self.near.blocks, self.near.scales), (self.blocks, self.scales), strict=True):
            if near is None:
                continue
            small = self.place.get(near)
            for own, id_ in enumerate(self.ids.tolist()):
                np.testing.assert_array_equal(bits(self.place.get(far[id_, :, LAYER])), bits(small[own, :, 0]))
                assert not bits(self.place.get(far[id_, :, LAYER - 1])).any()


def check_writes(pools: Pools) -> None:
    """Append, rotation, norm, copies of tokens and of pages."""
    place, problem = pools.place, pools.problem
    dtype = problem.collection.dtype if problem.collection.scales is None else kv.bf16
    key, value = (place.put(random_values(pools.rng, (problem.tokens, 1, 64), dtype)) for _ in range(2))
    freqs, gamma = place.put(np.tile(np.array([0.6, 0.8], np.float32), (80, 32))), place.put(np.ones(64, np.float32))
    query = place.put(random_values(pools.rng, (problem.tokens, 1, 64), kv.bf16))
    for collection, layer, ids in ((pools.near, 0, np.arange(len(pools.ids))), (pools.far, LAYER, pools.ids)):
        kv.ops.append(collection, layer, key, value, pools.offsets)
        if collection.scales is None:
            kv.ops.rope(collection, layer, query, pools.offsets, freqs)
            kv.ops.rms_norm(collection.get_value_cache(layer), gamma, 1e-6, pools.offsets)
        kv.ops.convert(collection.get_value_cache(layer), collection.get_key_cache(layer))
        pairs = ids.astype(np.int32)[[len(ids) - 2, 0]], ids.astype(np.int32)[[1, len(ids) - 3]]
        kv.ops.copy_pages(collection, *map(place.put, pairs))
    pools.assert_same()


def check_reads(pools: Pools, kinds: list[dict[str, Any] | None]) -> None:
    """Attention of every kind, and rows gathered."""
    place, problem = pools.place, pools.problem
    query = queries(pools.rng, problem, 4)
    for kind in kinds:
        outs = []
        for collection, layer in ((pools.near, 0), (pools.far, LAYER)):
            out = place.put(sentinel(query))
            if problem.collection.is_mla:
                out = place.put(sentinel(query[..., :128]))
                kv.ops.mla_attention(
                    collection, layer, place.put(query), pools.offsets, value_size=128, out=out, schedule=kind
                )
            else:
                kv.ops.attention(collection, layer, place.put(query), pools.offsets, out=out, schedule=kind)
            outs.append(place.get(out))
        np.testing.assert_array_equal(bits(outs[1]), bits(outs[0]), str(kind))
        assert np.isfinite(outs[0].astype(np.float32)).all()
    slots = place.put(np.array([[59, 0, 31]], np.int32))
    begin = place.put(np.array([0, 1, 1, 1], np.uint32))
    rows = [place.put(np.zeros((1, 3, 1, query.shape[2]), problem.collection.dtype.numpy)) for _ in range(2)]
    for collection, layer, out in ((pools.near, 0, rows[0]), (pools.far, LAYER, rows[1])):
        kv.ops.gather(collection.get_key_cache(layer), slots, begin, out=out)
    np.testing.assert_array_equal(bits(place.get(rows[1])), bits(place.get(rows[0])))


def check_listed(pools: Pools, kinds: list[dict[str, Any] | None]) -> None:
    """Attention over latent rows that are listed by their places in the pool."""
    place, problem = pools.place, pools.problem
    query = queries(pools.rng, problem, 4)
    lengths = np.repeat(problem.cached + problem.new, problem.new)[:, None]
    tokens = np.array([0, 1, 18, 40, 60], np.int32)
    tokens = place.put(np.where(tokens < lengths, tokens, -1).astype(np.int32))
    for kind in kinds:
        outs = []
        for collection, layer in ((pools.near, 0), (pools.far, LAYER)):
            null = collection.num_blocks - 1
            rows = kv.ops.remap_sparse_indices(tokens, pools.offsets, collection.lookup_table, 16, null)
            out = place.put(sentinel(query[..., :128]))
            kv.ops.mla_attention(
                collection, layer, place.put(query), pools.offsets, value_size=128, indices=rows, out=out, schedule=kind
            )
            outs.append(place.get(out))
        np.testing.assert_array_equal(bits(outs[1]), bits(outs[0]), str(kind))
        assert np.isfinite(outs[0].astype(np.float32)).all()


KINDS: list[dict[str, Any]] = [{"kind": "simt"}, MMA, {"kind": "decode", "max_queries": 2}]


@pytest.mark.parametrize("dtype", ["bf16", "i8"])
def test_writes_reach_the_end_of_a_huge_pool(place, dtype):
    check_writes(Pools(place, dtype))


@pytest.mark.parametrize("dtype", ["bf16", "i8"])
def test_attention_reads_the_end_of_a_huge_pool(place, dtype):
    kinds = [None] if place.name == "host" else KINDS if dtype == "bf16" else KINDS[:2]
    check_reads(Pools(place, dtype), kinds)


def test_attention_over_latent_rows_reads_the_end_of_a_huge_pool(place):
    check_reads(Pools(place, "bf16", True), [None])


def test_listed_rows_reach_the_end_of_a_huge_pool(place):
    check_listed(Pools(place, "bf16", True), [None] if place.name == "host" else [{"kind": "simt"}, {"kind": "latent"}])
