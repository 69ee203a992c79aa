# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles copied by the tensor memory accelerator, element by element: in the PTX interpreter; a GPU runs them too.

What is expected is made from the pool and the table alone, without a descriptor; single boxes, whose coordinates may
lie anywhere, are compared with the NumPy model of a copy.
"""

from typing import Any

import numpy as np
import pytest
from reference import places, tma_kernels as kernels
from reference.case import by_name
from reference.random_caches import random_problem, random_values

import kvarn as kv
from kvarn.dialect import dtypes, tma_layout
from kvarn.emulator import grid as ptx, tma as ptx_tma

HEADS = 2
SWIZZLES = ("none", "32B", "64B", "128B")


@pytest.fixture
def place():
    return places.Interpreted()


def bits(array):
    return places.bits(np.asarray(array))


def pool(kind="paged", dtype="bf16", head_size=64, page_size=16, seed=0, cached=(70, 0, 33), **options):
    rng = np.random.default_rng(seed)
    problem = random_problem(
        rng, kind, dtype, num_heads=HEADS, head_size=head_size, page_size=page_size, num_layers=3, cached=cached,
        new=[0] * len(cached), **options,
    )  # fmt: skip
    # Every slot differs, those of other layers too: what comes from a wrong place shows.
    problem.collection.blocks[...] = random_values(rng, problem.collection.blocks.shape, dtypes.of(dtype))
    return problem.collection


def expected_tile(cache, head, b, base, rows, valid, column, map, beyond="zero"):
    """Rows of tokens [base, base + rows), out of the pool: bits [rows, columns]."""
    blocks, table = bits(cache.blocks), np.asarray(cache.buffers[2])
    table = table[cache.layer_idx] if table.ndim == 3 else table
    columns, size = map.spec.tile[-1], cache.head_size
    found = np.zeros((rows, columns), blocks.dtype)
    for i in range(rows):
        if i // map.spec.rows * map.spec.rows >= valid:
            if beyond == "skip":
                found[i].view(np.uint8)[...] = kernels.STALE
            continue
        token = base + i
        page, slot = (table[b], token) if cache.page_size == 0 else (
            table[b, token // cache.page_size], token % cache.page_size
        )  # fmt: skip
        if slot < blocks.shape[1]:
            row = blocks[page, slot, head, column : min(size, column + columns)]
            found[i, : len(row)] = row
    return found


def check_tile(place, collection, *, layer=1, value=False, b=0, base=0, rows=32, valid=None, column=0, beyond="zero",
               **tile):  # fmt: skip
    """Copy a tile of every head and compare all of it."""

    def view(c):
        return c.get_value_cache(layer) if value else c.get_key_cache(layer)

    host, there = view(collection), view(place.collection(collection))
    map = there.create_tma_tile(**tile)
    valid = rows if valid is None else valid
    out = place.put(np.zeros((HEADS, rows, map.spec.tile[-1]), host.dtype.numpy))
    operand = kv.KVCacheMHAOperand(there)
    place.launch(kernels.copy_tile, HEADS, kernels.THREADS, operand, map, out, b, base, valid, column, rows, beyond)
    found = bits(place.get(out))
    for head in range(HEADS):
        expected = expected_tile(host, head, b, base, rows, valid, column, map, beyond)
        np.testing.assert_array_equal(found[head], expected, f"head {head}")


# A pool, and a tile of it, named for what may not matter; by turns of make check, and of make check-all.
BOXES = {"none": 16, "32B": 4, "64B": 2, "128B": 1}  # rows of a page that is smaller than the swizzle pattern
TILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"elements of {dtype}, swizzle {swizzle}": (
        {"dtype": dtype, "head_size": 128}, {"tile_rows": 16, "swizzle": swizzle})
       for dtype in ("bf16", "f8e4m3", "f32") for swizzle in SWIZZLES},
    **{f"pages of {page}, {rows} rows": ({"page_size": page}, {"tile_rows": min(rows, page), "rows": rows, "base": 32})
       for page in (8, 16, 64) for rows in (8, 16, 32)},
    **{f"layer {layer}, {'values' if value else 'keys'}": (
        {}, {"layer": layer, "value": value, "b": 2, "tile_rows": 16}) for layer in (0, 2) for value in (False, True)},
    **{f"pages in another order, {seed}": ({"seed": seed}, {"tile_rows": 16, "rows": 64}) for seed in range(3)},
    **{f"{'pages' if paged else 'rows'} as coordinates": (
        {}, {"tile_rows": 16, "rows": 64, "paged": paged, "value": True}) for paged in (False, True)},
    **{f"boxes of {valid} tokens, others {beyond}{', by pages' * paged}": (
        {}, {"tile_rows": 16, "rows": 64, "valid": valid, "beyond": beyond, "paged": paged})
       for valid in (-5, 0, 1, 16, 17, 40, 64) for beyond in ("zero", "skip") for paged in (False, True)},
    # A depth of several chunks, from a column on; columns past the head's 128 are zeros.
    **{f"a depth of {depth} from column {column}": (
        {"head_size": 128}, {"tile_rows": 16, "depth": depth, "column": column})
       for depth, column in ((64, 0), (64, 64), (128, 0), (128, 64), (64, 128))},
    **{f"a head of no whole chunk is padded with zeros, swizzle {swizzle}": (
        {"head_size": 80}, {"tile_rows": 16, "swizzle": swizzle}) for swizzle in SWIZZLES},
    # The pattern goes by addresses: a box may start in the middle of it.
    **{f"boxes smaller than the pattern of {swizzle}": (
        {"page_size": BOXES[swizzle]}, {"tile_rows": BOXES[swizzle], "rows": 8, "swizzle": swizzle})
       for swizzle in SWIZZLES[1:]},
    **{f"a continuous region by {'pages' if paged else 'rows'}": (
        {"kind": "continuous"}, {"b": 2, "base": 8, "tile_rows": 16, "paged": paged}) for paged in (False, True)},
    # Layers share the pages: the table of the layer says which are its own.
    **{f"layer {layer} of fa3": (
        {"kind": "fa3", "head_size": 80}, {"layer": layer, "value": True, "b": 2, "base": 8, "tile_rows": 8})
       for layer in (0, 2)},
    # Of 73 slots: tokens from there on are zeros, not the next layer's.
    "a region ends where its bounds say": ({"kind": "continuous"}, {"base": 64, "tile_rows": 16}),
}  # fmt: skip


@pytest.mark.whole
@by_name(TILES, [name for i, name in enumerate(TILES) if i % 3])
def test_a_tile_is_what_the_table_says(place, name):
    shape, tile = TILES[name]
    check_tile(place, pool(**shape), **tile)


@pytest.mark.parametrize(("page_size", "box"), [(16, 16), (64, 32), (32, 8)])
def test_rows_of_populate_are_coordinates(place, page_size, box):
    c = pool(page_size=page_size, head_size=128)
    there = place.collection(c).get_value_cache(1)
    map = there.create_tma_tile(tile_rows=box, paged=False)
    out = place.put(np.zeros((HEADS, 64, 128), kv.bf16.numpy))
    place.launch(kernels.copy_populated, HEADS, kernels.THREADS, there, map, out, 0, 0, 64)
    found = bits(place.get(out))
    for head in range(HEADS):
        expected = expected_tile(c.get_value_cache(1), head, 0, 0, 64, 64, 0, map)
        np.testing.assert_array_equal(found[head], expected)


# --- sequences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ptx.ORDERS[::2], ids=lambda o: f"{o.warps}-{o.copies}")
def test_a_barrier_serves_tile_after_tile(order):
    check_sequence(places.Interpreted(order=order))


def test_a_sequence_through_one_barrier(place):
    check_sequence(place)


def check_sequence(place):
    collection, rows, total = pool(page_size=16), 32, 70
    there = place.collection(collection)
    maps = [c.create_tma_tile(tile_rows=16) for c in (there.get_key_cache(2), there.get_value_cache(2))]
    tiles = -(-total // rows)
    outs = [place.put(np.zeros((HEADS * tiles, rows, 64), kv.bf16.numpy)) for _ in maps]
    place.launch(
        kernels.copy_sequence, HEADS, kernels.THREADS, there, 2, *maps, *outs, 0, total, rows,
    )  # fmt: skip
    for cache, map, out in zip((collection.get_key_cache(2), collection.get_value_cache(2)), maps, outs, strict=True):
        found = bits(place.get(out)).reshape(HEADS, tiles, rows, 64)
        for head in range(HEADS):
            for i in range(tiles):
                expected = expected_tile(cache, head, 0, i * rows, rows, total - i * rows, 0, map)
                np.testing.assert_array_equal(found[head, i], expected)


# --- single boxes, against the model of a copy ---------------------------------------------------------


def check_boxes(place, host, there, at):
    """Loads of the coordinates ``at`` [n, ...]; ``host`` is the descriptor of the same memory on the host."""
    assert host.spec == there.spec
    spec, m = host.spec, host.description
    at = np.asarray(at, np.int32)
    kernel_out = place.put(np.zeros((len(at), spec.rows, spec.tile[-1]), spec.dtype.numpy))
    place.launch(kernels.copy_boxes, len(at), kernels.THREADS, there, kernel_out, place.put(at))
    found = bits(place.get(kernel_out))
    memory = ptx.Memory([np.asarray(b) for b in host.owner.buffers])

    def read(address):
        return memory.read(address.astype(np.uint64), spec.dtype.itemsize, "the model")

    for n, given in enumerate(at.tolist()):
        chunks = [
            ptx_tma.read_box(m, tma_layout.copy_coordinates(spec, given, j), read).view(found.dtype)
            for j in range(spec.copies)
        ]
        np.testing.assert_array_equal(found[n], np.concatenate(chunks, axis=1), f"at {given}")


def both(place, collection, make, layer=1):
    """Descriptors of the values of a layer: of the host's buffers, and of those in place."""
    kept = place.collection(collection)
    return make(collection.get_value_cache(layer)), make(kept.get_value_cache(layer))


