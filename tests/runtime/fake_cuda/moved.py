# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launches like one before whose buffers lie elsewhere: on every route they get the addresses of now.

Not collected by itself: tests/runtime/test_launch.py runs it on the fake driver, with and without a native part. The
fake driver's descriptors begin with the address of what they describe, so that those are looked into as well.
"""

import numpy as np
import pytest
from compiled import load_box
from fakes import LIBRARY, CudaArray, aligned, install_torch, kernel, launches, tensor
from reference import launch_maps
from steps import two_steps

import kvarn as kv
from kvarn import artifact as A
from kvarn.dialect import dtypes
from kvarn.ops import projection, reads, writes
from kvarn.runtime import quick
from kvarn.runtime.launch import Launcher
from kvarn.runtime.program import Program

BATCH, HEADS, SIZE = 2, 2, 128


@pytest.fixture(autouse=True)
def current():
    install_torch({0: LIBRARY.fake_stream(0)})


def array(shape, dtype):
    return CudaArray(aligned(shape, dtype))


def pool():
    return kv.PagedKVCacheCollection(
        array((5, 2, 2, 16, HEADS, SIZE), np.float16), array((BATCH,), np.int32), array((BATCH, 24), np.uint32), 1, 64
    )


# --- routes: what makes the buffers of a call, by name, and what launches on them -------------------------


def buffers_of(make):
    return lambda: {"x": make((4, 8)), "y": make((4, 8))}


def plain(make):
    """A kernel of two buffers with a number between them."""
    x, y = (A.Arg(name, "buffer", dtypes.f32, 2) for name in "xy")
    launcher = Launcher(kernel([x, A.Arg("n", "scalar", dtypes.i32), y]))
    return buffers_of(make), lambda at: launcher(1, 32, at["x"], 7, at["y"])


def f32_array(shape):
    return array(shape, np.float32)


def prepared(fresh, prepare):
    """What is prepared once for each set of buffers."""
    made = {}

    def launch(at):
        key = tuple(map(id, at.values()))
        if key not in made:
            made[key] = prepare(at)
        made[key]()

    return fresh, launch


def prepared_launch():
    launcher = Launcher(kernel([A.Arg("x", "buffer", dtypes.f32, 2), A.Arg("y", "buffer", dtypes.f32, 2)]))
    return prepared(buffers_of(tensor), lambda at: launcher.prepare(1, 32, at["x"], at["y"]))


def described_launch():
    """A kernel that is given a descriptor."""

    def fresh():
        return {"pool": pool(), "out": array(32, np.float16)}

    def launch(at):
        load_box[2, 32](7, at["pool"].get_value_cache(1).create_tma_tile(tile_rows=16), at["out"])

    return fresh, launch


def steps_of(run):
    def fresh():
        return {"x": tensor((10, 8))}

    return run(Program(two_steps()), fresh, lambda at: (at["x"], 50, 0.5))


def boxes_of(run):
    """A program that describes a collection."""

    def fresh():
        return {"pool": pool(), "out": array((2, 1, HEADS, 8, SIZE), np.float16), "at": array((1, 2), np.int32)}

    program = Program(launch_maps.copies(pool().spec, rows=8))
    return run(program, fresh, lambda at: (at["pool"], 1, at["out"], at["at"]))


def called(program, fresh, args):
    return fresh, lambda at: program(*args(at))


def prepared_program(program, fresh, args):
    return prepared(fresh, lambda at: program.prepare(*args(at)))


def append(make):
    def fresh():
        rows = {name: make((BATCH, HEADS, SIZE), "float16") for name in ("key", "value")}
        return {"pool": pool(), **rows, "offsets": make((BATCH + 1,), "int32")}

    return fresh, lambda at: kv.ops.append(at["pool"], 1, at["key"], at["value"], at["offsets"])


def attention(make):
    def fresh():
        rows = {name: make((BATCH, 8, SIZE), "float16") for name in ("query", "out")}
        return {"pool": pool(), **rows, "offsets": make((BATCH + 1,), "int32")}

    return fresh, lambda at: kv.ops.attention(at["pool"], 1, at["query"], at["offsets"], out=at["out"])


def project(make, schedule=None):
    """An operation that in a schedule of tiles describes two of its buffers."""

    def fresh():
        rows = {"x": make((BATCH, 64), "float16"), "weight": make((12 * SIZE, 64), "float16")}
        rows |= {"offsets": make((BATCH + 1,), "int32"), "out": make((BATCH, 8, SIZE), "float16")}
        return {"pool": pool(), **rows}

    return fresh, lambda at: kv.ops.project_append(
        at["pool"], 1, at["x"], at["weight"], at["offsets"], query_out=at["out"], schedule=schedule
    )


def project_described(make):
    return project(make, {"kind": "tile", "max_tokens": 64})


def arrays(shape, dtype):
    return array(shape, {"float16": np.float16, "int32": np.int32}[dtype])


ROUTES = {
    "Launcher, arrays": lambda: plain(f32_array),
    "Launcher, tensors": lambda: plain(tensor),
    "PreparedLaunch": prepared_launch,
    "Launcher, a descriptor": described_launch,
    "Program": lambda: steps_of(called),
    "PreparedProgram": lambda: steps_of(prepared_program),
    "Program, descriptors": lambda: boxes_of(called),
    "PreparedProgram, descriptors": lambda: boxes_of(prepared_program),
    **{f"{op.__name__}, {name}": lambda op=op, make=make: op(make)
       for op in (append, attention, project, project_described)
       for name, make in (("arrays", arrays), ("tensors", tensor))},
}  # fmt: skip


# --- what was launched ---------------------------------------------------------------------------------


def spans(buffer):
    """The memory of a call's operand."""
    parts = [buffer]
    if isinstance(buffer, kv.PagedKVCacheCollection):
        parts = [buffer.blocks, buffer.cache_lengths, buffer.lookup_table]
    return [np.lib.array_utils.byte_bounds(part.array) for part in parts]


