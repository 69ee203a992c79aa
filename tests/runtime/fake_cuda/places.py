# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which code runs on which device; streams, contexts, threads; torch tensors.

Not collected by itself: tests/runtime/test_launch.py runs it on the fake driver.
"""

import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fakes import (
    LIBRARY,
    CudaArray,
    N,
    X,
    aligned,
    count,
    good,
    install_torch,
    kernel,
    last,
    launches,
    params,
    ptx,
    tensor,
)

from kvarn import artifact as A
from kvarn.artifact import bundle
from kvarn.dialect import dtypes
from kvarn.env import env
from kvarn.runtime import device, driver
from kvarn.runtime.assembler_log import AssemblyError
from kvarn.runtime.launch import Launcher
from kvarn.runtime.program import load


def test_code_for_another_chip_names_both():
    with pytest.raises(ValueError, match=r"for sm_100a and cannot run on device 0, Fake A \(sm_90\): .*'sm_90a'"):
        Launcher(kernel([N], target="sm_100a"))(1, 32, 1)
    x = CudaArray(aligned((4, 8), np.float32), device=1)
    with pytest.raises(ValueError, match=r"for sm_90a and cannot run on device 1, Fake B \(sm_80\): .*'sm_80'"):
        Launcher(kernel([X], target="sm_90a"))(1, 32, x)


def test_driver_log_is_in_the_error_for_bad_ptx():
    a = kernel([N])
    a = a.replace(code={"ptx": a.code["ptx"] + "syntax error"})
    with pytest.raises(driver.DriverError, match=r"(?s)INVALID_PTX \(218\).*compile again.*line 7: a syntax error"):
        Launcher(a)(1, 32, 1)


def test_products_that_the_driver_serializes_are_an_error():
    a = kernel([N])
    a = a.replace(code={"ptx": a.code["ptx"] + "// wgmma.mma_async poorly"})
    with pytest.raises(AssemblyError, match=r"of kernel k must be kept,.* the driver of .*Fake A.*\n.*C7510"):
        Launcher(a)(1, 32, 1)
    with env.override(allow_serialized=True), pytest.warns(RuntimeWarning, match="C7510"):
        Launcher(a)(1, 32, 1)


def test_cubin_of_the_closest_chip_is_taken():
    a = kernel([N], "twice", "sm_90a")
    cubin = b"\x7fELF" + ptx([A.Entry("twice", [N], A.flatten([N]))]).encode() + b"\0"
    wrong = b"\x7fELF.entry other() \0"
    a = a.replace(code={"ptx": "not used", "cubin": cubin, "cubin.sm_80": wrong, "cubin.sm_100a": wrong})
    Launcher(a)(1, 32, 1)
    assert last().kernel == b"twice"


def test_code_that_does_not_belong_to_the_abi_is_refused():
    a = kernel([N])
    other = kernel([X, N])
    with pytest.raises(ValueError, match=r"of \[4\] bytes, but the ABI of its artifact has \[8, 8, 8, 8, 4\]"):
        Launcher(other.replace(code=a.code))(1, 32, good(), 1)
    renamed = kernel([N], "other")
    with pytest.raises(ValueError, match="has no kernel 'other'"):
        Launcher(renamed.replace(code=a.code))(1, 32, 1)


def test_code_is_loaded_once_a_process():
    before = count("libraries")
    for _ in range(3):
        launcher = Launcher(kernel([N], "loaded_once"))
        launcher(1, 32, 1)
        launcher.prepare(1, 32, 1)()
    assert count("libraries") == before + 1
    a = kernel([X], "loaded_once_for_both")
    Launcher(a)(1, 32, good())
    Launcher(a)(1, 32, CudaArray(aligned((4, 8), np.float32), device=1))
    assert count("libraries") == before + 2
    assert [x.device for x in launches()[-2:]] == [0, 1]


def test_bundle_runs_the_variant_of_the_device(tmp_path):
    path = bundle.save(tmp_path / "b", [kernel([N], target=t) for t in ("sm_80", "sm_90a", "sm_100a")])
    launcher = load(path)
    assert launcher.artifact.target == "sm_90a"
    launcher(1, 32, 1)
    assert load(path, "sm_80").artifact.target == "sm_80"
    with pytest.raises(ValueError, match="no variant for target 'sm_70'"):
        load(path, "sm_70")
    path = bundle.save(tmp_path / "c", [kernel([N], target=t) for t in ("sm_100a", "sm_120a")])
    with pytest.raises(ValueError, match="no variant of 'k' runs on sm_90: the bundle has sm_100a, sm_120a"):
        load(path)


def test_failed_launch_says_what_was_launched():
    launcher = Launcher(kernel([N]))
    prepared = launcher.prepare((2, 3), 64, 1)
    for launch in (prepared, lambda: launcher((2, 3), 64, 1)):
        LIBRARY.fake_fail(700)
        with pytest.raises(
            driver.DriverError,
            match=r"(?s)'k' on Device.*ILLEGAL_ADDRESS \(700\).*KVARN_CHECK=1"
            r".*grid \(2, 3, 1\), block \(64, 1, 1\), 0 \+ 4096 bytes",
        ):
            launch()


# --- streams, contexts, threads --------------------------------------------------------------------


def test_streams_of_every_kind():
    launcher = Launcher(kernel([N]))
    prepared = launcher.prepare(1, 32, 1)
    handle = LIBRARY.fake_stream(0)
    protocol = types.SimpleNamespace(__cuda_stream__=lambda: (0, handle))
    old_protocol = types.SimpleNamespace(__cuda_stream__=(0, handle))
    torch, cupy = types.SimpleNamespace(cuda_stream=handle), types.SimpleNamespace(ptr=handle)
    for stream in (handle, protocol, old_protocol, torch, cupy):
        for launch in (lambda s=stream: launcher(1, 32, 1, stream=s), lambda s=stream: prepared(s)):
            launch()
            assert last().stream == handle
    for stream in ("0", 1.0, True, object()):
        with pytest.raises(TypeError, match="stream must be None, an int"):
            prepared(stream)
    with pytest.raises(TypeError, match="must have version 0, got 1"):
        prepared(types.SimpleNamespace(__cuda_stream__=lambda: (1, handle)))


def test_default_stream_is_the_frameworks_current_one(monkeypatch):
    launcher = Launcher(kernel([X]))
    first, second = LIBRARY.fake_stream(0), LIBRARY.fake_stream(0)
    x = tensor((4, 8))
    prepared = launcher.prepare(1, 32, x)
    prepared()
    assert last().stream == 0
    current = {0: first}
    install_torch(current)
    prepared()
    launcher(1, 32, x)
    assert [x.stream for x in launches()[-2:]] == [first, first]
    current[0] = second
    launcher(1, 32, x)
    assert last().stream == second

    cupy = types.ModuleType("cupy")
    cupy.ndarray = type("ndarray", (CudaArray,), {})
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=first))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launcher(1, 32, x)
    assert last().stream == second, "torch's for torch's tensors"
    launcher(1, 32, cupy.ndarray(aligned((4, 8), np.float32)))
    assert last().stream == first, "CuPy's for CuPy's arrays"


def test_torch_before_it_starts_cuda_has_stream_zero():
    install_torch({})
    sys.modules["torch"].cuda.is_initialized = lambda: False
    Launcher(kernel([X]))(1, 32, tensor((4, 8)))
    assert last().stream == 0


def test_stream_of_another_device_is_refused():
    launcher = Launcher(kernel([N]))
    stream = LIBRARY.fake_stream(1)
    for launch in (lambda: launcher(1, 32, 1, stream=stream), lambda: launcher.prepare(1, 32, 1)(stream)):
        with pytest.raises(ValueError, match=r"must be of Device\(0, 'Fake A', sm_90\), where .*, got one of device 1"):
            launch()
    assert not launches()


def test_default_stream_runs_on_the_arguments_device_and_puts_the_context_back():
    launcher = Launcher(kernel([X]))
    on_one = CudaArray(aligned((4, 8), np.float32), device=1)
    other = device.device(0).primary
    driver.call("cuCtxSetCurrent", driver.require().CUcontext(other))
    launcher(1, 32, on_one)
    launcher.prepare(1, 32, on_one)()
    assert [x.device for x in launches()] == [1, 1]
    assert driver.current_context() == other


def test_a_context_of_the_same_device_that_is_not_primary_is_used():
    mine = LIBRARY.fake_context(0)
    driver.call("cuCtxSetCurrent", driver.require().CUcontext(mine))
    Launcher(kernel([N]))(1, 32, 1)
    assert driver.current_context() == mine
    assert last().device == 0


@pytest.mark.parametrize("alone", [False, True])
def test_a_thread_without_a_context_gets_the_primary_one(monkeypatch, alone):
    monkeypatch.setattr(device.device(0), "alone", alone)
    launcher = Launcher(kernel([N]))
    prepared = launcher.prepare(1, 32, 1)
    LIBRARY.fake_needs_context(1)
    stream = LIBRARY.fake_stream(0)

    def work():
        for handle in (stream, 0):
            prepared(handle)
            launcher(1, 32, 1, stream=handle)

    with ThreadPoolExecutor(1) as other:
        other.submit(work).result()
    assert len(launches()) == 4


def test_threads_do_not_mix_their_parameters():
    a = kernel([A.Arg("i", "scalar", dtypes.i32), A.Arg("twice", "scalar", dtypes.i64)])
    launcher = Launcher(a)
    handles = [LIBRARY.fake_stream(0) for _ in range(4)]
    prepared = launcher.prepare(1, 32, 1000, 2000)

    def work(t):
        for i in range(t * 100, t * 100 + 25):
            launcher(1, 32, i, 2 * i, stream=handles[t])
            prepared(handles[t])

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(launches()) == 200
    seen = []
    for launch in launches():
        found = params(launch, a.entry())
        i = int(found["i", "value"])
        assert found["twice", "value"] == 2 * i
        if i != 1000:
            assert launch.stream == handles[i // 100]
            seen.append(i)
    assert len(set(seen)) == 100


# --- torch tensors ---------------------------------------------------------------------------------


def test_torch_tensors_are_read_and_checked():
    launcher = Launcher(kernel([X]))
    x = tensor((4, 8))
    for shape in ((4, 8), (2, 16), (4, 8)):
        t = tensor(shape)
        launcher(1, 32, t)
        assert [int(v) for v in params(last(), launcher.entry).values()] == [t.data_ptr(), *shape, shape[1]]
    for bad, error, message in [
        (tensor((4, 8), "bfloat16"), TypeError, "must have dtype f32, got bf16"),
        (tensor((4,)), ValueError, "must have 2 dimensions"),
    ]:
        with pytest.raises(error, match=message):
            launcher(1, 32, bad)
    x.negated = True
    with pytest.raises(ValueError, match="negated"):
        launcher(1, 32, x)


def test_a_call_like_one_before_packs_its_own_addresses_and_numbers():
    entry = kernel([X, A.Arg("f", "scalar", dtypes.f32), A.Arg("y", "buffer", dtypes.f32, 2)])
    launcher, streams_ = Launcher(entry), [LIBRARY.fake_stream(0) for _ in range(2)]
    tensors = [tensor((4, 8)) for _ in range(3)]
    for repeat in range(4):  # the third call with a signature is packed by the second
        for x, f, y, stream in [
            (0, 0.0, 1, 0), (1, 0.0, 2, 0), (1, -0.0, 2, 0), (2, 0.0, 2, 1), (0, 2.0, 0, 1), (0, 2, 0, 1),
        ]:  # fmt: skip
            launcher(1, 32, tensors[x], f, tensors[y], stream=streams_[stream])
            found = params(last(), entry.entry())
            assert found["x", "data"] == tensors[x].data_ptr(), repeat
            assert found["y", "data"] == tensors[y].data_ptr()
            assert str(found["f", "value"]) == str(np.float32(f))
            assert last().stream == streams_[stream]
    assert len(launches()) == 24


def test_a_call_like_one_before_writes_nothing_that_the_code_takes_for_read_only():
    y = A.Arg("y", "buffer", dtypes.f32, 2, read_only=True)
    launcher, (a, b) = Launcher(kernel([X, y])), (tensor((4, 8)) for _ in range(2))
    below = tensor((4, 8))
    below._data = a.data_ptr() - 16
    for repeat in range(4):  # the third call with a signature is packed by the second
        launcher(1, 32, a, b)
        assert len(launches()) == repeat + 1
        for read in (a, below):
            with pytest.raises(ValueError, match="kernel 'k': x must not share memory with y, which the code takes"):
                launcher(1, 32, a, read)
        assert len(launches()) == repeat + 1
    with pytest.raises(ValueError, match="x must not share memory with y"):
        launcher.prepare(1, 32, a, below)
