# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Descriptions of TMA descriptors, without a driver: the numbers, and what the hardware would refuse."""

import pytest

from kvarn.dialect import dtypes, layout, tma_layout
from kvarn.dialect.tma_layout import gather4, ragged, rope, rope_gather4, tiled
from kvarn.runtime import tensormap as T

L, N, P, H, D = 3, 10, 16, 8, 128
SPEC = layout.spec_of("paged", "bf16", H, D, page_size=P)
STRIDE0 = 2 * L * P * H * D
FA3 = layout.spec_of("fa3", "bf16", H, D, page_size=P)
REGIONS = layout.spec_of("continuous", "f8e4m3", 1, 128)
RAGGED = layout.spec_of("ragged", "bf16", H, D)
MLA = layout.spec_of("paged", "f8e4m3", 1, 640, page_size=64, is_mla=True)


def fields(spec, base=4096, stride0=STRIDE0, blocks=N, capacity=None):
    values = {"base": base, "stride0": stride0, "num_blocks": blocks, "capacity": capacity or spec.page_size}
    return tuple(values.get(f.name, 0) for f in layout.operand_fields(spec))


def described(form, spec, at, *args, content=0, columns=0, l2_promotion=0, **options):
    """What a constructor of ``tma_layout`` makes of a cache, described."""
    made = form(spec, *args, **options)
    return T.describe(made, spec, at, content=content, columns=columns, l2_promotion=l2_promotion)


