# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An emulator in which a part of a warp does not come to a barrier of the block.

The emulator counts lanes at barrier 0, and at a named one it waits for those of the warp that are still on their way,
since ptxas makes a warp whole where its branches join. PTX does not promise that: code for tiles says it, by
``bar.warp.sync`` (``kvarn.lowering.tiles.barriers``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvarn.emulator import block, grid, ptx_parser


def _kind(i: ptx_parser.Instruction) -> int:
    usual = _usual_kind(i)
    return usual & ~ptx_parser.TOGETHER if _is_barrier(i) else usual


def _barrier(t: block.Block, i: ptx_parser.Instruction) -> Callable[[Any], None]:
    run = _usual_barrier(t, i)
    if not _is_barrier(i):
        return run

    def checked(m: Any) -> None:
        t.warps(m, i.text)
        run(m)

    return checked


def _is_barrier(i: ptx_parser.Instruction) -> bool:
    return i.name[0] in ("bar", "barrier") and i.name[1] not in ("warp", "cluster")


_usual_kind, _usual_barrier = ptx_parser._kind, block.OPS["bar"]


@contextlib.contextmanager
def demanded() -> Iterator[None]:
    """Within, a barrier of the block that a part of a warp reaches is an ``EmulationError``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptx_parser, "_kind", _kind)
        for name in ("bar", "barrier"):
            patch.setitem(block.OPS, name, _barrier)
        grid._parsed.cache_clear()
        yield
    grid._parsed.cache_clear()


__all__ = ["demanded"]
