# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations in place on the layouts of other libraries, against the NumPy model of a packed cache.

Every byte of a library's buffers is compared with the buffers that plain NumPy makes of what the model leaves: other
layers, rows behind the last page and poison in unused slots too. Tables are permuted, lengths ragged.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reference import attention as reference, model
from reference.foreign import LAYOUTS, Pool, pool_of
from reference.kinds import schedule_for
from reference.places import Place, near
from reference.random_caches import Problem, clone, random_problem, random_query, random_values, stored_problem

import kvarn as kv
from kvarn.dialect import dtypes, layout

pytestmark = pytest.mark.sampled(5)

RAGGED: dict[str, Any] = {"num_layers": 1, "page_size": 8, "cached": [5, 0, 33, 16], "new": [3, 7, 0, 20]}
SOME = ("vllm packed", "flashinfer HND", "flashinfer pair NHD", "sglang, page 1", "tensorrt_llm", "lmcache, by tokens")


def in_layout(place: Place, name: str, seed: int, dtype: str = "bf16", **shape: Any) -> tuple[Any, Problem, Pool]:
    """A random problem, and its pool in a layout."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, "paged", dtype, **{**RAGGED, **shape})
    return rng, problem, pool_of(place, name, problem.collection)


def rows(rng: Any, problem: Problem, dtype: Any = None) -> np.ndarray:
    c = problem.collection
    return random_values(rng, (problem.tokens, c.num_heads, c.head_size), dtypes.of(dtype or c.dtype))


# --- writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("dtype", "source"), [("bf16", "bf16"), ("f8e4m3", "bf16"), ("f32", "f32")])
def test_append_writes_the_new_tokens_only(place, name, dtype, source):
    rng, problem, pool = in_layout(place, name, 1, dtype)
    key, value = rows(rng, problem, source), rows(rng, problem, source)
    kv.ops.append(pool.collection, pool.layer, *map(place.put, (key, value, problem.row_offsets)))
    model.append(problem.collection, 0, key, value, problem.row_offsets)
    pool.assert_same(problem.collection)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("heads", "size", "page_size"), [(1, 64, 16), (3, 80, 8), (2, 7, 20), (8, 128, 1), (1, 5, 1)])
def test_append_serves_any_shape_of_a_page(place, name, heads, size, page_size):
    shape = {"num_heads": heads, "head_size": size, "page_size": page_size}
    rng, problem, pool = in_layout(place, name, 2, "f16", **shape)
    key, value = rows(rng, problem), rows(rng, problem)
    kv.ops.append(pool.collection, pool.layer, *map(place.put, (key, value, problem.row_offsets)))
    model.append(problem.collection, 0, key, value, problem.row_offsets)
    pool.assert_same(problem.collection)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rope_append_rotates_and_writes(place, name):
    rng, problem, pool = in_layout(place, name, 3, "f32")
    key, value = rows(rng, problem), rows(rng, problem)
    query = random_query(rng, problem, 4)
    freqs = random_values(rng, (60, 16), dtypes.f32)
    found = kv.ops.rope_append(
        pool.collection, pool.layer, *map(place.put, (query, key, value, problem.row_offsets, freqs))
    )
    expected = model.rope_append(problem.collection, 0, query, key, value, problem.row_offsets, freqs)
    np.testing.assert_allclose(place.get(found), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(pool.found(), pool.expected(problem.collection), strict=True):
        near(a, b)


@pytest.mark.parametrize("name", SOME)
def test_every_other_write_is_in_place(place, name):
    """Rows of ragged and padded batches, sums, norms and rotations of what is cached."""
    rng, problem, pool = in_layout(place, name, 4, "f32")
    c, offsets = problem.collection, problem.row_offsets
    x, more = rows(rng, problem), rows(rng, problem)
    kv.ops.store_ragged(pool.key, place.put(x), place.put(offsets))
    model.store_ragged(c.get_key_cache(0), x, offsets)
    padded, valid = random_values(rng, (4, 20, 2, 16), dtypes.f32), np.array([3, 7, 0, 20], np.uint32)
    kv.ops.store_padded(pool.value, place.put(padded), place.put(valid))
    model.store_padded(c.get_value_cache(0), padded, valid)
    pool.assert_same(c)
    sums = np.concatenate([more.reshape(problem.tokens, -1)] * 2, 1)
    kv.ops.radd(pool.collection, pool.layer, place.put(sums), place.put(offsets))
    model.radd(c, 0, sums, offsets)
    stacked = np.concatenate([more.reshape(problem.tokens, -1)] * 2)
    kv.ops.iadd_2m(pool.collection, pool.layer, place.put(stacked), place.put(offsets))
    model.iadd_2m(c, 0, stacked, offsets)
    for size in (8, 16, 32):  # part of a head, a head, all heads of a token
        gamma = random_values(rng, (size,), dtypes.f32)
        kv.ops.rms_norm(pool.key, place.put(gamma), 1e-5, place.put(offsets))
        model.rms_norm(c.get_key_cache(0), gamma, 1e-5, offsets)
    for a, b in zip(pool.found(), pool.expected(c), strict=True):
        near(a, b)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "sglang, page 1"])  # whose slots of page N are there
def test_stray_page_ids_write_nothing_and_read_inside_the_pool(place, name):
    """Entries of a table that name no page, for cached and for new tokens, as in a table that is not filled in."""
    rng = np.random.default_rng(15)
    problem = random_problem(rng, "paged", "f16", num_layers=1, page_size=8, head_size=64, cached=[20, 7], new=[3, 2])
    c, n = problem.collection, problem.collection.num_blocks
    table = np.array(c.lookup_table)
    table[0, 1], table[0, 2], table[1, 1:] = n, 2**32 - 5, 2**31 + 7  # token 20 and later of one, 8 of the other
    c = kv.PagedKVCacheCollection(c.blocks, c.cache_lengths, table, 3, 23)
    pool = pool_of(place, name, c)
    key, value = rows(rng, problem), rows(rng, problem)
    kv.ops.append(pool.collection, pool.layer, *map(place.put, (key, value, problem.row_offsets)))
    model.append(c, 0, key, value, problem.row_offsets)
    pool.assert_same(c)
    query = random_query(rng, problem, 4)
    for kind in ("decode", "tile", "mma", "simt"):
        schedule = (
            None if place.name == "host" else {**schedule_for(kind), **({"max_queries": 4} if kind == "decode" else {})}
        )
        out = place.put(np.zeros_like(query))
        kv.ops.attention(
            pool.collection, pool.layer, *map(place.put, (query, problem.row_offsets)), out=out, schedule=schedule
        )
    pool.assert_same(c)


# --- scales ----------------------------------------------------------------------------------------

SCALED: dict[str, Any] = {"scale_dtype": "f32", "granularity": 16, "head_size": 64}


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "sglang, page 1"])
@pytest.mark.parametrize("dtype", ["f8e4m3", "i8"])
def test_an_8_bit_pool_may_have_scales_of_its_own(place, name, dtype):
    """Appending quantizes into them, attention reads them, pages are copied with them."""
    rng, problem, pool = in_layout(place, name, 14, dtype, cached=[33, 0, 5], new=[1, 1, 1], page_size=16, **SCALED)
    c = problem.collection
    key, value = rows(rng, problem, "bf16"), rows(rng, problem, "bf16")
    kv.ops.append(pool.collection, pool.layer, *map(place.put, (key, value, problem.row_offsets)))
    model.append(c, 0, key, value, problem.row_offsets)
    for a, b in zip(pool.found(), pool.expected(c), strict=True):
        near(a, b, 0.001)
    np.testing.assert_allclose(pool.scales(), np.asarray(c.scales)[:, :, 0], rtol=1e-6)
    query = random_query(rng, problem, 4)
    out = place.put(np.zeros_like(query))
    kv.ops.attention(pool.collection, pool.layer, *map(place.put, (query, problem.row_offsets)), out=out)
    wanted, _ = reference.attention(c, 0, query, problem.row_offsets)
    np.testing.assert_allclose(place.get(out).astype(np.float64), wanted, rtol=3e-2, atol=3e-2)
    ids = np.array([int(c.lookup_table[0, 0])], np.int32), np.array([c.num_blocks - 1], np.int32)
    kv.ops.copy_pages(pool.collection, *map(place.put, ids))
    scales = pool.scales()
    np.testing.assert_array_equal(scales[ids[1]], scales[ids[0]])


# --- moving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bf16", "i8"])
def test_gather_reads_tokens(place, name, dtype):
    _, problem, pool = in_layout(place, name, 5, dtype)
    ids, offsets = np.array([[0, 4, 2], [32, 1, 17], [15, 0, 9]], np.int32), np.array([0, 1, 1, 2, 3], np.uint32)
    for cache, other in ((pool.key, problem.collection.get_key_cache(0)),
                         (pool.value, problem.collection.get_value_cache(0))):  # fmt: skip
        out = place.put(np.zeros((3, 3, 2, 16), cache.dtype.numpy))
        kv.ops.gather(cache, place.put(ids), place.put(offsets), out)
        np.testing.assert_array_equal(place.get(out), model.gather_rows(other, ids, offsets))
    pool.assert_same(problem.collection)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "sglang, page 1"])
@pytest.mark.parametrize(("heads", "size", "page_size"), [(2, 16, 8), (3, 5, 4), (2, 128, 16)])
def test_copy_pages_copies_keys_and_values(place, name, heads, size, page_size):
    shape = {"num_heads": heads, "head_size": size, "page_size": page_size}
    _, problem, pool = in_layout(place, name, 6, "f16", **shape)
    last = problem.collection.num_blocks - 1
    source, destination = np.array([0, 1, 2, last + 1, -1], np.int32), np.array([last, 4, 5, 3, 6], np.int32)
    kv.ops.copy_pages(pool.collection, place.put(source), place.put(destination))
    model.copy_pages(problem.collection, source, destination)
    pool.assert_same(problem.collection)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("flashinfer HND", "vllm packed"),
        ("vllm packed", "flashinfer pair HND"),
        ("vllm packed", "vllm packed, tokens first"),
        ("sglang", "heads in front"),
        ("vllm HND as NHD", "vllm NHD"),
    ],
)
def test_transfer_pages_goes_from_layout_to_layout(place, a, b):
    rng, problem, source = in_layout(place, a, 7, "f16", num_heads=3)
    other = random_problem(rng, "paged", "f16", **{**RAGGED, "num_heads": 3, "new": [9, 1, 1, 1]})
    destination, back = pool_of(place, b, other.collection), clone(problem.collection)
    last = min(problem.collection.num_blocks, other.collection.num_blocks) - 1
    ids = np.array([0, last, 2, 3, 999, -1], np.int32), np.array([last, 0, 3, 2, 1, 1], np.int32)
    given = tuple(map(place.put, ids))
    kv.ops.transfer_pages(source.collection, destination.collection, *given)
    model.transfer_pages(problem.collection, other.collection, *ids)
    destination.assert_same(other.collection)
    source.assert_same(problem.collection)
    packed = place.collection(back)  # and into a packed pool and out of it
    kv.ops.transfer_pages(destination.collection, packed, *given[::-1], 0)
    model.transfer_pages(other.collection, back, *ids[::-1])
    np.testing.assert_array_equal(place.get(packed.blocks).view(np.uint16), np.asarray(back.blocks).view(np.uint16))
    kv.ops.transfer_pages(packed, source.collection, *given, 0)
    model.transfer_pages(back, problem.collection, *ids)
    source.assert_same(problem.collection)


@pytest.mark.parametrize("name", LAYOUTS)
def test_convert_reads_and_writes_every_layout(place, name):
    """Into a cache with scales and out of it, and between element types."""
    rng, problem, pool = in_layout(place, name, 8, "f16", new=[0] * 4)
    scaled = random_problem(
        rng, "paged", "f8e4m3", scale_dtype="f32", granularity=8, cached=RAGGED["cached"], new=[0] * 4, num_layers=1
    )
    found = place.collection(scaled.collection)
    kv.ops.convert(pool.key, found.get_value_cache(0))
    model.convert(problem.collection.get_key_cache(0), scaled.collection.get_value_cache(0))
    near(place.get(found.blocks), np.asarray(scaled.collection.blocks), 0.01)
    kv.ops.convert(found.get_value_cache(0), pool.value)
    model.convert(scaled.collection.get_value_cache(0), problem.collection.get_value_cache(0))
    for a, b in zip(pool.found(), pool.expected(problem.collection), strict=True):
        near(a, b, 0.01)


# --- attention -------------------------------------------------------------------------------------

KINDS = {"decode": [1, 1, 0, 1], "tile": [40, 3, 0, 20], "mma": [40, 3, 0, 20], "simt": [2, 1, 0, 5]}


def attend(place: Place, pool: Pool, problem: Problem, query: np.ndarray, schedule: Any, **options: Any) -> None:
    out = place.put(np.full_like(query, 77))
    kv.ops.attention(
        pool.collection, pool.layer, place.put(query), place.put(problem.row_offsets), out=out, schedule=schedule,
        **options,
    )  # fmt: skip
    mask = "sliding_window" if "window" in options else "causal"
    wanted, _ = reference.attention(problem.collection, 0, query, problem.row_offsets, mask=mask, **options)
    got = place.get(out).astype(np.float64)
    assert not np.isnan(got).any()
    np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2)
    pool.assert_same(problem.collection)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_reads_every_layout(place, name, kind):
    rng, problem = stored_problem(
        9, dtype="f16", num_layers=1, page_size=16, head_size=64, cached=[37, 0, 5, 70], new=KINDS[kind]
    )
    pool = pool_of(place, name, problem.collection)
    schedule = None
    if not isinstance(place, Place) or place.name != "host":
        schedule = {**schedule_for(kind), **({"max_queries": 1} if kind == "decode" else {})}
    attend(place, pool, problem, random_query(rng, problem, 4), schedule)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("dtype", "page_size", "size"), [("bf16", 64, 128), ("f8e4m3", 16, 64), ("bf16", 1, 64)])
@pytest.mark.parametrize("kind", ["decode", "mma"])
def test_attention_by_page_sizes_and_element_types(place, name, dtype, page_size, size, kind):
    rng, problem = stored_problem(
        10, dtype=dtype, num_layers=1, page_size=page_size, head_size=size, cached=[90, 3], new=KINDS[kind][:2]
    )
    pool = pool_of(place, name, problem.collection)
    schedule = None
    if place.name != "host":
        schedule = {**schedule_for(kind), **({"max_queries": 1} if kind == "decode" else {})}
    attend(place, pool, problem, random_query(rng, problem, 4), schedule, window=50)


# --- latent rows -----------------------------------------------------------------------------------

LATENT: dict[str, Any] = {
    "vllm": lambda x, *rest, **more: kv.ForeignPages.vllm(x, *rest, layout="MLA", **more),
    "sglang": lambda x, *rest, **more: kv.ForeignPages.sglang(
        x.reshape(-1, 1, x.shape[-1]), *rest, page_size=x.shape[1], **more
    ),
    "wide rows": lambda x, *rest, **more: kv.ForeignPages(x[..., : x.shape[-1] - 64], *rest, "NPD", **more),
}


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("new", [[1, 1, 1], [20, 3, 0]])
@pytest.mark.parametrize(("size", "value_size"), [(96, 64), (160, 128)])  # the second on the tensor cores
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
    wanted, _ = reference.mla_attention(c, 0, query, problem.row_offsets, value_size=value_size)
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_kernel_of_ones_own_runs_on_every_layout(place, name):
    _, problem, pool = in_layout(place, name, 12, "f16")
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
