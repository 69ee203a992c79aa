# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random attention operands of every kind, what each shows read by hand, and one kernel that reads any of them.

The kernel, :func:`survey`, is what a user may write: an argument of type ``kv.MHAOperand`` and the methods of the
interface. The tests of the host, of the PTX interpreter and of a GPU compare its outputs bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.caches import KVCacheMHAOperand, KVCacheScalesMHAOperand, LayoutTensorMHAOperand, RaggedMHAOperand
from kvarn.caches.operands import MHAOperand
from kvarn.dialect import dtypes

from .random_caches import Problem, poison_of, random_problem, random_values

KINDS = (
    "paged", "paged quantized", "continuous", "fa3", "scales", "dense", "dense with lengths", "dense apart",
    "dense with scales", "ragged", "ragged with scales",
)  # fmt: skip
PAGE = 4  # tokens of a page, and of the tile that is populated


@dataclass
class Shown:
    """An operand over NumPy buffers, and what a kernel must find in it.

    Attributes
    ----------
    operand : MHAOperand
    parts : tuple
        The buffers, as the operand's class takes them; ``make`` makes the operand of them again.
    loaded : list of numpy.ndarray
        For each sequence float32 [n, H, D]: what ``load(b, t, h, d)`` gives.
    stored : list of numpy.ndarray
        [n, H, D], or [n, H, G] for scales: what ``block_paged_ptr(b, t, h)`` points at.
    scales : list of numpy.ndarray or None
        float32 [n, H, D]: what ``load_scale(b, t, h, d)`` gives; None where there is no such method.
    rows : list of numpy.ndarray or None
        [n]: ``row_idx(b, t)``.
    facts : tuple of (int or None)
        ``num_kv_rows()``, ``max_context_length()``, ``get_tma_row(5)``, and ``populate(0, 0, 4).get_row(3)``; None for
        what there is not.
    """

    operand: MHAOperand
    make: Any
    parts: tuple[Any, ...]
    loaded: list[np.ndarray]
    stored: list[np.ndarray]
    scales: list[np.ndarray] | None
    rows: list[np.ndarray] | None
    facts: tuple[int | None, ...]


def random_operand(
    rng: np.random.Generator,
    kind: str,
    dtype: Any = "f16",
    *,
    lengths: tuple[int, ...] = (7, 0, 12, 4),
    num_heads: int = 2,
    head_size: int = 16,
    granules: int = 4,
    scale_dtype: Any = "f32",
) -> Shown:
    """An operand of one of ``KINDS`` with sequences of the given lengths; i8 elements where it has scales."""
    if kind in ("paged", "paged quantized", "continuous", "fa3", "scales"):
        return _of_cache(rng, kind, dtype, lengths, num_heads, head_size, granules, scale_dtype)
    return _of_buffer(rng, kind, dtype, lengths, num_heads, head_size, granules, scale_dtype)


