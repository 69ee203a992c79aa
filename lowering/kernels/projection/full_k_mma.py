# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.project_append for up to 16 tokens in one kernel by mma.sync: kind ``full_k``, limited by memory bandwidth.

Warps divide K. Operands bypass shared memory, since only one warp of the block multiplies each element:

1. A unit is operand A of mma.sync in the order of memory: lane group g has row g of both of its halves. Any permutation
   of K is correct if both operands share it, so a lane's elements are 16 contiguous bytes.
2. Meanwhile the writer warps look up pages and angles.
3. The warps' accumulators are added through shared memory, and the writer warps write the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32, i32
from kvarn.dialect.layout import cdiv
from kvarn.lowering.tiles.ir import WARP

from ..base import Expansion
from ..common import BYTES, begin, starts_early
from .common import ProductArguments, Projection, Scales, constant_weight, look_up, scaled, table_of
from .full_k import ANGLE_BYTES, HALF, MMA_TOKENS, UNIT, Units, tile_for, units_of

LANES = 4  # lanes that share a row
COLUMNS = 8  # tokens per product
EACH = UNIT * COLUMNS // WARP  # accumulators per thread, for a unit and a product's tokens
# (words of operands and accumulators per thread at most, multiplying warps, runs in flight).
HELD = ((64, 16, 2), (68, 16, 1), (100, 12, 1), (140, 8, 1))
MOST_WRITERS = 4  # in warps
ALL = 1  # a named barrier at which all threads wait, in either role


@dataclass(frozen=True)
class Config:
    """A case with the entries of its schedule.

    Attributes
    ----------
    tokens : int
        An upper bound of the tokens.
    units : int
        Units of 16 columns per block.
    runs : int
        16-byte loads of a row that a thread has in flight.
    warps : int
        Warps that multiply.
    constant : bool
        As in ``projection_stream_k.Config``.
    """

    case: Projection
    tokens: int
    units: int
    runs: int
    warps: int
    constant: bool = False

    @property
    def tile_columns(self) -> int:
        """Columns per tile."""
        return self.units * UNIT

    @property
    def step(self) -> int:
        """Elements of K per step of a warp."""
        return self.runs * LANES * BYTES // self.case.x.itemsize

    @property
    def steps(self) -> int:
        return self.case.k // self.step

    @property
    def threads(self) -> int:
        return (self.warps + self.writers) * WARP

    @property
    def writers(self) -> int:
        """Warps that write heads."""
        return min(cdiv(self.tokens * self.units, WARP), MOST_WRITERS)


def chosen(case: Projection, schedule: Mapping[str, Any]) -> Config:
    """The units per block that load the device most evenly, and as many loads in flight as registers allow."""
    tokens = next(n for n in MMA_TOKENS if n >= schedule["max_tokens"])
    _, units = tile_for(case, tokens, columns=schedule.get("tile_columns"))
    of_tokens = tokens // COLUMNS
    for most, warps, runs in HELD:
        config = Config(case, tokens, units, runs, warps)
        held = EACH * units * of_tokens + runs * (8 * units + 4 * of_tokens)
        if held <= most and case.k % config.step == 0:
            return config
    return Config(case, tokens, units, 1, HELD[-1][1])


