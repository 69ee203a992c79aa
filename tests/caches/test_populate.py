# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""cache.populate in kernels: the rows are those of the definition, for every width of look-up; tables that vector loads
would misread are refused before a launch.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import kvarn as kv
from kvarn.artifact import Artifact
from kvarn.caches import PagedKVCacheCollection
from kvarn.dialect import layout
from kvarn.emulator import grid as ptx
from kvarn.runtime.host import HostKernelError

# Tile rows, page size, promised alignment of the base, and the bytes that a table's rows must be aligned to.
SHAPES = [
    (128, 128, 128, 0), (256, 128, 256, 8), (256, 128, 128, 4), (192, 16, 192, 16), (128, 16, 128, 16),
    (128, 16, 16, 4), (256, 16, 256, 16), (64, 256, 64, 0), (8, 16, 1, 0), (64, 32, 64, 8), (128, 32, 128, 16),
]  # fmt: skip


def kernel_of(tile: int, alignment: int, **pair: Any) -> Any:
    """A kernel that writes every row of the tiles of a sequence."""

    @kv.kernel
    def rows(cache: kv.KVCache, out: kv.Buffer[kv.i32, 2], tiles: kv.i32):
        b, first = kv.block_id.x, kv.block_id.y * tile
        found = cache.populate(b, first, tile, base_alignment=alignment, **pair)
        for t in range(kv.thread_id.x, tile, kv.block_dim.x):
            out[b, first + t] = kv.i32(found.get_row(t))

    return rows


def pool(page_size: int, columns: int | None = None, tokens: int = 1024, shift: int = 0) -> Any:
    """Layer 1 of a pool with two sequences in permuted pages; ``shift``: entries between a multiple of 16 bytes and the
    table. Columns past the used ones name the null page.
    """
    used = layout.cdiv(tokens, page_size)
    columns = layout.lookup_columns(tokens, page_size) if columns is None else columns
    pages = 2 * used + 1
    memory = np.full(2 * columns + 8, pages - 1, np.uint32)
    start = (-memory.ctypes.data % 16) // 4 + shift
    table = memory[start : start + 2 * columns].reshape(2, columns)
    order = (7 * np.arange(2 * used) + 3) % (2 * used) if used % 7 else np.arange(2 * used)[::-1]
    table[:, :used] = order.reshape(2, used)
    blocks = np.zeros((pages, 2, 3, page_size, 1, 2), np.int8)
    c = PagedKVCacheCollection(blocks, np.zeros(2, np.uint32), table, 1, tokens)
    return c.get_value_cache(1)


def expected(cache: Any, tokens: int) -> np.ndarray:
    return np.stack([cache.row_idx(b, np.arange(tokens)) for b in range(2)])


