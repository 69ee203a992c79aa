# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.project_append for few tokens, limited by reading the weight: kind ``stream_k``.

The product is C^T = weight x^T: a tile is 128 rows of the weight times all tokens, of which wgmma needs only 8, so no
rows of the product are wasted. One block per tile would load the multiprocessors unevenly, so stream-K divides all
tiles' k-steps evenly among the blocks, wherever tiles end. A block's part of a tile is a partial result in f32; a
second kernel adds a head's partial results in the order of K, and writes the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect.dtypes import f32
from kvarn.dialect.layout import align_up, cdiv
from kvarn.dialect.ops.projection import BLOCK
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.lowering.index import Ix
from kvarn.lowering.schedules.tables import measured
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import BARRIERS_BYTES, SWIZZLE, WARP

from ..append.head_writer import HeadWriter
from ..base import Expansion
from ..common import CachedHead, Head, StoredHead, as_vector, begin, in_range, starts_early
from ..rope.rotation import Angles
from .common import (
    ProductArguments,
    Projection,
    Scales,
    Warpgroups,
    Written,
    constant_weight,
    operand_maps,
    place_of,
    prefetch_maps,
    promotion,
    scaled,
    table_of,
)

TOKENS = (8, 16, 32, 64, 128, 256)  # what max_tokens is rounded up to
FINISH_BYTES = 12 << 10  # shared memory for blocks of the second kernel, which wait next to a block of the first
MOST_STAGES = 10
KINDS = ("query", "key", "value")
WIDTH, TOGETHER = 4, 4  # tokens per load of a column; partial results whose loads a thread has in flight
FINISH_THREADS = 256


