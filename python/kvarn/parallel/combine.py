# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over the keys of all ranks, of each rank's output and log-sum-exp: one launch for any number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch

import kvarn as kv
from kvarn.dialect import dtypes

_THREADS = 128
_LEAST = -3e38  # below the logarithm of any sum; keeps differences of minus infinities from being NaN


@functools.cache
def combine_kernel(dtype: Any) -> Any:
    """The kernel for outputs of an element type: a block is one head of one row. Sums are f32, in the ranks' order."""

    @kv.kernel
    def combine_ranks(outputs: kv.Buffer[dtype, 4], sums: kv.Buffer[kv.f32, 3], out: kv.Buffer[dtype, 3]):
        t, h = kv.block_id.x, kv.block_id.y
        ranks = outputs.shape[0]
        top = kv.f32(_LEAST)
        for r in range(ranks):
            top = kv.math.max(top, sums[r, t, h])
        total = kv.f32(0.0)
        for r in range(ranks):
            total = total + kv.math.exp(sums[r, t, h] - top)
        scale = kv.where(total > 0.0, 1.0 / total, 0.0)
        for d in range(kv.thread_id.x, outputs.shape[3], kv.block_dim.x):
            found = kv.f32(0.0)
            for r in range(ranks):
                # A rank without keys has no output to speak of: its weight is zero, its rows may be anything.
                weight = kv.math.exp(sums[r, t, h] - top) * scale
                found = found + kv.where(weight == 0.0, 0.0, kv.f32(outputs[r, t, h, d]) * weight)
            out[t, h, d] = dtype(found)

    return combine_ranks


def combined(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Combine partial results, rounding once.

    Parameters
    ----------
    outputs : Tensor [ranks, T, Hq, D]
        f32, f16 or bf16.
    sums : f32 Tensor [ranks, T, Hq]
        Natural log-sum-exps; minus infinity where a rank has no key of the row.

    Returns
    -------
    Tensor [T, Hq, D]
        Zeros where no rank has a key.
    """
    if len(outputs) == 1:
        return outputs[0]
    out = torch.empty(outputs.shape[1:], dtype=outputs.dtype, device=outputs.device)
    combine_kernel(dtypes.of(outputs.dtype))[outputs.shape[1:3], _THREADS](outputs, sums, out)
    return out


__all__ = ["combine_kernel", "combined"]
