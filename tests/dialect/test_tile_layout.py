# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Layouts of tiles in registers: the fragments of the PTX manual, and any bases."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlir import ir
from reference.blocks import run_block

import kvarn as kv
from kvarn.dialect import tile_layout as tl
from kvarn.dialect.shared_layout import SharedLayout
from kvarn.lowering.index import Ix, const

LANES = range(32)


# --- the tables of the PTX manual, as it writes them: groupID = %laneid >> 2, threadID_in_group = %laneid % 4 ---------


def manual_accumulator_m16n8(i, lane):
    """m16n8k16 (and m16n8k32), C and D: c0 to c3."""
    return (lane >> 2 if i < 2 else (lane >> 2) + 8), (lane % 4) * 2 + (i & 1)


def manual_a_m16n8k16(i, lane):
    """m16n8k16 of 16 bits, A: a0 to a7."""
    row = lane >> 2 if 0 <= i < 2 or 4 <= i < 6 else (lane >> 2) + 8
    return row, (lane % 4) * 2 + (i & 1) + (8 if i >= 4 else 0)


def manual_b_m16n8k16(i, lane):
    """m16n8k16 of 16 bits, B: b0 to b3."""
    return (lane % 4) * 2 + (i & 1) + (8 if i >= 2 else 0), lane >> 2


def manual_a_m16n8k32(i, lane):
    """m16n8k32 of 8 bits, A: a0 to a15."""
    row = lane >> 2 if 0 <= i < 4 or 8 <= i < 12 else (lane >> 2) + 8
    return row, (lane % 4) * 4 + (i & 3) + (16 if i >= 8 else 0)


def manual_b_m16n8k32(i, lane):
    """m16n8k32 of 8 bits, B: b0 to b7."""
    return (lane % 4) * 4 + (i & 3) + (16 if i >= 4 else 0), lane >> 2


def manual_wgmma_d(i, thread):
    """wgmma m64nNk*, D: d0 to d(N/2 - 1) of thread 0 to 127 of the warpgroup."""
    warp, lane = thread // 32, thread % 32
    return warp * 16 + lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2


def manual_wgmma_a16(i, thread):
    """wgmma m64nNk16, A from registers: four words of two elements."""
    word, half = i // 2, i % 2
    return (
        thread // 32 * 16 + thread % 32 // 4 + (8 if word in (1, 3) else 0),
        thread % 4 * 2 + half + (8 if word >= 2 else 0),
    )


def manual_wgmma_a8(i, thread):
    """wgmma m64nNk32, A from registers: four words of four elements."""
    word, byte = i // 4, i % 4
    return (
        thread // 32 * 16 + thread % 32 // 4 + (8 if word in (1, 3) else 0),
        thread % 4 * 4 + byte + (16 if word >= 2 else 0),
    )


FRAGMENTS = {
    "mma m16n8k16 C": (tl.accumulator(16, 8, 1), manual_accumulator_m16n8),
    "mma m16n8k16 A": (tl.operand_a(16, 16, 16, 1), manual_a_m16n8k16),
    "mma m16n8k16 B": (tl.operand_b_mma(16, 8, 16, 1), manual_b_m16n8k16),
    "mma m16n8k32 A": (tl.operand_a(16, 32, 8, 1), manual_a_m16n8k32),
    "mma m16n8k32 B": (tl.operand_b_mma(32, 8, 8, 1), manual_b_m16n8k32),
    "wgmma m64n8 D": (tl.accumulator(64, 8, 4), manual_wgmma_d),
    "wgmma m64n256 D": (tl.accumulator(64, 256, 4), manual_wgmma_d),
    "wgmma m64n80 D": (tl.accumulator(64, 80, 4), manual_wgmma_d),
    "wgmma m64k16 A": (tl.operand_a(64, 16, 16, 4), manual_wgmma_a16),
    "wgmma m64k32 A": (tl.operand_a(64, 32, 8, 4), manual_wgmma_a8),
}


@pytest.mark.parametrize("which", FRAGMENTS)
def test_a_fragment_is_that_of_the_manual(which):
    layout, manual = FRAGMENTS[which]
    for register in range(layout.registers):
        for thread in range(layout.threads):
            assert layout.position(register, thread % 32, thread // 32) == manual(register, thread)


# --- any layout ----------------------------------------------------------------------------------

LAYOUTS = [
    *(layout for layout, _ in FRAGMENTS.values()),
    tl.accumulator(192, 48, 12), tl.accumulator(256, 16, 8), tl.accumulator(48, 24, 3), tl.accumulator(64, 8, 2),
    tl.operand_a(128, 192, 16, 8), tl.operand_a(192, 96, 8, 12), tl.operand_b_mma(48, 40, 16, 12),
    tl.row_vector(tl.accumulator(192, 48, 12)), tl.column_vector(tl.accumulator(192, 48, 12)),
    tl.row_vector(tl.accumulator(256, 16, 4)), tl.column_vector(tl.operand_b_mma(64, 64, 8, 4)),
    tl.parse("r8 c1 / c2 c4 r1 r2 r4 / r16 r32", (64, 40)), tl.parse("c1 c2 c4 / c8 c16 c32 c64 r1 / r2 r4", (64, 128)),
    tl.parse("c1 / c2 c4 r1 r2 - / - r4 / 2x3x2", (16, 48)),
]  # fmt: skip


def everywhere(layout):
    """Every register of every thread, as arrays."""
    return np.meshgrid(range(layout.registers), LANES, range(layout.warps), indexing="ij")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout} {layout.shape}")
