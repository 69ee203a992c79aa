# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Latent rows and kernels of one's own on the layouts of other libraries, and which buffers are such pools.

Operations in place on these are rows of ``reference.cache_rows`` and ``reference.attention_rows``.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reference import attention as reference, model
from reference.foreign import LAYOUTS, pool_of
from reference.random_caches import random_problem, random_values

import kvarn as kv
from kvarn.dialect import dtypes, layout

pytestmark = pytest.mark.whole


# --- latent rows -----------------------------------------------------------------------------------

LATENT: dict[str, Any] = {
    "vllm": lambda x, *rest, **more: kv.ForeignPages.vllm(x, *rest, layout="MLA", **more),
    "sglang": lambda x, *rest, **more: kv.ForeignPages.sglang(
        x.reshape(-1, 1, x.shape[-1]), *rest, page_size=x.shape[1], **more
    ),
    "wide rows": lambda x, *rest, **more: kv.ForeignPages(x[..., : x.shape[-1] - 64], *rest, "NPD", **more),
}


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize(
    ("new", "size", "value_size"),
    [([1, 1, 1], 96, 64), ([20, 3, 0], 160, 128)],  # the second on the tensor cores
)
def test_latent_rows_are_appended_and_attended(place, name, new, size, value_size):
    rng = np.random.default_rng(11)
    shape = {"is_mla": True, "num_heads": 1, "head_size": size, "num_layers": 1, "page_size": 16}
    problem = random_problem(rng, "paged", "bf16", cached=[40, 0, 7], new=new, **shape)
    c, more = problem.collection, 64 if name == "wide rows" else 0

    def widened() -> np.ndarray:
        tail = np.full((*c.blocks.shape[:1], 16, more), 5, c.dtype.numpy)
        return np.concatenate([np.asarray(c.blocks)[:, 0, 0, :, 0], tail], -1)

    buffer = place.put(widened())
    pool = LATENT[name](
        buffer, *(place.put(np.asarray(x)) for x in (c.cache_lengths, c.lookup_table)), max_seq_length=max(new),
        max_cache_length=c.max_cache_length,
    )  # fmt: skip
    latent = random_values(rng, (problem.tokens, 1, size), dtypes.bf16)
    kv.ops.append(pool, 0, place.put(latent), None, place.put(problem.row_offsets))
    model.append(c, 0, latent, None, problem.row_offsets)
    np.testing.assert_array_equal(place.get(buffer).view(np.uint16), widened().view(np.uint16))
    query = random_values(rng, (problem.tokens, 4, size), dtypes.bf16)
    out = place.put(np.zeros((problem.tokens, 4, value_size), dtypes.bf16.numpy))
    kv.ops.mla_attention(pool, 0, place.put(query), place.put(problem.row_offsets), value_size=value_size, out=out)
    wanted, _ = reference.attention(c, 0, query, problem.row_offsets, value_size=value_size)
    np.testing.assert_allclose(place.get(out).astype(np.float64), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", LATENT)
def test_listed_and_decompressed_latent_rows_are_found(place, name):
    """What a list of encoded tokens names, and rows end to end, as of a packed pool."""
    rng = np.random.default_rng(13)
    shape = {"is_mla": True, "num_heads": 1, "head_size": 96, "num_layers": 1, "page_size": 16}
    problem = random_problem(rng, "paged", "bf16", cached=[40, 0, 23], new=[0, 0, 0], **shape)
    c, more = problem.collection, 64 if name == "wide rows" else 0
    rows = np.asarray(c.blocks)[:, 0, 0, :, 0]
    buffer = place.put(np.concatenate([rows, np.full((*rows.shape[:2], more), 5, rows.dtype)], -1))
    pool = LATENT[name](
        buffer, *(place.put(np.asarray(x)) for x in (c.cache_lengths, c.lookup_table)), max_seq_length=1,
        max_cache_length=c.max_cache_length,
    )  # fmt: skip
    tokens = np.stack([rng.permutation(40)[:9], rng.permutation(23)[:9]])
    encoded = (c.lookup_table[[0, 2]][np.arange(2)[:, None], tokens // 16] * 16 + tokens % 16).astype(np.int32)
    query, offsets = random_values(rng, (2, 4, 96), dtypes.bf16), np.array([0, 1, 1, 2], np.uint32)
    out = place.put(np.zeros((2, 4, 64), dtypes.bf16.numpy))
    kv.ops.mla_attention(pool, 0, *map(place.put, (query, offsets)), value_size=64, indices=place.put(encoded), out=out)
    for n in range(2):
        keys = rows[encoded[n] // 16, encoded[n] % 16].astype(np.float64)[:, None]
        wanted, _ = reference.dense_attention(
            query[n : n + 1].astype(np.float64), keys, keys[..., :64], np.ones((1, 9), bool), 96**-0.5
        )
        np.testing.assert_allclose(place.get(out)[n].astype(np.float64), wanted[0], rtol=2e-2, atol=2e-2)
    starts, skipped = np.array([0, 30, 30, 40], np.int32), np.array([5, 0, 13], np.int32)
    latent = place.put(np.zeros((40, 96), rows.dtype))
    kv.ops.mla_decompress(pool.key, place.put(starts), place.put(skipped), latent)
    wanted = model.mla_decompress_rows(c.get_key_cache(0), starts, skipped, 40)
    np.testing.assert_array_equal(place.get(latent).view(np.uint16), wanted.view(np.uint16))


# --- kernels ---------------------------------------------------------------------------------------


@kv.kernel
def read_rows(cache: kv.PagedKVCache, out: kv.Buffer[kv.f32, 4]):
    b, t = kv.block_id.x, kv.block_id.y
    if t < cache.cache_length(b):
        for h in range(cache.num_heads):
            out[b, t, h, kv.thread_id.x] = kv.f32(cache.load(b, h, t, kv.thread_id.x))
            slot = t % cache.page_size
            element = slot * cache.token_stride + h * cache.head_stride + kv.thread_id.x
            ahead = cache.block_paged_ptr(b, t - slot, 0, 0) + element * 2
            cache.store(b, h, t, kv.thread_id.x, kv.f16(kv.f32(ahead.load(kv.f16)) + 1))


CHECKED = ("vllm HND", "vllm packed", "tensorrt_llm, one layer", "lmcache, by tokens", "heads in front")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in CHECKED else pytest.mark.thorough) for n in LAYOUTS])
def test_a_kernel_of_ones_own_runs_on_every_layout(place, name):
    lengths = {"cached": [5, 0, 33, 16], "new": [3, 7, 0, 20]}
    problem = random_problem(np.random.default_rng(12), "paged", "f16", num_layers=1, page_size=8, **lengths)
    pool = pool_of(place, name, problem.collection)
    out = place.put(np.zeros((4, 33, 2, 16), np.float32))
    place.launch(read_rows, (4, 33), 16, pool.value, out)
    cache = problem.collection.get_value_cache(0)
    expected = np.zeros((4, 33, 2, 16), np.float32)
    for b, n in enumerate(problem.cached):
        for t in range(int(n)):
            expected[b, t] = model.read(cache, b, t)[0]
            model.write(cache, np.array([b]), np.array([t]), (expected[b, t][None] + 1).astype(np.float16))
    np.testing.assert_array_equal(place.get(out), expected)
    pool.assert_same(problem.collection)


WORDS = ["NPHD", "NHPD", "HNPD", "PNHD", "LNPHD", "NLPHD", "NPLHD", "NHLPD", "HLNPD"]


@settings(max_examples=60, deadline=None)
@given(
    word=st.sampled_from(WORDS), half=st.sampled_from(["2 first", "2 inside", "2 last", "C", "pair"]),
    pages=st.integers(1, 4), page_size=st.sampled_from([1, 2, 8, 5]), heads=st.integers(1, 3),
    size=st.sampled_from([1, 6, 8, 16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_model_finds_what_numpy_indexing_finds(word, half, pages, page_size, heads, size, seed):
    """For any order of the dimensions: load, blocks, row_idx and populate of every token, layer and half."""
    rng = np.random.default_rng(seed)
    layers = 2 if "L" in word else 1
    logical = rng.standard_normal((2, layers, pages, page_size, heads, size)).astype(np.float32)
    dims = {"first": "2" + word, "inside": word[0] + "2" + word[1:], "last": word[:-1] + "2" + word[-1]}.get(
        half.partition(" ")[2], word
    )
    axes = ["2LNPHD".index(x) for x in ("2" + word if half in ("C", "pair") else dims)]
    if "L" not in word:
        source = logical[:, 0]
        axes = [a - (a > 1) for a in axes]
    else:
        source = logical
    data: Any = np.ascontiguousarray(source.transpose(axes))
    if half == "C":
        data, dims = np.concatenate([data[0], data[1]], -1), word.replace("D", "C")
    elif half == "pair":
        data, dims = (data[0].copy(), data[1].copy()), word
    table = rng.permutation(pages)[None].astype(np.uint32)
    lengths = np.array([pages * page_size], np.uint32)
    one = data[0] if half == "pair" else data
    if min(pages, page_size) > 1 and one.strides[dims.index("N")] % one.strides[dims.index("P")]:
        with pytest.raises(ValueError, match="keys: the stride of pages must be a multiple of"):  # rows need numbers
            kv.ForeignPages(data, lengths, table, dims)
        return
    made = kv.ForeignPages(data, lengths, table, dims)
    t = np.arange(pages * page_size)
    wanted = logical[:, :, table[0, t // page_size], t % page_size]
    for layer in range(layers):
        for n, cache in enumerate((made.get_key_cache(layer), made.get_value_cache(layer))):
            h = np.arange(heads)[:, None]
            np.testing.assert_array_equal(cache.load(0, h, t[:, None, None], np.arange(size)), wanted[n, layer])
            np.testing.assert_array_equal(np.asarray(cache.blocks), logical[n, layer])
            first = np.asarray(cache.blocks).ctypes.data
            rows = (first + cache.row_idx(0, t) * cache.spec.token_stride * 4 - first) // 4
            flat = np.lib.stride_tricks.as_strided(np.asarray(cache.blocks), (int(rows.max()) + 1,), (4,))
            np.testing.assert_array_equal(flat[rows], wanted[n, layer, :, 0, 0])
            np.testing.assert_array_equal(cache.populate(0, 0, page_size).rows[0], cache.row_idx(0, 0))


# --- what does not fit -----------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name():
    lengths, table = np.array([3, 4], np.uint32), np.zeros((2, 3), np.int32)
    half = np.zeros((6, 16, 2, 64), np.float16)
    both, rows_ = np.stack([half, half]), np.zeros((96, 2, 64), np.float16)
    page = kv.ForeignPages
    cases: list[tuple[type, Any, str]] = [
        (ValueError, lambda: page.vllm(both, lengths, table, layout="DHN"), "layout must be NHD, HND, packed or MLA"),
        (ValueError, lambda: page.vllm(both, lengths, table, layout="packed"),
         "data must be [pages, heads, page_size, 2 * head_size], got shape [2, 6, 16, 2, 64]"),
        (ValueError, lambda: page.vllm(np.stack([half, half], 1), lengths, table),
         "data must be [2, pages, page_size, heads, head_size], got shape [6, 2, 16, 2, 64]; ForeignPages.flashinfer"),
        (ValueError, lambda: page.vllm(half[..., :63], lengths, table, layout="packed"),
         "data must have keys and values of one size in a row, got a row of 63"),
        (ValueError, lambda: page((half, half), lengths, table, "N2PHD"), "dims of a pair of keys and values have"),
        (ValueError, lambda: page(half, lengths, table, "NPHH"), "dims must name each dimension once"),
        (ValueError, lambda: page(half, lengths, table, "NPHD"), "data must hold keys and values (2 or C in dims"),
        (ValueError, lambda: page((half, half[::2]), lengths, table, "NPHD"), "must have one shape and dtype"),
        (ValueError, lambda: page((half, half.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)), lengths, table,
                                  "NPHD"), "keys and values must have the same strides"),
        (ValueError, lambda: page((half[..., ::2],) * 2, lengths, table, "NPHD"), "contiguous in their last dimension"),
        (ValueError, lambda: page((np.broadcast_to(half[:1], half.shape),) * 2, lengths, table, "NPHD"),
         "elements must not overlap"),
        (ValueError, lambda: page(np.zeros((6, 16, 2, 160), np.float16)[..., 4:132], lengths, table, "NPHC"),
         "must start at a multiple of 16 bytes"),
        (ValueError, lambda: page(np.zeros((6, 16, 2, 132), np.float16)[..., :128], lengths, table, "NPHC"),
         "strides must be multiples of 8 elements"),
        (TypeError, lambda: page.sglang((rows_,) * 2, lengths, table, page_size=None), "page_size must be an integer"),
        (ValueError, lambda: page.sglang((rows_, rows_), lengths, table, page_size=97),
         "keys: slots must be at least page_size 97, got 96"),
        (ValueError, lambda: page.lmcache(np.zeros((4, 2, 3, 16, 128), np.float16), lengths, table, 3),
         "heads * head_size must be a multiple of num_heads 3, got 128"),
        (ValueError, lambda: page.vllm(both.astype(np.int8), lengths, table, scales=np.ones((6, 16, 2, 1), np.float32)),
         "scales must be a pair of buffers, got 1"),
        (ValueError, lambda: page.vllm(both.astype(np.int8), lengths, table,
                                       scales=(np.ones((6, 2, 16, 1), np.float32),) * 2),
         "scales must be [1, 6, 16, 2] (layers, pages, page_size, heads) with G"),
        (ValueError, lambda: page.vllm(both, lengths, table, scales=(np.ones((6, 16, 2, 1), np.float32),) * 2),
         "a quantized cache must store an 8-bit type, got f16"),
        (ValueError, lambda: page.vllm(both, lengths, table, max_cache_length=49), "lookup_table must have a column"),
        (ValueError, lambda: page.vllm(both, lengths[:1], table), "lookup_table must have one row per sequence"),
        (ValueError, lambda: page.vllm(both.astype(np.float64), lengths, table), "cache dtype must be f32"),
        (IndexError, lambda: page.vllm(both, lengths, table).get_key_cache(1), "layer must be in [0, 1)"),
    ]  # fmt: skip
    for kind, call, message in cases:
        with pytest.raises(kind, match=re.escape(message)):
            call()


def test_a_kernel_for_one_layout_refuses_another_by_name():
    half = np.zeros((6, 2, 16, 64), np.float16)
    lengths, table = np.array([3], np.uint32), np.zeros((1, 3), np.uint32)
    packed = kv.ForeignPages.vllm(np.zeros((2, 6, 16, 2, 64), np.float16), lengths, table)
    heads_first = kv.ForeignPages.vllm(np.stack([half, half]), lengths, table, layout="HND")
    made = kv.compile(read_rows, packed.key.spec, kv.Buffer[kv.f32, 4], target="host")
    with pytest.raises(
        TypeError, match=re.escape("page_size=16 strides=(64, 1024): compile the kernel for this cache")
    ):
        made.launch((1, 33), 64, heads_first.key, np.zeros((1, 33, 2, 64), np.float32))


def test_a_packed_layout_is_the_native_type():
    """Where a library's tokens and heads are packed, its pages are specialised for as our own."""
    half = np.zeros((6, 16, 2, 64), np.float16)
    lengths, table = np.array([3], np.uint32), np.zeros((1, 3), np.uint32)
    native = layout.spec_of("paged", "f16", 2, 64, page_size=16)
    assert kv.ForeignPages.vllm(np.stack([half, half]), lengths, table).cache_spec == native
    assert (
        kv.ForeignPages.sglang(
            [np.zeros((96, 2, 64), np.float16) for _ in range(2)], lengths, table, page_size=16
        ).cache_spec
        == native
    )
    strided = kv.ForeignPages.vllm(np.zeros((6, 2, 16, 128), np.float16), lengths, table, layout="packed")
    assert strided.cache_spec.strides == (128, 2048)
    assert layout.packed(strided.cache_spec) == native


def pairs_that_share() -> dict[str, Any]:
    b = np.zeros((6, 4, 2, 32), np.float32)
    whole = np.zeros((6, 2, 4, 2, 32), np.float32)
    rows = np.zeros((6, 4, 2, 48), np.float32)
    return {
        "one buffer twice": ((b, b), "NPHD"),
        "all but one page": ((b[:5], b[1:]), "NPHD"),
        "half a row": ((rows[..., :32], rows[..., 16:]), "NPHD"),
        "a 2 of stride 0": (np.broadcast_to(b[:, None], (6, 2, 4, 2, 32)), "N2PHD"),
        "a 2 of half a page": (
            np.lib.stride_tricks.as_strided(b, (5, 2, 4, 2, 32), (1024, 512, 256, 128, 4)), "N2PHD"
        ),
        "heads of one another": ((whole[:, 0], whole[:, 0, :, ::-1][:, :, ::-1]), "NPHD"),
    }  # fmt: skip


@pytest.mark.parametrize("name", [*pairs_that_share()])
def test_keys_and_values_that_share_bytes_are_no_pool(name):
    data, dims = pairs_that_share()[name]
    tables = np.zeros(1, np.uint32), np.zeros((1, 4), np.uint32)
    with pytest.raises(ValueError, match=r"must not share memory|must not overlap"):
        kv.ForeignPages(data, *tables, dims)


def test_keys_and_values_between_one_another_are_a_pool():
    tables = np.zeros(1, np.uint32), np.zeros((1, 4), np.uint32)
    whole = np.zeros((6, 4, 2, 64), np.float32)
    kv.ForeignPages(whole, *tables, "NPHC")
    kv.ForeignPages((whole[..., :32], whole[..., 32:]), *tables, "NPHD")
    kv.ForeignPages((whole[::2, ..., :32], whole[1::2, ..., :32]), *tables, "NPHD")
    scales = np.ones((6, 4, 2, 1), np.float32)
    keys, values = (np.zeros((6, 4, 2, 32), np.int8) for _ in range(2))
    with pytest.raises(ValueError, match="scales and value_scales must not share memory"):
        kv.ForeignPages((keys, values), *tables, "NPHD", scales=(scales, scales))
