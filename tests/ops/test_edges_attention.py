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
from ops.test_mla_prefill import buffer_of, chunks_of, dense, prefill
from reference import attention as reference, edges
from reference.attention_cases import sentinel
from reference.edges import ALL, Kernel, Mask, masks, named
from reference.operands import dense_parts, ragged_parts
from reference.places import Interpreted, Place
from reference.random_caches import random_query
from reference.shared_prefixes import groups_of, shared_problem

import kvarn as kv
from kvarn.dialect import dtypes
from kvarn.dialect.layout import CacheSpec
from kvarn.lowering import target
from kvarn.lowering.kernels.attention import expansion as attention
from kvarn.lowering.kernels.attention.case import Case
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

BY_TMA = Kernel(HOPPER, TILE, 16, 64)
BY_CP_ASYNC = replace(BY_TMA, page_size=5)
BY_MMA = replace(BY_TMA, place=AMPERE)
ON_HOST = Kernel(HOST, {"kind": "host"}, HOST_KEYS, HOST_ROWS, dtype="f32")
BY_ROW = Kernel(HOPPER, {"kind": "simt"}, WARP, WARPS, dtype="f16", head_size=32)
DECODING = Kernel(HOPPER, DECODE, 16, WARP_ROWS, most=MOST_QUERIES)

NULL, CAUSAL = named("null"), named("causal")
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
    edges.check(replace(kernel, brief=True), [mask for mask in masks(kernel.keys) if mask.name != CAUSAL.name])


@pytest.mark.parametrize("name", ["host", "tiles by mma.sync"])
def test_bounds_that_stand_for_none_are_kept(name):
    """Every number of 31 bits is a window or a chunk, and what positions are compared with."""
    tried = edges.far_masks()
    edges.check(replace(KERNELS[name], brief=True), tried if name == "host" or ALL else tried[::2])


# --- what a kernel is asked besides, and of other elements --------------------------------------------------


def windows(*spans: int) -> list[Mask]:
    return [named("sliding_window", span) for span in spans]


def functions(extent: int) -> list[Mask]:
    return [mask for mask in masks(extent) if mask.spans]


SCALED: dict[str, Any] = {"scale_dtype": "f32", "granularity": 32}
OF_PAGES: dict[str, Any] = {"page_size": 16, "form": edges.of_chosen_pages}
NARROW_DECODE = replace(DECODING, schedule={**DECODE, "tile": 32}, keys=32, dtype="f8e4m3", query="bf16")
SPLIT_KEYS: int = measured("split_keys")
FEW_ROWS_SPLIT = {"kind": "tile", "rows": 64, "keys": 64, "splits": 3, "max_queries": 2}

# Sequences of up to 4 new tokens by a kernel of kind decode, the others by tiles: rows are those of 4 tokens.
DIVIDED = replace(BY_TMA, schedule={**TILE, "few": 4}, rows=4 * 4)
DIVIDED_SPLITS = {"kind": "tile", "rows": 64, "keys": 64, "splits": 3, "few": 4}

