# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The emulator as users see it: what it computes, counts, and finds wrong."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.random_caches import random_problem

import kvarn as kv
from kvarn.emulator import EmulationError, EmulationHazard, Order, Report


def line_of(text: str) -> str:
    """``file:line`` of the one line of this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    found = [n for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}")]
    assert len(found) == 1
    return f"test_emulator.py:{found[0]}"


@kv.kernel
def scale(x: kv.Buffer[kv.f32, 1], y: kv.Buffer[kv.f32, 1], factor: kv.f32):
    i = kv.block_id.x * kv.block_dim.x + kv.thread_id.x
    if i < x.shape[0]:
        y[i] = x[i] * factor  # scaled


def aligned(count: int, dtype: Any = np.float32) -> np.ndarray:
    """An array that starts at a multiple of 256 bytes, as device memory does."""
    raw = np.zeros(count * np.dtype(dtype).itemsize + 256, np.uint8)
    return raw[-raw.ctypes.data % 256 :][: count * np.dtype(dtype).itemsize].view(dtype)


# --- what it computes and counts -------------------------------------------------------------------


def test_a_kernel_is_emulated_on_arrays():
    x, y = aligned(100), aligned(128)
    x[:] = np.arange(100)
    report = scale.emulate(2, 64, x, y[:100], 2.0)
    np.testing.assert_array_equal(y, np.concatenate([2 * x, np.zeros(28)]))
    assert report.target == "sm_90a"
    assert report.kernels["scale"].blocks == 2
    # 100 floats are 12.5 sectors; every warp but the last is full, and that has 4 of 32 lanes in the array.
    assert report.bytes == {"x": 400, "y": 400}
    assert report.sectors == {"x": 13, "y": 13}
    assert report.divergent_branches == 1
    assert report.by_opcode["st.global.b32"] == 4
    assert report.hazards == []


def test_a_compiled_kernel_and_a_saved_one_are_emulated(tmp_path):
    made = kv.compile(scale, kv.Buffer[kv.f32, 1], kv.Buffer[kv.f32, 1], kv.f32, target="sm_80")
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    assert made.emulate(1, 32, x, y, 3.0).target == "sm_80"
    loaded = kv.load(made.save(tmp_path / "scale.kvarn"), target="sm_80")
    loaded.emulate(1, 32, x, y, 4.0)
    assert (y == 4).all()
    with pytest.raises(ValueError, match="compiled for sm_80, got target='sm_90a'"):
        made.emulate(1, 32, x, y, 3.0, target="sm_90a")


def test_launches_inside_the_context_are_emulated():
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    with kv.emulated("sm_100a") as report:
        scale[1, 64](x, y, 5.0)
        scale[1, 64](y, x, 2.0)
    assert (x == 10).all()
    assert report.kernels["scale"].launches == 2
    assert report.instructions > 0
    scale[1, 64](x, y, 1.0)  # on the host again
    assert (y == 10).all()
    assert report.kernels["scale"].launches == 2


@pytest.mark.parametrize(
    "order", ["random", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("program", "forward", "backward"))]
)
def test_operations_on_numpy_arrays_give_what_the_host_gives(order):
    problem = random_problem(
        np.random.default_rng(1), "paged", "f16", num_heads=2, head_size=64, cached=[20, 7], new=[3, 2]
    )
    collection, offsets, rng = problem.collection, problem.row_offsets, np.random.default_rng(2)
    key, value = (rng.standard_normal((5, 2, 64)).astype(np.float16) for _ in range(2))
    query = rng.standard_normal((5, 4, 64)).astype(np.float16)
    with kv.emulated("sm_90a", order=order, seed=3, multiprocessors=2) as report:
        kv.ops.append(collection, 0, key, value, offsets)
        found = kv.ops.attention(collection, 0, query, offsets)
    pool = np.array(collection.blocks)
    expected = kv.ops.attention(collection, 0, query, offsets)
    np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=2e-3)
    kv.ops.append(collection, 0, key, value, offsets)
    np.testing.assert_array_equal(pool.view(np.uint16), np.array(collection.blocks).view(np.uint16))
    assert report.bytes["key"] == key.nbytes
    assert report.traffic["collection.keys"].written == key.nbytes
    assert report.hazards == []


@pytest.mark.parametrize(("stride", "conflicts"), [(1, 0), (2, 1), (4, 3), (32, 31), (33, 0)])
def test_bank_conflicts_are_those_of_32_banks(stride, conflicts):
    @kv.kernel
    def strided(y: kv.Buffer[kv.f32, 1]):
        s = kv.shared(33 * 32, kv.f32)
        s[kv.thread_id.x * stride] = y[kv.thread_id.x]

    assert strided.emulate(1, 32, np.zeros(32, np.float32)).bank_conflicts == conflicts


def test_lines_of_the_kernel_are_counted():
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    lines = {line.source: line for line in scale.emulate(1, 64, x, y, 2.0).lines}
    scaled = lines[line_of("scaled")]
    assert scaled.traffic.read == scaled.traffic.written == 256
    assert scaled.instructions * 32 == scaled.threads


def test_a_report_is_text_and_data():
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    report = scale.emulate(1, 64, x, y, 2.0)
    assert "scale (1 block)" in str(report)
    assert "no hazards" in str(report)
    assert report.to_dict()["traffic"]["x"]["read"] == 256


# --- hazards ---------------------------------------------------------------------------------------


def neighbour(barrier: bool) -> Any:
    @kv.kernel
    def neighbour(x: kv.Buffer[kv.f32, 1], y: kv.Buffer[kv.f32, 1]):
        i = kv.thread_id.x
        s = kv.shared(64, kv.f32)
        s[i] = x[i]  # written
        if kv.static(barrier):
            kv.barrier()
        y[i] = s[(i + 32) % 64]  # read

    return neighbour


def test_a_race_is_found_in_every_order_with_both_lines():
    for order in ("program", "forward", "backward", "random"):
        x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
        report = neighbour(False).emulate(1, 64, x, y, order=order)
        races = [h for h in report.hazards if h.kind == "race"]
        assert races, order
        places = {races[0].source, *re.findall(r"test_emulator.py:\d+", races[0].message)}
        assert places == {line_of("written"), line_of("read")}
        with pytest.raises(EmulationHazard, match="no barrier orders the two"):
            report.check()
        assert neighbour(True).emulate(1, 64, x, y, order=order).check().hazards == []


def test_overwriting_what_others_still_read_is_a_race():
    @kv.kernel
    def again(x: kv.Buffer[kv.f32, 1], y: kv.Buffer[kv.f32, 1]):
        i = kv.thread_id.x
        s = kv.shared(64, kv.f32)
        for k in range(3):
            s[i] = x[i] + kv.f32(k)  # overwrites
            kv.barrier()
            y[i] = s[63 - i]

    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    races = again.emulate(1, 64, x, y).hazards
    assert {race.source for race in races} == {line_of("overwrites")}
    assert all(race.kind == "race" and " overwrites " in race.message for race in races)


def test_memory_that_nobody_wrote_is_told():
    @kv.kernel
    def half(x: kv.Buffer[kv.f32, 1], y: kv.Buffer[kv.f32, 1]):
        i = kv.thread_id.x
        s = kv.shared(64, kv.f32)
        if i < 32:
            s[i] = x[i]
        kv.barrier()
        y[i] = s[i]  # half of it

    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    (found,) = half.emulate(1, 64, x, y).hazards
    assert (found.kind, found.source, found.count) == ("unwritten", line_of("half of it"), 32)


def test_a_hang_names_the_barrier_and_the_line():
    @kv.kernel
    def waits(x: kv.Buffer[kv.f32, 1]):
        bar = kv.shared(1, kv.i64)
        if kv.thread_id.x == 0:
            kv.mbarrier_init(bar.ptr(0), 2, name="both")
        kv.barrier()
        if kv.thread_id.x == 0:
            kv.mbarrier_arrive(bar.ptr(0))
        kv.mbarrier_wait(bar.ptr(0), 0)  # hangs
        x[kv.thread_id.x] = kv.f32(1)

    with pytest.raises(EmulationError, match=r"no warp can continue") as error:
        waits.emulate(1, 32, np.zeros(32, np.float32))
    text = str(error.value)
    assert "waits at both (at kv_shared)" in text
    assert "1 arrivals that never come, of 2" in text
    assert line_of("hangs") in text


@kv.kernel
def lengthen(lengths: kv.Buffer[kv.u32, 1], by: kv.u32):
    lengths[kv.block_id.x] = lengths[kv.block_id.x] + by


@pytest.mark.parametrize("early", [False, True])
def test_an_operation_that_reads_early_is_held_to_what_its_schedule_promises(early):
    problem = random_problem(np.random.default_rng(1), "paged", "f16", num_heads=1, head_size=64, cached=[40], new=[1])
    collection, offsets, rng = problem.collection, problem.row_offsets, np.random.default_rng(2)
    key, value = (rng.standard_normal((1, 1, 64)).astype(np.float16) for _ in range(2))
    query = rng.standard_normal((1, 4, 64)).astype(np.float16)
    schedule = {"max_queries": 1, "early": early}
    with kv.emulated("sm_90a", multiprocessors=2):
        kv.ops.append(collection, 0, key, value, offsets)
        kv.ops.attention(collection, 0, query, offsets, schedule=schedule)
        lengthen[1, 1](collection.cache_lengths, 0)
        message = "reads collection.cache_lengths at .*, which kernel lengthen before it writes"
        with pytest.raises(EmulationError, match=message) if early else contextlib.nullcontext():
            kv.ops.attention(collection, 0, query, offsets, schedule=schedule)


def test_an_access_outside_the_arguments_names_the_line():
    @kv.kernel
    def over(x: kv.Buffer[kv.f32, 1]):
        x[kv.thread_id.x + 1] = kv.f32(1)  # over

    with pytest.raises(EmulationError, match=rf"outside the given memory.*{line_of('over')}"):
        over.emulate(1, 32, np.zeros(32, np.float32))


def test_checks_and_assertions_stop_with_their_message():
    @kv.kernel
    def touch(cache: kv.KVCache, head: kv.i32):
        cache.store(0, head, 0, 0, cache.dtype(kv.f32(1)))  # touches

    blocks = np.zeros((4, 2, 1, 16, 2, 64), np.float32)
    pool = kv.PagedKVCacheCollection(blocks, np.array([1], np.uint32), np.array([[0]], np.uint32), 1, 2)
    with kv.pipeline(check=True), kv.emulated("sm_90a"):
        touch[1, 1](pool.get_key_cache(0), 1)
        with pytest.raises(EmulationError, match=r"kv.store: the head must be in \[0, 2\): thread 0 of block") as error:
            touch[1, 1](pool.get_key_cache(0), 5)
    assert line_of("touches") in str(error.value)
    assert blocks[0, 0, 0, 0, 1, 0] == 1

    @kv.kernel
    def asserts(x: kv.i32):
        kv.device_assert(x + kv.thread_id.x < 7, "x is small")

    asserts.emulate(1, 4, 3)
    with pytest.raises(EmulationError, match=r"x is small: thread 1 of block \(0, 0, 0\)"):
        asserts.emulate(1, 4, 6)


def test_a_trap_stops():
    @kv.kernel
    def traps(cache: kv.KVCache):
        cache.store(0, 0, 0, 0, cache.dtype(kv.f32(1)), oob="trap")

    blocks = np.zeros((4, 2, 1, 16, 2, 64), np.float32)
    pool = kv.PagedKVCacheCollection(blocks, np.array([1], np.uint32), np.array([[9]], np.uint32), 1, 2)
    with pytest.raises(EmulationError, match="the kernel stops itself"):
        traps.emulate(1, 1, pool.get_key_cache(0))
    assert not blocks.any()


def test_kernels_print(capsys):
    @kv.kernel
    def prints(x: kv.i32, y: kv.f32):
        kv.printf("%d: %d and %.2f\n", kv.thread_id.x, x, y)

    prints.emulate(1, 2, 7, 1.5)
    assert capsys.readouterr().out == "0: 7 and 1.50\n1: 7 and 1.50\n"


# --- mistakes of the caller --------------------------------------------------------------------------


def test_what_cannot_be_emulated_is_refused():
    x = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match="target must be a GPU's"), kv.emulated("host"):
        pass
    with pytest.raises(ValueError, match="warps must be one of"):
        scale.emulate(1, 32, x, x, 1.0, order="sideways")
    with pytest.raises(ValueError, match="copies must be one of"):
        scale.emulate(1, 32, x, x, 1.0, copies="soon")
    host = kv.compile(scale, kv.Buffer[kv.f32, 1], kv.Buffer[kv.f32, 1], kv.f32, target="host")
    with pytest.raises(ValueError, match="compiled for host"):
        host.emulate(1, 32, x, x, 1.0)
    with pytest.raises(ValueError, match="has 1 to 1024 threads, got"):
        scale.emulate(1, 2048, x, x, 1.0)
    with pytest.raises(TypeError, match=r"takes 3 arguments \(x, y, factor\), got 2"):
        kv.compile(scale, kv.Buffer[kv.f32, 1], kv.Buffer[kv.f32, 1], kv.f32, target="sm_80").emulate(1, 32, x, x)


def test_orders_are_values():
    assert Order("random", "random", 1) == Order("random", "random", 1) != Order()
    assert isinstance(scale.emulate(1, 32, *np.zeros((2, 32), np.float32), 1.0, order=Order("forward")), Report)
