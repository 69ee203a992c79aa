# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows on a GPU: scaled, ending in bf16 keys, listed, decompressed in chunks."""

import importlib

import numpy as np
import pytest
from reference import attention as reference, places
from reference.random_caches import random_values

import kvarn as kv
from kvarn.dialect import dtypes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

unit = importlib.import_module("ops.test_attention_mla")
functions = importlib.import_module("ops.test_mla_functions")
sparse = importlib.import_module("ops.test_mla_sparse")
prefill = importlib.import_module("ops.test_mla_prefill")
PLACE = places.Torch()
TOLERANCE = {"f32": 2e-4, "bf16": 2e-2}


def attend(problem, query, layer, value_size):
    found = PLACE.collection(problem.collection)
    out = kv.ops.mla_attention(found, layer, PLACE.put(query), PLACE.put(problem.row_offsets), value_size=value_size)
    return PLACE.get(out).astype(np.float64)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("size", "value_size"), [(32, 24), (576, 512)])
def test_latent_rows_with_one_scale_a_token(dtype, size, value_size):
    rng, problem = unit.latent_problem(3, dtype="f8e4m3", scale_dtype="f32", head_size=size)
    query = random_values(rng, (problem.tokens, 16, size), dtypes.of(dtype))
    want, _ = reference.mla_attention(problem.collection, 0, query, problem.row_offsets, value_size=value_size)
    np.testing.assert_allclose(attend(problem, query, 0, value_size), want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("unrounded", [False, True])
@pytest.mark.parametrize(
    ("heads", "new", "page_size"), [(16, [1] * 4, 64), (20, [1] * 4, 16), (128, [2, 1, 0, 1], 64), (40, [1] * 4, 7)]
)
def test_a_query_of_8_bits_over_rows_of_them(heads, new, page_size, unrounded):
    rng, problem = unit.latent_problem(
        15, dtype="f8e4m3", head_size=576, page_size=page_size, cached=[700, 0, 64, 63], new=new
    )
    query = random_values(rng, (problem.tokens, heads, 576), dtypes.f8e4m3)
    want, _ = reference.mla_attention(problem.collection, 1, query, problem.row_offsets, value_size=512)
    out = PLACE.put(np.zeros((*query.shape[:2], 512), np.float32)) if unrounded else None
    out = kv.ops.mla_attention(
        PLACE.collection(problem.collection), 1, PLACE.put(query), PLACE.put(problem.row_offsets), out=out,
        schedule={"kind": "latent"},
    )  # fmt: skip
    np.testing.assert_allclose(PLACE.get(out).astype(np.float64), want, rtol=0, atol=TOLERANCE["bf16"])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
def test_sums_over_many_keys_lose_nothing_of_values_that_are_alike(dtype, heads):
    rng, problem = unit.latent_problem(16, dtype="f8e4m3", head_size=576, page_size=64, cached=[16000], new=[1])
    problem.collection.blocks[..., 256:512] = 1
    query = random_values(rng, (problem.tokens, heads, 576), dtypes.of(dtype))
    out = kv.ops.mla_attention(
        PLACE.collection(problem.collection), 1, PLACE.put(query), PLACE.put(problem.row_offsets),
        schedule={"kind": "latent", "splits": 1},
    )  # fmt: skip
    np.testing.assert_allclose(PLACE.get(out)[..., 256:].astype(np.float64), 1, rtol=0, atol=8e-3)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("content", "rope"), [(32, 8), (512, 64)])
def test_rows_that_end_in_bf16_keys(dtype, quantized, content, rope):
    scales = {"scale_dtype": "f32"} if quantized else {}
    rng, problem = unit.latent_problem(6, dtype="f8e4m3", head_size=content + 2 * rope, **scales)
    stored = unit.store_rope_keys(rng, problem, content, rope)
    query = random_values(rng, (problem.tokens, 16, content + rope), dtypes.of(dtype))
    want = unit.rope_reference(problem, query, stored, content)
    np.testing.assert_allclose(attend(problem, query, 1, content), want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [16, 72])
def test_rows_with_their_scales_in_them(heads):
    rng, problem = unit.latent_problem(12, dtype="f8e4m3", head_size=656, cached=[300, 0, 90], new=[2, 1, 1])
    stored = unit.store_scaled_rows(rng, problem, 512, 64, 128)
    query = random_values(rng, (problem.tokens, heads, 576), dtypes.bf16)
    want = unit.scaled_reference(problem, query, *stored)
    out = kv.ops.mla_attention(
        PLACE.collection(problem.collection), 1, PLACE.put(query), PLACE.put(problem.row_offsets), inline_scales=128
    )
    np.testing.assert_allclose(PLACE.get(out).astype(np.float64), want, rtol=0, atol=TOLERANCE["bf16"])