def configured(case: Projection, schedule: Mapping[str, Any]) -> Config:
    """The configuration of a complete schedule."""
    tokens = next(n for n in MMA_TOKENS if n >= schedule["max_tokens"])
    return Config(case, tokens, schedule["tile_columns"] // UNIT, schedule["runs"], schedule["warps"])


def kernel_of(config: Config, units: Units, early: bool) -> Any:
    """The kernel: warps that multiply, then warps that write."""
    case, U, N, W, RUNS = config.case, config.units, config.tokens, config.warps, config.runs
    of_row = case.k * case.x.itemsize // BYTES  # 16-byte accesses per row
    pitch = U * UNIT + HALF  # elements per token of the products in shared memory, free of bank conflicts
    parts = U * (N // COLUMNS) * EACH
    writers = config.writers * WARP
    waves = cdiv(N * U, writers)

    @kv.func
    def all_arrive():
        """Wait for all threads."""
        kv.named_barrier(ALL, config.threads)

    @kv.func
    def words_of(operand, place, j, run, constant):
        """16 bytes of a row in step j; ``place`` is a lane's first position, in units of 16 bytes."""
        offset = kv.i64(place + j * (RUNS * LANES) + run * LANES) * BYTES
        place = operand.address(0, 0) + offset
        found = kv.load_once(place) if constant else place.load(i32, 4)
        return [found[i] for i in range(4)]

    @kv.func
    def add_unit(sums, a, b, run, u):
        """The accumulators plus the products of a unit's words of a run."""
        sums = list(sums)
        for n in kv.static(range(N // COLUMNS)):
            at, of_x = (u * (N // COLUMNS) + n) * EACH, (run * (N // COLUMNS) + n) * 4
            for i in kv.static(range(0, 4, 2)):
                low = 8 * (run * U + u) + i
                high = low + 4
                sums[at : at + EACH] = kv.mma_m16n8k16(
                    [a[low], a[high], a[low + 1], a[high + 1]], b[of_x + i : of_x + i + 2], sums[at : at + EACH], case.x
                )
        return sums

    @kv.func
    def multiply(x, weight, array, warp, lane):
        """Multiply a warp's share of K for all units, and store its accumulators to shared memory."""
        g, t = lane // LANES, lane % LANES
        rows = []
        for u in kv.static(range(U)):
            unit = kv.math.min(kv.block_id.x * U + u, units.count - 1)
            rows += [(column + g) * of_row + t for column in units.columns(unit)]
        tokens = [kv.math.min(n * COLUMNS + g, x.shape[0] - 1) * of_row + t for n in range(N // COLUMNS)]

        if not config.constant:
            begin(early)
        first = kv.math.min(warp, config.steps - 1)
        a, b = [], []
        for run in kv.static(range(RUNS)):
            for row in rows:
                a += words_of(weight, row, first, run, True)
        if config.constant:
            begin(early)
        for run in kv.static(range(RUNS)):
            for token in tokens:
                b += words_of(x, token, first, run, False)
        sums = [kv.f32(0.0)] * parts
        for j in range(warp, config.steps - W, W):
            for run in kv.static(range(RUNS)):
                for u in kv.static(range(U)):
                    sums = add_unit(sums, a, b, run, u)
                    for half in kv.static(range(2)):
                        to = 4 * (2 * (run * U + u) + half)
                        a[to : to + 4] = words_of(weight, rows[2 * u + half], j + W, run, True)
                for n in kv.static(range(N // COLUMNS)):
                    to = (run * (N // COLUMNS) + n) * 4
                    b[to : to + 4] = words_of(x, tokens[n], j + W, run, False)
        if warp < config.steps:
            for run in kv.static(range(RUNS)):
                for u in kv.static(range(U)):
                    sums = add_unit(sums, a, b, run, u)
        for i in kv.static(range(parts)):
            (array.ptr() + ((i * W + warp) * WARP + lane) * 4).store(sums[i])

    @kv.func
    def add(array, products, tokens, scales):
        """Add the warps' accumulators in order, and store the rounded sums as rows of tokens."""
        for e in range(kv.thread_id.x, parts * WARP, config.threads):
            i, lane = e // WARP, e % WARP
            total = kv.f32(0.0)
            for warp in kv.static(range(W)):
                total = total + (array.ptr() + ((i * W + warp) * WARP + lane) * 4).load(f32)
            word, n, u = i % EACH, i // EACH % (N // COLUMNS), i // EACH // (N // COLUMNS)
            token, half, g = n * COLUMNS + lane % LANES * 2 + word % 2, word // 2, lane // LANES
            unit = kv.math.min(kv.block_id.x * U + u, units.count - 1)
            low, high = units.columns(unit)
            column = kv.where(half == 0, low, high) + g
            value = scaled(case, total, kv.math.min(token, tokens - 1), column, scales)
            products[token * pitch + u * UNIT + half * HALF + g] = case.rounded(value)

    @kv.func
    def prepare(to, table, tokens, pages, angles, n):
        """Look up the data of a writer thread's n-th unit of a token."""
        item = kv.thread_id.x - W * WARP + n * writers
        own, token = item // N, item % N
        known = look_up(case, to, table, token, tokens)
        unit = kv.block_id.x * U + own
        known[3] = kv.where((own < U) & (unit < units.count), known[3], 0)
        unit = kv.math.min(unit, units.count - 1)
        pages[item] = known[2]
        units.store_angles(angles.ptr() + item * ANGLE_BYTES, unit, to.freqs, known[1])
        return kv.math.min(token, tokens - 1), kv.math.min(own, U - 1), unit, known

    @kv.func
    def write(to, products, pages, angles, held, n):
        """Write the n-th unit of a thread."""
        token, own, unit, known = held
        item = kv.thread_id.x - W * WARP + n * writers
        known = [known[0], known[1], pages[item], known[3]]
        found = units.stored_angles(angles.ptr() + item * ANGLE_BYTES)
        place = item % N * pitch + own * UNIT
        units.write(to, products.ptr(), place, unit, token, known, found)

    @kv.kernel(block=(config.threads, 1, 1), min_blocks=1)
    def project_whole(a: ProductArguments):
        array = kv.shared(parts * W * WARP, f32, alignment=16)
        products = kv.shared(N * pitch, case.rounded, alignment=16)
        # Looked-up data is kept in shared memory: loads to registers would move after the products.
        pages = kv.shared(waves * writers, i32, alignment=16)
        angles = kv.shared(waves * writers * UNIT, f32, alignment=16)
        lane, warp = kv.thread_id.x % WARP, kv.shuffle_idx(kv.thread_id.x // WARP, 0)
        tokens = a.x.shape[0]
        if warp < W:
            multiply(a.x, a.weight, array, warp, lane)
            all_arrive()
            add(array, products, tokens, a.scales)
            all_arrive()
        else:
            begin(early)
            held = []
            for n in kv.static(range(waves)):
                held.append(prepare(a.to, a.table, tokens, pages, angles, n))
            all_arrive()
            add(array, products, tokens, a.scales)
            all_arrive()
            for n in kv.static(range(waves)):
                write(a.to, products, pages, angles, held[n], n)

    return project_whole


def launch(op: Any, config: Config, at: Expansion) -> None:
    """Launch the kernel."""
    config = replace(config, constant=constant_weight(op, at))
    case, early = config.case, starts_early(at)
    units = units_of(op, at, case)
    some = at.dim(op.x, 0).least(at.constant(1))  # nothing is launched without tokens
    to, scales = units.bands.destination(op), Scales(op.bias, weight_scale=op.weight_scale)
    a = ProductArguments(to, x=op.x, weight=op.weight, table=table_of(op, case), scales=scales)
    grid = (some * cdiv(units.count, config.units), 1, 1)
    at.launch(
        kernel_of(config, units, early), [a], grid, (config.threads, 1, 1), key=(config, units), programmatic=early
    )
