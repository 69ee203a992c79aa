# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.project_append in one kernel by wgmma: kind ``full_k`` where mma.sync has too few registers.

Blocks have units of 16 columns, and all of K for them, as in projection/whole.py. Tokens are operand A, 64 rows per
warpgroup; rows of the weight are operand B without conversion. Boxes of 8 rows are swizzle atoms, so a tile can consist
of units from anywhere in the weight. After the last k-step all warps write heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f8e4m3, i32
from kvarn.dialect.layout import cdiv
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import BARRIER_BYTES, BARRIERS_BYTES, SWIZZLE, WARP, WARPGROUP, WARPGROUP_ROWS

from ..base import Expansion
from ..common import advance, begin, starts_early
from .common import (
    STEPS_OF_ATOM,
    ProductArguments,
    Projection,
    Scales,
    constant_weight,
    look_up,
    operand_maps,
    prefetch_maps,
    promoted,
    scaled,
    table_of,
)
from .whole import ANGLE_BYTES, FULL, HALF, UNIT, Units, tile_for, units_of

RASTER = 2048  # tokens whose tiles visit all columns together, so that they stay in the L2
BOX = 32  # the most tokens per box; boxes without tokens are skipped
TOKENS = (8, 16, 32, 64, 128)  # what max_tokens is rounded up to
MOST_STAGES = 12
WARP_ROWS = 16
KNOWN_BYTES = 16  # what is stored per token: its sequence, position, page and flags
AHEAD = 1024  # bytes of a row to prefetch to the L2 before the previous kernel ends, if one tile has all tokens
KEPT_TOKENS = 64  # tokens up to which their angles are in shared memory, too
COPY_WARPS = 3  # warps: two for the weight, one for tokens
TOGETHER = 4  # units of a thread whose angles are loaded at one time


@dataclass(frozen=True)
class Config:
    """As ``projection_whole.Config``; ``atoms``: swizzle atoms of a row per k-step."""

    case: Projection
    tokens: int
    units: int
    rows: int = 128
    together: int = 16
    atoms: int = 2
    stages: int = 4
    constant: bool = False

    @property
    def tile_columns(self) -> int:
        """Columns per tile."""
        return self.units * UNIT

    @property
    def step(self) -> int:
        return self.atoms * SWIZZLE // self.case.x.itemsize

    @property
    def steps(self) -> int:
        return self.case.k // self.step

    @property
    def together_rows(self) -> int:
        """Blocks of 64 rows that a warpgroup multiplies by the same columns."""
        return 2 if self.rows > 192 else 1

    @property
    def consumers(self) -> int:
        return cdiv(min(self.tokens, self.rows), WARPGROUP_ROWS * self.together_rows)

    @property
    def tile_rows(self) -> int:
        return self.consumers * self.together_rows * WARPGROUP_ROWS

    @property
    def reallocates_registers(self) -> bool:
        """Whether consumer warps take over registers of other warps: for many accumulators, or fresh ones besides."""
        return self.together_rows > 1 or (self.case.x is f8e4m3 and self.rows > WARPGROUP_ROWS and self.tokens > FULL)

    @property
    def lookup_warps(self) -> int:
        """Warps that look up tokens: with a thread per token if one tile has all of them, for its end waits."""
        return cdiv(self.tile_rows, WARP) if self.tokens <= FULL else 1

    @property
    def threads(self) -> int:
        return WARPGROUP * self.consumers + WARP * (COPY_WARPS + self.lookup_warps)

    @property
    def stores_angles(self) -> bool:
        """Whether angles are stored in shared memory before the products are complete."""
        return self.tokens <= KEPT_TOKENS

    @property
    def known_bytes(self) -> int:
        """Bytes of the stored token data of a tile."""
        return self.tile_rows * (KNOWN_BYTES + (self.units * ANGLE_BYTES if self.stores_angles else 0))

    @property
    def pitch(self) -> int:
        """Elements per token of the products in shared memory, free of bank conflicts."""
        return self.together * UNIT + HALF

    @property
    def box(self) -> int:
        """Tokens per box."""
        return min(self.tokens, BOX)

    @property
    def x_bytes(self) -> int:
        """Bytes of a swizzle atom of all tokens."""
        return self.tile_rows * SWIZZLE

    @property
    def weight_bytes(self) -> int:
        return self.units * UNIT * SWIZZLE

    @property
    def moves(self) -> list[tuple[int, int]]:
        """Byte offsets of the operands of each k-step in a stage, relative to the first."""
        return [(n * self.x_bytes + s, n * self.weight_bytes + s) for n in range(self.atoms) for s in STEPS_OF_ATOM]

    @property
    def stage_bytes(self) -> int:
        return self.atoms * (self.x_bytes + self.weight_bytes)


