# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over caches, every kernel of it against the float64 model: the rows of ``reference.attention_rows``.

Beside them, what is no row: the same bits of other forms and orders, views, and what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reference import attention as reference, emulated
from reference.attention_rows import TABLES
from reference.case import (
    LAYER,
    Case,
    OfOperands,
    Padded,
    Row,
    WithPrior,
    assert_same_bits,
    by_name,
    named,
    on,
    rows,
    sentinel,
)
from reference.operands import cache_parts, dense_parts, ragged_parts
from reference.places import Interpreted, Unchecked

import kvarn as kv
from kvarn.emulator import grid as ptx
from kvarn.ops import reads

pytestmark = pytest.mark.whole


@rows(TABLES["calls"])
def test_every_kernel_is_asked_the_same(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["caches"])
def test_every_kernel_reads_caches_of_any_kind_and_size(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["narrow"])
def test_elements_of_8_bits_are_converted_and_scaled(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["as stored"])
def test_8_bit_keys_are_multiplied_as_they_are_stored(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["8-bit queries"])
def test_8_bit_queries_are_multiplied_as_they_are(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["splits"])
def test_splits_of_keys_are_one_softmax(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["prior"])
def test_every_kernel_combines_a_prior_result(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["operands"])
def test_keys_and_values_may_be_operands(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["pages"])
def test_a_head_sees_the_pages_that_it_lists(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["decode"])
def test_a_decode_is_the_models(row: Row, kernel: str):
    row.check(kernel)


@rows(TABLES["foreign"])
def test_pools_of_other_libraries_are_read_in_place(row: Row, kernel: str):
    row.check(kernel)


# --- the same bits -----------------------------------------------------------------------------------

OPERANDS = {"caches": OfOperands(cache_parts), "dense": OfOperands(dense_parts), "ragged": OfOperands(ragged_parts)}


@by_name(["host", "simt", "mma", "decode"], thorough=["host", "simt"])  # rows of these are rows of the batch
def test_a_padded_batch_has_the_bits_of_a_ragged_one(name):
    place, case = on(name, [33, 60, 5], [2, 3, 1], dtype="f16")
    assert_same_bits(replace(case, form=Padded()).run(place), case.run(place))


HELD: dict[str, dict[str, Any]] = {
    "chunks of 24": {"mask": named("chunked", 24)},
    "i8 with scales": {"dtype": "i8", "query": "f16", "scales": ("f32", 32)},
}


@by_name(
    [f"{of}: {kernel}" for kernel in ("host", "simt", "mma") for of in HELD],
    thorough=["i8 with scales: host", "chunks of 24: mma", *(f"{of}: simt" for of in HELD)],
)
def test_equal_keys_give_equal_bits_whatever_holds_them(name):
    elements, _, kernel = name.partition(": ")
    place, case = on(kernel, [20, 0, 9], [12, 17, 2], head_size=32, page_size=8, **HELD[elements])
    want = case.run(place)
    for form in OPERANDS.values():
        assert_same_bits(replace(case, form=form).run(place), want)


def test_padded_batches_and_operands_take_a_prior_result():
    class Beside(Padded):
        """A padded batch beside a prior result."""

        def run(self, case: Case, place: Any) -> Any:
            prior = [reference.padded(x, case.offsets, 3, 0) for x in WithPrior().prior(case)]
            counts = case.problem.new.astype(np.uint32)
            query = reference.padded(case.query_rows, case.offsets, 3, 0)
            found = case.launch(place, kv.ops.attention_padded, case.source(place), query, counts, prior=tuple(prior))
            return tuple(x[:, :2].reshape(-1, *x.shape[2:]) for x in found)

    class OfCaches(OfOperands):
        """Operands beside a prior result."""

        def run(self, case: Case, place: Any) -> Any:
            keys, prior = case.operands(place, self.parts), WithPrior().prior(case)
            return case.launch(place, kv.ops.attention, keys, case.query_rows, case.offsets, prior=prior)

    place, case = on("host", [40, 0, 7], [2, 2, 2], dtype="f32", form=WithPrior())
    for form in (Beside(), OfCaches(cache_parts)):
        assert_same_bits(replace(case, form=form).run(place), case.run(place))


@pytest.mark.parametrize("kernel", ["host", "simt", "mma", "decode"])
def test_valid_lengths_past_the_padding_are_those_of_the_padding(kernel):
    place, case = on(kernel, [12, 30], [3, 3], dtype="f16")
    query = case.query_rows.reshape(2, 3, *case.query_rows.shape[1:])
    with place.unchecked() if kernel != "host" else Unchecked().active():
        whole, more = (
            case.launch(place, kv.ops.attention_padded, case.source(place), query, np.array([3, n], np.uint32))
            for n in (3, 1000)
        )
        assert_same_bits(more, whole)
        empty = case.launch(
            place, kv.ops.attention_padded, case.source(place), query[:, :0], np.array([1, 0], np.uint32)
        )
    assert empty[0].size == 0