@pytest.mark.parametrize(
    ("dtype", "scales", "schedule"),
    [
        ("bf16", {}, None), ("f16", {}, {"kind": "latent", "splits": 3}), ("f8e4m3", {"scale_dtype": "f32"}, None),
        ("bf16", {}, {"kind": "simt"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_score_and_a_mask_as_functions(dtype, scales, schedule, page_size):
    shape = {"head_size": 576, "page_size": page_size, "cached": [700, 0, 64, 63], "new": [2, 1, 0, 70], **scales}
    rng, problem = unit.latent_problem(14, dtype=dtype, **shape)
    query = random_values(rng, (problem.tokens, 16, 576), dtypes.of("bf16" if dtype == "f8e4m3" else dtype))
    bias, buckets = rng.standard_normal((16, 16)).astype(np.float32), functions.t5_buckets(60)
    ids = np.sort(rng.integers(0, 3, (4, 710)), axis=1).astype(np.int32)
    found = functions.attend(
        PLACE, problem, query, size=512, score=(functions.t5, bias, buckets), schedule=schedule,
        mask=(kv.masks.sliding_window(200) & functions.document, ids),
    )  # fmt: skip
    want = functions.model(
        problem, query, 512, score=lambda x, b, h, q, k: x + bias[h, buckets[np.clip(q - k, 0, 59)]],
        mask=lambda b, h, q, k: (k <= q) & (q - k < 200) & (ids[b, q] == ids[b, k]),
    )  # fmt: skip
    functions.close(found, want, TOLERANCE["bf16"])


def test_calls_that_differ_in_a_function_or_in_offsets_of_keys_are_not_taken_for_one_another():
    """Also where calls are known again by what they were given, and launched without Python."""
    functions.calls_that_differ(PLACE)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("heads", "new"), [(8, [1, 1, 0, 1]), (16, [2, 1, 0, 2]), (128, [1, 3, 0, 8]), (48, [5, 1, 0, 1])]
)
@pytest.mark.parametrize("splits", [None, 3])
def test_every_way_to_lay_out_the_work_gives_attention(page_size, heads, new, splits):
    shape = {"head_size": 576, "page_size": page_size, "cached": [700, 0, 64, 63], "new": new}
    rng, problem = unit.latent_problem(13, dtype="bf16", **shape)
    query = random_values(rng, (problem.tokens, heads, 576), dtypes.bf16)
    want, _ = reference.mla_attention(problem.collection, 1, query, problem.row_offsets, value_size=512)
    out = kv.ops.mla_attention(
        PLACE.collection(problem.collection), 1, PLACE.put(query), PLACE.put(problem.row_offsets),
        schedule={"kind": "latent"} | ({"splits": splits} if splits else {}),
    )  # fmt: skip
    np.testing.assert_allclose(PLACE.get(out).astype(np.float64), want, rtol=0, atol=TOLERANCE["bf16"])


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
def test_a_block_of_many_tiles_gives_attention(dtype):
    shape = {"head_size": 576, "page_size": 64, "cached": [2500, 2040], "new": [1, 1]}
    rng, problem = unit.latent_problem(14, dtype=dtype, **shape)
    query = random_values(rng, (problem.tokens, 128, 576), dtypes.bf16)
    want, _ = reference.mla_attention(problem.collection, 1, query, problem.row_offsets, value_size=512)
    out = kv.ops.mla_attention(
        PLACE.collection(problem.collection), 1, PLACE.put(query), PLACE.put(problem.row_offsets),
        schedule={"kind": "latent", "splits": 1},
    )  # fmt: skip
    np.testing.assert_allclose(PLACE.get(out).astype(np.float64), want, rtol=0, atol=TOLERANCE["bf16"])


@pytest.mark.parametrize("kind", ["simt", "latent"])
@pytest.mark.parametrize(("dtype", "scales"), [("bf16", {}), ("f8e4m3", {"scale_dtype": "f32"})])
def test_a_query_sees_the_rows_that_it_lists(kind, dtype, scales):
    shape = {"head_size": 576, "page_size": 16, "cached": [300, 0, 90], "new": [2, 1, 1], **scales}
    rng, problem, indices = sparse.sparse_problem(11, dtype, 200, **shape)
    rows = problem.collection.blocks.shape[0] * problem.collection.page_size
    indices[:, 5] = [rows, -7, 2**31 - 1, rows + 1]
    lengths = np.array([200, 130, 0, 300], np.int32)
    query = random_values(rng, (problem.tokens, 72, 576), dtypes.bf16)
    want = sparse.sparse_reference(query, indices, lambda e: sparse.listed_rows(problem, 1, e), 512, lengths, rows)
    out = kv.ops.mla_attention(
        PLACE.collection(problem.collection), 1, PLACE.put(query), PLACE.put(problem.row_offsets),
        indices=PLACE.put(indices), topk_lengths=PLACE.put(lengths), schedule={"kind": kind},
    )  # fmt: skip
    np.testing.assert_allclose(PLACE.get(out).astype(np.float64), want, rtol=0, atol=TOLERANCE["bf16"])


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("f32", {}),
        ("bf16", {"nope": 128, "rope": 64, "values": 128, "heads": 16, "cached": [300, 0], "new": [40, 9]}),
        ("f8e4m3", {"bf16_rope": True, "scale_dtype": "f32"}),
        ("f8e4m3", {"query": "bf16", "nope": 64, "rope": 32, "values": 96, "cached": [100, 0], "new": [200, 9]}),
    ],
)
def test_chunks_together_are_dense_attention(dtype, options):
    p = prefill.prefill(12, dtype, **options)
    query, weights = PLACE.put(p.query), [PLACE.put(w) for w in (p.key_weights, p.value_weights)]

    def expand(rows):
        latent = rows[:, : p.content].float()
        return tuple(torch.einsum("tc,hdc->thd", latent, w).to(query.dtype) for w in weights)

    out, lse = kv.ops.mla_prefill(
        PLACE.collection(p.problem.collection), 1, query, PLACE.put(p.problem.row_offsets), expand,
        PLACE.put(prefill.buffer_of(p, 48)), bf16_rope=p.bytes_ != p.rope, return_lse=True,
    )  # fmt: skip
    want, want_lse = prefill.dense(p)
    tolerance = {"f32": 2e-4, "bf16": 4e-2}[dtypes.of(p.query.dtype).name]
    np.testing.assert_allclose(PLACE.get(out).astype(np.float64), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(PLACE.get(lse), want_lse, rtol=2e-3, atol=2e-3)
