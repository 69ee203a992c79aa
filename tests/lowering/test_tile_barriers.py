# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Barriers of kernels over tiles are reached by whole warps, wherever rows, columns and branches end.

The emulator refuses a ``bar.sync`` of some of a warp's lanes here, as PTX does (``reference.whole_warps``).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from reference import whole_warps
from reference.places import Interpreted

import kvarn as kv

LENGTHS = (1, 22, 31, 63, 64, 150)  # rows that end within 4 rows, within a warp's, and with a tile
TARGETS = ("sm_90a", "sm_80")
BF16, F32 = ml_dtypes.bfloat16, np.float32


@pytest.fixture(autouse=True)
def _whole_warps():
    with whole_warps.demanded():
        yield


@kv.kernel(block=128)
def summed(value: kv.Buffer[kv.bf16, 2], out: kv.Buffer[kv.f32, 2]):
    """Sums of columns: masked rows are the second operand of a product in a loop."""
    sums = kv.full((64, 64), 0.0)
    for c in range(0, (value.shape[0] + 63) // 64):
        row = c * 64 + kv.tile_index(64)
        v = value.load_rows(row, mask=row < value.shape[0], columns=64)
        sums = kv.dot(kv.bf16(kv.full((64, 64), 1.0)), v, sums)
    out.store_rows(kv.tile_index(64), value=sums)


@kv.kernel(block=128)
def copied(value: kv.Buffer[kv.bf16, 2], out: kv.Buffer[kv.bf16, 2]):
    """Masked rows of a tile are stored before the next are loaded; those of no token are left out of both."""
    for c in range(0, (value.shape[0] + 63) // 64):
        row = c * 64 + kv.tile_index(64)
        exists = row < value.shape[0]
        v = value.load_rows(row, mask=exists, columns=64)
        ones = kv.bf16(kv.where(kv.tile_index(64)[:, None] == kv.tile_index(64)[None, :], 1.0, 0.0))
        out.store_rows(row, value=kv.bf16(kv.dot(ones, v)), mask=exists)


def _rows(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(-3, 4, (n, 64)).astype(BF16)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("target", TARGETS)
def test_rows_that_end_within_a_warp_are_an_operand_of_products_and_are_stored_between_loads(target, n):
    value, sums, out = _rows(n), np.zeros((64, 64), F32), np.full((n, 64), 7, BF16)
    Interpreted(target).launch(summed, (1, 1, 1), (128, 1, 1), value, sums)
    np.testing.assert_array_equal(sums, np.broadcast_to(value.astype(F32).sum(axis=0), (64, 64)))
    Interpreted(target).launch(copied, (1, 1, 1), (128, 1, 1), value, out)
    np.testing.assert_array_equal(out, value)
