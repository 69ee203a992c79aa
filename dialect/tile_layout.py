# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The named register layouts of tiles: those that instructions require, and the vectors that reductions leave.

Accumulators and operands of wgmma and mma.sync. Pure Python, as ``layout``; the formulas work on ints, arrays and
values alike, as in ``register_layout``, whose class is exported here too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from .layout import lowbit
from .register_layout import COLUMN, LANE_BITS, LANES, ROW, Basis, RegisterLayout, swapped

WARP_ROWS = 16  # rows per warp of an accumulator of mma.sync or wgmma
WARP_COLUMNS = 16  # adjacent columns of a warp, where stacks of warps share the columns of an accumulator of mma.sync
GROUP_WARPS = 4  # warps per warpgroup

# --- instances -----------------------------------------------------------------------------------


def _row_warps(warps: int) -> tuple[tuple[Basis, ...], int]:
    """Bases of warps stacked in rows of 16, and the number of repetitions when it is not a power of two."""
    if warps < 1:
        raise ValueError(f"warps must be positive, got {warps}")
    power = lowbit(warps)
    return tuple((WARP_ROWS << bit, 0) for bit in range(power.bit_length() - 1)), warps // power


_LANES_BY_PAIRS: tuple[Basis, ...] = ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0))  # row lane / 4, columns 2 (lane % 4)
_LANES_BY_FOURS: tuple[Basis, ...] = ((0, 4), (0, 8), (1, 0), (2, 0), (4, 0))


