# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.transfer_pages: between pools of one device, and to and from the host by a stand-in for the driver."""

from __future__ import annotations

import contextlib
import ctypes
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import Interpreted, Place, assert_same
from reference.random_caches import bits, clone, random_problem

import kvarn as kv
from kvarn.runtime import buffers, device, driver, transfers

POOLS: dict[str, dict[str, Any]] = {
    "paged f32": {"kind": "paged", "dtype": "f32", "page_size": 4},
    "paged odd": {"kind": "paged", "dtype": "bf16", "page_size": 1, "num_heads": 3, "head_size": 5},
    "continuous f16": {"kind": "continuous", "dtype": "f16"},
    "fa3 bf16": {"kind": "fa3", "dtype": "bf16"},
    "quantized": {"kind": "paged", "dtype": "f8e4m3", "scale_dtype": "f32", "granularity": 8},
    "mla": {"kind": "paged", "dtype": "bf16", "num_heads": 1, "head_size": 72, "is_mla": True, "page_size": 32},
}


def two_pools(shape: str, seed: int = 1) -> tuple[Any, Any]:
    """Pools of one spec with other pages and other content."""
    rng, options = np.random.default_rng(seed), {"cached": [20, 10], "new": [3, 1], "num_layers": 3, **POOLS[shape]}
    return tuple(random_problem(rng, spare_pages=n, **options).collection for n in (5, 2))


def ids_of(source: Any, destination: Any) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of which the last four are skipped."""
    n, m = source.num_blocks, destination.num_blocks
    return (np.array([0, 1, n - 1, 2, n, -1, 0, 1], np.int32), np.array([m - 1, 0, 1, 2, 3, 3, m, -2], np.int32))


# --- to and from the host --------------------------------------------------------------------------


class Driver:
    """Copies in host memory what a GPU's driver would copy, and remembers how."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, name: str, destination: int, source: int, count: int, stream: int) -> None:
        self.calls.append(name)
        ctypes.memmove(destination, source, count)


@pytest.fixture
def stand_in(monkeypatch):
    """A GPU whose memory is the host's."""
    made = Driver()

    class Gpu:
        @contextlib.contextmanager
        def active(self):
            yield

        def check_stream(self, stream):
            assert stream == 7

    class Bindings:
        CUstream = int

    monkeypatch.setattr(driver, "call", made.call)
    monkeypatch.setattr(driver, "require", lambda: Bindings)
    monkeypatch.setattr(device, "device", lambda ordinal: Gpu())
    return made


def on_gpu(collection: Any) -> Any:
    """The collection over the same memory, said to be a GPU's."""

    def moved(array: Any) -> Any:
        return buffers.view(np.asarray(array))._replace(device=("cuda", 0))

    parts = [moved(p) for p in (collection.blocks, collection.cache_lengths, collection.lookup_table)]
    scales = () if collection.scales is None else (moved(collection.scales), collection.quantization_granularity)
    return type(collection)(*parts, collection.max_seq_length, collection.max_cache_length, *scales)


@pytest.mark.parametrize("shape", POOLS)
@pytest.mark.parametrize("layer", [None, 2])
@pytest.mark.parametrize("to_host", [True, False])
def test_pages_go_to_the_host_and_back(stand_in, shape, layer, to_host):
    source, destination = two_pools(shape, 2)
    layer = None if "fa3" in shape else layer
    before, expected, ids = clone(source), clone(destination), ids_of(source, destination)
    model.transfer_pages(source, expected, *ids, layer)
    pair = (on_gpu(source), destination) if to_host else (source, on_gpu(destination))
    kv.ops.transfer_pages(*pair, [int(i) for i in ids[0]], ids[1].astype(np.int64), layer, stream=7)
    assert set(stand_in.calls) == {"cuMemcpyDtoHAsync" if to_host else "cuMemcpyHtoDAsync"}
    assert_same(Place(), destination, expected)
    assert_same(Place(), source, before)


def test_neighbouring_pages_are_one_copy(stand_in):
    source, destination = two_pools("paged f32", 3)
    pages = np.arange(4)
    kv.ops.transfer_pages(on_gpu(source), destination, pages + 1, pages, stream=7)
    assert stand_in.calls == ["cuMemcpyDtoHAsync"]
    np.testing.assert_array_equal(bits(destination.blocks[:4]), bits(source.blocks[1:5]))
    stand_in.calls.clear()
    kv.ops.transfer_pages(on_gpu(source), destination, pages, pages, 0, stream=7)
    assert len(stand_in.calls) == 8  # keys and values of one layer lie apart


@pytest.mark.parametrize("shape", ["paged f32", "paged odd", "quantized", "fa3 bf16"])
@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("ids_on", ["host", "gpu"])
def test_many_small_runs_are_one_kernel(stand_in, monkeypatch, shape, to_host, ids_on):
    """Where the GPU reaches the host's memory: the same bytes, no copy of the driver, ids from the host or the GPU."""
    source, destination = two_pools(shape, 4)
    expected, ids = clone(destination), ids_of(source, destination)
    ids = ids[0].astype(np.int64), ids[1].astype(np.int64)
    ids[0][4] = 2**32  # 0 in 32 bits
    model.transfer_pages(source, expected, *ids)
    asked = []

    def reaches(ordinal, views):
        asked.extend(views)
        return True

    def as_gpus(array):
        return buffers.view(array)._replace(device=("cuda", 0))

    @contextlib.contextmanager
    def on_device(ids, ordinal, stream):
        yield [as_gpus(np.where(abs(i) < 2**31, i, -1).astype(np.int32)) for i in ids]

    monkeypatch.setattr(transfers, "reaches", reaches)
    monkeypatch.setattr(transfers, "captures", lambda ordinal, stream: False)
    monkeypatch.setattr(transfers, "on_device", on_device)
    monkeypatch.setattr(transfers, "MANY", 1)
    pair = (on_gpu(source), destination) if to_host else (source, on_gpu(destination))
    given = ids if ids_on == "host" else tuple(as_gpus(np.where(i < 2**31, i, -1).astype(np.int32)) for i in ids)
    with Interpreted().active():
        kv.ops.transfer_pages(*pair, *given, stream=7)
    assert stand_in.calls == []
    assert {v.data for v in asked} == {v.data for v in pair[to_host].pools}
    assert_same(Place(), destination, expected)


