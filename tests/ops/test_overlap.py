# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What an operation writes shares no memory with what it reads: every operation, every pair of operands."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import numpy as np
import pytest
from reference.attention_functions import problem_of, query_of

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.dispatch import Operation, _operations
from kvarn.runtime import buffers, overlap

IN_PLACE = {
    "kv.sliced_add": {("out", "a"), ("out", "b")},
    "kv.merge_attention": {("out", "a"), ("out", "b")},
    "kv.rope": {("query_out", "query")},
    "kv.rope_padded": {("query_out", "query")},
    "kv.qk_norm": {("query_out", "query"), ("index_query_out", "index_query")},
    "kv.rope_append": {("query_out", "query")},
    "kv.remap_sparse_indices": {("out", "logical")},
    "kv.transfer_pages": {("destination_pool", "source_pool")},
}
UNREAD = {"kv.block_mask": {"query"}}


def declared() -> list[Operation]:
    return sorted((o for o in _operations if o.name.startswith("kv.")), key=lambda o: o.name)


@pytest.mark.whole
@pytest.mark.parametrize("operation", declared(), ids=lambda o: o.name)
def test_every_pair_of_a_written_and_a_read_buffer_is_apart_but_for_the_documented_ones(operation):
    assert set(operation._in_place) == IN_PLACE.get(operation.name, set())
    assert set(operation._unread) == UNREAD.get(operation.name, set())
    memory = np.zeros((4, 8), np.float32)
    names = [n for n in operation.operands if n not in operation._handles]
    view = buffers.view(memory)
    apart = overlap.Apart("title", [(n, view) for n in names], range(len(names)), operation._written,
                          operation._in_place, operation._unread)  # fmt: skip
    for written in operation._written & set(names):
        for read in set(names) - {written} - set(operation._unread):
            values = [1 << 20 | i << 12 for i in range(len(names))]  # each in a page of its own
            apart(values)
            values[names.index(read)] = values[names.index(written)] + 4
            with pytest.raises(ValueError, match="must not share memory"):
                apart(values)
            values[names.index(read)] = values[names.index(written)]
            if (written, read) in operation._in_place:
                apart(values)
            else:
                with pytest.raises(ValueError, match="must not share memory"):
                    apart(values)


def test_memory_is_shared_as_numpy_finds_it():
    rng, memory = np.random.default_rng(0), np.zeros(1 << 12, np.uint8)
    strides = [0, 1, 2, 3, 4, 8, 12, 16, 24, 32, 40, -4, -8, -24]
    found = []
    for _ in range(4000):
        rank, distance = rng.integers(1, 4), int(rng.integers(-200, 201))
        extents = [overlap.Extent(tuple(rng.integers(1, 6, rank).tolist()), tuple(rng.choice(strides, rank).tolist()))
                   for _ in range(2)]  # fmt: skip
        arrays = [np.lib.stride_tricks.as_strided(memory[(1 << 11) + at :], e.shape, e.strides)
                  for e, at in zip(extents, (0, distance), strict=True)]  # fmt: skip
        found.append(overlap.share(*extents, distance))
        assert found[-1] == np.shares_memory(*arrays), (extents, distance)
    assert 0 < sum(found) < len(found)


def test_rows_between_those_of_another_buffer_are_apart():
    memory = np.zeros((8, 2, 16), np.float32)
    even, odd = (buffers.view(memory[:, i]) for i in range(2))
    apart = overlap.Apart("title", [("out", even), ("a", odd)], (0, 1), ("out",))
    apart([even.data, odd.data])
    with pytest.raises(ValueError, match="out must not share memory with a, which is read"):
        apart([even.data, odd.data + 4])


