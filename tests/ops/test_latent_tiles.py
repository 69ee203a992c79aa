# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Latent rows by the kernel over tiles, with products by mma.sync, by the interpreter: what has no kernel on wgmma.

Values are columns of the keys' tile. More than 256 of them are shared by warps that stand beside one another, in other
stacks than those of the scores where tiles of keys are short, as on sm_80.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ops.test_attention_latent import Shape
from ops.test_attention_mla import latent_problem, store_scaled_rows
from ops.test_mla_functions import attend, model
from ops.test_mla_sparse import listed_rows, on_gpu, sparse_problem, sparse_reference
from reference.attention_functions import t5_buckets
from reference.places import Interpreted
from reference.random_caches import random_values
from reference.shared_prefixes import close

import kvarn as kv
from kvarn.dialect import dtypes, tile_layout
from kvarn.dialect.latent_layout import RowFormat
from kvarn.dialect.layout import CacheSpec
from kvarn.dispatch import artifact
from kvarn.emulator import grid as ptx
from kvarn.lowering.kernels.attention.case import Case
from kvarn.lowering.schedules.attention import problems
from kvarn.lowering.target import by_name
from kvarn.ops import mla

WIDE = Shape(size=576, value_size=512, target="sm_80", cached=(40, 0), new=(2, 1))
BESIDE = replace(WIDE, size=304, value_size=288, cached=(40,), new=(1,))
SMALL = replace(WIDE, size=144, value_size=128)
ROPE = replace(WIDE, dtype="f8e4m3", size=128 + 2 * 16, value_size=128, rope=16)
CASES = {
    "512 columns": WIDE,
    "512 columns, tiles of 64 keys": replace(WIDE, target="sm_90a", page_size=5, size=568),
    "partial results": replace(WIDE, splits=2, cached=(300,), new=(2,)),
    "pages of 5": replace(WIDE, page_size=5),
    "window": replace(WIDE, mask=("sliding_window", 30)),
    "continuous": replace(WIDE, kind="continuous", mask=("null", 0)),
    "288 values": replace(BESIDE, query="f16", dtype="f16"),
    "272 values, in two kernels": replace(WIDE, size=288, value_size=272),
    "128 values": SMALL,
    "more splits than are combined": replace(
        SMALL, size=24, value_size=16, heads=4, splits=64, cached=(4300,), new=(1,), page_size=256
    ),
    "heads of one token over two tiles": replace(SMALL, heads=72),
    "8-bit rows": replace(WIDE, dtype="f8e4m3"),
    "8-bit rows with a scale": replace(SMALL, dtype="f8e4m3", granularity=144),
    "8-bit rows with three scales": replace(SMALL, dtype="f8e4m3", granularity=48, page_size=5),
    "8-bit integers": replace(SMALL, dtype="i8", granularity=144, query="f16"),
    "rows that end in bf16": replace(ROPE, page_size=5),
    "scaled rows that end in bf16": replace(ROPE, granularity=160, kind="continuous"),
    "rows with their scales in them": replace(ROPE, size=128 + 16 + 2 * 16, inline=32),
    "rows of 656 bytes": replace(WIDE, dtype="f8e4m3", size=656, rope=64, inline=128),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_every_row_and_page_gives_attention(name):
    out, want = CASES[name].run(1)
    np.testing.assert_allclose(out, want, rtol=2e-2, atol=2e-2)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "shape", [replace(BESIDE, page_size=5), replace(BESIDE, splits=2, cached=(150,)), replace(ROPE, page_size=5)]
)
def test_results_do_not_depend_on_the_order_of_warps_and_copies(shape):
    (first, _), *rest = (shape.run(2, order) for order in (ptx.ORDERS[0], ptx.ORDERS[3], ptx.RANDOM[0]))
    for other, _ in rest:
        np.testing.assert_array_equal(other, first)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dtype", "head_size", "value_size", "heads", "splits"),
    [
        ("bf16", 160, 128, 16, 1), ("bf16", 576, 512, 16, None), ("f16", 144, 128, 72, 3), ("f16", 136, 128, 3, None),
        ("f8e4m3", 160, 128, 16, 2), ("f8e4m3", 576, 512, 16, None),
    ],
)  # fmt: skip
def test_listed_rows_are_those_that_a_token_sees(dtype, head_size, value_size, heads, splits):
    scales = {"scale_dtype": "f32"} if dtype == "f8e4m3" else {}
    rng, problem, indices = sparse_problem(
        5, dtype, 300, head_size=head_size, page_size=12, cached=[280, 0, 60], new=[1, 1, 2], longest=320, **scales
    )
    pool: Any = problem.collection
    blocks = pool.blocks.shape[0]
    indices[0, [3, 70]] = blocks * 12 + 1, -(2**31)
    query = random_values(rng, (problem.tokens, heads, head_size), dtypes.of("bf16" if dtype == "f8e4m3" else dtype))
    lengths = np.array([300, 70, 33, 0], np.int32)
    schedule: dict[str, Any] = {"kind": "latent"} | ({"splits": splits} if splits else {})
    out = on_gpu(problem, 1, query, indices, lengths, value_size, schedule, target="sm_80")
    want = sparse_reference(query, indices, lambda e: listed_rows(problem, 1, e), value_size, lengths, blocks * 12)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2e-2, atol=2e-2)


