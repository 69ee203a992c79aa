# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every kernel of attention over every length at an edge of what it takes at a time, under every kind of mask.

A row of a table is a kernel with the extents of its schedule. Each of its launches has a batch of sequences at all
edges (``reference.edges``), on the host or as a GPU's code in the interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reference import attention as reference, edges
from reference.case import (
    CAUSAL,
    NULL,
    ByBlocks,
    Case,
    Mask,
    OfChosenPages,
    OfOperands,
    OfTwoSources,
    Padded,
    WithPrior,
    by_name,
    failures,
    named,
    sentinel,
)
from reference.edges import ALL, Kernel, masks
from reference.mla_prefill import buffer_of, chunks_of, dense, prefill
from reference.operands import dense_parts, ragged_parts
from reference.places import Interpreted, Place
from reference.random_caches import random_query
from reference.shared_prefixes import groups_of, shared_problem

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.dialect.layout import CacheSpec
from kvarn.lowering import target
from kvarn.lowering.kernels.attention import expansion as attention
from kvarn.lowering.kernels.attention.case import Case as OfKernel
from kvarn.lowering.kernels.attention.kernel import HOST_KEYS, HOST_ROWS
from kvarn.lowering.kernels.attention.rows import KEYS as ROW_KEYS, WARPS
from kvarn.lowering.kernels.common import WARP
from kvarn.lowering.kernels.mla import expansion as mla
from kvarn.lowering.kernels.mla.common import KEYS, WIDE
from kvarn.lowering.schedules.limits import MOST_QUERIES, WARP_ROWS
from kvarn.lowering.schedules.tables import measured

pytestmark = pytest.mark.whole

HOST, HOPPER, AMPERE = Place(), Interpreted("sm_90a"), Interpreted("sm_80")
TILE = {"kind": "tile", "rows": 64, "keys": 16}
DECODE = {"kind": "decode", "max_queries": MOST_QUERIES, "tile": 16}

PLAIN = Case(cached=(), new=(), page_size=8, schedule=TILE)
BY_TMA = Kernel(HOPPER, 16, 64, PLAIN)
BY_CP_ASYNC = BY_TMA.but(page_size=5)
BY_MMA = BY_TMA.but(place=AMPERE)
ON_HOST = Kernel(HOST, HOST_KEYS, HOST_ROWS, replace(PLAIN, schedule={"kind": "host"}, dtype="f32"))
BY_ROW = Kernel(HOPPER, WARP, WARPS, replace(PLAIN, schedule={"kind": "simt"}, dtype="f16", head_size=32))
DECODING = Kernel(HOPPER, 16, WARP_ROWS, replace(PLAIN, schedule=DECODE), most=MOST_QUERIES)

