# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The schedule of decode attention: what a kernel is specialised for, and how it is chosen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import kvarn as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec, cdiv
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.lowering.target import Target

NEVER = -1.0e30  # a running maximum that any score exceeds, finite so that differences are
# Entries of a schedule. max_batch bounds the sequences (4 bytes of shared memory each); combine is the warps of a merge
# block, 0 to merge in the kernel itself; split is the tokens of a fixed split, 0 to divide the batch evenly; early lets
# the kernel read what the caller promises that the kernel before does not write.
TUNABLE = ("warps", "stages", "tile", "blocks", "min_tiles", "max_batch", "combine", "split", "early")
COLUMNS = 8  # query rows of one mma
WARP_ROWS = 2 * COLUMNS  # most query rows of a warp; a head with more is shared by several
# What a batch-invariant schedule fixes: nothing that changes the order of a sequence's additions may follow the batch.
# (Who merges may: both ways to merge add fixed splits in one order.)
INVARIANT = {"split": 512}
MOST_QUERIES = 8  # new tokens of a sequence that still count as a decode
MOST_SPLITS, SHORT_SPLITS = 64, 8  # fixed splits of a sequence, and of one that is short


@dataclass(frozen=True)
class Config:
    """What a decode kernel is specialised for."""

    spec: CacheSpec
    query: DType
    group: int
    max_queries: int
    mask: str = "causal"
    span: int = 0
    softcap: float = 0.0
    padded: bool = False
    warps: int = 4
    stages: int = 2
    tile: int = 16
    blocks: int = 3
    min_tiles: int = 4
    max_batch: int = 1024
    combine: int = 0
    split: int = 0
    early: int = 0
    programmatic: bool = True
    pair_alignment: int = 4
    padding: int = 0

    @property
    def heads(self) -> int:
        return self.spec.num_heads

    @property
    def rank(self) -> int:
        """Dimensions of the query and the output."""
        return 4 if self.padded else 3

    @property
    def size(self) -> int:
        return self.spec.head_size

    @property
    def narrow(self) -> bool:
        """Whether the cache holds 8-bit elements."""
        return self.spec.dtype.bits == 8

    @property
    def scales(self) -> int:
        """Scales of a token and head; 0 without."""
        return self.spec.num_scales if self.spec.quantized else 0

    @property
    def split_tokens(self) -> int:
        """Tokens of the longest fixed split of a sequence with no more than the most: whole tiles."""
        return max(self.split // self.tile, 1) * self.tile

    @property
    def rows(self) -> int:
        """Query rows of a sequence and KV head, at most."""
        return self.group * self.max_queries

    @property
    def parts(self) -> int:
        """Warps that share a KV head's rows, each with up to 16 of them."""
        return cdiv(self.rows, WARP_ROWS)

    @property
    def work_heads(self) -> int:
        """Warps that it takes to have all rows of a token."""
        return self.heads * self.parts

    @property
    def column_tiles(self) -> int:
        """Tiles of 8 query rows that a warp has."""
        return cdiv(min(self.rows, WARP_ROWS), COLUMNS)

    @property
    def row_bytes(self) -> int:
        return self.size * self.spec.dtype.itemsize

    @property
    def l2_prefetch(self) -> int:
        """Bytes that a copy brings into the L2: where rows end in the middle of a line, the rest is another warp's."""
        return 128 if self.row_bytes % 128 else 0

    @property
    def reads_once(self) -> bool:
        """Whether a row of the cache is read by one warp only."""
        return self.parts == 1

    @property
    def tile_layout(self) -> SharedLayout:
        """How a tile of K or V lies in shared memory, a token a row."""
        return SharedLayout.whole_rows(self.tile, self.row_bytes, 1)

    @property
    def pitch(self) -> int:
        """Bytes from token to token in shared memory."""
        return self.tile_layout.pitch

    @property
    def half_stage(self) -> int:
        """Bytes of one tile of K, or of V."""
        return self.tile * self.pitch

    @property
    def stage_bytes(self) -> int:
        return 2 * self.half_stage + 2 * self.scales * 4 * self.tile

    @property
    def warp_bytes(self) -> int:
        """Shared memory of one warp: its ring."""
        return self.stages * self.stage_bytes

    @property
    def quads(self) -> int:
        """Four-float pieces of one lane's partial result: output, then (max, max, sum, sum), for each column tile."""
        return self.column_tiles * (self.size // 16 + 1)

    @property
    def causal(self) -> bool:
        return self.mask in ("causal", "sliding_window", "chunked_causal")

    @property
    def chunked(self) -> bool:
        return self.mask in ("chunked", "chunked_causal")

    @property
    def mma(self) -> DType:
        return kv.f16 if self.narrow else self.spec.dtype


def supports(
    spec: CacheSpec, query: DType, group: int, max_queries: int, target: Target, max_batch: int = 1024
) -> bool:
    """Whether this kernel takes a case; the others go to the general kernels."""
    if target.is_host or not target.has("cp_async") or spec.is_mla:
        return False
    if group > WARP_ROWS or max_queries > MOST_QUERIES or not 16 <= spec.head_size <= 256:
        return False
    smallest = Config(spec, query, group, max_queries, warps=1, stages=2, tile=16, max_batch=max_batch)
    if block_bytes(smallest) > target.shared_bytes:
        return False
    # A granule must be whole steps of the products: 16 elements of the head, or 32 of 8 bits.
    if spec.quantized and spec.granularity < spec.head_size and spec.granularity % (256 // spec.dtype.bits):
        return False
    if spec.dtype.bits == 8:
        converts = target.has("f8_convert") if spec.dtype.is_float else spec.dtype is kv.i8 and spec.quantized
        return converts and query in (kv.bf16, kv.f16) and spec.head_size % 32 == 0
    return spec.dtype in (kv.bf16, kv.f16) and query is spec.dtype and spec.head_size % 16 == 0


def warps_of(heads: int) -> int:
    """Warps of a block, each with rows of a KV head: the most that divide all of them, up to 4."""
    return next(w for w in (4, 3, 2, 1) if heads % w == 0)


def tile_of(config: Config) -> int:
    """Tokens of a tile: as many as have 4 KiB of keys, 16 (32 of 8 bits) to 64; fewer where pages are small."""
    if config.narrow:
        tile = 64 if config.row_bytes <= 64 else 32
    else:
        tile = 16 << min(2, (cdiv(256, config.row_bytes) - 1).bit_length())
    return min(tile, 32 * config.spec.page_size) if config.spec.paged else tile


def fitted(target: Target, config: Config, fixed: Collection[str]) -> Config:
    """The configuration, with fewer stages, smaller tiles, fewer warps and fewer blocks as far as the target needs it.

    Parameters
    ----------
    fixed : names
        Entries that stay as they are.

    Raises
    ------
    ValueError
        If a block does not fit.
    """
    while block_bytes(config) > target.shared_bytes:
        smaller = _smaller(config)
        change = next(({name: smaller[name]} for name in smaller if name not in fixed), None)
        if change is None:
            raise ValueError(
                f"a block of the decode kernel must fit {target.shared_bytes} bytes of shared memory, got "
                f"{block_bytes(config)}: choose fewer stages or warps"
            )
        config = replace(config, **change)
    registers = 168 if config.column_tiles * config.size <= 128 else 255
    fits = min(target.shared_bytes // block_bytes(config), 65536 // (config.warps * 32 * registers))
    return config if "blocks" in fixed else replace(config, blocks=max(1, min(config.blocks, fits)))


def _smaller(config: Config) -> dict[str, int]:
    """What can be less, by one step; what costs least first."""
    warps = [w for w in range(config.warps - 1, 0, -1) if config.work_heads % w == 0]
    return (
        ({"stages": config.stages - 1} if config.stages > 2 else {})
        | ({"tile": config.tile // 2} if config.tile > 16 else {})
        | ({"warps": warps[0]} if warps else {})
    )


def choose(target: Target, config: Config, schedule: dict[str, Any]) -> Config:
    """A configuration whose blocks fit the target: the schedule's own entries stay as they are given."""
    given = {k: v for k, v in schedule.items() if k in TUNABLE}
    if schedule.get("batch_invariant"):
        given = {**INVARIANT, **given}
    config = replace(config, **{"warps": warps_of(config.work_heads), "tile": tile_of(config), **given})
    if config.spec.paged and config.tile > 32 * config.spec.page_size:
        raise ValueError(
            f"a tile of the decode kernel must lie in at most 32 pages, got {config.tile} tokens over pages of "
            f"{config.spec.page_size}"
        )
    config = fitted(target, config, given)
    return replace(config, padding=_padding(target, config))


def block_bytes(config: Config) -> int:
    """What a block holds, with room for alignment and the 1 KiB that the hardware keeps."""
    return _used_bytes(config) + 128 + 1024


def _used_bytes(config: Config) -> int:
    """Shared memory of a block: its rings and, of several sequences, their tile counts and one of each warp."""
    counts = 4 * (config.max_batch + 1 + config.warps) if config.max_batch > 1 else 0
    return config.warps * config.warp_bytes + counts


def _padding(target: Target, config: Config) -> int:
    """Bytes that a block leaves unused, so that no multiprocessor has room for more blocks than it is to have.

    The next kernel's blocks take the places that are free while this one runs. Where one more finds room, it is taken
    by some multiprocessors and not by others, and the next kernel's blocks meet there two by two.
    """
    return max(0, (target.shared_bytes + 1024) // (config.blocks + 1) - 1024 + 32 - _used_bytes(config)) // 16 * 16
