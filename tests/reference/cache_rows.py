# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables of calls of the cache operations: each row is a rule, or a bug that was, and where it is tried.

``host`` is the host, ``auto`` a GPU's code in the interpreter; behind a bar are places of make check-all. A GPU has
all. Lengths at the edges of pages and blocks are in tests/ops/test_edges_operations.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarn.caches import PagedKVCacheCollection

from .cache_case import CacheRow, row
from .cache_operations import (
    DRAFTS,
    append,
    commit,
    convert,
    copy_pages,
    gather,
    iadd_2m,
    project,
    project_padded,
    project_with_index,
    qk_norm,
    qk_norm_with_index,
    radd,
    rms_norm,
    rope,
    rope_append,
    rope_padded,
    store_padded,
    store_ragged,
    transfer_pages,
)
from .foreign import LAYOUTS
from .random_caches import Problem

FEW: dict[str, Any] = {"cached": [2, 15, 1], "new": [1, 4, 1]}
STEP: dict[str, Any] = {"cached": [5, 0, 33, 16], "new": [3, 2, 0, 9]}
NOBODY: dict[str, Any] = {"cached": [4, 4], "new": [0, 0]}
MLA: dict[str, Any] = {"is_mla": True, "num_heads": 1}
OF_SCALES: dict[str, Any] = {"dtype": "f8e4m3", "scale_dtype": "f32"}
EIGHT: dict[str, Any] = {"page_size": 8, "cached": [5, 9], "new": [7, 4]}


def without_pages(problem: Problem) -> Any:
    """Entries that name no page: of tokens 8 to 15 of both sequences."""
    c = problem.collection
    table = np.array(c.lookup_table)
    table[0, 1], table[1, 1] = c.num_blocks, 0xFFFFFFFF
    return type(c)(c.blocks, c.cache_lengths, table, c.max_seq_length, c.max_cache_length)


def of_far_pages(problem: Problem) -> Any:
    """Entries that name no page, for cached and for new tokens, as in a table that is not filled in."""
    c = problem.collection
    table = np.array(c.lookup_table)
    table[0, 1], table[0, 2], table[1, 1:] = c.num_blocks, 2**32 - 5, 2**31 + 7
    return PagedKVCacheCollection(c.blocks, c.cache_lengths, table, c.max_seq_length, c.max_cache_length)


def full(problem: Problem) -> None:
    """The largest number of f8e4m3 in every slot."""
    problem.collection.blocks[...] = 448.0


# --- stores ------------------------------------------------------------------------------------------

