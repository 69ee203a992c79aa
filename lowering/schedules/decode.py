# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The schedule of decode attention: what a kernel is specialised for, and the shared memory and legality of entries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import kvarn as kv
from kvarn.dialect import schedules
from kvarn.dialect.chips import REGISTERS, RESERVED_BYTES
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec, align_up, cdiv, lowbit
from kvarn.dialect.ops.weights import LARGEST
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.lowering.kernels.attention.case import Case
from kvarn.lowering.kernels.attention.decode.binned_sums import MOST_VALUES
from kvarn.lowering.target import Target

from .limits import DECODE_GRANULE, MOST_COLUMNS, MOST_QUERIES, MOST_SCALES, WARP_OUTPUTS, WARP_ROWS, decode_registers

NEVER = -LARGEST  # below every score, and finite so that differences with it are finite
# The configuration fields that are schedule entries.
ENTRIES = (*schedules.DECODE.names, "max_batch", "early")
COLUMNS = 8  # query rows per mma
LEAST_TILE = 16  # tokens per k-step of the second product
SECTOR = 32  # bytes per memory transaction
MOST_SPLITS = MOST_VALUES  # fixed splits per sequence


@dataclass(frozen=True)
class DecodeConfig:
    """A case with the entries of its schedule.

    Attributes
    ----------
    case : Case
    max_queries, max_batch : int
        The most new tokens of a sequence, and the most sequences.
    warps, stages, tile, blocks, min_tiles, combine, split_size, early : int
        The schedule's entries.
    programmatic : bool
        Whether the kernel starts early (PDL).
    pair_alignment : int
        Alignment in bytes of two neighbouring elements of the output.
    query_alignment : int
        Alignment in bytes of 8 neighbouring elements of the query, over packed elements.
    padding : int
        Shared memory that a block leaves unused (:func:`_padding`).
    """

    case: Case
    max_queries: int
    warps: int = 4
    stages: int = 2
    tile: int = 16
    blocks: int = 3
    min_tiles: int = 4
    max_batch: int = 1024
    combine: int = 0
    split_size: int = 0
    early: int = 0
    programmatic: bool = True
    pair_alignment: int = 4
    query_alignment: int = 1
    padding: int = 0

    @property
    def spec(self) -> CacheSpec:
        return self.case.spec

    @property
    def split(self) -> int:
        """Tokens per fixed split, 0 without fixed splits: the kernels' name of :attr:`split_size`."""
        return self.split_size

    @property
    def joined(self) -> int:
        """Neighbouring KV heads that a warp treats as one; a query row is zero in the columns of other heads.

        A single narrow head does not fill a memory sector or, with few query rows, the columns of a product.
        """
        spec, found = self.spec, 1
        if self.case.by_lists or spec.quantized or spec.is_mla or spec.head_stride != spec.head_size:
            return 1
        while spec.num_heads % (2 * found) == 0:
            stored = 2 * found * spec.head_size * spec.dtype.itemsize
            rows = 2 * found * self.case.group * self.max_queries
            if (stored > SECTOR or rows > WARP_ROWS) and (stored > 2 * SECTOR or rows > COLUMNS):
                break
            found *= 2
        return found

    @property
    def heads(self) -> int:
        """KV heads, counting joined heads once."""
        return self.spec.num_heads // self.joined

    @property
    def head_rows(self) -> int:
        """Query rows per token for one of :attr:`heads`."""
        return self.case.group * self.joined

    @property
    def slices(self) -> int:
        """Warps that share the columns of a wide head: the fewest that have registers for their outputs.

        f32 needs twice the instructions, so half as many columns per warp stay in the instruction cache.
        """
        spec, step = self.spec, self.load_steps * 16 if self.narrow else 16
        rows = COLUMNS if self.wide or self.case.group * self.max_queries <= COLUMNS else WARP_ROWS
        most = (WARP_OUTPUTS // 2 if self.wide else WARP_OUTPUTS) // rows
        if spec.quantized or spec.head_size <= (256 if self.wide else most):
            return 1
        even = [1] + [n for n in (2, 4) if spec.head_size % (n * step) == 0]
        return next((n for n in even if spec.head_size <= n * most), even[-1])

    @property
    def size(self) -> int:
        """Elements of one of :attr:`heads` per warp."""
        return self.spec.head_size * self.joined // self.slices

    @property
    def columns(self) -> int:
        """The columns in whole ldmatrix copies; padding columns are zeros."""
        return align_up(self.size, self.load_steps * 16 if self.narrow else 16)

    @property
    def row_steps(self) -> int:
        """16-element steps of the output's columns."""
        return cdiv(self.size, 16)

    @property
    def key_steps(self) -> int:
        """k-steps of the first product along the head: 16 elements each, or 8 of f32."""
        return cdiv(self.size, 8 if self.wide else 16)

    @property
    def step_bytes(self) -> int:
        """Bytes of a key per k-step of the first product."""
        return 2 * self.spec.dtype.bits if self.narrow else 32

    @property
    def load_steps(self) -> int:
        """k-steps of an ldmatrix of four matrices, which has 32 bytes of 16 tokens."""
        return 32 // self.step_bytes

    @property
    def narrow(self) -> bool:
        """Whether the cache has 8-bit or 4-bit elements, which are converted to f16."""
        return self.spec.converted

    @property
    def wide(self) -> bool:
        """Whether the cache has f32 elements."""
        return self.spec.dtype.bits == 32

    @property
    def query_in_shared(self) -> bool:
        """Whether the query rows are in shared memory: those of wide heads would take too many registers."""
        return self.columns * (4 if self.wide else 1) > 256

    @property
    def warp_rows(self) -> int:
        """The most query rows per warp: wide heads leave registers for the accumulators of 8."""
        return COLUMNS if self.columns * (2 if self.wide else 1) > 256 else WARP_ROWS

    @property
    def scales(self) -> int:
        """Scales per token and head, with their zeros; 0 without."""
        return self.spec.num_scales if self.spec.quantized else 0

    @property
    def granules(self) -> int:
        """Groups of elements of a head with a scale each; 0 without scales."""
        return self.spec.granules if self.spec.quantized else 0

    @property
    def zero_sums(self) -> int:
        """Granules with zeros, and so sums per query row: of the query for K's, of weights times zeros for V's."""
        return self.granules if self.spec.zero else 0

    @property
    def zero_columns(self) -> int:
        """Accumulators of a lane per 8 query rows for the sums of weights times zeros: four per four granules."""
        return 4 * cdiv(self.zero_sums, 4)

    @property
    def split_tiles(self) -> int:
        """Tiles per fixed split, unless the sequence has less than half of the most splits."""
        return max(self.split_size // self.tile, 1)

    @property
    def most_splits(self) -> int:
        """The most fixed splits per sequence: enough for one sequence with all of its heads to fill a device."""
        return max(8, min(MOST_SPLITS, 512 // self.spec.num_heads))

    @property
    def bins(self) -> int:
        """Bins of the sums of fixed splits: as many as preserve the precision of the values."""
        return 3 if self.wide else 2

    @property
    def halves(self) -> int:
        """Lanes that share the columns of a partial result's row: two if half of the lanes would have none."""
        return 2 if self.rows <= COLUMNS // 2 else 1

    @property
    def sum_steps(self) -> int:
        """Steps of the output in a lane's part of a partial result."""
        return cdiv(self.row_steps, self.halves)

    @property
    def stores_splits(self) -> bool:
        """Whether fixed splits are stored one by one: where a work unit has a single split, as with one sequence."""
        return bool(self.split and self.combine and self.max_batch == 1)

    @property
    def sum_bytes(self) -> int:
        """Shared memory of the bins to which a warp adds its fixed splits."""
        if not self.split or self.stores_splits:
            return 0
        return self.column_tiles * (self.sum_steps * self.bins + 1 + cdiv(2 * self.bins, 4)) * 512

    @property
    def rows(self) -> int:
        """The most query rows per sequence and KV head."""
        return self.head_rows * self.max_queries

    @property
    def parts(self) -> int:
        """Warps that share a KV head's rows, with up to ``warp_rows`` rows each."""
        return cdiv(self.rows, self.warp_rows)

    @property
    def row_groups(self) -> int:
        """Warps that all rows of one token need."""
        return self.heads * self.parts * self.slices

    @property
    def column_tiles(self) -> int:
        """Tiles of 8 query rows per warp."""
        return cdiv(min(self.rows, self.warp_rows), COLUMNS)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in shared memory, including padding columns."""
        return self.spec.dtype.bytes_of(self.columns)

    @property
    def stored_bytes(self) -> int:
        """Bytes in the cache of one warp's columns of a token of one of :attr:`heads`."""
        return self.spec.dtype.bytes_of(self.size)

    @property
    def scaled_elements(self) -> bool:
        """Whether every element is multiplied by its scale, since the elements of a k-step have several scales."""
        return self.granules > 1 and self.spec.granularity % (16 * self.interleaved) != 0

    @property
    def interleaved(self) -> int:
        """k-steps whose elements are interleaved: two of 4-bit elements, each with half of the elements of a word."""
        return 2 if self.spec.packed else 1

    @property
    def scales_copied(self) -> bool:
        """Whether scales are copied unconverted to shared memory; otherwise they are converted through registers."""
        return self.spec.zero or (self.scales > 0 and self.spec.scale_dtype is kv.f32 and self.scales % 4 == 0)

    @property
    def scale_pitch(self) -> int:
        """Bytes from token to token of copied scales, free of bank conflicts; those with zeros are read in order."""
        return 4 * self.granules if self.spec.zero else 4 * self.scales + 16

    @property
    def scale_chunk(self) -> int:
        """Bytes of a copy of scales."""
        return min(16, lowbit(4 * self.granules)) if self.spec.zero else 16

    @property
    def scale_prefetch(self) -> int:
        """Bytes that a copy of scales with zeros prefetches to the L2, where it passes by the L1.

        Other warps read other sectors of the line, which smaller copies leave in the L1.
        """
        return 128 if self.spec.zero and self.scale_chunk == 16 else 0

    @property
    def l2_prefetch(self) -> int:
        """Bytes that a copy prefetches to the L2: where rows end within a line, another warp reads the rest of it."""
        return 128 if self.stored_bytes % 128 else 0

    @property
    def reads_once(self) -> bool:
        """Whether only one warp reads a row of the cache."""
        return self.parts == 1

    @property
    def tile_layout(self) -> SharedLayout:
        """The shared-memory layout of a tile of K or V, one row per token."""
        return SharedLayout.whole_rows(self.tile, self.row_bytes, 1)

    @property
    def pitch(self) -> int:
        """Bytes from token to token in shared memory."""
        return self.tile_layout.pitch

    @property
    def half_stage(self) -> int:
        """Bytes of one tile of K or V."""
        return self.tile * self.pitch

    @property
    def stage_bytes(self) -> int:
        scales = self.scale_pitch if self.scales_copied else 4 * self.scales
        return 2 * self.half_stage + 2 * self.tile * scales

    @property
    def query_bytes(self) -> int:
        """Shared memory of a warp's query rows."""
        return self.column_tiles * self.key_steps * 32 * 8 if self.query_in_shared else 0

    @property
    def score_bytes(self) -> int:
        """Shared memory of the scores that warps with other columns of the same rows exchange, one buffer per stage."""
        return self.stages * self.tile * self.column_tiles * 32 if self.slices > 1 else 0

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp: stages, query rows that are not in registers, exchanged scores, sums of splits."""
        return self.stages * self.stage_bytes + self.query_bytes + self.score_bytes + self.sum_bytes

    @property
    def quads(self) -> int:
        """float4 vectors of a lane's partial result: the output, then (max, max, sum, sum), per column tile.

        A fixed split that a second kernel adds also has exponents; a sum of fixed splits has bins, and exponents.
        """
        if not self.split:
            return self.column_tiles * (self.sum_steps + 1)
        if self.stores_splits:
            return self.column_tiles * (self.sum_steps + 2)
        if self.combine:
            return self.column_tiles * (self.sum_steps * self.bins + 2 * cdiv(2 + self.bins, 4))
        return self.sum_bytes // 512

    @property
    def row_blocks(self) -> int:
        """Blocks of the combine kernel per output tile: with fixed splits two, with alternate query rows."""
        return 2 if self.split and self.halves == 1 else 1

    @property
    def combined_bytes(self) -> int:
        """Shared memory of the combine kernel's warps: (max, sum, two outputs) of two rows; with fixed splits, three
        sums in bins per warp and in total, and two exponents.
        """
        return 128 * (self.combine * (3 * self.bins + 2) + 3 * self.bins if self.split else 8 * self.combine)

    @property
    def mma(self) -> DType:
        return kv.f16 if self.narrow else self.spec.dtype

    def pair_of(self, t: Any, lane: Any) -> Any:
        """The first of the two neighbouring elements that a lane has in step t of the output of converted elements.

        A lane has the 16 bits of its quarter warp's place in an ldmatrix: two 8-bit elements in one step, or four 4-bit
        ones in two. ``t`` may be a run-time value.
        """
        if self.spec.packed:
            return (t // 2) * 32 + (t % 2) * 2 + (lane >> 2) * 4
        return t * 16 + (lane >> 2) * 2

    def element_of(self, t: Any, lane: Any, half: Any) -> Any:
        """Element ``half`` of the two that a lane has in step t of the output; ``half`` may be a run-time value."""
        if self.spec.packed:
            return self.pair_of(t, lane) + half
        return t * 16 + ((lane >> 2) * 2 + half if self.narrow else (lane >> 2) + 8 * half)

    def least_bytes(self, schedule: Mapping[str, Any]) -> tuple[int, str]:
        """(bytes, name) of the largest block, with the smallest possible values of the missing entries."""
        # The tile of a batch-invariant schedule must not depend on the batch, so nothing makes it smaller either.
        open_ = {"warps": self.slices, "stages": 2, "tile": tile_of(self) if schedule.get("batch_invariant") else 16}
        if schedule.get("batch_invariant"):
            open_ |= invariant(self, open_["tile"])
        least = replace(self, **open_ | {name: schedule[name] for name in ENTRIES if name in schedule})
        return max(
            (block_bytes(least), "a block of the decode kernel"), (combine_bytes(least), "a block that combines")
        )


def invariant(config: DecodeConfig, tile: int) -> dict[str, int]:
    """The entries that a batch-invariant schedule fixes, given its tile, which follows from the case alone.

    Nothing that changes the order of a sequence's additions may depend on the batch; which warp combines may. 8-bit
    splits are longer: adding one takes as long as with 16 bits, and reading it half as long.
    """
    return {"split_size": max(128 if config.narrow else 64, 2 * tile)}


def problems(
    case: Case, max_queries: int, target: Target, max_batch: int = 1024, batch_invariant: bool = False
) -> list[str]:
    """Why this kernel does not support a case, one sentence per reason; empty if it does."""
    if target.is_host or not target.has("cp_async"):
        return [f"needs a GPU with cp.async, got {target.name}"]
    spec, query, group, found = case.spec, case.query, case.group, list[str]()
    if spec.is_mla:
        found.append("needs a collection with values, got an MLA one")
    if group > WARP_ROWS or max_queries > MOST_QUERIES:
        found.append(
            f"needs a group of at most {WARP_ROWS} query heads and at most {MOST_QUERIES} new tokens of a sequence, "
            f"got a group of {group} and max_queries {max_queries}"
        )
    if spec.dtype.code:
        found.append(f"needs elements that it knows, got those of the code {spec.dtype.code}")
    elif spec.converted:
        known = target.has("f8_convert") if spec.dtype.is_float and not spec.packed else spec.quantized
        if not known or query not in (kv.bf16, kv.f16):
            found.append(
                "needs 8-bit floats that the target converts, or integers with scales, and a query of bf16 or f16, got "
                f"{spec.dtype.name} with a query of {query.name} on {target.name}"
            )
    elif spec.dtype not in (kv.bf16, kv.f16, kv.f32) or query is not spec.dtype:
        found.append(
            "needs a cache of 8 bits, or of bf16, f16 or f32 with queries of its type, got "
            f"{spec.dtype.name} with a query of {query.name}"
        )
    if spec.head_size % 8 or not 8 <= spec.head_size <= MOST_COLUMNS:
        found.append(f"needs a head size of a multiple of 8 up to {MOST_COLUMNS}, got {spec.head_size}")
    # The elements of a row that a lane multiplies in one step share one scale.
    if spec.quantized and spec.granularity < spec.head_size and spec.granularity % DECODE_GRANULE:
        found.append(f"needs granules of a multiple of {DECODE_GRANULE}, got {spec.granularity}")
    if not found:
        least_config = DecodeConfig(case, max_queries, stages=2, max_batch=max_batch)
        least_config = replace(least_config, warps=least_config.slices)
        if batch_invariant:
            tile = tile_of(least_config)
            least_config = replace(least_config, tile=tile, **invariant(least_config, tile))
        if least_config.scales > 2 * MOST_SCALES and not least_config.scales_copied:
            found.append(f"needs at most {MOST_SCALES} scales of a token that are not f32, got {least_config.scales}")
        least = block_bytes(least_config)
        if least > target.shared_bytes:
            found.append(
                f"needs a block that fits {target.shared_bytes} bytes of shared memory, got {least} for a max_batch of "
                f"{max_batch}"
            )
    return found


def supports(
    case: Case, max_queries: int, target: Target, max_batch: int = 1024, batch_invariant: bool = False
) -> bool:
    """Whether this kernel supports a case; other cases use the general kernels."""
    return not problems(case, max_queries, target, max_batch, batch_invariant)


def warps_of(config: DecodeConfig) -> int:
    """Warps per block: the largest count up to 4 that divides the warps of a token's rows."""
    return next(w for w in (4, 3, 2, 1) if config.row_groups % w == 0 and w % config.slices == 0)


def tile_of(config: DecodeConfig) -> int:
    """Tokens per tile: those in 4 KiB of keys, but 16 (8-bit: 32) to 64, or 128 for the narrowest heads; fewer where
    pages are small.
    """
    if config.stored_bytes <= 16:
        tile = 128
    elif config.narrow:
        tile = 64 if config.row_bytes <= 64 else 32
    else:
        tile = 16 << min(2, (cdiv(256, config.row_bytes) - 1).bit_length())
    return min(tile, 32 * config.spec.page_size) if config.spec.paged else tile


def fitted(target: Target, config: DecodeConfig, fixed: Collection[str], measured: bool = False) -> DecodeConfig:
    """The configuration with stages, tiles, warps and blocks reduced until it fits the target.

    Parameters
    ----------
    fixed : names
        Entries that are not reduced; the other ones suffice to make it fit (``schedules.why_unsupported``).
    measured : bool
        Whether the number of blocks was measured for the configuration as given.
    """
    while block_bytes(config) > target.shared_bytes:
        smaller = _smaller(config)
        config, measured = replace(config, **next({n: smaller[n]} for n in smaller if n not in fixed)), False
    held = config.column_tiles * config.columns * (2 if config.wide else 1)
    fits = min(target.shared_bytes // block_bytes(config), REGISTERS // (config.warps * 32 * decode_registers(held)))
    return config if measured or "blocks" in fixed else replace(config, blocks=max(1, min(config.blocks, fits)))


def _smaller(config: DecodeConfig) -> dict[str, int]:
    """The entries that can be reduced by one step, cheapest first."""
    warps = [w for w in range(config.warps - 1, 0, -1) if config.row_groups % w == 0 and w % config.slices == 0]
    return (
        ({"stages": config.stages - 1} if config.stages > 2 else {})
        | ({"tile": config.tile // 2} if config.tile > 16 else {})
        | ({"warps": warps[0]} if warps else {})
    )


def configured(target: Target, config: DecodeConfig, schedule: Mapping[str, Any]) -> DecodeConfig:
    """The configuration of a complete schedule, with its padding.

    Raises
    ------
    ValueError
        If an entry is missing.
    """
    schedules.written(schedule, schedules.DECODE.names)
    config = replace(config, **{name: schedule[name] for name in ENTRIES if name in schedule})
    return replace(config, padding=_padding(target, config))


def entries_of_few(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule of the decode kernel in a mixed batch, from the schedule of kind tile."""
    prefix, names = schedules.PREFIX_OF_DECODE, (*schedules.DECODE.names, schedules.MAX_BATCH.name)
    return {name: schedule[prefix + name] for name in names if prefix + name in schedule}


def block_bytes(config: DecodeConfig) -> int:
    """Shared memory of a block, including alignment and the hardware's reserved bytes."""
    return _used_bytes(config) + 128 + RESERVED_BYTES


def combine_bytes(config: DecodeConfig) -> int:
    """Shared memory of a block of the combine kernel; 0 without one."""
    if not config.combine:
        return 0
    counts = 4 * (config.max_batch + 1 + config.combine) if config.max_batch > 1 else 0
    return config.combined_bytes + counts + 128 + RESERVED_BYTES


def _used_bytes(config: DecodeConfig) -> int:
    """Shared memory that a block uses: its warps' buffers and, for several sequences, tile counts and one per warp."""
    counts = 4 * (config.max_batch + 1 + config.warps) if config.max_batch > 1 else 0
    return config.warps * config.warp_bytes + counts


def _padding(target: Target, config: DecodeConfig) -> int:
    """Bytes that a block leaves unused, so that no multiprocessor has room for more blocks than scheduled.

    The next kernel's blocks start in free slots while this kernel runs. With room for one extra block, some
    multiprocessors would start it and others not, and the next kernel's blocks would be unevenly distributed.
    """
    return max(0, target.shared_bytes_of(config.blocks + 1) + 32 - _used_bytes(config)) // 16 * 16