def _of_cache(
    rng: np.random.Generator, kind: str, dtype: Any, lengths: tuple[int, ...], num_heads: int, head_size: int,
    granules: int, scale_dtype: Any,
) -> Shown:  # fmt: skip
    quantized = kind in ("paged quantized", "scales")
    granularity = head_size // granules
    problem = random_problem(
        rng, "paged" if quantized else kind, "i8" if quantized else dtype, num_heads=num_heads, head_size=head_size,
        page_size=PAGE, cached=lengths, new=[0] * len(lengths), scale_dtype=scale_dtype if quantized else None,
        granularity=granularity if quantized else None,
    )  # fmt: skip
    c, layer, half = problem.collection, 1, 1
    blocks, table = np.asarray(c.blocks), np.asarray(c.lookup_table).astype(np.int64)
    stored, spread, scales, rows = [], [], [], []
    stride, pages = 1, len(blocks)
    if kind != "fa3":
        stride = int(np.prod(blocks.shape[1:4]))  # rows from one page, or region, to the next
    for b, n in enumerate(lengths):
        t = np.arange(n)
        if kind == "continuous":
            page, slot = np.full(n, table[b]), t
        else:
            page, slot = (table[layer] if kind == "fa3" else table)[b, t // PAGE], t % PAGE
        elements = blocks[half, page, slot] if kind == "fa3" else blocks[page, half, layer, slot]
        stored.append(elements)
        rows.append(page * stride + slot)
        if quantized:
            assert c.scales is not None
            scales.append(np.asarray(c.scales)[page, half, layer, slot])
            spread.append(np.repeat(scales[-1].astype(np.float32), granularity, -1))
    cache = c.get_value_cache(layer)
    first = int(table[layer, 0, 0] if kind == "fa3" else table.reshape(len(table), -1)[0, 0])
    encoded = 5 if kind == "continuous" else 5 // PAGE * stride + 5 % PAGE
    facts = ((pages - 1) * stride + blocks.shape[3], max(lengths), encoded, first * stride + 3)
    if kind == "fa3":
        facts = (None, facts[1], None, None)

    def make(blocks: Any, cache_lengths: Any, lookup_table: Any, *rest: Any) -> MHAOperand:
        moved = type(c)(blocks, cache_lengths, lookup_table, c.max_seq_length, c.max_cache_length, *rest)  # type: ignore[call-arg]
        return (KVCacheScalesMHAOperand if kind == "scales" else KVCacheMHAOperand)(moved.get_value_cache(layer))

    parts = (c.blocks, c.cache_lengths, c.lookup_table)
    if quantized:
        parts = (*parts, c.scales, granularity)
    loaded = [x.astype(np.float32) for x in stored]
    if kind == "scales":
        zeros = [np.zeros_like(s) for s in spread]
        return Shown(KVCacheScalesMHAOperand(cache), make, parts, spread, scales, zeros, rows, facts)
    if quantized:
        loaded = [x * s for x, s in zip(loaded, spread, strict=True)]
    return Shown(
        KVCacheMHAOperand(cache), make, parts, loaded, stored, spread or None, None if kind == "fa3" else rows, facts
    )


def _of_buffer(
    rng: np.random.Generator, kind: str, dtype: Any, lengths: tuple[int, ...], num_heads: int, head_size: int,
    granules: int, scale_dtype: Any,
) -> Shown:  # fmt: skip
    form, _, rest = kind.partition(" ")
    batch, longest = len(lengths), max(lengths) + 1
    counts = np.array(lengths) if form == "ragged" or rest == "with lengths" else np.full(batch, longest)
    quantized = rest == "with scales"
    element = dtypes.of("i8" if quantized else dtype)
    leading = (batch, longest + 3 * (rest == "apart")) if form == "dense" else (2 + sum(lengths) + 3,)
    data = random_values(rng, (*leading, num_heads, head_size), element)
    scales = random_values(rng, (*leading, num_heads, granules), dtypes.of(scale_dtype)) if quantized else None
    starts = np.arange(batch) * leading[1] if form == "dense" else 2 + np.cumsum([0, *lengths])[:-1]
    if form == "dense":
        parts: tuple[Any, ...] = (data[:, :longest], scales)
        if rest == "with lengths":
            # The last one is beyond S, where a kernel stops.
            counts[-1] = longest
            parts = (*parts, np.array([*lengths[:-1], longest + 100], np.uint32))
        make: Any = LayoutTensorMHAOperand
        facts: tuple[int | None, ...] = ((batch - 1) * leading[1] + longest, longest, 5, 3)
    else:
        offsets = np.array([*starts, starts[-1] + lengths[-1]], np.uint32)
        parts, make, facts = (data, offsets, scales), RaggedMHAOperand, (leading[0], None, 5, int(starts[0]) + 3)
    flat = data.reshape(-1, num_heads, head_size)
    rows = [start + np.arange(n) for start, n in zip(starts, counts, strict=True)]
    stored = [flat[r] for r in rows]
    loaded = [x.astype(np.float32) for x in stored]
    shown = [np.zeros_like(x) for x in loaded]
    if scales is not None:
        spread = [np.repeat(scales.reshape(-1, num_heads, granules)[r], head_size // granules, -1) for r in rows]
        loaded = [x * s.astype(np.float32) for x, s in zip(loaded, spread, strict=True)]
        if form == "dense":
            shown = [s.astype(np.float32) for s in spread]
    return Shown(make(*parts), make, parts, loaded, stored, shown, rows, facts)


# --- the tokens of a cache, in buffers -------------------------------------------------------------------

Parts = list[tuple[Any, tuple[Any, ...]]]  # the class of an operand and what it takes: of keys, then of values


def _stored(cache: Any, b: int, n: int) -> list[np.ndarray]:
    """Elements [n, H, D] of a sequence's first tokens, and scales [n, H, G] where there are."""
    t, h = np.arange(n)[:, None, None], np.arange(cache.num_heads)[:, None]
    if cache.scale_dtype is None:
        return [np.asarray(cache.load(b, h, t, np.arange(cache.head_size)))]
    granules = np.arange(cache.head_dim_granularity) * cache.quantization_granularity
    return [np.asarray(cache.load_raw(b, h, t, np.arange(cache.head_size))),
            np.asarray(cache.load_scale(b, h, t, granules))]  # fmt: skip


def _sequences(problem: Problem, layer: int) -> list[list[list[np.ndarray]]]:
    """Of keys and of values, of each sequence: its cached and new tokens."""
    totals = problem.cached + problem.new
    return [[_stored(cache, b, int(n)) for b, n in enumerate(totals)] for cache in problem.caches(layer)]


def cache_parts(problem: Problem, layer: int) -> Parts:
    """The caches themselves, of NumPy buffers."""
    return [(KVCacheMHAOperand, (cache,)) for cache in problem.caches(layer)]


def dense_parts(problem: Problem, layer: int) -> Parts:
    """The tokens in [B, S, H, D] buffers that have room for more, which is poison, with lengths."""
    lengths, found = (problem.cached + problem.new).astype(np.uint32), []
    for sequences in _sequences(problem, layer):
        buffers: list[Any] = []
        for i, first in enumerate(sequences[0]):
            shape = (len(lengths), int(lengths.max()) + 5, *first.shape[1:])
            buffer = np.full(shape, poison_of(dtypes.of(first.dtype)), first.dtype)
            for b, parts in enumerate(sequences):
                buffer[b, : len(parts[i])] = parts[i]
            buffers.append(buffer)
        found.append((LayoutTensorMHAOperand, (*buffers, *[None] * (2 - len(buffers)), lengths)))
    return found


def ragged_parts(problem: Problem, layer: int) -> Parts:
    """The tokens in [tokens, H, D] buffers, with poisoned rows of nobody before and after."""
    offsets, found = (np.cumsum([0, *(problem.cached + problem.new)]) + 3).astype(np.uint32), []
    for sequences in _sequences(problem, layer):
        buffers = []
        for i, first in enumerate(sequences[0]):
            poison = np.full((3, *first.shape[1:]), poison_of(dtypes.of(first.dtype)), first.dtype)
            buffers.append(np.concatenate([poison, *(parts[i] for parts in sequences), poison]))
        found.append((RaggedMHAOperand, (buffers[0], offsets, *buffers[1:])))
    return found


# --- one kernel for all of them ------------------------------------------------------------------------


@kv.kernel
def survey(
    x: kv.MHAOperand, loaded: kv.Buffer[kv.f32, 4], wide: kv.Buffer[kv.f32, 4], pointed: kv.Buffer[kv.f32, 4],
    scales: kv.Buffer[kv.f32, 4], rows: kv.Buffer[kv.i32, 2], lengths: kv.Buffer[kv.i32, 1],
    facts: kv.Buffer[kv.i32, 1],
):  # fmt: skip
    """A block a (sequence, head), its threads over the tokens."""
    b, h = kv.block_id.x, kv.block_id.y
    first = (h == 0) & (kv.thread_id.x == 0)
    has_rows = x.kind != "fa3"
    n = x.cache_length(b)
    for t in range(kv.thread_id.x, n, kv.block_dim.x):
        page = x.page(b, t)
        for d in range(x.head_size):
            loaded[b, t, h, d] = kv.f32(x.load(b, t, h, d))
            if x.scale_dtype is not None or x.kind in ("dense", "ragged"):
                scales[b, t, h, d] = kv.f32(x.load_scale(b, t, h, d, page=page))
        width = 1 if x.kind == "scales" else 4
        for d in range(0, x.head_size, width):
            wide.store(b, t, h, d, value=kv.f32(x.load(b, t, h, d, width=width, page=page)))
        elements = x.head_dim_granularity if x.kind == "scales" else x.head_size
        at = x.block_paged_ptr(b, t, h)
        for d in range(elements):
            pointed[b, t, h, d] = kv.f32((at + d * x.dtype.itemsize).load(x.dtype))
        if has_rows and h == 0:
            rows[b, t] = kv.i32(x.row_idx(b, t))
    if first:
        lengths[b] = n
        if has_rows and b == 0:
            facts[0] = kv.i32(x.num_kv_rows())
            facts[2] = x.get_tma_row(5)
            facts[3] = kv.i32(x.populate(b, 0, PAGE).get_row(PAGE - 1))
        if x.kind != "ragged" and b == 0:
            facts[1] = x.max_context_length()


SENTINEL = -77


def outputs(shown: Shown) -> list[np.ndarray]:
    """New outputs of :func:`survey`, the sentinel in all of them."""
    spec = shown.operand.spec.cache
    shape = (len(shown.loaded), max(len(x) for x in shown.loaded) + 1, spec.num_heads, spec.head_size)
    values = [np.full(shape, SENTINEL, np.float32) for _ in range(4)]
    return [*values, *(np.full(s, SENTINEL, np.int32) for s in (shape[:2], shape[:1], (4,)))]


def grid(shown: Shown) -> tuple[int, int]:
    return len(shown.loaded), shown.operand.spec.cache.num_heads


def check_survey(shown: Shown, found: list[np.ndarray]) -> None:
    """The outputs of :func:`survey` are, bit by bit, what the operand shows, and nothing else was written."""
    wanted = outputs(shown)
    for b, values in enumerate(shown.loaded):
        n = len(values)
        wanted[0][b, :n] = wanted[1][b, :n] = values
        wanted[2][b, :n, :, : shown.stored[b].shape[-1]] = shown.stored[b].astype(np.float32)
        if shown.scales is not None:
            wanted[3][b, :n] = shown.scales[b]
        if shown.rows is not None:
            wanted[4][b, :n] = shown.rows[b]
        wanted[5][b] = n
    for i, fact in enumerate(shown.facts):
        if fact is not None:
            wanted[6][i] = fact
    names = ("loaded", "loaded in vectors", "pointed at", "scales", "rows", "lengths", "facts")
    for name, got, want in zip(names, found, wanted, strict=True):
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32), err_msg=name)
