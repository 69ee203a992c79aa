# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lengths at the edges of a kernel's extents, the masks that they are crossed with, and attention over both.

An extent is what a kernel takes at a time: keys or query rows of a tile, tokens of a page, lanes of a warp, positions
of a window or a chunk. A batch has a sequence for each of its edges, so one launch covers them all. What holds no token
is NaN, and outputs are poison before a call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.dialect import dtypes

from . import attention as reference, chosen_pages
from .attention_cases import sentinel
from .places import Place, bits
from .random_caches import Problem, random_query, stored_problem
from .shared_prefixes import combined

MOST = 2**31 - 1  # of an i32: what callers write for "no bound"
ALL = bool(os.environ.get("KVARN_TEST_ALL"))
LAYER = 1


def edges(extent: int, *times: int) -> tuple[int, ...]:
    """0, 1, and around one and several extents: T - 1, T, T + 1, k T - 1, k T + 1, ascending; k is 2 by default."""
    multiples = [k * extent + d for k in times or (2,) for d in (-1, 1)]
    return tuple(sorted({0, 1, extent - 1, extent, extent + 1, *multiples}))


def spans(extent: int) -> tuple[int, ...]:
    """Windows and chunks at the edges of an extent."""
    return tuple(sorted({1, max(1, extent - 1), extent, extent + 1}))


def lengths(keys: Iterable[int], tokens: Iterable[int]) -> tuple[list[int], list[int]]:
    """(cached, new) of a batch in which every edge of keys and of new tokens is met.

    For each number of keys a sequence whose last token is new; for each number of new tokens one whose keys end at an
    edge of keys, or whose first query stands at one, by turns.
    """
    keys, tokens = sorted(set(keys)), sorted(set(tokens))
    pairs = [(max(n - 1, 0), min(n, 1)) for n in keys]
    for i, m in enumerate(tokens):
        behind = [n - m for n in keys if n >= m] if i % 2 else keys[::-1]
        pairs.append((behind[i % len(behind)] if behind else 0, m))
    found = list(dict.fromkeys(pairs))
    return [c for c, _ in found], [m for _, m in found]


