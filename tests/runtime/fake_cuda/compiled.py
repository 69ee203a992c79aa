# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiled kernels on the fake driver: the parameters that the code takes are those that the loader packs.

Not collected by itself: tests/runtime/test_launch.py runs it in a process of its own.
"""

import numpy as np
import pytest
from fakes import LIBRARY, CudaArray, aligned, install_torch, last, launches, params, tensor
from reference import launch_maps

import kvarn as kv
from kvarn.artifact import PARAM_BYTES
from kvarn.dialect import layout
from kvarn.runtime import device, tensormap
from kvarn.runtime.program import Program

L, N, P, H, D, B = 3, 5, 16, 8, 128, 2


def array(shape, dtype):
    return CudaArray(aligned(shape, dtype))


def paged():
    return kv.PagedKVCacheCollection(
        array((N, 2, L, P, H, D), np.float16), array((B,), np.int32), array((B, 24), np.uint32), 4, 64
    )


def continuous():
    return kv.ContinuousBatchingKVCacheCollection(
        array((N, 2, L, 64, H, D), np.float16), array((B,), np.int32), array((B,), np.uint32), 4, 60
    )


@kv.kernel
def touch(cache: kv.KVCache, alpha: kv.f32, ids: kv.Buffer[kv.i32, 2], n: kv.i64):
    b = kv.block_id.x
    if b < cache.cache_length(b):
        d = kv.thread_id.x * 8
        cache.store(b, 0, 0, d, cache.load(b, 0, 0, d, width=8) * kv.f16(alpha))
        ids[b, 0] = kv.i32(n)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("make", [paged, continuous])
def test_parameters_of_a_cache_kernel(make, target):
    cache = make().get_value_cache(1)
    ids = array((4, 6), np.int32)
    made = kv.compile(touch, cache, kv.f32, kv.Buffer[kv.i32, 2], kv.i64, target=target)
    made.launch((2, 3), 16, cache, 0.25, ids, -7)
    entry = made.artifact.entry()
    found = params(last(), entry)  # holds the sizes and offsets of the compiled code against the ABI
    assert last().kernel.decode() == entry.name
    assert list(last().shape) == [2, 3, 1, 16, 1, 1, entry.shared_bytes]
    fields = dict(zip((f.name for f in layout.cache_fields(cache.spec)), cache.fields(), strict=True))
    for (arg, field), value in found.items():
        if arg == "cache":
            assert value == fields[field], field
    assert found["alpha", "value"] == 0.25
    assert found["n", "value"] == -7
    assert found["ids", "data"] == ids.array.ctypes.data
    assert sum(PARAM_BYTES[p.type] for p in entry.params) <= last().bytes
    made.prepare((2, 3), 16, cache, 0.25, ids, -7)()
    assert bytes(last().params) == bytes(launches()[-2].params)


@kv.kernel(block=32)
def load_box(n: kv.i32, map: kv.TensorMap, out: kv.Buffer[kv.f16, 1]):
    tile, barrier = kv.tma.shared_tile(map), kv.shared(1, kv.i64)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(map, barrier)
        kv.tma.load(map, (n, 0, 0, 0), tile, barrier)
    kv.barrier()
    kv.tma.wait(barrier, 0)
    out[kv.thread_id.x] = (tile.ptr() + map.offset(0, kv.thread_id.x)).load(kv.f16)


def test_a_descriptor_is_encoded_for_its_cache_and_passed_by_value():
    """The parameter is 128 bytes at a multiple of 64 in the compiled code, whatever stands before it."""
    cache, out = paged().get_value_cache(1), array((32,), np.float16)
    map = cache.create_tma_tile(tile_rows=P)
    assert map.device == ("cuda", 0)
    assert map.description.base == cache.fields()[0]
    load_box[2, 32](7, map, out)
    first = last()
    made = kv.compile(load_box, kv.i32, map, kv.Buffer[kv.f16, 1], target="sm_90a")
    found = params(first, made.artifact.entry())
    assert found["map", "value"] == map.encoded
    assert found["n", "value"] == 7
    assert found["out", "data"] == out.array.ctypes.data
    made.prepare(2, 32, 7, map, out)()
    assert bytes(last().params) == bytes(first.params)
    with pytest.raises(TypeError, match=r"argument 'map' of kernel 'load_box' is compiled for TmaSpec"):
        made.launch(2, 32, 7, cache.create_tma_tile("64B", tile_rows=P), out)
    operand = kv.KVCacheMHAOperand(cache)
    assert operand.create_tma_tile(tile_rows=P).encoded == map.encoded
    stored = kv.compile(store_box, operand.create_tma_tile(tile_rows=P), target="sm_90a")
    with pytest.raises(ValueError, match="is stored to by the kernel, but the memory described is read-only"):
        stored.launch(1, 32, operand.create_tma_tile(tile_rows=P))
    stored.launch(1, 32, map)


@kv.kernel(block=32)
def store_box(map: kv.TensorMap):
    tile = kv.tma.shared_tile(map)
    if kv.thread_id.x == 0:
        kv.tma.store(map, (0, 0, 0, 0), tile)
        kv.tma.wait_stores()


@pytest.fixture
def encoded(monkeypatch):
    """The descriptors that the driver encodes meanwhile."""
    found, encode = [], device.Device.encode

    def counted(on, m):
        found.append(m)
        return encode(on, m)

    monkeypatch.setattr(device.Device, "encode", counted)
    return found


@pytest.mark.parametrize("make", [paged, continuous])
def test_a_program_makes_its_descriptors_at_launch_once_for_each_layer(make, encoded):
    pool, out, at = make(), array((2, 1, H, 8, D), np.float16), array((1, 2), np.int32)
    program = Program(launch_maps.copies(pool.spec, rows=8))
    entry, seen = program.artifact.entries[0], []
    for layer in (0, 2, 0, 2, 2):
        program(pool, layer, out, at)
        seen.append(params(last(), entry))
    assert len(encoded) == 4, "keys and values of two layers"
    for layer, found in ((0, seen[0]), (2, seen[1]), (0, seen[2]), (2, seen[4])):
        for name, cache in (("keys", pool.get_key_cache(layer)), ("values", pool.get_value_cache(layer))):
            assert found[name, "value"] == cache.create_tma_tile(tile_rows=8).encoded
    other = make()
    program(other, 0, out, at)
    found = params(last(), entry)["keys", "value"]
    assert found == other.get_key_cache(0).create_tma_tile(tile_rows=8).encoded != seen[0]["keys", "value"]


def test_prepared_and_captured_launches_have_their_descriptors(encoded):
    pool, out, at = paged(), array((2, 1, H, 8, D), np.float16), array((1, 2), np.int32)
    program = Program(launch_maps.copies(pool.spec, rows=8))
    LIBRARY.fake_capturing(1)
    program(pool, 1, out, at)
    first = bytes(last().params)
    LIBRARY.fake_capturing(0)
    prepared = program.prepare(pool, 1, out, at)
    for _ in range(3):
        prepared()
        assert bytes(last().params) == first
    assert len(encoded) == 2


def test_a_descriptor_of_an_empty_buffer_is_zeros(encoded):
    def operand(batch):
        return kv.LayoutTensorMHAOperand(array((batch, 16, H, D), np.float16))

    out, at = array((2, 1, H, 8, D), np.float16), array((1, 2), np.int32)
    program = Program(launch_maps.copies(operand(1).spec, rows=8))
    program(operand(0), 0, out, at)
    assert params(last(), program.artifact.entries[0])["keys", "value"] == bytes(128)
    assert not encoded
    program(operand(1), 0, out, at)
    assert params(last(), program.artifact.entries[0])["keys", "value"] != bytes(128)


def test_the_descriptors_of_many_pools_do_not_pile_up(encoded, monkeypatch):
    monkeypatch.setattr(tensormap.LaunchMap, "_REMEMBER", 3)
    pools, out, at = [paged() for _ in range(5)], array((2, 1, H, 8, D), np.float16), array((1, 2), np.int32)
    program = Program(launch_maps.copies(pools[0].spec, rows=8))
    expected = [p.get_value_cache(0).create_tma_tile(tile_rows=8).encoded for p in pools]
    encoded.clear()
    for pool, value in zip((*pools, *pools), (*expected, *expected), strict=True):
        program(pool, 0, out, at)
        assert params(last(), program.artifact.entries[0])["values", "value"] == value
    assert len(encoded) == 4 * len(pools), "three are remembered, five take turns: all are made again"


def test_saved_and_loaded(tmp_path):
    cache = paged().get_key_cache(0)
    made = kv.compile(touch, cache, kv.f32, kv.Buffer[kv.i32, 2], kv.i64, target="sm_90a")
    made.save(tmp_path / "touch.kvarn")
    ids = array((4, 6), np.int32)
    made.launch(1, 16, cache, 0.25, ids, 1)
    before = bytes(last().params)
    loaded = kv.load(tmp_path / "touch.kvarn")
    # What is run is the cubin that saving added, where an assembler is installed; the fake driver reads no cubin.
    kv.Kernel(loaded.artifact.replace(code={"ptx": loaded.artifact.code["ptx"]})).launch(1, 16, cache, 0.25, ids, 1)
    assert bytes(last().params) == before


def test_the_driver_is_asked_to_keep_the_lines_of_ptx_that_has_them():
    ids, cache = array((4, 6), np.int32), paged().get_key_cache(0)
    specs = (cache, kv.f32, kv.Buffer[kv.i32, 2], kv.i64)
    kv.compile(touch, *specs, target="sm_90a", lineinfo=True).launch(1, 16, cache, 0.25, ids, 1)
    assert len(launches()) == 1


def test_wrong_caches_are_refused():
    cache = paged().get_key_cache(0)
    ids = array((4, 6), np.int32)
    made = kv.compile(touch, cache, kv.f32, kv.Buffer[kv.i32, 2], kv.i64, target="sm_90a")
    with pytest.raises(TypeError, match=r"is compiled for paged f16 .* got continuous f16"):
        made.launch(1, 16, continuous().get_key_cache(0), 0.25, ids, 1)
    with pytest.raises(TypeError, match=r"must be a cache .* got a collection"):
        made.launch(1, 16, paged(), 0.25, ids, 1)
    assert not launches()


def test_an_operation_runs_its_steps_on_its_operands():
    pool = paged()
    key, value = (array((8, H, D), np.float16) for _ in range(2))
    offsets = array((B + 1,), np.int32)
    for _ in range(2):
        kv.ops.append(pool, 2, key, value, offsets)
    found = launches()
    first, second = found[: len(found) // 2], found[len(found) // 2 :]
    assert len(first) == len(second) >= 1
    for a, b in zip(first, second, strict=True):
        assert bytes(a.params) == bytes(b.params)
        assert np.prod(list(a.shape)[:6]) > 0
    # Somewhere among the parameters are the addresses of all operands.
    words = {int(w) for x in first for w in np.frombuffer(bytes(x.params), np.uint64)}
    assert {key.array.ctypes.data, value.array.ctypes.data, offsets.array.ctypes.data, pool.fields()[0]} <= words


def test_a_call_like_one_before_describes_the_memory_of_now():
    install_torch({0: LIBRARY.fake_stream(0)})
    pool = kv.PagedKVCacheCollection(
        array((5, 2, 1, 16, 2, 128), np.float16), array((B,), np.int32), array((B, 24), np.uint32), 1, 64
    )
    offsets, out = tensor((B + 1,), "int32"), tensor((B, 8, 128), "float16")
    rows = [tensor((B, 64), "float16") for _ in range(3)]
    weights = [tensor((12 * 128, 64), "float16") for _ in range(2)]
    described = set()
    for x, weight in ((0, 0), (0, 0), (1, 0), (1, 1), (2, 1), (0, 0), (0, 1)):
        kv.ops.project_append(pool, 0, rows[x], weights[weight], offsets, query_out=out)
        product = bytes(last().params)
        seen = [t.data_ptr().to_bytes(8, "little") in product for t in (*rows, *weights)]
        assert seen == [i == x for i in range(3)] + [i == weight for i in range(2)]
        described.add(product)
    assert len(described) == 5
