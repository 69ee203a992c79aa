# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn's offers for each row: its public operations on its native page layout.

The mask and score functions of other libraries are in peers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvarn import dispatch
from kvarn.measure.attention_problem import TOLERANCE

# schedule options of kv.ops.attention, measured as further offers of decode rows
OPTIONS = {"kvarn, early": {"early": True}, "kvarn, batch-invariant": {"batch_invariant": True, "max_queries": 1}}


@dataclass(frozen=True)
class Offer:
    """One implementation of a row.

    Attributes
    ----------
    who : str
    make : callable
        Prepares (plans, compiles, loads) and returns the call, which takes a layer.
    tolerance : float
    error : callable, optional
        Replaces the problem's own check.
    """

    who: str
    make: Callable[[], Callable[[int], Any]]
    tolerance: float
    error: Callable[[], float] | None = None

    def checked(self, call: Callable[[int], Any], problem: Any) -> float:
        """The error of a call's outputs, which are set to NaN first."""
        filled(call, problem)
        return (self.error or problem.error)()


def filled(call: Callable[[int], Any], problem: Any) -> None:
    """Set a problem's outputs to NaN and run a call to its end."""
    problem.poison()
    call(0)
    problem.arrays.synchronize()


def offers(problem: Any, schedule: Mapping[str, Any] | None = None) -> Iterator[Offer]:
    """kvarn's offers for a problem in its native layout; with a schedule, only that one."""
    row = problem.row
    tolerance = 0.5 if row.kind == "gather" else TOLERANCE[row.dtype]
    yield Offer("kvarn", lambda: call_of(problem, schedule), tolerance)
    if getattr(row.shape, "prefix", 0) and schedule is None:
        yield Offer("kvarn, without shared=", lambda: _decode(problem, None, share=False), tolerance)
    elif row.kind == "mixed" and schedule is None:
        if problem.arrays.on_gpu:
            yield Offer("kvarn, one kernel", lambda: call_of(problem, {"decode_threshold": 0}), tolerance)
        yield Offer("kvarn, two calls", lambda: _two_calls(problem), tolerance)
    elif row.kind == "functions" and schedule is None:
        for who, make in _without_block_masks(problem):
            yield Offer(who, make, tolerance)
    elif row.kind == "decode" and schedule is None:
        for who, option in OPTIONS.items():
            yield Offer(who, lambda option=option: call_of(problem, option), tolerance)


def call_of(problem: Any, schedule: Mapping[str, Any] | None = None) -> Callable[[int], Any]:
    """The public operation of a problem, bound to its data."""
    return _CALLS[problem.row.kind](problem, schedule)


def _decode(p: Any, schedule: Mapping[str, Any] | None, share: bool = True) -> Callable[[int], Any]:
    import kvarn as kv

    # As after an append, the step's own token is already stored, at the end of the context.
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

    # The memory has no new tokens; the step's tokens are in the own cache.
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


def _two_calls(p: Any) -> Callable[[int], Any]:
    """The decodes of a mixed batch, then its prompts: each a call of its own."""
    import kvarn as kv

    decodes, calls = int((p.queries == 1).sum()), []
    for part in (slice(decodes), slice(decodes, None)):  # decodes have one token each: sequences and tokens alike
        new, lengths, lookup = p.queries[part], p.lengths[part], p.cached.pages.lookup[part]
        of_part = p.cached.collection(lengths - new, int(new.max()), int(lengths.max()), lookup)
        offsets = p.arrays.integers(np.concatenate([[0], new.cumsum()]))
        calls.append((of_part, p.query[part], offsets, p.out[part]))

    def call(layer: int) -> None:
        for collection, query, offsets, out in calls:
            kv.ops.attention(collection, layer, query, offsets, scale=p.scale, out=out)

    return call


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


def same_document(b: Any, h: Any, q: Any, k: Any, documents: Any) -> Any:
    return documents[b, q] == documents[b, k]


def by_distance(score: Any, b: Any, h: Any, q: Any, k: Any, bias: Any, buckets: Any) -> Any:
    return score + bias[h, buckets[q - k]]


def _functions(p: Any, schedule: Mapping[str, Any] | None, by_blocks: bool = True) -> Callable[[int], Any]:
    """Attention with the row's functions; the block mask is built once, as a step builds it once for all layers."""
    import kvarn as kv

    new = p.queries
    collection = p.cached.collection(p.lengths - new, int(new.max()), p.longest)
    options: dict[str, Any] = {"schedule": schedule}
    if p.row.kind == "tree":
        options["tree"] = p.bits
    else:
        if p.bias is not None:
            options["score"] = (by_distance, p.bias, p.buckets)
        if p.row.shape.documents:
            mask = (kv.masks.causal & same_document, p.documents)
            if by_blocks:
                options["block_mask"] = kv.ops.block_mask(collection, p.query, p.offsets, mask, schedule=schedule)
            else:
                options["mask"] = mask
    return lambda layer: kv.ops.attention(collection, layer, p.query, p.offsets, scale=p.scale, out=p.out, **options)


def _without_block_masks(p: Any) -> Iterator[tuple[str, Callable[[], Callable[[int], Any]]]]:
    """Further offers for document rows: names, and functions that make the calls."""
    if p.row.shape.documents:
        yield "kvarn, without block_mask=", lambda: _functions(p, None, by_blocks=False)

        def making() -> Callable[[int], Any]:
            import kvarn as kv

            collection = p.cached.collection(p.lengths - p.queries, p.newest, p.longest)
            mask = (kv.masks.causal & same_document, p.documents)
            attend, made = _functions(p, None), kv.ops.block_mask(collection, p.query, p.offsets, mask)

            def call(layer: int) -> None:
                kv.ops.block_mask(collection, p.query, p.offsets, mask, blocks=made.blocks)
                attend(layer)

            return call

        yield "kvarn, with block_mask() itself", making


_CALLS = {
    "decode": _decode,
    "sources": _sources,
    "prefill": _prefill,
    "mixed": _prefill,
    "mla": _mla,
    "append": _append,
    "gather": _gather,
    "functions": _functions,
    "tree": _functions,
}


def operations_of(call: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """The operations that a call runs: operands, attributes and schedule of each."""
    found: list[tuple[Any, ...]] = []

    def record(operation: Any, operands: Any, attributes: Any, schedule: Any, stream: Any) -> None:
        found.append((operation, operands, attributes, schedule))

    before, dispatch.recorder = dispatch.recorder, SimpleNamespace(recording=lambda: True, record=record)
    try:
        call()
    finally:
        dispatch.recorder = before
    if not found:
        raise ValueError("the call runs no operation")
    return found