def chosen(case: Projection, schedule: Any, target: Target) -> Config:
    """The tiles of :func:`tile_for`, with as many stages as fit.

    Raises
    ------
    ValueError
        If the given stages, or two, do not fit.
    """
    tokens = next((n for n in TOKENS if n >= schedule["max_tokens"]), schedule["max_tokens"])
    rows, units = tile_for(case, tokens, schedule.get("rows"), schedule.get("tile_columns"))
    atoms = schedule.get("atoms", 2 if tokens * case.x.itemsize <= FULL else 1)
    atoms = atoms if case.k % (atoms * SWIZZLE // case.x.itemsize) == 0 else 1
    together = units if rows < 192 else 4
    config = Config(case, tokens, units, rows, together, atoms)
    left = target.shared_bytes - BARRIERS_BYTES - 1024
    left -= config.consumers * WARPGROUP_ROWS * config.pitch * 2 + 2 * config.known_bytes
    stages = schedule.get("stages") or max(2, min(MOST_STAGES, left // config.stage_bytes))
    if stages * config.stage_bytes > left:
        tile = f"{config.tile_rows} tokens x {units * UNIT} columns"
        raise ValueError(f"{stages} stages of {tile} must fit {target.shared_bytes} bytes of shared memory")
    return replace(config, stages=stages)


def kernel_of(config: Config, units: Units, early: bool) -> Any:
    """The kernel: consumers, two warps that copy the weight, one for tokens, and warps that look up tokens."""
    case, U, M, box = config.case, config.units, config.tile_rows, config.box
    R = config.together_rows
    stages, pitch, atoms = config.stages, config.pitch, config.atoms
    consumers = config.consumers * WARPGROUP // WARP  # warps
    groups = cdiv(units.count, U)
    parts = [range(n, min(n + config.together, U)) for n in range(0, U, config.together)]
    ahead = min(AHEAD, case.k * case.x.itemsize)
    rotated = units.writer.rotations[1].rotated

    @kv.func
    def tile_of(number, tokens):
        """(first token, first unit) of a tile; tiles of the same columns are consecutive, within RASTER tokens."""
        row_tiles = (tokens + (M - 1)) // M
        if config.tokens <= RASTER:
            group = number // row_tiles
            return (number - group * row_tiles) * M, group * U
        band = number // (RASTER // M * groups)
        inside = number - band * (RASTER // M * groups)
        high = kv.math.min(row_tiles - band * (RASTER // M), RASTER // M)
        group = inside // high
        return (band * (RASTER // M) + (inside - group * high)) * M, group * U

    @kv.func
    def tiles_of(tokens):
        return (tokens + (M - 1)) // M * groups

    @kv.func
    def unit_at(first, n):
        return kv.math.min(first + n, units.count - 1)

    @kv.func
    def copy_weight(map, array, full, empty, tokens, half):
        """Copy the boxes of eight rows that are one half of the units; run by one thread that does nothing else."""
        slot, phase = kv.i32(0), kv.i32(1)
        for number in range(kv.block_id.x, tiles_of(tokens), kv.grid_dim.x):
            _, first = tile_of(number, tokens)
            rows = []
            for u in kv.static(range(U)):
                low, high = units.columns(unit_at(first, u))
                rows.append(kv.where(half == 0, low, high))
            if not config.constant:
                begin(early)  # for a block's first tile, after its rows have been located
            for j in range(0, config.steps):
                kv.mbarrier_wait(empty + slot * BARRIER_BYTES, phase, name="an empty stage")
                barrier, to = full + slot * BARRIER_BYTES, array + slot * config.stage_bytes
                to = to + (half * (HALF * SWIZZLE) + atoms * config.x_bytes)
                if kv.elect():
                    kv.mbarrier_arrive_expect_tx(barrier, atoms * config.weight_bytes // 2)
                    for u in kv.static(range(U)):
                        for atom in kv.static(range(atoms)):
                            place = atom * config.weight_bytes + u * (UNIT * SWIZZLE)
                            kv.tma.load_box(map, (0, rows[u], j * atoms + atom, 0), to + place, barrier)
                kv.syncwarp()
                slot, phase = advance(stages, slot, phase, 1)

    @kv.func
    def copy_tokens(map, array, full, empty, tokens):
        """Copy boxes of tokens; boxes without tokens are skipped."""
        slot, phase = kv.i32(0), kv.i32(1)
        for number in range(kv.block_id.x, tiles_of(tokens), kv.grid_dim.x):
            first, _ = tile_of(number, tokens)
            boxes = (kv.math.min(tokens - first, M) + (box - 1)) // box
            for j in range(0, config.steps):
                kv.mbarrier_wait(empty + slot * BARRIER_BYTES, phase, name="an empty stage")
                barrier, to = full + slot * BARRIER_BYTES, array + slot * config.stage_bytes
                if kv.elect():
                    kv.mbarrier_arrive_expect_tx(barrier, boxes * (atoms * box * SWIZZLE))
                    for n in kv.static(range(M // box)):
                        if n < boxes:
                            for atom in kv.static(range(atoms)):
                                place = to + (atom * config.x_bytes + n * (box * SWIZZLE))
                                kv.tma.load_box(map, (0, first + n * box, j * atoms + atom, 0), place, barrier)
                kv.syncwarp()
                slot, phase = advance(stages, slot, phase, 1)

    @kv.func
    def ask_ahead(weight, number):
        """Prefetch the block's first reads to the L2 while earlier kernels end."""
        _, first = tile_of(kv.block_id.x, 1)
        for u in range(number, U, config.lookup_warps):
            if kv.elect():
                for column in kv.static(units.columns(unit_at(first, u))):
                    for i in kv.static(range(HALF)):
                        kv.cp_async_bulk_prefetch(weight.address(column + i, 0), ahead)
            kv.syncwarp()

    @kv.func
    def prepare(a, tokens, known, known_full, known_empty, warp, lane):
        """Look up a tile's tokens and store their data to shared memory; store or prefetch their angles, too."""
        slot, phase = kv.i32(0), kv.i32(1)
        for number in range(kv.block_id.x, tiles_of(tokens), kv.grid_dim.x):
            first, first_unit = tile_of(number, tokens)
            kv.mbarrier_wait(known_empty + slot * BARRIER_BYTES, phase, name="an empty table of tokens")
            for row in range(warp * WARP + lane, M, config.lookup_warps * WARP):
                found = look_up(case, a.to, a.table, first + row, tokens)
                at = known + slot * config.known_bytes
                (at + row * KNOWN_BYTES).store(kv.vector(i32, found))
                if config.stores_angles:
                    for u in kv.static(range(U)):
                        place = at + M * KNOWN_BYTES + (row * U + u) * ANGLE_BYTES
                        units.store_angles(place, unit_at(first_unit, u), a.to.freqs, found[1])
                elif a.to.freqs is not None:
                    angle = kv.math.min(kv.math.max(found[1], 0), a.to.freqs.shape[0] - 1)
                    kv.cp_async_bulk_prefetch(a.to.freqs.address(angle, 0), rotated * a.to.freqs.dtype.itemsize)
            kv.syncwarp()
            kv.mbarrier_arrive(known_full + slot * BARRIER_BYTES, lane == 0)
            slot, phase = advance(2, slot, phase, 1)

    @kv.func
    def multiply(sums, place, group):
        """The accumulators plus the products of a stage."""
        b = kv.wgmma_descriptor(place + atoms * config.x_bytes)
        found, size = [], U * UNIT // 2
        for r in kv.static(range(R)):
            a = kv.wgmma_descriptor(place + (group * R + r) * (WARPGROUP_ROWS * SWIZZLE))
            some = sums[r * size : (r + 1) * size]
            if case.x is f8e4m3:
                for n in kv.static(range(atoms)):
                    some = promoted(some, a, b, case.x, moved=(n * config.x_bytes, n * config.weight_bytes))
                found.append(some)
            else:
                found.append(kv.wgmma_start(some, a, b, config.moves, case.x))
        if case.x is f8e4m3:
            return [x for some in found for x in some]
        return [x for some in kv.wgmma_wait(0, *found) for x in some]

    @kv.func
    def stage(a, products, sums, some, first, token0, tokens, warp, lane):
        """Store a warp's rows of a finished tile, from ``token0`` up, rounded, to shared memory."""
        g, t = lane // 4, lane % 4
        row = warp * WARP_ROWS + g
        for u in kv.static(some):
            starts = units.columns(unit_at(first, u))
            for half in kv.static(range(2)):
                for r in kv.static(range(2)):
                    pair = []
                    for i in kv.static(range(2)):
                        token = kv.math.min(token0 + g + 8 * r, tokens - 1)
                        x = sums[4 * (2 * u + half) + 2 * r + i]
                        pair.append(case.rounded(scaled(case, x, token, starts[half] + 2 * t + i, a.scales)))
                    place = (row + 8 * r) * pitch + (u - some[0]) * UNIT + half * HALF + 2 * t
                    (products + place * 2).store(kv.vector(case.rounded, pair))

    @kv.func
    def write(a, products, known, row0, some, token0, first, tokens, warp, lane):
        """Write the heads of a warp's rows, one unit of a token per thread at a time."""
        waves, P = cdiv(WARP_ROWS * len(some), WARP), len(some)
        for start in kv.static(range(0, waves, TOGETHER)):
            held = []
            for n in kv.static(range(start, min(start + TOGETHER, waves))):  # angle loads are in flight together
                item = n * WARP + lane
                row, own = kv.math.min(item // P, WARP_ROWS - 1), item % P
                words = (known + (row0 + row) * KNOWN_BYTES).load(i32, 4)
                flags = kv.where((item < WARP_ROWS * P) & (first + some[0] + own < units.count), words[3], 0)
                unit = unit_at(first, some[0] + own)
                if config.stores_angles:
                    place = known + M * KNOWN_BYTES + ((row0 + row) * U + some[0] + own) * ANGLE_BYTES
                    found = units.stored_angles(place)
                else:
                    found = units.angles(unit, a.to.freqs, words[1])
                held.append((row, own, unit, [words[0], words[1], words[2], flags], found))
            for row, own, unit, of_token, found in kv.static(held):
                token = kv.math.min(token0 + row, tokens - 1)
                place = (warp * WARP_ROWS + row) * pitch + own * UNIT
                units.write(a.to, products, place, unit, token, of_token, found)

    @kv.kernel(block=(config.threads, 1, 1), min_blocks=1)
    def project_whole(a: ProductArguments):
        array = kv.shared(stages * config.stage_bytes, kv.u8, alignment=1024).ptr()
        products = kv.shared(consumers * WARP_ROWS * pitch, case.rounded, alignment=16).ptr()
        known = kv.shared(2 * config.known_bytes, kv.u8, alignment=16).ptr()
        full = kv.shared(2 * stages + 4, kv.i64).ptr()
        empty = full + stages * BARRIER_BYTES
        known_full = empty + stages * BARRIER_BYTES
        known_empty = known_full + 2 * BARRIER_BYTES
        lane, warp = kv.thread_id.x % WARP, kv.shuffle_idx(kv.thread_id.x // WARP, 0)
        tokens = a.x.shape[0]
        prefetch_maps(a.x_map, a.weight_map)
        if kv.thread_id.x == 0:
            for n in kv.static(range(stages)):
                kv.mbarrier_init(full + n * BARRIER_BYTES, 3, f"full[{n}]")
                kv.mbarrier_init(empty + n * BARRIER_BYTES, consumers, f"empty[{n}]")
            for n in kv.static(range(2)):
                kv.mbarrier_init(known_full + n * BARRIER_BYTES, config.lookup_warps, f"full_known[{n}]")
                kv.mbarrier_init(known_empty + n * BARRIER_BYTES, consumers, f"empty_known[{n}]")
            kv.fence_mbarrier_init()
        kv.barrier()
        if config.reallocates_registers:
            if warp < consumers:
                kv.setmaxnreg(232, "increase")
            else:
                kv.setmaxnreg(40, "decrease")
        if warp < consumers:
            begin(early)
            slot, phase, known_slot, known_phase = kv.i32(0), kv.i32(0), kv.i32(0), kv.i32(0)
            for number in range(kv.block_id.x, tiles_of(tokens), kv.grid_dim.x):
                token0, first = tile_of(number, tokens)
                sums = [kv.f32(0.0)] * (R * U * UNIT // 2)
                for _ in range(0, config.steps):
                    kv.mbarrier_wait(full + slot * BARRIER_BYTES, phase, name="a full stage")
                    sums = multiply(sums, array + slot * config.stage_bytes, warp // 4)
                    kv.mbarrier_arrive(empty + slot * BARRIER_BYTES, lane == 0)
                    slot, phase = advance(stages, slot, phase, 1)
                kv.mbarrier_wait(known_full + known_slot * BARRIER_BYTES, known_phase, name="a table of tokens")
                for r in kv.static(range(R)):
                    row0 = (warp // 4 * R + r) * WARPGROUP_ROWS + warp % 4 * WARP_ROWS
                    of_tile = known + known_slot * config.known_bytes
                    mine = sums[r * (U * UNIT // 2) : (r + 1) * (U * UNIT // 2)]
                    for some in kv.static(parts):
                        kv.syncwarp()  # the warp's earlier rows have been written
                        stage(a, products, mine, some, first, token0 + row0, tokens, warp, lane)
                        kv.syncwarp()
                        write(a, products, of_tile, row0, some, token0 + row0, first, tokens, warp, lane)
                kv.syncwarp()
                kv.mbarrier_arrive(known_empty + known_slot * BARRIER_BYTES, lane == 0)
                known_slot, known_phase = advance(2, known_slot, known_phase, 1)
        if (warp == consumers) | (warp == consumers + 1):
            copy_weight(a.weight_map, array, full, empty, tokens, warp - consumers)
        if warp == consumers + 2:
            begin(early)
            copy_tokens(a.x_map, array, full, empty, tokens)
        if warp >= consumers + COPY_WARPS:
            number = warp - (consumers + COPY_WARPS)
            if config.tokens <= FULL and early and not config.constant:
                ask_ahead(a.weight, number)
            begin(early)
            prepare(a, tokens, known, known_full, known_empty, number, lane)

    return project_whole


def launch(op: Any, config: Config, at: Expansion) -> None:
    """Launch the kernel."""
    config = replace(config, constant=constant_weight(op, at))
    case, early = config.case, starts_early(at)
    units = units_of(op, at, case)
    x_map, weight_map = operand_maps(op, at, SWIZZLE // case.x.itemsize, config.box, HALF)
    a = ProductArguments(
        units.bands.destination(op), x=op.x, weight=op.weight, x_map=x_map, weight_map=weight_map,
        table=table_of(op, case), scales=Scales.of(op),
    )  # fmt: skip
    tiles = (at.dim(op.x, 0) + (config.tile_rows - 1)) // config.tile_rows * cdiv(units.count, config.units)
    grid = (tiles.least(at.device("multiprocessors")), 1, 1)
    at.launch(
        kernel_of(config, units, early), [a], grid, (config.threads, 1, 1), key=(config, units), programmatic=early
    )
