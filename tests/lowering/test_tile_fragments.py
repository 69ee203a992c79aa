# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products whose operand A is a tile of a cache with 8-bit elements: kept as they are stored, converted in registers.

Rows are the keys of a head, columns a few query rows, on GPUs by the emulator. Slots of no cached token are poison.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from reference.random_caches import random_problem, random_values

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.emulator import Report, run as emulated

LAYER, STARTS = 1, 2.0  # what sums start with


@dataclass(frozen=True)
class Case:
    """Keys [``begin``, ``length``) of a head times ``queries`` rows, ``rows`` keys a tile."""

    target: str = "sm_90a"
    element: str = "f8e4m3"
    dtype: str = "bf16"
    rows: int = 64
    columns: int = 128
    queries: int = 16
    length: int = 70
    begin: int = 3
    page_size: int = 16
    kind: str = "paged"
    granularity: int | None = None
    head_size: int | None = None
    first_column: int = 0
    adds: bool = False
    threads: int = 128

    @property
    def size(self) -> int:
        return self.head_size or self.columns


def kernel(c: Case) -> Any:
    dtype, rows = dtypes.of(c.dtype), c.rows
    of_tile = {"rows": rows, "columns": c.columns, "first_column": c.first_column, "dtype": dtype}

    @kv.kernel(block=2 * rows)
    def scores(query: kv.Buffer[dtype, 2], keys: kv.KVCache, b: kv.i32, begin: kv.i32, out: kv.Buffer[kv.f32, 3]):
        h, count = kv.block_id.x, keys.cache_length(b)
        q = query.load_rows(kv.tile_index(c.queries), columns=c.columns)
        for j in range(0, (count + (rows - 1)) // rows):
            k = keys.tile(b, h, j * rows, count, begin=begin, **of_tile)
            x = kv.dot(k, q.T, kv.full((rows, c.queries), STARTS)) if c.adds else kv.dot(k, q.T)
            at = j * rows + kv.tile_index(rows)
            out.store_rows(h, at, value=x, mask=at < count)

    return scores


def run(c: Case, stored: bool = True) -> tuple[np.ndarray, np.ndarray, Report]:
    """(scores, those of the model in float64, what the emulator saw)."""
    rng, dtype = np.random.default_rng(c.length), dtypes.of(c.dtype)
    scales = {} if c.granularity is None else {"scale_dtype": "f32", "granularity": c.granularity}
    sizes = {"head_size": c.size, "page_size": c.page_size, "cached": [5, c.length], "new": [0, 0]}
    cache = random_problem(rng, c.kind, c.element, **sizes, **scales).caches(LAYER)[0]
    query = random_values(rng, (c.queries, c.columns), dtype)
    heads, report = cache.spec.num_heads, Report(c.target)
    out = np.full((heads, c.length, c.queries), np.nan, np.float32)
    specs = kv.Buffer[dtype, 2], cache, kv.i32, kv.i32, kv.Buffer[kv.f32, 3]
    options = {} if stored else {"assign-kv-layouts": "stored=false"}
    made = kv.compile(kernel(c), *specs, target=c.target, options=options)
    emulated.launch(made, heads, 2 * c.rows, (query, cache, 1, c.begin, out), report=report)
    h, t, d = np.ogrid[:heads, c.begin : c.length, c.first_column : c.first_column + c.columns]
    keys = np.zeros((heads, c.length, c.columns))
    keys[:, c.begin :] = np.where(d < c.size, cache.load(1, h, t, np.minimum(d, c.size - 1), dtype=kv.f32), 0.0)
    want = np.einsum("htd,nd->htn", keys, query.astype(np.float64))
    return out, want + STARTS * c.adds, report


def check(c: Case, stored: bool = True) -> tuple[np.ndarray, Report]:
    found, want, report = run(c, stored)
    np.testing.assert_allclose(found, want, rtol=1e-2, atol=1e-2 * np.abs(want).max())
    report.check()
    return found, report


def stores_of(report: Report) -> int:
    """Stores to shared memory."""
    return sum(n for name, n in report.by_opcode.items() if name.startswith("st.shared"))


WIDE, TWO = Case(), Case(rows=128, length=131)
EDGES = {
    "tokens before the first": Case(begin=66),
    "one token": Case(length=1, begin=0),
    "two panels of columns": Case(columns=144, queries=8),
    "as many columns as registers hold": Case(columns=256),
    "128 query rows": Case(queries=128, length=65),
    "two warpgroups": TWO,
    "pages of 5": Case(page_size=5),
    "sums that start somewhere": Case(adds=True),
    "columns of a wider head": Case(head_size=256, first_column=128),
    "a scale a token": Case(element="i8", granularity=128, adds=True),
    "a scale a token of two": Case(granularity=128, head_size=256, first_column=128, begin=0),
    "a continuous cache": Case(kind="continuous"),
    "on older GPUs": Case(target="sm_80"),
    "narrow heads on older GPUs": Case(target="sm_80", columns=48, page_size=5, begin=0, length=64),
    "a step of columns": Case(target="sm_80", columns=16, head_size=16),
    "two warpgroups on older GPUs": replace(TWO, target="sm_80", queries=32),
    "a scale a token on older GPUs": Case(target="sm_80", element="i8", granularity=128, dtype="f16"),
}


@pytest.mark.parametrize("case", EDGES.values(), ids=list(EDGES))
def test_products_of_stored_elements_are_those_of_a_model(case):
    check(case)


@pytest.mark.parametrize(
    ("target", "element", "dtype"),
    list(itertools.product(("sm_80", "sm_90a"), ("f8e4m3", "f8e5m2", "i8"), ("bf16", "f16"))),
    ids="-".join,
)
def test_converting_in_registers_gives_the_same_bits_with_fewer_stores(target, element, dtype):
    case = Case(target, element, dtype, length=64, begin=0)
    (found, report), (other, before) = check(case), check(case, stored=False)
    np.testing.assert_array_equal(found, other)
    converted = not (target == "sm_80" and (element, dtype) == ("f8e4m3", "f16"))  # has no instruction for it
    stores, others = stores_of(report), stores_of(before)
    assert stores < others if converted else stores == others


KEPT = {
    "several scales a token": Case(granularity=32),
    "a scale a part of the columns": Case(granularity=96, head_size=192),
    "more columns than registers hold": Case(columns=272, queries=8),
    "rows of no whole copies": Case(target="sm_80", columns=80, head_size=72),
    "narrow rows beside wgmma": Case(columns=64),
}


@pytest.mark.parametrize("case", KEPT.values(), ids=list(KEPT))
def test_what_registers_do_not_take_is_converted_in_shared_memory(case):
    found, report = check(case)
    other, before = check(case, stored=False)
    np.testing.assert_array_equal(found, other)
    assert report.instructions == before.instructions


@pytest.mark.parametrize("queries", [8, 16, 64, 128, 136])
@pytest.mark.parametrize("rows", [64, 128])
def test_all_warps_load_the_rows_of_the_second_operand(rows, queries):
    check(Case(element="bf16", rows=rows, columns=64, queries=queries, length=rows, begin=0))


# --- attention of few rows ---------------------------------------------------------------------------


def attention_kernel(rows: int, keys_of_tile: int, size: int, dtype: Any, threads: int) -> Any:
    of_tile = {"rows": keys_of_tile, "dtype": dtype}

    @kv.kernel(block=threads)
    def attention(query: kv.Buffer[dtype, 2], keys: kv.KVCache, values: kv.KVCache, out: kv.Buffer[kv.f32, 3]):
        h, row, count = kv.block_id.x, kv.tile_index(rows), keys.cache_length(1)
        q = query.load_rows(row, columns=size)
        m, s, o = kv.full(rows, -3.0e38), kv.full(rows, 0.0), kv.full((rows, size), 0.0)
        for j in range(0, (count + (keys_of_tile - 1)) // keys_of_tile):
            k = keys.tile(1, h, j * keys_of_tile, count, **of_tile)
            v = values.tile(1, h, j * keys_of_tile, count, **of_tile)
            exists = j * keys_of_tile + kv.tile_index(keys_of_tile) < count
            x = kv.masked(kv.dot(q, k.T) * 0.05, exists[None, :])
            top = kv.math.max(m, x.max(axis=1))
            alpha, p = kv.math.exp2(m - top), kv.math.exp2(x - top[:, None])
            m, s = top, s * alpha + p.sum(axis=1)
            o = kv.dot(dtype(p), v, o * alpha[:, None])
        out.store_rows(h, row, value=o / s[:, None])

    return attention


def attend(c: Case, stored: bool = True) -> tuple[np.ndarray, Report]:
    """The output of ``queries`` rows over all tokens, which is that of the model, and what the emulator saw."""
    rng, dtype = np.random.default_rng(c.length), dtypes.of(c.dtype)
    scales = {} if c.granularity is None else {"scale_dtype": "f32", "granularity": c.granularity}
    sizes = {"head_size": c.size, "page_size": c.page_size, "cached": [5, c.length], "new": [0, 0]}
    caches = random_problem(rng, c.kind, c.element, **sizes, **scales).caches(LAYER)
    query = random_values(rng, (c.queries, c.size), dtype)
    heads, report = caches[0].spec.num_heads, Report(c.target)
    out = np.full((heads, c.queries, c.size), np.nan, np.float32)
    options = {} if stored else {"assign-kv-layouts": "stored=false"}
    kernel = attention_kernel(c.queries, c.rows, c.size, dtype, c.threads)
    made = kv.compile(kernel, kv.Buffer[dtype, 2], *caches, kv.Buffer[kv.f32, 3], target=c.target, options=options)
    emulated.launch(made, heads, c.threads, (query, *caches, out), report=report)
    h, t, d = np.ogrid[:heads, : c.length, : c.size]
    keys, values = (cache.load(1, h, t, d, dtype=kv.f32).astype(np.float64) for cache in caches)
    x = np.einsum("nd,htd->hnt", query.astype(np.float64), keys) * 0.05
    p = np.exp2(x - x.max(axis=2, keepdims=True))
    want = np.einsum("hnt,htd->hnd", p / p.sum(axis=2, keepdims=True), values)
    np.testing.assert_allclose(out, want, rtol=2e-2, atol=2e-2 * np.abs(values).max())
    report.check()
    return out, report


SWAPPED = Case(queries=8, length=70)
FEW = {
    "8 rows": SWAPPED,
    "16 rows, 128 keys a tile": replace(SWAPPED, queries=16, rows=128, length=130),
    "two warpgroups": replace(SWAPPED, queries=24, rows=128, threads=256),
    "two panels of columns": replace(SWAPPED, columns=256, length=20),
    "pages of 5": replace(SWAPPED, page_size=5),
    "a scale a token": replace(SWAPPED, element="i8", granularity=128),
    "f16": replace(SWAPPED, element="f8e5m2", dtype="f16"),
    "e4m3 as f16": replace(SWAPPED, dtype="f16"),
    "older GPUs": replace(SWAPPED, target="sm_80", columns=64),
    "older GPUs, 128 keys a tile": replace(SWAPPED, target="sm_80", columns=64, queries=16, rows=128),
    "older GPUs, a scale a token": replace(SWAPPED, target="sm_80", element="i8", granularity=128, queries=16),
    "older GPUs, f16": replace(SWAPPED, target="sm_80", element="i8", dtype="f16", columns=64),
}


@pytest.mark.parametrize("case", FEW.values(), ids=list(FEW))
def test_few_rows_attend_to_keys_and_values_that_are_converted_in_registers(case):
    _, report = attend(case)
    _, before = attend(case, stored=False)
    assert stores_of(report) < stores_of(before)