def accumulator(
    rows: int, columns: int, warps: int, name: str = "", across: int = 1, run: int = WARP_COLUMNS
) -> RegisterLayout:
    """The f32 accumulators of wgmma m64nNk16, and of mma.sync m16n8k16, with warps stacked in rows of 16.

    Registers 4t to 4t + 3 are in columns 8t to 8t + 7: with g = lane / 4 and c = lane % 4, they are at (g, 2c),
    (g, 2c + 1), (g + 8, 2c) and (g + 8, 2c + 1). A warpgroup's four warps have 64 rows. With ``across`` stacks of
    ``warps`` warps, the stacks share the columns: each has ``run`` adjacent columns before those of the next stack, and
    t counts the columns of a stack.
    """
    warp_bases, odd = _row_warps(warps)
    registers: tuple[Basis, ...] = ((0, 1), (8, 0))
    if across > 1:
        if odd > 1 or across & (across - 1):
            raise ValueError(f"warps of stacks that share columns must be powers of two, got {warps}x{across}")
        if run < 8 or run & (run - 1):
            raise ValueError(f"adjacent columns of a stack must be a power of two, 8 or more, got {run}")
        registers += tuple((0, 8 << bit) for bit in range((run // 8).bit_length() - 1))
        warp_bases += tuple((0, run << bit) for bit in range(across.bit_length() - 1))
    return RegisterLayout((rows, columns), registers, _LANES_BY_PAIRS, warp_bases, (odd, 1, 1), name=name)


def operand_a(rows: int, columns: int, bits: int, warps: int) -> RegisterLayout:
    """Operand A in registers, for wgmma and mma.sync: k-steps of 16 columns (16 bits) or 32 (8 bits)."""
    if bits == 16:
        if columns % 16:
            raise ValueError(f"columns must be k-steps of 16, got {columns}")
        return accumulator(rows, columns, warps, _short("a16", rows, warps))
    if bits != 8:
        raise ValueError(f"bits of A must be 8 or 16, got {bits}")
    warp_bases, odd = _row_warps(warps)
    return RegisterLayout(
        (rows, columns), ((0, 1), (0, 2), (8, 0), (0, 16)), _LANES_BY_FOURS, warp_bases, (odd, 1, 1),
        name=_short("a8", rows, warps),
    )  # fmt: skip


def operand_b_mma(rows: int, columns: int, bits: int, warps: int) -> RegisterLayout:
    """B [k, n] of mma.sync m16n8k16 (16 bits) or m16n8k32 (8 bits), replicated in every warp; 8 of n per step."""
    if bits not in (8, 16):
        raise ValueError(f"bits of B must be 8 or 16, got {bits}")
    if warps < 1:
        raise ValueError(f"warps must be positive, got {warps}")
    power = lowbit(warps)
    registers, lanes = {16: (((0, 1), (0, 8)), _LANES_BY_PAIRS), 8: (((0, 1), (0, 2), (0, 16)), _LANES_BY_FOURS)}[bits]
    return RegisterLayout(
        (rows, columns), swapped(registers), swapped(lanes), ((0, 0),) * (power.bit_length() - 1),
        (1, 1, warps // power), name=f"b{bits}:{warps}",
    )  # fmt: skip


def row_vector(layout: RegisterLayout) -> RegisterLayout:
    """The layout of a reduction's result along columns: one column, with each row where the tile has it."""
    return _vector(layout, ROW, "rows")


def column_vector(layout: RegisterLayout) -> RegisterLayout:
    """The layout of a reduction's result along rows: one row, with each column where the tile has it."""
    return _vector(layout, COLUMN, "columns")


def _vector(layout: RegisterLayout, axis: int, what: str) -> RegisterLayout:
    def kept(bases: Sequence[Basis]) -> tuple[Basis, ...]:
        return tuple(basis if basis[axis] else (0, 0) for basis in bases)

    other = layout.groups[1 - axis]
    if axis == COLUMN and other > 1 and layout.groups[COLUMN] > 1:
        raise ValueError(f"groups of warps must be along one axis, got {layout.groups}")
    extent = layout.shape[axis]
    vector = RegisterLayout(
        (extent, 1) if axis == ROW else (1, extent),
        tuple(basis for basis in layout.register_bases if basis[axis]),
        kept(layout.lane_bases),
        kept(layout.warp_bases),
        (layout.groups[ROW], 1, other * layout.groups[2])
        if axis == ROW
        else (1, layout.groups[COLUMN], other * layout.groups[2]),
        layout.columns_first,
    )
    if not layout.name or "(" in layout.name:
        return vector
    name = layout.name if axis == ROW or "x" in layout.name else f"{layout.name.partition(':')[0]}:{layout.warps}"
    named_vector = replace(vector, name=f"{what}({name})")
    return named_vector if parse(named_vector.name, named_vector.shape) == vector else vector


def spread(extent: int, warps: int) -> RegisterLayout:
    """A vector that is distributed over the threads of a warpgroup in order; every warpgroup has a copy."""
    if warps % GROUP_WARPS:
        raise ValueError(f"a vector is spread over warpgroups of {GROUP_WARPS} warps, got {warps} warps")
    return RegisterLayout(
        (1, extent), (), tuple((0, 1 << bit) for bit in range(LANE_BITS)), ((0, LANES), (0, 2 * LANES)),
        (1, 1, warps // GROUP_WARPS), name=f"spread:{warps}",
    )  # fmt: skip


# --- names ---------------------------------------------------------------------------------------


def _short(name: str, rows: int, warps: int) -> str:
    """The name with the number of warps, which is left out when there is one warp per 16 rows."""
    return name if rows == warps * WARP_ROWS else f"{name}:{warps}"


def _wgmma(rows: int, columns: int, warps: int, across: int = 1) -> RegisterLayout:
    """Of warpgroups beside one another each has the columns of one instruction, which are neighbours."""
    if warps % 4:
        raise ValueError(f"wgmma needs warpgroups of 4 warps, got {warps} warps")
    name = _short("wgmma", rows, warps) if across == 1 else f"wgmma:{warps}x{across}"
    return accumulator(rows, columns, warps, name, across, columns // across)


def _mma(rows: int, columns: int, warps: int, across: int = 1) -> RegisterLayout:
    name = _short("mma", rows, warps) if across == 1 else f"mma:{warps}x{across}"
    return accumulator(rows, columns, warps, name, across)


# Layouts by name: the constructor, and the rows and columns of a warp's smallest tile.
_NAMED: dict[str, tuple[Callable[..., RegisterLayout], tuple[int, int]]] = {
    "wgmma": (_wgmma, (16, 8)),
    "mma": (_mma, (16, 8)),
    "a16": (lambda rows, columns, warps: operand_a(rows, columns, 16, warps), (16, 16)),
    "a8": (lambda rows, columns, warps: operand_a(rows, columns, 8, warps), (16, 32)),
    "b16": (lambda rows, columns, warps: operand_b_mma(rows, columns, 16, warps), (16, 8)),
    "b8": (lambda rows, columns, warps: operand_b_mma(rows, columns, 8, warps), (32, 8)),
}
NAMES = tuple(_NAMED)
_STACKED = ("wgmma", "mma", "a16", "a8")  # names whose warps are stacked in rows
_WITH_WARPS = r"(\w+)(?::(\d+)(?:x(\d+))?)?"  # a name, warps per stack, stacks


def named(name: str, shape: tuple[int, int], warps: int, across: int = 1) -> RegisterLayout:
    """The layout with one of the ``NAMES``: accumulators of wgmma and mma.sync, operand A, and mma.sync's B.

    ``across`` stacks of ``warps`` warps share the columns, for accumulators only.
    """
    if name not in _NAMED:
        raise ValueError(f"a layout must be one of {', '.join(NAMES)}, got {name!r}")
    if across > 1 and name not in ("mma", "wgmma"):
        raise ValueError(f"warps share columns only in accumulators, mma:{warps}x{across}, got {name!r}")
    return _NAMED[name][0](*shape, warps, **({"across": across} if across > 1 else {}))


def parse(text: str, shape: Sequence[int]) -> RegisterLayout:
    """The layout of a tile of the given shape from its text (``str(layout)``).

    A name is followed by the number of warps where it is not one per 16 rows: ``wgmma``, ``mma:4``, and ``mma:4x2`` or
    ``wgmma:4x2`` for two stacks of 4 warps that share the columns. ``rows(wgmma)`` and ``columns(wgmma:4)`` are the
    vectors of such tiles, whose shape may have one dimension; ``spread:4`` is a vector of no tile. Otherwise the text
    lists the bases: ``c1 r8 / c2 c4 r1 r2 r4 / r16 r32`` has two of registers, five of lanes and two of warps.
    ``transposed(mma:4)`` is the layout of a tile whose transpose has the layout in parentheses, and
    ``rows(transposed(mma:4))`` that of its rows.
    """
    return _parse(text, tuple(shape))


_OTHER = {"rows": "columns", "columns": "rows"}


@functools.lru_cache(1024)  # every use of a tile in a kernel asks for its layout, and a kernel has few distinct ones
def _parse(text: str, shape: tuple[int, ...]) -> RegisterLayout:
    transposed = re.fullmatch(r"(?:(rows|columns)\()?transposed\(([^()]*)\)(\)?)", text)
    if transposed is not None and bool(transposed[1]) == bool(
        transposed[3]
    ):  # rows of a tile are columns of its transpose
        inner = f"{_OTHER[transposed[1]]}({transposed[2]})" if transposed[1] else transposed[2]
        return replace(_parse(inner, shape[::-1]).transposed, name=text)
    outer = re.fullmatch(rf"(rows|columns)\({_WITH_WARPS}\)", text)
    if outer is not None:
        what, name, warps, beside = outer.groups()
        across = int(beside or 1)
        extent = shape[0] if len(shape) == 1 else shape[0] * shape[1]
        least = _NAMED[name][1] if name in _NAMED else (1, 1)
        count = _warps_of(text, name, warps, extent if what == "rows" else None)
        if what == "rows":
            columns = least[1] if across == 1 else across * WARP_COLUMNS
            return replace(_unnamed(row_vector, named(name, (extent, columns), count, across)), name=text)
        rows = least[0] * (count if name in _STACKED else 1)
        return replace(_unnamed(column_vector, named(name, (rows, extent), count, across)), name=text)
    if len(shape) == 1 and (alone := re.fullmatch(r"spread:(\d+)", text)) is not None:
        return spread(shape[0], int(alone[1]))
    if len(shape) != 2:
        raise ValueError(f"{text!r} is the layout of a tile of rows and columns, got the shape {shape}")
    rows, columns = shape
    found = re.fullmatch(_WITH_WARPS, text)
    if found is not None:
        name, warps, beside = found.groups()
        return named(name, (rows, columns), _warps_of(text, name, warps, rows), int(beside or 1))
    return _parse_bases(text, (rows, columns))


def _unnamed(vector: Callable[[RegisterLayout], RegisterLayout], layout: RegisterLayout) -> RegisterLayout:
    return vector(replace(layout, name=""))


def _warps_of(text: str, name: str, warps: str | None, rows: int | None) -> int:
    if warps is not None:
        return int(warps)
    if rows is None or name not in _STACKED or rows % WARP_ROWS:
        raise ValueError(f"the layout {text!r} must say how many warps it is for, as in {name}:4")
    return rows // WARP_ROWS


def _parse_bases(text: str, shape: tuple[int, int]) -> RegisterLayout:
    parts = [part.strip() for part in text.split("/")]
    columns_first = parts[-1] != "rows first"
    parts = parts if columns_first else parts[:-1]
    if len(parts) not in (3, 4) or not all(re.fullmatch(r"((r|c)\d+|-)?( ((r|c)\d+|-))*", part) for part in parts[:3]):
        raise ValueError(
            f"a layout must be one of {', '.join(NAMES)}, or bases such as 'c1 r8 / c2 c4 r1 r2 r4 / r16', got {text!r}"
        )

    def basis(word: str) -> Basis:
        return (0, 0) if word == "-" else (int(word[1:]), 0) if word[0] == "r" else (0, int(word[1:]))

    if len(parts) == 4 and not re.fullmatch(r"\d+x\d+x\d+", parts[3]):
        raise ValueError(f"groups of warps must be such as 3x1x1, got {parts[3]!r} in {text!r}")
    rows, columns, copies = map(int, parts[3].split("x")) if len(parts) == 4 else (1, 1, 1)
    registers, lanes, warps = (tuple(basis(word) for word in part.split()) for part in parts[:3])
    return RegisterLayout(shape, registers, lanes, warps, (rows, columns, copies), columns_first)
