# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.project_append by wgmma with a weight that is converted in registers: kind ``stream_k`` from 64 tokens up.

The weight has the rows, and stream-K divides the tiles' k-steps evenly among blocks, as in the other kernels of this
kind. TMA copies unconverted rows to a circular buffer; eight warps load 16 bytes of two of their 16 rows and convert
them in registers to fragments of operand A, so that each element is converted once, and no converted element is written
to memory. Any permutation of K is correct if both operands share it: a thread's elements are neighbours, and
:func:`permute_kernel` first writes the tokens in the same order, once for all blocks, so that TMA copies them too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect import ops
from kvarn.dialect.dtypes import f32, i32
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.dequantize import in_order_of_four_bits
from kvarn.lowering.tiles.ir import BARRIER_BYTES, BARRIERS_BYTES, SWIZZLE, WARP

from ..base import Expansion
from ..common import BYTES, THREADS, advance, begin, row_alignment, starts_early
from .common import STEPS_OF_ATOM, Projection, prefetch_maps
from .stream_k import FINISH_BYTES, finish_partials, part_of
from .stream_k_mma import (
    COLUMNS,
    LANES,
    ROWS,
    WARPS,
    Config as OfMma,
    factors_of,
    problems,
    stored_weight,
    weight_pairs,
)

MOST_TOKENS = 128  # per block, whose accumulators leave registers for the conversion
PANELS, STAGES = 8, 10  # the most panels of tokens, and stages of the weight, in shared memory
PANELS_BYTES = 110 << 10
LEAST_TOKENS = 64  # with fewer, the permutation takes longer than it saves
RUNS = SWIZZLE // (LANES * BYTES)  # runs of a row in a tile: the 16 bytes of each of four lanes
PRODUCER_WARPS = 2  # for the weight, and for the tokens
REGISTERS = 152  # per thread, which leave registers for a block of the second kernel


