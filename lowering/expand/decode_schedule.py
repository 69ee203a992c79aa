# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The schedule of decode attention: what a kernel is specialised for, and how it is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import kvarn as kv
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec, cdiv
from kvarn.lowering.target import Target

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
NEVER = -1.0e30  # a running maximum that any score exceeds, finite so that differences are
# Entries of a schedule. max_batch bounds the sequences (4 bytes of shared memory each); combine is the warps of a merge
# block, 0 to merge in the kernel itself.
TUNABLE = ("warps", "stages", "tile", "blocks", "min_tiles", "max_batch", "combine")
COLUMNS = 8  # query rows of one mma


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
    sinks: bool = False
    lse: bool = False
    warps: int = 4
    stages: int = 2
    tile: int = 16
    blocks: int = 3
    min_tiles: int = 4
    max_batch: int = 1024
    combine: int = 0
    programmatic: bool = True
    pair_alignment: int = 4

    @property
    def heads(self) -> int:
        return self.spec.num_heads

    @property
    def size(self) -> int:
        return self.spec.head_size

    @property
    def narrow(self) -> bool:
        """Whether the cache holds 8-bit floats."""
        return self.spec.dtype.bits == 8

    @property
    def rows(self) -> int:
        return self.group * self.max_queries

    @property
    def column_tiles(self) -> int:
        return cdiv(self.rows, COLUMNS)

    @property
    def row_bytes(self) -> int:
        return self.size * self.spec.dtype.itemsize

    @property
    def swizzled(self) -> bool:
        return self.row_bytes % 128 == 0

    @property
    def pitch(self) -> int:
        """Bytes from token to token in shared memory; padding keeps rows that cannot be swizzled off one bank."""
        return self.row_bytes if self.swizzled else self.row_bytes + 16

    @property
    def half_stage(self) -> int:
        """Bytes of one tile of K, or of V."""
        return self.tile * self.pitch

    @property
    def stage_bytes(self) -> int:
        return 2 * self.half_stage

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


def supports(spec: CacheSpec, query: DType, group: int, max_queries: int, target: Target) -> bool:
    """Whether this kernel takes a case; the others go to the general kernels."""
    if target.is_host or not target.has("cp_async") or spec.is_mla or spec.quantized:
        return False
    if group * max_queries > 2 * COLUMNS or not 16 <= spec.head_size <= 256:
        return False
    if spec.dtype in (kv.f8e4m3, kv.f8e5m2):
        return target.has("f8_convert") and query in (kv.bf16, kv.f16) and spec.head_size % 32 == 0
    return spec.dtype in (kv.bf16, kv.f16) and query is spec.dtype and spec.head_size % 16 == 0


def warps_of(heads: int) -> int:
    """Warps of a block, each with a KV head: the most that divide the heads, up to 4."""
    return next(w for w in (4, 3, 2, 1) if heads % w == 0)


def choose(target: Target, config: Config, schedule: dict[str, Any]) -> Config:
    """A configuration whose blocks fit the target: the schedule's own entries stay as they are given."""
    given = {k: v for k, v in schedule.items() if k in TUNABLE}
    config = replace(config, **{"warps": warps_of(config.heads), "tile": 32 if config.narrow else 16, **given})
    while "warps" not in given and config.warps > 1 and config.warps * config.warp_bytes > target.shared_bytes // 2:
        config = replace(config, warps=next(w for w in (2, 1) if w < config.warps and config.heads % w == 0))
    # What a block holds: its rings, the tile counts of the batch, and 1 KiB that the hardware keeps.
    block_bytes = config.warps * config.warp_bytes + 4 * (config.max_batch + 1) + 128 + 1024
    registers = 168 if config.column_tiles * config.size <= 128 else 255
    fits = min(target.shared_bytes // block_bytes, 65536 // (config.warps * 32 * registers))
    if fits < 1:
        raise ValueError(
            f"a block of the decode kernel must fit {target.shared_bytes} bytes of shared memory, got {block_bytes}: "
            "choose fewer stages or warps"
        )
    return config if "blocks" in given else replace(config, blocks=min(config.blocks, fits))