def attended(name: str) -> Any:
    """A call of attention whose output is an operand that it reads."""
    rng, problem = problem_of(7, dtype="f32", num_heads=2)
    query, c = query_of(rng, problem, 1).astype(np.float32), cast(Any, problem.collection)
    tokens, heads = query.shape[:2]
    table = np.zeros(query.size, np.int32)
    array = np.zeros(query.shape, np.float32)
    prior = np.zeros(query.shape, np.float32), np.zeros((tokens, heads), np.float32)
    pool = np.asarray(c.blocks).reshape(-1)[: query.size].reshape(query.shape)
    outputs = {
        "query": query, "score": array, "mask": table.view(np.float32).reshape(query.shape), "prior": prior[0],
        "blocks": pool,
    }  # fmt: skip
    options: dict[str, Any] = {"out": outputs[name]}
    if name == "score":
        options["score"] = (lambda s, b, h, q, k, z: s + z[0, h, k], array)
    if name == "mask":
        options["mask"] = (lambda b, h, q, k, z: k <= z[q], table)
    if name == "prior":
        options["prior"] = prior
    return lambda: kv.ops.attention(c, 0, query, problem.row_offsets, **options)


@pytest.mark.parametrize("target", ["host", "sm_90a"])
@pytest.mark.parametrize("name", ["query", "score", "mask", "prior", "blocks"])
def test_attention_refuses_an_output_that_it_reads(name, target):
    call = attended(name)
    place = contextlib.nullcontext() if target == "host" else kv.emulated(target)
    with place, pytest.raises(ValueError, match="out must not share memory with"):
        call()


def test_an_output_is_no_table_of_the_collection():
    _, problem = problem_of(7, dtype="f32", num_heads=2)
    c = cast(Any, problem.collection)
    handle = ("collection", c.cache_spec)
    for name in ("cache_lengths", "lookup_table"):
        view = buffers.view(getattr(c, name))
        apart = overlap.Apart("title", [("out", view), ("collection", handle)], (0, 1), ("out",))
        apart([view.data + 4 * view.size, c.fields()])
        with pytest.raises(ValueError, match=r"out must not share memory with (lengths|lookup_table) of collection"):
            apart([view.data, c.fields()])


def test_rows_that_are_appended_lie_outside_of_the_pool():
    rng, problem = problem_of(8, dtype="f32", num_heads=2)
    c = cast(Any, problem.collection)
    tokens = int(np.asarray(problem.row_offsets)[-1])
    key = rng.standard_normal((tokens, 2, 32)).astype(np.float32)
    inside = np.asarray(c.blocks).reshape(-1)[: key.size].reshape(key.shape)
    kv.ops.append(c, 0, key, key, problem.row_offsets)
    with pytest.raises(ValueError, match="collection must not share memory with value"):
        kv.ops.append(c, 0, key, inside, problem.row_offsets)


def test_regions_of_a_quantized_collection_are_its_pool_its_scales_and_its_tables():
    rng = np.random.default_rng(0)
    params = kv.KVCacheStaticParams(2, 32)
    manager = kv.PagedKVCacheManager(params=params, num_layers=3, num_pages=4, page_size=16, dtype="f8e4m3",
                                     scale_dtype=dtypes.f32, quantization_granularity=16)  # fmt: skip
    manager.claim("r", [int(x) for x in rng.integers(9, size=5)])
    manager.alloc("r")
    c = manager.runtime_inputs(["r"]).collection
    assert c is not None
    found = {name: (at, extent) for name, at, extent in overlap.regions("collection", c.cache_spec, c.fields())}
    for name, array in (("blocks", c.blocks), ("scales", c.scales), ("lookup_table", c.lookup_table)):
        view = buffers.view(array)
        at, extent = found[name]
        assert at == view.data
        assert extent.ends == (0, np.asarray(array).nbytes)


# --- kernels -----------------------------------------------------------------------------------------


@kv.kernel
def of_types(x: kv.Buffer[kv.i32, 1], y: kv.Buffer[kv.f32, 1]):
    i = kv.thread_id.x
    before = x[i]
    y[i] = 3.0
    y[i + 8] = kv.f32(before)