def test_what_lies_out_of_bounds_is_zeros(place):
    """Before and past pages, slots, heads and columns, whole and in part."""
    c = pool()
    pages = c.num_blocks
    host, there = both(place, c, lambda v: v.create_tma_tile(tile_rows=8))
    check_boxes(place, host, there, [
        [0, 0, 0, 0], [pages - 1, 8, 1, 0], [pages, 0, 0, 0], [-1, 0, 0, 0], [0, -3, 0, 0], [1, 13, 1, 0],
        [1, 16, 0, 0], [0, 0, 2, 0], [0, 0, -1, 0], [2, 4, 1, 24], [2, 4, 1, -40], [2, 4, 1, 64], [2**30] * 4,
    ])  # fmt: skip


def test_pages_keep_other_layers_out_of_reach(place):
    """A box that passes the end of a page ends in zeros with pages; with rows it goes on in the next layer."""
    c = pool()
    c.blocks[:, 1, 2] = 7
    for paged, after in ((True, 0), (False, 7)):
        there = place.collection(c).get_value_cache(1).create_tma_tile(tile_rows=8, paged=paged)
        out = place.put(np.zeros((1, 8, 64), kv.bf16.numpy))
        rows = c.get_value_cache(1).get_tma_row(3 * 16 + 12)
        at = np.array([[3, 12, 0, 0] if paged else [rows, 0, 0]], np.int32)
        place.launch(kernels.copy_boxes, 1, kernels.THREADS, there, out, place.put(at))
        found = place.get(out)[0]
        np.testing.assert_array_equal(bits(found[:4]), bits(c.blocks[3, 1, 1, 12:, 0]))
        assert (found[4:].astype(np.float32) == after).all()


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_a_ragged_tile_brings_the_first_rows_only(place, swizzle):
    c = pool(page_size=32)
    host, there = both(place, c, lambda v: v.create_ragged_tma_tile(swizzle, tile_rows=16))
    rows = [c.get_value_cache(1).row_idx(0, t) for t in (0, 40, 64)]
    at = [[row, n, head, 0] for row, head in zip(rows, (0, 1, 0), strict=True) for n in range(17)]
    check_boxes(place, host, there, at)


