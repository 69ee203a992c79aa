# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What GPUs hold and how fast they are: occupancy, and the two roofs of a roofline."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.dialect.chips import REGISTERS, WARP, Gpu
from kvarn.lowering.target import by_name


@dataclass(frozen=True)
class Occupancy:
    """What a multiprocessor holds of a kernel at once.

    Attributes
    ----------
    threads : int
        Of a block.
    blocks, warps, most_warps : int
    limit : {"registers", "shared memory", "warps", "blocks"}
        What allows no further block.
    """

    threads: int
    blocks: int
    warps: int
    most_warps: int
    limit: str

    @property
    def share(self) -> float:
        return self.warps / self.most_warps


def occupancy(target: str, threads: int, registers: int, shared: int) -> Occupancy:
    """Blocks that a multiprocessor holds.

    Parameters
    ----------
    target : str
    threads : int
        Of a block.
    registers : int
        Of a thread; 0 if they are not known, and then no limit.
    shared : int
        Bytes of a block, static and dynamic.
    """
    on = by_name(target)
    most_warps = on.chip.warps
    warps = -(-threads // WARP)
    limits = {"warps": most_warps // warps, "blocks": on.chip.blocks, "shared memory": on.blocks_of(shared)}
    if registers:
        a_warp = -(-registers * WARP // 256) * 256  # handed out to warps by 256
        limits["registers"] = REGISTERS // (a_warp * warps)
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(threads, limits[limit], limits[limit] * warps, most_warps, limit)


def roofs(target: str) -> tuple[Gpu, ...]:
    """GPUs of a target, the one that is drawn first."""
    return by_name(target).chip.gpus


__all__ = ["Occupancy", "occupancy", "roofs"]