def test_every_element_is_held_equally_often(layout):
    rows, columns = layout.position(*everywhere(layout))
    rows, columns = np.broadcast_arrays(rows, columns, everywhere(layout)[0])[:2]
    count = np.zeros(layout.shape, int)
    np.add.at(count, (rows, columns), 1)
    assert (count == layout.replicas).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout} {layout.shape}")
def test_a_position_is_the_sum_of_what_register_and_thread_say(layout):
    for register in range(layout.registers):
        for thread in range(layout.threads):
            lane, warp = thread % 32, thread // 32
            static, moved = layout.register_offset(register), layout.thread_offset(lane, warp)
            both = (static[0] + moved[0], static[1] + moved[1])
            assert both == layout.position(register, lane, warp)
            assert both == (layout.row_of(register, lane, warp), layout.column_of(register, lane, warp))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout} {layout.shape}")
def test_a_layout_is_read_back_from_its_text(layout):
    assert tl.parse(str(layout), layout.shape) == layout
    assert str(tl.parse(str(layout), layout.shape)) == str(layout)


@st.composite
def linear_layouts(draw):
    """Any split of any bases, with groups and repetitions."""
    row_bits, column_bits = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    bases = draw(st.permutations([(1 << i, 0) for i in range(row_bits)] + [(0, 1 << i) for i in range(column_bits)]))
    cut = draw(st.integers(0, min(4, len(bases))))
    moving = draw(st.integers(0, min(5, len(bases) - cut)))
    lanes = draw(st.permutations(bases[cut : cut + moving] + [(0, 0)] * (5 - moving)))
    warps = bases[cut + moving :]
    registers, warps = (bases[:cut] + warps[3:], [*warps[:3], *draw(st.sampled_from([[], [(0, 0)]]))])
    groups = tuple(draw(st.integers(1, 3)) for _ in range(3))
    repetitions = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    extents = [(1 << row_bits) * groups[0], (1 << column_bits) * groups[1]]
    shape = (extents[0] * repetitions[0], extents[1] * repetitions[1])
    return tl.RegisterLayout(shape, tuple(registers), tuple(lanes), tuple(warps), groups, draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(linear_layouts())
def test_a_position_lies_in_the_tile_and_its_text_says_all(layout):
    rows, columns = (
        np.broadcast_to(found, everywhere(layout)[0].shape) for found in layout.position(*everywhere(layout))
    )
    assert len(set(zip(rows.flat, columns.flat, strict=True))) == layout.shape[0] * layout.shape[1]
    assert (rows.min(), columns.min()) == (0, 0)
    assert (rows.max() + 1, columns.max() + 1) == layout.shape
    assert tl.parse(str(layout), layout.shape) == layout


# --- vectors and reductions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [x for x in LAYOUTS if 1 in x.groups[:2]], ids=lambda layout: f"{layout} {layout.shape}"
)
def test_a_vector_has_the_rows_or_columns_of_its_tile(layout):
    rows, columns = tl.row_vector(layout), tl.column_vector(layout)
    assert rows.registers == len(layout.rows_a_thread)
    assert columns.registers == len(layout.columns_a_thread)
    for warp in range(layout.warps):
        for lane in (0, 1, 5, 31):
            for register in range(layout.registers):
                row, column = layout.position(register, lane, warp)
                assert rows.position(layout.row_registers[register], lane, warp) == (row, 0)
                assert columns.position(layout.column_registers[register], lane, warp) == (0, column)


# --- names and refusals ----------------------------------------------------------------------------


