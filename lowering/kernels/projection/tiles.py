# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.project_append over tiles of tokens and columns: the choice of tiles, and the kernel that uses a workspace.

For many tokens a tile has whole heads, which one kernel multiplies and writes (projection/heads.py). If a tile has no
whole heads, or narrower tiles fill the device better, products go to a workspace, and another kernel writes the heads.
A block processes one tile after another, of 128 tokens and up to 256 columns; one warp per operand copies by TMA, as
many k-steps ahead as there are stages. Products by mma.sync, on GPUs without wgmma and for f32, use a workspace too:
all threads copy by cp.async, a block has one tile, and f8e4m3 is first converted to bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.chips import HOPPER
from kvarn.dialect.dtypes import bf16, f8e4m3, f16, f32
from kvarn.dialect.layout import align_up, cdiv
from kvarn.dialect.ops.projection import BLOCK
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.lowering.schedules.tables import measured
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.ir import BARRIERS_BYTES, MMA, SWIZZLE, WARPGROUP, WGMMA

from ..base import Expansion
from ..common import begin, starts_early
from . import heads as projection_heads
from .common import (
    MANY,
    Projection,
    Scales,
    Warpgroups,
    constant_weight,
    finish,
    operand_maps,
    operand_problems,
    prefetch_maps,
    promotion,
    scaled_tile,
    wgmma_problems,
)
from .heads import raster

MULTIPROCESSORS = HOPPER.multiprocessors  # of the device that tiles are chosen for
MOST_STAGES = 12
MOST_REGISTERS = 128  # per thread, which leave registers for a block of the second kernel
FINISH_BYTES = 4 << 10  # shared memory that is left for a block of the second kernel
COLUMNS_BY_MMA = 128
BOX = 32  # the fewest tokens per box, for tiles that are never full


@dataclass(frozen=True)
class Config(Warpgroups):
    """A case with the entries of its schedule.

    Attributes
    ----------
    rows, columns : int
        Tokens and columns per tile.
    stages : int
        Stages of k-steps in shared memory.
    instruction : {"wgmma", "mma.sync"}
    constant : bool
        As in ``projection_stream_k.Config``.
    most : int
        The number of tokens, if one tile has all of them; otherwise 0.
    """

    case: Projection
    rows: int = 128
    columns: int = 256
    stages: int = 4
    instruction: str = WGMMA
    constant: bool = False
    most: int = 0

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + (self.instruction == WGMMA))

    @property
    def registers(self) -> int | None:
        """A limit of registers per thread that leaves room for a block of the second kernel, which waits there.

        8-bit products are faster with all registers.
        """
        leaves_room = self.instruction == WGMMA and self.columns <= 192 and self.case.x.bits == 16
        return MOST_REGISTERS if leaves_room else None

    @property
    def box(self) -> int:
        """Tokens per box. A tile that is never full has several boxes, since out-of-bounds rows take copies longer.

        A tile that may be full has one box, which is faster than several.
        """
        return math.gcd(self.rows, align_up(self.most or self.rows, BOX))

    @property
    def shifts(self) -> bool:
        """Whether the last tile starts earlier, to be full: only if another kernel writes the heads, each once."""
        return not self.most and self.instruction == WGMMA

    @property
    def step(self) -> int:
        """Elements of K per k-step: one swizzle atom."""
        return SWIZZLE // self.case.x.itemsize

    @property
    def shared_bytes(self) -> int:
        operands = sum(
            SharedLayout(n, self.step, self.case.x.itemsize, SWIZZLE, self.stages).bytes
            for n in (self.rows, self.columns)
        )
        finish = 0 if self.registers is None else FINISH_BYTES
        return operands + SharedLayout(self.rows, self.columns, 2, SWIZZLE).bytes + BARRIERS_BYTES + finish


def problems(case: Projection, target: Target, alignment: int) -> list[str]:
    """Why the kernel does not support a case, one sentence per reason; empty if it does."""
    if instruction_for(case, target) == MMA:
        return mma_problems(case, target, alignment)
    found = wgmma_problems(case, target, alignment)
    if case.rounded not in (bf16, f16):
        found.append(f"needs queries of bf16 or f16, got {case.rounded.name}")
    return found


