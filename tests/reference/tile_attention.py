# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The attention kernel over tiles, compiled for a GPU, run by the PTX interpreter and compared with a float64 model.

What a schedule may choose (consumer warpgroups, a producer, copies, stages, overlap, turns) is given entry by entry,
and passes may be left out: whatever is chosen, the output is that of the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mlir import ir

import kvarn as kv
from kvarn.compilation.kernel import Kernel
from kvarn.dialect import dtypes, tma_layout
from kvarn.dialect.latent_layout import RowFormat
from kvarn.dialect.layout import CacheSpec, CollectionSpec
from kvarn.emulator import Report, grid as ptx, run as emulated
from kvarn.emulator.stream import Stream
from kvarn.lowering.kernels.attention.arguments import AttentionArguments
from kvarn.lowering.kernels.attention.case import Case, Masking
from kvarn.lowering.kernels.attention.kernel import attention_kernel
from kvarn.lowering.kernels.attention.key_splits import WARPS, combine_kernel
from kvarn.lowering.kernels.attention.specialisation import TileArguments, TileKernel
from kvarn.lowering.rewrite import kernels
from kvarn.lowering.schedules.attention import TileConfig
from kvarn.lowering.target import by_name
from kvarn.lowering.tiles.boxes import swizzle_of_boxes
from kvarn.lowering.tiles.ir import WGMMA
from kvarn.runtime import tensormap

from . import attention as reference
from .random_caches import Problem, random_query, stored_problem

TARGET = "sm_90a"
LAYER = 1


@dataclass(frozen=True)
class WithRows(Case):
    """A case, and whether there is a sink a head and whether the log-sum-exp is wanted."""

    sinks: bool = False
    lse: bool = True


@dataclass(frozen=True)
class Choice:
    """What a schedule chooses.

    Attributes
    ----------
    consumers : int
        Warpgroups of 64 query rows.
    few : int
        Query rows of the one warpgroup that multiplies, where these are fewer.
    keys : int
        Keys of a tile.
    producer, maps : bool
        Whether a warpgroup of its own copies, and whether copies are by TMA.
    stages : int
    blocks : int, optional
        Persistent blocks, which share the tiles of query rows; by default a block a tile.
    splits : int
        Splits of the keys of a tile at most, each of a tile of keys or more.
    queue : bool
        Whether blocks take tiles from a queue.
    most : int, optional
        New tokens that no sequence has more of.
    entries : tuple
        Further entries of the schedule, as (name, bool or int).
    disable : tuple of str
        Passes that are left out.
    options : tuple
        Options of passes, as (pass, text).
    target : str
    """

    consumers: int = 1
    few: int = 0
    keys: int = 64
    producer: bool = True
    producers: int = 1
    maps: bool = True
    stages: int = 2
    blocks: int | None = None
    splits: int = 1
    queue: bool = False
    most: int | None = None
    entries: tuple[tuple[str, Any], ...] = ()
    disable: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    target: str = TARGET

    @property
    def rows(self) -> int:
        return self.few or 64 * self.consumers // dict(self.entries).get("across", 1)

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + (self.producers if self.producer else 0))

    def schedule(self) -> str:
        """The attribute ``kv.schedule``, in MLIR's syntax."""
        entries = {"consumers": self.consumers, "producer": self.producer, "stages": self.stages}
        entries |= {"producers": self.producers} if self.producers > 1 else {}
        entries |= dict(self.entries)
        return "{" + ", ".join(f"{n} = {_text(v)}" for n, v in entries.items()) + "}"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else f"{value} : i64"


def trace(case: WithRows, spec: CollectionSpec, choice: Choice, prior: bool = False) -> ir.Module:
    """The kernel of a case, with the schedule on it, before any pass."""
    weights = TileConfig(case, instruction=dict(choice.entries).get("instruction", WGMMA)).weights
    kernel = attention_kernel(specialised(case, choice, weights))
    box = _box(spec.cache, choice) if choice.maps else None
    rows = kv.Buffer[case.query, case.rank]
    given = dataclasses.replace(
        _arguments(case, spec, prior), query=rows, scale=kv.f32, slopes=kv.Buffer[kv.f32, 1] if case.alibi else None
    )
    launched = TileArguments(kv.i32, box, box, *_parts(choice), queue=kv.Buffer[kv.i8, 1] if choice.queue else None)
    module = kernel.trace([given, launched])
    (function,) = kernels(module)
    function.attributes["kv.schedule"] = ir.Attribute.parse(choice.schedule(), module.context)
    return module