def test_a_ragged_tile_of_a_region_brings_the_first_rows_only(place):
    c = pool("continuous")
    host, there = both(place, c, lambda v: v.create_ragged_tma_tile(tile_rows=16))
    rows = [c.get_value_cache(1).row_idx(b, t) for b, t in ((0, 0), (0, 40), (2, 17))]
    check_boxes(place, host, there, [[row, n, n % 2, 0] for row in rows for n in range(17)])


def test_a_ragged_tile_ends_with_the_pool(place):
    """The last row's number plus n is the number of rows: one past the last row is in bounds."""
    c = pool()
    v = c.get_value_cache(1)
    host, there = both(place, c, lambda v: v.create_ragged_tma_tile(tile_rows=16))
    check_boxes(place, host, there, [[v.num_kv_rows() - n, n, 1, 0] for n in (1, 5, 16)])


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("paged", [False, True])
def test_the_rope_part_of_rows(place, swizzle, paged):
    rng = np.random.default_rng(5)
    problem = random_problem(
        rng, "paged", "f8e4m3", num_heads=1, head_size=640, page_size=64, num_layers=2, cached=[100], new=[0],
        is_mla=True, scale_dtype="f32", granularity=640,
    )  # fmt: skip
    c = problem.collection
    c.blocks.view(np.uint8)[...] = rng.integers(0, 256, c.blocks.shape, np.uint8)
    there = place.collection(c)
    made = [k.create_rope_tma_tile(swizzle, tile_rows=64, rope=64, padded_depth=512, paged=paged)
            for k in (c.get_key_cache(1), there.get_key_cache(1))]  # fmt: skip
    key = c.get_key_cache(1)
    pages = [int(key.buffers[2][0, i]) for i in range(2)]
    at = [[p, 0, 0, 0] for p in pages] if paged else [[key.get_tma_row(p * 64), 0, 0] for p in pages]
    check_boxes(place, *made, at)
    rope = key.blocks[pages[1], :, 0, 512:].view(np.uint16)
    out = place.put(np.zeros((1, 64, 64), kv.bf16.numpy))
    operand = kv.KVCacheMHAOperand(there.get_key_cache(1))
    place.launch(kernels.copy_tile, 1, kernels.THREADS, operand, made[1], out, 0, 64, 64, 0, 64, "zero")
    np.testing.assert_array_equal(bits(place.get(out))[0], rope)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_scales_of_operands(place, dtype):
    """A ragged operand with a scale a head, and a dense one with several: rows of a length, and what passes the end."""
    rng = np.random.default_rng(6)
    offsets = np.array([0, 13, 40], np.uint32)
    data = random_values(rng, (40, HEADS, 32), kv.f8e4m3)
    scales = random_values(rng, (40, HEADS, 2), dtypes.of(dtype))
    makers = [
        lambda put: kv.RaggedMHAOperand(put(data), put(offsets), put(scales)),
        lambda put: kv.LayoutTensorMHAOperand(*(put(x.reshape(4, 10, HEADS, -1)) for x in (data, scales))),
    ]
    for make in makers:
        host, there = (make(put).create_scale_tma_tile(count=32) for put in (np.asarray, place.put))
        check_boxes(place, host, there, [[0, 0], [0, 32], [0, 128], [0, 144], [0, 160], [1, 0]])


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_tiles_of_operands_over_buffers(place, kind):
    rng = np.random.default_rng(7)
    data = random_values(rng, (4 * 32, HEADS, 64), kv.bf16)
    offsets = np.array([0, 16, 64, 128], np.uint32)
    if kind == "dense":
        there = kv.LayoutTensorMHAOperand(place.put(data.reshape(4, 32, HEADS, 64)))
        b, base, first = 2, 16, 2 * 32 + 16
    else:
        there = kv.RaggedMHAOperand(place.put(data), place.put(offsets))
        b, base, first = 1, 16, 32
    map = there.create_tma_tile(tile_rows=16)
    out = place.put(np.zeros((HEADS, 16, 64), kv.bf16.numpy))
    place.launch(kernels.copy_tile, HEADS, kernels.THREADS, there, map, out, b, base, 16, 0, 16, "zero")
    found = bits(place.get(out))
    for head in range(HEADS):
        np.testing.assert_array_equal(found[head], bits(data[first : first + 16, head]))


