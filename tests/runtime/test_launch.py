# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The loader without a GPU: what it decides by itself, the host route, and the cases on a fake driver."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from kvarn import artifact as A
from kvarn.dialect import dtypes
from kvarn.runtime import device, driver, quick
from kvarn.runtime.launch import Launcher
from kvarn.runtime.program import Program

FAKE = Path(__file__).parent / "fake_cuda"
X = A.Arg("x", "buffer", dtypes.f32, 2, written=True)
N = A.Arg("n", "scalar", dtypes.f16)


# --- on a fake driver ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory):
    """Environment of a process that finds the fake driver."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to build the fake driver with")
    folder = tmp_path_factory.mktemp("fake_cuda")
    options = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *options, FAKE / "cuda.c", "-o", folder / "libcuda.so.1", "-ldl"], check=True)
    paths = [str(FAKE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def native_launches(tmp_path_factory):
    """A folder with the native part of the runtime, built as CMakeLists.txt does."""
    compiler, headers = shutil.which("c++") or shutil.which("g++"), Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").is_file():
        pytest.skip("no C++ compiler, or no headers of Python, to build the native part with")
    folder = tmp_path_factory.mktemp("native")
    source, built = Path(quick.__file__).with_name("launches.cpp"), folder / "_launches.abi3.so"
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run([compiler, *options, f"-isystem{headers}", source, "-o", built], check=True)
    return folder


CASES = {
    False: ["arguments.py", "places.py", "steps.py", "compiled.py", "moved.py"],
    True: ["places.py", "warm.py", "moved.py"],
}
OF_COMPILER = ("compiled.py", "warm.py", "moved.py")  # which need the MLIR bindings


@pytest.mark.parametrize("native", CASES)
def test_the_cases_pass_on_the_fake_driver(fake_driver, native, request):
    cases = [x for x in CASES[native] if x not in OF_COMPILER or importlib.util.find_spec("mlir")]
    folder = str(request.getfixturevalue("native_launches")) if native else ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(FAKE / x) for x in cases)]
    done = subprocess.run(command, env={**fake_driver, "FAKE_NATIVE": folder}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(("settings", "reason"), [
    ({"FAKE_INIT": "100"}, "cuInit failed: CUDA_ERROR_NO_DEVICE (100): as the fake driver says; check nvidia-smi"),
    ({"FAKE_VERSION": "11080"}, "the driver must be of CUDA 12.0 or newer, got one of CUDA 11.8: update it"),
    ({"FAKE_DEVICES": "0"}, "CUDA_ERROR_NO_DEVICE"),
])  # fmt: skip
def test_probe_says_why_there_is_no_gpu(fake_driver, settings, reason):
    code = "from kvarn.runtime import driver; s = driver.status(); print(s.usable, s.reason)"
    done = subprocess.run([sys.executable, "-c", code], env={**fake_driver, **settings}, capture_output=True, text=True)
    assert done.stdout.startswith("False "), done.stderr
    assert reason in done.stdout


def test_an_old_driver_has_no_parameter_info_and_reads_older_ptx(fake_driver):
    code = """if True:
        from fakes import N, kernel, last
        from kvarn.runtime import driver
        from kvarn.runtime.launch import Launcher
        assert not driver.has("cuKernelGetParamInfo") and driver.has("cuLaunchKernelEx")
        Launcher(kernel([N], isa="8.2"))(1, 32, 1, stream=0)
        assert last().kernel == b"k"
        try:
            Launcher(kernel([N], "l", isa="8.3"))(1, 32, 1)
        except ValueError as e:
            print(e)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], env={**fake_driver, "FAKE_VERSION": "12020"}, capture_output=True, text=True
    )
    assert "PTX ISA 8.3, but the driver of device 0, Fake A (CUDA 12.2) reads PTX up to 8.2" in done.stdout, done.stderr


# --- which code runs where -----------------------------------------------------------------------


@pytest.mark.parametrize(("chip", "capability", "ptx", "cubin"), [
    ("sm_80", (8, 0), True, True), ("sm_80", (8, 6), True, True), ("sm_80", (9, 0), True, False),
    ("sm_86", (8, 0), False, False), ("sm_90a", (9, 0), True, True), ("sm_90a", (10, 0), False, False),
    ("sm_90", (10, 0), True, False), ("sm_100a", (10, 0), True, True), ("sm_100a", (10, 3), False, False),
    ("sm_100f", (10, 3), True, True), ("sm_100f", (12, 0), False, False), ("sm_100", (12, 0), True, False),
])  # fmt: skip
def test_what_runs_where(chip, capability, ptx, cubin):
    assert device.runs_on(chip, capability, binary=False) == ptx
    assert device.runs_on(chip, capability, binary=True) == cubin


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_80")],
)
def test_target_for_a_device_runs_on_it(capability, target):
    assert device.target_of(capability) == target
    assert device.runs_on(target, capability, binary=False)