# --- masks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """A mask as ``kv.ops.attention`` takes it and as the model does: ``seen(b, h, q, k)``, over arrays.

    ``spans``: of the sequences, by turns, where a function reads them; ``seen`` then takes the sequence's too.
    """

    name: str
    options: Mapping[str, Any]
    seen: Callable[..., Any]
    spans: tuple[int, ...] = ()

    def given(self, batch: int) -> tuple[dict[str, Any], Callable[..., Any]]:
        """The options of a call, and what is seen of a batch."""
        if not self.spans:
            return dict(self.options), self.seen
        of = np.resize(np.array(self.spans, np.int32), batch)
        return {"mask": (self.options["mask"], of)}, lambda b, h, q, k: self.seen(b, h, q, k, int(of[b]))


def named(mask: str, span: int | None = None) -> Mask:
    """One of the masks that have a name."""
    options = {"mask": mask, **({} if span is None else {"window" if "window" in mask else "chunk": span})}
    return Mask(
        mask if span is None else f"{mask} {span}", options,
        lambda b, h, q, k: reference.visible(mask, np.ravel(q), np.ravel(k), span),
    )  # fmt: skip


def within(b, h, q, k, spans):
    return (k <= q) & (q - k < spans[b])


def behind(b, h, q, k, spans):
    return (k < spans[b]) | (q - k < 2)


def masks(extent: int, every: bool = ALL) -> list[Mask]:
    """Every kind of mask, with windows and chunks at the edges of an extent of keys."""
    spanned = ("sliding_window", "chunked", "chunked_causal")
    rows = zip(cycle(spanned), spans(extent)[::-1]) if not every else [(m, n) for n in spans(extent) for m in spanned]
    own = (*spans(extent), MOST)
    return [
        named("causal"), named("null"), *(named(*row) for row in rows),
        Mask("window as a function", {"mask": within}, lambda b, h, q, k, n: (k <= q) & (q - k < n), own),
        Mask("prefix as a function", {"mask": behind}, lambda b, h, q, k, n: (k < n) | (q - k < 2), (*own, -MOST - 1)),
    ]  # fmt: skip


def far_masks() -> list[Mask]:
    """Bounds at the ends of i32, as numbers of a mask and of arrays that it reads."""
    numbers = (MOST, -MOST - 1, MOST - 20, 17, 20 - MOST)
    return [
        named("sliding_window", MOST), named("chunked", MOST),
        Mask("before a number", {"mask": lambda b, h, q, k: k < MOST}, lambda b, h, q, k: k < MOST),
        Mask("after a number", {"mask": lambda b, h, q, k: k > -MOST - 1}, lambda b, h, q, k: k > -MOST - 1),
        Mask("before", {"mask": lambda b, h, q, k, n: k < n[b]}, lambda b, h, q, k, n: k < n, numbers),
        Mask("from", {"mask": lambda b, h, q, k, n: k >= n[b]}, lambda b, h, q, k, n: k >= n, numbers),
        Mask("either", {"mask": lambda b, h, q, k, n: (k < n[b]) | (k > q - 3)},
             lambda b, h, q, k, n: (k < n) | (k > q - 3), numbers),
    ]  # fmt: skip


# --- attention ---------------------------------------------------------------------------------------


def tolerances(query: str, stored: str) -> tuple[float, float]:
    """Of an output and of a log-sum-exp, for a query's type and a cache's."""
    out = {"f32": 2e-5, "f16": 4e-3, "bf16": 2e-2}[query]
    return out, 2e-5 if query == "f32" else 2e-4 if stored == query else 2e-2


def failures(
    problem: Problem, found: Sequence[np.ndarray], want: Sequence[np.ndarray], most: Sequence[float]
) -> list[str]:
    """The sequences whose rows of some array [T, ...] are not the model's, with the first such row of each."""
    said = []
    for b, (begin, end) in enumerate(
        zip(problem.row_offsets[:-1].tolist(), problem.row_offsets[1:].tolist(), strict=True)
    ):
        for what, got, wanted, tolerance in zip(("out", "lse"), found, want, most, strict=False):
            x, y = got[begin:end].astype(np.float64), wanted[begin:end]
            with np.errstate(invalid="ignore"):
                off = np.where(np.isneginf(y), ~np.isneginf(x), ~(np.abs(x - y) <= tolerance * (1 + np.abs(y))))
            if off.any():
                at = tuple(np.argwhere(off)[0])
                said.append(
                    f"{problem.cached[b]} cached and {problem.new[b]} new tokens, {what} of token {at[0]}: {x[at]} is "
                    f"not {y[at]}"
                )
    return said