APPENDS = [
    row("pages of f32", "host auto", append, dtype="f32"),
    row("regions of bf16", "host auto", append, kind="continuous", dtype="bf16"),
    row("tables of every layer, f16", "host auto", append, kind="fa3", dtype="f16"),
    row("pages of one token, signed tables", "host | auto", append, dtype="bf16", page_size=1, table_dtype=np.int32),
    row("pages of 20 tokens, signed tables", "auto | host", append, dtype="bf16", page_size=20, table_dtype=np.int32),
    row("pages of 128 tokens", "| host auto", append, dtype="bf16", page_size=128),
    row("one head of 64", "auto | host", append, dtype="f16", num_heads=1, head_size=64, **FEW),
    row("three heads of 80", "| host auto", append, dtype="f16", num_heads=3, head_size=80, **FEW),
    row("heads of 7", "host auto", append, dtype="f16", num_heads=1, head_size=7, **FEW),
    row("five heads of 33", "| host auto", append, dtype="f16", num_heads=5, head_size=33, **FEW),
    row("16 heads of 192", "auto | host", append, dtype="f16", num_heads=16, head_size=192, **FEW),
    row("latent rows have no values", "host auto", append, dtype="bf16", head_size=72, **MLA),
    row("8 bits as they are stored", "host auto", append, dtype="i8", kind="continuous", source="i8"),
    row("f8e4m3 saturates, of f32", "host | auto", append, dtype="f8e4m3", source="f32"),
    row("f8e4m3 saturates, of f16", "| host auto", append, dtype="f8e4m3", source="f16"),
    row("f8e5m2 saturates, of bf16", "auto | host", append, dtype="f8e5m2", source="bf16"),
    row("i8 saturates, of f16", "auto | host", append, dtype="i8", source="f16"),
    row("f8e4m3 by the scales of tensors, of bf16", "host auto", append, dtype="f8e4m3", source="bf16",
        tensor_scales=(0.3, 0.07)),
    row("i8 by the scales of tensors, of f32", "host | auto", append, dtype="i8", source="f32",
        tensor_scales=(0.5, 3.0)),
    row("latent rows by the scale of all keys", "auto | host", append, dtype="f8e4m3", source="f16", head_size=72,
        tensor_scales=(0.3, 0.07), **MLA),
    row("a scale a head", "host auto", append, **OF_SCALES, head_size=64, cached=[3, 0, 17], new=[2, 0, 5]),
    row("granules of 16 with scales of f16", "host | auto", append, dtype="i8", scale_dtype="f16", granularity=16,
        head_size=64),
    row("scales of bf16", "auto | host", append, dtype="f8e4m3", scale_dtype="bf16", granularity=16, head_size=64),
    row("scales that are powers of two", "host | auto", append, dtype="i8", scale_dtype="f8e8m0", head_size=64),
    row("scales of f8e8m0 of granules", "auto | host", append, dtype="f8e4m3", scale_dtype="f8e8m0", granularity=16,
        head_size=64),
    *(row(f"granules of {granule} of heads of {size}", kernels, append, **OF_SCALES, num_heads=3, head_size=size,
          granularity=granule, source="f32", cached=[3, 1], new=[2, 5])
      for size, granule, kernels in ((40, 16, "host auto"), (24, 1, "auto | host"), (30, 4, "host | auto"),
                                     (48, 48, "| host auto"), (640, 640, "auto | host"))),
    row("given scales of granules of 32", "host | auto", append, dtype="f8e4m3", scale_dtype="f16", head_size=32,
        granularity=32, scales="f32"),
    row("given scales of granules of 5", "auto | host", append, dtype="f8e4m3", scale_dtype="f16", head_size=32,
        granularity=5, scales="f32"),
    row("rows of no sequence before and behind the batch", "host auto", append, around=6, cached=[4, 2, 0],
        new=[3, 0, 5]),
    row("no new tokens", "host auto", append, **NOBODY),
    row("no sequence takes padded rows", "host auto", append, around=2, cached=[], new=[]),
    row("a token without a page is dropped", "host auto", append, dtype="f16", change=without_pages, unchecked=True,
        **EIGHT),
    row("one cache of 8 bits", "host | auto", store_ragged, dtype="f8e4m3", cached=[100, 200, 300], new=[10, 33, 1],
        page_size=32),
    row("one cache of regions", "auto | host", store_ragged, dtype="bf16", kind="continuous", cached=[100, 200, 0],
        new=[5, 0, 18]),
    row("one cache of fa3", "| host auto", store_ragged, kind="fa3", dtype="i8"),
    row("what is not valid is skipped", "host auto", store_padded, cached=[5, 2, 0, 3], new=[3, 1, 4, 0], dtype="f16"),
    row("slots past the valid ones keep their zeros", "host | auto", store_padded, cached=[5, 2, 0], new=[3, 1, 4],
        page_size=4, poison=0.0),
    row("valid lengths past the padding write the padding", "host auto", store_padded, cached=[5, 9], new=[3, 3],
        more=0, valid=[900, 2], unchecked=True),
    row("valid lengths of 32 bits are negative", "host auto", store_padded, cached=[5, 9], new=[3, 3], more=0,
        valid=[0xFFFFFFFF, 0], unchecked=True),
    row("a padding of no tokens", "host auto", store_padded, more=0, valid=[4, 4], unchecked=True, **NOBODY),
    row("a padded batch of no sequences", "host | auto", store_padded, more=4, cached=[], new=[]),
]  # fmt: skip

# --- rotations and norms -----------------------------------------------------------------------------