@kv.kernel(block=128)
def of_listed(
    x: kv.Buffer[kv.bf16, 2], pool: kv.KVCacheCollection, lists: kv.Buffer[kv.i32, 2], out: kv.Buffer[kv.f32, 2]
):
    """Products of 64 vectors with rows of the pool, the first 20 of a list."""
    row, cache = kv.tile_index(64), pool.get_key_cache(1)
    a = x.load_rows(row, columns=80)
    keys = {"rows": 32, "columns": 80, "dtype": kv.bf16, "lists": lists, "rope": 16, "inline_scales": 32}
    k = cache.tile(1, 0, 0, 20, **keys)
    out.store_rows(row, value=kv.dot(a, k.T))


@pytest.mark.parametrize("place", ["host", "sm_80", "sm_90a"])
def test_a_kernel_of_ones_own_multiplies_listed_rows(place):
    content, rope, elements = 64, 16, 32
    rng, problem = latent_problem(
        7, dtype="f8e4m3", head_size=content + 8 + 2 * rope, cached=[30], new=[0], page_size=4
    )
    stored, _ = store_scaled_rows(rng, problem, content, rope, elements)
    tokens = rng.permutation(30)[:32].astype(np.int32)
    tokens[[2, 9]] = -1
    lists = np.full((2, 30), 1 << 30, np.int32)
    logical, offsets = np.broadcast_to(tokens, (1, 30)), np.array([0, 1], np.uint32)
    pool: Any = problem.collection
    lists[1] = kv.ops.remap_sparse_indices(
        np.ascontiguousarray(logical), offsets, pool.lookup_table, 4, problem.null_page
    )
    x = random_values(rng, (64, content + rope), dtypes.bf16)
    want = np.zeros((64, 32))
    for n, token in enumerate(tokens[:20]):
        if token >= 0:
            want[:, n] = x.astype(np.float64) @ stored[0][token]
    out = np.full((64, 32), 7.0, np.float32)
    given = (x, problem.collection, lists, out)
    if place == "host":
        of_listed[(1,), 128](*given)
    else:
        Interpreted(place).launch(of_listed, (1, 1, 1), (128, 1, 1), *given)
    np.testing.assert_allclose(out, want, rtol=1e-2, atol=0.1)  # keys are rounded to bf16


@kv.kernel(block=128)
def of_columns(x: kv.Buffer[kv.bf16, 2], pool: kv.KVCacheCollection, out: kv.Buffer[kv.f32, 2]):
    """Products of 64 vectors with keys, times the last columns of these: both loads are of the same tokens."""
    row, cache, count = kv.tile_index(64), pool.get_key_cache(1), pool.cache_length(0)
    q, sums = x.load_rows(row, columns=128), kv.full((64, 64), 0.0)
    for j in range(0, (count + 31) // 32):
        k = cache.tile(0, 0, j * 32, count, rows=32, tail="any")
        v = cache.tile(0, 0, j * 32, count, rows=32, columns=64, first_column=64)
        seen = (j * 32 + kv.tile_index(32))[None, :] < count
        sums = kv.dot(kv.bf16(kv.where(seen, kv.dot(q, k.T), 0.0)), v, sums)
    out.store_rows(row, value=sums)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_columns_of_the_keys_are_values_by_every_instruction(target):
    rng, problem = latent_problem(1, dtype="bf16", head_size=128, cached=[70], new=[0], page_size=4, longest=80)
    x, out = random_values(rng, (64, 128), dtypes.bf16), np.zeros((64, 64), np.float32)
    keys = np.asarray(problem.collection.get_key_cache(1).load(0, 0, np.arange(70)[:, None], np.arange(128)))
    keys = keys.astype(np.float64)
    Interpreted(target).launch(of_columns, (1, 1, 1), (128, 1, 1), x, problem.collection, out)
    want = x.astype(np.float64) @ keys.T @ keys[:, 64:]
    np.testing.assert_allclose(out, want, rtol=2e-2, atol=0.02 * np.abs(want).max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "splits"), [("bf16", 2), ("f8e4m3", 1)])
