# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The suite of descriptors that programs make at launch, on a GPU; captured and prepared launches."""

import importlib

import numpy as np
import pytest
from reference import launch_maps, places

from kvarn.runtime import device
from kvarn.runtime.program import Program

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SUITE = "runtime.test_launch_maps"
pytest.register_assert_rewrite(SUITE)
suite = importlib.import_module(SUITE)
NAMES = [n for n, f in vars(suite).items() if n.startswith("test_") and "place" in f.__code__.co_varnames]
globals().update({n: getattr(suite, n) for n in NAMES})


@pytest.fixture(autouse=True)
def _needs_tma():
    if device.device(0).capability < (9, 0):
        pytest.skip("the GPU has no tensor memory accelerator")


@pytest.fixture
def place():
    """Takes the place of the suite's own fixture."""
    return places.Torch()


@pytest.mark.parametrize("how", ["captured", "prepared"])
def test_a_launch_that_is_kept_has_its_descriptors(place, how):
    c = suite.pool(head_size=80)
    pool, at = place.collection(c), np.array([(0, 8), (2, 0)], np.int32)
    program = Program(launch_maps.copies(c.spec, rows=8))
    out, where = place.put(np.zeros((2, 2, suite.HEADS, 8, 128), c.dtype.numpy)), place.put(at)
    if how == "captured":
        graph = torch.cuda.CUDAGraph()
        program.load(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            program(pool, 1, out, where)
        run = graph.replay
    else:
        run = program.prepare(pool, 1, out, where)
    program(pool, 2, out, where)  # another layer in between
    out.zero_()
    run()
    halves = [suite.bits(cache.blocks) for cache in (c.get_key_cache(1), c.get_value_cache(1))]
    np.testing.assert_array_equal(places.bits(place.get(out)), launch_maps.expected(halves, at, 8, 128))
