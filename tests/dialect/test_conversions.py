# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Conversions of stored 8-bit elements, by the instructions that kernels have, of every byte there is."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from reference.blocks import run_block

import kvarn as kv
from kvarn.lowering.tiles.dequantize import pairs_of, times

STORED = {"f8e4m3": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2, "i8": np.int8}
WIDE = {"bf16": (ml_dtypes.bfloat16, 2.0**-8), "f16": (np.float16, 2.0**-11)}  # and half a unit in the last place
SCALE = 0.7316


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("stored", STORED)
def test_every_byte_is_its_value_exactly_and_times_a_scale_rounded_once(stored, wide):
    @kv.kernel(block=64)
    def convert(x, exact, scaled):
        i = kv.thread_id.x
        pairs = pairs_of(x[i], getattr(kv, stored), getattr(kv, wide))
        products = times(pairs, kv.f32(SCALE), getattr(kv, wide))
        for k in kv.static(range(2)):
            exact[i, k], scaled[i, k] = pairs[k], products[k]

    words = np.arange(256, dtype=np.uint8).view(np.int32)
    exact, scaled = np.zeros((64, 2), np.int32), np.zeros((64, 2), np.int32)
    run_block(convert, 64, words, exact, scaled, target="sm_90")
    dtype, unit = WIDE[wide]
    want = np.arange(256, dtype=np.uint8).view(STORED[stored]).astype(np.float32)
    if (stored, wide) == ("f8e4m3", "bf16"):
        want[[127, 255]] = 480.0, -480.0  # the NaNs
    np.testing.assert_array_equal(exact.reshape(-1).view(dtype).astype(np.float32), want)
    found = scaled.reshape(-1).view(dtype).astype(np.float32)
    # What is left out of the scale is 2^-16 of it.
    finite = np.isfinite(want)
    np.testing.assert_allclose(found[finite], want[finite] * np.float32(SCALE), rtol=unit * 1.01, atol=1e-7)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
