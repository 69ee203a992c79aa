# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The loader on a real GPU, with PTX written by hand: no compiler is involved."""

import contextlib
import importlib
import threading

import numpy as np
import pytest

from kvarn import artifact as A
from kvarn.dialect import dtypes
from kvarn.runtime import assemble, device, driver, program
from kvarn.runtime.launch import Launcher
from kvarn.runtime.program import Program

pytestmark = pytest.mark.gpu

# x[i] = x[i] * scale + shift, for i < n. Parameters as a buffer of one dimension, an f32 and an i32 flatten.
SCALE = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 n, .param .f32 scale, .param .u32 shift)
{
  .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %rd<7>; .reg .f32 %f<6>;
  ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [n]; ld.param.f32 %f1, [scale]; ld.param.u32 %r1, [shift];
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  cvt.u64.u32 %rd3, %r5;
  setp.ge.u64 %p1, %rd3, %rd2;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd4, %rd1;
  mul.wide.u32 %rd5, %r5, 4;
  add.s64 %rd6, %rd4, %rd5;
  ld.global.f32 %f2, [%rd6];
  cvt.rn.f32.s32 %f3, %r1;
  fma.rn.f32 %f4, %f2, %f1, %f3;
  st.global.f32 [%rd6], %f4;
DONE:
  ret;
}
"""
ARGS = [
    A.Arg("x", "buffer", dtypes.f32, 1, written=True),
    A.Arg("scale", "scalar", dtypes.f32),
    A.Arg("shift", "scalar", dtypes.i32),
]
ENTRY = A.Entry("scale", ARGS, A.flatten(ARGS))
N = 1000


def kernel(ptx=SCALE, entry=ENTRY, target="sm_80", isa="7.0", **code):
    return A.Artifact(entry.name, target, isa, {"ptx": ptx, **code}, [entry])


class Buffer:
    """Device memory of the test's own, seen through __cuda_array_interface__."""

    def __init__(self, array, ordinal=0):
        self.shape, self.dtype, self.ordinal = array.shape, array.dtype, ordinal
        array = np.ascontiguousarray(array)
        with device.device(ordinal).active():
            self.address = int(driver.call("cuMemAlloc", array.nbytes))
            driver.call("cuMemcpyHtoD", self.address, array.ctypes.data, array.nbytes)

    @property
    def __cuda_array_interface__(self):
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "strides": None,
            "data": (self.address, False),
        }

    def __dlpack_device__(self):
        return 2, self.ordinal

    def read(self):
        array = np.empty(self.shape, self.dtype)
        with device.device(self.ordinal).active():
            driver.call("cuCtxSynchronize")
            driver.call("cuMemcpyDtoH", array.ctypes.data, self.address, array.nbytes)
        return array

    def __del__(self):
        with contextlib.suppress(driver.DriverError), device.device(self.ordinal).active():
            driver.call("cuMemFree", self.address)


def ramp(ordinal=0):
    return Buffer(np.arange(N, dtype=np.float32), ordinal)


@pytest.fixture
def stream():
    with device.device(0).active():
        found = driver.call("cuStreamCreate", 1)
        yield int(found)
        driver.call("cuStreamSynchronize", found)
        driver.call("cuStreamDestroy", found)