def _box(spec: CacheSpec, choice: Choice) -> tma_layout.TmaSpec:
    """The tile of a cache's descriptor."""
    converted = spec.dtype.bits == 8
    swizzle = f"{swizzle_of_boxes(spec) if converted else 128}B"
    return tma_layout.launch_tile(spec, min(spec.page_size or choice.keys, choice.keys), swizzle=swizzle)


def _descriptor(cache: Any, choice: Choice) -> Any:
    """A cache's descriptor, as a launch makes it."""
    return tensormap.of_owner(tensormap.describe(_box(cache.spec, choice), cache.spec, cache.fields()), cache)


@functools.cache
def compiled(case: WithRows, spec: CollectionSpec, choice: Choice, prior: bool = False) -> Any:
    """The kernel of a case for the target."""
    return kv.compile(
        trace(case, spec, choice, prior),
        target=choice.target,
        disable=list(choice.disable),
        options=dict(choice.options),
    )


def specialised(case: Case, choice: Choice, weights: Any = None) -> TileKernel:
    """What the kernel of a case is specialised for."""
    return TileKernel(case, choice.rows, choice.keys, choice.threads, 1, most=choice.most, weights=weights)


def _arguments(case: WithRows, spec: CollectionSpec, prior: bool) -> AttentionArguments:
    """The specs of the arguments that the kernel and the one that combines have."""
    rows, of_rows = kv.Buffer[case.query, case.rank], kv.Buffer[kv.f32, case.rank - 1]
    return AttentionArguments(
        collection=spec, layer=kv.i32, extents=kv.Buffer[kv.i32, 1], out=rows,
        sinks=kv.Buffer[kv.f32, 1] if case.sinks else None, lse=of_rows if case.lse else None,
        prior=kv.Buffer[kv.f32, case.rank] if prior else None, prior_lse=of_rows if prior else None,
    )  # fmt: skip


def _parts(choice: Choice) -> list[Any]:
    """The specs of partial results, of their ends and of the number of splits."""
    return [kv.Buffer[kv.f32, 2], kv.Buffer[kv.f32, 2], kv.i32] if choice.splits > 1 else [None] * 3


@functools.cache
def combining(case: WithRows, spec: CollectionSpec, choice: Choice, prior: bool = False) -> Any:
    """The kernel that combines partial results, for the target."""
    kernel = combine_kernel(specialised(case, choice), by_name(choice.target).has("pdl"))
    given = _arguments(case, spec, prior), TileArguments(kv.i32, None, None, *_parts(choice))
    return kv.compile(kernel, *given, target=choice.target)


@dataclass
class Batch:
    """A random batch: a collection whose tokens are all stored, and queries of a group per KV head."""

    problem: Problem
    query: np.ndarray
    group: int
    sinks: np.ndarray
    slopes: np.ndarray
    extra: Mapping[str, Any] = field(default_factory=dict)


def batch(
    cached: Sequence[int], new: Sequence[int], *, group: int = 4, kind: str = "paged", dtype: str = "bf16",
    head_size: int = 64, page_size: int = 16, num_heads: int = 1, seed: int = 0, **shape: Any,
) -> Batch:  # fmt: skip
    """A batch in which every slot and page that holds no token is NaN; pages are in random order."""
    rng, problem = stored_problem(
        seed, kind, dtype, cached=cached, new=new, head_size=head_size, page_size=page_size, num_heads=num_heads,
        **shape,
    )  # fmt: skip
    query = random_query(rng, problem, num_heads * group)
    heads = num_heads * group
    return Batch(problem, query, group, rng.standard_normal(heads).astype(np.float32),
                 (-np.abs(rng.standard_normal(heads)) / 8).astype(np.float32))  # fmt: skip


def case_of(
    b: Batch, mask: str = "causal", span: int = 0, softcap: float = 0.0, *, sinks: bool = False, slopes: bool = False,
    lse: bool = True, padded: bool = False,
) -> WithRows:  # fmt: skip
    """The case of a batch."""
    spec, query = b.problem.collection.cache_spec, dtypes.of(b.query.dtype)
    return WithRows(
        RowFormat(spec), query, query, b.query.shape[1], spec.head_size, Masking(mask, span), softcap, alibi=slopes,
        padded=padded, sinks=sinks, lse=lse,
    )  # fmt: skip