Rows = tuple[np.ndarray, np.ndarray]  # an output [T, heads, columns] and a log-sum-exp [T, heads]


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention, where it runs, and the extents that its batch is made for.

    Attributes
    ----------
    place : Place
    schedule : mapping
    keys : int
        Keys of a tile, or those that are taken at a time.
    rows : int
        Query rows of a tile: tokens times the group.
    more : tuple of int
        Further numbers of keys, such as those at the edges of splits.
    most : int, optional
        New tokens that no sequence has more of.
    dtype, query : str
        Of the cache, and of the query: by default the same, bf16 over 8 bits.
    shape : mapping
        Of the problem, besides.
    form : callable
        ``form(call)`` makes the :class:`Call`: what the kernel finds, and what the model does.
    value_size : int
        Of latent rows, the columns of a value; 0: there are values.
    brief : bool
        Whether query rows are of up to two tiles, in make check.
    """

    place: Place
    schedule: Mapping[str, Any]
    keys: int
    rows: int
    more: tuple[int, ...] = ()
    most: int | None = None
    dtype: str = "bf16"
    query: str = ""
    group: int = 4
    head_size: int = 64
    page_size: int = 8
    kind: str = "paged"
    shape: Mapping[str, Any] = field(default_factory=dict)
    form: Callable[[Call], tuple[Sequence[np.ndarray], Sequence[np.ndarray]]] | None = None
    value_size: int = 0
    brief: bool = False

    def batch(self, seed: int = 0) -> tuple[np.random.Generator, Problem]:
        """Sequences at all edges."""
        of_tile = -(-self.rows // self.group)
        tokens = {n for n in edges(of_tile) if ALL or not self.brief or n <= of_tile + 1}
        if self.most is not None:
            tokens = {n for n in tokens if n <= self.most} | {self.most - 1, self.most}
        keys = {*edges(self.keys, 3), *edges(self.page_size), *self.more}
        cached, new = lengths(keys, tokens)
        shape = {
            "head_size": self.head_size,
            "num_heads": 1,
            "page_size": self.page_size,
            "is_mla": self.value_size > 0,
        }
        return stored_problem(seed, self.kind, self.dtype, cached=cached, new=new, **{**shape, **self.shape})

    @property
    def tolerances(self) -> tuple[float, float]:
        narrow = dtypes.by_name(self.dtype).bits == 8
        return tolerances(self.query or ("bf16" if narrow else self.dtype), self.dtype)


@dataclass
class Call:
    """A call of a kernel at its edges under a mask."""

    kernel: Kernel
    mask: Mask
    rng: np.random.Generator
    problem: Problem
    query: np.ndarray
    options: dict[str, Any]
    seen: Callable[..., Any]
    outputs: list[Any] = field(default_factory=list)

    @property
    def place(self) -> Place:
        return self.kernel.place

    @property
    def collection(self) -> Any:
        return self.place.collection(self.problem.collection)

    @property
    def offsets(self) -> Any:
        return self.place.put(self.problem.row_offsets)

    def poisoned(self, query: np.ndarray | None = None) -> dict[str, Any]:
        """An output and a log-sum-exp in place, which are 0xDEADBEEF."""
        query = self.query if query is None else query
        out = query[..., : self.kernel.value_size or None]
        self.outputs = [self.place.put(sentinel(x)) for x in (out, np.zeros(query.shape[:-1], np.float32))]
        return {"out": self.outputs[0], "lse": self.outputs[1], "schedule": dict(self.kernel.schedule)}

    def found(self) -> Rows:
        """What is in the outputs."""
        out, lse = map(self.place.get, self.outputs)
        return out, lse

    def want(self, layer: int = LAYER, **more: Any) -> Rows:
        """What the model finds over a layer."""
        return reference.function_attention(
            self.problem.collection, layer, self.query, self.problem.row_offsets, mask=self.seen,
            value_size=self.kernel.value_size or None, **more,
        )  # fmt: skip


def ragged(call: Call) -> tuple[Rows, Rows]:
    """A ragged batch."""
    options = {**call.options, **call.poisoned()}
    kv.ops.attention(call.collection, LAYER, call.place.put(call.query), call.offsets, **options)
    return call.found(), call.want()


def latent(call: Call) -> tuple[Rows, Rows]:
    """Latent rows."""
    options = {**call.options, **call.poisoned(), "value_size": call.kernel.value_size}
    kv.ops.mla_attention(call.collection, LAYER, call.place.put(call.query), call.offsets, **options)
    return call.found(), call.want()


def of_others(call: Call) -> tuple[Rows, Rows]:
    """Keys of which none are the queries' own: cross attention, over a number of keys of its own a sequence."""
    counts = np.resize(np.array([0, 1, 2, call.kernel.keys + 1]), len(call.problem.new))
    counts = np.minimum(counts, call.problem.new)  # which are stored
    kv_offsets = np.concatenate([[0], counts.cumsum()]).astype(np.uint32)
    options = {**call.options, **call.poisoned(), "kv_offsets": call.place.put(kv_offsets)}
    kv.ops.attention(call.collection, LAYER, call.place.put(call.query), call.offsets, **options)
    return call.found(), call.want(kv_offsets=kv_offsets)


def padded(call: Call) -> tuple[Rows, Rows]:
    """A padded batch, whose rows past the last of a sequence stay as they were."""
    offsets, counts = call.problem.row_offsets, call.problem.new.astype(np.int32)
    query = reference.padded(call.query, offsets, int(counts.max()) + 1, np.nan)
    options = {**call.options, **call.poisoned(query)}
    kv.ops.attention_padded(call.collection, LAYER, call.place.put(query), call.place.put(counts), **options)
    found = call.found()
    for x in found:
        for b, n in enumerate(counts):
            assert (bits(x[b, n:]) == bits(sentinel(x)[b, n:])).all(), f"a row past the {n} of sequence {b} was written"
    out, lse = (np.concatenate([x[b, :n] for b, n in enumerate(counts)]) for x in found)
    return (out, lse), call.want()


