# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Programs: their steps and scratch memory; TMA descriptors as arguments.

Not collected by itself: tests/runtime/test_launch.py runs it on the fake driver.
"""

import ctypes
import dataclasses
import gc
import threading

import numpy as np
import pytest
from fakes import LIBRARY, CudaArray, N, aligned, count, kernel, last, launches, params, ptx, tensor

from kvarn import artifact as A
from kvarn.dialect import dtypes, layout, tma_layout
from kvarn.runtime import driver, tensormap
from kvarn.runtime.launch import Launcher
from kvarn.runtime.program import Program


def two_steps(zeroed=False, alignment=0):
    fill_args = [A.Arg("out", "buffer", dtypes.i32, 1, written=True), A.Arg("v", "scalar", dtypes.i32)]
    fill = A.Entry("fill", fill_args, A.flatten(fill_args), (64, 1, 1))
    add_args = [
        A.Arg("x", "buffer", dtypes.f32, 2, alignment=alignment, written=True),
        A.Arg("s", "buffer", dtypes.i32, 1),
        A.Arg("a", "scalar", dtypes.bf16),
    ]
    add = A.Entry("add", add_args, A.flatten(add_args), attributes={"programmatic": False})
    args = [A.Arg("x", "buffer", dtypes.f32, 2), A.Arg("n", "scalar", dtypes.i32), A.Arg("a", "scalar", dtypes.bf16)]
    rows, n = ("arg", 0, "shape0"), ("arg", 1, "value")
    steps = [
        A.Step("fill", [("ceildiv", ("mul", rows, n), 64), 1, 1], [64, 1, 1], 0,
               [("workspace", "counts"), ("sub", n, 1)]),
        A.Step("add", [rows, ("min", n, ("device", "multiprocessors")), 1], [32, 1, 1], ("mul", n, 1024),
               [("arg", 0), ("workspace", "counts"), ("arg", 2)], {"programmatic": True}),
    ]  # fmt: skip
    return A.Artifact(
        "two",
        "sm_80",
        "8.0",
        {"ptx": ptx([fill, add])},
        [fill, add],
        args,
        steps,
        [A.Workspace("counts", ("mul", ("mul", rows, n), 4), zeroed)],
    )


def test_program_runs_its_steps_in_order():
    artifact = two_steps()
    program = Program(artifact)
    x = tensor((10, 8))
    program(x, 50, 0.5)
    first, second = launches()
    assert first.kernel == b"fill"
    assert list(first.shape) == [8, 1, 1, 64, 1, 1, 0]
    assert first.attributes == 0
    assert second.kernel == b"add"
    assert list(second.shape) == [10, 50, 1, 32, 1, 1, 51200]
    assert second.attributes == 1
    fill, add = (params(x, e) for x, e in zip((first, second), artifact.entries, strict=True))
    assert fill["v", "value"] == 49
    assert fill["out", "shape0"] == 500
    assert add["s", "data"] == fill["out", "data"]
    assert add["s", "shape0"] == 500
    assert add["x", "data"] == x.data_ptr()
    assert add["a", "value"] == 0x3F00
    program.prepare(x, 50, 0.5)()
    again = launches()[2:]
    assert [bytes(a.params) for a in again] == [bytes(first.params), bytes(second.params)]


def test_scratch_memory_grows_and_is_kept_a_stream():
    gc.collect()
    program = Program(two_steps())
    before, freed = count("allocated"), count("freed")
    x = tensor((10, 8))
    stream = LIBRARY.fake_stream(0)

    def scratch():
        return int(params(last(), program.artifact.entries[1])["s", "data"])

    program(x, 50, 0.5)
    at = scratch()
    for n in (50, 20, 50, 1):
        program(x, n, 0.5)
        assert scratch() == at
    assert count("allocated") == before + 1
    prepared = program.prepare(x, 40, 0.5)
    prepared()
    program(x, 60, 0.5)
    assert scratch() != at
    assert count("allocated") == before + 2
    assert count("freed") == freed
    program(x, 70, 0.5)
    assert count("allocated") == before + 2, "growing leaves room"
    prepared()
    assert scratch() == at, "what was prepared keeps its memory"
    program(x, 50, 0.5, stream=stream)
    assert scratch() != at, "another stream has its own"
    assert count("allocated") == before + 3


def test_scratch_memory_is_freed_with_the_program():
    gc.collect()
    before = count("freed")
    program = Program(two_steps())
    program(tensor((10, 8)), 50, 0.5)
    del program
    gc.collect()
    assert count("freed") == before + 1


def test_scratch_memory_grows_inside_a_capture_and_is_zeroed():
    program = Program(two_steps(zeroed=True))
    LIBRARY.fake_capturing(1)
    program(tensor((10, 8)), 50, 0.5)
    at = int(params(last(), program.artifact.entries[1])["s", "data"])
    assert ctypes.string_at(at, 2000) == bytes(2000)


def test_program_checks_as_strictly_as_its_kernels():
    program = Program(two_steps(alignment=128))
    x = tensor((10, 8))
    x._data += 16
    with pytest.raises(ValueError, match="argument 'x' of kernel 'two' must start at a multiple of 128 bytes"):
        program(x, 50, 0.5)
    with pytest.raises(ValueError, match="is written"):
        program(CudaArray(aligned((4, 8), np.float32), readonly=True), 50, 0.5)


def test_program_with_nothing_to_do_launches_nothing_and_bad_grids_launch_nothing_at_all():
    program = Program(two_steps())
    program(tensor((0, 8)), 50, 0.5)
    assert not launches()
    with pytest.raises(ValueError, match="needs 1024000 bytes"):
        program(tensor((10, 8)), 1000, 0.5)
    assert not launches(), "the first step did not run either"


def test_program_refuses_steps_that_do_not_fit():
    a = two_steps()
    for changes, message in [
        ({"args": (("arg", 0), ("sub", 1, 1))}, "argument 'out' of kernel 'fill' is not of the kind"),
        ({"args": (("workspace", "none"), 1)}, "has no workspace 'none': it has counts"),
        ({"args": (1, 1)}, "is a buffer and must be given whole, got the expression 1"),
        ({"args": (("workspace", "counts"), ("workspace", "counts"))}, "takes a workspace and must be a buffer"),
        ({"args": (("workspace", "counts", 8), 1)}, "takes a workspace and must be a buffer of two dimensions"),
        ({"args": (("arg", 7), 1)}, "argument index must be from 0 to 2, got 7"),
        ({"grid": (1, 1)}, "must have three expressions"),
    ]:
        steps = (dataclasses.replace(a.steps[0], **changes), a.steps[1])
        with pytest.raises(ValueError, match=message):
            Program(a.replace(steps=steps))


def test_division_by_zero_names_the_arguments():
    a = two_steps()
    steps = (dataclasses.replace(a.steps[0], grid=(("floordiv", 1, ("arg", 1, "value")), 1, 1)), a.steps[1])
    with pytest.raises(ValueError, match=r"'two' divides by zero for these arguments: x.shape0=10, .*n.value=0"):
        Program(a.replace(steps=steps))(tensor((10, 8)), 0, 0.5)


def test_threads_do_not_mix_the_steps_of_a_program():
    program = Program(two_steps())
    x = tensor((1, 8))

    def work(t):
        for i in range(20):
            program(x, 1 + t * 20 + i, 0.5, stream=0)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    found = launches()
    assert len(found) == 120
    for fill, add in zip(found[::2], found[1::2], strict=True):
        assert (fill.kernel, add.kernel) == (b"fill", b"add")
        v = params(fill, program.artifact.entries[0])["v", "value"]
        assert params(add, program.artifact.entries[1])["s", "shape0"] == v + 1


def test_kernel_and_program_are_not_confused():
    with pytest.raises(ValueError, match="use Program"):
        Launcher(two_steps())
    with pytest.raises(ValueError, match="use Launcher"):
        Program(kernel([N]))


# --- tensor maps -----------------------------------------------------------------------------------


def test_tensor_map_is_encoded_fast_to_slow_and_passed_by_value():
    pool = layout.spec_of("paged", "bf16", 8, 128, page_size=16)
    values = {"base": 1 << 20, "stride0": 16 * 8 * 128 * 6, "num_blocks": 10, "capacity": 16}
    fields = tuple(values.get(f.name, 0) for f in layout.cache_fields(pool))
    m = tensormap.describe(tma_layout.tiled(pool, 16), pool, fields)
    encoded = tensormap.encode(m, 0)
    numbers = np.frombuffer(encoded.encoded, np.uint64)
    assert numbers[0] == 1 << 20
    assert list(numbers[2:6]) == [128, 8, 16, 10]
    assert list(numbers[7:10]) == [256, 2048, 16 * 2048 * 6]
    assert list(np.frombuffer(encoded.encoded, np.uint32)[22:26]) == [64, 1, 16, 1]
    kind = driver.require().CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert int(numbers[1]) == int(kind) | 4 << 8 | 3 << 24, "type, rank, swizzle 128B"

    artifact = kernel([N, A.Arg("map", "tensormap"), A.Arg("f", "scalar", dtypes.f32)], target="sm_90a")
    for launch in (Launcher(artifact), lambda *args: Launcher(artifact).prepare(*args)()):
        launch(1, 32, 7, encoded, 2.0)
        found = params(last(), artifact.entry())
        assert found == {("n", "value"): 7, ("map", "value"): encoded.encoded, ("f", "value"): 2.0}
    with pytest.raises(TypeError, match="must be a TMA descriptor, as create_tma_tile"):
        Launcher(artifact)(1, 32, 7, m, 2.0)
    with pytest.raises(ValueError, match=r"needs sm_90 or later, got Device\(1, 'Fake B', sm_80\)"):
        tensormap.encode(m, 1)