@by_name(["mma", "tile", "decode"], thorough=["mma", "tile"])  # test_attention_tiles.py has the orders of tiles
def test_nothing_depends_on_the_order_of_warps_and_copies(name):
    cached, new = {"mma": ([70], [40]), "tile": ([200], [40]), "decode": ([70], [2])}[name]
    place, case = on(name, cached, new, dtype="f16")
    first, *others = (case.run(Interpreted(place.name, order=order)) for order in ptx.ORDERS[::2] + ptx.ORDERS[3:4])
    for other in others:
        assert_same_bits(other, first)


# --- views -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["host", "simt", "mma"])
def test_queries_and_outputs_may_be_views_with_strides(kernel):
    """Of ragged and of padded batches: what is beside a view is not written."""
    place, case = on(kernel, [20, 3], [4, 2], dtype="f16", head_size=32)
    case = replace(case, logarithms=False)
    want, _ = case.want()
    wide = np.full((8, 6, 48), np.nan, np.float16)
    wide[1:7, 1:5, 8:40] = case.query_rows
    out = np.full((6, 6, 48), 72, np.float16)
    schedule = case.scheduled()
    with place.active():
        c = place.collection(case.problem.collection)
        kv.ops.attention(c, 1, wide[1:7, 1:5, 8:40], case.offsets.astype(np.int32), out=out[:, 1:5, 8:40],
                         schedule=schedule)  # fmt: skip
    np.testing.assert_allclose(out[:, 1:5, 8:40].astype(np.float64), want, rtol=4e-3, atol=4e-3)
    out[:, 1:5, 8:40] = 72
    assert (out == 72).all()
    padded = np.full((2, 7, 6, 48), np.nan, np.float16)
    padded[:, 1:6, 1:5, 8:40] = reference.padded(case.query_rows, case.offsets, 5, np.nan)
    out = np.full((2, 6, 5, 40), 72, np.float16)
    with place.active():
        kv.ops.attention_padded(c, 1, padded[:, 1:6, 1:5, 8:40], case.problem.new.astype(np.uint32),
                                out=out[:, :5, :4, :32], schedule=schedule)  # fmt: skip
    exists = reference.padded(np.ones(6, bool), case.offsets, 5, False)
    np.testing.assert_allclose(out[:, :5, :4, :32][exists].astype(np.float64), want, rtol=4e-3, atol=4e-3)
    out[:, :5, :4, :32][exists] = 72
    assert (out == 72).all()