# --- stores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 16])
def test_a_ragged_store_writes_the_first_rows_only(place, n):
    c, rng = pool(page_size=32), np.random.default_rng(8)
    there = place.collection(c)
    v = there.get_value_cache(1)
    map = v.create_ragged_tma_tile(tile_rows=16)
    data = random_values(rng, (16, 64), kv.bf16)
    row = c.get_value_cache(1).row_idx(0, 40)
    at = np.array([row, n, 1, 0], np.int32)
    place.launch(kernels.store_box, 1, kernels.THREADS, map, place.put(data), place.put(at))
    page = int(c.lookup_table[0, 1])
    c.blocks[page, 1, 1, 8 : 8 + n, 1] = data[:n]
    places.assert_same(place, there, c)


def test_a_store_writes_nothing_out_of_bounds(place):
    c, rng = pool(), np.random.default_rng(9)
    there = place.collection(c)
    map = there.get_value_cache(1).create_tma_tile(tile_rows=16)
    data = random_values(rng, (16, 64), kv.bf16)
    at = np.array([2, 11, 0, 0], np.int32)
    place.launch(kernels.store_box, 1, kernels.THREADS, map, place.put(data), place.put(at))
    c.blocks[2, 1, 1, 11:, 0] = data[:5]
    places.assert_same(place, there, c)


