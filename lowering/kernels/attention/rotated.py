# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rotation of rows beside an attention by tiles over rotated heads, which multiplies rows as they are.

Before it, query rows are rotated to where the output will be: a tile reads its own rows there before it writes them.
After it, the output is rotated back in place. Left out are rows of no sequence, and rows that a decode kernel of the
same call computes: that kernel rotates its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.lowering.index import Ix

from .. import hadamard
from ..base import Expansion
from ..common import WARP, Rows, Work, converted, head_and_lane, row_alignment, sequence_of, whole_warps
from .case import Case

WIDTH = 8  # elements of a vector


@dataclass(frozen=True)
class Blocks:
    """How threads share the blocks of a head: ``lanes`` of them a block, with ``chunks`` vectors each."""

    rotation: int
    size: int

    @property
    def extent(self) -> int:
        """Elements that a group of lanes has: a block, or a vector of smaller ones."""
        return max(self.rotation, WIDTH)

    @property
    def lanes(self) -> int:
        return min(self.extent // WIDTH, WARP)

    @property
    def chunks(self) -> int:
        return self.extent // (WIDTH * self.lanes)

    @property
    def threads(self) -> int:
        """Threads per head."""
        return self.size // self.extent * self.lanes


def rotation_kernel(case: Case, blocks: Blocks, work: Work, rows: Rows) -> Any:
    """Rotate the rows of sequences of more than ``few`` from one buffer to another."""
    lanes, step = blocks.lanes, blocks.lanes * WIDTH

    @kv.kernel
    def rotate_rows(source, out, row_offsets, few: kv.i32):
        token, first = work.place()
        if (token < source.shape[0]) & (first < work.items):
            b, inside, _ = sequence_of(row_offsets, token, source.shape[0])
            if inside & (kv.i32(row_offsets[b + 1]) - kv.i32(row_offsets[b]) > few):
                for item in range(first, work.items, work.step):
                    h, part, active = head_and_lane(item, case.heads, blocks.threads)
                    d = part // lanes * blocks.extent + part % lanes * WIDTH
                    places = [d + k * step for k in range(blocks.chunks)]
                    found = [kv.f32(rows.load(source, token, h, at, width=WIDTH)) for at in places]
                    lane = kv.lane_id() if lanes > 1 else None
                    found = hadamard.of_vectors(found, blocks.rotation, lanes, lane)
                    if active:
                        for at, x in kv.static(zip(places, found, strict=True)):
                            rows.store(out, token, h, at, value=converted(x, out.dtype))

    return rotate_rows


def rotate(case: Case, at: Expansion, op: Any, source: Any, few: Ix | None = None) -> None:
    """Launch the rotation of the rows of ``source`` to the output, of sequences of more than ``few``."""
    blocks, rows = Blocks(case.spec.rotation, case.size), Rows(WIDTH, row_alignment(op))
    work = Work.of(at, whole_warps(at, case.heads * blocks.threads))
    args = [source, op.out, op.row_offsets, at.constant(0) if few is None else few]
    grid, threads = (work.blocks(at.dim(source, 0)), 1, 1), (work.threads, 1, 1)
    at.launch(rotation_kernel(case, blocks, work, rows), args, grid, threads, key=(case, rows, work))
