# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The layout of a tile in the registers of a thread block, as bases: which thread has which element.

Pure Python, as ``layout``. The formulas use ``+ - * // % ^ >> & <<`` only, so that they work on ints, arrays and values
of a kernel or a pass alike. The one class is a linear layout over F2 (Zhou et al., "Linear Layouts", 2025; Triton's
``LinearLayout``): every bit of the register, lane and warp number moves an element by one basis (row, column).
Here a basis is a power of two along one axis, or (0, 0) where threads that differ in that bit have the same elements,
and no two other bases are equal. So an element's position is the *sum* of an offset that depends on the register, which
the compiler knows, and one that depends on lane and warp. Bases span an atom whose extents are powers of two; groups of
warps and repetitions of registers cover the rest of the tile, for head sizes such as 80, 96, 112 and 192.

``tile_layout`` has the named layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

ROW, COLUMN = 0, 1
LANES, LANE_BITS = 32, 5
Basis = tuple[int, int]


def total(terms: Iterable[Any]) -> Any:
    """The sum of the terms that are not the constant 0."""
    found = None
    for term in terms:
        if not (isinstance(term, int) and term == 0):
            found = term if found is None else found + term
    return 0 if found is None else found


def times(x: Any, factor: int) -> Any:
    """``x * factor``; ``x`` itself for a factor of 1."""
    return x if factor == 1 else x * factor


def bits_of(x: Any, first: int, count: int | None = None) -> Any:
    """``count`` bits of a number from bit ``first`` up; all remaining bits without a count."""
    x = x >> first if first else x
    return x if count is None else x & ((1 << count) - 1)


@cache
def _moves(bases: tuple[Basis, ...], axis: int) -> tuple[tuple[int, int, int], ...]:
    """(first bit, number of bits, log2 of the first distance) of each run of bases that double along an axis."""
    runs: list[tuple[int, int, int]] = []
    for bit, basis in enumerate(bases):
        if not basis[axis]:
            continue
        to = basis[axis].bit_length() - 1
        first, count, start = runs[-1] if runs else (0, 0, 0)
        if runs and first + count == bit and start + count == to:
            runs[-1] = (first, count + 1, start)
        else:
            runs.append((bit, 1, to))
    return tuple(runs)


def _forward(x: Any, bases: tuple[Basis, ...], axis: int, bounded: bool) -> Any:
    """The distance that the bits of a number move along an axis; ``bounded`` when it has no more bits than bases."""
    return total(
        times(bits_of(x, first, None if bounded and first + count == len(bases) else count), 1 << to)
        for first, count, to in _moves(bases, axis)
    )


def swapped(bases: tuple[Basis, ...]) -> tuple[Basis, ...]:
    """Bases of the transposed tile."""
    return tuple((column, row) for row, column in bases)