@dataclass(frozen=True)
class Config(Warpgroups):
    """A case with the entries of its schedule.

    Attributes
    ----------
    tokens : int
        Columns of a product, which bound the number of tokens.
    rows : int
        Rows of the weight per tile.
    atoms : int
        Swizzle atoms of a row per k-step.
    step_of : int
        Elements of K per k-step if it is not a number of atoms; otherwise 0.
    constant : bool
        Whether the weight may be read before earlier kernels end.
    """

    case: Projection
    tokens: int
    rows: int = 128
    atoms: int = 1
    step_of: int = 0
    constant: bool = False
    given_stages: int = 0

    @property
    def registers(self) -> int | None:
        """A limit of registers per thread that leaves room for a block of the second kernel; None without one."""
        if self.tokens > 128 or (self.case.scaling == "block" and self.tokens > 32):
            return None
        return 96 if self.tokens == 128 else 80

    @property
    def step(self) -> int:
        """Elements of K per k-step."""
        return self.step_of or self.atoms * SWIZZLE // self.case.x.itemsize

    @property
    def steps(self) -> int:
        return self.case.k // self.step

    @property
    def tiles(self) -> int:
        return cdiv(self.case.columns, self.rows)

    def stages(self, target: Target) -> int:
        """Stages of k-steps in shared memory."""
        if self.given_stages:
            return self.given_stages
        of_one = sum(SharedLayout(n, self.step, self.case.x.itemsize, SWIZZLE).bytes for n in (self.rows, self.tokens))
        most = target.shared_bytes - BARRIERS_BYTES - FINISH_BYTES
        if self.tokens <= measured("projected_bound_tokens", target) and not self.constant:
            most = measured("projected_stage_bytes", target)
        return min(MOST_STAGES, most // of_one)


def chosen(case: Projection, schedule: Mapping[str, Any]) -> Config:
    """The given entries, completed by fast ones.

    Raises
    ------
    ValueError
        If the given entries do not fit.
    """
    tokens = next(n for n in TOKENS if n >= schedule["max_tokens"])
    step = 2 * SWIZZLE // case.x.itemsize
    atoms = 2 if tokens <= measured("projected_bound_tokens") and case.scaling != "block" and case.k % step == 0 else 1
    config = Config(case, tokens, atoms=atoms)
    config = replace(config, **{name: schedule[name] for name in ("rows", "atoms") if name in schedule})
    if case.k % config.step or (case.scaling == "block" and config.atoms > 1):
        raise ValueError(
            f"the schedule's atoms must make steps that divide K = {case.k}, and be 1 with scales of blocks, got "
            f"{config.atoms}"
        )
    if "stages" in schedule:
        config = replace(config, given_stages=schedule["stages"])
    return config


def product_kernel(config: Config, early: bool) -> Any:
    """The product kernel. Block i's partial result of tile p is in the rows from (i + p) * ``rows`` up."""
    case, M, N, steps = config.case, config.rows, config.tokens, config.steps

    options: dict[str, Any] = {"max_registers": config.registers} if config.registers else {"min_blocks": 1}

    @kv.kernel(block=(config.threads, 1, 1), **options)
    def project_few(
        x: kv.Buffer[case.x, 2], weight: kv.Buffer[case.x, 2], x_map, weight_map, partials: kv.Buffer[f32, 2],
        x_scale=None, weight_scale=None,
    ):  # fmt: skip
        prefetch_maps(x_map, weight_map)
        begin(early)
        left, right = kv.buffer_operand(weight, steps, config.step), kv.buffer_operand(x, steps, config.step)
        low = part_of(config, kv.block_id.x, kv.grid_dim.x)
        high = part_of(config, kv.block_id.x + 1, kv.grid_dim.x)
        for p in range(low // steps, (high + (steps - 1)) // steps):
            c = kv.full((M, N), 0.0)
            for j in range(kv.math.max(low - p * steps, 0), kv.math.min(high - p * steps, steps)):
                a = left.tile(
                    0, j, p * M, case.columns, rows=M, tail="any", descriptor=weight_map, constant=config.constant
                )
                b = right.tile(0, j, 0, x.shape[0], rows=N, tail="any", descriptor=x_map)
                if case.scaling == "block":  # one per step and tile of rows
                    token = kv.tile_index(N)
                    scale = x_scale.gather(token, j, mask=token < x.shape[0]) * weight_scale[p * M // BLOCK, j]
                    c = c + kv.dot(a, b.T) * scale[None, :]
                else:
                    c = kv.dot(a, b.T, c)
            partials.store_rows((kv.block_id.x + p) * M + kv.tile_index(M), value=c)

    return project_few


@kv.func
def part_of(config: Config, block: Any, blocks: Any) -> Any:
    """The first k-step, counted over all tiles, of a block."""
    return block * (config.tiles * config.steps) // blocks


@kv.func
def block_of(config: Config, step: Any, blocks: Any) -> Any:
    """The block that has a k-step."""
    return ((step + 1) * blocks - 1) // (config.tiles * config.steps)


@dataclass(frozen=True)
class SharedRow(StoredHead):
    """One head of a token in shared memory, in the type that products are rounded to."""

    array: Any
    first: Any

    @kv.func
    def load(self, d: Any, n: int) -> Any:
        """n elements from dim d up, without conversion."""
        place = self.array.ptr() + (self.first + d) * self.array.dtype.itemsize
        return as_vector(place.load(self.array.dtype, n))


def finish_kernel(config: Config, bands: Written, writer: HeadWriter, early: bool) -> Any:
    """Adds the partial results of a head in f32 and writes it: one block per (head, group of tokens)."""
    case, M, threads = config.case, config.rows, FINISH_THREADS
    group = tokens_of_block(config, bands)
    pitch = align_up(max(b.size for b in (bands.query, bands.key) if b is not None), 8) + 8  # no bank conflicts
    waves = {kind: cdiv(align_up(group * getattr(writer.items, kind), WARP), threads) for kind in KINDS}
    kinds = [kind for kind in KINDS if getattr(bands, kind) is not None]

    @kv.func
    def gather(array, band, head, token0, a):
        """Add a head's partial results into rows of shared memory, WIDTH of a column per thread."""
        for i in range(kv.thread_id.x, band.size * (group // WIDTH), threads):
            d, local = i // (group // WIDTH), i % (group // WIDTH) * WIDTH
            column = band.first + head * band.size + d
            tile = column // M
            row = column - tile * M
            first = block_of(config, tile * config.steps, a.blocks)
            end = block_of(config, (tile + 1) * config.steps - 1, a.blocks) + 1
            total = kv.vector(f32, WIDTH)
            for block in range(first, end, TOGETHER):  # loads of several at one time
                found = []
                for n in kv.static(range(TOGETHER)):
                    held = kv.math.min(block + n, end - 1)
                    found.append(a.partials.load((held + tile) * M + row, token0 + local, width=WIDTH))
                for n in kv.static(range(TOGETHER)):
                    total = kv.where(block + n < end, total + found[n], total)
            for n in kv.static(range(WIDTH)):
                x, token = total[n], kv.math.min(token0 + local + n, a.tokens - 1)
                x = scaled(case, x, token, column, a.scales)
                array[(local + n) * pitch + d] = case.rounded(x)

    @kv.kernel(block=(threads, 1, 1), min_blocks=2)
    def project_few_finish(a: ProductArguments):
        if early:  # the kernel before has waited for all others, and the next one waits for this
            kv.griddepcontrol_launch_dependents()
        array, to = kv.shared(group * pitch, case.rounded, alignment=16), a.to
        number, token0 = kv.block_id.x, kv.block_id.y * group
        first = 0
        for kind in kv.static(kinds):
            band = getattr(bands, kind)
            if (number >= first) & (number < first + band.heads):
                head, per_head = number - first, getattr(writer.items, kind)
                places = []
                for n in kv.static(range(waves[kind])):  # looked up while the products are still under way
                    item = n * threads + kv.thread_id.x
                    local, part = kv.math.min(item // per_head, group - 1), item % per_head
                    active = (item < group * per_head) & (token0 + local < a.tokens)
                    token = kv.math.min(token0 + local, a.tokens - 1)
                    b, inside, i = place_of(case.padded, a.table, token, a.tokens)
                    position = to.collection.cache_length(b) + i
                    at = writer.angles_of(kind, Angles(to.freqs, writer.rows, (position,)), part)
                    if kind == "query":
                        places.append((local, part, token, b, position, active & (inside | case.padded), None, at))
                    else:
                        cache = to.cache(kind)
                        kept = active & inside & in_range(to.collection, position)
                        places.append((local, part, token, b, position, kept, cache.raw_page(b, position), at))
                if early:
                    kv.griddepcontrol_wait()
                gather(array, band, head, token0, a)
                kv.barrier()
                for local, part, token, b, position, written, page, at in kv.static(places):
                    source = SharedRow(array, local * pitch)
                    if kind == "query":
                        target = Head(writer.rows, to.query_out, token, head)
                        writer.query(source, target, at, to.q_gamma, part, written)
                    elif kind == "key":
                        writer.key(source, CachedHead(cache, b, position, head, page), at, to.k_gamma, part, written)
                    else:
                        writer.value(source, CachedHead(cache, b, position, head, page), part, written)
            first += band.heads

    return project_few_finish


def tokens_of_block(config: Config, bands: Written) -> int:
    """Tokens per block of the second kernel: as many as occupy its threads."""
    return min(config.tokens, 16)


def launch(op: Any, config: Config, at: Expansion) -> None:
    """Launch both kernels."""
    config = replace(config, constant=constant_weight(op, at))
    case, early = config.case, starts_early(at)
    tokens = at.dim(op.x, 0)
    blocks = at.device("multiprocessors").least(at.constant(config.tiles * config.steps))
    some = tokens.least(at.constant(1))  # without tokens nothing is launched: nothing describes an empty buffer
    partials = at.workspace((blocks + config.tiles) * config.rows, dtype=f32, columns=config.tokens)
    maps = operand_maps(op, at, config.step, config.tokens, config.rows)
    scales = [op.x_scale, op.weight_scale] if case.scaling == "block" else [None, None]
    schedule = {"consumers": config.consumers, "producer": True, "stages": config.stages(at.target)}
    schedule["registers"] = config.registers is None
    schedule |= promotion(case, config.tokens)
    at.launch(
        product_kernel(config, early), [op.x, op.weight, *maps, partials, *scales], (blocks * some, 1, 1),
        (config.threads, 1, 1), key=config, programmatic=early, attributes={"kv.schedule": schedule},
    )  # fmt: skip
    finish_partials(op, config, at, partials, blocks)


def finish_partials(op: Any, config: Config, at: Expansion, partials: ir.Value, blocks: Ix) -> None:
    """Launch the kernel that adds ``blocks`` blocks' partial results and writes heads."""
    case, early, tokens = config.case, starts_early(at), at.dim(op.x, 0)
    for bands in Written.all_of(case):
        writer = bands.writer(op, at, case.rounded)
        a = ProductArguments(
            bands.destination(op), partials=partials, tokens=tokens, blocks=blocks, table=table_of(op, case),
            scales=Scales.of(op),
        )  # fmt: skip
        group = tokens_of_block(config, bands)
        heads = sum(b.heads for b in (bands.query, bands.key, bands.value) if b is not None)
        grid = (heads, (tokens + (group - 1)) // group, 1)
        kernel = finish_kernel(config, bands, writer, early)
        at.launch(kernel, [a], grid, (FINISH_THREADS, 1, 1), key=(config, bands, writer), programmatic=early)