@pytest.mark.parametrize(("tile", "page_size", "alignment", "table"), SHAPES)
@pytest.mark.parametrize("disable", [(), ("vectorize-kv-lookups",)])
def test_rows_are_those_of_the_definition_on_the_host(tile, page_size, alignment, table, disable):
    cache, out = pool(page_size), np.full((2, 1024 // tile * tile), -1, np.int32)
    kernel = kv.compile(kernel_of(tile, alignment), cache, kv.Buffer[kv.i32, 2], kv.i32, target="host", disable=disable)
    kernel[(2, 1024 // tile), 8](cache, out, 0)
    np.testing.assert_array_equal(out, expected(cache, out.shape[1]))
    assert kernel.artifact.entry().args[0].table_alignment == (0 if disable else table)


@pytest.mark.parametrize(("tile", "page_size", "alignment", "table"), SHAPES)
def test_rows_are_those_of_the_definition_in_gpu_code(tile, page_size, alignment, table):
    cache, out = pool(page_size), np.full((2, 1024 // tile * tile), -1, np.int32)
    artifact = kv.compile(kernel_of(tile, alignment), cache, kv.Buffer[kv.i32, 2], kv.i32, target="sm_90a").artifact
    values = [*cache.fields(), out.ctypes.data, *out.shape, out.strides[0] // 4, 0]
    memory = [np.asarray(b) for b in cache.buffers] + [out]
    ptx.launch(artifact.code["ptx"], "rows", (2, 1024 // tile, 1), (32, 1, 1), values, memory, 0, None)
    np.testing.assert_array_equal(out, expected(cache, out.shape[1]))
    assert artifact.entry().args[0].table_alignment == table


@pytest.mark.parametrize(("pair_cta", "is_leader"), [(False, True), (True, True), (True, False)])
def test_both_blocks_of_a_pair_have_the_rows_of_the_whole_tile(pair_cta, is_leader):
    """What each one copies differs, not the rows: they serve the value's whole tile."""
    cache, out = pool(16), np.full((2, 1024), -1, np.int32)
    kernel = kernel_of(128, 128, pair_cta=pair_cta, is_leader=is_leader)
    kernel[(2, 8), 8](cache, out, 0)
    np.testing.assert_array_equal(out, expected(cache, 1024))


def test_padding_names_the_null_page():
    """The tile reads entries past the sequence's pages: their rows are the null page's, inside the pool."""
    cache, out = pool(16, tokens=40), np.full((2, 128), -1, np.int32)
    kernel_of(128, 128)[(2, 1), 8](cache, out, 0)
    null = (cache.num_blocks - 1) * layout.row_stride(cache.spec, 6 * 16 * 2)
    assert (out[:, 48:].reshape(2, -1, 16)[:, :, 0] == null).all()
    assert out.max() < cache.num_kv_rows()


# --- what each block of a pair copies --------------------------------------------------------------

PAIRS = [(128, 16), (128, 32), (128, 64), (128, 128), (64, 256), (256, 16), (64, 0)]


@pytest.mark.parametrize(("tile", "page_size"), PAIRS)
@pytest.mark.parametrize("where", ["host", "kernel"])
def test_leader_and_peer_copy_the_whole_key_tile_together(tile, page_size, where):
    """Half of the rows each, in order, and no copy crosses a page."""
    cache = pool(page_size) if page_size else flat()
    halves = []
    for leads in (True, False):
        if where == "host":
            rows = cache.populate(1, tile, tile, pair_cta=True, is_leader=leads)
            assert rows.cta_group == 2
            copies = rows.key_copies()
        else:
            copies = copies_in_a_kernel(cache, tile, lambda rows: rows.key_copies(), pair_cta=True, is_leader=leads)
        assert all(n == layout.effective_page(tile // 2, page_size) for _, _, n in copies)
        assert [at for _, at, _ in copies] == list(range(0, tile // 2, copies[0][2]))
        halves.append([row + i for row, _, n in copies for i in range(n)])
    assert halves[0] + halves[1] == cache.row_idx(1, tile + np.arange(tile)).tolist()


@pytest.mark.parametrize(("tile", "page_size"), PAIRS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_a_value_tile_are_the_whole_tile(tile, page_size, parts):
    cache = pool(page_size) if page_size else flat()
    rows = cache.populate(0, 0, tile)
    copies = [p for part in range(parts) for p in rows.value_copies(part, parts)]
    assert [row + i for row, _, n in copies for i in range(n)] == cache.row_idx(0, np.arange(tile)).tolist()
    found = copies_in_a_kernel(cache, tile, lambda r: r.value_copies(parts - 1, parts))
    assert found == [(cache.populate(1, tile, tile).get_row(tile - tile // parts + at), at, n) for _, at, n in found]


def test_a_tile_of_an_odd_number_of_rows_has_no_halves():
    with pytest.raises(ValueError, match="pair_cta needs an even number of tile rows, got 25"):
        flat().populate(0, 0, 25, pair_cta=True)
    with pytest.raises(ValueError, match="must have a divisor of parts and a part of them, got 2 of 2"):
        flat().populate(0, 0, 64).value_copies(2, 2)
    with pytest.raises(ValueError, match="parts of a value tile must be whole pages or be in one, got 24 rows of 16"):
        pool(16).populate(0, 0, 48).value_copies(0, 2)


def flat() -> Any:
    """Layer 1 of a continuous pool with two sequences."""
    blocks, table = np.zeros((4, 2, 3, 1030, 1, 2), np.int8), np.array([3, 1], np.uint32)
    return kv.ContinuousBatchingKVCacheCollection(blocks, np.zeros(2, np.uint32), table, 1, 1024).get_key_cache(1)


def copies_in_a_kernel(cache: Any, tile: int, copies: Any, **pair: Any) -> list[tuple[int, int, int]]:
    """The copies of sequence 1's second tile as a kernel has them."""
    shapes = []

    @kv.kernel
    def rows(cache: kv.KVCache, out: kv.Buffer[kv.i32, 1], base: kv.i32):
        found = copies(cache.populate(1, base, tile, **pair))
        for i in kv.static(range(len(found))):
            row, at, n = found[i]
            out[i] = kv.i32(row)
            shapes.append((at, n))

    out = np.zeros(64, np.int32)
    rows[1, 1](cache, out, tile)
    return [(int(row), *shape) for row, shape in zip(out, shapes, strict=False)]


# --- what a table must be --------------------------------------------------------------------------


def refuses(message: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(message))


def test_a_table_that_starts_between_is_refused():
    kernel, out = kernel_of(128, 128), np.zeros((2, 128), np.int32)
    for shift in (1, 2, 3):
        cache = pool(16, shift=shift)
        with refuses("argument 'cache' of kernel 'rows' must have a lookup table whose rows start at multiples of 16"):
            kernel[(2, 1), 8](cache, out, 0)
    kernel[(2, 1), 8](pool(16, shift=4), out, 0)


def test_a_table_whose_rows_start_between_is_refused():
    kernel, out = kernel_of(128, 128), np.zeros((2, 128), np.int32)
    for columns in (65, 66, 67, 81):
        with refuses(f"rows {columns} entries apart: pad the columns to a multiple of 4"):
            kernel[(2, 1), 8](pool(16, columns), out, 0)
    kernel[(2, 1), 8](pool(16, 68), out, 0)


def test_the_stride_of_a_single_row_does_not_matter():
    whole = pool(16, 67)
    blocks, table = np.zeros((129, 16, 1, 2), np.int8), np.asarray(whole.buffers[2])[:1]
    one = kv.PagedKVCache(blocks, np.zeros(1, np.uint32), table, 1, 1024)
    out = np.zeros((1, 128), np.int32)
    kernel_of(128, 128)[(1, 1), 8](one, out, 0)
    np.testing.assert_array_equal(out[0], one.row_idx(0, np.arange(128)))


def test_a_scalar_look_up_takes_any_table():
    out = np.zeros((2, 1024), np.int32)
    cache = pool(16, 65, shift=1)
    kernel_of(128, 16)[(2, 8), 8](cache, out, 0)  # a base aligned to a page only: one entry at a time
    np.testing.assert_array_equal(out, expected(cache, 1024))


def test_preparing_a_launch_refuses_too():
    kernel = kv.compile(kernel_of(128, 128), pool(16), kv.Buffer[kv.i32, 2], kv.i32, target="host")
    with refuses("must have a lookup table whose rows start at multiples of 16 bytes"):
        kernel.prepare((2, 1), 8, pool(16, 65), np.zeros((2, 128), np.int32), 0)


def test_a_saved_kernel_still_refuses(tmp_path):
    kernel = kv.compile(kernel_of(128, 128), pool(16), kv.Buffer[kv.i32, 2], kv.i32, target="host")
    kernel.save(tmp_path / "rows.kvarn")
    assert Artifact.load(tmp_path / "rows.kvarn").entry().args[0].table_alignment == 16
    with refuses("must have a lookup table whose rows start at multiples of 16 bytes"):
        kv.load(tmp_path / "rows.kvarn")[(2, 1), 8](pool(16, 65), np.zeros((2, 128), np.int32), 0)


def test_load_pages_asks_for_what_it_reads():
    @kv.kernel
    def entries(collection: kv.PagedKVCacheCollection, operand: kv.KVCacheMHAOperand, out: kv.Buffer[kv.i32, 1]):
        keys = collection.get_key_cache(0)
        out[0] = keys.load_pages(0, 4, 2)[1] + collection.get_value_cache(1).load_pages(0, 0, 8)[7]
        out[1] = operand.load_pages(1, 2, 2)[0]

    cache = pool(16)
    specs = [layout.CollectionSpec(cache.spec), layout.OperandSpec(cache.spec), kv.Buffer[kv.i32, 1]]
    args = kv.compile(entries, *specs, target="sm_80").artifact.entry().args
    assert [a.table_alignment for a in args] == [16, 8, 0]


# --- checks on the device --------------------------------------------------------------------------


def test_a_broken_promise_is_named_when_checks_are_on():
    @kv.kernel
    def row(cache: kv.PagedKVCache, out: kv.Buffer[kv.i32, 1], base: kv.i32):
        out[0] = kv.i32(cache.populate(0, base, 128).get_row(0))

    cache, out = pool(16, 64), np.zeros(1, np.int32)
    checked = kv.compile(row, cache, kv.Buffer[kv.i32, 1], kv.i32, target="host", check=True)
    checked[1, 1](cache, out, 896)
    assert out[0] == cache.row_idx(0, 896)
    for base, sentence in (
        (64, "kv.populate: the base must be a multiple of the promised alignment 128"),
        (1024, "kv.populate: the 8 entries from the column up must be in the lookup table: pad its columns"),
    ):
        with pytest.raises(HostKernelError, match=re.escape(sentence)):
            checked[1, 1](cache, out, base)