KERNELS = {
    "tiles by TMA": BY_TMA,
    "tiles by mma.sync": BY_MMA,
    "host": ON_HOST,
    "a warp a row": BY_ROW,
    "decode": DECODING,
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_mask_at_every_edge(name):
    kernel = KERNELS[name]
    edges.check(kernel, [CAUSAL])
    others = [mask for mask in masks(kernel.keys) if mask.name != CAUSAL.name]
    every = ALL or name in ("tiles by TMA", "host")  # the other kernels take turns in make check
    edges.check(kernel.but(brief=True), others if every else others[[*KERNELS].index(name) % 2 :: 2])


@pytest.mark.parametrize("name", ["host", "tiles by mma.sync"])
def test_bounds_that_stand_for_none_are_kept(name):
    """Every number of 31 bits is a window or a chunk, and what positions are compared with."""
    tried = edges.far_masks()
    edges.check(KERNELS[name].but(brief=True), tried if name == "host" or ALL else tried[::2])


# --- what a kernel is asked besides, and of other elements --------------------------------------------------


def windows(*spans: int) -> list[Mask]:
    return [named("sliding_window", span) for span in spans]


def functions(extent: int) -> list[Mask]:
    return [mask for mask in masks(extent) if mask.spans]


OF_PAGES: dict[str, Any] = {"page_size": 16, "form": OfChosenPages()}
NARROW_DECODE = DECODING.but(schedule={**DECODE, "tile": 32}, keys=32, dtype="f8e4m3", query="bf16")
SPLIT_KEYS: int = measured("split_keys")
FEW_ROWS_SPLIT = {"kind": "tile", "rows": 64, "keys": 64, "splits": 3, "max_queries": 2}

# Sequences of up to 4 new tokens by a kernel of kind decode, the others by tiles: rows are those of 4 tokens.
DIVIDED = BY_TMA.but(schedule={**TILE, "decode_threshold": 4}, rows=4 * 4)
DIVIDED_PAGES = {"kind": "tile", "rows": 64, "keys": 16, "splits": 1, "decode_threshold": 4}
DIVIDED_SPLITS = {"kind": "tile", "rows": 64, "keys": 64, "splits": 3, "decode_threshold": 4}

# Kernels, and masks of make check; make check-all has every mask that a form takes.
VARIANTS: dict[str, tuple[Kernel, list[Mask]]] = {
    "tiles by cp.async": (BY_CP_ASYNC, [NULL, *windows(17)]),
    "few rows by a decode, others by tiles": (DIVIDED, [CAUSAL, *windows(17)]),
    "few rows by a decode, others by tiles, fp8": (DIVIDED.but(dtype="f8e4m3"), [CAUSAL]),
    "few rows by a decode, others by tiles of splits": (
        DIVIDED.but(schedule=DIVIDED_SPLITS, keys=64, more=(3 * SPLIT_KEYS,)), [NULL],
    ),
    "few rows by a decode, others by mma.sync": (DIVIDED.but(place=AMPERE), [NULL]),
    "few rows by a decode, others by tiles, padded": (DIVIDED.but(form=Padded()), [NULL]),
    "few rows by a decode, others by tiles, keys of others": (DIVIDED.but(own_keys=True), [NULL]),
    "few rows by a decode, others by tiles, two sources": (DIVIDED.but(form=OfTwoSources()), [CAUSAL]),
    "few rows by a decode, others by tiles, block mask": (DIVIDED.but(form=ByBlocks(64, 16)), functions(16)[:1]),
    "few rows by a decode, others by tiles, chosen pages": (DIVIDED.but(**OF_PAGES, schedule=DIVIDED_PAGES), [CAUSAL]),
    "padded, tiles": (BY_TMA.but(form=Padded()), [NULL]),
    "padded, host": (ON_HOST.but(form=Padded()), [NULL, *windows(33)]),
    "padded, decode": (DECODING.but(form=Padded()), windows(17)),
    "padded, a warp a row": (BY_ROW.but(form=Padded()), [NULL]),
    "keys of others, tiles": (BY_TMA.but(own_keys=True), [NULL]),
    "keys of others, host": (ON_HOST.but(own_keys=True), [NULL, *windows(33)]),
    "keys of others, decode": (DECODING.but(own_keys=True), [NULL]),
    "keys of others, a warp a row": (BY_ROW.but(own_keys=True), [NULL]),
    "dense operands, tiles": (BY_TMA.but(form=OfOperands(dense_parts)), [NULL]),
    "ragged operands, tiles": (BY_TMA.but(form=OfOperands(ragged_parts)), windows(17)),
    "ragged operands, tiles by mma.sync": (BY_MMA.but(form=OfOperands(ragged_parts)), [NULL]),
    "dense operands, host": (ON_HOST.but(form=OfOperands(dense_parts)), [NULL, *windows(33)]),
    "ragged operands, a warp a row": (BY_ROW.but(form=OfOperands(ragged_parts)), [NULL]),
    "prior, tiles": (BY_TMA.but(form=WithPrior()), [NULL]),
    "prior, host": (ON_HOST.but(form=WithPrior()), [NULL, *windows(33)]),
    "prior, decode": (DECODING.but(form=WithPrior()), [CAUSAL]),
    "two sources, tiles by mma.sync": (BY_MMA.but(form=OfTwoSources()), [CAUSAL]),
    "two sources, host": (ON_HOST.but(form=OfTwoSources()), [CAUSAL, *windows(33)]),
    "two sources, decode": (DECODING.but(form=OfTwoSources()), windows(17)),
    "block mask, tiles": (BY_TMA.but(form=ByBlocks(64, 16)), functions(16)[:1]),
    "block mask, tiles by mma.sync": (BY_MMA.but(form=ByBlocks(64, 16)), functions(16)[1:]),
    "block mask, host": (ON_HOST.but(form=ByBlocks(HOST_ROWS, HOST_KEYS)), functions(HOST_KEYS)),
    "block mask, decode": (
        DECODING.but(keys=64, rows=4 * MOST_QUERIES, form=ByBlocks(4 * MOST_QUERIES, 64)), functions(64)[:1]
    ),
    "block mask, a warp a row": (BY_ROW.but(keys=32, rows=16, form=ByBlocks(16, 32)), functions(WARP)[1:]),
    "chosen pages, tiles": (BY_TMA.but(**OF_PAGES), [NULL]),
    "chosen pages, host": (ON_HOST.but(**OF_PAGES), [NULL, *windows(33)]),
    "chosen pages, decode": (DECODING.but(**OF_PAGES), windows(17)),
    "chosen pages of half a tile, decode": (DECODING.but(form=OfChosenPages()), [CAUSAL]),
    "chosen pages, a warp a row": (BY_ROW.but(**OF_PAGES), [NULL]),
    "f8e4m3 as stored, tiles": (BY_TMA.but(dtype="f8e4m3", query="bf16"), [NULL]),
    "f8e4m3 with scales, tiles": (BY_TMA.but(dtype="f8e4m3", query="bf16", scales=("f32", 32)), [NULL]),
    "f8e5m2, tiles by cp.async": (BY_CP_ASYNC.but(dtype="f8e5m2", query="f16"), windows(17)),
    "f8e4m3, host": (ON_HOST.but(dtype="f8e4m3", query="f32"), [NULL]),
    "f8e4m3, decode": (NARROW_DECODE, [NULL, *windows(33)]),
    "f8e4m3 with scales, decode": (NARROW_DECODE.but(query="f16", scales=("f32", 32)), [NULL]),
    "f32, tiles by mma.sync": (BY_MMA.but(dtype="f32"), [NULL]),
    "continuous, tiles": (BY_TMA.but(kind="continuous"), [NULL]),
    "continuous, decode": (DECODING.but(kind="continuous"), [NULL]),
    "three heads a KV head, tiles": (BY_TMA.but(group=3), [CAUSAL]),
    "no producer, tiles": (BY_TMA.but(schedule={**TILE, "producer": False}), [NULL]),
    "heads of one element, host": (ON_HOST.but(head_size=1, keys=ROW_KEYS, rows=1), [NULL, *windows(9)]),
    "decode without wgmma": (DECODING.but(place=AMPERE), [NULL]),
    "split keys, tiles": (
        BY_TMA.but(schedule=FEW_ROWS_SPLIT, keys=64, group=2, most=2, page_size=64, more=edges.edges(SPLIT_KEYS)[2:]
        ), windows(SPLIT_KEYS + 1),
    ),
    "fixed splits, decode": (
        DECODING.but(schedule={**DECODE, "batch_invariant": True, "split_size": 32}, more=edges.edges(32)),
        windows(33),
    ),
    "splits that a kernel combines, decode": (
        DECODING.but(schedule={**DECODE, "min_tiles": 1, "combine": 4}), [NULL]
    ),
}  # fmt: skip


def every(kernel: Kernel) -> list[Mask]:
    """The masks that a form takes."""
    found = masks(kernel.keys)
    if isinstance(kernel.case.form, ByBlocks):
        return [mask for mask in found if mask.spans]
    return [mask for mask in found if not mask.spans] if isinstance(kernel.case.form, OfChosenPages) else found


# Forms and elements that make check tries with another kernel.
ELSEWHERE = (
    "few rows by a decode, others by tiles, fp8", "few rows by a decode, others by mma.sync",
    "few rows by a decode, others by tiles of splits", "two sources, decode", "dense operands, tiles",
    "keys of others, tiles", "f8e4m3 as stored, tiles", "chosen pages, tiles",
    "few rows by a decode, others by tiles, padded", "few rows by a decode, others by tiles, keys of others",
    "padded, a warp a row", "keys of others, decode", "keys of others, a warp a row",
    "ragged operands, tiles by mma.sync", "ragged operands, a warp a row", "prior, decode",
    "two sources, tiles by mma.sync", "block mask, tiles by mma.sync", "block mask, a warp a row",
    "chosen pages, a warp a row", "f8e5m2, tiles by cp.async", "f8e4m3 with scales, decode", "f32, tiles by mma.sync",
    "continuous, decode", "no producer, tiles", "decode without wgmma",
)  # fmt: skip


@by_name(VARIANTS, ELSEWHERE)
def test_every_form_at_every_edge(name):
    kernel, tried = VARIANTS[name]
    edges.check(kernel.but(brief=True), every(kernel) if ALL else tried)


# --- latent rows ---------------------------------------------------------------------------------------------

OF_ROWS = replace(PLAIN, schedule={"kind": "latent", "splits": 1}, head_size=144, value_size=128, page_size=64)
LATENT = Kernel(HOPPER, KEYS, WIDE, replace(OF_ROWS, group=16))


def tile_by_mma(group: int, head_size: int, value_size: int, page_size: int) -> tuple[int, int]:
    """(query rows, keys) of the tiles of latent rows that a GPU without wgmma has."""
    spec = CacheSpec("paged", dtypes.bf16, 1, head_size, page_size, is_mla=True)
    case = replace(OfKernel.plain(spec, dtypes.bf16, group), value_size=value_size)
    return mla.block_extents(case, attention.Place(target.by_name(AMPERE.name), {}, 16))


FEW: dict[str, Any] = {"kind": "latent", "splits": 1, "max_queries": 2}
SMALL: dict[str, Any] = {"group": 4, "head_size": 48, "value_size": 32, "page_size": 8}
MMA_ROWS, MMA_KEYS = tile_by_mma(**SMALL)
LATENTS = {
    "64 query rows": LATENT,
    "few query rows": LATENT.but(schedule=FEW, rows=16, group=8, most=2),
    "few query rows, splits": LATENT.but(schedule={**FEW, "splits": 3}, rows=16, group=8, most=2),
    "64 query rows of pages of 5": LATENT.but(page_size=5),
    "f8e4m3 as stored": LATENT.but(dtype="f8e4m3", query="bf16", schedule=FEW, rows=16, group=8, most=2),
    "f8e4m3, 64 query rows": LATENT.but(dtype="f8e4m3", query="f16"),
    "tiles by mma.sync": LATENT.but(place=AMPERE, keys=MMA_KEYS, rows=MMA_ROWS, **SMALL),
    "host": ON_HOST.but(**SMALL),
    "a warp a row": BY_ROW.but(**SMALL),
}
SLOW_LATENTS = {"64 query rows of pages of 5", "f8e4m3, 64 query rows", "few query rows, splits"}  # of make check-all


@by_name(LATENTS, SLOW_LATENTS)
def test_latent_rows_at_every_edge(name):
    kernel = LATENTS[name]
    edges.check(kernel.but(brief=True), masks(kernel.keys) if ALL else [NULL, *windows(kernel.keys + 1)])


# --- prefills over decompressed chunks -----------------------------------------------------------------------

CHUNKS = {
    "tiles": (HOPPER, {"kind": "tile", "rows": 64, "keys": 16}, 16, 64),
    "host": (HOST, {"kind": "host"}, ROW_KEYS, 1),
    "a warp a row": (HOPPER, {"kind": "simt"}, WARP, WARPS),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_of_latent_rows_at_every_edge(name):
    """Sequences end at the edges of tiles; three chunks end a key behind whole tiles of all keys, within sequences."""
    place, schedule, keys, rows_of_tile = CHUNKS[name]
    cached, new = edges.lengths(edges.edges(keys, 3), edges.edges(rows_of_tile)[: None if ALL else 5])
    chunk = (sum(cached) + sum(new)) // 3 // keys * keys + 1
    p = prefill(3, "bf16", heads=1, nope=64, rope=16, values=40, cached=cached, new=new)
    plan, needed = chunks_of(p, chunk)
    out = place.put(sentinel(p.query[..., :40]))
    lse = place.put(sentinel(np.zeros(p.query.shape[:2], np.float32)))
    with place.active():
        for c in range(needed + 1):
            rows, taken, buffer = plan.buffer_row_offsets[c], plan.cache_offsets[c], buffer_of(p, chunk)
            kv.ops.mla_decompress(p.problem.collection.get_key_cache(1), rows, taken, buffer, schedule={})
            key, value = (np.array(x) for x in p.expand(buffer))
            key[rows[-1] :] = value[rows[-1] :] = np.nan
            kv.ops.mla_prefill_chunk(
                place.collection(p.problem.collection), 1, place.put(p.query), place.put(p.problem.row_offsets),
                place.put(key), place.put(value), place.put(rows), place.put(taken), accumulate=c > 0, out=out,
                lse=lse, schedule=schedule,
            )  # fmt: skip
    said = failures(p.problem, (place.get(out), place.get(lse)), dense(p), (4e-2, 2e-3))
    assert not said, "; ".join(said[:12])


# --- prefixes that are read once -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "schedule", "keys"), [(HOST, {}, HOST_KEYS), (AMPERE, {**TILE}, 16)], ids=["host", "sm_80"]
)
def test_shared_prefixes_end_at_every_edge(place, schedule, keys):
    groups = [(2, n) for n in edges.edges(keys) if n] + [(1, 0)]
    behind = np.resize(np.array([*edges.edges(keys, 3)]), 2 * len(groups) - 1).tolist()
    rng, problem = shared_problem(groups, behind, [1] * len(behind), page=1, heads=1, size=64)
    query = random_query(rng, problem, 4)
    shared = kv.SharedPrefixes(*map(place.put, groups_of(groups, 1)))
    out, lse = place.put(sentinel(query)), place.put(sentinel(np.zeros(query.shape[:2], np.float32)))
    c, offsets = place.collection(problem.collection), place.put(problem.row_offsets)
    with place.active():
        shared.plan(c, offsets)
        options: dict[str, Any] = {"schedule": [schedule, schedule]} if schedule else {}
        kv.ops.attention(c, 1, place.put(query), offsets, shared=shared, out=out, lse=lse, **options)
    want = reference.attention(problem.collection, 1, query, problem.row_offsets)
    said = failures(problem, (place.get(out), place.get(lse)), want, (4e-3, 2e-4))
    assert not said, "; ".join(said[:12])