def test_read_only_memory_is_not_stored_to():
    c = pool()
    c.blocks.flags.writeable = False
    view = type(c)(c.blocks, c.cache_lengths, c.lookup_table, 1, 70).get_value_cache(1)
    assert view.create_tma_tile(tile_rows=16).readonly


# --- gathers: of sm_100a, so the interpreter alone -----------------------------------------------------


def latent(head_size=576, dtype="f8e4m3", page_size=64, seed=10):
    rng = np.random.default_rng(seed)
    problem = random_problem(
        rng, "paged", dtype, num_heads=1, head_size=head_size, page_size=page_size, num_layers=3, cached=[200, 77],
        new=[0, 0], is_mla=True,
    )  # fmt: skip
    problem.collection.blocks.view(np.uint8)[...] = rng.integers(0, 256, problem.collection.blocks.view(np.uint8).shape)
    return problem.collection


@pytest.mark.parametrize(
    ("options", "column"),
    [
        ({"tile_width": 72, "tma_dtype": "i64"}, 0),
        ({"tile_width": 576, "swizzle": "128B"}, 0),
        ({"tile_width": 128, "swizzle": "64B"}, 512),
        ({"tile_width": 64, "swizzle": "32B"}, 544),
        ({"tile_width": 256, "swizzle": "none"}, 320),
    ],
)
def test_rows_are_gathered_in_any_order(options, column):
    """Sparse indices page * P + slot, one of them -1, which gives zeros; columns past the row are zeros too."""
    here, c, height = places.Interpreted("sm_100a"), latent(), 16
    key = c.get_key_cache(2)
    rng = np.random.default_rng(11)
    encoded = rng.integers(0, c.num_blocks * 64, height).astype(np.int32)
    encoded[[0, 5]] = -1
    map = key.create_gather4_tma_tile(tile_height=height, **options)
    size = map.spec.dtype.itemsize
    out = np.zeros((1, height, map.spec.tile[-1]), map.spec.dtype.numpy)
    here.launch(kernels.gather_rows, 1, kernels.THREADS, key, map, encoded, out, column)
    rows = np.zeros((height, 576 + map.spec.tile[-1] * size), np.uint8)
    for i, e in enumerate(encoded):
        if e >= 0:
            rows[i, :576] = bits(key.blocks[e // 64, e % 64, 0])
    expected = rows[:, column * size :][:, : map.spec.tile[-1] * size]
    np.testing.assert_array_equal(out[0].view(np.uint8).reshape(height, -1), expected)


def test_rope_parts_are_gathered_up_to_their_end():
    """Columns past the rope width are zeros, although the row goes on in the next one's content."""
    here, c = places.Interpreted("sm_100a"), latent(head_size=640)
    key = c.get_key_cache(1)
    encoded = np.array([70, 3, -1, 130], np.int32)
    map = key.create_rope_gather4_tma_tile(tile_width=48, padded_depth=512, swizzle="64B")
    out = np.zeros((1, 4, 64), kv.bf16.numpy)
    here.launch(kernels.gather_rows, 1, kernels.THREADS, key, map, encoded, out, 0)
    expected = np.zeros((4, 64), np.uint16)
    for i, e in enumerate(encoded):
        if e >= 0:
            expected[i, :48] = key.blocks[e // 64, e % 64, 0, 512:608].view(np.uint16)
    np.testing.assert_array_equal(bits(out)[0], expected)


@pytest.mark.parametrize("rows", range(5))
def test_gathers_out_of_bounds_give_zeros(rows):
    """Negative rows and rows past the last, next to ``rows`` that exist."""
    here, c = places.Interpreted("sm_100a"), latent()
    key = c.get_key_cache(0)
    map = key.create_gather4_tma_tile(tile_width=64, swizzle="64B")
    outside = [-1, key.num_kv_rows(), 2**30, -(2**31)]
    given = [*(int(key.row_idx(0, t)) for t in range(rows)), *outside][:4]
    check_boxes(here, map, map, [[*given, 0], [*given[::-1], 512]])


# --- CTA pairs: of sm_100a too -------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("valid", [64, 40, 16])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_the_halves_of_a_pair_make_up_the_tile(page_size, valid, known):
    """With pages of 16 the second CTA starts two pages on, with 32 one page, with 64 half a page."""
    here, c = places.Interpreted("sm_100a"), pool(page_size=page_size)
    cache = c.get_key_cache(1)
    map = cache.create_tma_tile(tile_rows=16)
    out = np.zeros((2, 32, 64), kv.bf16.numpy)
    for rank in range(2):
        here.launch(kernels.copy_half, 1, kernels.THREADS, cache, map, out, 0, 1, valid, rank, 64, known)
    expected = expected_tile(cache, 1, 0, 0, 64, valid, 0, map)
    np.testing.assert_array_equal(bits(out).reshape(64, 64), expected)


# --- what would hang or corrupt, the interpreter notices -----------------------------------------------


@kv.kernel(block=32)
def careless(map: kv.TensorMap, expected: int, shift: int, store: bool):
    tile, barrier = kv.shared(4096, kv.bf16, alignment=1024), kv.shared(1, kv.i64)
    if kv.thread_id.x == 0:
        kv.tma.init_barrier(barrier)
        kv.tma.expect(map, barrier, expected)
        kv.tma.load(map, (0, 0, 0, 0), tile.ptr() + shift, barrier)
        kv.tma.wait(barrier, 0)
        if store:
            kv.tma.store(map, (0, 0, 0, 0), tile)


@pytest.mark.parametrize(
    ("expected", "shift", "store", "message"),
    [
        (2, 0, False, "waits for 2048 bytes and 0 arrivals that never come"),
        (1, 64, False, "must be a multiple of 128, got 64"),
        (1, 0, True, "ends with stores without a wait"),
    ],
)
def test_mistakes_are_errors_in_the_interpreter(expected, shift, store, message):
    map = pool().get_key_cache(0).create_tma_tile(tile_rows=16)
    with pytest.raises(ptx.EmulationError, match=message):
        places.Interpreted().launch(careless, 1, 32, map, expected, shift, store)
    places.Interpreted().launch(careless, 1, 32, map, 1, 0, False)
