# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.project_append for many tokens by wgmma, with an epilogue that writes whole heads during the next tile.

A block processes one tile after another. If the consumers wrote the heads themselves, the tensor cores would idle
meanwhile. So two consumer warpgroups multiply 64 tokens each by all columns of a tile, and store the rounded products
in shared memory; four epilogue warps normalise, rotate, quantize and write them. One elected thread copies each operand
by TMA. 8-bit products are added in f32 every 128 elements of K, some columns at a time, since tensor cores keep about
13 bits of a sum; block scales are applied in the same additions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import bf16, f8e4m3, i32
from kvarn.dialect.layout import align_up, cdiv
from kvarn.dialect.ops.projection import BLOCK, Band
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import BARRIER_BYTES, BARRIERS_BYTES, SWIZZLE, WARP, WARPGROUP, WARPGROUP_ROWS

from ..append.head_writer import HeadWriter
from ..base import Expansion
from ..common import CachedHead, Head, StoredHead, advance, as_vector, begin, starts_early
from ..rope.rotation import Angles
from .common import (
    KEPT,
    QUERY,
    STEPS_OF_ATOM,
    Destination,
    ProductArguments,
    Projection,
    Scales,
    Written,
    look_up,
    operand_maps,
    prefetch_maps,
    promoted,
    table_of,
)

CONSUMERS = 2  # warpgroups
ROWS = CONSUMERS * WARPGROUP_ROWS  # tokens per tile
WARPS = CONSUMERS * WARPGROUP // WARP
WRITERS = 3  # epilogue warps of a warpgroup, one of which copies
THREADS = (CONSUMERS + 1) * WARPGROUP
# Registers per consumer thread, and per other thread; for 8-bit products as many as keep ptxas from spilling
# accumulators in the loop over K.
REGISTERS, REGISTERS_8 = (184, 136), (192, 120)
WARP_ROWS = 16
KNOWN_BYTES = 16  # what is stored per token: its sequence, position, page and flags
MOST_STAGES = 6
MOST_TOGETHER = 4  # items of a thread that are looked up at one time; half as many if heads are transformed
RASTER = 16  # tiles of tokens that share a tile of columns while it is in the L2


@dataclass(frozen=True)
class Config:
    """A case with the entries of its schedule.

    Attributes
    ----------
    columns, part : int
        Columns per tile, and per part of it: whole heads of one band.
    stages : int
        Stages of k-steps in shared memory.
    """

    case: Projection
    columns: int
    part: int
    stages: int

    @property
    def step(self) -> int:
        """Elements of K per k-step: one swizzle atom."""
        return SWIZZLE // self.case.x.itemsize

    @property
    def steps(self) -> int:
        return self.case.k // self.step

    @property
    def panels(self) -> int:
        return self.case.columns // self.columns

    @property
    def stage_bytes(self) -> int:
        return (ROWS + self.columns) * SWIZZLE

    @property
    def pitch(self) -> int:
        """Elements per token of the products in shared memory, free of bank conflicts."""
        return self.columns + 8

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + ROWS * self.pitch * 2 + 2 * ROWS * KNOWN_BYTES + BARRIERS_BYTES + 1024


def chosen(case: Projection, target: Target, columns: int, part: int, stages: int | None) -> Config:
    """The configuration of tiles of ``columns`` columns, with the given number of stages, or as many as fit.

    Raises
    ------
    ValueError
        If the stages do not fit.
    """
    for n in [stages] if stages else range(MOST_STAGES, 1, -1):
        config = Config(case, columns, part, n)
        if config.shared_bytes <= target.shared_bytes:
            return config
    raise ValueError(
        f"{stages or 2} stages of {ROWS} x {columns} must fit {target.shared_bytes} bytes of shared memory"
    )