HALVES: dict[str, Any] = {"interleaved": False}
ROTATIONS = [
    row("all dims", "host auto", rope_append, dtype="bf16", **STEP),
    row("all dims in halves", "host auto", rope_append, dtype="bf16", **HALVES, **STEP),
    row("the last 12 dims", "auto | host", rope_append, turned=12, dtype="f16", **STEP),
    row("two dims in halves, behind norms", "host auto", rope_append, turned=2, gamma="f32", dtype="bf16", **HALVES,
        **STEP),
    row("8 dims behind norms", "auto | host", rope_append, turned=8, gamma="f32", dtype="bf16", **STEP),
    row("regions", "auto | host", rope_append, kind="continuous", dtype="f32", **STEP),
    row("tables of every layer, 8 bits", "host | auto", rope_append, kind="fa3", dtype="f8e4m3", page_size=4, **STEP),
    row("pages of 4, 8 bits", "auto | host", rope_append, dtype="f8e4m3", page_size=4, **STEP),
    *(row(f"{heads} heads of {size}, {turned} dims{' in halves' * halves}", kernels, rope_append, num_heads=heads,
          head_size=size, turned=turned, interleaved=not halves, gamma="f16" if heads > 1 else "", heads=heads * 2,
          dtype="f16", cached=[1, 2], new=[2, 3])
      for heads, size, turned, halves, kernels in (
          (1, 64, 64, True, "| host auto"), (3, 80, 40, False, "host | auto"), (2, 96, 96, True, "auto | host"),
          (1, 7, 6, False, "host auto"), (2, 10, 6, True, "auto | host"), (8, 128, 64, False, "auto | host"))),
    *(row(f"scales of granules of {granule} of {size}, {turned} dims{' behind norms' * norm}", kernels, rope_append,
          **OF_SCALES, head_size=size, granularity=granule, turned=turned, gamma="f32" if norm else "",
          interleaved=not norm, cached=[3, 0], new=[2, 4])
      for size, turned, granule, norm, kernels in (
          (64, 64, 64, False, "host auto"), (64, 32, 16, True, "auto | host"), (48, 48, 48, True, "host | auto"),
          (64, 64, 8, False, "auto | host"), (20, 8, 6, True, "host auto"))),
    row("the query may be its own output", "host auto", rope_append, inplace=True, turned=32, head_size=32, **STEP),
    row("the query may be its own output behind norms", "auto | host", rope_append, inplace=True, turned=32,
        head_size=32, gamma="f32", **HALVES, **STEP),
    row("queries of no sequence are not written", "host auto", rope_append, around=2, cached=[3, 1], new=[2, 1]),
    row("cached keys and queries of other heads", "host auto", rope, page_size=8, **STEP),
    row("in halves, by given positions", "auto | host", rope, positions="given", page_size=8, **HALVES, **STEP),
    row("by positions of sections", "host auto", rope, positions="sections", page_size=8, **STEP),
    row("latent keys", "host auto", rope, head_size=24, page_size=8, **MLA, **STEP),
    row("latent keys in halves, by positions of sections", "auto | host", rope, positions="sections", head_size=24,
        page_size=8, **HALVES, **MLA, **STEP),
    *(row(f"{dtype} is rotated in f32 and rounded once", kernels, rope, turned=8, source="bf16", dtype=dtype,
          interleaved=dtype != "bf16", **STEP)
      for dtype, kernels in (("f16", "host | auto"), ("bf16", "auto | host"), ("f8e4m3", "host auto"),
                             ("f8e5m2", "| host auto"))),
    row("8 bits saturate", "host auto", rope, turned=16, dtype="f8e4m3", change=full, cached=[0], new=[2]),
    row("a padded batch", "host auto", rope_padded, cached=[5, 0, 33, 16], new=[3, 1, 0, 4]),
    row("a padded batch in regions, in halves", "auto | host", rope_padded, kind="continuous", dtype="f16", turned=6,
        cached=[5, 0, 33, 16], new=[3, 1, 0, 4], **HALVES),
    row("a padded batch of fa3", "host | auto", rope_padded, kind="fa3", dtype="bf16", turned=6,
        cached=[5, 0, 33, 16], new=[3, 1, 0, 4]),
    row("a padded batch by given positions", "auto | host", rope_padded, positions="given", turned=12, size=20,
        cached=[5, 0, 33, 16], new=[2, 4, 1, 0]),
    row("a padded batch by positions of sections, in halves", "host auto", rope_padded, positions="sections",
        turned=12, size=20, cached=[5, 0, 33, 16], new=[2, 4, 1, 0], **HALVES),
    row("valid lengths past the padding end with it", "host auto", rope_padded, more=0, valid=[900, 1],
        unchecked=True, cached=[3, 1], new=[2, 2]),
    row("queries and new keys", "host auto", qk_norm, num_heads=3, **STEP),
    row("weights of 1 and more", "auto | host", qk_norm, num_heads=3, offset=1.0, head_size=20, dtype="bf16",
        gamma="bf16", **STEP),
    row("heads of 128 in regions", "auto | host", qk_norm, kind="continuous", dtype="f16", head_size=128, **STEP),
    row("fa3", "host | auto", qk_norm, kind="fa3", dtype="bf16", offset=1.0, **STEP),
    *(row(f"rotates {turned} of {size} dims after it{', over 8 bits' * (dtype != 'f32')}", kernels, qk_norm,
          turned=turned, head_size=size, dtype=dtype, source="f32", interleaved=dtype == "f32", inplace=True, heads=4,
          **STEP)
      for size, turned, dtype, kernels in (
          (16, 16, "f32", "host auto"), (16, 4, "f8e4m3", "auto | host"), (80, 40, "f8e4m3", "host | auto"),
          (7, 6, "f32", "host auto"), (192, 64, "f32", "auto | host"))),
    row("an indexer's heads in the same launch", "host auto", qk_norm_with_index, turned=8, dtype="bf16", num_heads=3,
        page_size=8, **STEP),
    row("64 heads of an indexer", "auto | host", qk_norm_with_index, heads=2, index_heads=64, dtype="bf16",
        num_heads=1, page_size=8, **STEP),
    row("no new tokens", "host auto", qk_norm, **NOBODY),
    row("all of a head", "host auto", rms_norm, **STEP),
    row("half of a head", "auto | host", rms_norm, size=8, dtype="bf16", **STEP),
    row("all heads of a token, in regions", "host auto", rms_norm, size=32, kind="continuous", dtype="f16", **STEP),
    row("three dims of fa3", "auto | host", rms_norm, size=3, gamma="f32", kind="fa3", dtype="bf16", **STEP),
    row("rounded before the weight", "host auto", rms_norm, size=40, head_size=40, num_heads=8, gamma="f32",
        before_cast=False, offset=0.0, dtype="bf16", **STEP),
    row("rounded before the weight, one head", "auto | host", rms_norm, size=40, head_size=40, num_heads=1,
        gamma="f32", before_cast=False, offset=0.0, dtype="bf16", **STEP),
    row("a hint of fewer tokens", "host auto", rms_norm, total=1),
    row("a hint of no tokens launches nothing", "host auto", rms_norm, total=0),
]  # fmt: skip