def instruction_for(case: Projection, target: Target) -> str:
    """The instruction of a case's products."""
    return WGMMA if target.has("wgmma") and case.x is not f32 else MMA


def mma_problems(case: Projection, target: Target, alignment: int) -> list[str]:
    """Why products by mma.sync do not support a case, one sentence per reason; empty if they do."""
    if not target.has("mma_bf16"):
        return [f"needs a GPU, got {target.name}"]
    return operand_problems(multiplied_by_mma(case), alignment, (bf16, f16, f32))


def multiplied_by_mma(case: Projection) -> Projection:
    """The case of products by mma.sync: f8e4m3 is converted to bf16."""
    return replace(case, x=bf16) if case.x is f8e4m3 else case


def whole_tiles(case: Projection) -> list[tuple[int, int]]:
    """(columns per tile, columns per part that is written together) of tiles with whole heads, the widest first."""
    found = []
    for columns in (128, 64) if case.scaling == "block" else (256, 192, 128, 64):
        for part in (columns // 2, columns):
            whole = all(b.heads * b.size % part == 0 and part % b.size == 0 for b in case.bands)
            if part % 64 == 0 and whole and case.columns % columns == 0:
                found.append((columns, part))
                break
    return found


def chosen(case: Projection, target: Target, schedule: Mapping[str, Any]) -> Config | projection_heads.Config:
    """The widest tiles that the bands allow, and the stages that fit.

    With at most ``max_tokens`` tokens, other tiles if the device finishes sooner with them (:func:`cycles`).

    Raises
    ------
    ValueError
        If the given rows and columns leave no room for two stages.
    """
    if instruction_for(case, target) == MMA:
        return _chosen_by_mma(case, target)
    tokens, whole = schedule.get("max_tokens"), whole_tiles(case)
    choices = [(128, *tile) for tile in (whole if tokens is not None or "columns" in schedule else whole[:1])]
    if not whole or tokens is not None:
        narrow = (128, 64) if case.scaling == "block" else (256, *range(192, 32, -16))
        if "fused" not in schedule:  # in-place writes of the widest heads are faster
            narrow = [columns for columns in narrow if columns < 256 or all(columns != c for c, _ in whole)]
        choices += [(64 if (tokens or MANY) <= 64 else 128, columns, 0) for columns in narrow]
    given = {name: schedule[name] for name in ("rows", "columns", "fused") if name in schedule}
    kept = [c for c in choices if given.items() <= {"rows": c[0], "columns": c[1], "fused": c[2] > 0}.items()]
    if not kept and given.get("fused"):
        raise ValueError(f"a schedule with fused needs tiles of 128 rows with whole heads, got {dict(schedule)}")
    kept = kept or [(given.get("rows", 128), given.get("columns", 128), 0)]
    rows, columns, part = min(kept, key=lambda c: (cycles(case, *c, tokens or MANY), c[1]))
    if part:
        return projection_heads.chosen(case, target, columns, part, schedule.get("stages"))
    most = tokens if tokens is not None and tokens <= rows else 0
    for stages in range(schedule.get("stages", MOST_STAGES), 1, -1):
        config = Config(case, rows=rows, columns=columns, stages=stages, most=most)
        if config.shared_bytes <= target.shared_bytes:
            return config
    raise ValueError(f"two stages of {rows} x {columns} must fit {target.shared_bytes} bytes of shared memory")


def cycles(case: Projection, rows: int, columns: int, part: int, tokens: int) -> float:
    """A model of the cycles of a k-step, including its share of what follows the loop over K.

    The maximum of the time that a multiprocessor multiplies and copies, that the L2 delivers to all multiprocessors,
    and that memory delivers the weight.
    """
    rates = measured("projected_cycles")
    tiles = cdiv(tokens, rows) * cdiv(case.columns, columns)
    waves = cdiv(tiles, MULTIPROCESSORS) if tokens < MANY else tiles / MULTIPROCESSORS
    copies = (rows + columns) * SWIZZLE
    of_one = waves * max(
        rows * columns / rates["multiply" if columns < 256 else "multiply_widest"], copies / rates["copy"]
    )
    after = waves * (rates["start"] + columns * rates["fused_column"] * (part > 0))
    return max(of_one, tiles * copies / rates["l2"], case.columns * SWIZZLE / rates["memory"]) + after


def _chosen_by_mma(case: Projection, target: Target) -> Config:
    """Tiles with 64 accumulators per thread, and as many stages as let two blocks share a multiprocessor."""
    shape = {"columns": COLUMNS_BY_MMA, "instruction": MMA}
    for stages in (3, 2, 1):
        config = Config(case, stages=stages, **shape)
        if config.shared_bytes * (2 if stages > 2 else 1) <= target.shared_bytes:
            return config
    raise ValueError(f"tiles must fit {target.shared_bytes} bytes of shared memory")


def kernel_of(config: Config, early: bool) -> Any:
    """Rounded products to a workspace."""
    case, M, N, STEP = config.case, config.rows, config.columns, config.step
    panels, steps = cdiv(case.columns, N), case.k // STEP

    options: dict[str, Any] = {"max_registers": config.registers} if config.registers else {"min_blocks": 1}

    @kv.kernel(block=(config.threads, 1, 1), **options)
    def project_append(
        x: kv.Buffer[case.x, 2], weight: kv.Buffer[case.x, 2], row_tiles: kv.i32, workspace: kv.Buffer[case.rounded, 2],
        x_map, weight_map, scales: Scales,
    ):  # fmt: skip
        if x_map is not None:
            prefetch_maps(x_map, weight_map)
        begin(early)
        tokens = x.shape[0]
        left, right = kv.buffer_operand(x, steps, STEP), kv.buffer_operand(weight, steps, STEP)
        for unit in range(kv.block_id.x, row_tiles * panels, kv.grid_dim.x):
            tile, panel = raster(unit, row_tiles, panels)
            token0 = tile * M
            if config.shifts:  # the last tile has the last tokens, some of them for the second time
                token0 = kv.math.max(kv.math.min(token0, tokens - M), 0)
            row, column = token0 + kv.tile_index(M), None
            c = kv.full((M, N), 0.0)
            for j in range(0, steps):
                a = left.tile(0, j, token0, tokens, rows=M, tail="any", descriptor=x_map, existing=True)
                b = right.tile(
                    0, j, panel * N, case.columns, rows=N, tail="any", descriptor=weight_map, constant=config.constant
                )
                if case.scaling == "block":  # one scale per k-step and tile of columns
                    block = j * STEP // BLOCK
                    of_rows = scales.x_scale.gather(row, block, mask=row < tokens)
                    scale = of_rows * scales.weight_scale[panel * N // BLOCK, block]
                    c = c + kv.dot(a, b.T) * scale[:, None]
                else:
                    c = kv.dot(a, b.T, c)
            if case.bias or case.scaling == "row":
                column = kv.math.min(panel * N + kv.tile_index(N), case.columns - 1)
            c = scaled_tile(case, c, row, row < tokens, column, scales)
            own = (row >= tile * M) & (row < tokens)
            workspace.store_rows(panel * tokens + row, value=case.rounded(c), mask=own)

    return project_append


def launch(op: Any, config: Config, at: Expansion) -> None:
    """Launch the kernel, and the one that writes heads from the workspace."""
    config = replace(config, constant=constant_weight(op, at))
    case, early = config.case, starts_early(at)
    tokens, panels = at.dim(op.x, 0), cdiv(case.columns, config.columns)
    row_tiles, by_wgmma = (tokens + (config.rows - 1)) // config.rows, config.instruction == WGMMA
    maps = operand_maps(op, at, config.step, config.box, config.columns) if by_wgmma else [None, None]
    workspace = at.workspace(tokens * panels, dtype=case.rounded, columns=config.columns)
    schedule = {"consumers": config.consumers, "producer": by_wgmma, "stages": config.stages}
    schedule["instruction"] = config.instruction
    if by_wgmma:
        schedule["registers"] = config.registers is None
        schedule |= promotion(case, config.columns)
    blocks = row_tiles * panels
    blocks = blocks.least(at.device("multiprocessors")) if by_wgmma else blocks
    at.launch(
        kernel_of(config, early), [op.x, op.weight, row_tiles, workspace, *maps, Scales.of(op)],
        (blocks, 1, 1), (config.threads, 1, 1), key=config, programmatic=early, attributes={"kv.schedule": schedule},
    )  # fmt: skip
    finish(op, case, at, workspace, config.columns)