def run(
    b: Batch,
    case: WithRows,
    choice: Choice,
    scale: float | None = None,
    order: ptx.Order | None = None,
    change: Callable[[str], str] | None = None,
    prior: Sequence[np.ndarray] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp [T, heads, ...] of the kernel; rows that it does not write stay 77.

    ``change`` is given the PTX and gives what is run; ``prior`` is an output and a log-sum-exp over other keys. Hazards
    are errors.
    """
    c, offsets, query = b.problem.collection, b.problem.row_offsets.astype(np.int32), b.query
    counts, width = np.diff(offsets), int(np.diff(offsets).max(initial=1)) + 2
    if case.padded:
        query, extents = reference.padded(query, offsets, width, np.nan), counts.astype(np.int32)
        tiles = len(counts) * -(-width * b.group // choice.rows)
    else:
        extents, tiles = offsets, len(query) * b.group // choice.rows + len(counts)
        if choice.most is not None:
            assert counts.max() <= choice.most
            tiles = len(counts) * -(-choice.most * b.group // choice.rows)
    out, lse = np.full_like(query, 77), np.full(query.shape[:-1], 77, np.float32)
    given = [c, LAYER, query, extents, np.float32(query.shape[-1] ** -0.5 if scale is None else scale), out]
    given += [b.sinks] * case.sinks + [lse] * case.lse + [b.slopes] * case.alibi + [*prior, tiles]
    if choice.maps:
        given += [_descriptor(x, choice) for x in (c.get_key_cache(LAYER), c.get_value_cache(LAYER))]
    units = tiles * case.spec.num_heads * choice.splits
    parts = [np.full((units * choice.rows, n), np.nan, np.float32) for n in (case.value_size, 2)]
    parts = [*parts, choice.splits] if choice.splits > 1 else []
    made, report = compiled(case, c.spec, choice, bool(prior)), Report(choice.target)
    if change is not None:
        made = Kernel(made.artifact.replace(code={"ptx": change(made.asm["ptx"])}))
    counter = np.zeros(4, np.int8)
    taken = [*given, *parts, *[counter] * choice.queue]
    stream, early = Stream(), by_name(choice.target).has("pdl")
    emulated.launch(made, choice.blocks or units, choice.threads, taken, order, report, stream, early)
    assert not counter.any(), "the counter of tiles is not back at 0"
    report.check()
    if choice.splits > 1:
        given = [c, LAYER, extents, out, *[b.sinks] * case.sinks, *[lse] * case.lse, *prior, tiles, *parts]
        grid = tiles * case.spec.num_heads * choice.rows // WARPS
        combine = combining(case, c.spec, choice, bool(prior))
        emulated.launch(combine, grid, 32 * WARPS, given, order, stream=stream, programmatic=early)
    if case.padded:
        past = [(out[i, n:], lse[i, n:]) for i, n in enumerate(counts)]
        assert all((x == 77).all() and (y == 77).all() for x, y in past if case.lse), "a row past the last was written"
        out, lse = (np.concatenate([x[i, :n] for i, n in enumerate(counts)]) for x in (out, lse))
    return out, lse


def check(
    b: Batch, choice: Choice, *, scale: float | None = None, orders: Sequence[ptx.Order | None] = (None,), **what: Any
) -> None:
    """The output and the log-sum-exp are the model's, whatever the hardware chooses."""
    case = case_of(b, **what)
    spans = {"window": case.mask.span} if case.mask.name == "sliding_window" else {"chunk": case.mask.span}
    want, want_lse = reference.attention(
        b.problem.collection, LAYER, b.query, b.problem.row_offsets, scale=scale, mask=case.mask.name,
        softcap=case.softcap, sinks=b.sinks if case.sinks else None, alibi_slopes=b.slopes if case.alibi else None,
        **spans,
    )  # fmt: skip
    for order in orders:
        out, lse = run(b, case, choice, scale, order)
        found = out.astype(np.float64)
        assert np.isfinite(found).all(), f"not finite at {np.argwhere(~np.isfinite(found))[0]}, order {order}"
        biggest = max(1.0, np.abs(want).max(initial=0))
        np.testing.assert_allclose(found / biggest, want / biggest, rtol=2e-2, atol=2e-2, err_msg=f"order {order}")
        if case.lse:
            precise = 1e-3 if case.spec.dtype is case.query else 2e-2  # elements are rounded to the query's type
            np.testing.assert_allclose(lse, want_lse, rtol=precise, atol=precise, err_msg=f"order {order}")