def of_operands(parts: Callable[[Problem, int], Any]) -> Callable[[Call], tuple[Rows, Rows]]:
    """Keys and values in buffers, as operands."""

    def form(call: Call) -> tuple[Rows, Rows]:
        put = call.place.put
        made = [
            of(*(put(x) if isinstance(x, np.ndarray) else x for x in given)) for of, given in parts(call.problem, LAYER)
        ]
        keys, values = made
        kv.ops.attention(keys, values, put(call.query), call.offsets, **call.options, **call.poisoned())
        return call.found(), call.want()

    return form


def with_prior(call: Call) -> tuple[Rows, Rows]:
    """Beside a result over other keys, of which some rows have none."""
    shape = (*call.query.shape[:2], call.kernel.value_size or call.query.shape[2])
    prior, lse = call.rng.standard_normal(shape, np.float32), call.rng.uniform(-2, 4, shape[:2]).astype(np.float32)
    prior[::3], lse[::3] = np.nan, -np.inf
    options = {**call.options, **call.poisoned(), "prior": (call.place.put(prior), call.place.put(lse))}
    operation = kv.ops.attention
    if call.kernel.value_size:
        operation, options = kv.ops.mla_attention, {**options, "value_size": call.kernel.value_size}
    operation(call.collection, LAYER, call.place.put(call.query), call.offsets, **options)
    return call.found(), combined(*call.want(), prior, lse)


def of_two_sources(call: Call) -> tuple[Rows, Rows]:
    """Two layers as the sources of one softmax, the second of a mask that shows all."""
    options = {**call.options, **call.poisoned()}
    options["mask"] = [options["mask"], "null"]
    for name in ("window", "chunk", "schedule"):
        if name in options:
            options[name] = [options[name], options[name] if name == "schedule" else None]
    c = call.collection
    kv.ops.attention([c, c], [LAYER, 0], call.place.put(call.query), call.offsets, **options)
    return call.found(), combined(*call.want(), *replace(call, seen=named("null").seen).want(0))


def by_blocks(call: Call) -> tuple[Rows, Rows]:
    """A block mask of the mask, which is a function."""
    put, of = call.place.put, call.kernel
    function, arrays = call.options["mask"]
    c, query, schedule = call.collection, put(call.query), dict(of.schedule)
    tile = {"rows": of.rows, "keys": of.keys}
    blocks = kv.ops.block_mask(c, query, call.offsets, (function, put(arrays)), schedule={}, **tile)
    kv.ops.attention(c, LAYER, query, call.offsets, block_mask=blocks, **{**call.poisoned(), "schedule": schedule})
    return call.found(), call.want()


def of_chosen_pages(call: Call) -> tuple[Rows, Rows]:
    """Most of the pages, in any order, beside entries that name none."""
    lists, counts = chosen_pages.random_lists(call.rng, call.problem, 0.9)
    options = {**call.options, **call.poisoned(), "pages": call.place.put(lists), "page_counts": call.place.put(counts)}
    kv.ops.attention(call.collection, LAYER, call.place.put(call.query), call.offsets, **options)
    want = chosen_pages.attention(
        call.problem.collection, LAYER, call.query, call.problem.row_offsets, lists, counts, **call.options
    )
    return call.found(), want


def wrong(kernel: Kernel, mask: Mask, seed: int = 0) -> list[str]:
    """What is wrong with a kernel at the edges under a mask; nothing when it is the model's."""
    rng, problem = kernel.batch(seed)
    query = random_query(rng, problem, kernel.group * problem.collection.num_heads, kernel.query or None)
    options, seen = mask.given(len(problem.new))
    call = Call(kernel, mask, rng, problem, query, options, seen)
    if isinstance(options["mask"], tuple):
        options["mask"] = (options["mask"][0], kernel.place.put(options["mask"][1]))
    with kernel.place.active():
        found, want = (kernel.form or ragged)(call)
    return [f"{mask.name}: {x}" for x in failures(problem, found, want, kernel.tolerances)]


def check(kernel: Kernel, tried: Sequence[Mask]) -> None:
    """Every mask's rows are the model's."""
    said = [x for mask in tried for x in wrong(kernel, mask)]
    assert not said, f"{len(said)} rows of tables differ: " + "; ".join(said[:12])
