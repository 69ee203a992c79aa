# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Schedules of attention over tiles: what is legal for a case, and what is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvarn.dialect.chips import REGISTERS
from kvarn.dialect.dtypes import DType, bf16, f8e4m3, f8e5m2, f16, f32
from kvarn.dialect.layout import RAGGED, align_up, cdiv
from kvarn.dialect.ops.terms import columns_of_term
from kvarn.dialect.ops.tile import COLUMN_STEP
from kvarn.dialect.schedules import ROW_CLASSES, TILED, written
from kvarn.dialect.shared_layout import CHUNK, SharedLayout
from kvarn.dialect.tma_layout import joins_heads
from kvarn.lowering.kernels.attention.case import Case
from kvarn.lowering.kernels.attention.softmax import modifies
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.boxes import staged_boxes_bytes
from kvarn.lowering.tiles.copies import SLOTS, row_unit, staging_bytes, why_not_by_rows, why_not_staged
from kvarn.lowering.tiles.ir import BARRIERS_BYTES, MMA, SWIZZLE, WARPGROUP, WARPGROUP_ROWS, WGMMA
from kvarn.lowering.tiles.transposition import staged_layout
from kvarn.lowering.tiles.windows import bytes_of, extents

from . import tuned
from .limits import (
    ATOM_ROWS,
    BOX_GRANULE,
    BOX_ROWS,
    LEAST_LISTED,
    MOST_COLUMNS,
    MOST_HELD,
    MOST_OF_VALUES,
    REGISTERS_BY_MMA,
    SHARED_COLUMNS,
    TWO_PRODUCERS_COLUMNS,
    columns_at_a_time,
    tile_registers,
    why_not_by_mma,
)
from .score_arrays import reads_pairs
from .tables import measured