ROWS = (N - 1) * (STRIDE0 // (H * D)) + P


def test_a_tile_has_dimensions_for_pages_slots_heads_and_depth():
    m = described(tiled, SPEC, fields(SPEC), 16)
    assert (m.dims, m.strides, m.box) == ((N, P, H, D), (STRIDE0, H * D, D, 1), (1, 16, 1, 64))
    assert m.tile == (16, 1, 128)
    assert m.base == 4096
    assert m.box_bytes == 16 * 64 * 2
    odd = layout.spec_of("paged", "bf16", H, 80, page_size=P)
    assert described(tiled, odd, fields(odd, stride0=P * H * 80 * 6), 8).tile == (8, 1, 128), "the depth is padded"
    assert described(tiled, SPEC, fields(SPEC), 16, swizzle="none", depth=64).box == (1, 16, 1, 8)


def test_a_tile_of_rows_has_one_dimension_for_all_of_them():
    m = described(tiled, SPEC, fields(SPEC), 16, paged=False)
    assert (m.dims, m.strides, m.box) == ((ROWS, H, D), (H * D, D, 1), (16, 1, 64))
    assert m.tile == (16, 1, 128)


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_an_operand_over_a_buffer_is_one_run_of_rows(kind):
    spec = layout.spec_of(kind, "bf16", H, D)
    at = (
        {"stride0": 32 * H * D, "blocks": 5, "capacity": 32}
        if kind == "dense"
        else {"stride0": H * D, "blocks": 160, "capacity": 1}
    )
    m = described(tiled, spec, fields(spec, **at), 64)
    assert (m.dims, m.strides, m.box) == ((160, H, D), (H * D, D, 1), (64, 1, 64))
    assert described(gather4, spec, fields(spec, **at), 64).dims == (160, H * D)


def test_rows_of_a_tile_are_the_layouts_rows():
    m = described(tiled, SPEC, fields(SPEC), 16, paged=False)
    for block, slot in [(0, 0), (9, 15), (4, 7)]:
        row = layout.tma_row(SPEC, block * P + slot, STRIDE0)
        assert row < m.dims[0]
        assert row * m.strides[0] == layout.element_offset(SPEC, block, slot, 0, 0, STRIDE0)
    assert layout.tma_row(SPEC, (N - 1) * P + P - 1, STRIDE0) == m.dims[0] - 1, "the last row is the last token"


def test_rows_that_no_coordinate_can_name_need_pages():
    """S = 1408 rows from page to page, 1,840,895 pages: 2.59e9 rows, more than an int32 counts."""
    pool = layout.spec_of("paged", "bf16", 1, D, page_size=64)
    pages = 1_840_895
    f = fields(pool, stride0=1408 * D, blocks=pages)
    for describe in (
        lambda: described(tiled, pool, f, 64, paged=False),
        lambda: described(gather4, pool, f, 64),
        lambda: described(ragged, pool, (1 << 30, *f[1:]), 64),
    ):
        with pytest.raises(ValueError, match=r"rows must be below 2\*\*31.*got 2591978816: use pages"):
            describe()
    m = described(tiled, pool, f, 64)
    assert m.dims == (pages, 64, 1, D)
    assert (pages - 1) * m.strides[0] + 63 * m.strides[1] == (2591978816 - 1) * D, "the last token's first element"


def test_heads_of_odd_multiples_of_8_bytes_are_columns_of_their_token():
    eight = layout.spec_of("paged", "f8e4m3", 4, 72, page_size=16)
    made = tma_layout.launch_tile(eight, 16)
    at = {"base": 4096, "stride0": 16 * 288, "num_blocks": N, "capacity": 16}
    m = T.of_tile(made, eight, at)
    assert (made.form, m.dims, m.strides) == ("token", (N, 16, 1, 288), (16 * 288, 288, 288, 1))
    assert (m.box, m.tile, m.spec) == ((1, 16, 1, 128), (16, 1, 128), made)
    odd = layout.spec_of("paged", "f8e4m3", 3, 72, page_size=16)  # whose tokens are no rows either
    with pytest.raises(ValueError, match=r"the elements of a head must be a multiple of 16 bytes.* got 72 of f8e4m3"):
        tma_layout.launch_tile(odd, 16)
    with pytest.raises(ValueError, match=r"tokens of a multiple of 16, got 3 heads of 72 of f8e4m3"):
        tma_layout.token(odd, 16)


def test_gather4_rows():
    f = fields(MLA, stride0=L * 64 * 640)
    m = described(gather4, MLA, f, 72, height=8, dtype=dtypes.i64)
    assert (m.dims[1], m.strides, m.box, m.tile) == (80, (80, 1), (1, 72), (8, 72))
    assert m.needs == "sm_100"
    m = described(gather4, MLA, f, 576, height=64, swizzle="128B", l2_promotion=128)
    assert (m.box, m.tile, m.l2_promotion) == ((1, 128), (64, 640), 128), "the width is whole boxes"


def test_ragged_tile_starts_before_the_view():
    m = described(ragged, SPEC, fields(SPEC, base=1 << 20), 64)
    assert m.dims == (ROWS + 1, H, 64, D)
    assert m.strides == (H * D, D, H * D, 1)
    assert m.base == (1 << 20) - 64 * H * D * 2
    # Coordinates (row + n, head, BM - n, d): line i of the box is row + i.
    r0, n, i = 40, 5, 3
    assert (r0 + n) * m.strides[0] + (64 - n + i) * m.strides[2] - 64 * H * D == (r0 + i) * H * D


def test_rope_parts_come_after_the_content():
    f = fields(MLA, stride0=L * 64 * 640)
    m = described(rope, MLA, f, 64, 512, 64, content=512)
    assert (m.dims, m.strides) == ((N, 64, 1, 64), (L * 64 * 320, 320, 320, 1))
    assert (m.box, m.base, m.dtype) == ((1, 64, 1, 64), 4096 + 512, dtypes.bf16)
    m = described(rope, MLA, f, 64, 512, 64, content=512, paged=False)
    assert (m.dims[1:], m.strides, m.box, m.base) == ((1, 320), (320, 320, 1), (64, 1, 64), 4096 + 512)
    m = described(rope_gather4, MLA, f, 512, 64, content=512, columns=64, swizzle="128B")
    assert (m.dims[1], m.strides, m.box) == (64, (320, 1), (1, 64))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: described(tiled, SPEC, fields(SPEC, base=8), 16), "the address must be a multiple of 16, got 0x8"),
    (lambda: described(tiled, SPEC, fields(SPEC), 32), "a page of 16 tokens: its rows must divide it, got 32"),
    (lambda: described(tiled, SPEC, fields(SPEC), 12, paged=False), "its rows must divide it, got 12"),
    (lambda: described(tiled, FA3, fields(FA3), 16, paged=False), "got fa3: a cache of that kind has no rows"),
    (lambda: described(ragged, FA3, fields(FA3), 16), "got fa3: a cache of that kind has no rows"),
    (lambda: described(gather4, FA3, fields(FA3), 16), "got fa3: a cache of that kind has no rows"),
    (lambda: described(rope, REGIONS, fields(REGIONS), 16, 64, 32), "needs a paged cache, got continuous"),
    (lambda: described(rope_gather4, REGIONS, fields(REGIONS), 64, 32), "needs a paged cache, got continuous"),
    (lambda: described(tiled, RAGGED, fields(RAGGED), 16, paged=True), "sequences of one length, got a ragged operand"),
    (lambda: described(tiled, SPEC, fields(SPEC), 16, depth=100), r"multiple of 64 elements \(swizzle 128B\), got 100"),
    (lambda: described(tiled, SPEC, fields(SPEC), 16, swizzle="256B"), "swizzle must be one of none, 32B"),
    (lambda: described(tiled, SPEC, fields(SPEC, blocks=0), 16), "at least one block"),
    (lambda: described(tiled, SPEC, (1, 2), 16), "fields must be those of a cache"),
    (lambda: described(gather4, MLA, fields(MLA, stride0=64 * 640), 640), "box must be 1 to 256 in each dimension"),
    (lambda: described(gather4, MLA, fields(MLA, stride0=64 * 640), 641), "width must be from 1 to the row pitch 640"),
    (lambda: described(gather4, MLA, fields(MLA, stride0=64 * 640), 64, height=6), "multiple of 4, got 6"),
    (lambda: described(gather4, MLA, fields(MLA, stride0=64 * 640), 64, row_pitch=600), "row of 640 bytes, got 600"),
    (lambda: described(ragged, SPEC, fields(SPEC), 64), "must be mapped, got a cache at 0x1000"),
    (lambda: described(rope, MLA, fields(MLA, stride0=64 * 640), 64, 496, 64), "which makes 624"),
    (lambda: described(rope, SPEC, fields(SPEC), 16, 64, 32), "needs an 8-bit cache, got bf16"),
    (lambda: T.describe_scales(dtypes.f32, 4096, 1022, 64), "multiple of 4, got 1022"),
    (lambda: T.TensorMap(dtypes.f32, (8, 6), (6, 1), (1, 4), 0, (1, 4)), "multiples of 16 bytes below .* got 6"),
    (lambda: T.TensorMap(dtypes.f32, (8, 8), (8, 2), (1, 4), 0, (1, 4)), "contiguous, got a stride of 2"),
    (lambda: T.TensorMap(dtypes.f32, (8, 8), (8, 1), (1, 2), 0, (1, 2)), "multiple of 16 bytes, got 2 x 4 bytes"),
    (lambda: T.TensorMap(dtypes.f32, (8, 64), (64, 1), (1, 64), 0, (1, 64), "128B"), "at most the 128 bytes"),
    (lambda: T.TensorMap(dtypes.bool_, (16,), (1,), (16,), 0, (16,)), "dtype must be one of"),
    (lambda: T.TensorMap(dtypes.u8, (1,) * 6, (1,) * 6, (1,) * 6, 0, (1,)), "rank must be 1 to 5"),
])  # fmt: skip
def test_what_the_hardware_refuses_is_refused_with_a_reason(make, message):
    with pytest.raises(ValueError, match=message):
        make()
