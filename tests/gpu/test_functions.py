# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores and masks as functions, and trees of drafts, on a GPU: every kernel that takes them, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.attention_functions import document, problem_of, query_of
from reference.places import Torch, bits

import kvarn as kv

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["f16", "f8e4m3"])
@pytest.mark.parametrize("drafts", [4, 40])
def test_a_tree_and_its_commit_in_a_graph(place: Torch, dtype: str, drafts: int):
    """One capture: attention over the tree, and the path of the first draft's first child and so on."""
    rng, problem = problem_of(2, "paged", dtype, cached=[150, 0, 40], new=[drafts, 1, drafts], head_size=64)
    query = query_of(rng, problem, 2)
    tree = np.zeros((problem.tokens, 2), np.int32)
    accepted = np.full((3, drafts), -1, np.int32)
    for b, count in enumerate((drafts, 1, drafts)):
        rows = [{0}]
        for node in range(1, count):
            rows.append(rows[(node - 1) // 2] | {node})
        for node, seen in enumerate(rows):
            row = np.zeros(64, np.uint8)
            row[sorted(seen)] = 1
            tree[problem.row_offsets[b] + node] = np.packbits(row, bitorder="little").view(np.int32)
        accepted[b, : len(rows[-1])] = sorted(rows[-1])
    host = kv.ops.attention(problem.collection, 1, query, problem.row_offsets, tree=tree)
    c = place.collection(problem.collection)
    given = [place.put(x) for x in (query, problem.row_offsets, tree, accepted)]
    out = torch.empty_like(given[0])

    def step() -> None:
        kv.ops.attention(c, 1, given[0], given[1], tree=given[2], out=out)
        kv.ops.commit(c, None, given[3], given[1])

    blocks = c.blocks.clone()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    c.blocks.copy_(blocks)
    out.zero_()
    graph.replay()
    np.testing.assert_allclose(place.get(out).astype(np.float64), host.astype(np.float64), rtol=4e-3, atol=4e-3)
    kv.ops.commit(problem.collection, None, accepted, problem.row_offsets)
    np.testing.assert_array_equal(bits(place.get(c.blocks)), bits(problem.collection.blocks))


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        ("paged", "f8e4m3", {}), ("paged", "f8e4m3", {"page_size": 5}), ("continuous", "f8e4m3", {}),
        ("paged", "i8", {"scale_dtype": "f32", "granularity": 8}), ("fa3", "f16", {}),
        ("paged", "bf16", {"page_size": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("invariant", [False, True])
def test_a_decode_by_a_block_mask_in_a_graph(
    place: Torch, kind: str, dtype: str, shape: dict[str, Any], group: int, invariant: bool
):
    rng, problem = problem_of(2, kind, dtype, cached=[300, 0, 70, 2900], new=[1, 1, 0, 2], head_size=64, **shape)
    query = query_of(rng, problem, group)
    ids = np.sort(rng.integers(0, 12, (4, 3000)), axis=1).astype(np.int32)
    c, q, offsets = place.collection(problem.collection), place.put(query), place.put(problem.row_offsets)
    mask, out = (kv.masks.causal & document, place.put(ids)), place.put(np.zeros_like(query))
    schedule = {"kind": "decode", "max_queries": 2, "batch_invariant": invariant}
    made = kv.ops.block_mask(c, q, offsets, mask, schedule=schedule)

    def step() -> None:
        again = kv.ops.block_mask(c, q, offsets, mask, blocks=made.blocks, schedule=schedule)
        kv.ops.attention(c, 1, q, offsets, block_mask=again, out=out, schedule=schedule)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for length in (2900, 1500):
        problem.collection.cache_lengths[3] = c.cache_lengths[3] = length
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        want, _ = reference.attention(
            problem.collection, 1, query, problem.row_offsets,
            mask=lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]),
        )  # fmt: skip
        tolerance = 2e-2 if dtype == "bf16" else 4e-3
        np.testing.assert_allclose(place.get(out).astype(np.float64), want, rtol=tolerance, atol=tolerance)