# Kernels, and masks of make check; make check-all has every mask that a form takes.
VARIANTS: dict[str, tuple[Kernel, list[Mask]]] = {
    "tiles by cp.async": (BY_CP_ASYNC, [NULL, *windows(17)]),
    "few rows by a decode, others by tiles": (DIVIDED, [CAUSAL, *windows(17)]),
    "few rows by a decode, others by tiles, fp8": (replace(DIVIDED, dtype="f8e4m3"), [CAUSAL]),
    "few rows by a decode, others by tiles of splits": (
        replace(DIVIDED, schedule=DIVIDED_SPLITS, keys=64, more=(3 * SPLIT_KEYS,)), [NULL],
    ),
    "few rows by a decode, others by mma.sync": (replace(DIVIDED, place=AMPERE), [NULL]),
    "few rows by a decode, others by tiles, padded": (replace(DIVIDED, form=edges.padded), [NULL]),
    "few rows by a decode, others by tiles, keys of others": (replace(DIVIDED, form=edges.of_others), [NULL]),
    "padded, tiles": (replace(BY_TMA, form=edges.padded), [NULL]),
    "padded, host": (replace(ON_HOST, form=edges.padded), [NULL, *windows(33)]),
    "padded, decode": (replace(DECODING, form=edges.padded), windows(17)),
    "padded, a warp a row": (replace(BY_ROW, form=edges.padded), [NULL]),
    "keys of others, tiles": (replace(BY_TMA, form=edges.of_others), [NULL]),
    "keys of others, host": (replace(ON_HOST, form=edges.of_others), [NULL, *windows(33)]),
    "keys of others, decode": (replace(DECODING, form=edges.of_others), [NULL]),
    "keys of others, a warp a row": (replace(BY_ROW, form=edges.of_others), [NULL]),
    "dense operands, tiles": (replace(BY_TMA, form=edges.of_operands(dense_parts)), [NULL]),
    "ragged operands, tiles": (replace(BY_TMA, form=edges.of_operands(ragged_parts)), windows(17)),
    "ragged operands, tiles by mma.sync": (replace(BY_MMA, form=edges.of_operands(ragged_parts)), [NULL]),
    "dense operands, host": (replace(ON_HOST, form=edges.of_operands(dense_parts)), [NULL, *windows(33)]),
    "ragged operands, a warp a row": (replace(BY_ROW, form=edges.of_operands(ragged_parts)), [NULL]),
    "prior, tiles": (replace(BY_TMA, form=edges.with_prior), [NULL]),
    "prior, host": (replace(ON_HOST, form=edges.with_prior), [NULL, *windows(33)]),
    "prior, decode": (replace(DECODING, form=edges.with_prior), [CAUSAL]),
    "two sources, tiles by mma.sync": (replace(BY_MMA, form=edges.of_two_sources), [CAUSAL]),
    "two sources, host": (replace(ON_HOST, form=edges.of_two_sources), [CAUSAL, *windows(33)]),
    "two sources, decode": (replace(DECODING, form=edges.of_two_sources), windows(17)),
    "block mask, tiles": (replace(BY_TMA, form=edges.by_blocks), functions(16)[:1]),
    "block mask, tiles by mma.sync": (replace(BY_MMA, form=edges.by_blocks), functions(16)[1:]),
    "block mask, host": (replace(ON_HOST, form=edges.by_blocks), functions(HOST_KEYS)),
    "block mask, decode": (replace(DECODING, keys=64, rows=4 * MOST_QUERIES, form=edges.by_blocks), functions(64)[:1]),
    "block mask, a warp a row": (replace(BY_ROW, keys=32, rows=16, form=edges.by_blocks), functions(WARP)[1:]),
    "chosen pages, tiles": (replace(BY_TMA, **OF_PAGES), [NULL]),
    "chosen pages, host": (replace(ON_HOST, **OF_PAGES), [NULL, *windows(33)]),
    "chosen pages, decode": (replace(DECODING, **OF_PAGES), windows(17)),
    "chosen pages of half a tile, decode": (replace(DECODING, form=edges.of_chosen_pages), [CAUSAL]),
    "chosen pages, a warp a row": (replace(BY_ROW, **OF_PAGES), [NULL]),
    "f8e4m3 as stored, tiles": (replace(BY_TMA, dtype="f8e4m3", query="bf16"), [NULL]),
    "f8e4m3 with scales, tiles": (replace(BY_TMA, dtype="f8e4m3", query="bf16", shape=SCALED), [NULL]),
    "f8e5m2, tiles by cp.async": (replace(BY_CP_ASYNC, dtype="f8e5m2", query="f16"), windows(17)),
    "f8e4m3, host": (replace(ON_HOST, dtype="f8e4m3", query="f32"), [NULL]),
    "f8e4m3, decode": (NARROW_DECODE, [NULL, *windows(33)]),
    "f8e4m3 with scales, decode": (replace(NARROW_DECODE, query="f16", shape=SCALED), [NULL]),
    "f32, tiles by mma.sync": (replace(BY_MMA, dtype="f32"), [NULL]),
    "continuous, tiles": (replace(BY_TMA, kind="continuous"), [NULL]),
    "continuous, decode": (replace(DECODING, kind="continuous"), [NULL]),
    "three heads a KV head, tiles": (replace(BY_TMA, group=3), [CAUSAL]),
    "no producer, tiles": (replace(BY_TMA, schedule={**TILE, "producer": False}), [NULL]),
    "heads of one element, host": (replace(ON_HOST, head_size=1, keys=ROW_KEYS, rows=1), [NULL, *windows(9)]),
    "decode without wgmma": (replace(DECODING, place=AMPERE), [NULL]),
    "split keys, tiles": (
        replace(
            BY_TMA, schedule=FEW_ROWS_SPLIT, keys=64, group=2, most=2, page_size=64, more=edges.edges(SPLIT_KEYS)[2:]
        ), windows(SPLIT_KEYS + 1),
    ),
    "fixed splits, decode": (
        replace(DECODING, schedule={**DECODE, "batch_invariant": True, "split": 32}, more=edges.edges(32)),
        windows(33),
    ),
    "splits that a kernel combines, decode": (
        replace(DECODING, schedule={**DECODE, "min_tiles": 1, "combine": 4}), [NULL]
    ),
}  # fmt: skip


