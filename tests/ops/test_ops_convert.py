# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.ops.convert to and from the layouts of FlashInfer and vLLM, against NumPy transposes, on the host and in GPU code.

Tables are permuted, sequences ragged, and every byte of both sides is compared.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from reference import model
from reference.places import Place, assert_close, assert_same, bits, near
from reference.random_caches import clone, poison_of, random_problem, random_values

import kvarn as kv
from kvarn.caches import ForeignPages, PagedKVCache
from kvarn.dialect import dtypes

LENGTHS = [37, 0, 3, 16]
HEADS, SIZE, PAGE = 2, 16, 8
# How each layout stores pages [2, N, P, H, D], and how a test gets at that again: both by plain NumPy.
LAYOUTS: dict[str, tuple[str, str, Any]] = {
    "flashinfer NHD": ("flashinfer", "NHD", (1, 0, 2, 3, 4)),
    "flashinfer HND": ("flashinfer", "HND", (1, 0, 3, 2, 4)),
    "vllm NHD": ("vllm", "NHD", (0, 1, 2, 3, 4)),
    "vllm HND": ("vllm", "HND", (0, 1, 3, 2, 4)),
    "pair NHD": ("flashinfer", "NHD", None),
    "pair HND": ("vllm", "HND", None),
}
DTYPES = ("f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i8", "i16", "i32")


class Pages:
    """Pages of one layer in a layout: a buffer of our own, in place, and its logical content [2, N, P, H, D]."""

    def __init__(self, place: Place, layout: str, logical: np.ndarray, lengths: Any, table: np.ndarray) -> None:
        self.place, (library, order, self.axes) = place, LAYOUTS[layout]
        if self.axes is None:
            halves = [half.transpose(0, 2, 1, 3) if order == "HND" else half for half in logical]
            self.data: Any = tuple(place.put(np.ascontiguousarray(half)) for half in halves)
        else:
            self.data = place.put(np.ascontiguousarray(logical.transpose(self.axes)))
        self.order = order
        given = [place.put(np.asarray(x, np.int32)) for x in (lengths, table)]
        self.pages = getattr(ForeignPages, library)(self.data, *given, layout=order)

    def logical(self) -> np.ndarray:
        """What is stored now, [2, N, P, H, D]."""
        if self.axes is not None:
            return self.place.get(self.data).transpose(np.argsort(self.axes))
        halves = [self.place.get(half) for half in self.data]
        return np.stack([half.transpose(0, 2, 1, 3) if self.order == "HND" else half for half in halves])