def test_many_large_runs_are_one_batch(stand_in, monkeypatch):
    """Where the driver has batches and the stream is one of its own."""
    source, destination = two_pools("paged f32", 5)
    expected, ids = clone(destination), ids_of(source, destination)
    model.transfer_pages(source, expected, *ids)
    bindings = driver.require()
    bindings.CUdeviceptr = int
    bindings.CUmemcpyAttributes = SimpleNamespace
    bindings.CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
    copy = driver.call

    def call(name, *args):
        if name != "cuMemcpyBatchAsync":
            return copy(name, *args)
        targets, sources, sizes, count, (attributes,), first, _, stream = args
        assert (len(targets), attributes.srcAccessOrder, first, stream) == (count, 1, [0], 7)
        for to, of, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(to, of, size)
        stand_in.calls.append(name)

    monkeypatch.setattr(driver, "call", call)
    monkeypatch.setattr(driver, "has", lambda name: True)
    for name, found in (("reaches", True), ("captures", False)):
        monkeypatch.setattr(transfers, name, lambda *_, found=found: found)
    monkeypatch.setattr(transfers, "MANY", 1)
    monkeypatch.setattr(transfers, "SMALL", 1)
    kv.ops.transfer_pages(on_gpu(source), destination, *ids, stream=7)
    assert stand_in.calls == ["cuMemcpyBatchAsync"]
    assert_same(Place(), destination, expected)
    runs = transfers.Runs(*[np.zeros(9, np.int64)] * 3)
    assert transfers.takes_batches(runs, 7)
    assert not any(transfers.takes_batches(runs, stream) for stream in (0, 1, 2))  # default streams take none


def test_large_runs_and_few_are_copied_by_the_driver():
    def runs(count, size):
        return transfers.Runs(*[np.full(count, size, np.int64)] * 3)

    assert not transfers.for_a_kernel(runs(0, 8))
    assert not transfers.for_a_kernel(runs(transfers.MANY, 8))
    assert transfers.for_a_kernel(runs(transfers.MANY + 1, 16 << 10))
    assert not transfers.for_a_kernel(runs(transfers.MANY + 1, 64 << 10))


def test_runs_are_joined_only_when_both_sides_go_on():
    source, destination = np.array([0, 8, 16, 100]), np.array([50, 58, 80, 88])
    assert transfers.merged(source, destination, 8).listed() == [(0, 50, 16), (16, 80, 8), (100, 88, 8)]
    assert transfers.merged(source[:0], destination[:0], 8).listed() == []


def test_what_does_not_fit_is_refused_by_name():
    source, destination = two_pools("paged f32")
    other = two_pools("paged odd")[1]
    fa3 = two_pools("fa3 bf16")
    fewer = random_problem(np.random.default_rng(0), "paged", "f32", page_size=4, num_layers=2).collection
    ids = np.zeros(1, np.int32)
    fixed = clone(destination)
    fixed.blocks.flags.writeable = False
    cases = [
        (ValueError, (source, other, ids, ids), "source and destination must have the same spec, got CacheSpec("),
        (ValueError, (source, fewer, ids, ids), "must have the same layers and slots of a page, got (3, 4) and (2, 4)"),
        (ValueError, (*fa3, ids, ids, 0), "layer must be None for fa3 pools, whose layers share the pages, got 0"),
        (IndexError, (source, destination, ids, ids, 3), "layer must be in [0, 3), got 3"),
        (ValueError, (source, destination, ids, ids.repeat(2)), "destination_pages must have shape [1], got [2]"),
        (TypeError, (source.get_key_cache(0), destination, ids, ids), "source must be a KV cache collection, got"),
        (TypeError, (on_gpu(source), destination, [0.5], ids), "source_pages must be integers [n], got [0.5]"),
        (TypeError, (on_gpu(source), destination, ids[None], ids), "source_pages must be integers [n], got int32 of"),
        (ValueError, (on_gpu(source), destination, [0, 1], ids), "destination_pages must have shape [2], got [1]"),
        (
            TypeError,
            (on_gpu(source), destination, buffers.view(ids)._replace(device=("cuda", 0)), ids),
            "source_pages must be in host memory when a pool is, got a buffer on cuda: reading it would wait",
        ),
        (
            ValueError,
            (on_gpu(source), type(fixed)(fixed.blocks, fixed.cache_lengths, fixed.lookup_table, 3, 23), ids, ids),
            "destination is written, but its blocks are read-only",
        ),
    ]
    for kind, operands, message in cases:
        with pytest.raises(kind, match=re.escape("kv.ops.transfer_pages: ") + ".*" + re.escape(message)):
            kv.ops.transfer_pages(*operands)