def every(kernel: Kernel) -> list[Mask]:
    """The masks that a form takes."""
    found = masks(kernel.keys)
    if kernel.form is edges.by_blocks:
        return [mask for mask in found if mask.spans]
    return [mask for mask in found if not mask.spans] if kernel.form is edges.of_chosen_pages else found


@pytest.mark.parametrize("name", VARIANTS)
def test_every_form_at_every_edge(name):
    kernel, tried = VARIANTS[name]
    edges.check(replace(kernel, brief=True), every(kernel) if ALL else tried)


# --- latent rows ---------------------------------------------------------------------------------------------

LATENT = Kernel(
    HOPPER, {"kind": "latent", "splits": 1}, KEYS, WIDE, group=16, head_size=144, value_size=128, page_size=64,
    form=edges.latent,
)  # fmt: skip


def tile_by_mma(group: int, head_size: int, value_size: int, page_size: int) -> tuple[int, int]:
    """(query rows, keys) of the tiles of latent rows that a GPU without wgmma has."""
    spec = CacheSpec("paged", dtypes.bf16, 1, head_size, page_size, is_mla=True)
    case = replace(Case.plain(spec, dtypes.bf16, group), value_size=value_size)
    return mla.block_extents(case, attention.Place(target.by_name(AMPERE.name), {}, 16))


FEW: dict[str, Any] = {"kind": "latent", "splits": 1, "max_queries": 2}
SMALL: dict[str, Any] = {"group": 4, "head_size": 48, "value_size": 32, "page_size": 8}
MMA_ROWS, MMA_KEYS = tile_by_mma(**SMALL)
LATENTS = {
    "64 query rows": LATENT,
    "few query rows": replace(LATENT, schedule=FEW, rows=16, group=8, most=2),
    "few query rows, splits": replace(LATENT, schedule={**FEW, "splits": 3}, rows=16, group=8, most=2),
    "64 query rows of pages of 5": replace(LATENT, page_size=5),
    "f8e4m3 as stored": replace(LATENT, dtype="f8e4m3", query="bf16", schedule=FEW, rows=16, group=8, most=2),
    "f8e4m3, 64 query rows": replace(LATENT, dtype="f8e4m3", query="f16"),
    "tiles by mma.sync": replace(LATENT, place=AMPERE, keys=MMA_KEYS, rows=MMA_ROWS, **SMALL),
    "host": replace(ON_HOST, form=edges.latent, **SMALL),
    "a warp a row": replace(BY_ROW, form=edges.latent, **SMALL),
}
SLOW_LATENTS = {"64 query rows of pages of 5", "f8e4m3, 64 query rows", "few query rows, splits"}  # one mask each


@pytest.mark.parametrize("name", LATENTS)
def test_latent_rows_at_every_edge(name):
    kernel = LATENTS[name]
    tried = [NULL] if name in SLOW_LATENTS else [NULL, *windows(kernel.keys + 1)]
    edges.check(replace(kernel, brief=True), masks(kernel.keys) if ALL else tried)


# --- prefills over decompressed chunks -----------------------------------------------------------------------

CHUNKS = {
    "tiles": Kernel(HOPPER, {"kind": "tile", "rows": 64, "keys": 16}, 16, 64, group=1),
    "host": Kernel(HOST, {"kind": "host"}, ROW_KEYS, 1, group=1),
    "a warp a row": Kernel(HOPPER, {"kind": "simt"}, WARP, WARPS, group=1),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_of_latent_rows_at_every_edge(name):
    """Sequences end at the edges of tiles; three chunks end a key behind whole tiles of all keys, within sequences."""
    kernel = CHUNKS[name]
    cached, new = edges.lengths(edges.edges(kernel.keys, 3), edges.edges(kernel.rows)[: None if ALL else 5])
    place, chunk = kernel.place, (sum(cached) + sum(new)) // 3 // kernel.keys * kernel.keys + 1
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
                lse=lse, schedule=dict(kernel.schedule),
            )  # fmt: skip
    said = edges.failures(p.problem, (place.get(out), place.get(lse)), dense(p), (4e-2, 2e-3))
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
    said = edges.failures(problem, (place.get(out), place.get(lse)), want, edges.tolerances("f16", "f16"))
    assert not said, "; ".join(said[:12])