def test_an_output_is_allocated_like_the_query():
    _, case = on("host", [3, 4], [2, 2], dtype="f32")
    c, query = case.problem.collection, case.query_rows
    ragged = kv.ops.attention(c, 1, query, case.offsets, return_lse=True)
    padded = kv.ops.attention_padded(
        c, 1, query.reshape(2, 2, *query.shape[1:]), np.full(2, 2, np.uint32), return_lse=True
    )
    for found, same, want in zip(ragged, padded, case.want(), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(same.reshape(found.shape), found)
    out, lse = (sentinel(x) for x in ragged)
    given = kv.ops.attention(c, 1, query, case.offsets, out=out, lse=lse, return_lse=True)
    assert given[0] is out
    assert given[1] is lse
    assert not kv.ops.attention(c, 1, query[:0], np.zeros(3, np.uint32)).size


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("tile", {"dtype": "bf16"}), ("tile", {"dtype": "f8e4m3", "schedule": {"splits": 2}}),
        ("mma", {"dtype": "f16", "head_size": 40}), ("mma", {"dtype": "bf16", "schedule": {"splits": 2}}),
    ],
    ids=str,
)  # fmt: skip
def test_rows_may_be_aligned_to_their_elements_only(kernel, options):
    """Query, output and a prior result are slices; the kernels of one row at a time find the same."""
    found = []
    for kind in (kernel, "simt"):
        place, case = on(
            kind, [150, 0], [9, 3], **{**options, "schedule": options.get("schedule", {}) if kind == kernel else {}}
        )
        rng, shape = np.random.default_rng(3), case.query_rows.shape
        wide = [
            np.full((*shape[:-1], shape[-1] + 3), 72, dtype) for dtype in (*[case.query_rows.dtype] * 2, np.float32)
        ]
        query, out, prior = (x[..., 3:] for x in wide)
        query[...], prior[...] = case.query_rows, rng.standard_normal(shape)
        before = rng.standard_normal(shape[:-1]).astype(np.float32)
        with place.active():
            kv.ops.attention(
                case.problem.collection, LAYER, query, case.offsets, out=out, prior=(prior, before),
                schedule=case.scheduled(),
            )  # fmt: skip
        assert (wide[1][..., :3] == 72).all()
        found.append(out.astype(np.float64))
    np.testing.assert_allclose(*found, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", ["simt", "mma", "decode"])
def test_scales_may_be_aligned_to_those_of_one_head(kernel):
    place, case = on(
        kernel, [20, 7], [1, 2], dtype="i8", query="f16", scales=("f32", 32), heads=2, group=2, scale=0.0005
    )
    c: Any = case.problem.collection
    page = c.scales[0].size + 2  # two scales of a head: pages and base are multiples of 8 bytes, and not of 16
    raw = np.zeros(len(c.scales) * page + 8, np.float32)
    first = -raw.ctypes.data // 4 % 4 + 2
    scales = np.lib.stride_tricks.as_strided(raw[first:], c.scales.shape, (4 * page, *c.scales.strides[1:]))
    scales[...] = c.scales
    moved = kv.PagedKVCacheCollection(
        c.blocks, c.cache_lengths, c.lookup_table, c.max_seq_length, c.max_cache_length, scales, 32
    )
    found = case.launch(place, kv.ops.attention, (moved, 1), case.query_rows, case.offsets)
    assert_same_bits(found, case.run(place))


# --- what is refused ---------------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


REFUSED = [
    (r"layer must be in \[0, 2\), got 2", {"layer": 2}),
    (r"query must have shape \[T, Hq, 16\], got \[3, 2, 8\]", {"query": zeros(3, 2, 8)}),
    (r"query must have dtype f32, got f16", {"query": zeros(3, 2, 16, dtype=np.float16)}),
    (r"multiple of the 2 KV heads", {"query": zeros(3, 3, 16)}),
    (r"row_offsets must have shape \[3\], got \[2\]", {"row_offsets": zeros(2, dtype=np.uint32)}),
    (r"out must have shape \[3, 2, 16\]", {"out": zeros(2, 2, 16)}),
    (r"out must have dtype f32", {"out": zeros(3, 2, 16, dtype=np.float16)}),
    (r"sinks must have shape \[2\]", {"sinks": zeros(3)}),
    (r"sinks must have dtype f32", {"sinks": zeros(2, dtype=np.float16)}),
    (r"alibi_slopes must have shape \[2\]", {"alibi_slopes": zeros(2, 1)}),
    (r"alibi_slopes must have dtype f32", {"alibi_slopes": zeros(2, dtype=np.int32)}),
    (r"mask must be one of causal, null", {"mask": "prefix"}),
    (r"window must be given for mask sliding_window", {"mask": "sliding_window"}),
    (r"window must be None for mask null", {"mask": "null", "window": 3}),
    (r"window must be in \[1, ", {"window": 0}),
    (r"softcap must be positive", {"softcap": 0.0}),
    (r"scale must be finite", {"scale": float("nan")}),
    (r"kind must be one of host, simt, tile, decode", {"schedule": {"kind": "magic"}}),
    (r"kind must be host on host", {"schedule": {"kind": "tile", "keys": -3}}),
    (r"prior must be a tuple of an output and its log-sum-exp, got ndarray", {"prior": zeros(3, 2, 16)}),
    (r"prior must have shape \[3, 2, 16\], got \[3, 2, 8\]", {"prior": (zeros(3, 2, 8), zeros(3, 2))}),
    (r"prior must have dtype f32, got f16", {"prior": (zeros(3, 2, 16, dtype=np.float16), zeros(3, 2))}),
    (r"prior_lse must have shape", {"prior": (zeros(3, 2, 16), zeros(1, 2))}),
    (r"must be an output and its log-sum-exp, got None for one of them", {"prior": (zeros(3, 2, 16), None)}),
    (r"pages must have shape \[2, 2, K\], got \[3, 2, 3\]", {"pages": zeros(3, 2, 3, dtype=np.int32)}),
    (r"pages must be int32 or uint32, got f32", {"pages": zeros(2, 2, 3)}),
    (r"pages must have at least one entry a list", {"pages": zeros(2, 2, 0, dtype=np.int32)}),
    (r"page_counts must be None without pages", {"page_counts": zeros(2, 2, dtype=np.int32)}),
    (r"counts must have shape", {"pages": zeros(2, 2, 3, dtype=np.int32), "page_counts": zeros(2, dtype=np.int32)}),
]  # fmt: skip
PADDED_REFUSED = [
    (r"layer must be in \[0, 2\), got 2", {"layer": 2}),
    (r"query must have shape \[2, S, Hq, 16\], got \[10, 2, 16\]", {"query": zeros(10, 2, 16)}),
    (r"query must have shape \[2, S, Hq, 16\], got \[3, 5, 2, 16\]", {"query": zeros(3, 5, 2, 16)}),
    (r"query must have dtype f32, got f16", {"query": zeros(2, 5, 2, 16, dtype=np.float16)}),
    (r"query must have a multiple of the 2 KV heads in dimension 2, got 3", {"query": zeros(2, 5, 3, 16)}),
    (r"valid_lengths must have shape \[2\], got \[3\]", {"valid_lengths": zeros(3, dtype=np.uint32)}),
    (r"out must have shape \[2, 5, 2, 16\], got \[2, 4, 2, 16\]", {"out": zeros(2, 4, 2, 16)}),
    (r"out must have dtype f32, got f16", {"out": zeros(2, 5, 2, 16, dtype=np.float16)}),
    (r"sinks must have shape \[2\], got \[3\]", {"sinks": zeros(3)}),
    (r"lse must have shape \[2, 5, 2\], got \[10, 2\]", {"lse": zeros(10, 2)}),
    (r"kv_offsets must have shape \[3\], got \[2\]", {"kv_offsets": zeros(2, dtype=np.uint32)}),
    (r"window must be given for mask sliding_window", {"mask": "sliding_window"}),
    (r"softcap must be positive", {"softcap": -1.0}),
]  # fmt: skip


def test_what_does_not_fit_is_refused_by_name():
    _, case = on("host", [3, 4], [1, 2], dtype="f32", heads=2, group=1, head_size=16)
    call = {"collection": case.problem.collection, "layer": 0}
    ragged = {**call, "query": case.query_rows, "row_offsets": case.offsets}
    padded = {**call, "query": zeros(2, 5, 2, 16), "valid_lengths": zeros(2, dtype=np.uint32)}
    tables: Any = ((kv.ops.attention, ragged, REFUSED), (kv.ops.attention_padded, padded, PADDED_REFUSED))
    for operation, arguments, table in tables:
        for message, changes in table:
            with pytest.raises((ValueError, TypeError, IndexError), match=message):
                operation(**{**arguments, **changes})
    given = zeros(3, 2, 16)
    with pytest.raises(ValueError, match="out"):
        kv.ops.attention(**ragged, prior=(given, zeros(3, 2)), out=given)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"dtype": "i8", "query": "f32"}, "float elements, or scales"),
        ({"kind": "continuous", "pages": True}, "pages needs a collection with pages, got a continuous one"),
        ({"dtype": "i8", "query": "f8e4m3", "scales": ("f32", 32)}, "query must have dtype"),
        ({"dtype": "f8e4m3", "query": "f8e4m3", "scales": ("f32", 8)}, "query must have dtype"),
        ({"dtype": "f8e5m2", "query": "f8e4m3"}, "query must have dtype"),
        ({"dtype": "bf16", "query": "f8e4m3"}, "query must have dtype"),
    ],
    ids=str,
)
def test_caches_that_a_call_does_not_read_are_refused(case, message):
    lists = {"pages": zeros(1, 1, 3, dtype=np.int32)} if case.pop("pages", False) else {}
    _, case = on("host", [9], [1], **case)
    with pytest.raises((ValueError, TypeError), match=message):
        kv.ops.attention(case.problem.collection, 1, case.query_rows, case.offsets, **lists)