def test_launch_and_prepared_launch_compute():
    launcher, x = Launcher(kernel()), ramp()
    launcher(-(-N // 128), 128, x, 2.0, -3)
    np.testing.assert_array_equal(x.read(), np.arange(N) * 2.0 - 3)
    prepared = launcher.prepare(-(-N // 128), 128, x, 0.5, 1)
    prepared()
    prepared(0)
    np.testing.assert_array_equal(x.read(), ((np.arange(N) * 2.0 - 3) * 0.5 + 1) * 0.5 + 1)


def test_streams_of_other_libraries(stream):
    launcher, x = Launcher(kernel()), ramp()
    streams = [stream]
    for name in ("torch", "cupy", "cuda.core"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if name == "torch" and module.cuda.is_available():
            streams.append(module.cuda.Stream())
        elif name == "cupy":
            streams.append(module.cuda.Stream(non_blocking=True))
        elif name == "cuda.core":
            module.Device(0).set_current()
            streams.append(module.Device(0).create_stream())
    for s in streams:
        launcher(8, 128, x, 1.0, 1, stream=s)
        driver.call("cuCtxSynchronize")
    np.testing.assert_array_equal(x.read(), np.arange(N) + len(streams))


def test_torch_tensors_go_to_torchs_current_stream():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch cannot use the GPU")
    launcher = Launcher(kernel())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.arange(N, dtype=torch.float32, device="cuda")
        for _ in range(50):
            x.mul_(1.0)
            launcher(8, 128, x, 1.0, 1)
        side.synchronize()
        np.testing.assert_array_equal(x.cpu().numpy(), np.arange(N) + 50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher(8, 128, x, 1.0, 1)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(x.cpu().numpy(), np.arange(N) + 52)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        launcher(8, 128, x[::2], 1.0, 1)


@contextlib.contextmanager
def captured(stream):
    """Capture what is launched on a stream in the strictest mode; gives a list that then holds the executable graph."""
    b = driver.require()
    handle, made = b.CUstream(stream), []
    driver.call("cuStreamBeginCapture", handle, b.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    yield made
    graph = driver.call("cuStreamEndCapture", handle)
    made.append(driver.call("cuGraphInstantiate", graph, 0))


def test_capture_of_first_launches(stream):
    """Nothing was launched before the capture: loading inside of it must not break it."""
    launcher, x = Launcher(kernel(SCALE.replace("scale(", "first("), A.Entry("first", ARGS, A.flatten(ARGS)))), ramp()
    prepared = launcher.prepare(8, 128, x, 1.0, 1)
    with captured(stream) as made:
        prepared(stream)
        launcher(8, 128, x, 2.0, 0, stream=stream)
    np.testing.assert_array_equal(x.read(), np.arange(N))
    for _ in range(3):
        driver.call("cuGraphLaunch", made[0], driver.require().CUstream(stream))
    expected = np.arange(N, dtype=np.float32)
    for _ in range(3):
        expected = (expected + 1) * 2
    np.testing.assert_array_equal(x.read(), expected)


def scratch_program():
    """Scratch memory, zeroed, plus 5, then x scaled: two launches."""
    grid = [("ceildiv", ("arg", 0, "shape0"), 128), 1, 1]
    steps = [
        A.Step("scale", grid, [128, 1, 1], 0, [("workspace", "w"), 1.0, 5]),
        A.Step("scale", grid, [128, 1, 1], 0, [("arg", 0), 2.0, 1]),
    ]
    return A.Artifact(
        "twice",
        "sm_80",
        "7.0",
        {"ptx": SCALE},
        [ENTRY],
        [ARGS[0]],
        steps,
        [A.Workspace("w", ("mul", ("arg", 0, "shape0"), 4), True)],
    )


def test_program_and_its_scratch_memory_in_a_capture(stream):
    program, x = Program(scratch_program()), ramp()
    with captured(stream) as made:  # the first run of all: scratch memory is made in here
        program(x, stream=stream)
    for _ in range(2):
        driver.call("cuGraphLaunch", made[0], driver.require().CUstream(stream))
    np.testing.assert_array_equal(x.read(), (np.arange(N) * 2.0 + 1) * 2 + 1)
    [(address, _)] = program._on[0].scratch(stream, [4 * N])
    w = np.empty(N, np.float32)
    driver.call("cuMemcpyDtoH", w.ctypes.data, address, 4 * N)
    np.testing.assert_array_equal(w, np.full(N, 10.0), "zeroed once, then 5 was added twice")


def test_threads_without_a_context(stream):
    """New threads have no current context: launches there work on stream 0 and on a stream, and do not mix."""
    launcher = Launcher(kernel())
    buffers = [ramp() for _ in range(4)]
    prepared = [launcher.prepare(8, 128, x, 1.0, 1) for x in buffers]
    failed = []

    def work(i):
        try:
            for _ in range(100):
                prepared[i](stream)
                launcher(8, 128, buffers[i], 1.0, 1, stream=stream)
            driver.call("cuStreamSynchronize", driver.require().CUstream(stream))
            prepared[i](0)
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    for x in buffers:
        np.testing.assert_array_equal(x.read(), np.arange(N) + 201)


def test_a_second_device():
    if driver.status().devices < 2:
        pytest.skip("there is one GPU only")
    launcher = Launcher(kernel())
    first, second = ramp(0), ramp(1)
    with device.device(0).active():
        for x in (first, second):
            launcher(8, 128, x, 1.0, 1)
            launcher.prepare(8, 128, x, 1.0, 1)()
    for x in (first, second):
        np.testing.assert_array_equal(x.read(), np.arange(N) + 2)
    with device.device(1).active():
        foreign = int(driver.call("cuStreamCreate", 1))
    with pytest.raises(ValueError, match="got one of device 1"):
        launcher(8, 128, first, 1.0, 1, stream=foreign)


SHARED = """
.version 7.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry far(.param .u64 x, .param .u64 n, .param .u32 at)
{
  .reg .b32 %r<4>; .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [x]; ld.param.u32 %r1, [at];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r2, dynamic;
  add.u32 %r2, %r2, %r1;
  st.shared.u32 [%r2], 77;
  ld.shared.u32 %r3, [%r2];
  st.global.u32 [%rd2], %r3;
  ret;
}
"""


def test_dynamic_shared_memory_above_48_kib():
    args = [A.Arg("x", "buffer", dtypes.i32, 1, written=True), A.Arg("at", "scalar", dtypes.i32)]
    size = device.device(0).shared_bytes
    x = Buffer(np.zeros(1, np.int32))
    entry = A.Entry("far", args, A.flatten(args), shared_bytes=size)
    Launcher(kernel(SHARED, entry))(1, 1, x, size - 4)
    assert x.read()[0] == 77
    entry = A.Entry("far", args, A.flatten(args), shared_bytes=size + 1)
    with pytest.raises(ValueError, match=f"but a block on .* has {size}"):
        Launcher(kernel(SHARED, entry))(1, 1, x, 0)


CLUSTER = """
.version 7.8
.target sm_90
.address_size 64
.visible .entry ranks(.param .u64 x, .param .u64 n)
{
  .reg .b32 %r<4>; .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [x];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %cluster_ctarank;
  griddepcontrol.wait;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd2, %rd3;
  st.global.u32 [%rd4], %r2;
  ret;
}
"""


def needs(capability):
    if device.device(0).capability < capability:
        pytest.skip(f"needs sm_{capability[0]}{capability[1]}, this is {device.device(0)!r}")


@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_clusters_with_programmatic_launch(size):
    needs((9, 0))
    args = [A.Arg("x", "buffer", dtypes.i32, 1, written=True)]
    entry = A.Entry("ranks", args, A.flatten(args), cluster=(size, 1, 1), attributes={"programmatic": True})
    x = Buffer(np.full(32, -1, np.int32))
    launcher = Launcher(kernel(CLUSTER, entry, "sm_90", "7.8"))
    prepared = launcher.prepare(32, 1, x)
    for _ in range(3):
        prepared()
    np.testing.assert_array_equal(x.read(), np.arange(32) % size)


def test_cubins_and_bundles(tmp_path):
    chip = "sm_{}{}".format(*device.device(0).capability)
    try:
        cubin = assemble.assemble(SCALE, chip).cubin
    except assemble.MissingToolError as e:
        pytest.skip(str(e))
    path = kernel("no PTX", target="sm_80").replace(code={f"cubin.{chip}": cubin}).save(tmp_path / "scale.kvarn")
    x = ramp()
    program.load(path)(8, 128, x, 2.0, 0)
    np.testing.assert_array_equal(x.read(), np.arange(N) * 2.0)
    loaded = device.load(A.Artifact.load(path), ENTRY, 0)
    assert loaded.registers > 0
    assert loaded.local_bytes == 0


def test_what_the_device_and_driver_cannot_run_is_refused_by_name():
    on = device.device(0)
    x = ramp()
    with pytest.raises(ValueError, match=rf"compiled for sm_75a and cannot run on .*{on.name}"):
        Launcher(kernel(SCALE.replace("sm_80", "sm_75a")))(8, 128, x, 1.0, 0)
    if driver.max_isa(driver.status().version) is not None:
        with pytest.raises(ValueError, match=r"is in PTX ISA 99\.0, but the driver"):
            Launcher(kernel(SCALE.replace("7.0", "99.0")))(8, 128, x, 1.0, 0)
    with pytest.raises(driver.DriverError, match=r"(?s)CUDA_ERROR_INVALID_PTX.*line \d+"):
        Launcher(kernel(SCALE.replace("fma.rn.f32", "fma.rn.fxx")))(8, 128, x, 1.0, 0)
    with pytest.raises(ValueError, match="has no kernel 'scaled'"):
        Launcher(kernel(entry=A.Entry("scaled", ARGS, A.flatten(ARGS))))(8, 128, x, 1.0, 0)
    if driver.has("cuKernelGetParamInfo"):
        with pytest.raises(ValueError, match=r"of \[8, 8, 4, 4\] bytes, but the ABI .* has \[8, 8, 4\]"):
            Launcher(kernel(entry=A.Entry("scale", ARGS[:2], A.flatten(ARGS[:2]))))(8, 128, x, 1.0)
