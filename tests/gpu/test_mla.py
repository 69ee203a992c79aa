# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows on a GPU at a model's sizes; tests/gpu/test_attention.py runs the tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import places
from reference.attention_functions import BIAS_BY_DISTANCE, DOCUMENTS_IN_A_WINDOW, calls_that_differ
from reference.case import Case, Listed
from reference.latent_rows import in_row, sizes
from reference.mla_prefill import buffer_of, dense, prefill

import kvarn as kv
from kvarn.dialect import dtypes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

PLACE = places.Torch()
STEP = [700, 0, 64, 63], [2, 1, 0, 1]


def latent(heads: int, cached: Any = STEP[0], new: Any = STEP[1], splits: int | None = None, **case: Any) -> None:
    """Rows of 576 whose values are 512, or of what ``in_row`` says."""
    schedule = {"kind": "latent", **({"splits": splits} if splits else {})}
    Case(cached=cached, new=new, **{"schedule": schedule, **sizes(576, 512, heads), **case, "group": heads}).check(
        PLACE
    )


@pytest.mark.parametrize("query", ["f32", "bf16"])
@pytest.mark.parametrize(("size", "value_size"), [(32, 24), (576, 512)])
def test_latent_rows_with_one_scale_a_token(query, size, value_size):
    latent(16, dtype="f8e4m3", query=query, scales=("f32", size), head_size=size, value_size=value_size, schedule={})


@pytest.mark.parametrize("out", ["", "f32"])
@pytest.mark.parametrize(
    ("heads", "new", "page_size"), [(16, [1] * 4, 64), (20, [1] * 4, 16), (128, [2, 1, 0, 1], 64), (40, [1] * 4, 7)]
)
def test_a_query_of_8_bits_over_rows_of_them(heads, new, page_size, out):
    latent(heads, new=new, page_size=page_size, dtype="f8e4m3", query="f8e4m3", out=out)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
def test_sums_over_many_keys_lose_nothing_of_values_that_are_alike(dtype, heads):
    def ones(case: Case) -> None:
        case.problem.collection.blocks[..., 256:512] = 1

    case = Case(cached=[16000], new=[1], dtype="f8e4m3", query=dtype, page_size=64, **sizes(576, 512, heads),
                change=ones, schedule={"kind": "latent", "splits": 1})  # fmt: skip
    np.testing.assert_allclose(case.run(PLACE)[0][..., 256:].astype(np.float64), 1, rtol=0, atol=8e-3)


@pytest.mark.parametrize("query", ["f32", "bf16"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("values", "rope"), [(32, 8), (512, 64)])
def test_rows_that_end_in_bf16_keys(query, quantized, values, rope):
    scales = ("f32", values + 2 * rope) if quantized else None
    latent(16, query=query, scales=scales, schedule={}, **in_row(rope, 0, values))


@pytest.mark.parametrize("heads", [16, 72])
def test_rows_with_their_scales_in_them(heads):
    latent(heads, [300, 0, 90], [2, 1, 1], schedule={}, **in_row(64, 128, 512))


@pytest.mark.parametrize(
    ("dtype", "scales", "schedule"),
    [("bf16", None, {}), ("f16", None, {"kind": "latent", "splits": 3}), ("f8e4m3", ("f32", 576), {}),
     ("bf16", None, {"kind": "simt"})],
)  # fmt: skip
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_score_and_a_mask_as_functions(dtype, scales, schedule, page_size):
    latent(16, [300, 0, 64, 63], [2, 1, 0, 70], dtype=dtype, scales=scales, schedule=schedule, page_size=page_size,
           score=BIAS_BY_DISTANCE, mask=DOCUMENTS_IN_A_WINDOW)  # fmt: skip


def test_calls_that_differ_in_a_function_or_in_offsets_of_keys_are_not_taken_for_one_another():
    """Also where calls are known again by what they were given, and launched without Python."""
    calls_that_differ(PLACE)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("heads", "new"), [(8, [1, 1, 0, 1]), (16, [2, 1, 0, 2]), (128, [1, 3, 0, 8]), (48, [5, 1, 0, 1])]
)
@pytest.mark.parametrize("splits", [None, 3])
def test_every_way_to_lay_out_the_work_gives_attention(page_size, heads, new, splits):
    latent(heads, new=new, splits=splits, page_size=page_size)


@pytest.mark.parametrize("schedule", [{}, {"kind": "simt"}, {"splits": 1}, {"splits": 5}], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f8e4m3"])
def test_few_and_many_new_tokens(dtype, schedule):
    if "splits" in schedule and dtype == "f32":
        pytest.skip("splits are an entry of latent kernels, which take no f32")
    for new in ([1, 1, 1], [7, 30, 2]):
        latent(16, [100, 40, 0], new, dtype=dtype, schedule=schedule)


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
def test_a_block_of_many_tiles_gives_attention(dtype):
    latent(128, [2500, 2040], [1, 1], splits=1, dtype=dtype, page_size=64)


@pytest.mark.parametrize("kind", ["simt", "latent"])
@pytest.mark.parametrize(("dtype", "scales"), [("bf16", None), ("f8e4m3", ("f32", 576))])
def test_a_query_sees_the_rows_that_it_lists(kind, dtype, scales):
    latent(72, [300, 0, 90], [2, 1, 1], dtype=dtype, scales=scales, form=Listed(200), schedule={"kind": kind})


def test_latent_rows_are_copied_out():
    problem = Case(cached=[50, 0, 70], new=[2, 3, 1], head_size=576, value_size=512).problem
    offsets = np.array([0, 52, 55, 126], np.int32)
    out = torch.full((130, 576), 72.0, dtype=torch.bfloat16, device="cuda")
    cache = PLACE.collection(problem.collection).get_key_cache(1)
    kv.ops.mla_decompress(cache, PLACE.put(offsets), PLACE.put(np.zeros(3, np.int32)), out)
    host, dims = problem.collection.get_key_cache(1), np.arange(576)
    want = [host.load(b, 0, np.arange(n)[:, None], dims) for b, n in enumerate(problem.cached + problem.new)]
    got = out.cpu().view(torch.int16).numpy()
    np.testing.assert_array_equal(got[:126], np.concatenate(want).view(np.int16))
    assert (out[126:] == 72).all()


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
    p = prefill(12, dtype, **options)
    query, weights = PLACE.put(p.query), [PLACE.put(w) for w in (p.key_weights, p.value_weights)]

    def expand(rows):
        latent = rows[:, : p.content].float()
        return tuple(torch.einsum("tc,hdc->thd", latent, w).to(query.dtype) for w in weights)

    out, lse = kv.ops.mla_prefill(
        PLACE.collection(p.problem.collection), 1, query, PLACE.put(p.problem.row_offsets), expand,
        PLACE.put(buffer_of(p, 48)), bf16_rope=p.bytes_ != p.rope, return_lse=True,
    )  # fmt: skip
    want, want_lse = dense(p)
    tolerance = {"f32": 2e-4, "bf16": 4e-2}[dtypes.of(p.query.dtype).name]
    np.testing.assert_allclose(PLACE.get(out).astype(np.float64), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(PLACE.get(lse), want_lse, rtol=2e-3, atol=2e-3)
