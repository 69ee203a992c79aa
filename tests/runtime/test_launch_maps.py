# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Descriptors that a program makes at launch: what kernels load through them, in the interpreter; a GPU runs it too.

What is expected is made from the blocks alone. ``fake_cuda/compiled.py`` has the launch path.
"""

import dataclasses

import numpy as np
import pytest
from caches.test_tma_copies import HEADS, bits, pool
from reference import launch_maps, places
from reference.launch_maps import copies, copy_boxes, copy_by_lanes, expected

import kvarn as kv
from kvarn.runtime.program import Program

LAYER = 2
DTYPES, SWIZZLES = ("bf16", "f16", "f32", "f8e4m3", "i8"), ("none", "32B", "64B", "128B", "64B")


@pytest.fixture
def place():
    return places.Interpreted()


def check(place, collection, rows=8, kernel=copy_boxes, layer=LAYER, **tile):
    """Boxes of the pool's first and last pages, of its end, of no page, and of slots past a page's end."""
    pages, slots = collection.get_key_cache(layer).blocks.shape[:2]
    places_ = [(0, 0), (1, slots - rows), (pages - 1, 0), (pages, 0), (pages + 7, 0), (-1, 0), (1, slots - rows + 1)]
    at = np.array([*places_, (0, slots)], np.int32)
    halves = [bits(c.blocks) for c in (collection.get_key_cache(layer), collection.get_value_cache(layer))]
    program = copies(collection.spec, kernel, rows=rows, **tile)
    columns = program.entries[0].args[0].spec.tile[-1]
    out = place.put(np.zeros((2, len(at), HEADS, rows, columns), collection.dtype.numpy))
    place.program(program, place.collection(collection), layer, out, place.put(at))
    np.testing.assert_array_equal(bits(place.get(out)), expected(halves, at, rows, columns))


# Pools, and what their descriptors are asked for: sizes of heads beside those of boxes, elements and swizzles, layers,
# some columns, and boxes that lanes load side by side: 16 column chunks on one barrier, with and without a policy.
BOXES = [
    *(({"kind": kind, "head_size": size}, {}) for kind in ("paged", "fa3") for size in (64, 72, 80)),
    *(({"kind": "continuous", "head_size": size}, {}) for size in (96, 112, 128)),
    *(({"dtype": t, "head_size": 80}, {"swizzle": s}) for t, s in zip(DTYPES, SWIZZLES, strict=True)),
    *(({"kind": "fa3"}, {"layer": layer}) for layer in (0, 1)),
    ({"head_size": 128}, {"columns": 64}),
    *(
        ({"kind": k, "head_size": n}, {"kernel": copy_by_lanes})
        for k, n in (("paged", 64), ("fa3", 80), ("paged", 128))
    ),
]


@pytest.mark.whole
@pytest.mark.parametrize(("given", "asked"), BOXES, ids=[f"{n}" for n in range(len(BOXES))])
def test_boxes_of_pools(place, given, asked):
    check(place, pool(**given), **asked)


def test_boxes_of_a_cache_and_of_operands(place):
    c = place.collection(pool())
    cache, at = c.get_value_cache(LAYER), np.array([(1, 8), (0, 0), (99, 0)], np.int32)
    blocks = bits(pool().get_value_cache(LAYER).blocks)
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 200, (3, 24, HEADS, 64)).astype(np.uint8).view(kv.f8e4m3.numpy)
    there = kv.LayoutTensorMHAOperand(place.put(dense))
    for given, half in ((cache, blocks), (kv.KVCacheMHAOperand(cache), blocks), (there, bits(dense))):
        spec = given.spec
        program = copies(spec, rows=8)
        columns = program.entries[0].args[0].spec.tile[-1]
        out = place.put(np.zeros((2, len(at), HEADS, 8, columns), given.dtype.numpy))
        place.program(program, given, 0, out, place.put(at))
        np.testing.assert_array_equal(bits(place.get(out)), expected([half, half], at, 8, columns))


def test_boxes_of_a_ragged_operand_are_of_rows(place):
    rows = np.arange(40 * HEADS * 64).reshape(40, HEADS, 64).astype(np.float16)
    given = kv.RaggedMHAOperand(place.put(rows), place.put(np.array([0, 7, 40], np.int32)))
    at = np.array([(0, 0), (13, 0), (36, 0), (40, 0)], np.int32)
    out = place.put(np.zeros((2, len(at), HEADS, 8, 64), np.float16))
    place.program(copies(given.spec, rows=8), given, 0, out, place.put(at))
    padded = np.concatenate([rows, np.zeros_like(rows[:8])])
    found = place.get(out)
    for i, (row, _) in enumerate(at):
        np.testing.assert_array_equal(found[0, i], np.swapaxes(padded[row : row + 8], 0, 1))


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "tile", "message"),
    [
        ({"head_size": 20}, {"rows": 8}, "elements of a head must be a multiple of 16 bytes.* got 20 of bf16"),
        ({}, {"rows": 12}, "its rows must divide it, got 12"),
        ({}, {"rows": 8, "columns": 40}, "depth must be a multiple of 64"),
        ({"kind": "continuous"}, {"rows": 512}, "box must be 1 to 256"),
    ],
)
def test_what_no_launch_can_have_is_known_before(options, tile, message):
    spec, seen = pool(**options).spec, []

    def expand(at, handle):
        seen.append(at.why_no_tensor_map(handle, **tile))
        at.tensor_map(handle, **tile, layer=at.constant(0))

    with pytest.raises(ValueError, match=message) as error:
        launch_maps.program([("c", launch_maps.HandleType("collection", spec.cache))], expand)
    assert seen == [str(error.value)]


@pytest.mark.parametrize("target", ["sm_80", "host"])
def test_targets_before_sm_90_have_no_descriptors(target):
    seen = []

    def expand(at, handle):
        seen.append(at.why_no_tensor_map(handle, rows=8))
        raise NotImplementedError

    with pytest.raises(NotImplementedError):
        launch_maps.program([("c", launch_maps.HandleType("collection", pool().spec.cache))], expand, target)
    assert seen == [f"the tensor memory accelerator is of sm_90 and later, got target {target}"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("tensor_map", 0, "key"), "must be given the descriptor of a collection's layer, a cache or an operand, got"),
        (("tensor_map", 0, "rope", 0), r"as \(tensor_map, argument, half, layer\), got \('tensor_map', 0, 'rope', 0\)"),
        (("tensor_map", 9, "key", 0), "argument index must be from 0 to 3, got 9"),
        (("tensor_map", "rows0", "rows", 1, 64), "has no workspace 'rows0': it has none"),
        (("tensor_map", 2, "key"), "got .* of the buffer 'out'"),
        (("tensor_map", 0, "key", ("arg", 0, "blocks")), "blocks"),
        (("arg", 0), "is not of the kind of the program's argument"),
        (3, "is a tensormap and must be given whole"),
    ],
)
def test_a_program_with_a_wrong_descriptor_is_refused(given, message):
    made = copies(pool().spec, rows=8)
    step = dataclasses.replace(made.steps[0], args=(given, *made.steps[0].args[1:]))
    with pytest.raises(ValueError, match=message):
        Program(made.replace(steps=(step,)))
