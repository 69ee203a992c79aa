# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.project_append and project_append_padded against the model, on the host and in GPU code.

Elements are small multiples of 1/4, whose products add up exactly in any order: every element is the model's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import Place, assert_close, assert_same, near
from reference.random_caches import clone, random_problem

import kvarn as kv
from kvarn.dialect import dtypes

SHAPE: dict[str, Any] = {"cached": [5, 0, 33, 16], "new": [3, 2, 0, 9]}


def exact(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (rng.integers(-4, 5, shape) / 4).astype(np.float32).astype(dtypes.of(dtype).numpy)


def angles(rng: np.random.Generator, positions: int, turned: int) -> np.ndarray:
    angle = rng.uniform(0, 2 * np.pi, (positions, turned // 2))
    return np.stack([np.cos(angle), np.sin(angle)], -1).reshape(positions, turned).astype(np.float32)


def check(
    place: Place, problem: Any, dtype: str = "bf16", *, k: int = 64, heads: int = 4, x_dtype: str | None = None,
    rounding: bool = False, spare: int = 0, schedule: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Project random rows; ``spare`` rows behind the batch belong to nobody."""
    rng = np.random.default_rng(1)
    spec, element = problem.collection.spec.cache, dtypes.of(dtype)
    query_size = options.get("query_size", spec.head_size)
    columns = heads * query_size + spec.row_size * (1 if spec.is_mla else 2)
    x = exact(rng, (problem.tokens + spare, k), x_dtype or dtype)
    weight = exact(rng, (columns, k), x_dtype or dtype)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    scales = options.pop("scales", None)
    named = {n: v for n, v in options.items() if isinstance(v, np.ndarray)}
    rest = {n: v for n, v in options.items() if n not in named}
    if scales is not None:
        named |= {"x_scale": scales[0], "weight_scale": scales[1]}
    out = place.put(np.full((len(x), heads, query_size), 77, element.numpy))
    back = kv.ops.project_append(
        found, 1, place.put(x), place.put(weight), place.put(problem.row_offsets), query_out=out, schedule=schedule,
        **{n.replace("freqs", "freqs_cis"): place.put(v) for n, v in named.items()},
        **{n: v for n, v in rest.items() if n != "query_size"},
    )  # fmt: skip
    given = {n: v for n, v in options.items() if not n.endswith("_scale")}
    if scales is not None:
        blocks = [np.asarray(s, np.float64) for s in scales]
        given["scales"] = blocks[0] * blocks[1].T
    wanted, _ = model.project_append(
        expected, 1, x, weight, problem.row_offsets, element.numpy, query_heads=heads, **given
    )
    wanted = wanted.astype(np.float32).astype(element.numpy)
    wanted[problem.tokens :] = 77
    assert back is out
    if rounding:
        near(place.get(out), wanted)
        assert_close(place, found, expected)
    else:
        np.testing.assert_array_equal(place.get(out).astype(np.float32), wanted.astype(np.float32))
        assert_same(place, found, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["paged", "continuous", "fa3"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_columns_go_to_queries_and_cache(place, kind, dtype):
    problem = random_problem(np.random.default_rng(0), kind, dtype, page_size=4, **SHAPE)
    check(place, problem, dtype, spare=3)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "k"), [(3, 1, 64, 48), (2, 2, 24, 80), (5, 1, 7, 33)])
def test_any_shape_is_served(place, heads, kv_heads, size, k):
    problem = random_problem(
        np.random.default_rng(0), "paged", "bf16", num_heads=kv_heads, head_size=size, cached=[1, 2], new=[2, 3]
    )
    check(place, problem, heads=heads, k=k)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normal", [True, False])
def test_bias_norms_and_rotation_come_before_the_cache(place, interleaved, normal):
    rng = np.random.default_rng(2)
    problem = random_problem(rng, "paged", "bf16", head_size=32, **SHAPE)
    gammas: Any = {n: exact(rng, (32,), "f32") for n in ("q_gamma", "k_gamma")} if normal else {}
    bias = exact(rng, (4 * 32 + 2 * 2 * 32,), "bf16")
    options: Any = {"bias": bias, "freqs": angles(rng, 60, 32), "eps": 1e-3, **gammas}
    check(place, problem, rounding=True, interleaved=interleaved, **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("granularity", "scale_dtype"), [(32, "f32"), (16, "bf16")])
@pytest.mark.parametrize("turned", [True, False])
def test_a_cache_with_scales_quantizes_products(place, granularity, scale_dtype, turned):
    rng = np.random.default_rng(3)
    problem = random_problem(
        rng, "paged", "f8e4m3", head_size=32, scale_dtype=scale_dtype, granularity=granularity, **SHAPE
    )
    options: Any = {
        "freqs": angles(rng, 60, 32),
        "k_gamma": exact(rng, (32,), "f32"),
        "q_gamma": exact(rng, (32,), "f32"),
    }
    check(place, problem, "bf16", rounding=True, **(options if turned else {}))


def test_an_8_bit_cache_without_scales_saturates(place):
    problem = random_problem(np.random.default_rng(4), "paged", "f8e4m3", **SHAPE)
    bias = np.full(4 * 16 + 2 * 2 * 16, 700, np.float32)
    check(place, problem, "f16", bias=bias)


def check_scales(place: Place, scaling: str, size: int, schedule: Any = None) -> None:
    """Products of 8 bits with random scales are those of the elements times theirs."""
    rng, columns, bf16 = np.random.default_rng(5), 6 * size, dtypes.of("bf16").numpy
    problem = random_problem(rng, "paged", "bf16", head_size=size, cached=[5, 0, 33], new=[3, 2, 9])
    shapes = {"tensor": ((1, 1), (1, 1)), "row": ((14, 1), (columns, 1)), "block": ((14, 2), (-(-columns // 128), 2))}
    scales = [2.0 ** rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes[scaling]]
    x, weight = (exact(rng, (n, 256), "f8e4m3") for n in (14, columns))
    found, expected = place.collection(problem.collection), clone(problem.collection)
    put, (x_scale, weight_scale) = [place.put(a) for a in (x, weight)], (place.put(s) for s in scales)
    out = kv.ops.project_append(
        found, 1, put[0], put[1], place.put(problem.row_offsets), x_scale=x_scale, weight_scale=weight_scale,
        schedule=schedule,
    )  # fmt: skip
    spread = [np.repeat(s.astype(np.float64), 256 // s.shape[1], axis=1) for s in scales]
    spread[1] = np.repeat(spread[1], 128, axis=0)[:columns] if scaling == "block" else spread[1]
    wide = [a.astype(np.float64) * s for a, s in zip((x, weight), spread, strict=True)]
    wanted, _ = model.project_append(expected, 1, wide[0], wide[1], problem.row_offsets, bf16, query_heads=2)
    np.testing.assert_array_equal(place.get(out).astype(np.float64), wanted)
    assert_same(place, found, expected)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_products_of_8_bits_have_scales(place, scaling):
    check_scales(place, scaling, 16)


def test_latent_rows_are_what_follows_the_queries(place):
    problem = random_problem(np.random.default_rng(7), "paged", "bf16", num_heads=1, head_size=40, is_mla=True, **SHAPE)
    check(place, problem, heads=3, query_size=24)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("values", [True, False])
def test_a_weight_may_have_no_queries_and_no_values(place, values):
    rng = np.random.default_rng(8)
    problem = random_problem(rng, "paged", "bf16", **SHAPE)
    x, weight = exact(rng, (problem.tokens, 32), "bf16"), exact(rng, (2 * 16 * (2 if values else 1), 32), "bf16")
    found, expected = place.collection(problem.collection), clone(problem.collection)
    out = kv.ops.project_append(found, 0, place.put(x), place.put(weight), place.put(problem.row_offsets))
    assert out is None
    c = (x.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32).astype(x.dtype)
    parts = c.reshape(len(c), -1, 2, 16)
    model.append_to_cache(expected.get_key_cache(0), parts[:, 0], problem.row_offsets)
    if values:
        model.append_to_cache(expected.get_value_cache(0), parts[:, 1], problem.row_offsets)
    assert_same(place, found, expected)


def test_an_indexer_has_bands_and_a_cache_of_its_own(place):
    rng = np.random.default_rng(9)
    problem = random_problem(rng, "paged", "bf16", **SHAPE)
    other = random_problem(
        rng, "paged", "bf16", num_heads=1, head_size=24, is_mla=True, page_size=8, **SHAPE
    ).collection
    x, weight = exact(rng, (problem.tokens, 64), "bf16"), exact(rng, (3 * 16 + 2 * 2 * 16 + 5 * 24 + 24, 64), "bf16")
    found, expected = place.collection(problem.collection), clone(problem.collection)
    index, index_expected = place.collection(other), clone(other)
    freqs = angles(rng, 60, 16)
    index_out = place.put(np.zeros((problem.tokens, 5, 24), x.dtype))
    out = kv.ops.project_append(
        found, 1, place.put(x), place.put(weight), place.put(problem.row_offsets), freqs_cis=place.put(freqs),
        index_collection=index, index_query_out=index_out,
    )  # fmt: skip
    wanted, of_index = model.project_append(
        expected, 1, x, weight, problem.row_offsets, x.dtype, query_heads=3, freqs=freqs, index=(index_expected, 5)
    )
    near(place.get(out), wanted.astype(np.float32).astype(x.dtype))
    np.testing.assert_array_equal(place.get(index_out), of_index)
    assert_close(place, found, expected)
    assert_same(place, index, index_expected)


@pytest.mark.parametrize("turned", [True, False])
def test_a_padded_batch_has_queries_everywhere_and_keys_of_valid_tokens(place, turned):
    rng = np.random.default_rng(10)
    problem = random_problem(rng, "paged", "bf16", cached=[5, 0, 33], new=[3, 0, 4])
    valid, steps = problem.new.astype(np.uint32), 5
    x, weight = exact(rng, (3, steps, 64), "bf16"), exact(rng, (4 * 16 + 2 * 2 * 16, 64), "bf16")
    freqs = angles(rng, 60, 16) if turned else None
    found, expected = place.collection(problem.collection), clone(problem.collection)
    out = kv.ops.project_append_padded(
        found, 1, place.put(x), place.put(weight), place.put(valid),
        freqs_cis=None if freqs is None else place.put(freqs),
    )  # fmt: skip
    rows = np.concatenate([row[:n] for row, n in zip(x, valid, strict=True)])
    model.project_append(expected, 1, rows, weight, problem.row_offsets, x.dtype, query_heads=4, freqs=freqs)
    c = (x.reshape(-1, 64).astype(np.float64) @ weight.astype(np.float64).T)[:, : 4 * 16].reshape(3, steps, 4, 16)
    wanted = c.astype(np.float32).astype(x.dtype)
    if freqs is not None:
        positions = problem.cached[:, None] + np.arange(steps)
        turned_rows = model.rope(wanted.reshape(-1, 4, 16), positions.reshape(-1), freqs)
        wanted = turned_rows.reshape(wanted.shape).astype(np.float32).astype(x.dtype)
    near(place.get(out), wanted)
    assert_close(place, found, expected)


def test_a_batch_without_tokens_writes_nothing(place):
    problem = random_problem(np.random.default_rng(11), "paged", "bf16", cached=[3, 4], new=[0, 0])
    check(place, problem)
    if place.name != "host":
        for schedule in TILED:
            check(place, problem, schedule=schedule)


def test_what_does_not_fit_is_refused_by_name():
    c = random_problem(np.random.default_rng(12), "paged", "f32", cached=[1], new=[2]).collection
    x, weight, off = np.ones((2, 8), np.float32), np.ones((4 * 16 + 64, 8), np.float32), np.array([0, 2], np.uint32)
    latent = random_problem(np.random.default_rng(13), "paged", "f32", cached=[1], new=[2], num_heads=1, is_mla=True)
    wide, out = np.ones((2, 16), np.float32)[:, ::2], np.ones((2, 4, 8), np.float32)
    cases: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "weight must have the K = 8 of x", (c, 0, x, weight[:, :4].copy(), off), {}),
        (ValueError, "weight must have 64 rows besides those of query heads of 16, got 127",
         (c, 0, x, weight[1:], off), {}),
        (ValueError, r"weight must have 96 rows \(32 of query", (c, 0, x, weight, off), {"query_out": out}),
        (ValueError, "x must be contiguous in its last dimension", (c, 0, wide, weight, off), {}),
        (ValueError, "x must have contiguous rows",
         (c, 0, np.ones((2, 16), np.float32)[:, :8], weight, off), {}),
        (TypeError, "x must have dtype f32, which products are rounded to, got f16",
         (c, 0, x.astype(np.float16), weight.astype(np.float16), off), {"query_out": np.ones((2, 4, 16), np.float32)}),
        (TypeError, "collection of f32 cannot take the f16 that products are rounded to",
         (c, 0, x.astype(np.float16), weight.astype(np.float16), off), {}),
        (TypeError, "x_scale and weight_scale go with x of dtype f8e4m3, got f32", (c, 0, x, weight, off),
         {"x_scale": np.ones((1, 1), np.float32), "weight_scale": np.ones((1, 1), np.float32)}),
        (ValueError, "q_gamma and k_gamma must be given together", (c, 0, x, weight, off), {"q_gamma": x[0]}),
        (ValueError, "freqs_cis and gammas need queries", (c, 0, x, weight[:64], off),
         {"freqs_cis": np.ones((4, 16), np.float32)}),
        (ValueError, "index_collection and index_query_out must be given together", (c, 0, x, weight, off),
         {"index_query_out": out}),
        (ValueError, r"bias must have shape \[128\], got \[64\]", (c, 0, x, weight, off),
         {"bias": np.ones(64, np.float32)}),
        (ValueError, "needs a collection with values", (latent.collection, 0, x, weight[:32], off),
         {"freqs_cis": np.ones((4, 16), np.float32)}),
    ]  # fmt: skip
    for error, message, args, options in cases:
        with pytest.raises(error, match=message):
            kv.ops.project_append(*args, **options)
    padded = np.ones((1, 2, 16), np.float32)[:, :, :8]
    with pytest.raises(ValueError, match="project_append_padded: x must be contiguous"):
        kv.ops.project_append_padded(c, 0, padded, weight, np.array([2], np.uint32))


TILED: list[dict[str, Any]] = [{"kind": "tile"}, {"kind": "stream_k", "max_tokens": 16}]
on_gpus = pytest.mark.parametrize("place", ["sm_90a"], indirect=True)  # what a host has no kinds of kernels for


@pytest.mark.sampled(5)
@pytest.mark.parametrize("schedule", TILED, ids=["tile", "stream_k"])
@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("paged", "bf16", {"heads": 3}),
        ("continuous", "f16", {"interleaved": False}),
        ("fa3", "bf16", {"interleaved": True, "gamma": True}),
    ],
)
@on_gpus
def test_products_over_tiles_have_every_epilogue(place, schedule, kind, dtype, options):
    rng = np.random.default_rng(14)
    size, heads = 64, options.get("heads", 2)
    problem = random_problem(rng, kind, dtype, head_size=size, **SHAPE)
    given: dict[str, Any] = {"bias": exact(rng, ((heads + 4) * size,), "f32")}
    if "interleaved" in options:
        given |= {"freqs": angles(rng, 60, 32), "interleaved": options["interleaved"]}
    if options.get("gamma"):
        given |= {n: exact(rng, (size,), "f32") for n in ("q_gamma", "k_gamma")}
    check(place, problem, dtype, k=256, heads=heads, spare=2, schedule=schedule, rounding="freqs" in given, **given)


@pytest.mark.parametrize("schedule", TILED, ids=["tile", "stream_k"])
@on_gpus
def test_products_over_tiles_quantize(place, schedule):
    rng = np.random.default_rng(15)
    problem = random_problem(
        rng, "paged", "f8e4m3", head_size=64, scale_dtype="f32", granularity=32, cached=[5, 0, 33], new=[3, 2, 9]
    )
    check(place, problem, "bf16", k=64, heads=2, rounding=True, schedule=schedule, freqs=angles(rng, 60, 64))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("schedule", TILED, ids=["tile", "stream_k"])
@pytest.mark.parametrize("scaling", ["row", "block"])
@on_gpus
def test_products_of_8_bits_over_tiles_have_scales(place, schedule, scaling):
    check_scales(place, scaling, 64, schedule)


@pytest.mark.parametrize(
    "schedule", [*TILED, {"kind": "stream_k", "max_tokens": 8}, {"kind": "tile", "max_tokens": 32, "columns": 48}]
)
@on_gpus
def test_sums_of_8_bits_keep_what_is_small(place, schedule):
    check_small(place, schedule)


def check_small(place: Place, schedule: Any) -> None:
    """After a first product of 448 * 448 the ones: tensor cores, which keep some 13 bits, would drop each of them."""
    bf16, f8 = dtypes.of("bf16").numpy, dtypes.of("f8e4m3").numpy
    problem = random_problem(np.random.default_rng(8), "paged", "bf16", head_size=64, cached=[5, 0], new=[3, 2])
    x, weight = np.ones((5, 2048), f8), np.ones((6 * 64, 2048), f8)
    x[:, 0] = weight[:, 0] = 448
    one = place.put(np.ones((1, 1), np.float32))
    out = kv.ops.project_append(
        place.collection(problem.collection), 1, place.put(x), place.put(weight), place.put(problem.row_offsets),
        x_scale=one, weight_scale=one, schedule=schedule,
    )  # fmt: skip
    wanted = np.full((5, 2, 64), 448 * 448 + 2047, np.float32).astype(bf16)
    np.testing.assert_array_equal(place.get(out).astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize("x_dtype", ["bf16", "f8e4m3"])
@on_gpus
def test_tiles_follow_one_another_while_heads_are_written(place, x_dtype):
    """Nine tiles of two blocks: those of the last tokens are not full, and sequences end inside of others."""
    rng = np.random.default_rng(22)
    problem = random_problem(rng, "paged", "bf16", head_size=64, cached=[5, 0, 33, 16], new=[3, 161, 0, 109])
    bias = exact(rng, (6 * 64,), "f32")
    scales = tuple(2.0 ** rng.integers(-2, 3, (n, 1)).astype(np.float32) for n in (273 + 2, 6 * 64))
    given = {"x_dtype": x_dtype, "scales": scales} if x_dtype == "f8e4m3" else {"bias": bias}
    check(place, problem, heads=2, k=512, spare=2, schedule={"kind": "tile", "columns": 128}, **given)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", ["size", "latent", "mid"])
@on_gpus
def test_products_whose_tiles_have_no_whole_heads_go_through_memory(place, case):
    rng = np.random.default_rng(18)
    if case == "latent":
        problem = random_problem(rng, "paged", "bf16", num_heads=1, head_size=96, is_mla=True, **SHAPE)
        check(place, problem, heads=3, query_size=48, k=64, schedule={"kind": "tile"}, spare=1)
        return
    size = 80 if case == "size" else 64
    problem = random_problem(rng, "paged", "bf16", head_size=size, **SHAPE)
    schedule = {"kind": "tile", **({"max_tokens": 512} if case == "mid" else {})}
    bias = exact(rng, ((2 + 4) * size,), "f32")
    check(place, problem, heads=2, k=64, schedule=schedule, bias=bias, freqs=angles(rng, 60, 64), rounding=True)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("rows", "columns"), [(64, 48), (128, 96), (64, 64), (64, 192)])
@on_gpus
def test_tiles_of_every_shape_give_the_same(place, rows, columns):
    rng = np.random.default_rng(21)
    problem = random_problem(rng, "paged", "bf16", head_size=64, cached=[5, 0, 33, 16], new=[3, 61, 0, 9])
    schedule = {"kind": "tile", "max_tokens": 128, "rows": rows, "columns": columns}
    check(place, problem, heads=2, k=192, schedule=schedule, spare=2)


@pytest.mark.parametrize(
    "entries", [{"kind": "stream_k"}, {"kind": "tile", "rows": 64, "columns": 80}], ids=["stream_k", "tile"]
)
@on_gpus
def test_a_weight_that_is_promised_to_be_there_is_read_all_the_same(place, entries):
    """Of tiles that are not full too: the last begins earlier, or boxes without tokens are left out."""
    rng = np.random.default_rng(23)
    for new, most in (([3, 9, 0, 9], 64), ([3, 61, 0, 9], 128)):
        problem = random_problem(rng, "paged", "bf16", head_size=64, cached=[5, 0, 33, 16], new=new)
        check(place, problem, heads=2, k=192, schedule={**entries, "max_tokens": most, "early": True}, spare=2)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 64), ("f16", 80), ("f32", 24)])
@pytest.mark.parametrize("place", ["sm_80"], indirect=True)
def test_products_by_mma_go_through_memory(place, dtype, size):
    rng = np.random.default_rng(20)
    problem = random_problem(rng, "paged", dtype, head_size=size, **SHAPE)
    bias = exact(rng, ((3 + 4) * size,), "f32")
    check(place, problem, dtype, heads=3, k=192, spare=2, schedule={"kind": "tile"}, bias=bias)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("place", ["sm_80", "sm_100a"], indirect=True)
def test_8_bits_are_multiplied_as_bf16_by_mma(place, scaling):
    check_scales(place, scaling, 64, {"kind": "tile"})


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("dtype", "k"), [("bf16", 160), ("f16", 64), ("f8e4m3", 256)])
@pytest.mark.parametrize("place", ["sm_80", "sm_100a"], indirect=True)
def test_few_tokens_by_mma_read_the_weight_as_it_is(place, dtype, k):
    rng = np.random.default_rng(22)
    schedule = {"kind": "stream_k", "max_tokens": 32}
    if dtype == "f8e4m3":
        check_scales(place, "row", 64, schedule)
        return
    problem = random_problem(rng, "paged", dtype, head_size=64, **SHAPE)
    bias = exact(rng, ((3 + 4) * 64,), "f32")
    check(place, problem, dtype, heads=3, k=k, spare=2, schedule=schedule, bias=bias)


def test_more_tokens_than_were_promised_are_refused():
    c = random_problem(np.random.default_rng(17), "paged", "f32", cached=[1], new=[9]).collection
    x, weight = np.ones((9, 8), np.float32), np.ones((64, 8), np.float32)
    with pytest.raises(ValueError, match="no more than the schedule's max_tokens = 8 rows, got 9"):
        kv.ops.project_append(c, 0, x, weight, np.array([0, 9], np.uint32), schedule={"max_tokens": 8})


@pytest.mark.parametrize("schedule", TILED, ids=["tile", "stream_k"])
@on_gpus
def test_tables_that_are_wrong_lead_out_of_no_buffer(place, schedule):
    """What tables hold is not looked at on a GPU: kernels stay inside their memory all the same."""
    rng = np.random.default_rng(19)
    problem = random_problem(rng, "paged", "bf16", head_size=64, cached=[5, 0, 33], new=[3, 2, 9])
    x, weight = exact(rng, (14, 64), "bf16"), exact(rng, (6 * 64, 64), "bf16")
    c: Any = problem.collection
    for wrong in ([0, 9, 2, 14], [2**32 - 5, 3, 90, 2**31]):
        found: Any = place.collection(c)
        offsets, freqs = place.put(np.array(wrong, np.uint32)), place.put(angles(rng, 60, 64))
        kv.ops.project_append(found, 1, place.put(x), place.put(weight), offsets, freqs_cis=freqs, schedule=schedule)
        pages = np.unique(np.asarray(c.lookup_table))
        others = np.setdiff1d(np.arange(len(c.blocks)), pages)
        before, after = np.asarray(c.blocks), place.get(found.blocks)
        np.testing.assert_array_equal(after[others].view(np.uint16), before[others].view(np.uint16))
        np.testing.assert_array_equal(after[:, :, 0].view(np.uint16), before[:, :, 0].view(np.uint16))
