# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operands that share memory, numbers that are none, and the memory that programs keep."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference.places import Interpreted
from reference.random_caches import random_problem

import kvarn as kv
from kvarn import dispatch
from kvarn.runtime import binding, host, launch, overlap, packing, signatures

OFFSETS = np.array([0, 3, 4], np.uint32)


def test_true_is_no_number():
    c = random_problem(np.random.default_rng(1), cached=[5, 9], new=[3, 1]).collection
    query = np.ones((4, 2, 16), np.float32)
    for options in ({"window": True}, {"chunk": True, "mask": "chunked"}, {"scale": True}, {"softcap": True}):
        name = next(iter(options))
        with pytest.raises(TypeError, match=f"kv.ops.attention: {name} must be a number, got True"):
            kv.ops.attention(c, 0, query, OFFSETS, **options)
    with pytest.raises(TypeError, match="end must be a number, got True"):
        kv.ops.sliced_add(query[0], query[1], True)


def test_shifted_tokens_do_not_go_where_tokens_are_read():
    tokens = np.arange(12, dtype=np.int32)
    for out in (tokens[:4], tokens[1:5], tokens[:4].view(np.uint32)):
        with pytest.raises(ValueError, match="shift_tokens: out must not share memory with tokens"):
            kv.ops.shift_tokens(tokens[:4], OFFSETS, np.zeros(2, np.int32), out)
    with pytest.raises(ValueError, match="shift_tokens: out must not share memory with bonus"):
        kv.ops.shift_tokens(tokens[:4], OFFSETS, tokens[4:6], tokens[5:9])
    kv.ops.shift_tokens(tokens[:4], OFFSETS, np.zeros(2, np.int32), tokens[4:8])
    assert tokens.tolist() == [0, 1, 2, 3, 1, 2, 0, 0, 8, 9, 10, 11]


def test_sums_go_where_a_summand_is_or_apart_from_both():
    memory = np.zeros((6, 8), np.float32)
    memory[:] = np.arange(6)[:, None]
    a, b = memory[:4], np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match=r"sliced_add: out must not share memory with a, .* unless it is a itself"):
        kv.ops.sliced_add(a, b, 4, memory[1:5])
    with pytest.raises(ValueError, match="sliced_add: out must not share memory with b"):
        kv.ops.sliced_add(b, a, 4, memory[2:])
    kv.ops.sliced_add(b, a, 4, a)
    assert memory[:, 0].tolist() == [1, 2, 3, 4, 4, 5]
    with pytest.raises(ValueError, match="sliced_add: out must not share memory with b"):
        kv.ops.sliced_add(b, memory[5:1:-1], 4, a)  # from the last row to the third: all but one lie before the first
    # Columns of one array lie apart, though their rows take turns.
    wide = np.ones((4, 16), np.float32)
    kv.ops.sliced_add(wide[:, :8], wide[:, :8], 4, wide[:, 8:])
    assert (wide == [1] * 8 + [2] * 8).all()
    with pytest.raises(ValueError, match="must not share memory"):
        kv.ops.sliced_add(wide[:, :8], b, 4, wide[:, 4:12])


def test_a_cache_is_not_converted_into_itself():
    problem = random_problem(np.random.default_rng(2), cached=[5, 9], new=[0, 0])
    key = problem.collection.get_key_cache(0)
    with pytest.raises(ValueError, match="convert: destination must not share memory with source"):
        kv.ops.convert(key, key)
    kv.ops.convert(key, problem.collection.get_value_cache(0))  # halves and layers of one pool lie apart
    kv.ops.convert(key, problem.collection.get_key_cache(1))
    np.testing.assert_array_equal(key.load(0, 0, 4, 0, 16), problem.collection.get_key_cache(1).load(0, 0, 4, 0, 16))
    pages = np.zeros((4, 2, 8, 2, 16), np.float32)
    lengths, table = np.array([3], np.uint32), np.zeros((1, 2), np.uint32)
    whole = kv.ForeignPages.flashinfer(pages, lengths, table)
    kv.ops.convert(whole.key, whole.value)
    shifted = kv.ForeignPages.flashinfer((pages[1:, 0], pages[1:, 1]), lengths, table)
    with pytest.raises(ValueError, match="convert: destination must not share memory with source"):
        kv.ops.convert(whole.key, shifted.key)