def addresses(launch, sets):
    """Addresses among a launch's parameters, in descriptors too: (place, operand, offset in it) and which set's."""
    words = np.frombuffer(bytes(launch.params)[: launch.bytes // 8 * 8], np.uint64).tolist()
    return {
        (place, name, part, word - low): which for place, word in enumerate(words) for which, at in enumerate(sets)
        for name, buffer in at.items() for part, (low, high) in enumerate(spans(buffer)) if low <= word < high
    }  # fmt: skip


def moved(names):
    """Four calls alike, then each operand is elsewhere in turn, then all are."""
    still = dict.fromkeys(names, 0)
    each = [which for name in names for which in ({**still, name: 1}, still)]
    return [still] * 4 + [*each, dict.fromkeys(names, 1), still]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("route", ROUTES)
def test_a_call_has_the_addresses_of_its_own_buffers(route):
    fresh, launch = ROUTES[route]()
    sets, first = [fresh(), fresh()], None
    for which in moved(list(sets[0])):
        at = {name: sets[n][name] for name, n in which.items()}
        before = len(launches())
        launch(at)
        found = [addresses(x, sets) for x in launches()[before:]]
        assert {name for x in found for _, name, *_ in x} == set(which)
        for x in found:
            assert x == {key: which[key[1]] for key in x}
        places = [set(x) for x in found]
        first = first or places
        assert places == first


@pytest.mark.parametrize("make", [append, attention, project])
def test_calls_of_tensors_are_launched_by_the_native_part_where_there_is_one(make):
    operation = {append: writes._APPEND, attention: reads._ATTENTION, project: projection._RAGGED}[make]
    fresh, launch = make(tensor)
    at, before = fresh(), len(operation._quick or ())
    for _ in range(3):
        launch(at)
    assert len(operation._quick or ()) == before + quick.available()


# --- what is refused -----------------------------------------------------------------------------------


def test_a_warm_call_whose_output_is_read_is_refused_as_the_first_one_is():
    collection, offsets = pool(), tensor((3,), "int32")
    query, out, other = (tensor((2, 4, 128), "float16") for _ in range(3))
    for _ in range(3):
        kv.ops.attention(collection, 1, query, offsets, out=out)
    each, rest = divmod(len(launches()), 3)
    kv.ops.attention(collection, 1, query, offsets, out=other)
    inside = tensor((2, 4, 128), "float16")
    inside._data = collection.blocks.array.ctypes.data + 512
    for same, read in ((query, "query"), (inside, "collection")):
        with pytest.raises(ValueError, match=f"out must not share memory with {read}, which is read"):
            kv.ops.attention(collection, 1, query, offsets, out=same)
    assert rest == 0
    assert len(launches()) == 4 * each


def test_a_warm_call_refuses_a_collection_whose_tensor_has_other_memory_or_none():
    like = pool()
    blocks, bounds = tensor(like.blocks.array.shape, "float16"), (like.max_seq_length, like.max_cache_length)
    collection = kv.PagedKVCacheCollection(blocks, like.cache_lengths, like.lookup_table, *bounds)
    key, offsets = tensor((2, 2, 128), "float16"), tensor((3,), "int32")
    for _ in range(3):
        kv.ops.append(collection, 0, key, key, offsets)
    before, at = len(launches()), blocks._data
    for elsewhere, what in ((at + 4096, "elsewhere"), (0, "without memory")):
        blocks._data = elsewhere
        with pytest.raises(ValueError, match=f"the memory of the PagedKVCacheCollection is gone.* is {what}"):
            kv.ops.append(collection, 0, key, key, offsets)
    blocks._data = at
    assert len(launches()) == before
    kv.ops.append(collection, 0, key, key, offsets)
    assert len(launches()) == before + 1


def test_an_interrupt_while_addresses_are_packed_leaves_no_call_half_packed():
    fresh, launch = append(arrays)
    first, second = fresh(), fresh()
    writes._APPEND._known.clear()
    launch(first)
    (packed,) = [packed for known in writes._APPEND._known.values() for packed in known.launches.values()]
    kept = packed.bounds[0]

    class Interrupted:
        """The packet's memory, which takes one address."""

        left = 1

        def __setitem__(self, word, address):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            kept.words[word] = address

    packed.bounds[0] = kept._replace(words=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        launch({**second, "pool": first["pool"]})
    packed.bounds[0] = kept
    launch(first)
    assert bytes(launches()[-1].params) == bytes(launches()[0].params)