@dataclass(frozen=True)
class Staged(StoredHead):
    """One head of a token of a tile in shared memory, in the type that products are rounded to."""

    row: Any
    first: Any
    dtype: Any

    @kv.func
    def load(self, d: Any, n: int) -> Any:
        """n elements from dim d up, without conversion."""
        return as_vector((self.row + (self.first + d) * self.dtype.itemsize).load(self.dtype, n))


@dataclass(frozen=True)
class Epilogue:
    """How the epilogue writes the heads of a tile: bands of one collection, ``columns`` of a tile at a time."""

    bands: Written
    writer: HeadWriter
    columns: int

    @kv.func
    def items(self, band: Band, per_head: int) -> tuple[int, int]:
        """(heads per tile, items for all of a warp's tokens, in whole warps)."""
        heads = self.columns // band.size
        return heads, align_up(WARP_ROWS * heads * per_head, WARP)


@kv.func
def raster(unit: Any, row_tiles: Any, panels: int) -> tuple[Any, Any]:
    """(tile of tokens, tile of columns) of a work item: RASTER tiles of tokens visit all columns together."""
    group = unit // (RASTER * panels)
    inside = unit - group * (RASTER * panels)
    high = kv.math.min(row_tiles - group * RASTER, RASTER)
    panel = inside // high
    return group * RASTER + (inside - panel * high), panel


@dataclass(frozen=True)
class Part:
    """A warp's part of a tile in the epilogue: WARP_ROWS tokens, and the columns of whole heads.

    Attributes
    ----------
    row0, token0 : i32
        Its first token in the tile, and the tile's first token in the batch, which has ``tokens``.
    column0 : i32
    first : int
        Its first column in the weight, and in the tile.
    known, products : pointers
        Shared memory: the stored token data, and the products.
    """

    row0: Any
    column0: Any
    first: int
    token0: Any
    tokens: Any
    known: Any
    products: Any


