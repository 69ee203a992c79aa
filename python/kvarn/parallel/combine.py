# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Combining the ranks' partial results (output and log-sum-exp) of attention, in one launch for any number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.dialect.layout import cdiv, lowbit

_THREADS = 128
_LEAST = -3e38  # below the logarithm of any sum, so that differences of minus infinities are not NaN


@functools.cache
def combine_kernel(dtype: Any, ranks: int, width: int) -> Any:
    """The kernel for outputs of an element type, by vectors of ``width``. Sums are f32, in the order of the ranks."""

    @kv.kernel
    def combine_ranks(outputs: kv.Buffer[dtype, 4], sums: kv.Buffer[kv.f32, 3], out: kv.Buffer[dtype, 3]):
        heads, vectors = outputs.shape[2], outputs.shape[3] // width
        item = kv.block_id.x * kv.block_dim.x + kv.thread_id.x
        if item < outputs.shape[1] * heads * vectors:
            row, d = item // vectors, item % vectors * width
            t, h = row // heads, row % heads
            top, each = kv.f32(_LEAST), []
            for r in kv.static(range(ranks)):
                each.append(sums[r, t, h])
                top = kv.math.max(top, each[r])
            weights, total = [], kv.f32(0.0)
            for r in kv.static(range(ranks)):
                weights.append(kv.math.exp(each[r] - top))
                total = total + weights[r]
            scale = kv.where(total > 0.0, 1.0 / total, 0.0)
            combined = kv.vector(kv.f32, width)
            for r in kv.static(range(ranks)):
                # The output of a rank without keys is undefined; its weight is zero.
                found = kv.f32(outputs.load(r, t, h, d, width=width))
                combined = combined + kv.where(weights[r] == 0.0, 0.0, found) * (weights[r] * scale)
            out.store(t, h, d, value=dtype(combined))

    return combine_ranks


def combined(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Combine partial results, rounding once.

    Parameters
    ----------
    outputs : Tensor [ranks, T, Hq, D]
        f32, f16 or bf16.
    sums : f32 Tensor [ranks, T, Hq]
        Natural log-sum-exps; minus infinity if a rank has no key for the row.

    Returns
    -------
    Tensor [T, Hq, D]
        Zeros if no rank has a key.
    """
    if len(outputs) == 1:
        return outputs[0]
    out = torch.empty(outputs.shape[1:], dtype=outputs.dtype, device=outputs.device)
    size = outputs.element_size()
    width = lowbit(16 | outputs.data_ptr() | size * outputs.stride(0) | size * outputs.shape[3]) // size
    blocks = cdiv(out.numel() // width, _THREADS)
    combine_kernel(dtypes.of(outputs.dtype), len(outputs), width)[blocks, _THREADS](outputs, sums, out)
    return out


__all__ = ["combine_kernel", "combined"]