def test_ptx_facts_are_read_past_comments_and_odd_names_of_chips_are_refused():
    text = "//\n// .version 1.0\n//\n\n.version 8.6\n.target sm_90a, debug\n.address_size 64\n"
    assert device.ptx_facts(text) == ((8, 6), "sm_90a")
    for chip in ("sm_9", "90a", "sm_90b", "compute_90", "sm_90a "):
        with pytest.raises(ValueError, match="a chip must be named like sm_80"):
            device.parse_chip(chip)
    with pytest.raises(ValueError, match="must declare"):
        device.ptx_facts("no ptx")


@pytest.mark.parametrize(
    ("cuda", "isa"),
    [((12, 0), (8, 0)), ((12, 6), (8, 5)), ((12, 8), (8, 7)), ((13, 0), (9, 0)), ((13, 2), (9, 2)), ((14, 0), None)],
)
def test_isa_of_a_driver(cuda, isa):
    assert driver.max_isa(cuda) == isa


def test_select_says_what_the_bundle_has():
    def variant(target, **code):
        return A.Artifact("k", target, "", code, [A.Entry("k")])

    variants = [variant("host"), variant("sm_80"), variant("sm_90a")]
    assert device.select(variants, (9, 0)).target == "sm_90a"
    assert device.select(variants, (10, 0)).target == "sm_80"
    assert device.select(variants, None).target == "host"
    assert device.select([variant("sm_100a", **{"cubin.sm_90": b"x"})], (9, 0)).target == "sm_100a"
    with pytest.raises(ValueError, match="no variant of 'k' runs on the host: the bundle has sm_80, sm_90a"):
        device.select(variants[1:], None)


# --- the host route ------------------------------------------------------------------------------


class Recorder:
    """A host executor that keeps what it is given."""

    def __init__(self):
        self.runs = []

    def run(self, entry, grid, block, values):
        self.runs.append((entry.name, tuple(grid), tuple(block), tuple(values)))


def host_kernel(args, **entry):
    return A.Artifact("k", "host", "", {"llvm": ""}, [A.Entry("k", args, A.flatten(args), **entry)])


def test_host_launch_gives_the_executor_every_parameter():
    recorder = Recorder()
    launcher = Launcher(host_kernel([X, N]), executor=recorder)
    x = np.zeros((3, 5), np.float32)
    launcher((2, 3), 4, x, 1.5)
    launcher.prepare((2, 3), 4, x, 1.5)()
    assert recorder.runs == [("k", (2, 3, 1), (4, 1, 1), (x.ctypes.data, 3, 5, 5, 0x3E00))] * 2


def test_host_launch_checks_as_a_device_launch_does():
    launcher = Launcher(host_kernel([X, N], max_threads=64), executor=Recorder())
    x = np.zeros((3, 5), np.float32)
    for args, error, message in [
        ((1, 128, x, 1.0), ValueError, "at most 64 threads, got 128"),
        ((1, 32, x.astype(np.float64), 1.0), TypeError, "must have dtype f32, got f64"),
        ((1, 32, x, 1e6), ValueError, "must fit f16"),
        ((1, 32, x.T, 1.0), ValueError, "contiguous in its last dimension"),
    ]:
        with pytest.raises(error, match=message):
            launcher(*args)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        launcher(1, 32, x, 1.0)


def test_host_program_has_zeroed_aligned_scratch_memory():
    args = [A.Arg("s", "buffer", dtypes.f32, 1)]
    entry = A.Entry("k", args, A.flatten(args))
    step = A.Step("k", [("arg", 0, "value"), 1, 1], [1, 1, 1], 0, [("workspace", "w")])
    n = A.Arg("n", "scalar", dtypes.i32)
    scratch = A.Workspace("w", ("mul", ("arg", 0, "value"), 8), True)
    a = A.Artifact("p", "host", "", {"llvm": ""}, [entry], [n], [step], [scratch])
    recorder = Recorder()
    program = Program(a, executor=recorder)
    for n in (3, 2, 1000):
        program(n)
    (first, second, third) = recorder.runs
    assert [r[1][0] for r in recorder.runs] == [3, 2, 1000]
    assert [r[3][1] for r in recorder.runs] == [6, 4, 2000], "extent in elements of the kernel's dtype"
    assert first[3][0] == second[3][0] != third[3][0]
    assert third[3][0] % 256 == 0


def test_device_code_without_a_driver_says_why():
    if driver.status().usable:
        pytest.skip("there is a GPU here")
    ptx = A.Artifact("k", "sm_80", "8.0", {"ptx": ".version 8.0\n.target sm_80\n"}, [A.Entry("k", [N], A.flatten([N]))])
    with pytest.raises(RuntimeError, match=r"no GPU can be used: .*(driver|cuda-bindings)"):
        Launcher(ptx)(1, 32, 1.0)
