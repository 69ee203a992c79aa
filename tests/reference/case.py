# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A call of attention as data: a batch, its cache, what is asked of the scores, the form that it comes in.

``Case(...).check(place)`` draws the numbers, fills outputs with a pattern, puts every operand in its place, calls, and
compares with the model in NumPy. A table is a list of :class:`Row`, each a case and the kernels that it is for: on the
host, a GPU's code in the interpreter, or, in tests/gpu, a GPU. What holds no token is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import kvarn as kv
from kvarn.dialect import dtypes

from . import attention as reference, chosen_pages
from .foreign import pool_of
from .latent import store_latent_rows
from .operands import cache_parts
from .places import Guarded, Interpreted, Place, bits
from .random_caches import Problem, random_values, stored_problem
from .shared_prefixes import combined

LAYER = 1
Rows = tuple[np.ndarray, np.ndarray]  # an output [T, heads, columns] and a log-sum-exp [T, heads]


def sentinel(like: np.ndarray) -> np.ndarray:
    """An array of 0xDEADBEEF, byte by byte."""
    words = np.full(-(-like.nbytes // 4), int.from_bytes(bytes.fromhex("DEADBEEF"), "little"), "<u4")
    return words.view(np.uint8)[: like.nbytes].view(like.dtype).reshape(like.shape)


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


NULL, CAUSAL = named("null"), named("causal")


def window(span: int) -> Mask:
    return named("sliding_window", span)


# --- forms -------------------------------------------------------------------------------------------


class Form:
    """How a call is made: here of a ragged batch, over a collection; over latent rows where a case has them."""

    def run(self, case: Case, place: Place) -> Rows:
        """What a call leaves, ragged."""
        if case.around:
            return self._surrounded(case, place)
        more = self.more(case)
        return case.launch(place, case.operation, case.source(place), case.query_rows, case.offsets, **more)

    def more(self, case: Case) -> dict[str, Any]:
        """What the call is given besides."""
        return {}

    def _surrounded(self, case: Case, place: Place) -> Rows:
        """The same, with rows of no sequence before and after, which no call writes."""
        rows = np.full((case.around, *case.query_rows.shape[1:]), np.nan, case.query_rows.dtype)
        query = np.concatenate([rows, case.query_rows, rows])
        found = case.launch(place, case.operation, case.source(place), query, case.offsets + np.uint32(case.around))
        inner = slice(case.around, -case.around)
        for x in found:
            written = bits(x) != bits(sentinel(x))
            written[inner] = False
            assert not written.any(), f"row {np.argwhere(written)[0]} is of no sequence, and was written"
        return found[0][inner], found[1][inner]

    def want(self, case: Case) -> Rows:
        """What the model finds."""
        return case.model()


RAGGED = Form()


@dataclass(frozen=True)
class Padded(Form):
    """A padded batch, whose rows past the last of a sequence stay as they were."""

    more: int = 1  # rows than any sequence has

    def run(self, case: Case, place: Place) -> Rows:
        counts = case.problem.new.astype(np.int32)
        query = reference.padded(case.query_rows, case.offsets, int(counts.max(initial=0)) + self.more, np.nan)
        found = case.launch(place, kv.ops.attention_padded, case.source(place), query, counts)
        for x in found:
            for b, n in enumerate(counts):
                assert (bits(x[b, n:]) == bits(sentinel(x)[b, n:])).all(), f"a row past the {n} of {b} was written"
        out, lse = (np.concatenate([x[b, :n] for b, n in enumerate(counts)]) for x in found)
        return out, lse


@dataclass(frozen=True)
class OfOperands(Form):
    """Keys and values as operands: ``parts(problem, layer)`` says of which class each is, and what holds it."""

    parts: Callable[[Problem, int], Any]

    def run(self, case: Case, place: Place) -> Rows:
        return case.launch(place, kv.ops.attention, case.operands(place, self.parts), case.query_rows, case.offsets)


@dataclass(frozen=True)
class WithPrior(Form):
    """Beside a result over other keys, of which every third row has none."""

    beside: Form = RAGGED

    def prior(self, case: Case) -> Rows:
        rng = np.random.default_rng(case.seed + 1)
        shape = (*case.query_rows.shape[:2], case.columns)
        prior, lse = rng.standard_normal(shape, np.float32), rng.uniform(-2, 4, shape[:2]).astype(np.float32)
        prior[::3], lse[::3] = np.nan, -np.inf
        return prior, lse

    def more(self, case: Case) -> dict[str, Any]:
        return {**self.beside.more(case), "prior": self.prior(case)}

    def want(self, case: Case) -> Rows:
        return combined(*self.beside.want(case), *self.prior(case))


@dataclass(frozen=True)
class InLayout(Form):
    """In place on a pool of another library, of which nothing is written."""

    name: str

    def run(self, case: Case, place: Place) -> Rows:
        c: Any = case.problem.collection
        scales = () if c.scales is None else (c.scales[:, :, LAYER:].copy(), c.quantization_granularity)
        packed = kv.PagedKVCacheCollection(
            c.blocks[:, :, LAYER:].copy(),
            c.cache_lengths,
            c.lookup_table,
            c.max_seq_length,
            c.max_cache_length,
            *scales,
        )
        pool = pool_of(place, self.name, packed)
        source = pool.collection, pool.layer
        found = case.launch(place, case.operation, source, case.query_rows, case.offsets)
        pool.assert_same(packed)
        return found


class OfTwoSources(Form):
    """Two layers as the sources of one softmax, the second of a mask that shows all."""

    def run(self, case: Case, place: Place) -> Rows:
        given = case.mask.given(len(case.problem.new))[0]
        more: dict[str, Any] = {"mask": [given["mask"], "null"]}
        more |= {name: [given[name], None] for name in ("window", "chunk") if name in given}
        if case.schedule:
            more["schedule"] = [case.scheduled(), case.scheduled()]
        collection, _ = case.source(place)
        sources = [collection, collection], [LAYER, 0]
        return case.launch(place, case.operation, sources, case.query_rows, case.offsets, **more)

    def want(self, case: Case) -> Rows:
        return combined(*case.model(), *replace(case, mask=NULL, sinks=False).model(0))


def path(parents: Sequence[int], node: int) -> list[int]:
    """The drafts that a draft sees, itself the last, from the root on."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


@dataclass(frozen=True)
class OfTree(Form):
    """Drafts that form a tree, of which each sees the cached tokens and its path from the root on.

    ``parents``: of the drafts of each sequence, -1 of one that has none; ``words``: of 32 bits each draft has, or of 64
    where they are ``wide``.
    """

    parents: tuple[tuple[int, ...], ...]
    words: int = 2
    wide: bool = False
    padded: bool = False

    def bits(self) -> np.ndarray:
        rows = [path(parents, node) for parents in self.parents for node in range(len(parents))]
        found = np.zeros((len(rows), 32 * self.words), np.uint8)
        for row, seen in zip(found, rows, strict=True):
            row[[node for node in seen if node < 32 * self.words]] = 1
        packed = np.packbits(found, axis=1, bitorder="little").view(np.int32)
        return packed.view(np.uint64)[:, 0] if self.wide else packed

    def run(self, case: Case, place: Place) -> Rows:
        if not self.padded:
            return case.launch(
                place, kv.ops.attention, case.source(place), case.query_rows, case.offsets, tree=self.bits()
            )
        width, counts = int(case.problem.new.max()) + 1, case.problem.new.astype(np.uint32)
        query, tree = (reference.padded(x, case.offsets, width, 0) for x in (case.query_rows, self.bits()))
        found = case.launch(place, kv.ops.attention_padded, case.source(place), query, counts, tree=tree)
        out, lse = (np.concatenate([x[b, :n] for b, n in enumerate(counts)]) for x in found)
        return out, lse

    def want(self, case: Case) -> Rows:
        own = np.unpackbits(self.bits().view(np.uint8).reshape(len(case.query_rows), -1), axis=1, bitorder="little")
        own, beside, start = np.pad(own, ((0, 0), (0, 1))), case.mask.given(len(case.new))[1], case.problem.cached

        def seen(b: int, h: Any, q: Any, k: Any) -> Any:
            row, draft = int(case.offsets[b]) + q - start[b], np.minimum(k - start[b], own.shape[1] - 1)
            return beside(b, h, q, k) & (k <= q) & ((k < start[b]) | (own[row, np.maximum(draft, 0)] != 0))

        return replace(case, mask=Mask("tree", {}, seen)).model()


@dataclass(frozen=True)
class ByBlocks(Form):
    """A block mask, of tiles of some rows and keys or of those of the case's schedule, of a mask that is a function."""

    rows: int | None = None
    keys: int | None = None

    def made(self, case: Case, place: Place, source: Any, query: Any, extents: Any, **options: Any) -> kv.BlockMask:
        """What attention is given; of a padded batch where ``options`` have valid lengths."""
        given = case.mask.given(len(case.problem.new))[0]["mask"]
        mask = case.placing(place)(given) if isinstance(given, tuple) else (given,)
        schedule = case.scheduled() if self.rows is None else {}
        options = {"schedule": schedule, "rows": self.rows, "keys": self.keys, **options}
        with place.active():
            return kv.ops.block_mask(source, query, *extents, mask=mask, **options)

    def run(self, case: Case, place: Place) -> Rows:
        source, query, offsets = case.source(place), place.put(case.query_rows), place.put(case.offsets)
        blocks = self.made(case, place, source[0], query, [offsets])
        return case.launch(place, case.operation, source, case.query_rows, case.offsets, block_mask=blocks, mask=None)


@dataclass(frozen=True)
class OfChosenPages(Form):
    """A share of the pages, another of every sequence and KV head, in any order, beside entries that name none."""

    share: float = 0.9
    counted: bool = True  # whether lists have counts; else -1 is behind their entries

    def lists(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        lists, counts = chosen_pages.random_lists(np.random.default_rng(case.seed + 2), case.problem, self.share)
        if self.share == 0:  # of pages that there are, and none counts
            return np.zeros_like(lists), np.resize(np.array([0, -3], np.int32), counts.shape)
        return lists, counts

    def more(self, case: Case) -> dict[str, Any]:
        lists, counts = self.lists(case)
        return (
            {"pages": lists, "page_counts": counts}
            if self.counted
            else {"pages": chosen_pages.uncounted(lists, counts)}
        )

    def want(self, case: Case) -> Rows:
        options = {name: x for name, x in case.options().items() if name != "scale"}
        lists, counts = self.lists(case)
        return chosen_pages.attention(
            case.problem.collection, LAYER, case.query_rows, case.offsets, lists, counts, **options
        )


@dataclass(frozen=True)
class Listed(Form):
    """Latent rows that each query row lists, in any order, beside numbers that name no row of the pool."""

    picks: int = 40
    counted: bool = True

    def lists(self, case: Case) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Encoded rows [T, picks], how many count, and which tokens [picks] these are, or -1."""
        c, rng = case.problem.collection, np.random.default_rng(case.seed + 3)
        page, rows = c.page_size, c.num_blocks * c.page_size
        encoded = rng.choice(
            np.array([-1, -1, -2, rows, rows + 5, 2**31 - 1, -(2**31)]), (len(case.query_rows), self.picks)
        )
        tokens = []
        for b, (cached, new) in enumerate(zip(case.cached, case.new, strict=True)):
            for _ in range(new):
                found = np.full(self.picks, -1)
                picked = rng.permutation(cached + new)[: self.picks]
                found[: len(picked)] = np.where(rng.random(len(picked)) < 0.2, -1, picked)
                at, seen = len(tokens), found >= 0
                encoded[at, seen] = c.lookup_table[b, found[seen] // page].astype(int) * page + found[seen] % page
                tokens.append(found)
        counts = np.full(len(tokens), self.picks + 100)
        if self.counted:
            counts = np.resize(rng.permutation([self.picks + 100, 3, self.picks, 0, -4, self.picks // 2]), len(tokens))
        for found, n in zip(tokens, counts.tolist(), strict=True):
            found[max(0, n) :] = -1
        return encoded.astype(np.int32), counts.astype(np.int32), tokens

    def more(self, case: Case) -> dict[str, Any]:
        encoded, counts, _ = self.lists(case)
        return {"mask": None, "indices": encoded, **({"topk_lengths": counts} if self.counted else {})}

    def want(self, case: Case) -> Rows:
        _, _, tokens = self.lists(case)

        def seen(b: int, h: Any, q: np.ndarray, k: np.ndarray) -> np.ndarray:
            first = int(case.offsets[b]) - case.cached[b]
            return np.stack([np.isin(k, tokens[first + row]) for row in q[:, 0].tolist()])

        return replace(case, mask=Mask("listed", {"mask": "null"}, seen)).model()


def failures(problem: Problem, found: Rows, want: Rows, most: tuple[float, float]) -> list[str]:
    """The sequences whose rows of an output or a log-sum-exp are not the model's, with the first such row of each."""
    said, offsets = [], problem.row_offsets.astype(int).tolist()
    for what, got, wanted, tolerance in zip(("out", "lse"), found, want, most, strict=True):
        assert got.shape == wanted.shape
        got = got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            near = np.abs(got - wanted) <= tolerance * (1 + np.abs(wanted))
        off = np.where(np.isneginf(wanted), ~np.isneginf(got), ~near) & (tolerance < np.inf)
        for b, (begin, end) in enumerate(pairwise(offsets)):
            if off[begin:end].any():
                row, *at = (int(i) for i in np.argwhere(off[begin:end])[0])
                x, y = got[(begin + row, *at)], wanted[(begin + row, *at)]
                said.append(
                    f"{problem.cached[b]} cached and {problem.new[b]} new tokens, {what} of token {row}: {x} is not {y}"
                )
    return said


# --- cases -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """One call of attention.

    Attributes
    ----------
    cached, new : sequence of int
        Tokens of each sequence in the cache before the step, and those of the step.
    dtype, query, out : str
        Elements of the cache; of the query, by default the same, or bf16 over 8 bits; of the output, by default the
        query's, or bf16 for one of 8 bits.
    kind, heads, head_size, page_size : str, int
        Of the cache; ``heads`` are those of keys and values, and each has ``group`` query heads.
    scales : tuple, optional
        (dtype, elements) of the scales of a quantized cache.
    value_size, rope, inline_scales : int
        Of latent rows: columns that are values, 0 where a cache has values of its own; bf16 keys at the end of a row of
        8-bit elements; elements for each scale that is in the row.
    mask : Mask
    scale, softcap : float
    sinks : bool
    slopes : bool or sequence
        ALiBi's: random ones, or a number a query head.
    score : tuple, optional
        A function of scores, and the model's.
    keys : sequence of int, optional
        Keys of each sequence besides the cached ones: by default its new tokens.
    spread : float
        Of the query's elements.
    logarithms : bool
        Whether the log-sum-exp is wanted.
    around : int
        Rows of no sequence before the first and after the last.
    form : Form
    schedule : mapping
    shape : mapping
        Of :func:`.random_caches.random_problem`, besides.
    change : callable, optional
        ``change(case)`` changes the buffers of the problem and the query before they are used.
    """

    cached: Sequence[int]
    new: Sequence[int]
    dtype: str = "bf16"
    query: str = ""
    out: str = ""
    kind: str = "paged"
    heads: int = 1
    group: int = 4
    head_size: int = 64
    page_size: int = 16
    scales: tuple[str, int] | None = None
    value_size: int = 0
    rope: int = 0
    inline_scales: int = 0
    mask: Mask = CAUSAL
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool | Sequence[float] = False
    score: tuple[Any, Any] | None = None
    keys: Sequence[int] | None = None
    spread: float = 1.0
    logarithms: bool = True
    around: int = 0
    form: Form = RAGGED
    schedule: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Case], None] | None = None
    seed: int = 0

    # --- what is drawn

    @cached_property
    def _drawn(self) -> tuple[Problem, np.ndarray, np.ndarray, np.ndarray]:
        scales = {} if self.scales is None else {"scale_dtype": self.scales[0], "granularity": self.scales[1]}
        rng, problem = stored_problem(
            self.seed, self.kind, self.dtype, cached=self.cached, new=self.new, num_heads=self.heads,
            head_size=self.head_size, page_size=self.page_size, is_mla=self.value_size > 0, **scales, **self.shape,
        )  # fmt: skip
        columns = self.head_size
        if self.rope or self.inline_scales:
            columns = store_latent_rows(rng, problem, LAYER, self.rope, self.inline_scales)
        heads = self.heads * self.group
        query = random_values(rng, (problem.tokens, heads, columns), self.query_type, self.spread)
        sinks, slopes = rng.standard_normal((2, heads)).astype(np.float32)
        given: Any = -np.abs(slopes) / 8 if self.slopes is True else self.slopes or 0.0
        return problem, query, sinks, np.asarray(given, np.float32)

    @cached_property
    def problem(self) -> Problem:
        self._changed  # noqa: B018
        return self._drawn[0]

    @cached_property
    def query_rows(self) -> np.ndarray:
        self._changed  # noqa: B018
        return self._drawn[1]

    @cached_property
    def _changed(self) -> None:
        self.__dict__["_changed"] = None  # what changes a case looks at its buffers
        if self.change is not None:
            self.change(self)

    # --- what follows from it

    @property
    def query_type(self) -> dtypes.DType:
        narrow = dtypes.by_name(self.dtype).bits == 8
        return dtypes.by_name(self.query or ("bf16" if narrow else self.dtype))

    @property
    def columns(self) -> int:
        """Of an output."""
        return self.value_size or self.head_size

    @property
    def offsets(self) -> np.ndarray:
        return self.problem.row_offsets

    @property
    def operation(self) -> Any:
        return kv.ops.mla_attention if self.value_size else kv.ops.attention

    def options(self) -> dict[str, Any]:
        """What a call is given besides its operands; arrays are of NumPy."""
        _, _, sinks, slopes = self._drawn
        found, _ = self.mask.given(len(self.new))
        found |= {"scale": self.scale} if self.scale is not None else {}
        found |= {"softcap": self.softcap} if self.softcap else {}
        found |= {"sinks": sinks} if self.sinks else {}
        found |= {"alibi_slopes": slopes} if self.slopes is not False else {}
        found |= {"score": self.score[0]} if self.score is not None else {}
        found |= {"kv_offsets": self.kv_offsets} if self.keys is not None else {}
        found |= {"value_size": self.value_size} if self.value_size else {}
        return found | ({"inline_scales": self.inline_scales} if self.inline_scales else {})

    @property
    def kv_offsets(self) -> np.ndarray | None:
        return None if self.keys is None else np.cumsum([0, *self.keys]).astype(np.uint32)

    def scheduled(self) -> dict[str, Any] | None:
        """The schedule; of a decode, with a bound of new tokens."""
        found = dict(self.schedule)
        if found.get("kind") == "decode":
            found.setdefault("max_queries", max(1, *self.new))
        return found or None

    def source(self, place: Place) -> tuple[Any, int]:
        """The collection in place, and the layer."""
        return place.collection(self.problem.collection), LAYER

    def operands(self, place: Place, parts: Callable[[Problem, int], Any]) -> list[Any]:
        """Keys and values in place as operands; those that are caches are of a collection in place."""
        problem = self.problem
        if parts is cache_parts:
            problem = replace(problem, collection=place.collection(problem.collection))
        return [of(*map(self.placing(place), given)) for of, given in parts(problem, LAYER)]

    @staticmethod
    def placing(place: Place) -> Callable[[Any], Any]:
        """Puts arrays in place, those of tuples and lists too."""

        def put(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return type(x)(map(put, x))
            return place.put(x) if isinstance(x, np.ndarray) else x

        return put

    def launch(self, place: Place, operation: Any, source: Any, query: np.ndarray, extents: Any, **more: Any) -> Rows:
        """What a call leaves in outputs that were 0xDEADBEEF."""
        put, kept = self.placing(place), dtypes.of(query.dtype)
        written = dtypes.by_name(self.out) if self.out else dtypes.bf16 if kept.bits == 8 else kept
        out = put(sentinel(np.zeros((*query.shape[:-1], self.columns), written.numpy)))
        lse = put(sentinel(np.zeros(query.shape[:-1], np.float32)))
        options = {"schedule": self.scheduled(), **self.options(), **more}
        options = {name: put(x) for name, x in options.items() if x is not None}
        options |= {"lse": lse} if self.logarithms else {}
        with place.active():
            operation(*source, put(query), put(extents), out=out, **options)
        return place.get(out), place.get(lse)

    # --- what it should be

    def model(self, layer: int = LAYER, **more: Any) -> Rows:
        """What the model finds over a layer."""
        given = {name: x for name, x in self.options().items() if name not in ("window", "chunk", "mask", "score")}
        score = None if self.score is None else self.score[1]
        seen = self.mask.given(len(self.new))[1]
        return reference.attention(
            self.problem.collection, layer, self.query_rows, self.offsets, mask=seen, score=score, **given, **more
        )

    def run(self, place: Place) -> Rows:
        """Output and log-sum-exp of the call, ragged."""
        return self.form.run(self, place)

    def want(self) -> Rows:
        """What they should be."""
        return self.form.want(self)

    def tolerances(self, place: Place) -> tuple[float, float]:
        """Of an output and of a log-sum-exp, by the elements of both, and by what products round."""
        query, on_host, on_gpu = self.query_type.name, place.name == "host", place.name == "torch"
        out = {"f32": 2e-5, "f16": 4e-3, "bf16": 2e-2, "f8e4m3": 2e-2 if on_host or self.value_size else 8e-2}[query]
        if query == "f32":
            return (1e-4, 1e-3) if self.scales or self.rope or self.inline_scales or on_gpu else (out, 2e-5)
        of_products = self.schedule.get("kind") in ("tile", "latent", None) and not on_host
        converted = of_products and (query != self.dtype or (query == "f8e4m3" and self.value_size > 0))
        return out, 2e-2 if converted else 1e-3 if self.scales or query != self.dtype or on_gpu else 2e-4

    def failures(self, place: Place) -> list[str]:
        """The sequences whose rows are not the model's, with the first such row of each."""
        want, (out, lse) = self.want(), self.tolerances(place)
        # Values with scales may be large: what is rounded is as large as the largest.
        largest = max(1.0, np.abs(want[0]).max(initial=0)) if self.scales else 1.0
        return failures(self.problem, self.run(place), want, (out * largest, lse if self.logarithms else np.inf))

    def check(self, place: Place) -> None:
        """The output and the log-sum-exp are the model's."""
        said = self.failures(place)
        assert not said, f"{len(said)} sequences differ: " + "; ".join(said[:6])


def assert_same_bits(found: Any, want: Any) -> None:
    """Two arrays, or all of two tuples, are the same, NaN and all."""
    found, want = ([x] if isinstance(x, np.ndarray) else x for x in (found, want))
    for got, wanted in zip(found, want, strict=True):
        wrong = np.argwhere(bits(got) != bits(wanted))
        assert not len(wrong), f"{got[tuple(wrong[0])]} is not {wanted[tuple(wrong[0])]} at {wrong[0]} of {got.shape}"


# --- tables ------------------------------------------------------------------------------------------

KERNELS: dict[str, tuple[Place, dict[str, Any]]] = {
    "host": (Guarded(), {}),
    "auto": (Interpreted("sm_90a"), {}),
    "simt": (Interpreted("sm_90a"), {"kind": "simt"}),
    "tile": (Interpreted("sm_90a"), {"kind": "tile"}),
    "mma": (Interpreted("sm_80"), {"kind": "tile"}),
    "decode": (Interpreted("sm_90a"), {"kind": "decode"}),
    "simt-sm_80": (Interpreted("sm_80"), {"kind": "simt"}),
    "sm_80": (Interpreted("sm_80"), {}),
    "sm_100a": (Interpreted("sm_100a"), {}),
    "decode-sm_80": (Interpreted("sm_80"), {"kind": "decode"}),
    "decode-sm_100a": (Interpreted("sm_100a"), {"kind": "decode"}),
    "mma-sm_100a": (Interpreted("sm_100a"), {"kind": "tile"}),
    "latent": (Interpreted("sm_90a"), {"kind": "latent"}),
    "latent-mma": (Interpreted("sm_80"), {"kind": "latent"}),
}


@dataclass(frozen=True)
class Row:
    """A case, the rule or the bug that it holds, and the kernels that it is for.

    ``kernels`` are names of ``KERNELS``: those that make check tries, a bar, and those of make check-all and a GPU.
    """

    rule: str
    kernels: str
    case: Case

    def on(self, kernel: str) -> tuple[Place, Case]:
        """Where a kernel runs, and the case with its schedule."""
        place, schedule = KERNELS[kernel]
        return place, replace(self.case, schedule={**schedule, **self.case.schedule} if kernel != "host" else {})

    def check(self, kernel: str) -> None:
        """What the kernel gives is the model's."""
        place, case = self.on(kernel)
        case.check(place)


def on(kernel: str, cached: Sequence[int], new: Sequence[int], **case: Any) -> tuple[Place, Case]:
    """Where a kernel of ``KERNELS`` runs, and a case with its schedule."""
    return row("", kernel, cached, new, **case).on(kernel)


def row(rule: str, kernels: str, cached: Sequence[int], new: Sequence[int], **case: Any) -> Row:
    """A row of a table."""
    return Row(rule, kernels, Case(cached=cached, new=new, **case))


def rows(table: Sequence[Row]) -> Any:
    """Parametrizes ``test(row, kernel)`` by the rows of a table, each with its kernels; make check has those first."""
    made = []
    for x in table:
        first, _, rest = x.kernels.partition("|")
        made += [pytest.param(x, kernel, id=f"{x.rule}: {kernel}") for kernel in first.split()]
        made += [
            pytest.param(x, kernel, id=f"{x.rule}: {kernel}", marks=pytest.mark.thorough) for kernel in rest.split()
        ]
    return pytest.mark.parametrize(("row", "kernel"), made)


# Of ``test(place)``: the host in make check, and a GPU's code in make check-all.
mostly_on_host = pytest.mark.parametrize(
    "place", ["host", pytest.param("sm_90a", marks=[pytest.mark.thorough])], indirect=True
)


def by_name(names: Iterable[str], thorough: Iterable[str] = ()) -> Any:
    """Parametrizes ``test(name)``; some of the names are of make check-all alone."""
    later = set(thorough)
    assert later <= {*names}, later - {*names}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.thorough] if name in later else []) for name in names]
    )
