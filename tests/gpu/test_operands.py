# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention operands on a GPU, over torch tensors: one kernel over every kind, and attention over each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.case import Case
from reference.operands import KINDS, check_survey, dense_parts, grid, outputs, ragged_parts, random_operand, survey
from reference.places import Torch

import kvarn as kv
from kvarn.caches import LayoutTensorMHAOperand, RaggedMHAOperand

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

PLACE = Torch()


def moved(part: Any) -> Any:
    """A part of an operand on the GPU; sequences that lie apart do so there too."""
    if not isinstance(part, np.ndarray):
        return part
    if not part.flags.c_contiguous:
        assert part.base is not None
        return PLACE.put(part.base)[:, : part.shape[1]]
    return PLACE.put(part)


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel_reads_every_kind(kind, threads):
    for dtype in ("f16", "bf16", "f32"):
        shown = random_operand(np.random.default_rng(1), kind, dtype, lengths=(70, 0, 12, 4), head_size=64)
        operand = shown.make(*(moved(part) for part in shown.parts))
        found = [PLACE.put(x) for x in outputs(shown)]
        survey[grid(shown), threads](operand, *found)
        check_survey(shown, [PLACE.get(x) for x in found])


def test_attention_over_operands_is_captured_in_a_graph():
    case = Case(cached=[100, 40], new=[1, 5])
    query, offsets = PLACE.put(case.query_rows), PLACE.put(case.offsets)
    operands = [make(*map(moved, given)) for make, given in ragged_parts(case.problem, 1)]
    out = torch.empty_like(query)
    kv.ops.attention(*operands, query, offsets, out=out)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv.ops.attention(*operands, query, offsets, out=out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_operands_on_another_device_are_refused():
    case = Case(cached=[10], new=[2])
    query, offsets = PLACE.put(case.query_rows), PLACE.put(case.offsets)
    keys, values = (make(*parts) for make, parts in dense_parts(case.problem, 1))
    with pytest.raises(ValueError, match="operands must be on one device: values is on the CPU, query on cuda:0"):
        kv.ops.attention(keys, values, query, offsets)
    with pytest.raises(ValueError, match="all buffers must be on one device"):
        RaggedMHAOperand(query, case.offsets)


def test_a_slice_that_is_not_packed_is_refused_before_a_launch():
    fused = torch.zeros(2, 6, 3 * 2, 16, device="cuda")
    with pytest.raises(ValueError, match="must be packed"):
        LayoutTensorMHAOperand(fused[:, :, :2])
