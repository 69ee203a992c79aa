# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention on a GPU, over torch tensors: the tables of tests/ops, and every kernel over sizes that no interpreter has.

``auto`` is the choice of the operation, which takes the decode kernel for few queries. What holds no token is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reference import attention as reference, attention_rows, function_rows, latent_rows
from reference.case import KERNELS, LAYER, NULL, Case, Form, OfOperands, Padded, assert_same_bits, named, window
from reference.decode_cases import batch_invariance, early_after_append
from reference.kinds import MMA
from reference.operands import cache_parts, dense_parts, ragged_parts
from reference.places import Torch

import kvarn as kv

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

GPU = Torch()
SCHEDULES: dict[str, dict[str, Any]] = {"auto": {}, "simt": {"kind": "simt"}, "mma": MMA}
needs_tiles = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="wgmma"
)
ROWS = {
    f"{table}: {row.rule}: {kernel}": (row, kernel)
    for tables in (attention_rows.TABLES, latent_rows.TABLES, function_rows.TABLES) for table, of in tables.items()
    for row in of
    for kernel in row.kernels.replace("|", " ").split()
    if "sm_" not in kernel and not getattr(row.case.form, "wide", False)  # torch has no unsigned words of 64 bits
    if kernel != "host" or not row.rule.startswith("values that are hidden from all rows")  # documented for the host
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_tables(name):
    row, kernel = ROWS[name]
    schedule = {} if kernel == "host" else MMA if kernel == "mma" else KERNELS[kernel][1]
    replace(row.case, schedule={**schedule, **row.case.schedule}).check(GPU)


# --- sizes -------------------------------------------------------------------------------------------

MASKS = [named("causal"), NULL, window(7), window(100), named("chunked", 24), named("chunked_causal", 80)]
MANY, FEW = ([50, 0, 130, 7, 0, 900], [70, 200, 0, 1, 0, 33]), ([50, 0, 130, 7, 0, 900], [2, 1, 0, 1, 0, 2])
BOTH = [([100, 40, 0], [1, 1, 1]), ([100, 40, 0], [70, 5, 129])]


FORMS = {
    "ragged": Form(), "padded": Padded(3), "caches": OfOperands(cache_parts), "dense": OfOperands(dense_parts),
    "ragged operands": OfOperands(ragged_parts),
}  # fmt: skip


def check(kind: str, /, lengths: Any = BOTH, **case: Any) -> None:
    """A kernel over batches, of which one has few new tokens."""
    for cached, new in lengths:
        Case(cached=cached, new=new, schedule=SCHEDULES[kind], **{"heads": 2, **case}).check(GPU)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_each_mask_and_form(form, kind, mask):
    check(kind, [MANY, FEW], mask=mask, form=FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 96, 112, 128, 192, 256])
def test_each_head_size(form, kind, head_size):
    for dtype in ("bf16", "f16"):
        check(kind, dtype=dtype, head_size=head_size, form=FORMS[form])


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 32, 64, 128, 256])
def test_each_page_size(kind, page_size):
    check(kind, page_size=page_size, head_size=128)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("cache", ["continuous", "fa3"])
def test_the_other_kinds_of_cache(kind, cache):
    check(kind, kind=cache, group=3)


@pytest.mark.parametrize("form", ["ragged", "padded", "dense", "ragged operands"])
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [("i8", ("f32", 64)), ("i8", ("f16", 4)), ("f8e4m3", ("f32", 8)), ("f8e4m3", None), ("f8e5m2", None)],
)
def test_elements_of_8_bits(form, kind, dtype, scales):
    scale = 0.001 if scales else None
    for query in ("bf16", "f16"):
        check(kind, dtype=dtype, query=query, scales=scales, scale=scale, form=FORMS[form])


@pytest.mark.parametrize("form", ["ragged", "padded"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_sinks_softcap_and_slopes(form, kind):
    check(kind, sinks=True, softcap=30.0, mask=window(9), form=FORMS[form])
    check(kind, [([900, 0, 30], [1, 1, 1]), ([900, 0, 30], [70, 5, 129])], slopes=True, softcap=2.0, mask=window(70))


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("keys", [[90, 10, 3], [0, 0, 0]], ids=str)
def test_cross_attention_and_rows_without_keys(kind, keys):
    for mask in (NULL, named("causal")):
        check(kind, [([50, 0, 12], [90, 70, 3])], mask=mask, keys=keys)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_maxima_move_where_later_scores_are_larger(kind, head_size, dtype):
    """Scores of many powers of two above one another: weights of f16 would be infinite with the first maximum."""
    check(kind, [([900, 40, 333], [70, 129, 9])], dtype=dtype, head_size=head_size, scale=16 / head_size**0.5)


@needs_tiles
@pytest.mark.parametrize("page_size", [1, 5, 7, 16, 48])
@pytest.mark.parametrize("head_size", [8, 24, 72, 80, 120, 128, 200, 256])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [("bf16", None), ("f16", None), ("f8e4m3", None), ("f8e5m2", None), ("i8", ("f32", 256)), ("f8e4m3", ("f32", 8)),
     ("i8", ("f16", 16))],
    ids=str,
)  # fmt: skip
def test_tiles_of_every_head_size_page_size_and_element(dtype, scales, head_size, page_size):
    scale = 0.0005 if dtype == "i8" else None
    Case(cached=[700, 0, 333, 40], new=[150, 90, 3, 0], dtype=dtype, scales=scales, head_size=head_size, heads=2,
         group=3, page_size=page_size, scale=scale, schedule={"kind": "tile"}).check(GPU)  # fmt: skip


@needs_tiles
@pytest.mark.parametrize(
    "mask", [named("causal"), window(5000), named("chunked_causal", 8192)], ids=lambda mask: mask.name
)
@pytest.mark.parametrize("head_size", [64, 128, 192])
def test_split_keys_are_combined(mask, head_size):
    """Keys of several splits, of one, of none."""
    for schedule in ({"splits": 1}, {}, {"splits": 3}, {"splits": 32, "rows": 64}):
        Case(cached=[9000, 0, 20, 2500], new=[33, 5, 0, 64], head_size=head_size, heads=2, sinks=True, mask=mask,
             schedule={"kind": "tile", **schedule}).check(GPU)  # fmt: skip


def test_a_large_mixed_batch():
    rng = np.random.default_rng(19)
    new = np.concatenate([np.ones(230, int), rng.integers(2, 60, 40)])
    Case(cached=rng.integers(0, 90, 270).tolist(), new=new.tolist(), page_size=256).check(GPU)


# --- decode ------------------------------------------------------------------------------------------

STEP = [3000, 17, 700, 0, 4095, 255, 1024, 80], [1, 2, 1, 1, 0, 1, 2, 1]


def decode(**case: Any) -> None:
    Case(cached=STEP[0], new=STEP[1], schedule={"kind": "decode"}, **case).check(GPU)


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "scales", "granularity"),
    [("i8", "f32", 256), ("i8", "f16", 32), ("f8e4m3", "bf16", 64), ("f8e4m3", "f32", 256), ("f8e5m2", "f8e8m0", 32),
     ("i8", "f32", 4), ("f8e4m3", "bf16", 8), ("f8e4m3", "f32", 48)],
)  # fmt: skip
def test_scales_of_token_heads_and_granules_of_any_width_count(dtype, scales, granularity, head_size):
    scale = 0.0005 if dtype == "i8" else 0.1
    decode(dtype=dtype, scales=(scales, min(granularity, head_size)), head_size=head_size, heads=2, scale=scale)


