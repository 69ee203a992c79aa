# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Shared prefixes in a CUDA graph: the step is captured once, and follows lengths and groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.places import Torch
from reference.random_caches import random_query
from reference.shared_prefixes import LAYER, close, groups_of, shared_problem

import kvarn as kv

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

GROUPS = [(40, 24), (20, 9), (4, 0)]


def replays(
    place: Torch, problem: Any, at: Any, query: Any, shared: Any, columns: int, operation: Any, model: Any
) -> Callable[[], None]:
    """Run a step over shared prefixes, check it and capture it; what replays it over poisoned results and checks.

    What it returns holds the step, for the graph reads the tensors of the step wherever they were.
    """
    offsets, rows = place.put(problem.row_offsets), place.put(query)
    out = torch.empty((*rows.shape[:2], columns), dtype=rows.dtype, device="cuda")
    lse = torch.empty(rows.shape[:2], dtype=torch.float32, device="cuda")

    def step() -> None:
        shared.plan(at, offsets)
        operation(at, LAYER, rows, offsets, shared=shared, out=out, lse=lse)

    def check() -> None:
        want = model(problem.collection, LAYER, query, problem.row_offsets)
        close((place.get(out), place.get(lse)), want, 2e-2)

    step()
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(captured: Callable[[], None] = step) -> None:
        out.fill_(float("nan"))
        graph.replay()
        check()

    return replay


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 128), ("f16", 64), ("f8e4m3", 128)])
def test_a_graph_follows_lengths_and_groups(dtype, size):
    """Replayed with tokens that were appended, and with other groups in the same arrays, of which some are empty."""
    place, page = Torch(), 16
    batch = sum(n for n, _ in GROUPS)
    rng, problem = shared_problem(
        GROUPS, [int(n) for n in np.random.default_rng(1).integers(1, 90, batch)], [1] * batch, dtype=dtype, page=page,
        size=size,
    )  # fmt: skip
    c, query = problem.collection, random_query(rng, problem, 8, "bf16" if dtype == "f8e4m3" else None)
    at = place.collection(c)
    ends, lengths = groups_of(GROUPS, page)
    room = 5  # groups, some without sequences
    sequences = place.put(np.concatenate([ends, np.full(room + 1 - len(ends), batch)]).astype(np.int32))
    shared = kv.SharedPrefixes(sequences, place.put(np.concatenate([lengths, np.zeros(room - 3, np.int32)])))
    replay = replays(place, problem, at, query, shared, size, kv.ops.attention, reference.attention)
    replay()
    c.cache_lengths[:] -= c.cache_lengths % 7 == 3  # some had a token less
    at.cache_lengths.copy_(place.put(np.array(c.cache_lengths)))
    # The first group in two, the second one with less of its prefix.
    sequences.copy_(place.put(np.array([0, 10, 40, 60, batch, batch], np.int32)))
    shared.lengths.copy_(place.put(np.array([24, 20, 4, 0, 0], np.int32) * page))
    replay()


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
def test_prefixes_of_latent_rows_in_a_graph(dtype):
    """Many rows of 576 columns over one prefix, few over what follows it; captured once, replayed with fewer tokens."""
    place, page, groups = Torch(), 16, [(12, 20), (3, 5), (2, 0)]
    batch = sum(n for n, _ in groups)
    behind = [int(n) for n in np.random.default_rng(2).integers(1, 90, batch)]
    rng, problem = shared_problem(groups, behind, [1] * batch, dtype=dtype, page=page, size=576, heads=1, is_mla=True)
    c, query = problem.collection, random_query(rng, problem, 16, "bf16" if dtype == "f8e4m3" else None)
    at, shared = place.collection(c), kv.SharedPrefixes(*map(place.put, groups_of(groups, page)))
    model = functools.partial(reference.attention, value_size=512)
    replay = replays(place, problem, at, query, shared, 512, kv.ops.mla_attention, model)
    c.cache_lengths[:] -= c.cache_lengths % 7 == 3
    at.cache_lengths.copy_(place.put(np.array(c.cache_lengths)))
    replay()
