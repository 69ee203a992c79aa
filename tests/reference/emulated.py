# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations in the PTX interpreter, each on a stream where another kernel is ahead that may not have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.emulator import Order, Report, run as emulator
from kvarn.emulator.memory import Memory, arrays_of
from kvarn.emulator.run import order_of
from kvarn.emulator.stream import Stream

MARKED = 2**28  # bytes of an array at most: larger ones are mapped, and become memory where they are touched


def run(
    operation: Any, operands: Sequence[Any], attributes: tuple[tuple[str, Any], ...] = (),
    schedule: Mapping[str, Any] | None = None, target: str = "sm_90a", multiprocessors: int = 2,
    order: Order | None = None, report: Report | None = None, stream: Stream | None = None,
) -> None:  # fmt: skip
    """As ``kvarn.emulator.run.run``, behind a kernel that writes all that the operation is given.

    Nobody writes anything where the schedule promises what is there early. A kernel that waits for the operation's last
    one, as any kernel that follows may, must find that the others have ended.
    """
    stream = stream or Stream()
    if not (schedule or {}).get("early"):
        arrays = arrays_of([x for x in operands if x is not None])
        ahead = stream.launch("writes_all", False, Memory(arrays), arrays)
        for marks in ahead.marks:
            if marks.written.size <= MARKED:
                marks.written[:] = ahead.number
    emulator.run(operation, operands, attributes, schedule, target, multiprocessors, order, report, stream)
    assert not stream.left, f"kernels {sorted(stream.left)} may run after the last one has ended: nobody waits for them"


__all__ = ["order_of", "run"]