def test_lists_of_nothing_give_zeros(dtype, splits):
    rng, problem, indices = sparse_problem(10, dtype, head_size=144, cached=[20, 0], new=[2, 1])
    query = random_values(rng, (problem.tokens, 16, 144), dtypes.bf16)
    schedule = {"kind": "latent", "splits": splits}
    none = np.zeros(problem.tokens, np.int32)
    for lists, lengths in ((indices[:, :0], None), (indices, none), (np.full_like(indices, -1), None)):
        out = on_gpu(problem, 1, query, np.ascontiguousarray(lists), lengths, 128, schedule, target="sm_80")
        assert (out == 0).all()


def test_tables_of_scores_are_read_at_the_rows_that_a_warp_has_of_scores():
    rng, problem = latent_problem(7, dtype="f16", head_size=576, cached=[50, 0], new=[2, 9], page_size=16)
    query = random_values(rng, (problem.tokens, 8, 576), dtypes.f16)
    bias, buckets = rng.standard_normal((8, 16)).astype(np.float32), t5_buckets(60)
    found = attend(
        Interpreted("sm_80"), problem, query, size=512, schedule={"kind": "latent"}, mask=kv.masks.sliding_window(40),
        score=(lambda s, b, h, q, k, bias, buckets: s + bias[h, buckets[q - k]], bias, buckets),
    )  # fmt: skip
    want = model(
        problem, query, 512, score=lambda x, b, h, q, k: x + bias[h, buckets[np.clip(q - k, 0, 59)]],
        mask=lambda b, h, q, k: (k <= q) & (q - k < 40),
    )  # fmt: skip
    close(found, want, 2e-2)


def test_no_key_is_multiplied_twice():
    rng, problem, _ = sparse_problem(3, "bf16", head_size=576, page_size=64)
    query = random_values(rng, (problem.tokens, 16, 576), dtypes.bf16)
    out = np.zeros((problem.tokens, 16, 512), query.dtype)
    operands = (problem.collection, 1, query, problem.row_offsets, 1.0, out)
    attributes = (("value_size", 512), ("mask", "causal"), ("span", 0))
    what, _ = mla._MLA_ATTENTION.specialisation(operands, attributes, (("kind", "latent"), ("splits", 1)), "sm_80")
    text = str(artifact(what).code["ptx"])
    # A warp has 16 of 64 rows and 16 of 32 keys of scores, and 32 rows and 128 columns of values.
    assert len(re.findall(r"mma\.sync\.aligned\.m16n8k16", text)) == 36 * 2 + 2 * 2 * 16


@pytest.mark.parametrize(
    ("content", "rope", "why"), [(60, 4, "a head size of a multiple of 8"), (1032, 8, "up to 512"), (128, 16, None)]
)
def test_rows_that_products_do_not_read_by_chunks_are_refused(content, rope, why):
    spec = CacheSpec("paged", dtypes.f8e4m3, num_heads=1, head_size=content + 2 * rope, page_size=16, is_mla=True)
    case = Case(RowFormat(spec, rope), dtypes.bf16, dtypes.bf16, heads=16, value_size=content)
    found = problems(case, by_name("sm_80"), 16)
    assert (found == []) if why is None else why in found[0]


@pytest.mark.parametrize(
    ("name", "columns"),
    [("mma:4x2", 64), ("mma:4x2", 192), ("mma:2x4", 64), ("mma:2x4", 192), ("wgmma:4x2", 64), ("wgmma:4x2", 512)],
)
def test_warps_beside_one_another_hold_every_element_once(name, columns):
    layout = tile_layout.parse(name, (64, columns))
    held = [layout.position(r, lane, w) for w in range(8) for lane in range(32) for r in range(layout.registers)]
    assert len(set(held)) == len(held) == 64 * columns
    rows, across = tile_layout.row_vector(layout), tile_layout.column_vector(layout)
    assert tile_layout.parse(str(rows), (64,)) == rows
    assert tile_layout.parse(str(across), (columns,)) == across
    assert rows.replicas == 4 * int(name[-1])


def test_each_warpgroup_beside_another_has_the_columns_of_one_instruction():
    both, one = (tile_layout.parse(name, (64, n)) for name, n in (("wgmma:4x2", 128), ("wgmma", 64)))
    for warp, lane, r in itertools.product(range(8), range(32), range(one.registers)):
        row, column = one.position(r, lane, warp % 4)
        assert both.position(r, lane, warp) == (row, column + 64 * (warp // 4))


@pytest.mark.parametrize("name", ["wgmma:4x2", "mma:3x2", "mma:4x3"])
def test_only_powers_of_two_of_warps_and_of_their_columns_stand_beside_one_another(name):
    with pytest.raises(ValueError, match="warps"):
        tile_layout.parse(name, (192, 96))
