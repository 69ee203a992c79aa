# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls like one before, by the native part: they do, and refuse, what the way through Python does.

Not collected by itself: tests/runtime/test_launch.py runs it on the fake driver, with a native part.
"""

import contextlib
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fakes import (
    LIBRARY,
    SPEC,
    Cache,
    CudaArray,
    Pointerless,
    X,
    aligned,
    install_torch,
    kernel,
    last,
    launches,
    params,
    tensor,
)

import kvarn as kv
from kvarn import artifact as A
from kvarn.dialect import dtypes, layout
from kvarn.runtime import driver, quick
from kvarn.runtime.launch import Launcher

F = A.Arg("f", "scalar", dtypes.f32)
Y = A.Arg("y", "buffer", dtypes.f32, 2)
C = A.Arg("c", "cache", spec=SPEC)


@pytest.fixture(autouse=True)
def current():
    assert quick.available()
    current = {0: LIBRARY.fake_stream(0), 1: LIBRARY.fake_stream(1)}
    install_torch(current)
    return current


def known(launcher):
    """Calls that the native part knows."""
    return 0 if launcher._quick is None else len(launcher._quick)


def outcome(launcher, grid, block, *args, **options):
    """The launch of a call, or its error."""
    try:
        launcher(grid, block, *args, **options)
    except (TypeError, ValueError, driver.DriverError) as error:
        return type(error), str(error)
    found = last()
    return bytes(found.params), list(found.shape), found.stream, found.device, found.kernel


def same(launcher, *call, **options):
    """A call by the native part where that knows it, and by Python."""
    first = outcome(launcher, *call, **options)
    launcher._quick, kept = None, launcher._quick
    try:
        assert first == outcome(launcher, *call, **options)
    finally:
        launcher._quick = kept
    return first


def test_a_call_is_known_from_its_third_time_on_and_has_the_addresses_of_now():
    launcher = Launcher(kernel([X, F, Y, C]))
    cache, tensors = Cache(), [tensor((4, 8)) for _ in range(4)]
    for i in range(6):
        x, y = tensors[i % 4], tensors[(i + 1) % 4]
        launcher((3, 2), 32, x, 0.5, y, cache)
        found = params(last(), launcher.entry)
        assert (int(found["x", "data"]), int(found["y", "data"])) == (x.data_ptr(), y.data_ptr())
        assert known(launcher) == int(i >= 2)
    assert len(launches()) == 6


def test_arguments_that_were_one_tensor_may_be_two_and_the_other_way_round():
    launcher, (x, y) = Launcher(kernel([X, Y])), [tensor((4, 8)) for _ in range(2)]
    for a, b in ((x, x), (x, x), (x, x), (x, y), (y, x), (y, y)):
        launcher(1, 32, a, b)
        found = params(last(), launcher.entry)
        assert (int(found["x", "data"]), int(found["y", "data"])) == (a.data_ptr(), b.data_ptr())
    assert known(launcher) == 1


def variants():
    """Calls that differ from ``(1, 32, x, 0.5, y, cache)`` in one thing, most of them not to be launched."""
    negated = tensor((4, 8))
    negated.negated = True
    unaligned = tensor((4, 8))
    unaligned._data += 2
    behind = tensor((4, 8))
    behind._data += 4
    wide = tensor((4, 16))
    wide.shape = (4, 8)
    columns = tensor((4, 8))
    columns._stride = (1, 4)
    pointerless = Pointerless(aligned((4, 8), np.float32), tensor((4, 8)).dtype)
    for x in (tensor((5, 8)), tensor((4,)), tensor((4, 8), "int32"), tensor((4, 8), "float16"),
              tensor((4, 8), device=1), negated, unaligned, behind, wide, columns, pointerless,
              CudaArray(aligned((4, 8), np.float32)), 3, None, np.zeros((4, 8), np.float32),
              tensor((0, 8))):  # fmt: skip
        yield (1, 32, x, 0.5, tensor((4, 8)), Cache())
    for f in (0.25, 1, True, "a", None, np.float32(0.5), -0.0, float("nan"), 2**70):
        yield (1, 32, tensor((4, 8)), f, tensor((4, 8)), Cache())
    other = layout.spec_of("paged", "bf16", 8, 64, page_size=16)
    for c in (
        Cache(base=8192),
        Cache(device=("cuda", 1)),
        Cache(device=("cpu", 0)),
        Cache(other),
        Cache(readonly=True),
        7,
    ):
        yield (1, 32, tensor((4, 8)), 0.5, tensor((4, 8)), c)
    for grid, block in ((2, 32), ((1, 1, 1), 32), (0, 32), (-1, 32), (1, 64), (1, 0), ([1], 32), (1, [32]), ("a", 32)):
        yield (grid, block, tensor((4, 8)), 0.5, tensor((4, 8)), Cache())
    yield (1, 32, tensor((4, 8)), 0.5, tensor((4, 8)))
    yield (1, 32)


def test_whatever_differs_gives_what_it_gives_without_the_native_part():
    launcher = Launcher(kernel([X, F, Y, A.Arg("c", "cache", spec=SPEC, written=True)]))
    for _ in range(3):
        launcher(1, 32, tensor((4, 8)), 0.5, tensor((4, 8)), Cache())
    assert known(launcher) == 1
    errors = 0
    for call in variants():
        for _ in range(4):  # learned, and then known
            found = same(launcher, *call)
        errors += isinstance(found[0], type)
    assert errors > 20
    assert known(launcher) > 5


def test_streams_are_those_of_the_call_or_of_torch(current):
    launcher, x = Launcher(kernel([X])), tensor((4, 8))
    mine = LIBRARY.fake_stream(0)
    for stream in (None, mine, types.SimpleNamespace(__cuda_stream__=lambda: (0, mine)), None, mine):
        for _ in range(3):
            same(launcher, 1, 32, x, stream=stream)
    assert known(launcher) == 2
    current[0] = LIBRARY.fake_stream(0)
    for _ in range(3):
        launcher(1, 32, x)
        assert last().stream == current[0]
    for bad in (LIBRARY.fake_stream(1), -1, "a"):
        assert isinstance(same(launcher, 1, 32, x, stream=bad)[0], type)


def test_a_refused_launch_is_an_error_and_the_next_one_is_not():
    launcher, x = Launcher(kernel([X])), tensor((4, 8))
    for _ in range(3):
        launcher(1, 32, x)
    LIBRARY.fake_fail(700)
    with pytest.raises(driver.DriverError, match=r"launch of kernel 'k' on .*CUDA_ERROR_ILLEGAL_ADDRESS"):
        launcher(1, 32, x)
    assert len(launches()) == 3
    launcher(1, 32, x)
    assert known(launcher) == 1


def test_a_thread_without_a_context_gets_one():
    launcher, x = Launcher(kernel([X])), tensor((4, 8))
    for _ in range(3):
        launcher(1, 32, x)
    LIBRARY.fake_needs_context(1)
    with ThreadPoolExecutor(1) as other:
        other.submit(launcher, 1, 32, x).result()
    assert len(launches()) == 4


def test_threads_do_not_mix_their_addresses():
    launcher, tensors = Launcher(kernel([X])), [tensor((4, 8)) for _ in range(4)]
    launcher(1, 32, tensors[0])
    launcher(1, 32, tensors[0])

    def work(t):
        for _ in range(50):
            launcher(1, 32, tensors[t])

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [int(params(launch, launcher.entry)["x", "data"]) for launch in launches()[2:]]
    assert sorted(seen) == sorted(t.data_ptr() for t in tensors for _ in range(50))


def test_the_table_forgets_and_learns_again():
    launcher, x = Launcher(kernel([X])), tensor((4, 8))
    for i in range(1024):
        if i % 512 == 0:
            for _ in range(3):
                launcher(1, 32, x)
        launcher._quick.remember(i.to_bytes(8, "little"), (), None, 0, None, [])
        assert 0 < known(launcher) <= 1024
    assert known(launcher) < 10
    for _ in range(2):
        launcher(1, 32, x)
    assert int(params(last(), launcher.entry)["x", "data"]) == x.data_ptr()
    assert known(launcher) < 10
    launcher._quick.clear()
    launcher(1, 32, x)
    assert known(launcher) == 1


def test_the_table_takes_nothing_that_would_not_fit():
    calls = quick.table()
    step = (1, bytes(64), (56,), (56,), (0,), print)
    for size, *numbers in ((5000, (), (), ()), (64, (64,), (), ()), (64, (), (60,), (0,)), (64, (), (0,), (64,)),
                           (64, (), (0, 8), (0,))):  # fmt: skip
        bad = (1, bytes(size), *numbers, print)
        with pytest.raises(ValueError, match="remember takes packets of 4608 bytes"):
            calls.remember(bytes(8), (), None, 0, None, [step, bad])
    for key, steps in ((bytes(7), []), (bytes(8 * 1000), []), (bytes(8), ())):
        with pytest.raises(ValueError, match="remember takes a key that launch returned"):
            calls.remember(key, (), None, 0, None, steps)
    for arguments in ((), (1, 2, 3, 4), (1, 2, print, {}, 5), (0, 0, print, {}), ("a", 1, print, {})):
        with pytest.raises(TypeError):
            type(calls)(*arguments)
    with pytest.raises(TypeError, match="launch takes"):
        calls.launch((), ())
    assert calls.launch([tensor((1, 1))], (), None, 0, None) is None
    assert calls.launch((), (), None, 0, None) is None
    assert len(calls) == 0


# --- operations ------------------------------------------------------------------------------------


def pool(batch=2):
    blocks = aligned((5, 2, 2, 16, 2, 128), np.float16)
    lengths, table = aligned((batch,), np.int32), aligned((batch, 24), np.uint32)
    return kv.PagedKVCacheCollection(CudaArray(blocks), CudaArray(lengths), CudaArray(table), 1, 64)


def test_an_operation_is_launched_by_the_native_part_and_checked_as_before(monkeypatch):
    from kvarn.ops import writes

    append = writes._APPEND
    collection = pool()
    key, offsets = tensor((2, 2, 128), "float16"), tensor((3,), "int32")
    for _ in range(2):
        kv.ops.append(collection, 1, key, key, offsets)
    monkeypatch.setattr(append, "_specialise", None)
    monkeypatch.setattr(kv.dispatch.signatures, "signed", None)
    for _ in range(2):
        value = tensor((2, 2, 128), "float16")
        kv.ops.append(collection, 1, key, value, offsets)
    monkeypatch.undo()
    assert len(launches()) == 4
    assert value.data_ptr().to_bytes(8, "little") in bytes(last().params)
    for call, message in [
        ((collection, 2, key, key, offsets), r"layer must be in \[0, 2\), got 2"),
        ((collection, 1, key, None, offsets), "value must be given"),
        ((collection, 1, tensor((2, 2, 64), "float16"), key, offsets), "key must have shape"),
        ((collection, 1, key, tensor((2, 2, 128), "bfloat16"), offsets), "value must have dtype f16"),
        ((collection, 1, key, key, tensor((4,), "int32")), "row_offsets must have shape"),
        ((collection, 1, key, tensor((2, 2, 128), "float16", device=1), offsets), "must be on one device"),
    ]:
        with pytest.raises((TypeError, ValueError, IndexError), match=message):
            kv.ops.append(*call)
    other = pool()
    kv.ops.append(other, 1, key, key, offsets)
    assert other.blocks.array.ctypes.data.to_bytes(8, "little") in bytes(last().params)


def test_an_attention_is_found_by_its_arguments_as_they_are(monkeypatch):
    from kvarn.ops import reads

    collection = pool()
    query, out, offsets = tensor((2, 8, 128), "float16"), tensor((2, 8, 128), "float16"), tensor((3,), "int32")
    lse, slopes = tensor((2, 8)), tensor((8,))
    variants = [
        {}, {"scale": 0.5}, {"scale": 1}, {"lse": lse, "return_lse": True}, {"lse": lse}, {"schedule": {}},
        {"schedule": {"max_queries": 1}}, {"alibi_slopes": slopes}, {"alibi_slopes": slopes, "scale": 0.5},
    ]  # fmt: skip

    def run(options):
        given = kv.ops.attention(collection, 0, query, offsets, out=out, **options)
        assert (given[1] is lse) if options.get("return_lse") else given is out
        return [(bytes(launch.params), launch.kernel) for launch in launches()[-2:]]

    slow = []
    for options in variants:
        reads._ATTENTION._quick = None
        slow.append(run(options))
    assert len({tuple(x) for x in slow}) == 6, "those with a schedule, and the log-sum-exp, are the same twice"
    monkeypatch.setattr(reads._ATTENTION, "_quick", quick.table())
    for _ in range(2):
        assert [run(options) for options in variants] == slow
    with monkeypatch.context() as only:
        only.setattr(kv.dispatch.signatures, "signed", None)
        assert [run(options) for options in variants] == slow
    assert len(reads._ATTENTION._quick) == len(variants) - 1
    for options, message in [
        ({"schedule": {"max_queries": "1"}}, "max_queries"), ({"schedule": {"max_queries": True}}, "max_queries"),
        ({"scale": "a"}, "scale must be a number"), ({"mask": "nul"}, "mask must be one of"),
        ({"lse": tensor((8, 2)), "return_lse": True}, "lse must have shape"), ({"window": 0}, "window must be in"),
        ({"alibi_slopes": lse}, "alibi_slopes must have"),
    ]:  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            run(options)


def test_steps_of_a_call_are_launched_in_order_under_a_lock():
    collection = pool(batch=1)
    query, out, offsets = tensor((1, 8, 128), "float16"), tensor((1, 8, 128), "float16"), tensor((2,), "int32")
    from kvarn.ops import reads

    kv.ops.attention(collection, 0, query, offsets, out=out)
    steps = [launch.kernel for launch in launches()]
    assert len(steps) == 2
    for _ in range(3):
        kv.ops.attention(collection, 0, query, offsets, out=out)
    assert [launch.kernel for launch in launches()] == 4 * steps
    first = [bytes(launch.params) for launch in launches()[:2]]
    assert [bytes(launch.params) for launch in launches()[-2:]] == first
    places = {on for k in reads._ATTENTION._known.values() for on in k.program._on.values()}
    with contextlib.ExitStack() as held:
        for on in places:
            held.enter_context(on.lock)
        thread = threading.Thread(target=kv.ops.attention, args=(collection, 0, query, offsets), kwargs={"out": out})
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "another call's steps are under way"
    thread.join()
    assert len(launches()) == 10