def test_an_output_whose_rows_are_the_same_memory_is_refused():
    c = random_problem(np.random.default_rng(3), cached=[5, 9], new=[3, 1]).collection
    query = np.ones((4, 2, 16), np.float32)
    one = np.lib.stride_tricks.as_strided(np.zeros((1, 2, 16), np.float32), (4, 2, 16), (0, 64, 4))
    with pytest.raises(ValueError, match=r"attention: out is written, but some of its elements share .*\[0, 16, 1\]"):
        kv.ops.attention(c, 0, query, OFFSETS, out=one)
    half = np.lib.stride_tricks.as_strided(np.zeros(400, np.float32), (4, 2, 16), (64, 64, 4))
    with pytest.raises(ValueError, match="out is written, but some of its elements share memory"):
        kv.ops.attention(c, 0, query, OFFSETS, out=half)
    kv.ops.attention(c, 0, one, OFFSETS, out=np.zeros((2, 4, 16), np.float32).transpose(1, 0, 2))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int8, np.int16, np.int32])
@pytest.mark.parametrize("place", ["host", "sm_90a"])
def test_integers_of_either_sign_are_added(dtype, place):
    a, b = np.full((3, 8), 250, np.int64).astype(dtype), np.full((3, 8), 10, dtype)
    if place == "host":
        out = kv.ops.sliced_add(a, b, 2)
    else:
        with Interpreted(place).active():
            out = kv.ops.sliced_add(a, b, 2)
    np.testing.assert_array_equal(out, np.concatenate([(a + b)[:2], a[2:]]))
    assert out.dtype == dtype


@pytest.mark.thorough
def test_programs_of_the_host_that_were_not_used_lately_are_given_up(monkeypatch):
    monkeypatch.setattr(dispatch, "HOST_PROGRAMS", 3)
    alive: weakref.WeakSet = weakref.WeakSet()
    made = []

    class Counted(host.HostProgram):
        def __init__(self, artifact):
            super().__init__(artifact)
            alive.add(self)
            made.append(artifact)

    monkeypatch.setattr(host, "HostProgram", Counted)

    def step(size: int) -> None:
        x = np.ones((2, 5 * size), np.float32)
        assert (kv.ops.sliced_add(x, x, 1)[:, 0] == [2, 1]).all()

    for size in (1, 2, 3, 1, 4, 1, 5, 1):
        step(size)
        gc.collect()
        assert len(alive) <= 3
    assert len(made) == 5  # the one that is used all the time was made once
    step(2)
    assert len(made) == 6


def test_a_kernel_keeps_the_newest_of_its_specialisations_for_the_host(monkeypatch):
    monkeypatch.setattr(sys.modules["kvarn.dsl.kernel"], "HOST_KERNELS", 3)

    @kv.kernel
    def scaled(x: kv.Buffer[kv.f32, 1], by: int):
        x[0] = x[0] * kv.f32(by)

    x, made = np.ones(1, np.float32), []
    for by in (2, 3, 4, 5, 6, 2):
        x[:] = 1
        scaled[1, 1](x, by)
        assert x[0] == by
        made.append(weakref.ref(list(scaled._compiled.values())[-1]))
    gc.collect()
    assert [ref() is None for ref in made] == [True] * 3 + [False] * 3