def kernel_of(config: Config, epilogues: tuple[Epilogue, ...], early: bool) -> Any:
    """The kernel. ``epilogues``: of the cache and, with an indexer, of the indexer's cache."""
    case, N, stages, pitch = config.case, config.columns, config.stages, config.pitch
    steps, panels = config.steps, config.panels
    pack = kv.pack_bf16x2 if case.rounded is bf16 else kv.pack_f16x2
    blocks = cdiv(N, BLOCK)  # of columns that share a scale
    plain = all(e.writer.plain("key") for e in epilogues)
    registers = REGISTERS_8 if case.x is f8e4m3 and plain else REGISTERS

    @kv.func
    def copy(x_map, weight_map, array, full, empty, row_tiles):
        """Copy one box of each operand per k-step; run by one thread that does nothing else."""
        slot, phase = kv.i32(0), kv.i32(1)
        for unit in range(kv.block_id.x, row_tiles * panels, kv.grid_dim.x):
            tile, panel = raster(unit, row_tiles, panels)
            for j in range(0, steps):
                kv.mbarrier_wait(empty + slot * BARRIER_BYTES, phase, name="an empty stage")
                if kv.elect():
                    barrier, to = full + slot * BARRIER_BYTES, array + slot * config.stage_bytes
                    kv.mbarrier_arrive_expect_tx(barrier, config.stage_bytes)
                    kv.tma.load_box(x_map, (0, tile * ROWS, j, 0), to, barrier)
                    kv.tma.load_box(weight_map, (0, panel * N, j, 0), to + ROWS * SWIZZLE, barrier)
                kv.syncwarp()
                slot, phase = advance(stages, slot, phase, 1)

    @kv.func
    def block_scales(j, rows, panel, scales):
        """The factors of the products of k-step j: per row of a thread, and per BLOCK columns."""
        if case.scaling != "block":
            return []
        of_rows = [scales.x_scale[row, j] for row in rows]
        return of_rows + [scales.weight_scale[panel * N // BLOCK + n, j] for n in range(blocks)]

    @kv.func
    def multiply(sums, place, group, scales):
        """The sums plus the products of a stage."""
        a = kv.wgmma_descriptor(place + group * (WARPGROUP_ROWS * SWIZZLE))
        b = kv.wgmma_descriptor(place + ROWS * SWIZZLE)
        if case.x is f8e4m3:
            factor = (lambda r, column: scales[r] * scales[2 + column // BLOCK]) if scales else None
            return promoted(sums, a, b, case.x, factor=factor)
        return kv.wgmma(sums, a, b, [(s, s) for s in STEPS_OF_ATOM], case.x)

    @kv.func
    def stage(products, sums, rows, column0, scales, warp, lane):
        """Store a warp's rows of a finished tile, rounded, to shared memory."""
        matrix = lane // 8
        row = warp * WARP_ROWS + matrix % 2 * 8 + lane % 8
        place = products + (row * pitch + matrix // 2 * 8) * 2
        of_rows = [kv.f32(1.0)] * 2
        if case.scaling == "row":
            of_rows = [scales.x_scale[r, 0] for r in rows]
        elif case.scaling == "tensor":
            of_rows = [scales.x_scale[0, 0] * scales.weight_scale[0, 0]] * 2
        elif case.scaling == "total":
            of_rows = [scales.weight_scale[0, 0]] * 2
        for n in kv.static(range(0, N // 8, 2)):
            words = []
            for m in kv.static(range(n, n + 2)):
                column = column0 + m * 8 + lane % 4 * 2
                of_columns = biases = None
                if case.scaling == "row":
                    of_columns = [scales.weight_scale[column + i, 0] for i in range(2)]
                if scales.bias is not None:
                    biases = [kv.f32(scales.bias[column + i]) for i in range(2)]
                for r in kv.static(range(2)):
                    pair = []
                    for i in kv.static(range(2)):
                        x = sums[4 * m + 2 * r + i]
                        if case.scaling == "row":
                            x = x * (of_rows[r] * of_columns[i])
                        elif case.scaling in ("tensor", "total"):
                            x = x * of_rows[r]
                        if biases is not None:
                            x = x + biases[i]
                        pair.append(x)
                    words.append(pack(*pair))
            kv.stmatrix(place + n * 16, words)

    @kv.func
    def write(epilogue, kind, of: Part, to: Destination, lane):
        """Write the heads of one kind in a part of a tile, for WARP_ROWS tokens."""
        writer, bands, gamma, row0 = epilogue.writer, epilogue.bands, to.gamma(kind), of.row0
        band = getattr(bands, kind)
        per_head = getattr(writer.items, kind)
        heads, total = epilogue.items(band, per_head)
        head0 = (of.column0 - band.first) // band.size
        waves = total // WARP
        together = math.gcd(waves, MOST_TOGETHER // (1 if writer.plain(kind) else 2))
        cache = to.cache(kind) if kind != "query" else None
        weights = writer.weights(kind, gamma, lane % per_head) if WARP % per_head == 0 else None
        for start in range(0, waves, together):
            places = []
            for n in kv.static(range(together)):  # lookups of several items are in flight together
                item = (start + n) * WARP + lane
                local = kv.math.min(item // (heads * per_head), WARP_ROWS - 1)
                rest = item - local * (heads * per_head)
                active = item < WARP_ROWS * heads * per_head
                h, part = kv.where(active, rest // per_head, 0), rest % per_head
                b, position, page, flags = known_of(of.known, row0 + local)
                written = active & (flags & (QUERY if kind == "query" else KEPT) != 0)
                at = writer.angles_of(kind, Angles(to.freqs, writer.rows, (position,)), part)
                places.append((local, h, part, b, position, page, written, at))
            for local, h, part, b, position, page, written, at in kv.static(places):
                source = Staged(of.products + (row0 + local) * (pitch * 2), of.first + h * band.size, case.rounded)
                if kind == "query":
                    token = kv.math.min(of.token0 + row0 + local, of.tokens - 1)
                    target = Head(writer.rows, to.query_out, token, head0 + h)
                    writer.query(source, target, at, gamma, part, written, weights)
                elif kind == "key":
                    key = CachedHead(cache, b, position, head0 + h, page)
                    writer.key(source, key, at, gamma, part, written, weights)
                else:
                    writer.value(source, CachedHead(cache, b, position, head0 + h, page), part, written)

    @kv.func
    def known_of(known, row):
        """The stored data of a token of the tile."""
        words = (known + row * KNOWN_BYTES).load(i32, 4)
        return [words[n] for n in range(4)]

    @kv.func
    def look_up_rows(a, first, step, tile, tokens, known, lane):
        """Look up a warp's tokens, WARP_ROWS at a time, and store their data to shared memory."""
        for own in range(first, WARPS, step):
            row = own * WARP_ROWS + lane % WARP_ROWS
            for n in kv.static(range(len(epilogues))):
                to = a.index if n else a.to
                found = look_up(case, to, a.table, tile * ROWS + row, tokens)
                (known + (n * ROWS + row) * KNOWN_BYTES).store(kv.vector(i32, found))
        kv.syncwarp()

    @kv.func
    def write_rows(a, own, tile, panel, tokens, known, products, lane):
        """Write all heads of WARP_ROWS tokens of a tile."""
        for first in kv.static(range(0, N, config.part)):
            for n in kv.static(range(len(epilogues))):
                epilogue, to = epilogues[n], a.index if n else a.to
                for kind in kv.static(("query", "key", "value")):
                    band = getattr(epilogue.bands, kind)
                    if band is not None:
                        column0 = panel * N + first
                        if (column0 >= band.first) & (column0 < band.end):
                            of = Part(
                                own * WARP_ROWS, column0, first, tile * ROWS, tokens, known + n * ROWS * KNOWN_BYTES,
                                products,
                            )  # fmt: skip
                            write(epilogue, kind, of, to, lane)

    @kv.kernel(block=(THREADS, 1, 1), min_blocks=1)
    def project_append(a: ProductArguments):
        array = kv.shared(stages * config.stage_bytes, kv.u8, alignment=1024).ptr()
        products = kv.shared(ROWS * pitch, case.rounded, alignment=16).ptr()
        known = kv.shared(len(epilogues) * ROWS * KNOWN_BYTES, kv.u8, alignment=16).ptr()
        full = kv.shared(2 * stages + 2 * CONSUMERS + 1, kv.i64).ptr()
        empty = full + stages * BARRIER_BYTES
        staged = empty + stages * BARRIER_BYTES
        read = staged + CONSUMERS * BARRIER_BYTES
        looked_up = read + CONSUMERS * BARRIER_BYTES
        lane, warp = kv.thread_id.x % WARP, kv.shuffle_idx(kv.thread_id.x // WARP, 0)
        tokens, row_tiles = a.x.shape[0], a.row_tiles
        if kv.thread_id.x == 0:
            for n in kv.static(range(stages)):
                kv.mbarrier_init(full + n * BARRIER_BYTES, 1, f"full[{n}]")
                kv.mbarrier_init(empty + n * BARRIER_BYTES, WARPS, f"empty[{n}]")
            for n in kv.static(range(CONSUMERS)):
                kv.mbarrier_init(staged + n * BARRIER_BYTES, WARPS // CONSUMERS, f"full_products[{n}]")
                kv.mbarrier_init(read + n * BARRIER_BYTES, WARPS // CONSUMERS, f"empty_products[{n}]")
            kv.mbarrier_init(looked_up, WRITERS, "full_places")
            kv.fence_mbarrier_init()
        prefetch_maps(a.x_map, a.weight_map)
        kv.barrier()
        if warp < WARPS:
            kv.setmaxnreg(registers[0], "increase")
            begin(early)
            group = warp // (WARPGROUP // WARP)
            slot, phase, products_phase = kv.i32(0), kv.i32(0), kv.i32(1)
            for unit in range(kv.block_id.x, row_tiles * panels, kv.grid_dim.x):
                tile, panel = raster(unit, row_tiles, panels)
                row = tile * ROWS + warp * WARP_ROWS + lane // 4
                rows = [kv.math.min(row + 8 * r, tokens - 1) for r in range(2)]
                sums = [kv.f32(0.0)] * (N // 2)
                held = block_scales(0, rows, panel, a.scales)
                for j in range(0, steps):
                    following = block_scales(kv.math.min(j + 1, steps - 1), rows, panel, a.scales)
                    barrier = full + slot * BARRIER_BYTES
                    kv.mbarrier_wait(barrier, phase, name="a full stage")
                    sums = multiply(sums, array + slot * config.stage_bytes, group, held)
                    kv.mbarrier_arrive(empty + slot * BARRIER_BYTES, lane == 0)
                    slot, phase = advance(stages, slot, phase, 1)
                    held = following
                kv.mbarrier_wait(read + group * BARRIER_BYTES, products_phase, name="products that are written")
                products_phase = products_phase ^ 1
                stage(products, sums, rows, panel * N, a.scales, warp, lane)
                kv.syncwarp()
                if unit + kv.grid_dim.x < row_tiles * panels:
                    kv.mbarrier_arrive(staged + group * BARRIER_BYTES, lane == 0)
                else:  # nothing is left to multiply: each warp writes its own tokens
                    kv.mbarrier_wait(looked_up, 0, name="places of the last tile")
                    write_rows(a, warp, tile, panel, tokens, known, products, lane)
        else:
            kv.setmaxnreg(registers[1], "decrease")
            begin(early)
            if warp == WARPS:
                copy(a.x_map, a.weight_map, array, full, empty, row_tiles)
            else:
                phase, number = kv.i32(0), warp - (WARPS + 1)
                for unit in range(kv.block_id.x, row_tiles * panels, kv.grid_dim.x):
                    tile, panel = raster(unit, row_tiles, panels)
                    look_up_rows(a, number, WRITERS, tile, tokens, known, lane)  # while the tile is multiplied
                    if unit + kv.grid_dim.x < row_tiles * panels:
                        for own in range(number, WARPS, WRITERS):
                            group = own // (WARPS // CONSUMERS)
                            kv.mbarrier_wait(staged + group * BARRIER_BYTES, phase, name="a tile of products")
                            write_rows(a, own, tile, panel, tokens, known, products, lane)
                            kv.syncwarp()
                            kv.mbarrier_arrive(read + group * BARRIER_BYTES, lane == 0)
                        phase = phase ^ 1
                    else:
                        kv.mbarrier_arrive(looked_up, lane == 0)

    return project_append


def launch(op: Any, config: Config, at: Expansion) -> None:
    """Launch the kernel."""
    case, early = config.case, starts_early(at)
    epilogues = tuple(Epilogue(b, b.writer(op, at, case.rounded), config.part) for b in Written.all_of(case))
    row_tiles = (at.dim(op.x, 0) + (ROWS - 1)) // ROWS
    x_map, weight_map = operand_maps(op, at, config.step, ROWS, config.columns)
    own, *index = (epilogue.bands.destination(op) for epilogue in epilogues)
    a = ProductArguments(
        own, *index, x=op.x, x_map=x_map, weight_map=weight_map, table=table_of(op, case), row_tiles=row_tiles,
        scales=Scales.of(op),
    )  # fmt: skip
    blocks = (row_tiles * config.panels).least(at.device("multiprocessors"))
    at.launch(
        kernel_of(config, epilogues, early), [a], (blocks, 1, 1), (THREADS, 1, 1), key=(config, epilogues),
        programmatic=early,
    )  # fmt: skip