# Entries that products by mma.sync require, with non-persistent blocks that hide each other's latencies.
BY_MMA: dict[str, Any] = {
    "instruction": MMA, "rows": WARPGROUP_ROWS, "producer": False, "overlap": False, "ping_pong": False,
    "query_stages": 1, "persistent": False, "stored_keys": False, "split_columns": False, "parts": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TileConfig:
    """A case with the entries of its schedule.

    Attributes
    ----------
    rows, keys : int
        Query rows per block, and keys per tile.
    stages, query_stages : int
        Stages of keys and of values, and of query rows.
    producer, overlap, one_wait, ping_pong, persistent, stored_keys, split_columns : bool
        The schedule's entries.
    producers, staging_stages, occupancy, parts : int
        The schedule's entries.
    splits : int
        The most splits of the keys of a tile of query rows; 0: the number follows from a launch's shapes
        (:mod:`attention.split_counts`).
    instruction : {"wgmma", "mma.sync"}
        The instruction of the products.
    sequences : int
        The most sequences of a divided batch, whose tiles are numbered in shared memory; 0 if batches are not divided.
    """

    case: Case
    rows: int = 128
    keys: int = 128
    stages: int = 2
    query_stages: int = 1
    producer: bool = True
    producers: int = 1
    staging_stages: int = SLOTS
    overlap: bool = True
    one_wait: bool = False
    ping_pong: bool = False
    occupancy: int = 1
    persistent: bool = True
    splits: int = 0
    stored_keys: bool = False
    instruction: str = WGMMA
    split_columns: bool = False
    parts: int = 1
    sequences: int = 0

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return cdiv(self.rows, WARPGROUP_ROWS) * self.column_groups

    @property
    def swapped(self) -> bool:
        """Whether rows are too few for operand A: they are operand B of products with rows of keys and columns."""
        return self.rows < WARPGROUP_ROWS

    @property
    def column_groups(self) -> int:
        """Warpgroups that share rows and divide the output columns, where one has too few registers for all of them."""
        if self.instruction == WGMMA:
            return 2 if self.split_columns else 1
        columns = align_up(self.case.value_size, COLUMN_STEP)
        wide = columns > MOST_OF_VALUES and columns % (2 * COLUMN_STEP) == 0
        return 2 if wide and self.case.query.bits == 16 and not self.swapped else 1

    @property
    def across(self) -> int:
        """Stacks of warps that divide the columns: warpgroups, or if possible 4 of two warps, for the least B."""
        if self.column_groups == 1 or self.instruction == WGMMA:
            return self.column_groups
        return 2 if self.value_columns % (4 * COLUMN_STEP) else 4

    @property
    def most_producers(self) -> int:
        """The most producer warpgroups for which registers are left."""
        if self.consumers > 2:
            return 2 if self.consumers == 3 and self.value_columns <= TWO_PRODUCERS_COLUMNS else 1
        return (4 if max(self.value_columns, self.keys) <= SHARED_COLUMNS else 3) - self.consumers

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + (self.producers if self.producer else 0))

    def blocks(self, target: Target) -> int:
        """Blocks that share a multiprocessor's registers: small tiles by mma.sync hide each other's latencies."""
        if self.instruction != MMA:
            return self.occupancy
        # Registers of a thread including addresses and fragments of B; f32 has two fragments.
        whole = self.registers * 8 // 5 if self.itemsize < 4 else self.registers + 72
        return max(1, min(REGISTERS // (self.threads * whole), target.blocks_of(self.shared_bytes)))

    def most_shared_bytes(self, target: Target) -> int:
        """Shared memory for each of the multiprocessor's blocks."""
        return target.shared_bytes_of(self.blocks(target))

    @property
    def most_registers(self) -> int:
        """Registers of a consumer thread that are available for scores, weights and accumulators."""
        if self.instruction == MMA:
            return REGISTERS_BY_MMA.get(self.consumers, 0)
        most = tile_registers(self.consumers, self.producers, self.occupancy)
        if self.occupancy > 1:
            return most
        addresses = self.case.spec.quantized or not staged_by_tma(self)
        return most - (24 if addresses else 16) * (self.consumers > 2 and self.converts)

    def least(self, target: Target) -> int:
        """The fewest tiles of keys per split, if there is more than one split."""
        return cdiv(measured("split_latent_keys" if self.case.spec.is_mla else "split_keys", target), self.keys)

    @property
    def columns(self) -> int:
        """Columns of keys, padded to whole k-steps with zero columns."""
        return align_up(self.case.size, COLUMN_STEP)

    @property
    def column_ranges(self) -> list[tuple[int, int]]:
        """(first column, number of columns) of the values that each kernel computes: one kernel, or two for wide heads.

        Each kernel computes all scores, so the kernels need three products in place of two. One kernel whose warpgroups
        share the scores would have half the rows per block, and read keys and values from the L2 twice as often.
        """
        size = self.case.value_size
        if self.swapped:  # few accumulators
            return [(0, size)]
        each = align_up(cdiv(size, cdiv(size, MOST_OF_VALUES * self.column_groups)), COLUMN_STEP)
        return [(first, min(each, size - first)) for first in range(0, size, each)]

    @property
    def value_columns(self) -> int:
        """Value columns per kernel, padded to whole k-steps."""
        return align_up(self.column_ranges[0][1], COLUMN_STEP)

    @property
    def registers(self) -> int:
        """Registers per thread for a tile's scores and weights, and for the accumulators."""
        if self.swapped:
            return (self.keys + self.value_columns) * self.rows // WARPGROUP + self.keys * self.rows // (2 * WARPGROUP)
        held = self.columns // 4 if self.instruction == MMA and self.query_in_registers else 0
        weights = self.keys * self.itemsize // 8
        if self.weights_overlap:
            weights *= 2
        fresh = columns_at_a_time(self.value_columns) // 2 if self.narrow else 0
        return (self.keys // 2 + weights + self.value_columns // 2 + fresh) // self.column_groups + held

    @property
    def weights_overlap(self) -> bool:
        """Whether the weights of one tile are converted while products read the weights of the tile before."""
        return self.instruction == WGMMA and self.overlap and not self.one_wait

    @property
    def query_in_registers(self) -> bool:
        """Whether warps have their query rows in registers as operand A of mma.sync."""
        return self.columns <= MOST_HELD and self.case.query.bits == 16

    @property
    def itemsize(self) -> int:
        """Bytes per element of the products' operands."""
        return self.case.query.itemsize

    @property
    def narrow(self) -> bool:
        """Whether the operands of products are 8-bit elements, which need transposed values."""
        return self.itemsize == 1

    @property
    def shared_bytes(self) -> int:
        size = self.itemsize
        query = SharedLayout(self.rows, self.columns, size, SWIZZLE, self.query_stages).bytes
        keys = SharedLayout(self.keys, self.columns, size, SWIZZLE, self.stages).bytes
        if self.stored_keys:
            keys = SharedLayout(self.keys, columns_of_term(self.columns), 1, SWIZZLE, self.stages).bytes
            keys += self.rows * f32.itemsize  # of the query's units
        shape = (self.value_columns, self.keys) if self.narrow else (self.keys, self.value_columns)
        values = 0 if len(self.loaded) == 1 else SharedLayout(*shape, size, SWIZZLE, self.stages).bytes
        if self.column_groups > 1 or self.swapped:  # for the weights, which all warps read
            query += SharedLayout(self.rows, self.keys, size, SWIZZLE).bytes
        if self.narrow or self.swapped:  # for the output, whose rows are longer than the query's, or read by all warps
            query += SharedLayout(self.rows, self.value_columns, self.case.out.itemsize, SWIZZLE).bytes
        table = 4 * (self.sequences + 1 + self.threads // 32) if self.sequences else 0
        return query + keys + values + self.staging_bytes + BARRIERS_BYTES + table

    @property
    def staging_bytes(self) -> int:
        """Shared memory of the staging tiles of 8-bit elements."""
        if self.narrow:
            return staged_layout(SharedLayout(self.value_columns, self.keys, 1)).bytes
        if not self.staged:
            return 0
        copying, spec = WARPGROUP * (self.producers if self.producer else self.consumers), self.case.spec
        if staged_by_tma(self):
            return sum(
                staged_boxes_bytes(spec, self.keys, n, self.staging_stages) for n in self.loaded[self.stored_keys :]
            )
        return sum(staging_bytes(spec, self.keys, n, copying, self.staging_stages) for n in self.loaded)

    @property
    def table_bytes(self) -> int:
        """Shared memory of the table of a score function of distances and heads (``tabulate-kv-scores``)."""
        group = min(self.case.group, self.rows)
        _, length = extents(cdiv(self.rows - 1, self.case.group) + self.keys, group)
        return bytes_of(length) * self.consumers

    @property
    def converts(self) -> bool:
        """Whether threads convert 8-bit elements to the operand type."""
        return not self.narrow and self.case.spec.converted

    @property
    def weights(self) -> DType:
        """The type of weights and converted values: f16 for 8-bit floats, all of which it represents exactly, and for
        values of groups with zeros, which are within its range.

        A pair of e4m3 converts to f16 in one instruction, to bf16 in four, and f16 weights have three more bits of
        precision. Weights are at most 2^8; those below 2^-24 are negligible next to a weight of 1.
        """
        spec, query = self.case.spec, self.case.query
        exact = spec.zero or (spec.dtype in (f8e4m3, f8e5m2) and not spec.quantized)
        return f16 if self.instruction == WGMMA and query is bf16 and exact else query

    @property
    def staged(self) -> bool:
        """Whether 8-bit elements are copied unconverted to staging memory first."""
        if not self.converts or self.case.listed or not self.case.row.plain:
            return False
        return all(why_not_staged(self.case.spec, columns) is None for columns in self.loaded)

    @property
    def loaded(self) -> tuple[int, ...]:
        """Columns of the tiles that are copied: of keys, and of values unless these are columns of the keys."""
        return (self.columns,) if self.case.spec.is_mla else (self.columns, self.value_columns)

    @property
    def box_rows(self) -> int:
        """Rows per TMA box."""
        if not self.case.spec.paged:
            return math.gcd(self.keys, BOX_ROWS)
        return math.gcd(self.case.spec.page_size, self.keys, BOX_ROWS)

    def entries(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in TILED.names}


def instruction_for(case: Case, target: Target, schedule: Mapping[str, Any]) -> str:
    """The instruction of the products: the schedule's, or the target's best for the query's type."""
    return schedule.get("instruction", WGMMA if target.has("wgmma") and case.query is not f32 else MMA)


def problems(case: Case, target: Target, row_alignment: int, schedule: Mapping[str, Any] | None = None) -> list[str]:
    """Why the kernel does not support a case with the schedule's instruction; empty if it does."""
    spec, found = case.spec, []
    instruction = instruction_for(case, target, schedule or {})
    if target.is_host or not target.has("wgmma" if instruction == WGMMA else "mma_bf16"):
        return [f"needs a GPU with {instruction}, got {target.name}"]
    narrow = case.query is f8e4m3
    if narrow and instruction == MMA:
        return ["needs a query of bf16, f16 or f32 for products by mma.sync, got f8e4m3"]
    outputs = (bf16, f16, f32) if narrow else (case.query, f32)
    queries = (bf16, f16, f8e4m3) if instruction == WGMMA else (bf16, f16, f32)
    if case.query not in queries or case.out not in outputs:
        of = "bf16 or f16" if instruction == WGMMA else "bf16, f16 or f32"
        found.append(
            f"needs a query of {of} and an output of its type or f32, got {case.query.name} and {case.out.name}"
        )
    if narrow and (spec.head_size % 32 or why_not_by_rows(spec, spec.head_size) is not None):
        found.append(
            f"needs pages and a head size of a multiple of 32 for queries of f8e4m3, got {spec.head_size}, {spec.kind}"
        )
    if spec.packed and instruction != WGMMA:
        found.append(f"needs elements of whole bytes, or wgmma, got {spec.dtype.name}")
    elif spec.dtype is not case.query and not spec.converted:
        found.append(f"needs a cache of the query's type or of 8 bits, got {spec.dtype.name}")
    latent = case.value_size < case.size and spec.dtype is case.query and not spec.quantized
    if spec.is_mla and (case.query is f32 or (instruction != MMA and not latent)):
        found.append("needs a collection with values, got an MLA one")
    sizes = case.content, case.size, case.value_size
    by_elements = spec.of_cache and case.row.plain and not spec.is_mla and not narrow
    if (any(n % 8 for n in sizes) and not by_elements) or not min(sizes) <= case.value_size <= MOST_COLUMNS:
        of = "a head size" if by_elements else "a head size of a multiple of 8"
        found.append(f"needs {of} up to {MOST_COLUMNS}, got {spec.head_size}")
    if spec.rotation and (case.out is not case.query or case.padded or case.listed or case.size > 256):
        found.append(
            "needs ragged rows of at most 256 elements and an output of the query's type over rotated heads, got "
            f"{'padded rows' if case.padded else case.out.name} of {case.size}"
        )
    if case.pages and spec.page_size % LEAST_LISTED:
        found.append(f"needs listed pages of a multiple of {LEAST_LISTED} tokens, got {spec.page_size}")
    if row_alignment < 16 and (narrow or spec.packed or spec.rotation or not spec.of_cache):
        what = "query and output rows" if spec.of_cache else "rows"
        found.append(f"needs {what} aligned to 16 bytes, got {row_alignment}")
    if not found and instruction == MMA:
        config = _by_mma(case, target, {"splits": 1})  # as lists of pages require
        found += [f"has none for {target.name}: {config}"] if isinstance(config, str) else []
    return found


def copies_by_tma(config: TileConfig) -> bool:
    """Whether tiles of the cache are whole TMA boxes and need no conversion."""
    spec = config.case.spec
    return spec.dtype is config.case.query and not spec.quantized and of_boxes(config)


def of_boxes(config: TileConfig) -> bool:
    """Whether tiles of the cache are whole TMA boxes."""
    rows, spec = config.box_rows, config.case.spec
    boxes = config.keys // rows
    whole = (boxes == 1 or rows % ATOM_ROWS == 0) and spec.head_size % 8 == 0
    return config.instruction == WGMMA and spec.kind != RAGGED and whole and boxes <= 32


def staged_by_tma(config: TileConfig) -> bool:
    """Whether TMA copies whole boxes for threads to convert; not with scales that would need many small copies."""
    spec, size, several = config.case.spec, config.case.size, len(config.column_ranges) > 1
    if not (config.staged and of_boxes(config)) or spec.packed:
        return False
    if joins_heads(spec):  # boxes include 8 columns of a neighbouring head
        return not several and (not spec.quantized or spec.granularity >= size)
    if size % CHUNK or row_unit(spec, size) != CHUNK:
        return False
    return not spec.quantized or (spec.granularity >= BOX_GRANULE and not several)  # scales cover whole heads


def why_not_stored(config: TileConfig) -> str | None:
    """Why keys cannot be multiplied unconverted; None when they can."""
    case = config.case
    if config.instruction != WGMMA or case.query is not bf16 or case.spec.dtype not in (f8e4m3, f8e5m2):
        got = f"{case.query.name} over {case.spec.dtype.name} by {config.instruction}"
        return f"unconverted keys need a bf16 query over f8e4m3 or f8e5m2 keys by wgmma, got {got}"
    if not case.aligned:
        return "a query of two terms is loaded by rows, which must be aligned to 16 bytes"
    if case.spec.quantized:
        return f"keys are scaled before their products, by granules of {case.spec.granularity}"
    if not staged_by_tma(config):
        return "unconverted keys need TMA boxes, which do not copy this cache"
    return None


def why_not_split(config: TileConfig) -> str | None:
    """Why two warpgroups cannot share columns; None where they can."""
    if config.instruction != WGMMA or config.itemsize != 2 or config.stored_keys or config.ping_pong or config.swapped:
        return "products are wgmma's, of 64 rows and 16-bit elements, and warpgroups do not alternate"
    each = config.keys // 2, config.value_columns // 2
    if any(n & (n - 1) or n < least for n, least in zip(each, (COLUMN_STEP, SWIZZLE // 2), strict=True)):
        return f"each has a power of two of keys and of 64 or more values, got {each[0]} and {each[1]}"
    return None


def why_not_swapped(config: TileConfig) -> str | None:
    """Why operands of products cannot be swapped; None where they can be, or are not."""
    if not config.swapped:
        return None
    if config.itemsize != 2 or config.stored_keys:
        what = "stored_keys" if config.stored_keys else config.case.query.name
        return f"rows of fewer than {WARPGROUP_ROWS} are of products of 16-bit elements, got {what}"
    if config.value_columns % WARPGROUP_ROWS:
        of = f"values of a multiple of {WARPGROUP_ROWS} columns, got {config.value_columns}"
        return f"rows of fewer than {WARPGROUP_ROWS} need {of}"
    if config.overlap or config.ping_pong:
        return f"overlap and ping_pong must be false for rows of fewer than {WARPGROUP_ROWS}, got rows = {config.rows}"
    if config.parts > 1:
        return f"parts must be 1 for rows of fewer than {WARPGROUP_ROWS}, got {config.parts}"
    if config.keys % WARPGROUP_ROWS:
        got = f"got rows = {config.rows} and keys = {config.keys}"
        return f"keys must be a multiple of {WARPGROUP_ROWS} for rows of fewer, {got}"
    return None


def why_not(config: TileConfig, target: Target) -> str | None:
    """Why a case cannot have some of the entries; None when it can."""
    problem = why_not_swapped(config)
    if problem is not None:
        return problem
    if config.case.pages and (config.case.spec.page_size % config.keys or config.splits != 1):
        return (
            "lists of pages need keys that divide a page, and splits = 1, got keys = "
            f"{config.keys}, splits = {config.splits} and pages of {config.case.spec.page_size} tokens"
        )
    if config.stored_keys:
        problem = why_not_stored(config)
        if problem is not None:
            return f"stored_keys must be false: {problem}"
    if config.instruction == MMA and config.occupancy > 1:
        return f"occupancy must be 1 by mma.sync, where registers decide it, got {config.occupancy}"
    if config.shared_bytes > config.most_shared_bytes(target):
        return (
            f"tiles must fit {config.most_shared_bytes(target)} bytes of shared memory, got {config.shared_bytes} for "
            f"rows = {config.rows}, keys = {config.keys}, stages = {config.stages}"
        )
    if config.keys % (COLUMN_STEP * config.column_groups):
        step = COLUMN_STEP * config.column_groups
        return f"keys must be a multiple of {step} for warps that share rows, got {config.keys}"
    if config.split_columns:
        problem = why_not_split(config)
        if problem is not None:
            return f"split_columns must be false: {problem}"
    most = cdiv(config.columns * config.itemsize, SWIZZLE) if copies_by_tma(config) else 1
    if config.parts > most:
        return (
            f"parts must be up to {most}, of keys that TMA copies as they are, one per swizzle atom, got {config.parts}"
        )
    if config.narrow and config.keys % 32:
        return f"keys must be a multiple of 32 for 8-bit queries, got {config.keys}"
    most = config.most_registers
    problem = why_not_by_mma(vars(config)) if config.instruction == MMA else None
    if problem is not None:
        return problem
    if config.registers > most:
        return (
            f"scores and sums must fit {most} registers of a thread with rows = {config.rows}, got {config.registers} "
            f"for keys = {config.keys} and values of {config.case.value_size} columns"
        )
    if config.ping_pong and config.consumers < 2:
        return f"ping_pong needs two consumer warpgroups: rows must be {2 * WARPGROUP_ROWS} or more, got {config.rows}"
    if config.query_stages > 1 and not (config.producer and config.persistent):
        return "query_stages of 2 need a producer of a persistent kernel: producer and persistent must be true"
    if config.staging_stages > SLOTS and not (config.staged and config.producer):
        needs = f"staging_stages over {SLOTS} need a producer that converts 8-bit elements"
        return f"{needs}, got staging_stages = {config.staging_stages}"
    several = config.converts or config.case.spec.kind == RAGGED
    if config.producers > 1 and not (several and config.producers <= config.most_producers):
        most, of = max(config.most_producers, 1), config.case.spec.dtype.name
        why = f"up to {most} with rows = {config.rows}, got producers = {config.producers} and a cache of {of}"
        return f"producers over 1 need 8-bit elements to convert or ragged rows to copy, {why}"
    copied = copies_by_tma(config) or config.staged or config.instruction == MMA
    limit = WARPGROUP_ROWS * (2 if not copied else 3 if config.narrow else 4)  # loads take registers
    if config.rows > limit:
        why = "for queries of 8 bits" if copied else "for a cache that TMA does not copy, and without staging"
        return f"rows must be up to {limit} {why}, got rows = {config.rows}"
    return None


def most_rows(case: Case, schedule: Mapping[str, Any]) -> int | None:
    """The most query rows per sequence and KV head that the schedule promises or expects; None without a bound."""
    most = schedule.get("max_queries")
    return schedule.get("expected_rows") if most is None else most * case.group


def chosen(case: Case, target: Target, schedule: Mapping[str, Any], by_user: bool = False) -> TileConfig:
    """The given entries, then those of the user's tuning table, and for the rest the largest tiles that fit.

    The table is read if ``by_user``. It has whole schedules, and is ignored on a conflict with a given entry.

    Raises
    ------
    ValueError
        If the given entries do not fit.
    """
    given = {name: schedule[name] for name in (*TILED.names, "sequences") if name in schedule}
    if case.blocks:
        given |= _of_blocks(case.blocks, given)
    invariant = bool(schedule.get("batch_invariant"))
    if by_user:
        found = {**tuned.tile_entries(target, case, schedule.get("max_queries"), invariant), **given}
        if why_not(TileConfig(case, **found), target) is None:
            given = found
    if invariant or case.pages:
        given.setdefault("splits", 1)
    few = most_rows(case, schedule)
    if few is not None and few <= WARPGROUP_ROWS:
        given.setdefault("rows", WARPGROUP_ROWS)
    if instruction_for(case, target, given) == MMA:
        config = _by_mma(case, target, given)
        if isinstance(config, str):
            raise ValueError(f"the {'block mask' if case.blocks else 'schedule'}'s {config}")
        return config
    widest, wide, whole = widest_of(case), dict[str, Any](), copies_by_tma(TileConfig(case))
    if whole and given.get("producer", True):
        wide = _three_of_boxes(case, target, few, given.get("rows", 0))
    if given.get("rows", WARPGROUP_ROWS) < WARPGROUP_ROWS:
        given = {"overlap": False, "ping_pong": False, "stored_keys": False, **given}
    if case.query.bits == 16 and not whole:
        wide["one_wait"] = True  # addressing and conversion take the registers that overlapped weights would need
        turns = widest <= measured("row_ping_pong_columns", target) and given.get("rows") is None
        if turns and not (TileConfig(case).converts or modifies(case)):
            wide["ping_pong"] = True
    if case.query.bits == 8 and measured("one_wait_of_8_bit_queries", target):
        wide["one_wait"] = True
        wide["ping_pong"] = given.get("rows", wide.get("rows", TileConfig.rows)) == 2 * WARPGROUP_ROWS
    if TileConfig(case).converts:
        wide["stored_keys"] = given.get("stored_keys", why_not_stored(TileConfig(case)) is None)
        if given.get("producer", True):
            wide |= _converting(case, {**wide, **given}, schedule, target)
    problem, most_registers = None, measured("overlapped_weight_registers", target)
    for keys in range(_most_keys(case, target, {**wide, **given}), 0, -16):
        config = TileConfig(case, **{"keys": keys, **wide, **given})
        problem = why_not(config, target)
        if "keys" in given or (problem is None and not (config.weights_overlap and config.registers > most_registers)):
            break
    if problem is not None:
        raise ValueError(f"the {'block mask' if case.blocks else 'schedule'}'s {problem}")
    if case.score and config.converts and "keys" not in given and reads_pairs(case.score):
        config = _with_table(config, target) if measured("room_for_tables", target) else config
    ahead = replace(config, query_stages=2)
    return ahead if "query_stages" not in given and why_not(ahead, target) is None else config


def choose(case: Case, target: Target, schedule: Mapping[str, Any], by_user: bool = False) -> dict[str, Any]:
    """The entries of :func:`chosen`, for ``select-kv-schedule`` to write."""
    return chosen(case, target, schedule, by_user).entries()


def configured(case: Case, target: Target, schedule: Mapping[str, Any]) -> TileConfig:
    """The configuration of a complete schedule.

    Raises
    ------
    ValueError
        If an entry is missing, or the entries do not fit.
    """
    sequences = schedule["decode_max_batch"] if schedule.get("decode_threshold") else 0
    config = TileConfig(case, **written(schedule, TILED.names), sequences=sequences)
    problem = why_not(config, target)
    if problem is not None:
        raise ValueError(f"the schedule's {problem}")
    return config


def widest_of(case: Case) -> int:
    """The larger of a key's columns and a value's columns."""
    return max(case.size, case.value_size)


def _three_of_boxes(case: Case, target: Target, most: int | None, rows: int) -> dict[str, Any]:
    """Entries for three consumer warpgroups, unless given, for heads that TMA copies.

    ``most`` bounds the rows of a sequence; ``rows`` are those of a tile, 0 if not given. Narrow heads use ping-pong.
    """
    plain, widest = case.query.bits == 16 and not modifies(case), widest_of(case)
    if widest <= measured("narrow_columns", target):
        turns = dict.fromkeys(("one_wait", "ping_pong"), True) if plain and rows != WARPGROUP_ROWS else {}
        return {"rows": 3 * WARPGROUP_ROWS, "stages": 3, **turns}
    few = most is not None and most <= ROW_CLASSES[-1]
    three = widest <= measured("three_warpgroups_columns", target) and plain and not few
    return {"rows": 3 * WARPGROUP_ROWS} if three else {}


def _most_keys(case: Case, target: Target, given: Mapping[str, Any]) -> int:
    """Keys of the largest tile to try: above it, the addresses of three warpgroups spill, except for small heads."""
    config = TileConfig(case, **given)
    spilled = config.consumers > 2 and config.stored_keys
    spilled = spilled and config.value_columns > measured("unspilled_columns", target)
    return measured("stored_keys_of_three", target) if spilled else TileConfig.keys


def _with_table(config: TileConfig, target: Target) -> TileConfig:
    """A schedule over a cache that threads convert, with shared memory for a table of the score function.

    Registers are scarce there, and the table saves more of them than tiles of fewer keys cost.
    """
    smaller = replace(config, keys=config.keys - 16)
    if config.shared_bytes + config.table_bytes <= target.shared_bytes or why_not(smaller, target) is not None:
        return config
    return smaller if smaller.shared_bytes + smaller.table_bytes <= target.shared_bytes else config


def _converting(case: Case, given: dict[str, Any], schedule: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Entries for caches whose 8-bit elements threads convert, unless given; ``schedule`` has the caller's promises.

    With unconverted keys one producer warpgroup copies them and converts values; otherwise two convert, since a third
    would take longer to share a tile than it saves. Narrow heads have one producer for three consumers, or for four
    with unconverted keys, and two for three with scales; but not if few rows are promised, which do not fill tiles of
    192. With many sequences two blocks of 64 rows share a multiprocessor, or three with unconverted keys and no score
    function. Wide heads that are copied row by row use ping-pong, and so do narrow heads; the widest have one stage.
    """
    config, widest = TileConfig(case, rows=given.get("rows", TileConfig.rows)), widest_of(case)
    stored, narrow = given["stored_keys"], widest <= measured("narrow_columns", target)
    few_keys = measured("one_stage_stored_keys" if stored else "one_stage_keys", target)

    def fits(found: dict[str, Any]) -> bool:
        made = TileConfig(case, **{"keys": few_keys, "one_wait": True, **found, **given})
        return why_not(made, target) is None

    three = {"rows": 3 * WARPGROUP_ROWS, "producers": 1} | ({"stages": 3} if stored and narrow else {})
    plain = not (case.spec.quantized or modifies(case))
    several = config.consumers > 1 and config.staged and narrow
    turns = {"ping_pong": True} if several and not modifies(case) else {}
    rows = most_rows(case, schedule)
    few = "rows" in given or (rows is not None and rows <= ROW_CLASSES[-1])
    by_three = "three_warpgroups_columns" if stored else "three_converted_columns"
    four, with_two_producers = three | {"rows": 4 * WARPGROUP_ROWS}, three | {"producers": 2}
    for found, pays in (
        (four, plain and stored and widest <= measured("four_warpgroups_columns", target)),
        (three, plain and widest <= measured(by_three, target)),
        (with_two_producers, case.spec.quantized and turns),
    ):
        if pays and not few and fits(found):
            return found | turns
    tiles = schedule.get("max_batch", 1) * case.spec.num_heads if given.get("splits", 0) != 1 else 0
    alone = config.consumers == 1 and not case.spec.quantized and narrow and staged_by_tma(config)
    for blocks in (3, 2) if stored and plain else (2,):
        shared = {"occupancy": blocks, "producers": 1}
        if alone and tiles >= blocks * measured("shared_blocks_tiles", target) and fits(shared):
            return shared
    if stored:
        return {"producers": 1, **turns} if fits({"producers": 1}) else {"producers": 1, "stages": 1}
    addressed = not staged_by_tma(config)
    most = config.most_producers
    if config.staged:
        most = 1 if several and addressed else measured("converting_warpgroups", target)
    found: dict[str, Any] = {"producers": max(1, min(most, config.most_producers)), **turns}
    if config.consumers == 2 and widest > measured("ping_pong_from_columns", target) and addressed:
        found["ping_pong"] = True
    return found if fits(found) else {**found, "stages": 1}


def _of_blocks(tile: tuple[int, int], given: Mapping[str, Any]) -> dict[str, int]:
    """The entries that a block mask's tile extents fix; ValueError where kernel or schedule conflicts."""
    found = dict(zip(("rows", "keys"), tile, strict=True))
    legal = {entry.name: entry for entry in TILED.entries}
    for name, extent in found.items():
        problem = legal[name].why_not(extent)
        if problem is not None:
            raise ValueError(f"the block mask's {problem}: make it by kv.ops.block_mask without {name}")
        if given.get(name, extent) != extent:
            raise ValueError(
                f"the schedule's {name} must be the block mask's {extent}, got {given[name]}: leave it out"
            )
    return found


def _by_mma(case: Case, target: Target, given: Mapping[str, Any]) -> TileConfig | str:
    """The given entries completed for products by mma.sync, or the reason why that is impossible."""
    small, config = widest_of(case) <= MOST_HELD and case.query.bits == 16, TileConfig(case, **{**BY_MMA, **given})
    small = small or config.swapped or TileConfig(case, **BY_MMA).column_groups > 1
    most, problem = measured("keys_by_mma", target) // (1 if small else 2), None
    for stages in (2, 1):  # one stage where two of the widest heads do not fit
        for keys in [given["keys"]] if "keys" in given else range(most, 0, -16):
            config = TileConfig(case, **{"keys": keys, "stages": stages, **BY_MMA, **given})
            problem = why_not(config, target)
            if problem is None:
                return config
    assert problem is not None
    return problem