MEMORY = """
import gc
import numpy as np
import kvarn as kv

def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

def appended(size):
    lengths, table = np.array([0], np.uint32), np.array([[0]], np.uint32)
    pool = kv.PagedKVCacheCollection(np.zeros((2, 2, 1, 16, 1, size), np.float32), lengths, table, 1, 4)
    x = np.ones((1, 1, size), np.float32)
    kv.ops.append(pool, 0, x, x, np.array([0, 1], np.uint32))

before = 0
for i in range(1, 25):
    appended(8 * i)
    if i == 8:
        gc.collect()
        before = megabytes()
gc.collect()
print((megabytes() - before) / 16)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_head_size_more_costs_its_code_and_no_compiler():
    """Of which 2 MB were kept: what the machine code of a program was made in."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.7


SHAPES: dict[str, Callable[[Any, int], Any]] = {
    "append": lambda c, n: kv.ops.append(c, 0, rows(n), rows(n), offsets(n)),
    "attention": lambda c, n: kv.ops.attention(c, 0, rows(n, 4), offsets(n), out=rows(n, 4)),
    "gather": lambda c, n: kv.ops.gather(c.get_key_cache(0), np.zeros((1, n), np.int32), offsets(1), rows(n)[None]),
    "store_ragged": lambda c, n: kv.ops.store_ragged(c.get_key_cache(0), rows(n), offsets(n)),
    "qk_norm": lambda c, n: kv.ops.qk_norm(c, 0, rows(n, 4), offsets(n), rows(1)[0, 0], rows(1)[0, 0]),
    "merge_attention": lambda c, n: kv.ops.merge_attention(*2 * (rows(n), rows(n)[:, :2, 0].copy())),
    "sliced_add": lambda c, n: kv.ops.sliced_add(rows(n)[:, 0], rows(n)[:, 0], n),
    "a kernel": lambda c, n: doubled[1, 8](c.get_key_cache(0), rows(n)[:, 0]),
}  # fmt: skip


class Watched(np.ndarray):
    """An array that weak references may be of."""


def rows(n: int, heads: int = 2) -> Any:
    found = np.ones((n, heads, 8), np.float32).view(Watched)
    made.append(weakref.ref(found))
    return found


made: list[Any] = []


def offsets(n: int) -> np.ndarray:
    return np.array([0, n], np.uint32)


@kv.kernel
def doubled(cache: Any, x: kv.Buffer[kv.f32, 2]):
    x[0, kv.thread_id.x] = cache.load(0, 0, 0, kv.thread_id.x) * 2.0


def step_of(name: str, n: int) -> None:
    """A call whose arrays have another shape for every n."""
    pool = np.zeros((n + 16, 2, 1, 4, 2, 8), np.float32).view(Watched)
    made.append(weakref.ref(pool))
    lengths, table = np.zeros(1, np.uint32), np.zeros((1, 24), np.uint32)
    SHAPES[name](kv.PagedKVCacheCollection(pool, lengths, table, 64, 96), n)


@pytest.mark.whole
@pytest.mark.parametrize("name", SHAPES)
def test_no_array_is_kept_alive_by_what_is_remembered_of_its_shape(name):
    made.clear()
    for n in (1, 2, 3, 3, 3):
        step_of(name, n)
    gc.collect()
    assert len(made) >= 10
    assert [ref() is None for ref in made] == [True] * len(made)


@pytest.mark.whole
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_remembered_of_shapes_has_a_bound(name, monkeypatch):
    """Shapes behind the last that is remembered cost nothing more, whatever memory their arrays have."""
    for module in (dispatch, binding, launch, packing, signatures):
        monkeypatch.setattr(module, "_REMEMBER", 8)
    monkeypatch.setattr(overlap, "_HANDLES", 4)
    monkeypatch.setattr(overlap, "_RULES", 8)

    step_of(name, 1)  # compiles
    tracemalloc.start()
    try:
        used = []
        for n in range(2, 34):
            step_of(name, n)
            if n % 16 == 1:
                made.clear()
                gc.collect()
                used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert (used[1] - used[0]) / 16 < 900  # of a shape more; those that are remembered have 2,000 to 9,000 bytes