def test_a_padded_batch_needs_values():
    _, case = on("host", [3], [1], value_size=16)
    with pytest.raises(ValueError, match=r"kv\.ops\.attention_padded: needs a collection with values, got an MLA one"):
        kv.ops.attention_padded(case.problem.collection, 0, case.query_rows[None], np.ones(1, np.uint32))


@pytest.mark.parametrize(
    ("form", "schedule", "message"),
    [
        (None, {"kind": "tile", "instruction": "wgmma"}, "kind tile needs a query of bf16 or f16 and an output"),
        (None, {"kind": "host"}, "kind must be simt, tile or decode on sm_90a, got 'host'"),
        ("dense", {"kind": "decode", "max_queries": 1}, "kind must be simt or tile on sm_90a, got 'decode'"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(form, schedule, message):
    place, case = on("auto", [3], [1], dtype="f32")
    source = case.source(place)
    if form is not None:
        source = [of(*given) for of, given in OPERANDS[form].parts(case.problem, source[1])]
    with pytest.raises(ValueError, match=message):
        case.launch(place, kv.ops.attention, source, case.query_rows, case.offsets, schedule=schedule)


def test_a_decode_is_told_how_many_new_tokens_there_are():
    """``kv.ops.attention`` takes the number from the collection."""
    _, case = on("decode", [3], [1], dtype="f32")
    query, attributes = case.query_rows, (("mask", "causal"), ("span", 0), ("softcap", 0.0))
    operands = case.problem.collection, LAYER, query, case.offsets, 0.1, np.zeros_like(query)
    with pytest.raises(ValueError, match="kind decode needs max_queries"):
        emulated.run(reads._ATTENTION, operands, attributes, {"kind": "decode"})