# --- sums --------------------------------------------------------------------------------------------

SUMS = [
    row("the whole batch", "host auto", radd),
    row("a slice of the batch, in regions", "host | auto", radd, first=1, last=3, kind="continuous", dtype="f16"),
    row("no sequence of the batch", "auto | host", radd, first=2, last=2, dtype="bf16"),
    row("the end of the batch, fa3", "auto | host", radd, first=2, kind="fa3", dtype="bf16"),
    row("integers", "host | auto", radd, first=1, last=3, dtype="i32"),
    row("8 bits", "auto | host", radd, dtype="f8e4m3"),
    row("rows past the offsets are left out", "host auto", radd, more=5, **EIGHT),
    *(row(f"{m} tokens", kernels, iadd_2m, m=m, dtype="f16")
      for m, kernels in ((0, "host auto"), (1, "auto | host"), (8, "host auto"), (30, "auto | host"))),
    row("rows past the offsets are left out of both halves", "host auto", iadd_2m, more=3, **EIGHT),
    row("offsets of the first sequences", "host auto", iadd_2m, m=9, sequences=2, page_size=8, cached=[5, 9, 2],
        new=[7, 4, 3]),
]  # fmt: skip

# --- copies ------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "paged f32": {"kind": "paged", "dtype": "f32", "page_size": 1},
    "paged bf16": {"kind": "paged", "dtype": "bf16", "page_size": 64},
    "continuous f16": {"kind": "continuous", "dtype": "f16"},
    "fa3 bf16": {"kind": "fa3", "dtype": "bf16"},
    "quantized": {"kind": "paged", "dtype": "f8e4m3", "scale_dtype": "f32", "granularity": 8},
    "mla": {"kind": "paged", "dtype": "bf16", "num_heads": 1, "head_size": 72, "is_mla": True, "page_size": 32},
    "int8": {"kind": "paged", "dtype": "i8", "scale_dtype": "f16", "head_size": 5},
    "odd": {"kind": "paged", "dtype": "bf16", "page_size": 1, "num_heads": 3, "head_size": 5},
}
TWO: dict[str, Any] = {"cached": [20, 10], "new": [3, 1], "spare_pages": 5, "num_layers": 3}
ALL: dict[str, Any] = {"cached": [70, 0, 3, 130], "new": [2, 2, 2, 2]}
TOKENS: dict[str, Any] = {"cached": [10, 40, 3, 7], "new": [1, 1, 1, 1], "num_layers": 3}
TURNS = ("host | auto", "auto | host")  # rows alike in all but a kind of cache run at one place in make check
COPIES = [
    *(row(f"{name}, {'values' if half == 'value' else 'keys'}", TURNS[i % 2], gather, half=half, **kind, **TOKENS)
      for i, (name, kind) in enumerate(KINDS.items()) for half in ["key" if i % 2 or name == "mla" else "value"]),
    row("no rows", "host auto", gather, ids=np.zeros((0, 4)), offsets=[0, 0], cached=[9], new=[1]),
    row("rows of no tokens", "host auto", gather, ids=np.zeros((3, 0)), offsets=[0, 3], cached=[9], new=[1]),
    *(row(f"all of a page: {name}", TURNS[i % 2], copy_pages, **kind, **TWO) for i, (name, kind) in
      enumerate(KINDS.items())),
    row("no pages", "host auto", copy_pages, count=0),
    *(row(f"{name}, {'every layer' if layer is None else 'one layer'}", TURNS[i % 2], transfer_pages, layer=layer,
          **kind, **TWO)
      for i, (name, kind) in enumerate(KINDS.items()) for layer in [None if i % 2 or "fa3" in name else 1]),
    row("every layer of regions", "auto | host", transfer_pages, **KINDS["continuous f16"], **TWO),
    row("no pages", "host auto", transfer_pages, count=0),
    *(row(f"{source} to {target}", TURNS[i % 2], convert, source=KINDS[source], **KINDS[target], **ALL)
      for i, (source, target) in enumerate((s, t) for t in ("paged f32", "continuous f16", "fa3 bf16", "quantized")
                                           for s in ("paged bf16", "quantized", "continuous f16", "fa3 bf16"))),
    row("integers are exact", "host auto", convert, source={"dtype": "i32", "page_size": 8}, kind="continuous",
        dtype="i32", cached=[70, 3], new=[1, 1]),
    *(row(f"accepted tokens move together: {name}", TURNS[i % 2], commit, layer=None if i % 2 else 1,
          **{**DRAFTS, **kind}) for i, (name, kind) in enumerate(KINDS.items())),
    row("lists at the rows of the step", "host auto", commit, at_rows=True, **DRAFTS),
    *(row(f"a list ends before {end}, which is no token of the step", "auto | host", commit, end=end, **DRAFTS)
      for end in (70, 2**31 - 1, -(2**31))),
    row("lists without entries", "host auto", commit, paths=[[]] * 5, **DRAFTS),
    row("lists of no length", "host auto", commit, paths=[[]] * 5, most=0, **DRAFTS),
    row("tokens without a page are dropped", "host auto", commit, page_size=4, change=without_pages, unchecked=True,
        **DRAFTS),
]  # fmt: skip