@dataclass(frozen=True)
class RegisterLayout:
    """Which element of a tile each register of each lane of each warp has.

    Parameters
    ----------
    shape : (int, int)
        Rows and columns of the tile.
    register_bases, lane_bases, warp_bases : tuple of (int, int)
        Where bit i of the number moves an element to. Registers have no (0, 0): a thread has each element once.
    groups : (int, int, int)
        Repetitions by warps beyond the bits of ``warp_bases``: of the atom along rows, of the atom along columns, and
        of
        the whole tile in further warps (replicas).
    columns_first : bool
        Whether registers number the atom's repetitions along columns before those along rows.
    name : str
        The name that ``tile_layout.parse`` knows the layout by; without one, the bases are written.
    """

    shape: tuple[int, int]
    register_bases: tuple[Basis, ...]
    lane_bases: tuple[Basis, ...]
    warp_bases: tuple[Basis, ...] = ()
    groups: tuple[int, int, int] = (1, 1, 1)
    columns_first: bool = True
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        bases = [*self.register_bases, *self.lane_bases, *self.warp_bases]
        for axis in (ROW, COLUMN):
            found = sorted(basis[axis] for basis in bases if basis[axis])
            if found != [1 << bit for bit in range(len(found))]:
                raise ValueError(f"bases must be 1, 2, 4 and so on along an axis, each once, got {found}")
        if any(basis[ROW] and basis[COLUMN] for basis in bases):
            raise ValueError(f"a basis must move along one axis, got {bases}")
        if (0, 0) in self.register_bases:
            raise ValueError("a thread must have each element once, got a register basis (0, 0)")
        if len(self.lane_bases) != LANE_BITS:
            raise ValueError(f"a warp must have {LANE_BITS} bases of lanes, got {len(self.lane_bases)}")
        if min(self.groups) < 1:
            raise ValueError(f"groups of warps must be positive, got {self.groups}")
        for axis, what in ((ROW, "rows"), (COLUMN, "columns")):
            if self.shape[axis] < 1 or self.shape[axis] % self.extents[axis]:
                raise ValueError(
                    f"{what} must be a positive multiple of the {self.extents[axis]} that the threads cover at a "
                    f"time, got {self.shape[axis]}"
                )

    # --- extents -------------------------------------------------------------------------------------

    @cached_property
    def atom(self) -> tuple[int, int]:
        """Rows and columns that the bases span."""
        bases = [*self.register_bases, *self.lane_bases, *self.warp_bases]
        rows, columns = (1 << sum(1 for basis in bases if basis[axis]) for axis in (ROW, COLUMN))
        return rows, columns

    @cached_property
    def extents(self) -> tuple[int, int]:
        """Rows and columns that all threads together cover with one atom per thread."""
        return self.atom[ROW] * self.groups[ROW], self.atom[COLUMN] * self.groups[COLUMN]

    @cached_property
    def repetitions(self) -> tuple[int, int]:
        """Atoms per thread along rows and along columns."""
        return self.shape[ROW] // self.extents[ROW], self.shape[COLUMN] // self.extents[COLUMN]

    @cached_property
    def registers(self) -> int:
        """Elements per thread."""
        return (1 << len(self.register_bases)) * self.repetitions[ROW] * self.repetitions[COLUMN]

    @cached_property
    def warps(self) -> int:
        return (1 << len(self.warp_bases)) * self.groups[0] * self.groups[1] * self.groups[2]

    @property
    def threads(self) -> int:
        return LANES * self.warps

    @property
    def replicas(self) -> int:
        """Threads that have the same element."""
        return self.threads * self.registers // (self.shape[ROW] * self.shape[COLUMN])

    @cached_property
    def transposed(self) -> RegisterLayout:
        """The layout of the transposed tile: every thread holds what it held, in the same registers."""
        rows, columns, copies = self.groups
        return RegisterLayout(
            self.shape[::-1], swapped(self.register_bases), swapped(self.lane_bases), swapped(self.warp_bases),
            (columns, rows, copies), not self.columns_first,
        )  # fmt: skip

    # --- where an element is -------------------------------------------------------------------------

    def register_offset(self, register: Any) -> tuple[Any, Any]:
        """(row, column) of a register of thread 0, to be added to :meth:`thread_offset`."""
        bits = len(self.register_bases)
        along = [_forward(register, self.register_bases, axis, self.repetitions == (1, 1)) for axis in (ROW, COLUMN)]
        if self.repetitions == (1, 1):
            return along[ROW], along[COLUMN]
        which, (rows, columns) = register >> bits, self.repetitions
        if self.columns_first:
            at = (which // columns, which % columns)
        else:
            at = (which % rows, which // rows)
        row, column = (total([along[axis], times(at[axis], self.extents[axis])]) for axis in (ROW, COLUMN))
        return row, column

    def thread_offset(self, lane: Any, warp: Any) -> tuple[Any, Any]:
        """(row, column) of a thread's register 0."""
        row, column = (self.thread_move(lane, warp, axis) for axis in (ROW, COLUMN))
        return row, column

    def thread_move(self, lane: Any, warp: Any, axis: int) -> Any:
        """One of the two numbers of :meth:`thread_offset`."""
        alone = self.groups == (1, 1, 1)
        terms = [_forward(lane, self.lane_bases, axis, True), _forward(warp, self.warp_bases, axis, alone)]
        if self.groups[axis] > 1:
            group, (rows, columns, copies) = bits_of(warp, len(self.warp_bases)), self.groups
            if axis == COLUMN and rows > 1:
                group = group // rows
            if copies > 1 or (axis == ROW and columns > 1):
                group = group % self.groups[axis]
            terms.append(times(group, self.atom[axis]))
        return total(terms)

    def position(self, register: Any, lane: Any, warp: Any) -> tuple[Any, Any]:
        """(row, column) of an element."""
        return self.row_of(register, lane, warp), self.column_of(register, lane, warp)

    def row_of(self, register: Any, lane: Any, warp: Any) -> Any:
        return total([self.thread_move(lane, warp, ROW), self.register_offset(register)[ROW]])

    def column_of(self, register: Any, lane: Any, warp: Any) -> Any:
        return total([self.thread_move(lane, warp, COLUMN), self.register_offset(register)[COLUMN]])

    # --- the elements of a thread --------------------------------------------------------------------

    @cached_property
    def _element_order(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.register_offset(register) for register in range(self.registers))

    @cached_property
    def rows_a_thread(self) -> tuple[int, ...]:
        """The distinct rows of a thread's registers, relative to its first; as in ``tile_layout.row_vector``."""
        return tuple(dict.fromkeys(row for row, _ in self._element_order))

    @cached_property
    def columns_a_thread(self) -> tuple[int, ...]:
        """The distinct columns of a thread's registers, relative to its first; as in ``tile_layout.column_vector``."""
        return tuple(dict.fromkeys(column for _, column in self._element_order))

    def places_a_thread(self, axis: int) -> tuple[int, ...]:
        """The rows or columns of a thread's registers, each once, from its first."""
        return self.rows_a_thread if axis == ROW else self.columns_a_thread

    def place_registers(self, axis: int) -> tuple[int, ...]:
        """For every register which of :meth:`places_a_thread` it has."""
        return self.row_registers if axis == ROW else self.column_registers

    @cached_property
    def row_registers(self) -> tuple[int, ...]:
        """For every register, the register of ``tile_layout.row_vector`` with the same row."""
        return tuple(self.rows_a_thread.index(row) for row, _ in self._element_order)

    @cached_property
    def column_registers(self) -> tuple[int, ...]:
        """For every register, the register of ``tile_layout.column_vector`` with the same column."""
        return tuple(self.columns_a_thread.index(column) for _, column in self._element_order)

    def warps_along(self, axis: int) -> int:
        """The number of warps that share an axis: unless it is 1, a reduction along it needs shared memory."""
        return (1 << sum(1 for basis in self.warp_bases if basis[axis])) * self.groups[axis]

    # --- text ----------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The name, or the bases of registers, lanes and warps, then the groups if there are any."""
        if self.name:
            return self.name
        parts = [
            " ".join(f"r{b[ROW]}" if b[ROW] else f"c{b[COLUMN]}" if b[COLUMN] else "-" for b in bases)
            for bases in (self.register_bases, self.lane_bases, self.warp_bases)
        ]
        groups = "" if self.groups == (1, 1, 1) else " / " + "x".join(map(str, self.groups))
        return " / ".join(parts) + groups + ("" if self.columns_first else " / rows first")
