# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn's own calls for the rows: its public operations, on its own layout of the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvarn.measure.attention_problem import TOLERANCE

from . import functions

# What else kvarn offers for a decode row, by what it costs or gains: the schedules of kv.ops.attention's options.
OPTIONS = {"kvarn, early": {"early": True}, "kvarn, batch-invariant": {"batch_invariant": True, "max_queries": 1}}


@dataclass(frozen=True)
class Offer:
    """One way to do a row.

    Attributes
    ----------
    who : str
    make : callable
        Prepares (plans, compiles, loads) and returns the call, which takes a layer.
    tolerance : float
    error : callable, optional
        Instead of the problem's own check.
    """

    who: str
    make: Callable[[], Callable[[int], Any]]
    tolerance: float
    error: Callable[[], float] | None = None

    def checked(self, call: Callable[[int], Any], problem: Any) -> float:
        """The error of what a call writes into outputs of NaN."""
        filled(call, problem)
        return (self.error or problem.error)()


def filled(call: Callable[[int], Any], problem: Any) -> None:
    """Run a call to its end, with NaN in its outputs before."""
    problem.poison()
    call(0)
    problem.arrays.synchronize()


def offers(problem: Any, schedule: Mapping[str, Any] | None = None) -> Iterator[Offer]:
    """kvarn's offers for a problem in its own layout; of a given schedule only that one."""
    row = problem.row
    tolerance = 0.5 if row.kind == "gather" else TOLERANCE[row.dtype]
    yield Offer("kvarn", lambda: call_of(problem, schedule), tolerance)
    if getattr(row.shape, "prefix", 0) and schedule is None:
        yield Offer("kvarn, without shared=", lambda: _decode(problem, None, share=False), tolerance)
    elif row.kind == "functions" and schedule is None:
        for who, make in functions.more_offers(problem):
            yield Offer(who, make, tolerance)
    elif row.kind == "decode" and schedule is None:
        for who, option in OPTIONS.items():
            yield Offer(who, lambda option=option: call_of(problem, option), tolerance)


def call_of(problem: Any, schedule: Mapping[str, Any] | None = None) -> Callable[[int], Any]:
    """The public operation of a problem, bound to its data."""
    return _CALLS[problem.row.kind](problem, schedule)


def _decode(p: Any, schedule: Mapping[str, Any] | None, share: bool = True) -> Callable[[int], Any]:
    import kvarn as kv

    # The step's own token is the last of the context: it is stored already, as after an append.
    collection = p.cached.collection(p.lengths - 1, 1, p.longest)
    options: dict[str, Any] = {"window": p.window} if p.window else {}
    if share and p.row.shape.prefix:
        table, before = p.cached.pages.table, p.lengths - 1
        shared = kv.SharedPrefixes.find(table, before, p.row.shape.page, upload=p.arrays.integers)
        assert shared is not None, "a prefix is shared"
        shared.plan(collection, p.offsets)
        options["shared"] = shared

    def call(layer: int) -> None:
        kv.ops.attention(collection, layer, p.query, p.offsets, scale=p.scale, out=p.out, schedule=schedule, **options)

    return call


def _sources(p: Any, schedule: Mapping[str, Any] | None) -> Callable[[int], Any]:
    import kvarn as kv

    # The memory has no new tokens; those of the step are the cache's.
    own, memory = p.cached.collection(p.own - 1, 1, int(p.own.max())), p.memory.collection(p.seen, 1, p.memory_tokens)
    options: dict[str, Any] = {"mask": ["null", "causal"], "kv_offsets": [p.no_keys, None], "schedule": schedule}

    def call(layer: int) -> None:
        kv.ops.attention([memory, own], [layer, layer], p.query, p.offsets, scale=p.scale, out=p.out, **options)

    return call


def _prefill(p: Any, schedule: Mapping[str, Any] | None) -> Callable[[int], Any]:
    import kvarn as kv

    collection = p.cached.collection(p.lengths - p.queries, p.newest, p.longest)
    return lambda layer: kv.ops.attention(
        collection, layer, p.query, p.offsets, scale=p.scale, out=p.out, schedule=schedule
    )


def _mla(p: Any, schedule: Mapping[str, Any] | None) -> Callable[[int], Any]:
    import kvarn as kv

    collection = p.cached.collection(p.lengths - 1, 1, p.longest)
    size = p.out.shape[2]
    return lambda layer: kv.ops.mla_attention(
        collection, layer, p.query, p.offsets, value_size=size, scale=p.scale, out=p.out, schedule=schedule,
        inline_scales=p.row.shape.inline or None,
    )  # fmt: skip


def _append(p: Any, schedule: Mapping[str, Any] | None) -> Callable[[int], Any]:
    import kvarn as kv

    collection = p.cached.collection(p.before, p.tokens // len(p.before), p.longest)
    keys, values = list(p.key), list(p.value)
    if not p.rope:
        return lambda layer: kv.ops.append(collection, layer, keys[layer], values[layer], p.offsets, schedule=schedule)
    queries, outs = list(p.query), list(p.query_out)

    def call(layer: int) -> None:
        kv.ops.rope_append(
            collection, layer, queries[layer], keys[layer], values[layer], p.offsets, p.freqs, interleaved=False,
            query_out=outs[layer], schedule=schedule,
        )  # fmt: skip

    return call


def _gather(p: Any, schedule: Mapping[str, Any] | None) -> Callable[[int], Any]:
    import kvarn as kv

    collection = p.cached.collection(p.lengths, 1, p.longest + 1)
    caches = [collection.get_key_cache(layer) for layer in range(p.layers)]
    return lambda layer: kv.ops.gather(caches[layer], p.ids, p.offsets, p.out, schedule=schedule)


_CALLS = {
    "decode": _decode,
    "sources": _sources,
    "prefill": _prefill,
    "mla": _mla,
    "append": _append,
    "gather": _gather,
    "functions": functions.call_of,
    "tree": functions.call_of,
}
