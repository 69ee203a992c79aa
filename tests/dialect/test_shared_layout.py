# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Layouts of tiles in shared memory: swizzles as TMA defines them, descriptors, bank conflicts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvarn.dialect.shared_layout import CHUNK, SharedLayout, bank_conflicts, wavefronts


def tma_swizzle(address, swizzle):
    """What TMA does to an address of an unswizzled box: 128B, 64B and 32B flip bits 4 up by bits 7 up."""
    if swizzle == 128:
        return address ^ ((address >> 7 & 7) << 4)
    if swizzle == 64:
        return address ^ ((address >> 7 & 3) << 4)
    return address ^ ((address >> 7 & 1) << 4)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("rows", [4, 8, 20, 64])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_a_swizzled_tile_is_what_tma_writes(swizzle, rows, itemsize):
    columns = 2 * swizzle // itemsize + 16 // itemsize  # the last panel is not full
    tile = SharedLayout(rows, columns, itemsize, swizzle)
    assert tile.tma
    assert (tile.panels, tile.box_columns, tile.panel_bytes) == (3, swizzle // itemsize, rows * swizzle)
    for panel in range(tile.panels):
        box = tile.box_offset(panel)
        for row in range(rows):
            for column in range(min(tile.box_columns, columns - panel * tile.box_columns)):
                linear = box + row * swizzle + column * itemsize
                assert tile.offset(row, panel * tile.box_columns + column) == tma_swizzle(linear, swizzle)


TILES = [
    SharedLayout(64, 64, 2, 128), SharedLayout(64, 80, 2, 128), SharedLayout(16, 192, 2, 128),
    SharedLayout(64, 576, 2, 128, pitch=1152), SharedLayout(24, 40, 2, pitch=96), SharedLayout(33, 7, 4),
    SharedLayout(64, 96, 1, 32), SharedLayout(16, 96, 2, 64, pitch=192), SharedLayout(16, 64, 2, pitch=16),
    SharedLayout(4, 128, 2, 128), SharedLayout(8, 24, 4, 0, pitch=48), SharedLayout(8, 4, 16, 64),
]  # fmt: skip


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_elements_lie_in_the_tile_and_apart(tile):
    rows, columns = np.indices((tile.rows, tile.columns))
    at = tile.offset(rows, columns)
    assert at.min() >= 0
    assert at.max() + tile.itemsize <= tile.bytes
    assert (at % tile.itemsize == 0).all()
    assert len(np.unique(at)) == at.size
    assert at[-1, -1] == tile.offset(tile.rows - 1, tile.columns - 1)
    items = CHUNK // tile.itemsize
    np.testing.assert_array_equal(at[:, ::items], tile.chunk_offset(rows, columns // items)[:, ::items])
    np.testing.assert_array_equal(at - at % CHUNK, tile.chunk_offset(rows, columns // items))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.sampled_from([1, 2, 4]), st.sampled_from([0, 32, 64, 128]))
def test_no_two_elements_share_a_place(rows, columns, itemsize, swizzle):
    tile = SharedLayout(rows, columns, itemsize, swizzle)
    at = tile.offset(*np.indices((rows, columns)))
    assert len(np.unique(at)) == rows * columns
    assert at.max() + itemsize <= tile.stage_bytes


def test_a_view_has_the_columns_of_the_tile():
    for tile in (SharedLayout(64, 320, 2, 128), SharedLayout(64, 320, 2, 128, pitch=640), SharedLayout(64, 320, 2)):
        start, view = tile.view(128, 80)
        assert (view.rows, view.columns, view.pitch) == (64, 80, tile.pitch)
        for row in (0, 5, 63):
            for column in (0, 9, 63, 79):
                assert start + view.offset(row, column) == tile.offset(row, 128 + column)


# --- wgmma -----------------------------------------------------------------------------------------


def core_matrix_rows(descriptor, step, swizzle):
    """Bytes of the 16-byte rows that a K-major descriptor makes of 16 rows of one k-step, before TMA's swizzle.

    As the PTX manual has it: groups of eight rows are ``stride`` apart; in one, rows are one atom apart, or 16 bytes
    without a swizzle, where the halves of the k-step are ``leading`` apart.
    """
    line, half = (swizzle, 16) if swizzle else (16, descriptor.leading)
    return {
        (row, chunk): step + row // 8 * descriptor.stride + row % 8 * line + chunk * half
        for row in range(16)
        for chunk in (0, 1)
    }


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(("swizzle", "pitch"), [(128, 0), (64, 0), (32, 0), (0, 16)])
def test_a_k_major_descriptor_finds_every_row(swizzle, pitch, itemsize):
    columns = 160 // itemsize
    tile = SharedLayout(64, columns, itemsize, swizzle, pitch=pitch)
    descriptor, steps = tile.descriptor(), tile.k_steps()
    assert len(steps) == 5
    for k, step in enumerate(steps):
        for (row, chunk), at in core_matrix_rows(descriptor, step, swizzle).items():
            wanted = tile.chunk_offset(row, 2 * k + chunk)
            assert wanted == (tma_swizzle(at, swizzle) if swizzle else at)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_a_transposed_descriptor_finds_every_row(swizzle):
    """Atoms of columns are ``leading`` apart, groups of eight rows ``stride``; a k-step has 16 rows."""
    tile = SharedLayout(48, 192, 2, swizzle)
    descriptor, steps = tile.descriptor(transposed=True), tile.row_steps()
    assert len(steps) == 3
    for k, step in enumerate(steps):
        for row in range(16):
            for column in range(192):
                atom, inside = divmod(2 * column, swizzle)
                at = step + atom * descriptor.leading + row // 8 * descriptor.stride + row % 8 * swizzle + inside
                assert tma_swizzle(at, swizzle) == tile.offset(16 * k + row, column)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SharedLayout(0, 64, 2), "must be positive, got 0, 64, 1"),
        (lambda: SharedLayout(64, 64, 3), "itemsize must be a power of two up to 16, got 3"),
        (lambda: SharedLayout(64, 64, 2, 48), "swizzle must be one of 0, 32, 64, 128 bytes, got 48"),
        (lambda: SharedLayout(64, 64, 2, 128, pitch=144), "pitch must be a positive multiple of 128 bytes, got 144"),
        (lambda: SharedLayout(64, 64, 2, pitch=-16), "pitch must be a positive multiple of 16 bytes, got -16"),
        (lambda: SharedLayout(12, 64, 2, 128).descriptor(), "groups of 8 rows, got 12 rows"),
        (lambda: SharedLayout(64, 128, 2, 128, pitch=256).descriptor(), "128 bytes apart, got 256"),
        (lambda: SharedLayout(64, 128, 2).descriptor(), "16 bytes apart, got 256"),
        (lambda: SharedLayout(64, 64, 1, 64).descriptor(True), "16-bit tiles, got swizzle 64 and itemsize 1"),
        (lambda: SharedLayout(64, 128, 2, 128).view(32, 32), "must start at a multiple of 64 columns"),
        (lambda: SharedLayout(64, 128, 2, 128).view(64, 128), "be within the tile's 128, got 128 columns from 64"),
        (lambda: SharedLayout(4, 128, 2, 128).view(64, 64), "needs a multiple of 8 rows, got 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- bank conflicts --------------------------------------------------------------------------------


def test_an_access_without_conflicts_needs_its_width_in_passes():
    assert wavefronts([4 * lane for lane in range(32)], 4) == 1
    assert wavefronts([8 * lane for lane in range(32)], 8) == 2
    assert wavefronts([16 * lane for lane in range(32)], 16) == 4
    assert wavefronts([0] * 32, 4) == 1
    assert wavefronts([2 * lane for lane in range(32)], 2) == 1
    assert bank_conflicts([128 * lane for lane in range(32)], 4) == 31
    assert bank_conflicts([256 * lane for lane in range(32)], 16) == 28


def ldmatrix_conflicts(tile, chunk=0):
    """Of the four matrices of rows 0 to 31, one chunk of each row."""
    return bank_conflicts([tile.chunk_offset(lane, chunk) for lane in range(32)], 16)


@pytest.mark.parametrize(
    ("tile", "conflicts"),
    [
        (SharedLayout(64, 64, 2), 28),
        (SharedLayout(64, 64, 2, 128), 0),
        (SharedLayout(64, 128, 2, 128, pitch=256), 0),
        (SharedLayout(64, 80, 2, pitch=176), 0),
        (SharedLayout(64, 32, 2), 12),
        (SharedLayout(64, 32, 2, 64), 0),
        (SharedLayout(64, 16, 2), 4),
        (SharedLayout(64, 16, 2, 32), 0),
        (SharedLayout(64, 96, 2, 64, pitch=192), 0),
    ],
    ids=str,
)
def test_swizzled_and_padded_rows_have_no_conflicts(tile, conflicts):
    assert {ldmatrix_conflicts(tile, chunk) for chunk in range(tile.row_bytes // CHUNK)} == {conflicts}


@pytest.mark.parametrize("size", [64, 80, 128, 192, 576])
@pytest.mark.parametrize("high", [0, 1])
def test_steps_are_the_chunks_of_a_row(size, high):
    for tile in (SharedLayout.whole_rows(64, size, 2), SharedLayout(64, size, 2, 128), SharedLayout(64, size, 2, 64)):
        for row in (0, 3, 7):
            pointers = tile.steps(1 << 20, row, high)
            for k in range(size // 16):
                for rows in (0, 8, 48):
                    wanted = (1 << 20) + tile.chunk_offset(row + rows, 2 * k + high)
                    assert tile.step(pointers, k, rows) == wanted


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 255), min_size=32, max_size=32))
def test_wavefronts_count_the_words_of_the_busiest_bank(words):
    distinct = Counter(word % 32 for word in set(words))
    assert wavefronts([4 * word for word in words], 4) == max(distinct.values())