@dataclass(frozen=True)
class Config(OfMma):
    """As for mma.sync; a k-step has the elements in 128 bytes of a row."""

    @property
    def tokens(self) -> int:
        """Tokens per block."""
        return min(self.few.tokens, MOST_TOKENS)

    @property
    def weight(self) -> SharedLayout:
        """The layout of a tile of the weight, as bytes."""
        return SharedLayout(self.few.rows, SWIZZLE, 1, SWIZZLE)

    @property
    def panel(self) -> SharedLayout:
        """The layout of a panel: 128 bytes of every token."""
        size = self.dtype.itemsize
        return SharedLayout(self.tokens, SWIZZLE // size, size, SWIZZLE)

    @property
    def panels(self) -> int:
        """Panels of tokens in shared memory."""
        return min(PANELS, PANELS_BYTES // self.panel.bytes)

    @property
    def panels_of_step(self) -> int:
        return self.few.step * self.dtype.itemsize // SWIZZLE

    def stages(self, target: Target) -> int:
        """Stages of the weight in shared memory."""
        left = target.shared_bytes - BARRIERS_BYTES - FINISH_BYTES - self.panels * self.panel.bytes
        return min(STAGES, left // self.weight.bytes)


@dataclass(frozen=True)
class CircularBuffer:
    """Stages in shared memory, each with a ``full`` and an ``empty`` mbarrier: pointers to the first of each."""

    array: Any
    full: Any
    empty: Any


def permute_kernel(config: Config, early: bool) -> Any:
    """Copies tokens with K in the order of the products' k-steps; a thread has the elements of two lanes."""
    E = config.elements  # per lane and run
    chunk = BYTES // config.dtype.itemsize
    chunks = E // chunk  # per lane and run

    @kv.kernel
    def permute(x: kv.Buffer[config.dtype, 2], out: kv.Buffer[config.dtype, 2]):
        begin(early)
        row = kv.block_id.x
        for unit in range(kv.thread_id.x, config.few.case.k // (LANES * chunk), kv.block_dim.x):
            run, c = unit // chunks, unit % chunks
            found = []
            for t in kv.static(range(LANES)):
                words = x.address(row, run * (LANES * E) + t * E + c * chunk).load(i32, 4)
                words = [words[i] for i in range(4)]
                found.append(in_order_of_four_bits(words) if config.stored.packed else words)
            to = out.address(row, unit * (LANES * chunk))
            for i in kv.static(range(4)):  # columns 0 to 7 of a step, 8 to 15, and of the next step
                (to + i * BYTES).store(kv.vector(i32, [words[i] for words in found]))

    return permute


def product_kernel(config: Config, stages: int, early: bool) -> Any:
    """Partial results: block i's of tile p in the rows from (i + p) * ``rows`` up."""
    few, N = config.few, config.tokens
    steps, columns, panels, E = few.steps, few.case.columns, config.panels, config.elements
    weight_tile, panel_tile = config.weight, config.panel
    options: dict[str, Any] = {"max_registers": REGISTERS}
    threads = (WARPS + PRODUCER_WARPS) * WARP

    @kv.func
    def factors(scales, minima, rows, step, last, t):
        """The scales and minima of a thread's elements of a step, by run and row."""
        found = []
        for run in kv.static(range(RUNS)):
            d = (kv.math.min(step, last - 1) * RUNS + run) * (LANES * E) + t * E
            found += [list(factors_of(config, scales, minima, row, d)) for row in rows]
        return found

    @kv.func
    def multiply(weight, tokens, part, partials, scales, minima, warp, lane):
        """The products of a block's range of k-steps, as stages of the weight and panels of tokens arrive."""
        low, high = part
        g, t = lane // LANES, lane % LANES
        row0 = warp * ROWS + g
        slot, phase, panel, panel_phase = kv.i32(0), kv.i32(0), kv.i32(0), kv.i32(0)
        for p in range(low // steps, (high + (steps - 1)) // steps):
            first, last = kv.math.max(low - p * steps, 0), kv.math.min(high - p * steps, steps)
            rows = [kv.math.min(p * few.rows + row0 + 8 * r, columns - 1) for r in range(2)]
            held = factors(scales, minima, rows, first, last, t)
            sums = [kv.f32(0.0)] * (N // 2)
            for j in range(first, last):
                following = factors(scales, minima, rows, j + 1, last, t)
                kv.mbarrier_wait(weight.full + slot * BARRIER_BYTES, phase, name="full_weight")
                tile, raw = weight.array + slot * weight_tile.bytes, []
                for run in kv.static(range(RUNS)):
                    for r in kv.static(range(2)):
                        words = (tile + weight_tile.chunk_offset(row0 + 8 * r, run * LANES + t)).load(i32, 4)
                        raw.append([words[i] for i in range(4)])
                kv.syncwarp()
                kv.mbarrier_arrive(weight.empty + slot * BARRIER_BYTES, lane == 0)
                slot, phase = advance(stages, slot, phase, 1)
                for run in kv.static(range(RUNS)):
                    a = []
                    for r in kv.static(range(2)):
                        of_groups, lows = held[2 * run + r]
                        wide = [kv.f32(s) for s in of_groups], [kv.f32(m) for m in lows]
                        a.append(weight_pairs(config, raw[2 * run + r], *wide))
                    for begun in kv.static(range(0, len(a[0]), 8)):
                        kv.mbarrier_wait(tokens.full + panel * BARRIER_BYTES, panel_phase, name="full_tokens")
                        words = [[a[0][i], a[1][i], a[0][i + 1], a[1][i + 1]] for i in range(begun, begun + 8, 2)]
                        b = kv.wgmma_descriptor(tokens.array + panel * panel_tile.bytes)
                        sums = kv.wgmma(sums, words, b, STEPS_OF_ATOM, config.dtype)
                        kv.mbarrier_arrive(tokens.empty + panel * BARRIER_BYTES, lane == 0)
                        panel, panel_phase = advance(panels, panel, panel_phase, 1)
                held = following
            row = (kv.block_id.x + p) * few.rows + row0
            for n in kv.static(range(N // COLUMNS)):
                for r in kv.static(range(2)):
                    pair = kv.vector(f32, sums[4 * n + 2 * r : 4 * n + 2 * r + 2])
                    partials.store(row + 8 * r, kv.block_id.y * N + n * COLUMNS + 2 * t, value=pair)

    @kv.func
    def copy(map, to, count, layout, part, place_of):
        """Copy the boxes of ``part`` by one warp to a ring of ``count`` stages; ``place_of``: a box's row and run."""
        slot, phase = kv.i32(0), kv.i32(1)
        for i in range(*part):
            row, run = place_of(i)
            kv.mbarrier_wait(to.empty + slot * BARRIER_BYTES, phase, name="an empty stage")
            if kv.elect():
                barrier = to.full + slot * BARRIER_BYTES
                kv.mbarrier_arrive_expect_tx(barrier, layout.bytes)
                kv.tma.load_box(map, (0, row, run, 0), to.array + slot * layout.bytes, barrier)
            kv.syncwarp()
            slot, phase = advance(count, slot, phase, 1)

    @kv.kernel(block=(threads, 1, 1), **options)
    def project_few(x_map, weight_map, partials: kv.Buffer[f32, 2], scales=None, minima=None):
        array = kv.shared(stages * weight_tile.bytes + panels * panel_tile.bytes, kv.u8, alignment=1024).ptr()
        panel_array = array + stages * weight_tile.bytes
        full = kv.shared(2 * (stages + panels), kv.i64).ptr()
        empty = full + stages * BARRIER_BYTES
        panel_full = empty + stages * BARRIER_BYTES
        weight = CircularBuffer(array, full, empty)
        tokens = CircularBuffer(panel_array, panel_full, panel_full + panels * BARRIER_BYTES)
        lane, warp = kv.thread_id.x % WARP, kv.shuffle_idx(kv.thread_id.x // WARP, 0)
        if kv.thread_id.x == 0:
            for n in kv.static(range(stages)):
                kv.mbarrier_init(weight.full + n * BARRIER_BYTES, 1, f"full_weight[{n}]")
                kv.mbarrier_init(weight.empty + n * BARRIER_BYTES, WARPS, f"empty_weight[{n}]")
            for n in kv.static(range(panels)):
                kv.mbarrier_init(tokens.full + n * BARRIER_BYTES, 1, f"full_tokens[{n}]")
                kv.mbarrier_init(tokens.empty + n * BARRIER_BYTES, WARPS, f"empty_tokens[{n}]")
            kv.fence_mbarrier_init()
        prefetch_maps(x_map, weight_map)
        kv.barrier()
        low = part_of(few, kv.block_id.x, kv.grid_dim.x)
        high = part_of(few, kv.block_id.x + 1, kv.grid_dim.x)
        each = config.panels_of_step
        if warp < WARPS:
            begin(early)
            multiply(weight, tokens, (low, high), partials, scales, minima, warp, lane)
        if warp == WARPS:
            # The weight's copies do not wait: the token kernel has waited already and does not write it.
            of_weight = lambda i: (i // steps * few.rows, i % steps)  # noqa: E731
            copy(weight_map, weight, stages, weight_tile, (low, high), of_weight)
        if warp == WARPS + 1:
            begin(early)
            of_tokens = lambda i: (kv.block_id.y * N, i % (steps * each))  # noqa: E731
            bounds = low * each, high * each
            copy(x_map, tokens, panels, panel_tile, bounds, of_tokens)

    return project_few


def takes(op: Any, case: Projection, at: Expansion) -> bool:
    """Whether the kernel supports a case: wgmma is available, and rows of the weight are whole runs of 128 bytes."""
    stored = stored_weight(op, at, case)
    k = at.static_dim(op.weight, 1) * stored.dtype.itemsize
    if not at.target.has("wgmma") or k % SWIZZLE or problems(case, stored, at.target, row_alignment(op)):
        return False
    handle = ops.buffer_operand(op.weight, k // SWIZZLE, SWIZZLE)
    return at.why_no_tensor_map(handle, rows=WARPS * ROWS) is None


def chosen(op: Any, case: Projection, of_mma: OfMma, at: Expansion) -> Config | None:
    """The configuration of a case; None if mma.sync is used, for few tokens or an unsupported case."""
    if of_mma.few.tokens < LEAST_TOKENS or not takes(op, case, at):
        return None
    return configured(op, of_mma, at)


def configured(op: Any, of_mma: OfMma, at: Expansion) -> Config:
    """The configuration of a supported case."""
    runs = at.static_dim(op.weight, 1) * of_mma.stored.dtype.itemsize // SWIZZLE
    return Config(replace(of_mma.few, step_of=of_mma.few.case.k // runs), of_mma.stored)


def launch(op: Any, given: Any, config: Config, scales: Any, minima: Any, at: Expansion) -> None:
    """Launch all kernels; ``given`` has the stored weight, ``op`` the tokens that are multiplied."""
    few, early = config.few, starts_early(at)
    tokens, k = at.dim(op.x, 0), few.case.k
    # Rows past the tokens are allocated, though undefined: copies of out-of-bounds rows take longer.
    permuted = at.workspace(few.tokens, dtype=config.dtype, columns=k)
    at.launch(
        permute_kernel(config, early), [op.x, permuted], (tokens, 1, 1), (THREADS, 1, 1), key=(config, "permute"),
        programmatic=early,
    )  # fmt: skip
    width = SWIZZLE // config.dtype.itemsize
    x_map = at.tensor_map(ops.buffer_operand(permuted, k // width, width), rows=config.tokens)
    bytes_of_row = at.static_dim(given.weight, 1)
    weight_map = at.tensor_map(ops.buffer_operand(given.weight, bytes_of_row // SWIZZLE, SWIZZLE), rows=few.rows)
    groups = few.tokens // config.tokens
    blocks = (at.device("multiprocessors") // groups).greatest(at.constant(1))
    blocks = blocks.least(at.constant(few.tiles * few.steps))
    some = tokens.least(at.constant(1))
    partials = at.workspace((blocks + few.tiles) * few.rows, dtype=f32, columns=few.tokens)
    at.launch(
        product_kernel(config, config.stages(at.target), early), [x_map, weight_map, partials, scales, minima],
        (blocks * some, groups, 1), ((WARPS + PRODUCER_WARPS) * WARP, 1, 1), key=config, programmatic=early,
    )  # fmt: skip
    finish_partials(op, few, at, partials, blocks)
