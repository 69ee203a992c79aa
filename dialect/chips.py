# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Facts about each chip: what a multiprocessor can hold, how many there are, and the data sheet rates of its GPUs.

This is data only, so that the runtime and the emulator read it without MLIR. ``lowering/target.py`` reads it and adds
which instructions a chip has.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
REGISTERS = 65536  # 32-bit registers of a multiprocessor
RESERVED_BYTES = 1024  # shared memory per block that the hardware keeps for itself
# Rates per clock of one Hopper multiprocessor.
BYTE_PRODUCTS = 4096  # 8-bit multiplications in tensor cores
EXPONENTIALS = 16


@dataclass(frozen=True)
class Gpu:
    """A GPU's dense peak rates, from its data sheet.

    Attributes
    ----------
    name : str
    bandwidth : float
        Bytes per second of device memory.
    vector, tensor : float
        Operations per second: float32 outside of tensor cores, and bf16 in them.
    """

    name: str
    bandwidth: float
    vector: float
    tensor: float


@dataclass(frozen=True)
class Chip:
    """The GPUs of one compute capability.

    Attributes
    ----------
    sm : int
        Compute capability times ten.
    shared_bytes : int
        Largest dynamic shared memory of a block.
    warps, blocks : int
        The most of each that a multiprocessor can hold.
    multiprocessors : int
        Multiprocessors of the first of ``gpus``.
    gpus : tuple of Gpu
        The first is the one that figures are drawn for.
    """

    sm: int
    shared_bytes: int
    warps: int
    blocks: int
    multiprocessors: int
    gpus: tuple[Gpu, ...]


_H100, _H200 = Gpu("H100 SXM", 3.35e12, 67e12, 989e12), Gpu("H200 SXM", 4.8e12, 67e12, 989e12)
CHIPS = {
    chip.sm: chip
    for chip in (
        Chip(80, 163 * 1024, 64, 32, 108, (Gpu("A100 SXM 80 GB", 2.04e12, 19.5e12, 312e12),)),
        Chip(86, 99 * 1024, 48, 16, 84, (Gpu("A40", 0.696e12, 37.4e12, 149.7e12),)),
        Chip(89, 99 * 1024, 48, 24, 128, (Gpu("L40S", 0.864e12, 91.6e12, 362e12),)),
        Chip(90, 227 * 1024, 64, 32, 132, (_H200, _H100)),
        Chip(100, 227 * 1024, 64, 32, 148, (Gpu("B200", 8e12, 80e12, 2250e12),)),
    )
}
HOPPER = CHIPS[90]
HOPPER_L2_BYTES = 50 << 20
COMPILED_FOR = ("sm_100a", "sm_90a", "sm_80")  # GPU targets that may be chosen by default, best first
