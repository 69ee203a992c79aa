# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The suites of the cache operations on a GPU, over torch tensors."""

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
from reference import cache_rows, model, places
from reference.random_caches import clone, random_problem, random_values

import kvarn as kv

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


SUITES = (
    "ops.test_cache_operations", "ops.test_index_tables", "ops.test_shared_prefixes", "ops.test_attention_operands",
    "ops.test_mla", "ops.test_attention_8_bits", "ops.test_attention_pages", "ops.test_page_choice",
    "ops.test_indexer", "ops.test_block_mask",
)  # fmt: skip


def _for_a_gpu(name: str, test: Any) -> bool:
    """Whether a test of a suite is for any place, a real GPU too."""
    return name.startswith("test_") and "place" in inspect.signature(test).parameters


pytest.register_assert_rewrite(*SUITES)
for suite in map(importlib.import_module, SUITES):
    globals().update({n: f for n, f in vars(suite).items() if _for_a_gpu(n, f)})


ROWS = {
    f"{table}: {row.rule}": row for table, of in cache_rows.TABLES.items() for row in of if "sm_" not in row.kernels
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_tables(place, name):
    ROWS[name].case.check(place)


@pytest.mark.parametrize("tokens", [8192, 300])
@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
@pytest.mark.parametrize("scale", [None, "f32"])
def test_large_batches(place, tokens, dtype, scale):
    if scale and dtype == "bf16":
        pytest.skip("scales are for 8-bit caches")
    rng = np.random.default_rng(20)
    new = np.bincount(rng.integers(0, 40, tokens), minlength=40)
    problem = random_problem(
        rng, "paged", dtype, num_heads=8, head_size=128, num_layers=1, cached=rng.integers(0, 200, 40), new=new,
        scale_dtype=scale,
    )  # fmt: skip
    found, expected = place.collection(problem.collection), problem.collection
    key, value = (random_values(rng, (tokens, 8, 128), kv.bf16) for _ in range(2))
    kv.ops.append(found, 0, place.put(key), place.put(value), place.put(problem.row_offsets))
    model.append(expected, 0, key, value, problem.row_offsets)
    places.assert_close(place, found, expected, most=0.001)


def test_torch_slices_keep_their_strides():
    """Key and value as slices of a fused projection, at any alignment."""
    rng, place = np.random.default_rng(21), places.Torch()
    for shift in (0, 2, 3):
        problem = random_problem(rng, "paged", "f16", cached=[5, 0], new=[3, 7])
        c, found = problem.collection, place.collection(problem.collection)
        fused = random_values(rng, (problem.tokens, 100 + shift), c.dtype)
        on_gpu = place.put(fused)
        views = [x[:, shift + n * 32 : shift + n * 32 + 32].reshape(-1, 2, 16) for x in (on_gpu, fused) for n in (1, 2)]
        assert isinstance(views[0], torch.Tensor)
        assert views[0].untyped_storage().data_ptr() == on_gpu.untyped_storage().data_ptr()
        kv.ops.append(found, 1, views[0], views[1], place.put(problem.row_offsets))
        model.append(c, 1, views[2], views[3], problem.row_offsets)
        places.assert_same(place, found, c)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("layer", [None, 1])
def test_pages_are_swapped_out_to_the_host_and_in_again(pinned, layer):
    rng, place = np.random.default_rng(23), places.Torch()
    options = {"cached": [40, 70], "new": [1, 1], "num_layers": 3, "scale_dtype": "f32", "granularity": 8}
    pool, host = (random_problem(rng, "paged", "f8e4m3", spare_pages=n, **options).collection for n in (3, 9))
    found, expected = place.collection(pool), clone(host)

    def on_host(array):
        tensor = place.put(np.asarray(array)).cpu()
        return tensor.view(torch.uint8).pin_memory().view(tensor.dtype) if pinned else tensor

    parts = [on_host(x) for x in (host.blocks, host.cache_lengths, host.lookup_table)]
    swap = kv.PagedKVCacheCollection(*parts, 1, 71, on_host(host.scales), 8)
    ids = rng.permutation(pool.num_blocks)[:4], rng.permutation(host.num_blocks)[:4]
    kv.ops.transfer_pages(found, swap, *ids, layer)
    model.transfer_pages(pool, expected, *ids, layer)
    torch.cuda.synchronize()
    for tensor, array in ((swap.blocks, expected.blocks), (swap.scales, expected.scales)):
        places.near(place.get(tensor.cuda()), np.asarray(array))
    found.blocks.view(torch.uint8).zero_()
    found.scales.zero_()
    kv.ops.transfer_pages(swap, found, ids[1], ids[0], layer)
    back = clone(pool)
    for buffer in (back.blocks, back.scales):
        buffer[...] = 0
    model.transfer_pages(expected, back, ids[1], ids[0], layer)
    places.assert_same(place, found, back)


def test_pages_are_swapped_out_in_a_graph_by_ids_on_the_gpu():
    """Pinned memory is written where it is: what the ids say when the graph is replayed is what is moved."""
    rng, place = np.random.default_rng(24), places.Torch()
    pool, host = (
        random_problem(rng, "paged", "f16", cached=[40, 70], new=[1, 1], num_layers=3, spare_pages=n).collection
        for n in (3, 9)
    )
    found, expected = place.collection(pool), clone(host)
    parts = [place.put(np.asarray(x)).cpu().pin_memory() for x in (host.blocks, host.cache_lengths, host.lookup_table)]
    swap = kv.PagedKVCacheCollection(*parts, 1, 71)
    ids = [torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(2)]
    kv.ops.transfer_pages(found, swap, *ids)
    model.transfer_pages(pool, expected, [0], [0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv.ops.transfer_pages(found, swap, *ids)
    for _ in range(2):
        drawn = [rng.permutation(c.num_blocks)[:4].astype(np.int32) for c in (pool, host)]
        for tensor, array in zip(ids, drawn, strict=True):
            tensor.copy_(torch.from_numpy(array))
        graph.replay()
        model.transfer_pages(pool, expected, *drawn)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(places.bits(parts[0].numpy()), places.bits(np.asarray(expected.blocks)))


def test_a_step_can_be_captured_and_replayed():
    """Append, rope_append and the lengths in one CUDA graph, replayed over other data."""
    rng, place = np.random.default_rng(22), places.Torch()
    problem = random_problem(rng, "paged", "bf16", cached=[5, 0, 9], new=[1, 1, 1], page_size=8)
    c, found = problem.collection, place.collection(problem.collection)
    offsets = place.put(problem.row_offsets)
    data = [random_values(rng, (3, 2, 16), kv.bf16) for _ in range(3)]
    tensors = [place.put(x) for x in data]
    freqs = rng.standard_normal((32, 16)).astype(np.float32)
    angles, out = place.put(freqs), torch.empty_like(tensors[0])

    def step():
        kv.ops.append(found, 0, tensors[1], tensors[2], offsets)
        kv.ops.rope_append(found, 1, *tensors, offsets, angles, query_out=out)

    step()  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    fresh = [random_values(rng, (3, 2, 16), kv.bf16) for _ in range(3)]
    for tensor, x in zip(tensors, fresh, strict=True):
        tensor.copy_(place.put(x))
    graph.replay()
    model.append(c, 0, fresh[1], fresh[2], problem.row_offsets)
    rotated = model.rope_append(c, 1, *fresh, problem.row_offsets, freqs)
    places.assert_close(place, found, c)
    places.near(place.get(out), rotated.astype(out_dtype()))


def out_dtype():
    return kv.bf16.numpy


def test_the_current_stream_is_used():
    lengths, offsets = (
        torch.zeros(4, dtype=torch.int32, device="cuda"),
        torch.arange(5, dtype=torch.int32, device="cuda"),
    )
    stream = torch.cuda.Stream()
    kv.ops.increment_cache_lengths(lengths, offsets)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        kv.ops.increment_cache_lengths(lengths, offsets)
        on_stream = torch.cuda.Event()
        on_stream.record()
    assert not on_stream.query()  # behind the sleep, on that stream
    kv.ops.increment_cache_lengths(lengths, offsets, stream=stream)
    torch.cuda.synchronize()
    assert lengths.tolist() == [3, 3, 3, 3]
