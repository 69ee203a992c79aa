# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What GPUs hold and how fast they are: occupancy, and the two roofs of a roofline."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.lowering.target import REGISTERS, by_name

WARP = 32
_WARPS_AND_BLOCKS = {80: (64, 32), 86: (48, 16), 89: (48, 24), 90: (64, 32), 100: (64, 32)}  # of a multiprocessor


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
    chip = by_name(target)
    most_warps, most_blocks = _WARPS_AND_BLOCKS[chip.sm]
    warps = -(-threads // WARP)
    limits = {
        "warps": most_warps // warps,
        "blocks": most_blocks,
        "shared memory": chip.blocks_of(shared),
    }
    if registers:
        a_warp = -(-registers * WARP // 256) * 256  # handed out to warps by 256
        limits["registers"] = REGISTERS // (a_warp * warps)
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(threads, limits[limit], limits[limit] * warps, most_warps, limit)


@dataclass(frozen=True)
class Roof:
    """A GPU's rates on its data sheet, dense.

    Attributes
    ----------
    name : str
    bandwidth : float
        Bytes a second of device memory.
    vector, tensor : float
        Operations a second: float32 outside of tensor cores, and bf16 in them.
    """

    name: str
    bandwidth: float
    vector: float
    tensor: float


_ROOFS = {
    80: (Roof("A100 SXM 80 GB", 2.04e12, 19.5e12, 312e12),),
    86: (Roof("A40", 0.696e12, 37.4e12, 149.7e12),),
    89: (Roof("L40S", 0.864e12, 91.6e12, 362e12),),
    90: (Roof("H200 SXM", 4.8e12, 67e12, 989e12), Roof("H100 SXM", 3.35e12, 67e12, 989e12)),
    100: (Roof("B200", 8e12, 80e12, 2250e12),),
}


def roofs(target: str) -> tuple[Roof, ...]:
    """GPUs of a target, the one that is drawn first."""
    return _ROOFS[by_name(target).sm]


__all__ = ["Occupancy", "Roof", "occupancy", "roofs"]