@kv.kernel
def of_one_type(x: kv.Buffer[kv.f32, 1], y: kv.Buffer[kv.f32, 1]):
    i = kv.thread_id.x
    before = x[i]
    y[i] = 3.0
    y[i + 8] = before


@kv.kernel
def declared_so(x: kv.ReadOnlyBuffer[kv.f32, 1], y: kv.Buffer[kv.f32, 1]):
    y[kv.thread_id.x] = x[kv.thread_id.x] * 2.0


@kv.kernel
def of_a_cache(cache: Any, y: kv.Buffer[kv.f32, 1], n: kv.Buffer[kv.i32, 1]):
    i = kv.thread_id.x
    y[i] = kv.f32(cache.load(0, 0, 0, i))
    n[i] = kv.i32(cache.cache_length(0))


@kv.kernel
def into_a_cache(cache: Any, x: kv.ReadOnlyBuffer[kv.f32, 1]):
    i = kv.thread_id.x
    cache.store(0, 0, 0, i, x[i])


def kernel_calls() -> dict[str, tuple[Any, tuple[Any, ...], str]]:
    """Kernels, arguments, and what must not share memory with what; "" where nothing is wrong."""
    memory = np.zeros(64, np.float32)
    numbers, pool = memory.view(np.int32), np.zeros((4, 4, 1, 8), np.float32)
    lengths, own, table = np.zeros(8, np.int32), np.zeros(8, np.int32), np.zeros((1, 8), np.int32)
    cache, flat = cast(Any, kv.PagedKVCache)(pool, lengths[:1], table, 4, 16), pool.reshape(-1)
    return {
        "one memory of two types": (of_types, (numbers, memory), "y x"),
        "half of it": (of_types, (numbers[8:24], memory[:16]), "y x"),
        "the other half": (of_types, (numbers[16:32], memory[:16]), ""),
        "one memory of one type": (of_one_type, (memory, memory), ""),
        "a step of one type": (of_one_type, (memory[4:], memory[:32]), ""),
        "what is declared so": (declared_so, (memory, memory), "y x"),
        "what is declared so, in part": (declared_so, (memory[8:24], memory[:16]), "y x"),
        "what is declared so, apart": (declared_so, (memory[16:24], memory[:16]), ""),
        "a cache": (of_a_cache, (cache, memory, own), ""),
        "elements of a cache": (of_a_cache, (cache, flat[-8:], own), "y cache"),
        "lengths of a cache": (of_a_cache, (cache, memory, lengths), "n lengths of cache"),
        "a table of a cache": (of_a_cache, (cache, memory, table[0]), "n lookup_table of cache"),
        "into a cache": (into_a_cache, (cache, memory), ""),
        "of the cache itself": (into_a_cache, (cache, flat[:8]), "cache x"),
    }


@pytest.mark.parametrize("target", ["host", "sm_90a"])
@pytest.mark.parametrize("name", [*kernel_calls()])
def test_a_kernel_writes_nothing_that_its_code_takes_for_read_only(name, target):
    kernel, args, shared = kernel_calls()[name]
    place = contextlib.nullcontext() if target == "host" else kv.emulated(target)
    written, _, read = shared.partition(" ")
    how = f"{written} must not share memory with {read}, which the code takes for memory that nothing writes"
    with place:
        for _ in range(2):
            with pytest.raises(ValueError, match=how) if shared else contextlib.nullcontext():
                kernel[1, 8](*args)
    if target == "host":
        made = kernel.compiled_for(args)
        with pytest.raises(ValueError, match=how) if shared else contextlib.nullcontext():
            made.prepare(1, 8, *args)


def test_code_that_takes_nothing_for_read_only_may_write_it():
    memory = np.zeros(64, np.float32)
    with kv.pipeline(options={"plan-kv-access": "read-only=false"}):
        of_types[1, 8](memory.view(np.int32), memory)
    assert memory[:8].tolist() == [3.0] * 8
    assert memory[8:16].tolist() == [0.0] * 8
