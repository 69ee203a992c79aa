# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""System calls of kernels, for the PTX interpreter: assertions, traps and printf."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np

from .block import Block, Lanes, op
from .ptx_parser import EmulationError, Instruction

_FORMAT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(hh|h|ll|l|j|z)?([diuoxXcfFeEgGps%])")


@op("call")
def call(t: Block, i: Instruction) -> Any:
    name = next((n for n in ("__assertfail", "vprintf") if n in i.text), None)
    if name is None:
        raise EmulationError(f"unknown function: {i.text}")

    def fails(m: Lanes) -> None:
        lanes = np.arange(t.count)[m]
        message = _text(t, int(t.register("param0")[lanes[0]]))
        raise EmulationError(f"{message}: thread {int(lanes[0])} of block {t.index}")

    def prints(m: Lanes) -> None:
        for lane in np.arange(t.count)[m].tolist():
            text = _text(t, int(t.register("param0")[lane]))
            print(_formatted(t, text, lane, int(t.register("param1")[lane]), i), end="")
        t.put("retval0", m, np.zeros(len(np.arange(t.count)[m]), np.uint32))

    return fails if name == "__assertfail" else prints


@op("trap")
def trap(t: Block, i: Instruction) -> Any:
    def run(m: Lanes) -> None:
        raise EmulationError(f"the kernel stops itself (trap) in thread {int(np.arange(t.count)[m][0])}")

    return run


def _text(t: Block, address: int) -> str:
    """A string constant."""
    data = t.kernel.constants
    begin = address - data.ctypes.data
    if not 0 <= begin < len(data):
        raise EmulationError("a string that a kernel prints must be a constant")
    return bytes(data[begin:]).partition(b"\0")[0].decode("utf-8", "replace")


def _formatted(t: Block, text: str, lane: int, address: int, i: Instruction) -> str:
    """The output of C's printf for a format and the values at an address, each aligned to its size."""
    at = address

    def value(found: re.Match[str]) -> str:
        nonlocal at
        kind, length = found[2], found[1] or ""
        if kind == "%":
            return "%"
        wide = kind in "fFeEgGps" or length in ("l", "ll", "j", "z")
        size = 8 if wide else 4
        at += -at % size
        raw = t.read("local", np.array([at], np.uint64), size, i, np.array([lane])).tobytes()
        at += size
        if kind == "s":
            return _text(t, int.from_bytes(raw, "little"))
        form = {"f": "<d"}.get("f" if kind in "fFeEgG" else "", ("<q" if wide else "<i") if kind in "dic" else "")
        number = struct.unpack(form or ("<Q" if wide else "<I"), raw)[0]
        if kind == "p":
            return hex(number)
        plain = found[0].replace(length, "", 1) if length else found[0]
        return plain % (chr(number & 255) if kind == "c" else number)

    return _FORMAT.sub(value, text)
