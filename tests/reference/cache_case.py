# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A call of a cache operation as data: a pool, what is called over it, and what the model does to a copy of it.

``CacheCase(...).check(place)`` draws the numbers, puts every operand in its place, calls, lets the model do the same,
and compares every byte of the pool and of the outputs. What holds no token is poison, and outputs are 0xDEADBEEF
before a call. Operations are in ``reference.cache_operations``, tables of rows in ``reference.cache_rows``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvarn.dialect import dtypes

from . import foreign
from .case import KERNELS, Row, assert_same_bits, sentinel
from .places import Place, assert_close, assert_same, near
from .random_caches import Problem, clone, fill_cached, random_problem, random_values

# What the model does to a collection; what it gives are outputs of the call, and what these should be.
Model = Callable[[Any], Any]
RAGGED: dict[str, Any] = {"cached": [5, 0, 33, 16], "new": [3, 7, 0, 20]}
QUANTIZED = 0.001  # the share of elements that may be neighbours of the model's where scales are computed
COMPUTED = 0.02  # and where elements are


class Call:
    """A collection in place, and what an operation over it is given.

    Attributes
    ----------
    place : Place
    c : KVCacheCollection
        In place, whose ``layer`` is the model's ``of``.
    p : Problem
        Over NumPy buffers.
    rng : numpy.random.Generator
    around : int
        Rows of no sequence before the first and after the last.
    schedule : mapping
    most : float
        The share of elements that may be neighbours of the model's, by roundings of what an operation computes.
    """

    def __init__(self, case: CacheCase, place: Place, problem: Problem, rng: np.random.Generator, found: Any) -> None:
        self.place, self.p, self.rng, self.around, self.schedule = place, problem, rng, case.around, case.schedule
        self.c, self.layer = (found.collection, found.layer) if case.layout else (found, 1)
        self.of = 0 if case.layout else 1
        self.spec = problem.collection.spec.cache
        self.most, self._placed = 0.0, dict[int, Any]()

    def put(self, x: Any) -> Any:
        """An array in place, where it is put once; what is no array as it is."""
        if not isinstance(x, np.ndarray) or id(x) in self._placed:
            return x
        found = self.place.put(x)
        self._placed[id(found)] = found
        return found

    @property
    def offsets(self) -> np.ndarray:
        return self.p.row_offsets + np.uint32(self.around)

    @property
    def wide(self) -> dtypes.DType:
        """The cache's elements, or bf16 over 8 bits."""
        return self.spec.dtype if self.spec.dtype.bits > 8 else dtypes.bf16

    def key(self, layer: int | None = None) -> Any:
        return self.c.get_key_cache(self.layer if layer is None else layer)

    def value(self) -> Any:
        return self.c.get_value_cache(self.layer)

    def rows(self, dtype: Any = None, heads: int = 0, size: int = 0, spread: float = 1.0) -> np.ndarray:
        """[T, heads, size], by default as one of the cache's tokens, beside rows of no sequence."""
        shape = (self.p.tokens + 2 * self.around, heads or self.spec.num_heads, size or self.spec.head_size)
        return random_values(self.rng, shape, dtypes.of(dtype or self.spec.dtype), spread)

    def padded(self, more: int, dtype: Any = None, heads: int = 0, size: int = 0) -> np.ndarray:
        """[B, S, heads, size], of so many rows more than any sequence has."""
        shape = (len(self.p.new), int(self.p.new.max(initial=0)) + more)
        extents = heads or self.spec.num_heads, size or self.spec.head_size
        return random_values(self.rng, (*shape, *extents), dtypes.of(dtype or self.spec.dtype))

    def of_tokens(self, x: np.ndarray) -> np.ndarray:
        """The rows that belong to sequences."""
        return x[self.around : self.around + self.p.tokens]

    def beside(self, like: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """What an output should be: rows of tokens, and what was there before beside them."""
        whole = sentinel(like)
        self.of_tokens(whole)[...] = rows.astype(like.dtype)
        return whole

    def empty(self, like: np.ndarray) -> Any:
        """An output in place, full of a pattern."""
        return self.put(sentinel(like))

    def __call__(self, operation: Any, *operands: Any, **options: Any) -> Any:
        if self.schedule and self.place.name != "host":
            options["schedule"] = dict(self.schedule)
        given = {name: self.put(x) for name, x in options.items() if x is not None}
        return operation(*map(self.put, operands), **given)


@dataclass(frozen=True, eq=False, kw_only=True)
class CacheCase:
    """One call of a cache operation.

    Attributes
    ----------
    operation : callable
        ``operation(call, **given)`` calls it, and returns what the model does; see ``reference.cache_operations``.
    given : mapping
    pool : mapping
        Of :func:`.random_caches.random_problem`.
    stored : bool
        Whether the step's tokens are in the cache before the call.
    layout : str
        Of another library, one of ``reference.foreign``; by default the cache is one of kvarn's.
    around : int
    change : callable, optional
        Changes the problem, or gives another collection, before it is put in place.
    unchecked : bool
        Whether the call's tables are wrong, which the host would refuse.
    most : float, optional
        The share of elements that may be neighbours of the model's; by default as the operation says.
    schedule : mapping
        On GPUs.
    seed : int
    """

    operation: Callable[..., Model]
    given: Mapping[str, Any] = field(default_factory=dict)
    pool: Mapping[str, Any] = field(default_factory=dict)
    stored: bool | None = None
    layout: str = ""
    around: int = 0
    change: Callable[[Problem], Any] | None = None
    unchecked: bool = False
    most: float | None = None
    schedule: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1

    def problem(self) -> tuple[np.random.Generator, Problem]:
        """What is drawn."""
        rng, shape = np.random.default_rng(self.seed), {**RAGGED, **self.pool}
        if self.layout:
            shape = {"num_layers": 1, "page_size": 8, **shape}
        problem = random_problem(rng, **shape)
        if getattr(self.operation, "stored", False) if self.stored is None else self.stored:
            fill_cached(rng, problem, problem.cached + problem.new)
        if self.change is not None:
            problem.collection = self.change(problem) or problem.collection
        return rng, problem

    def check(self, place: Place) -> None:
        """What the call leaves is what the model does."""
        rng, problem = self.problem()
        collection = problem.collection
        expected = clone(collection)
        with place.active():
            found = foreign.pool_of(place, self.layout, collection) if self.layout else place.collection(collection)
            call = Call(self, place, problem, rng, found)
            if self.unchecked:
                with place.unchecked():
                    model = self.operation(call, **self.given)
            else:
                model = self.operation(call, **self.given)
        most = call.most if self.most is None else self.most
        for out, want in model(expected) or ():
            got = place.get(out)
            near(got, want.astype(got.dtype)) if most else assert_same_bits(got, want.astype(got.dtype))
        if not self.layout:
            assert_close(place, found, expected, most) if most else assert_same(place, found, expected)
        elif most:
            for a, b in zip(found.found(), found.expected(expected), strict=True):
                near(a, b, most)
        else:
            found.assert_same(expected)
        if self.layout and expected.scales is not None:
            np.testing.assert_allclose(found.scales(), np.asarray(expected.scales)[:, :, 0], rtol=1e-6)


@dataclass(frozen=True)
class CacheRow(Row):
    """A case of a cache operation, the rule or the bug that it holds, and where it is tried."""

    def on(self, kernel: str) -> tuple[Place, Any]:
        return KERNELS[kernel][0], self.case


def row(rule: str, kernels: str, operation: Callable[..., Model], **given: Any) -> CacheRow:
    """A row of a table: what the operation takes goes to it, what a case has to the case, and the rest to the pool."""
    takes, of_case = inspect.signature(operation).parameters, CacheCase.__dataclass_fields__
    parts: dict[str, dict[str, Any]] = {"given": {}, "case": {}, "pool": {}}
    for name, value in given.items():
        parts["given" if name in takes else "case" if name in of_case else "pool"][name] = value
    case: Any = CacheCase(operation=operation, given=parts["given"], pool=parts["pool"], **parts["case"])
    return CacheRow(f"{operation.__name__}: {rule}", kernels, case)