@pytest.mark.parametrize("head_size", [8, 16, 24, 72, 112, 120, 136, 200, 256, 512])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize(("page_size", "group"), [(16, 4), (5, 12), (1, 1)])
def test_head_sizes_that_are_no_whole_steps_are_computed(dtype, head_size, page_size, group):
    decode(dtype=dtype, head_size=head_size, page_size=page_size, group=group, heads=2)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(
    ("group", "new"), [(16, [8, 1, 0, 3]), (9, [3, 5, 1, 2]), (5, [7, 8, 6, 1]), (4, [8, 8, 8, 8])]
)
def test_many_rows_of_a_head_are_shared_among_warps(group, new, head_size):
    Case(cached=[2000, 40, 9, 513], new=new, dtype="f16", group=group, head_size=head_size,
         schedule={"kind": "decode"}).check(GPU)  # fmt: skip


@pytest.mark.parametrize("dtype", ["f16", "f8e4m3"])
@pytest.mark.parametrize("split", [128, 512])
def test_a_batch_invariant_sequence_is_the_same_bits_in_any_batch(dtype, split):
    case = Case(cached=STEP[0], new=[1, 2, 1, 1, 1, 1, 2, 1], dtype=dtype, query="f16", head_size=128, heads=2, group=2)
    batch_invariance(GPU, case, split)


@needs_tiles
def test_a_batch_invariant_sequence_of_tiles_is_the_same_bits_in_any_batch():
    """Beside sequences of one new token and of many: the line between them moves no bit."""
    case = Case(cached=[9000, 0, 2500], new=[1, 70, 5], head_size=128, heads=2, schedule={"batch_invariant": True})
    out, lse = case.run(GPU)
    for b, (first, last) in enumerate(zip(case.offsets[:-1], case.offsets[1:], strict=True)):
        one, rows = case.problem.only(b), slice(int(first), int(last))
        source = GPU.collection(one.collection), LAYER
        alone = case.launch(GPU, kv.ops.attention, source, case.query_rows[rows], one.row_offsets)
        assert_same_bits(alone, (out[rows], lse[rows]))


def test_an_early_decode_sees_the_token_that_was_just_appended():
    early_after_append(GPU, STEP[0], 128, steps=50)


# --- others ------------------------------------------------------------------------------------------


def test_a_captured_graph_replays_with_other_lengths():
    case = Case(cached=[100, 40], new=[1, 1], head_size=128, heads=2)
    query, offsets, (c, _) = GPU.put(case.query_rows), GPU.put(case.offsets), case.source(GPU)
    out = torch.empty_like(query)
    kv.ops.attention(c, 1, query, offsets, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv.ops.attention(c, 1, query, offsets, out=out)
    lengths = np.array([60, 17], np.uint32)
    c.cache_lengths.copy_(GPU.put(lengths))
    graph.replay()
    torch.cuda.synchronize()
    host: Any = case.problem.collection
    shorter = kv.PagedKVCacheCollection(host.blocks, lengths, host.lookup_table, 1, host.max_cache_length)
    want, _ = reference.attention(shorter, 1, case.query_rows, case.offsets)
    np.testing.assert_allclose(GPU.get(out).astype(np.float64), want, rtol=2e-2, atol=2e-2)


@needs_tiles
@pytest.mark.parametrize("keys", [4096, 16384])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_sums_of_8_bit_products_over_many_keys_lose_nothing_of_values_that_are_alike(keys, head_size):
    def ones(case: Case) -> None:
        case.problem.collection.blocks[:, 1] = 1

    out, _ = Case(cached=[keys - 100], new=[100], dtype="f8e4m3", query="f8e4m3", heads=2, head_size=head_size,
                  page_size=64, change=ones, schedule={"splits": 1}).run(GPU)  # fmt: skip
    np.testing.assert_allclose(out.astype(np.float64), 1, rtol=0, atol=8e-3)
