# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Robustness cases of attention, each a rule for every kernel: on the host, in the PTX interpreter, on a GPU.

A case takes a :class:`Runner`, which says where a kind of kernel runs, and the kind: ``"auto"`` for what the operation
chooses, or a schedule's kind. Outputs begin as 0xDEADBEEF; pages are distinct and in random order unless the case is
about their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect import dtypes

from . import attention as reference
from .kinds import schedule_for
from .places import Place, bits
from .random_caches import Problem, clone, random_query, random_values, stored_problem

TOLERANCE = {"f32": 2e-5, "f16": 4e-3, "bf16": 2e-2}


class Runner:
    """Runs attention where a kind of kernel runs.

    Parameters
    ----------
    place_of : callable
        From a kind of kernel to its place.
    """

    shape: dict[str, Any] = {}  # what problems need besides what a case says

    def __init__(self, place_of: Callable[[str], Place]) -> None:
        self.place_of = place_of

    def value_size(self, head_size: int) -> int:
        """Columns of an output."""
        return head_size

    def launch(self, *operands: Any, **options: Any) -> None:
        """The operation; operands are those up to the offsets."""
        kv.ops.attention(*operands, **options)

    def reference(self, problem: Problem, query: np.ndarray, layer: int, **options: Any) -> np.ndarray:
        """What the output should be, float64."""
        return reference.attention(problem.collection, layer, query, problem.row_offsets, **options)[0]

    def finish(self, place: Place) -> None:
        """Called when an operation was launched; a GPU's runner waits here, for so long as a launch may take."""

    def __call__(
        self, kind: str, collection: Any, query: np.ndarray, offsets: np.ndarray, *, layer: int = 1, **options: Any
    ) -> np.ndarray:
        """The output, of a buffer that was 0xDEADBEEF."""
        place, schedule = self.place_of(kind), None
        if kind != "auto":
            most = int(np.diff(offsets.astype(np.int64)).max(initial=2))
            schedule = {**schedule_for(kind), **({"max_queries": most} if kind == "decode" else {})}
        out = place.put(sentinel(query[..., : self.value_size(query.shape[2])]))
        given = {n: place.put(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
        operands = place.collection(collection), layer, place.put(query), place.put(offsets)
        with place.active():
            self.launch(*operands, out=out, schedule=schedule, **given)
        self.finish(place)
        return place.get(out)


class LatentRunner(Runner):
    """Runs attention over latent rows, whose values are all but their last 32 columns, or 64 of 576."""

    shape = {"is_mla": True}

    def value_size(self, head_size: int) -> int:
        return head_size - (64 if head_size == 576 else 32)

    def launch(self, *operands: Any, **options: Any) -> None:
        kv.ops.mla_attention(*operands, value_size=self.value_size(operands[0].head_size), **options)

    def reference(self, problem: Problem, query: np.ndarray, layer: int, **options: Any) -> np.ndarray:
        return reference.mla_attention(
            problem.collection, layer, query, problem.row_offsets, value_size=self.value_size(query.shape[2]), **options
        )[0]


def sentinel(like: np.ndarray) -> np.ndarray:
    """An array of 0xDEADBEEF, byte by byte."""
    words = np.full(-(-like.nbytes // 4), int.from_bytes(bytes.fromhex("DEADBEEF"), "little"), "<u4")
    return words.view(np.uint8)[: like.nbytes].view(like.dtype).reshape(like.shape)


def problem_of(seed: int, dtype: str = "bf16", **shape: Any) -> tuple[np.random.Generator, Problem]:
    """A random paged problem whose new tokens are stored too."""
    return stored_problem(seed, "paged", dtype, **shape)


queries = random_query


def assert_finite(got: np.ndarray) -> None:
    """No NaN and no infinity, or the place of the first."""
    bad = np.argwhere(~np.isfinite(got.astype(np.float64)))
    assert not len(bad), f"{got[tuple(bad[0])]} at {bad[0]} of {got.shape}"


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    wrong = np.argwhere(bits(got) != bits(want))
    assert not len(wrong), f"{got[tuple(wrong[0])]} is not {want[tuple(wrong[0])]} at {wrong[0]} of {got.shape}"


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float | None = None) -> None:
    assert_finite(got)
    tolerance = tolerance or TOLERANCE[dtypes.of(got.dtype).name]
    biggest = max(1.0, np.abs(want).max(initial=0))
    np.testing.assert_allclose(got.astype(np.float64) / biggest, want / biggest, rtol=tolerance, atol=tolerance)


def check_against_reference(
    run: Runner, kind: str, problem: Problem, query: np.ndarray, layer: int = 1, **options: Any
) -> np.ndarray:
    """The output, which is the model's."""
    got = run(kind, problem.collection, query, problem.row_offsets, layer=layer, **options)
    spans = {"window": "sliding_window", "chunk": "chunked_causal"}  # what these make of the causal mask
    mask = options.get("mask", next((spans[name] for name in options if name in spans), "causal"))
    assert_close(got, run.reference(problem, query, layer, **{**options, "mask": mask}))
    return got


# --- what no query may see -------------------------------------------------------------------------

BATCHES = {
    "one prefill": ([0], [40]),
    "four prefills": ([0, 3, 40, 2], [30, 1, 7, 20]),
    "decode of 512": ([512, 77], [1, 1]),
    "short": ([0, 21, 2], [9, 1, 4]),
}


def infinities(
    run: Runner, kind: str, head_size: int, page_size: int, options: dict[str, Any], batches: Sequence[str],
    seeds: Sequence[int] = (0, 1),
) -> None:  # fmt: skip
    """Everything that holds no token is +inf: unreferenced pages, the page that pads the table, the ends of pages."""
    for name in batches:
        cached, new = BATCHES[name]
        for seed in seeds:
            rng, problem = problem_of(
                seed, cached=cached, new=new, head_size=head_size, page_size=page_size, num_heads=1, poison=np.inf,
                **run.shape,
            )  # fmt: skip
            check_against_reference(run, kind, problem, queries(rng, problem, 4), **options)


def poisoned_tails(run: Runner, kind: str, dtype: str, head_size: int, new: Sequence[int]) -> None:
    """Slots past a sequence's last token may hold anything: the output is that of a clean pool, bit for bit."""
    found = []
    for poison in (0.0, 5.0, np.nan):
        rng, problem = problem_of(
            19, dtype, cached=[36, 99, 0], new=new, head_size=head_size, num_heads=1, poison=poison, **run.shape
        )
        found.append(run(kind, problem.collection, queries(rng, problem, 4), problem.row_offsets))
    assert_finite(found[0])
    for other in found[1:]:
        assert_same_bits(other, found[0])


def garbage_queries(
    run: Runner, kind: str, dtype: str, group: int, widths: Sequence[int], seeds: Sequence[int], head_size: int = 64
) -> None:
    """Speculative rows of NaN, and of finite numbers of any size: the first row of each sequence keeps its bits."""
    for width in widths:
        for seed in seeds:
            rng, problem = problem_of(
                100 * width + seed, dtype, cached=rng_lengths(seed), new=[width] * 3, head_size=head_size, num_heads=1,
                **run.shape,
            )  # fmt: skip
            query = queries(rng, problem, group)
            clean = run(kind, problem.collection, query, problem.row_offsets)
            assert_finite(clean)
            for rest in (np.nan, 1e19):
                garbage = query.copy()
                garbage.reshape(3, width, group, head_size)[:, 1:] = rest
                got = run(kind, problem.collection, garbage, problem.row_offsets)
                assert_same_bits(got[::width], clean[::width])
                if np.isnan(rest):
                    others = got.reshape(3, width, -1)[:, 1:].astype(np.float32)
                    assert np.isnan(others).all(), "NaN asked, NaN answered"


def rng_lengths(seed: int) -> list[int]:
    """Cached tokens of three sequences, one of them short."""
    return [int(n) for n in np.random.default_rng(seed).integers((1, 0, 60), (200, 8, 140))]


def masked_keys(run: Runner, kind: str, cached: int, new: int) -> None:
    """Keys that are NaN and finite values of any size, both of later tokens, do not show in earlier rows."""
    rng, problem = problem_of(21, cached=[cached], new=[new], head_size=64, num_heads=1)
    query, row = queries(rng, problem, 4), new // 2
    clean = run(kind, problem.collection, query, problem.row_offsets)
    changed = clone(problem.collection)
    later = np.arange(cached + row + 1, cached + new)[:, None, None]
    shape = (len(later), 1, 64)
    for cache, fill in ((changed.get_key_cache(1), np.nan), (changed.get_value_cache(1), 3e38)):
        cache.store(0, np.zeros((1, 1), int), later, np.arange(64), np.full(shape, fill, cache.dtype.numpy))
    got = run(kind, changed, query, problem.row_offsets)
    assert_same_bits(got[: row + 1], clean[: row + 1])


def seen_infinities(run: Runner, kind: str, cached: int, new: int, spread: int) -> None:
    """A value that is not finite reaches the rows that see it, and at most the others of a tile of ``spread`` rows."""
    rng, problem = problem_of(22, cached=[cached], new=[new], head_size=64, num_heads=1)
    query = queries(rng, problem, 4)
    clean = run(kind, problem.collection, query, problem.row_offsets)
    changed, last = clone(problem.collection), cached + new - 1
    cache = changed.get_value_cache(1)
    cache.store(0, 0, last, np.arange(64), np.full(64, np.nan, cache.dtype.numpy))
    got = run(kind, changed, query, problem.row_offsets)
    assert np.isnan(got[-1].astype(np.float32)).all()
    apart = new - 1 if spread == 1 else (new - 1) // spread * spread
    assert_same_bits(got[:apart], clean[:apart])


# --- what must not depend on how the work comes ----------------------------------------------------


def nan_queries(run: Runner, kind: str, head_size: int = 64) -> None:
    """The log-sum-exp of a row that is NaN is NaN: minus infinity would make a merge take it for a row without keys."""
    rng, problem = problem_of(3, cached=[40, 200], new=[2, 2], head_size=head_size, num_heads=1)
    query = queries(rng, problem, 4)
    query[1] = np.nan
    place = run.place_of(kind)
    lse = place.put(np.zeros(query.shape[:2], np.float32))
    out = run(kind, problem.collection, query, problem.row_offsets, lse=lse, return_lse=True)
    for found in (out.astype(np.float64), place.get(lse)):
        assert np.isnan(found[1]).all()
        assert np.isfinite(found[[0, 2, 3]]).all()


def prefix_hit(run: Runner, kind: str, length: int, group: int, head_size: int = 64) -> None:
    """Queries behind cached pages give what they give in a run from the start."""
    page = 256
    rng, problem = problem_of(
        17, cached=[0], new=[length], page_size=page, num_heads=1, head_size=head_size, num_layers=2
    )
    query, c = queries(rng, problem, group), problem.collection
    cold = run(kind, c, query, problem.row_offsets).astype(np.float64)
    hit = PagedKVCacheCollection(c.blocks, np.array([page], np.uint32), c.lookup_table, length - page, length)
    offsets = np.array([0, length - page], np.uint32)
    warm = run(kind, hit, np.ascontiguousarray(query[page:]), offsets).astype(np.float64)
    assert_finite(cold)
    cold = cold[page:]
    assert np.abs(warm - cold).max() <= 2e-2
    large = np.abs(cold) > 0.1
    assert (np.abs(warm - cold)[large] <= 4e-2 * np.abs(cold[large])).all()


def reversed_pages(run: Runner, kind: str, keys: int, dtype: str = "bf16", head_size: int = 64) -> None:
    """Pages in order and in reverse: the same bits."""
    page = 16
    rng, problem = problem_of(
        18, dtype, cached=[keys - 1], new=[1], page_size=page, num_heads=1, head_size=head_size, spare_pages=0,
        **run.shape,
    )  # fmt: skip
    query, c = queries(rng, problem, 4), problem.collection
    used = -(-keys // page)
    blocks, table = np.asarray(c.blocks), np.asarray(c.lookup_table)
    outputs = []
    for order in (np.arange(used), np.arange(used)[::-1]):
        moved, renamed = blocks.copy(), table.copy()
        moved[order], renamed[0, :used] = blocks[table[0, :used]], order
        collection = PagedKVCacheCollection(moved, c.cache_lengths, renamed, 1, keys)
        outputs.append(run(kind, collection, query, problem.row_offsets))
    assert_finite(outputs[0])
    assert_same_bits(outputs[1], outputs[0])
    assert_close(outputs[0], run.reference(problem, query, 1))


def chunked_prefill(run: Runner, kind: str, head_size: int = 64) -> None:
    """Prompts whose first part is cached beside decodes: as all at once."""
    whole, new = np.array([100, 200, 300, 400]), np.array([50, 100, 150, 100])
    rng, problem = problem_of(21, cached=[0] * 4, new=whole, head_size=head_size, num_heads=2)
    query, c = queries(rng, problem, 4), problem.collection
    once = run(kind, c, query, problem.row_offsets)
    rows = np.concatenate([np.arange(end - n, end) for end, n in zip(problem.row_offsets[1:], new, strict=True)])
    parts = PagedKVCacheCollection(c.blocks, (whole - new).astype(np.uint32), c.lookup_table, 150, 400)
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.uint32)
    got = run(kind, parts, np.ascontiguousarray(query[rows]), offsets)
    assert_finite(once)
    np.testing.assert_allclose(got.astype(np.float64), once[rows].astype(np.float64), rtol=1e-2, atol=1e-3)


def large_batch(run: Runner, kind: str, head_size: int = 64) -> None:
    """230 decodes and 40 prefills over a pool of 647 pages of 256."""
    rng = np.random.default_rng(22)
    pages = np.concatenate([np.full(230, 2), np.full(40, 2)])
    pages[rng.permutation(270)[:100]] += 1
    new = np.concatenate([np.ones(230, int), rng.integers(2, 60, 40)])
    totals = (pages - 1) * 256 + rng.integers(60, 257, 270)
    assert pages.sum() == 640
    rng, problem = problem_of(
        22, cached=totals - new, new=new, page_size=256, head_size=head_size, num_heads=1, num_layers=1, spare_pages=6
    )
    assert problem.collection.num_blocks == 647
    check_against_reference(run, kind, problem, queries(rng, problem, 4), layer=0)


def no_rows(run: Runner, kind: str, head_size: int = 64) -> None:
    """Rows of no sequence are not written: none at all, empty ones first, last and in the middle."""
    batches = [([], [], 5), ([9], [0], 3), ([4, 0, 30], [0, 0, 0], 2), ([3, 0, 40, 7, 0], [0, 0, 2, 0, 0], 4)]
    for cached, new, spare in batches:
        rng, problem = problem_of(23, cached=cached, new=new, head_size=head_size, num_heads=1)
        query = random_values(rng, (problem.tokens + spare, 4, head_size), problem.collection.dtype)
        got = run(kind, problem.collection, query, problem.row_offsets)
        assert_same_bits(got[problem.tokens :], sentinel(got)[problem.tokens :])
        if problem.tokens:
            want, _ = reference.attention(problem.collection, 1, query[: problem.tokens], problem.row_offsets)
            assert_close(got[: problem.tokens], want)
        empty = run(kind, problem.collection, query[:0], np.zeros(len(cached) + 1, np.uint32))
        assert empty.shape == (0, 4, head_size)


# --- models whose layers differ --------------------------------------------------------------------


def alternating_layers(run: Runner, kinds: Sequence[str], new: Sequence[int], sinks: bool = True) -> None:
    """Local layers (head size 256, four heads, a window of 1024) and global ones (512, one head), by turns.

    The pools differ in page size too; ``kinds`` are the kernels of the local and the global layers.
    """
    lengths = {"cached": [1100, 600, 0], "new": new}
    shapes = (
        {"head_size": 256, "num_heads": 4, "page_size": 64, **lengths},
        {"head_size": 512, "num_heads": 1, "page_size": 128, **lengths},
    )
    options: tuple[dict[str, Any], ...] = ({"window": 1024}, {})
    problems = [problem_of(24 + i, **shape) for i, shape in enumerate(shapes)]
    for layer in (0, 1):
        for which in (0, 1):
            rng, problem = problems[which]
            query = queries(rng, problem, 8)
            given = dict(options[which])
            if sinks:
                given["sinks"] = rng.standard_normal(8).astype(np.float32)
            check_against_reference(run, kinds[which], problem, query, layer, **given)
