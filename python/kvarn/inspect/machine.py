# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Occupancy and peak rates (data sheet) of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.dialect.chips import REGISTERS, WARP, Gpu
from kvarn.lowering.target import by_name


@dataclass(frozen=True)
class Occupancy:
    """The occupancy of a multiprocessor by a kernel.

    Attributes
    ----------
    threads : int
        Threads per block.
    blocks, warps, most_warps : int
        Resident blocks and warps, and the limit of warps.
    limit : {"registers", "shared memory", "warps", "blocks"}
        The resource that prevents another block.
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
    """Resident blocks per multiprocessor.

    Parameters
    ----------
    target : str
    threads : int
        Threads per block.
    registers : int
        Registers per thread; 0 if unknown, which sets no limit.
    shared : int
        Shared memory per block in bytes, static and dynamic.
    """
    on = by_name(target)
    most_warps = on.chip.warps
    warps = -(-threads // WARP)
    limits = {"warps": most_warps // warps, "blocks": on.chip.blocks, "shared memory": on.blocks_of(shared)}
    if registers:
        a_warp = -(-registers * WARP // 256) * 256  # allocated to warps in units of 256
        limits["registers"] = REGISTERS // (a_warp * warps)
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(threads, limits[limit], limits[limit] * warps, most_warps, limit)


def roofs(target: str) -> tuple[Gpu, ...]:
    """The GPUs of a target, in the order in which they are drawn."""
    return by_name(target).chip.gpus


__all__ = ["Occupancy", "occupancy", "roofs"]