def scattered(rng: Any, page: int = PAGE) -> tuple[np.ndarray, int]:
    """A table of distinct pages in random order for LENGTHS, and the count of pages; some belong to no one."""
    counts = [-(-n // page) for n in LENGTHS]
    pages = sum(counts) + 4
    order = iter(rng.permutation(pages).tolist())
    table = np.full((len(LENGTHS), max(counts) + 1), -1, np.int32)
    for b, count in enumerate(counts):
        table[b, :count] = [next(order) for _ in range(count)]
    return table, pages


def tokens_of(logical: np.ndarray, table: np.ndarray, half: int, page: int = PAGE) -> list[np.ndarray]:
    """The cached tokens of each sequence [n, H, D], by plain indexing."""
    found = []
    for b, n in enumerate(LENGTHS):
        t = np.arange(n)
        found.append(logical[half, table[b, t // page], t % page])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_another_library_become_a_cache(place, layout, dtype):
    rng, chosen = np.random.default_rng(1), dtypes.of(dtype)
    table, count = scattered(rng)
    logical = random_values(rng, (2, count, PAGE, HEADS, SIZE), chosen)
    pages = Pages(place, layout, logical, LENGTHS, table)
    problem = random_problem(rng, "paged", dtype, page_size=16, cached=LENGTHS, new=[0] * 4)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    for half, name in enumerate(("key", "value")):
        kv.ops.convert(getattr(pages.pages, name), getattr(found, f"get_{name}_cache")(1))
        target = getattr(expected, f"get_{name}_cache")(1)
        for b, rows in enumerate(tokens_of(logical, table, half)):
            model.write(target, np.full(len(rows), b), np.arange(len(rows)), rows)
    assert_same(place, found, expected)  # layer 0 too
    np.testing.assert_array_equal(bits(pages.logical()), bits(logical))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_becomes_pages_of_another_library(place, layout, dtype):
    rng, chosen = np.random.default_rng(2), dtypes.of(dtype)
    table, count = scattered(rng)
    logical = np.full((2, count, PAGE, HEADS, SIZE), poison_of(chosen), chosen.numpy)
    pages = Pages(place, layout, logical, [0] * 4, table)  # the destination's own lengths are not read
    problem = random_problem(rng, "paged", dtype, page_size=16, cached=LENGTHS, new=[0] * 4)
    found = place.collection(problem.collection)
    expected = logical.copy()
    for half, name in enumerate(("key", "value")):
        kv.ops.convert(getattr(found, f"get_{name}_cache")(1), getattr(pages.pages, name))
        source = getattr(problem.collection, f"get_{name}_cache")(1)
        for b, n in enumerate(LENGTHS):
            t = np.arange(n)
            rows = model.gather_rows(source, t[None], [0] * (b + 1) + [1] * (4 - b))[0]
            expected[half, table[b, t // PAGE], t % PAGE] = rows
    np.testing.assert_array_equal(bits(pages.logical()), bits(expected))
    assert_same(place, found, problem.collection)


@pytest.mark.parametrize("layout", ["flashinfer HND", "vllm NHD", "pair HND"])
@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "continuous", "dtype": "f16"},
        {"kind": "fa3", "dtype": "bf16", "page_size": 4},
        {"kind": "paged", "dtype": "f8e4m3", "scale_dtype": "f32", "granularity": 8},
        {"kind": "paged", "dtype": "i8", "scale_dtype": "f16", "granularity": 16},
    ],
    ids=["continuous", "fa3", "fp8", "int8"],
)
def test_every_kind_of_cache_converts_to_and_from_pages(place, layout, kind):
    rng = np.random.default_rng(3)
    table, count = scattered(rng)
    logical = random_values(rng, (2, count, PAGE, HEADS, SIZE), dtypes.f32)
    pages = Pages(place, layout, logical, LENGTHS, table)
    problem = random_problem(rng, **kind, cached=LENGTHS, new=[0] * 4)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    kv.ops.convert(pages.pages.value, found.get_key_cache(1))
    target = expected.get_key_cache(1)
    for b, rows in enumerate(tokens_of(logical, table, 1)):
        sequence, t = np.full(len(rows), b), np.arange(len(rows))
        if target.spec.quantized:
            stored, scales = model.quantize(rows, target.spec)
            model.write_scales(target, sequence, t, scales)
        else:
            stored = model.as_storage(rows, target.spec)
        model.write(target, sequence, t, stored)
    assert_close(place, found, expected, most=0.001)
    kv.ops.convert(found.get_key_cache(1), pages.pages.key)
    after = logical.copy()
    for b, n in enumerate(LENGTHS):
        t = np.arange(n)
        after[0, table[b, t // PAGE], t % PAGE] = model.read(expected.get_key_cache(1), b, t) if n else 0
    near(pages.logical(), after, most=0.001)


@pytest.mark.parametrize(
    ("a", "b"), [("flashinfer HND", "vllm NHD"), ("vllm HND", "pair NHD"), ("pair HND", "flashinfer NHD")]
)
@pytest.mark.parametrize(
    ("source", "target"), [("bf16", "bf16"), ("f16", "f32"), ("f32", "f8e4m3"), ("f8e5m2", "bf16")]
)
def test_pages_become_pages(place, a, b, source, target):
    """From library to library: other page sizes, other tables, other dtypes."""
    rng = np.random.default_rng(4)
    (table, count), (other, other_count) = scattered(rng), scattered(rng, 4)
    first = random_values(rng, (2, count, PAGE, HEADS, SIZE), dtypes.of(source))
    second = random_values(rng, (2, other_count, 4, HEADS, SIZE), dtypes.of(target))
    left, right = Pages(place, a, first, LENGTHS, table), Pages(place, b, second, LENGTHS, other)
    kv.ops.convert(left.pages.key, right.pages.value)
    expected = second.copy()
    for n, rows in enumerate(tokens_of(first, table, 0)):
        t = np.arange(len(rows))
        expected[1, other[n, t // 4], t % 4] = kv.caches.saturating_cast(rows, dtypes.of(target))
    np.testing.assert_array_equal(bits(right.logical()), bits(expected))
    np.testing.assert_array_equal(bits(left.logical()), bits(first))


@pytest.mark.parametrize("size", [1, 7, 80, 128])
def test_any_head_size_and_alignment(place, size):
    """Slices of one buffer for all layers: the other layers stay as they are."""
    rng = np.random.default_rng(5)
    table, count = scattered(rng)
    stack = random_values(rng, (3, count, 2, 3, PAGE, size), dtypes.f16)  # [layers, ...], HND
    whole = place.put(stack)
    given = [place.put(np.asarray(x, np.int32)) for x in (LENGTHS, table)]
    pages = ForeignPages.flashinfer(whole[1], *given, layout="HND")
    problem = random_problem(rng, "paged", "f16", num_heads=3, head_size=size, cached=LENGTHS, new=[0] * 4)
    found = place.collection(problem.collection)
    kv.ops.convert(found.get_value_cache(0), pages.key)
    expected = stack.copy()
    for b, n in enumerate(LENGTHS):
        t = np.arange(n)
        if n:
            rows = model.read(problem.collection.get_value_cache(0), b, t)
            expected[1, table[b, t // PAGE], 0, :, t % PAGE] = rows.astype(np.float16)
    np.testing.assert_array_equal(bits(place.get(whole)), bits(expected))


def test_tokens_without_a_page_are_skipped(place):
    """In the table of either side, by an id that is none or by too few columns."""
    rng = np.random.default_rng(6)
    table, count = scattered(rng)
    logical = random_values(rng, (2, count, PAGE, HEADS, SIZE), dtypes.f32)
    broken = table[:, :4].copy()  # 37 tokens need five columns
    broken[0, 1], broken[3, 0] = count, -5
    problem = random_problem(rng, "paged", "f32", cached=LENGTHS, new=[0] * 4)
    found, expected = place.collection(problem.collection), clone(problem.collection)
    with place.unchecked():
        kv.ops.convert(Pages(place, "vllm NHD", logical, LENGTHS, broken).pages.key, found.get_key_cache(0))
    for b, t in [(b, t) for b, n in enumerate(LENGTHS) for t in range(n)]:
        if t < 32 and 0 <= broken[b, t // PAGE] < count:
            row = logical[0, broken[b, t // PAGE], t % PAGE]
            model.write(expected.get_key_cache(0), np.array([b]), np.array([t]), row[None])
    assert_same(place, found, expected)
    target = Pages(place, "flashinfer HND", logical, LENGTHS, broken)
    kv.ops.convert(place.collection(problem.collection).get_key_cache(0), target.pages.key)
    after = logical.copy()
    for b, t in [(b, t) for b, n in enumerate(LENGTHS) for t in range(n)]:
        if t < 32 and 0 <= broken[b, t // PAGE] < count:
            after[0, broken[b, t // PAGE], t % PAGE] = model.read(problem.collection.get_key_cache(0), b, t)[0]
    np.testing.assert_array_equal(bits(target.logical()), bits(after))


def test_what_does_not_fit_is_refused_by_name():
    rng = np.random.default_rng(7)
    table, count = scattered(rng)
    data, lengths = np.zeros((count, 2, PAGE, HEADS, SIZE), np.float32), np.array(LENGTHS, np.int32)
    cache = random_problem(rng, "paged", "f32", cached=LENGTHS, new=[0] * 4).collection.get_key_cache(0)
    fewer = random_problem(rng, "paged", "f32", cached=[3], new=[0]).collection.get_key_cache(0)
    make, good = ForeignPages.flashinfer, ForeignPages.flashinfer(data, lengths, table)
    assert isinstance(good.key, PagedKVCache)
    fixed = data.copy()
    fixed.flags.writeable = False
    wide = make(np.zeros((count, 2, PAGE, HEADS, 32), np.float32), lengths, table)
    ints = make(data.astype(np.int32), lengths, table)
    cases = [
        (ValueError, lambda: make(data, lengths, table, "DNH"), "layout must be NHD or HND, got 'DNH'"),
        (ValueError, lambda: ForeignPages.vllm(data, lengths, table), "data must be [2, pages, page_size, heads"),
        (ValueError, lambda: make(data[:, 0], lengths, table), "data must be [pages, 2, page_size, heads, head_size]"),
        (ValueError, lambda: make((data[:, 0],), lengths, table), "data must be one buffer or a pair of keys"),
        (
            ValueError,
            lambda: make((data[:, 0], data[:3, 1]), lengths, table),
            "keys and values must have one shape and dtype",
        ),
        (ValueError, lambda: make(data[..., ::2], lengths, table), "keys must be contiguous in their last dimension"),
        (ValueError, lambda: make(data, lengths, table[:3]), "lookup_table must have one row per sequence: 4 by"),
        (TypeError, lambda: make(data, lengths, table.astype(np.int64)), "lookup_table must be uint32 or int32"),
        (ValueError, lambda: kv.ops.convert(good.key, fewer), "must have the same sequences, got 4 and 1"),
        (ValueError, lambda: kv.ops.convert(wide.key, cache), "same heads and head size, got 2 x 32 and 2 x 16"),
        (ValueError, lambda: kv.ops.convert(ints.key, cache), "source stores i32 without scales, which converts only"),
        (ValueError, lambda: make(data.astype(np.int64), lengths, table), "cache dtype must be f32, f16"),
        (TypeError, lambda: kv.ops.convert(good, cache), "source must be a KV cache, got ForeignPages"),
        (
            ValueError,
            lambda: kv.ops.convert(cache, make(fixed, lengths, table).key),
            "destination is written, but its blocks are read-only",
        ),
    ]
    for kind, call, message in cases:
        with pytest.raises(kind, match=re.escape(message)):
            call()
