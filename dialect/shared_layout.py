# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The layout of a tile in shared memory: swizzles, row pitches, what descriptors and TMA boxes say of them.

Pure Python, as ``layout``. The formulas use ``+ - * // % ^ >> & <<`` only and take ints, arrays and values of a kernel
or of a pass alike. Offsets are bytes from the tile's first; rows and columns count elements of the tile.

A row is cut into *panels* of ``pitch`` bytes, one swizzle atom wide unless a pitch is given: panel p of a tile of r
rows lies at ``p * r * pitch``, and in it one line of ``pitch`` bytes follows the other. So TMA writes boxes and wgmma
reads operands. With a pitch of a whole row or more there is one panel: rows one after the other.

Swizzling moves 16-byte chunks: chunk bits are flipped by line bits, such that chunk c of eight consecutive lines lies
in eight different sets of four banks. For a pitch of one atom these are the address bits that TMA flips: bits 4 to 6 by
bits 7 to 9 (128 bytes), bits 4 and 5 by 7 and 8 (64 bytes), bit 4 by bit 7 (32 bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .layout import align_up, cdiv

CHUNK = 16  # bytes that swizzles move as one, and the widest access of a thread
BANKS, BANK_BYTES = 32, 4
SWIZZLES = (0, 32, 64, 128)
_K_STEP_BYTES = 32  # of every operand, what one k-step of wgmma reads of a row
_ROWS_A_STEP = 16
_DESCRIPTOR_CODES = {0: 0, 128: 1, 64: 2, 32: 3}


class Descriptor(NamedTuple):
    """What a wgmma matrix descriptor says besides the tile's address."""

    leading: int  # bytes: K-major, not used with a swizzle; transposed, from one swizzle atom of columns to the next
    stride: int  # bytes from eight rows to the next eight
    swizzle: int  # code of bits 62 and 63: 0 none, 1 of 128 bytes, 2 of 64, 3 of 32

    @property
    def bits(self) -> int:
        """All of the descriptor but bits 0 to 13, which hold the address in units of 16 bytes."""
        return self.leading >> 4 << 16 | self.stride >> 4 << 32 | self.swizzle << 62


TILE_SWIZZLE = 128  # bytes: of the tiles of kernels over tiles, which wgmma and TMA take as they are


@dataclass(frozen=True)
class SharedLayout:
    """Where the elements of a tile lie in shared memory.

    Parameters
    ----------
    rows, columns : int
    itemsize : int
        Bytes of an element, a power of two up to 16.
    swizzle : {0, 32, 64, 128}
        Bytes of the swizzle atom; 0 for none.
    stages : int
        Tiles of a circular buffer, one after the other.
    pitch : int
        Bytes from one line of a panel to the next; 0 stands for the swizzle atom, or for whole rows without one.
    """

    rows: int
    columns: int
    itemsize: int
    swizzle: int = 0
    stages: int = 1
    pitch: int = 0

    def __post_init__(self) -> None:
        if self.pitch == 0:
            object.__setattr__(self, "pitch", self.swizzle or align_up(self.row_bytes, CHUNK))
        for problem in self._problems():
            raise ValueError(problem)

    def _problems(self) -> list[str]:
        found = []
        if min(self.rows, self.columns, self.stages) < 1:
            found.append(f"rows, columns and stages must be positive, got {self.rows}, {self.columns}, {self.stages}")
        if self.itemsize not in (1, 2, 4, 8, 16):
            found.append(f"itemsize must be a power of two up to 16, got {self.itemsize}")
        if self.swizzle not in SWIZZLES:
            return [*found, f"swizzle must be one of {', '.join(map(str, SWIZZLES))} bytes, got {self.swizzle}"]
        unit = self.swizzle or CHUNK
        if self.pitch < unit or self.pitch % unit:
            found.append(f"pitch must be a positive multiple of {unit} bytes, got {self.pitch}")
        return found

    @classmethod
    def whole_rows(cls, rows: int, columns: int, itemsize: int) -> SharedLayout:
        """Rows one after the other, such that ldmatrix has no bank conflicts.

        Rows of a multiple of 128 bytes are swizzled; others lie an odd number of chunks apart.
        """
        size = align_up(columns * itemsize, CHUNK)
        swizzle = 0 if size % 128 else 128
        return cls(rows, columns, itemsize, swizzle, pitch=size if swizzle else size | CHUNK)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's elements."""
        return self.columns * self.itemsize

    @property
    def panels(self) -> int:
        """Chunks of a row."""
        return cdiv(self.row_bytes, self.pitch)

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.pitch

    @property
    def panel_columns(self) -> int:
        """Columns of a panel, those of the last one that do not exist counted."""
        return self.pitch // self.itemsize

    @property
    def alignment(self) -> int:
        """Bytes that the tile's address must be a multiple of: the swizzle's period, and 128 for TMA."""
        return max(128, 8 * self.swizzle)

    @property
    def stage_bytes(self) -> int:
        """Bytes from one stage to the next."""
        size = self.panels * self.panel_bytes
        return size if self.stages == 1 else align_up(size, self.alignment)

    @property
    def bytes(self) -> int:
        """Bytes of all stages."""
        return self.stages * self.stage_bytes

    def stage_offset(self, stage: Any) -> Any:
        """Byte of a stage's tile."""
        return stage * self.stage_bytes

    # --- elements ------------------------------------------------------------------------------------

    def chunk_offset(self, row: Any, chunk: Any) -> Any:
        """Byte of a 16-byte chunk of a row."""
        if self.panels == 1:
            return row * self.pitch + (self._swizzled(row, chunk) << 4)
        chunks = self.pitch // CHUNK
        power = chunks & (chunks - 1) == 0
        panel = chunk >> (chunks.bit_length() - 1) if power else chunk // chunks
        start = panel * self.panel_bytes + row * self.pitch
        # The pattern starts anew in a panel when lines before it are whole periods.
        line = row if self.rows % 8 == 0 else row + panel * self.rows
        return start + (self._swizzled(line, chunk & (chunks - 1) if power else chunk % chunks) << 4)

    def _swizzled(self, line: Any, chunk: Any) -> Any:
        """Where in its line a chunk lies."""
        if not self.swizzle:
            return chunk
        shift = {128: 0, 64: 1, 32: 2}[self.swizzle]  # log2 of the lines that make up 128 bytes
        return chunk ^ ((line >> shift if shift else line) & (self.swizzle // CHUNK - 1))

    def offset(self, row: Any, column: Any) -> Any:
        """Byte of an element."""
        columns = CHUNK // self.itemsize
        if columns == 1:
            return self.chunk_offset(row, column)
        chunk = self.chunk_offset(row, column >> (columns.bit_length() - 1))
        return chunk + (column & (columns - 1)) * self.itemsize

    def view(self, first_column: int, columns: int) -> tuple[int, SharedLayout]:
        """(byte of its first element, layout) of some columns of every row.

        Raises
        ------
        ValueError
            If the swizzle of the columns is not that of a tile that starts there.
        """
        unit = self.panel_columns if self.panels > 1 else (self.swizzle or CHUNK) // self.itemsize
        if first_column % unit or not 0 <= first_column < first_column + columns <= self.columns:
            raise ValueError(
                f"a view must start at a multiple of {unit} columns and lie in the tile's {self.columns}, "
                f"got {columns} columns from {first_column}"
            )
        if self.panels > 1 and self.rows % 8:
            raise ValueError(f"a view of panels needs a multiple of 8 rows, got {self.rows}")
        return self.chunk_offset(0, first_column * self.itemsize // CHUNK), replace(self, columns=columns)

    # --- ldmatrix --------------------------------------------------------------------------------------

    def steps(self, tile: Any, row: Any, high: Any, every: int = 1) -> list[Any]:
        """What :meth:`step` takes: pointers to a row's chunks 2 ``every`` k + ``high``, of one period of the swizzle.

        ``high`` is less than 2 ``every``, a power of two. The chunks that follow are constant distances from these,
        which keeps addresses out of registers.
        """
        count = max(1, self.swizzle // (_K_STEP_BYTES * every))
        return [tile + self.chunk_offset(row, 2 * every * k + high) for k in range(count)]

    def step(self, pointers: list[Any], k: int, rows: int = 0, every: int = 1) -> Any:
        """Pointer to chunk 2 ``every`` k + high, ``rows`` (a multiple of 8) further down."""
        first = k % len(pointers)
        return pointers[first] + self.chunk_offset(0, 2 * every * (k - first)) + rows * self.pitch

    # --- wgmma ---------------------------------------------------------------------------------------

    def why_no_descriptor(self, transposed: bool = False) -> str | None:
        """Why wgmma cannot read the tile; None when it can."""
        if self.rows % 8:
            return f"wgmma reads groups of 8 rows, got {self.rows} rows"
        if self.pitch != (self.swizzle or CHUNK):
            return f"wgmma reads lines of one swizzle atom, {self.swizzle or CHUNK} bytes apart, got {self.pitch}"
        if transposed and not (self.swizzle and self.itemsize == 2):
            return f"wgmma transposes swizzled 16-bit tiles, got swizzle {self.swizzle} and itemsize {self.itemsize}"
        return None

    def descriptor(self, transposed: bool = False) -> Descriptor:
        """How wgmma reads the tile: its columns are the product's k (K-major), or its rows are (transposed).

        Raises
        ------
        ValueError
            If it cannot.
        """
        problem = self.why_no_descriptor(transposed)
        if problem is not None:
            raise ValueError(problem)
        # Without a swizzle the two 16-byte halves of a k-step are panels of their own.
        leading = self.panel_bytes if transposed or not self.swizzle else 0
        return Descriptor(leading, 8 * self.pitch, _DESCRIPTOR_CODES[self.swizzle])

    def k_steps(self) -> list[int]:
        """Byte of every 32 bytes of a row: what a K-major descriptor's address moves by, a k-step each."""
        return [self.chunk_offset(0, 2 * k) for k in range(cdiv(self.row_bytes, _K_STEP_BYTES))]

    def row_steps(self) -> list[int]:
        """Byte of every 16 rows: what a transposed descriptor's address moves by, a k-step each."""
        return [k * _ROWS_A_STEP * self.pitch for k in range(cdiv(self.rows, _ROWS_A_STEP))]

    # --- TMA -----------------------------------------------------------------------------------------

    @property
    def tma(self) -> bool:
        """Whether TMA writes it so: with a swizzle, lines are one atom apart."""
        return self.swizzle in (0, self.pitch)

    @property
    def box_columns(self) -> int:
        """Columns of a TMA box: a panel's, or all of them where one panel has room to spare."""
        return self.panel_columns if self.panels > 1 or self.swizzle else self.columns

    def box_offset(self, panel: Any, first_row: Any = 0) -> Any:
        """Where a TMA box of a panel goes whose first row is the tile's ``first_row``; a multiple of 128 bytes."""
        return panel * self.panel_bytes + first_row * self.pitch


def wavefronts(addresses: Sequence[int], width: int) -> int:
    """Passes through shared memory of one access of a warp: ``width`` bytes at the address of every active lane.

    Accesses of 8 bytes are made for half a warp at a time, of 16 bytes for a quarter. In one pass a bank gives one
    word, to all who ask for it.
    """
    lanes = {4: 32, 8: 16, 16: 8}[max(width, BANK_BYTES)]
    total = 0
    for first in range(0, len(addresses), lanes):
        words = {
            word
            for address in addresses[first : first + lanes]
            for word in range(address // BANK_BYTES, (address + width - 1) // BANK_BYTES + 1)
        }
        banks = [word % BANKS for word in words]
        total += max(map(banks.count, set(banks)))
    return total


def bank_conflicts(addresses: Sequence[int], width: int) -> int:
    """Passes of an access (:func:`wavefronts`) beyond those that its width needs: 0 without conflicts."""
    return wavefronts(addresses, width) - cdiv(len(addresses) * max(width, BANK_BYTES), BANKS * BANK_BYTES)
