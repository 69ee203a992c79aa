# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every function of ``kv.math``, of scalars and vectors, in every float type: right on the host, compiled for a GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest

import kvarn as kv
from kvarn.errors import KernelError

FUNCTIONS = {
    "abs": np.abs, "ceil": np.ceil, "cos": np.cos, "erf": np.vectorize(math.erf), "exp": np.exp, "exp2": np.exp2,
    "floor": np.floor, "log": np.log, "log2": np.log2, "round": np.round, "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin, "sqrt": np.sqrt, "tanh": np.tanh, "trunc": np.trunc,
    "fma": lambda x: x * x + x, "max": lambda x: np.fmax(x, x / 2), "min": lambda x: np.fmin(x, x / 2),
    "clamp": lambda x: np.clip(x, 0.5, 1.5),
}  # fmt: skip
OF_SEVERAL = {
    "fma": lambda x: kv.math.fma(x, x, x), "max": lambda x: kv.math.max(x, x / 2),
    "min": lambda x: kv.math.min(x, x / 2), "clamp": lambda x: kv.math.clamp(x, 0.5, 1.5),
}  # fmt: skip
DTYPES = {"f64": (kv.f64, 1e-13), "f32": (kv.f32, 1e-6), "f16": (kv.f16, 2e-3), "bf16": (kv.bf16, 2e-2)}


def kernel(name, dtype):
    function = OF_SEVERAL.get(name) or getattr(kv.math, name)

    @kv.kernel
    def k(x: kv.Buffer[dtype, 1], out: kv.Buffer[dtype, 1]):
        i = kv.thread_id.x * 2
        out.store(i, value=function(x.load(i, width=2)))
        if kv.thread_id.x == 0:
            out[0] = function(x[0])

    return k


def test_every_function_is_here():
    assert set(FUNCTIONS) == set(kv.math.__all__)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_the_host(name, dtype):
    dtype, tolerance = DTYPES[dtype]
    x = (np.random.default_rng(0).random(64) * 3 + 0.1).astype(dtype.numpy)
    out = np.zeros_like(x)
    kernel(name, dtype)[1, 32](x, out)
    expected = FUNCTIONS[name](x.astype(np.float64))
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_for_a_gpu(name):
    for dtype, _ in DTYPES.values():
        buffer = kv.Buffer[dtype, 1]
        assert ".visible .entry k(" in kv.compile(kernel(name, dtype), buffer, buffer, target="sm_80").asm["ptx"]


@pytest.mark.parametrize("target", ["host", "sm_80"])
def test_what_no_pass_lowers_is_an_error_at_its_place(target):
    text = """module {
    gpu.module @kernels {
      gpu.func @k(%x: f32, %out: memref<?xf32, strided<[1]>, 1>) kernel {
        %i = arith.constant 0 : index
        %c = complex.create %x, %x : complex<f32>
        %y = complex.abs %c : complex<f32>
        memref.store %y, %out[%i] : memref<?xf32, strided<[1]>, 1>
        gpu.return
      }
    }}"""
    with pytest.raises(KernelError, match=r"-:\d:\d+: error: .*(complex\.|LLVM Translation failed)"):
        kv.compile(text, target=target)
