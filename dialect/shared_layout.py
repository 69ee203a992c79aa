# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The layout of a tile in shared memory: swizzles, row pitches, wgmma descriptors and TMA boxes.

Pure Python, as ``layout``. The formulas use ``+ - * // % ^ >> & <<`` only, so that they work on ints, arrays and values
of a kernel or a pass alike. Offsets are bytes from the tile's start; rows and columns count elements of the tile.

A row is cut into *panels* of ``pitch`` bytes, one swizzle atom wide unless a pitch is given. In a tile of r rows, panel
p starts at ``p * r * pitch`` and consists of r lines of ``pitch`` bytes. This is how TMA writes boxes and wgmma reads
operands. With a pitch of at least a whole row there is one panel, of consecutive rows.

Swizzling permutes 16-byte chunks: it flips chunk bits by line bits, so that chunk c of eight consecutive lines is in
eight different groups of four banks. With a pitch of one atom, the address bits are those that TMA flips: bits 4 to 6
by bits 7 to 9 (128 bytes), bits 4 and 5 by 7 and 8 (64 bytes), bit 4 by bit 7 (32 bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .layout import align_up, cdiv

CHUNK = 16  # bytes that swizzles move as one unit, and the widest access of a thread
BANKS, BANK_BYTES = 32, 4
SWIZZLES = (0, 32, 64, 128)
_K_STEP_BYTES = 32  # bytes of a row that one k-step of wgmma reads, for every operand type
_ROWS_A_STEP = 16
_DESCRIPTOR_CODES = {0: 0, 128: 1, 64: 2, 32: 3}


class Descriptor(NamedTuple):
    """The fields of a wgmma matrix descriptor besides the tile's address."""

    leading: int  # bytes: unused when K-major with a swizzle; transposed, from one swizzle atom of columns to the next
    stride: int  # bytes from eight rows to the next eight
    swizzle: int  # code of bits 62 and 63: 0 none, 1 for 128 bytes, 2 for 64, 3 for 32

    @property
    def bits(self) -> int:
        """All of the descriptor but bits 0 to 13, which hold the address in units of 16 bytes."""
        return self.leading >> 4 << 16 | self.stride >> 4 << 32 | self.swizzle << 62


TILE_SWIZZLE = 128  # bytes: of tile-level kernels, whose tiles wgmma and TMA access directly


@dataclass(frozen=True)
class SharedLayout:
    """The offset of each element of a tile in shared memory.

    Parameters
    ----------
    rows, columns : int
    itemsize : int
        Bytes of an element, a power of two up to 16.
    swizzle : {0, 32, 64, 128}
        Bytes of the swizzle atom; 0 for none.
    stages : int
        Tiles of a circular buffer, stored consecutively.
    pitch : int
        Bytes from one line of a panel to the next; 0 means the swizzle atom, or a whole row without a swizzle.
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
        """Consecutive rows without bank conflicts for ldmatrix.

        Rows of a multiple of 128 bytes are swizzled; others are padded to an odd number of chunks.
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
        """Columns per panel, including columns past the end of the last panel's rows."""
        return self.pitch // self.itemsize

    @property
    def alignment(self) -> int:
        """Alignment of the tile's address in bytes: the period of the swizzle, at least 128 for TMA."""
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
        """Byte offset of a stage's tile."""
        return stage * self.stage_bytes

    # --- elements ------------------------------------------------------------------------------------

    def chunk_offset(self, row: Any, chunk: Any) -> Any:
        """Byte offset of a 16-byte chunk of a row."""
        if self.panels == 1:
            return row * self.pitch + (self._swizzled(row, chunk) << 4)
        chunks = self.pitch // CHUNK
        power = chunks & (chunks - 1) == 0
        panel = chunk >> (chunks.bit_length() - 1) if power else chunk // chunks
        start = panel * self.panel_bytes + row * self.pitch
        # The swizzle pattern restarts in each panel when the lines of the panels before are whole periods.
        line = row if self.rows % 8 == 0 else row + panel * self.rows
        return start + (self._swizzled(line, chunk & (chunks - 1) if power else chunk % chunks) << 4)

    def _swizzled(self, line: Any, chunk: Any) -> Any:
        """The position of a chunk in its line."""
        if not self.swizzle:
            return chunk
        shift = {128: 0, 64: 1, 32: 2}[self.swizzle]  # log2 of the number of lines in 128 bytes
        return chunk ^ ((line >> shift if shift else line) & (self.swizzle // CHUNK - 1))

    def offset(self, row: Any, column: Any) -> Any:
        """Byte offset of an element."""
        columns = CHUNK // self.itemsize
        if columns == 1:
            return self.chunk_offset(row, column)
        chunk = self.chunk_offset(row, column >> (columns.bit_length() - 1))
        return chunk + (column & (columns - 1)) * self.itemsize

    def view(self, first_column: int, columns: int) -> tuple[int, SharedLayout]:
        """(byte offset, layout) of a view of some columns of every row.

        Raises
        ------
        ValueError
            If a tile that starts at the first column would have another swizzle pattern.
        """
        unit = self.panel_columns if self.panels > 1 else (self.swizzle or CHUNK) // self.itemsize
        if first_column % unit or not 0 <= first_column < first_column + columns <= self.columns:
            raise ValueError(
                f"a view must start at a multiple of {unit} columns and be within the tile's {self.columns}, "
                f"got {columns} columns from {first_column}"
            )
        if self.panels > 1 and self.rows % 8:
            raise ValueError(f"a view of panels needs a multiple of 8 rows, got {self.rows}")
        return self.chunk_offset(0, first_column * self.itemsize // CHUNK), replace(self, columns=columns)

    # --- ldmatrix --------------------------------------------------------------------------------------

    def steps(self, tile: Any, row: Any, high: Any, every: int = 1) -> list[Any]:
        """Pointers for :meth:`step`: to chunks 2 ``every`` k + ``high`` of a row, for one period of the swizzle.

        ``high`` is less than 2 ``every``, which is a power of two. Later chunks are at constant distances from these,
        so that
        addresses need few registers.
        """
        count = max(1, self.swizzle // (_K_STEP_BYTES * every))
        return [tile + self.chunk_offset(row, 2 * every * k + high) for k in range(count)]

    def step(self, pointers: list[Any], k: int, rows: int = 0, every: int = 1) -> Any:
        """Pointer to chunk 2 ``every`` k + high, ``rows`` rows (a multiple of 8) further down."""
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
        """The wgmma descriptor: the tile's columns are the product's k (K-major), or its rows are (transposed).

        Raises
        ------
        ValueError
            If wgmma cannot read the tile.
        """
        problem = self.why_no_descriptor(transposed)
        if problem is not None:
            raise ValueError(problem)
        # Without a swizzle the two 16-byte halves of a k-step are separate panels.
        leading = self.panel_bytes if transposed or not self.swizzle else 0
        return Descriptor(leading, 8 * self.pitch, _DESCRIPTOR_CODES[self.swizzle])

    def k_steps(self) -> list[int]:
        """Byte offsets that advance a K-major descriptor's address, one per k-step of 32 bytes of a row."""
        return [self.chunk_offset(0, 2 * k) for k in range(cdiv(self.row_bytes, _K_STEP_BYTES))]

    def row_steps(self) -> list[int]:
        """Byte offsets that advance a transposed descriptor's address, one per k-step of 16 rows."""
        return [k * _ROWS_A_STEP * self.pitch for k in range(cdiv(self.rows, _ROWS_A_STEP))]

    # --- TMA -----------------------------------------------------------------------------------------

    @property
    def tma(self) -> bool:
        """Whether TMA can write this layout: with a swizzle, lines must be one atom apart."""
        return self.swizzle in (0, self.pitch)

    @property
    def box_columns(self) -> int:
        """Columns of a TMA box: those of a panel, or of the whole row where the panel is padded."""
        return self.panel_columns if self.panels > 1 or self.swizzle else self.columns

    def box_offset(self, panel: Any, first_row: Any = 0) -> Any:
        """Byte offset of a TMA box of a panel that starts at row ``first_row`` of the tile; a multiple of 128 bytes."""
        return panel * self.panel_bytes + first_row * self.pitch


def wavefronts(addresses: Sequence[int], width: int) -> int:
    """Passes through shared memory that one access of a warp takes: ``width`` bytes at every active lane's address.

    8-byte accesses are issued per half warp, 16-byte accesses per quarter. In one pass a bank delivers one word, to all
    lanes that ask for it.
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
    """Passes of an access (:func:`wavefronts`) beyond those that its width requires: 0 without conflicts."""
    return wavefronts(addresses, width) - cdiv(len(addresses) * max(width, BANK_BYTES), BANKS * BANK_BYTES)
