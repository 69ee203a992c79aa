# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over quantized latent rows on a GPU: one scale a token, and rows that end in bf16 keys."""

import importlib

import numpy as np
import pytest
from reference import attention as reference
from reference import places
from reference.random_caches import random_values

import kvarn as kv
from kvarn.dialect import dtypes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

unit = importlib.import_module("unit.test_attention_mla")
PLACE = places.Torch()
TOLERANCE = {"f32": 2e-4, "bf16": 2e-2}


def attend(problem, query, layer, value_size):
    found = PLACE.collection(problem.collection)
    out = kv.ops.mla_attention(found, layer, PLACE.put(query), PLACE.put(problem.row_offsets), value_size=value_size)
    return PLACE.get(out).astype(np.float64)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("size", "value_size"), [(32, 24), (576, 512)])
def test_latent_rows_with_one_scale_a_token(dtype, size, value_size):
    rng, problem = unit.latent_problem(3, "f8e4m3", scale_dtype="f32", head_size=size)
    query = random_values(rng, (problem.tokens, 16, size), dtypes.of(dtype))
    want, _ = reference.mla_attention(problem.collection, 0, query, problem.row_offsets, value_size=value_size)
    np.testing.assert_allclose(attend(problem, query, 0, value_size), want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("content", "rope"), [(32, 8), (512, 64)])
def test_rows_that_end_in_bf16_keys(dtype, quantized, content, rope):
    scales = {"scale_dtype": "f32"} if quantized else {}
    rng, problem = unit.latent_problem(6, "f8e4m3", head_size=content + 2 * rope, **scales)
    stored = unit.store_rope_keys(rng, problem, content, rope)
    query = random_values(rng, (problem.tokens, 16, content + rope), dtypes.of(dtype))
    want = unit.rope_reference(problem, query, stored, content)
    np.testing.assert_allclose(attend(problem, query, 1, content), want, rtol=0, atol=TOLERANCE[dtype])