# --- what has no page ---------------------------------------------------------------------------------

WRITERS = (store_ragged, store_padded, radd, iadd_2m, rms_norm, rope, rope_padded, qk_norm)
NO_PAGES = [
    row("a token without a page is dropped, and read from none", "host auto", writer, change=without_pages,
        unchecked=True, dtype="bf16", **EIGHT) for writer in WRITERS
]  # fmt: skip

# --- pools of other libraries -------------------------------------------------------------------------

SHAPES = {
    "one head of 64": {"num_heads": 1, "head_size": 64, "page_size": 16},
    "three heads of 80": {"num_heads": 3, "head_size": 80},
    "heads of 7, pages of 20": {"head_size": 7, "page_size": 20},
    "heads of 5, pages of 1": {"num_heads": 1, "head_size": 5, "page_size": 1},
}
SOME = ("vllm packed", "flashinfer HND", "flashinfer pair NHD", "sglang, page 1", "tensorrt_llm", "lmcache, by tokens")
DTYPES = ("f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i8", "i16", "i32")
CACHED: dict[str, Any] = {"cached": [37, 0, 3, 16], "new": [0] * 4}
PAGES = [name for name in LAYOUTS if name != "sglang, page 1"]  # whose slots of page N are there
# Layouts take turns: an operation is tried on one half of them in make check, and on all others in make check-all.
TURN = ("host | auto", "| host auto", "auto | host", "| auto host")
FOREIGN = [
    *(row(f"{name}, {dtype}", TURN[i // 3 % 4], append, layout=name, dtype=dtype, source=("", "bf16", "")[i % 3])
      for i, name in enumerate(LAYOUTS) for dtype in [("bf16", "f8e4m3", "f32")[i % 3]]),
    *(row(f"{name}, {shape}", TURN[i % 4], append, layout=name, dtype="f16", **of)
      for i, (name, (shape, of)) in enumerate((n, list(SHAPES.items())[(i + j) % 4]) for i, n in enumerate(SOME)
                                              for j in (0, 1))),
    *(row(name, TURN[(i + 1) % 4], rope_append, layout=name) for i, name in enumerate(LAYOUTS)),
    *(row(name, TURN[(i + j) % 4], writer, layout=name)
      for j, writer in enumerate(WRITERS[:5]) for i, name in enumerate(SOME)),
    *(row(f"stray page ids of {name}", TURN[i % 4], append, layout=name, dtype="f16", head_size=64,
          change=of_far_pages, unchecked=True, cached=[20, 7], new=[3, 2]) for i, name in enumerate(PAGES)),
    *(row(f"scales of {name}", TURN[i % 4], append, layout=name, dtype=("f8e4m3", "i8")[i % 2], scale_dtype="f32",
          granularity=16, head_size=64, page_size=16, cached=[33, 0, 5], new=[1, 1, 1])
      for i, name in enumerate(PAGES)),
    *(row(name, TURN[i % 4], gather, layout=name, half=("key", "value")[i % 2], dtype=("bf16", "i8")[i % 2],
          cached=[10, 40, 3, 7], new=[1, 1, 1, 1]) for i, name in enumerate(LAYOUTS)),
    *(row(name, TURN[i % 4], copy_pages, layout=name, dtype="f16", num_heads=(2, 3)[i % 2], head_size=(128, 5)[i % 2],
          page_size=(16, 4)[i % 2], spare_pages=5) for i, name in enumerate(PAGES)),
    *(row(f"a cache of {dtype} to {name}", TURN[(i + i // 8) % 4], convert, layout=name, source={"dtype": dtype},
          dtype=dtype, **CACHED) for i, (name, dtype) in enumerate(zip(LAYOUTS, DTYPES * 3, strict=False))),
    *(row(f"{name} of {dtype} to a cache", TURN[i % 4], convert, of=name, source={"dtype": dtype}, dtype=dtype,
          page_size=16, **CACHED) for i, (name, dtype) in enumerate(zip(reversed(LAYOUTS), DTYPES * 3, strict=False))),
    *(row(f"{of} of f32 to {kind}", TURN[i % 4], convert, of=of, source={"dtype": "f32"}, **KINDS[kind], **CACHED)
      for i, (of, kind) in enumerate((("flashinfer HND", "continuous f16"), ("vllm NHD", "fa3 bf16"),
                                      ("flashinfer pair HND", "quantized"), ("vllm packed", "int8")))),
    *(row(f"a quantized cache to {name}", "host auto", convert, layout=name, source=KINDS["quantized"], dtype="f16",
          most=0.01, **CACHED) for name in ("vllm packed", "sglang, page 1")),
    *(row(f"{of} of {source} to {name} of {dtype}", TURN[i % 4], convert, of=of, layout=name,
          source={"dtype": source}, dtype=dtype, page_size=4, **CACHED)
      for i, (of, name, source, dtype) in enumerate((
          ("flashinfer HND", "vllm NHD", "bf16", "bf16"), ("vllm HND", "flashinfer pair NHD", "f16", "f32"),
          ("flashinfer pair HND", "flashinfer NHD", "f32", "f8e4m3"), ("sglang", "lmcache", "f8e5m2", "bf16")))),
    *(row(f"three heads of {size} to pages among layers", TURN[i % 4], convert, layout="tensorrt_llm, one layer",
          source={"dtype": "f16"}, dtype="f16", num_heads=3, head_size=size, **CACHED)
      for i, size in enumerate((1, 7, 80, 128))),
    row("tokens without a page are not read", "host auto", convert, of="vllm NHD", source={"dtype": "f32"}, stray=True,
        unchecked=True, **CACHED),
    row("tokens without a page are not written", "host auto", convert, layout="flashinfer HND",
        source={"dtype": "f32"}, change=of_far_pages, unchecked=True, **CACHED),
    *(row(f"{of} to {name or 'a pool'}", TURN[i % 4], transfer_pages, of=of, layout=name, dtype="f16", num_heads=3,
          num_layers=1, spare_pages=5)
      for i, (of, name) in enumerate((("flashinfer HND", "vllm packed"), ("vllm packed", "flashinfer pair HND"),
                                      ("vllm packed", "vllm packed, tokens first"), ("sglang", "heads in front"),
                                      ("vllm HND as NHD", "vllm NHD"), ("vllm packed", "")))),
]  # fmt: skip

# --- projections -------------------------------------------------------------------------------------

TILE, SMALL = {"kind": "tile"}, {"kind": "stream_k", "max_tokens": 16}
WHOLE: dict[str, Any] = {"kind": "full_k", "max_tokens": 16}
WIDE: dict[str, Any] = {"dtype": "bf16", "head_size": 64}
MANY: dict[str, Any] = {"cached": [5, 0, 33, 16], "new": [3, 61, 0, 39]}
THREE: dict[str, Any] = {"cached": [5, 0, 33], "new": [3, 2, 9]}
UNITS = {
    "mma": (STEP, {**WHOLE}), "wgmma": (STEP, {**WHOLE, "max_tokens": 64, "tile_columns": 48}),
    "tiles": (MANY, {**WHOLE, "max_tokens": 128, "tile_columns": 80, "rows": 64}),
    "wide": (MANY, {**WHOLE, "max_tokens": 256, "tile_columns": 96, "rows": 256}),
}  # fmt: skip
PROJECTIONS = [
    row("queries and cache", "host auto", project, dtype="bf16", page_size=4, spare=3, **STEP),
    row("regions of f16", "auto | host", project, kind="continuous", dtype="f16", page_size=4, spare=3, **STEP),
    row("fa3 of f32", "host | auto", project, kind="fa3", dtype="f32", page_size=4, spare=3, **STEP),
    row("one KV head of 64, K of 48", "auto | host", project, heads=3, num_heads=1, head_size=64, k=48, dtype="bf16",
        cached=[1, 2], new=[2, 3]),
    row("heads of 24, K of 80", "| host auto", project, heads=2, head_size=24, k=80, dtype="bf16", cached=[1, 2],
        new=[2, 3]),
    row("heads of 7, K of 33", "host auto", project, heads=5, num_heads=1, head_size=7, k=33, dtype="bf16",
        cached=[1, 2], new=[2, 3]),
    row("bias, norms and rotation come before the cache", "host auto", project, bias="bf16", norm=True, turned=32,
        dtype="bf16", head_size=32, **STEP),
    row("bias and rotation in halves", "| auto host", project, bias="bf16", turned=32, dtype="bf16", head_size=32,
        **HALVES, **STEP),
    row("scales of a head", "auto | host", project, **OF_SCALES, head_size=32, turned=32, norm=True, **STEP),
    row("scales of granules of 16", "host | auto", project, dtype="f8e4m3", scale_dtype="bf16", head_size=32,
        granularity=16, **STEP),
    row("8 bits without scales saturate", "host auto", project, dtype="f8e4m3", element="f16", bias=700, **STEP),
    *(row(f"products of 8 bits with scales of a {scaling}", kernels, project, scaling=scaling, k=256, heads=2,
          dtype="bf16", **THREE)
      for scaling, kernels in (("tensor", "host | auto"), ("row", "auto | host"), ("block", "host auto"))),
    row("latent rows follow the queries", "host auto", project, heads=3, query_size=24, dtype="bf16", head_size=40,
        **MLA, **STEP),
    row("no queries", "host auto", project, heads=0, dtype="bf16", **STEP),
    row("no queries and no values", "host auto", project, heads=0, values=False, dtype="bf16", **STEP),
    row("an indexer's bands", "host auto", project_with_index, dtype="bf16", **STEP),
    row("a padded batch", "host auto", project_padded, dtype="bf16", cached=[5, 0, 33], new=[3, 0, 4]),
    row("a padded batch, rotated", "auto | host", project_padded, turned=16, dtype="bf16", cached=[5, 0, 33],
        new=[3, 0, 4]),
    *(row(f"no tokens{how}", kernels, project, schedule=schedule, dtype="bf16", **NOBODY)
      for how, schedule, kernels in (("", {}, "host auto"), (", tiles", TILE, "| auto"), (", few", SMALL, "auto"))),
    *(row(f"every epilogue of {schedule['kind']}: {kind}", kernels, project, schedule=schedule, bias="f32", k=256,
          spare=2, kind=kind, head_size=64, **given, **STEP)
      for schedule in (TILE, SMALL) for kind, kernels, given in (
          ("paged", "| auto", {"heads": 3, "dtype": "bf16"}),
          ("continuous", "| auto" if schedule is TILE else "auto",
           {"heads": 2, "dtype": "f16", "turned": 32, "interleaved": False}),
          ("fa3", "auto" if schedule is TILE else "| auto",
           {"heads": 2, "dtype": "bf16", "turned": 32, "norm": True}))),
    *(row(f"{schedule['kind']} quantizes", kernels, project, schedule=schedule, heads=2, turned=64, **OF_SCALES,
          head_size=64, granularity=32, **THREE) for schedule, kernels in ((TILE, "auto"), (SMALL, "| auto"))),
    *(row(f"{schedule['kind']} of 8 bits has scales of a {scaling}", kernels, project, schedule=schedule, heads=2,
          scaling=scaling, k=256, **WIDE, **THREE)
      for schedule, scaling, kernels in ((TILE, "row", "| auto"), (TILE, "block", "auto"), (SMALL, "row", "auto"),
                                         (SMALL, "block", "| auto"), (WHOLE, "tensor", "| auto"),
                                         (WHOLE, "row", "| auto"))),
    *(row(f"tiles follow one another while heads are written{how}", kernels, project, heads=2, k=512, spare=2,
          schedule={**TILE, "columns": 128}, cached=[5, 0, 33, 16], new=[3, 161, 0, 109], **WIDE, **given)
      for how, kernels, given in (("", "| auto", {"bias": "f32"}), (", 8 bits", "auto", {"scaling": "row"}))),
    row("tiles of no whole heads", "auto", project, heads=2, bias="f32", turned=64, schedule=TILE, dtype="bf16",
        head_size=80, **STEP),
    row("tiles of latent rows", "| auto", project, heads=3, query_size=48, spare=1, schedule=TILE, dtype="bf16",
        head_size=96, **MLA, **STEP),
    row("tiles of up to 512 tokens", "| auto", project, heads=2, bias="f32", turned=64,
        schedule={**TILE, "max_tokens": 512}, **WIDE, **STEP),
    *(row(f"tiles of {rows} rows and {columns} columns", kernels, project, heads=2, k=192, spare=2,
          schedule={**TILE, "max_tokens": 128, "rows": rows, "columns": columns}, cached=[5, 0, 33, 16],
          new=[3, 61, 0, 9], **WIDE)
      for rows, columns, kernels in ((64, 48, "auto"), (128, 96, "| auto"), (64, 64, "| auto"), (64, 192, "| auto"))),
    *(row(f"a weight that is promised to be there: {name}", kernels, project, heads=2, k=192, spare=2,
          schedule={**entries, "max_tokens": most, "early": True}, cached=[5, 0, 33, 16], new=new, **WIDE)
      for name, kernels, entries, new, most in (
          ("few", "auto", {"kind": "stream_k"}, [3, 9, 0, 9], 64),
          ("few, several blocks", "| auto", {"kind": "stream_k"}, [3, 61, 0, 9], 128),
          ("tiles", "| auto", {"kind": "tile", "rows": 64, "columns": 80}, [3, 9, 0, 9], 64),
          ("whole", "| auto", {**WHOLE}, [3, 2, 0, 9], 16))),
    *(row(f"mma.sync through memory, {dtype}", kernels, project, heads=3, k=192, spare=2, bias="f32", schedule=TILE,
          dtype=dtype, head_size=size, **STEP)
      for dtype, size, kernels in (("bf16", 64, "sm_80"), ("f16", 80, "| sm_80"), ("f32", 24, "| sm_80"))),
    *(row(f"mma.sync multiplies 8 bits as bf16, scales of a {scaling}", kernels, project, heads=2, scaling=scaling,
          k=256, schedule=TILE, **WIDE, **THREE)
      for scaling, kernels in (("tensor", "| sm_80 sm_100a"), ("row", "| sm_100a sm_80"), ("block", "sm_80"))),
    row("few tokens by mma.sync, bf16", "sm_80 | sm_100a", project, heads=3, k=160, spare=2, bias="f32",
        schedule={**SMALL, "max_tokens": 32}, **WIDE, **STEP),
    row("few tokens by mma.sync, f16", "sm_100a | sm_80", project, heads=3, k=64, spare=2, bias="f32",
        schedule={**SMALL, "max_tokens": 32}, dtype="f16", head_size=64, **STEP),
    row("few tokens by mma.sync, 8 bits", "| sm_80 sm_100a", project, heads=2, scaling="row", k=256,
        schedule={**SMALL, "max_tokens": 32}, **WIDE, **THREE),
    *(row(f"units that have all of K: {path}, {kind}", kernels, project, heads=3, k=256, spare=2, bias="f32",
          schedule=UNITS[path][1], kind=kind, dtype=dtype, head_size=64, **UNITS[path][0])
      for path, kind, dtype, kernels in (
          ("mma", "fa3", "bf16", "auto"), ("wgmma", "continuous", "f16", "| auto"),
          ("tiles", "paged", "bf16", "| auto"), ("wide", "continuous", "f16", "| auto"))),
    *(row(f"both parts of a pair are in one unit: {path}, {turned} dims", kernels, project, heads=2, k=256, spare=2,
          bias="f32", turned=turned, interleaved=interleaved, schedule=UNITS[path][1], **WIDE, **UNITS[path][0])
      for path, turned, interleaved, kernels in (
          ("mma", 32, False, "| auto"), ("wgmma", 64, True, "auto"), ("tiles", 64, False, "| auto"),
          ("wide", 32, True, "| auto"))),
]  # fmt: skip

# --- projections by weights with scales by groups of K -------------------------------------------------

FORMATS = [
    ("uint4b8", 128, "bf16", {}), ("int4", 32, "f32", {}), ("uint4", 64, "f16", {"minima": True}),
    ("e2m1", 16, "f8e4m3", {"interleaved": True}), ("e2m1", 32, "f8e8m0", {}),
    ("f8e4m3", 32, "f8e8m0", {"interleaved": True}), ("f8e5m2", 16, "bf16", {}), ("i8", 8, "bf16", {"minima": True}),
]  # fmt: skip


def groups(element: str, size: int, scale: str, more: Any = None, own: bool = False) -> dict[str, Any]:
    return {"groups": {"element": element, "size": size, "scale": scale, "more": more or {}, "own": own}, "heads": 2}


FIRST: dict[str, Any] = groups("uint4b8", 64, "bf16")
SOME_TOKENS: dict[str, Any] = {"cached": [5, 0, 33], "new": [3, 0, 4]}
GROUPS = [
    *(row(f"{element} by {size} of {scale}", ("host | auto", "| host auto")[i % 2], project, k=128,
          **groups(element, size, scale, more), **WIDE, **THREE)
      for i, (element, size, scale, more) in enumerate(FORMATS)),
    *(row(f"few tokens read {element} by {size} of {scale} as stored", kernels, project, k=256, schedule=SMALL,
          **groups(element, size, scale, more), dtype=dtype, head_size=64, **THREE)
      for (element, size, scale, more), dtype, kernels in zip(
          FORMATS, ("bf16", "f16") * 4, ("auto | sm_80 sm_100a", "| sm_80 auto", "| auto sm_100a", "sm_100a | auto",
          "sm_80 | auto", "| auto sm_100a", "| sm_80 auto", "auto | sm_80"), strict=True)),
    *(row(f"{element} by {size} of {scale} is converted on its way to wgmma, {most} tokens",
          "auto" if i == 1 else "| auto", project, k=512, schedule={"kind": "stream_k", "max_tokens": most},
          **groups(element, size, scale, more), **WIDE, cached=[5, 0, 33], new=new)
      for i, (element, size, scale, more) in enumerate(FORMATS)
      for most, new in [((64, [3, 0, 50]), (256, [90, 3, 70]))[i % 4 == 2]]),
    row("more tokens than a block has take more blocks", "| auto", project, k=384, schedule={"max_tokens": 128},
        **groups("uint4b8", 32, "bf16"), **WIDE, cached=[5, 0, 33], new=[3, 0, 70]),
    *(row(f"rows have groups of their own: {element}{how}", kernels, project, k=192, schedule=schedule,
          **groups(element, size, scale, {"interleaved": bool(how)}, own=True), **WIDE, **THREE)
      for element, size, scale, how, schedule, kernels in (
          ("e2m1", 16, "f8e4m3", "", {"max_tokens": 16}, "host auto"),
          ("e2m1", 16, "f8e4m3", ", interleaved", {}, "| host auto"),
          ("f8e4m3", 32, "f8e8m0", ", interleaved", {"max_tokens": 16}, "host | auto"),
          ("f8e4m3", 32, "f8e8m0", "", {}, "host | auto"))),
    *(row(f"values are rounded to {dtype}, as tokens are", kernels, project, k=24,
          **groups("int4", 24, "f16", {"minima": True}), dtype=dtype, head_size=64, cached=[5, 0, 33], new=[1, 0, 2])
      for dtype, kernels in (("f32", "host auto"), ("f16", "| host auto"))),
    row("groups of a weight for no tokens", "host auto", project, k=128, schedule={"max_tokens": 16}, **FIRST, **WIDE,
        cached=[5, 0, 33], new=[0, 0, 0]),
    row("groups of a weight for a padded batch", "host auto", project_padded, k=128, schedule={"max_tokens": 16},
        **FIRST, **WIDE, **SOME_TOKENS),
]  # fmt: skip

TABLES: dict[str, list[CacheRow]] = {
    "appends": APPENDS, "rotations": ROTATIONS, "sums": SUMS, "copies": COPIES, "no pages": NO_PAGES,
    "foreign": FOREIGN, "projections": PROJECTIONS, "groups": GROUPS,
}  # fmt: skip