def test_named_layouts_and_their_vectors_carry_their_names():
    layout = tl.named("wgmma", (128, 64), 8)
    assert str(layout) == "wgmma"
    assert str(tl.row_vector(layout)) == "rows(wgmma)"
    assert str(tl.column_vector(layout)) == "columns(wgmma:8)"
    assert str(tl.row_vector(tl.named("wgmma", (128, 64), 4))) == "rows(wgmma:4)"
    for name in tl.NAMES:
        found = tl.named(name, (64, 64), 4)
        for vector in (found, tl.row_vector(found), tl.column_vector(found)):
            assert tl.parse(str(vector), vector.shape) == vector


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tl.named("wgmma", (64, 64), 2), "warpgroups of 4 warps, got 2"),
        (lambda: tl.named("fma", (64, 64), 4), "must be one of wgmma, mma, a16, a8, b16, b8, got 'fma'"),
        (lambda: tl.accumulator(40, 64, 4), "rows must be a positive multiple of the 64"),
        (lambda: tl.accumulator(64, 60, 4), "columns must be a positive multiple of the 8"),
        (lambda: tl.operand_a(64, 24, 16, 4), "k-steps of 16, got 24"),
        (lambda: tl.operand_a(64, 64, 4, 4), "bits of A must be 8 or 16, got 4"),
        (lambda: tl.operand_b_mma(64, 64, 32, 4), "bits of B must be 8 or 16, got 32"),
        (lambda: tl.accumulator(64, 64, 0), "warps must be positive, got 0"),
        (lambda: tl.parse("wgmma", (60, 64)), "must say how many warps"),
        (lambda: tl.parse("b16", (64, 64)), "must say how many warps"),
        (lambda: tl.parse("columns(wgmma)", (64,)), "must say how many warps"),
        (lambda: tl.parse("wgmma", (64,)), r"a tile of rows and columns, got the shape \(64,\)"),
        (lambda: tl.parse("q1 / c1 / r1", (64, 64)), "or bases such as"),
        (lambda: tl.parse("c1 / c2 c4 r1 r2 r4 / r8 / two", (64, 64)), "groups of warps must be such as 3x1x1"),
        (lambda: tl.parse("c1 / c2 c4 r1 r2 / r4", (64, 64)), "must have 5 bases of lanes, got 4"),
        (lambda: tl.parse("c1 c1 / c2 c4 r1 r2 r4 / r8", (64, 64)), "each once"),
        (lambda: tl.parse("- c1 / c2 c4 r1 r2 r4 / r8", (64, 64)), "have each element once"),
        (lambda: tl.column_vector(tl.parse("c1 / c2 c4 r1 r2 r4 / r8 / 2x2x1", (64, 64))), "must be along one axis"),
        (lambda: tl.RegisterLayout((4, 4), ((1, 1),), ((0, 0),) * 5), "a basis must move along one axis"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- the values of a kernel and of a pass ------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "shared"),
    [
        (tl.accumulator(128, 80, 4), SharedLayout(128, 80, 2, 128)),
        (tl.operand_b_mma(32, 24, 8, 6), SharedLayout(32, 24, 1, pitch=48)),
        (tl.parse("c1 / c2 c4 r1 r2 - / - r4 / 2x3x1", (16, 48)), SharedLayout(16, 48, 4, 32)),
    ],
    ids=str,
)
def test_a_kernel_computes_with_the_same_formulas(layout, shared):
    @kv.kernel(block=layout.threads)
    def place(found):
        lane, warp = kv.lane_id(), kv.warp_id()
        for register in kv.static(range(layout.registers)):
            row, column = layout.position(register, lane, warp)
            at = (register * layout.warps + warp) * 32 + lane
            found[at, 0] = row
            found[at, 1] = column
            found[at, 2] = shared.offset(row, column)

    found = np.full((layout.registers * layout.threads, 3), -1, np.int32)
    run_block(place, layout.threads, found)
    for register, lane, warp in np.ndindex(layout.registers, 32, layout.warps):
        row, column = layout.position(register, lane, warp)
        wanted = [row, column, shared.offset(row, column)]
        assert found[(register * layout.warps + warp) * 32 + lane].tolist() == wanted


def test_a_pass_computes_with_the_same_formulas():
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            layout, shared = tl.accumulator(192, 80, 12), SharedLayout(192, 80, 2, 128)
            lane, warp = (Ix(const(x)) for x in (13, 10))
            for register in range(layout.registers):
                row, column = layout.position(register, lane, warp)
                wanted = layout.position(register, 13, 10)
                got = [folded(x.value) for x in (row, column, shared.offset(row, column))]
                assert got == [*wanted, shared.offset(*wanted)]


def folded(value):
    """What arith on constants computes."""
    op = value.owner
    if op.name == "arith.constant":
        return ir.IntegerAttr(op.attributes["value"]).value
    a, b = (folded(operand) for operand in op.operands)
    return {
        "arith.addi": lambda: a + b,
        "arith.muli": lambda: a * b,
        "arith.divui": lambda: a // b,
        "arith.remui": lambda: a % b,
        "arith.andi": lambda: a & b,
        "arith.xori": lambda: a ^ b,
        "arith.shli": lambda: a << b,
        "arith.shrui": lambda: a >> b,
    }[op.name]()
