# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""TMA descriptors as arguments: what kernels take, what is refused and why, the code that comes out.

``test_tma_copies`` runs the copies; ``test_launch_tensormap`` has the numbers of descriptors.
"""

import re

import numpy as np
import pytest
from caches.test_tma_copies import latent, pool
from reference import tma_kernels as kernels

import kvarn as kv
from kvarn import artifact as A
from kvarn.dialect import dtypes, layout, tma_layout
from kvarn.emulator import tma as ptx_tma
from kvarn.errors import KernelError
from kvarn.runtime import assemble, binding
from kvarn.tools.specs import parse_spec

OUT = kv.Buffer[kv.bf16, 3]


def tile_specs(cache, rows=16, **options):
    return (kv.KVCacheMHAOperand(cache), cache.create_tma_tile(tile_rows=rows, **options), OUT, kv.i32, kv.i32, kv.i32,
            kv.i32, 64, "zero")  # fmt: skip


# --- targets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("host", "is a copy by the tensor memory accelerator of sm_90 and later: the host target has none"),
        ("sm_80", "is a copy by the tensor memory accelerator, which needs sm_90 or later, got target sm_80"),
    ],
)
def test_a_target_without_tma_is_refused_by_name(target, message):
    with pytest.raises(KernelError, match=rf"'kv.tma_\w+' op {message}"):
        kv.compile(kernels.copy_tile, *tile_specs(pool().get_key_cache(0)), target=target)


@pytest.mark.parametrize("target", ["host", "sm_86"])
def test_a_descriptor_that_is_not_used_is_refused_too(target):
    @kv.kernel
    def unused(map: kv.TensorMap):
        pass

    message = f"argument #0 is a TMA descriptor, which needs sm_90 or later, got target {target}"
    with pytest.raises(KernelError, match=message):
        kv.compile(unused, pool().get_key_cache(0).create_tma_tile(tile_rows=16), target=target)


def test_gathers_and_pairs_need_sm_100a():
    key = latent().get_key_cache(0)
    map = key.create_gather4_tma_tile(tile_width=64)
    out = kv.Buffer[kv.f8e4m3, 3]
    with pytest.raises(KernelError, match="gathers rows, which needs sm_100a, got target sm_90a"):
        kv.compile(kernels.gather_rows, key, map, kv.Buffer[kv.i32, 1], out, kv.i32, target="sm_90a")
    cache = pool().get_key_cache(0)
    map = cache.create_tma_tile(tile_rows=16)
    with pytest.raises(KernelError, match="copies for a CTA pair, which needs sm_100a, got target sm_90a"):
        kv.compile(kernels.copy_pair, cache, map, OUT, kv.i32, kv.i32, 64, target="sm_90a")


# --- code ----------------------------------------------------------------------------------------------


def mnemonics(made):
    return re.findall(r"cp\.async\.bulk[\w.:]*|mbarrier\.[\w.:]+|prefetch\.[\w.]+", made.asm["ptx"])


def test_the_code_of_a_tile():
    """Four boxes of two chunks; the descriptor in parameter space, the tile at a whole swizzle pattern."""
    made = kv.compile(kernels.copy_tile, *tile_specs(pool(head_size=128).get_key_cache(0)), target="sm_90a")
    load = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    assert mnemonics(made) == [
        "prefetch.tensormap", "mbarrier.init.shared.b64", "mbarrier.arrive.expect_tx.shared.b64", *[load] * 8,
        "mbarrier.try_wait.parity.shared.b64",
    ]  # fmt: skip
    text = made.asm["ptx"]
    assert len(re.findall(r"\.param \.align 64 \.b8 copy_tile_param_\d+\[128\]", text)) == 1
    assert ".extern .shared .align 1024 .b8 kv_shared[];" in text
    assert re.search(r"mov\.b32 \s*%r\d+, 16384;", text), "64 rows of 256 bytes are expected"
    assert made.artifact.isa == "8.0"
    entry = made.artifact.entry()
    assert [p.type for p in entry.params].count("tensormap") == 1
    assert not entry.args[1].written


@pytest.mark.parametrize("kernel", [kernels.copy_pair, kernels.gather_rows])
def test_code_of_sm_100a_assembles(kernel):
    if kernel is kernels.copy_pair:
        cache = pool().get_key_cache(0)
        specs = (cache, cache.create_tma_tile(tile_rows=16), OUT, kv.i32, kv.i32, 64)
        form = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
    else:
        key = latent().get_key_cache(0)
        map = key.create_gather4_tma_tile(tile_width=72, tile_height=8, tma_dtype="i64")
        specs = (key, map, kv.Buffer[kv.i32, 1], kv.Buffer[kv.i64, 3], kv.i32)
        form = "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
    made = kv.compile(kernel, *specs, target="sm_100a")
    assert mnemonics(made).count(form) == 2
    assert made.artifact.isa == "8.6"
    if kernel is kernels.copy_pair:
        assert made.artifact.entry().cluster == (2, 1, 1)
    try:
        assert made.stats["spills"] == 0
    except assemble.MissingToolError as e:
        pytest.skip(str(e))


def test_a_multicast_assembles():
    cache = pool().get_key_cache(0)
    specs = (cache, cache.create_tma_tile(tile_rows=16), OUT, kv.i32, kv.i32, 64)
    made = kv.compile(kernels.copy_to_both, *specs, target="sm_90a")
    form = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    assert mnemonics(made).count(form) == 2
    try:
        assert made.stats["spills"] == 0
    except assemble.MissingToolError as e:
        pytest.skip(str(e))


@kv.kernel(block=32)
def read_and_store(cache: kv.PagedKVCache, map: kv.TensorMap, out: kv.Buffer[kv.bf16, 1]):
    tile = kv.tma.shared_tile(map)
    out.store(0, value=cache.load(0, 0, 0, 0, width=8))
    if kv.thread_id.x == 0:
        kv.tma.store(map, (0, 0, 0, 0), tile)
        kv.tma.wait_stores(read=True)


def test_a_store_is_a_write_of_its_descriptor_and_perhaps_of_any_cache():
    """So nothing is read through the read-only path beside it, and a read-only pool is refused."""
    cache = pool().get_key_cache(0)
    specs = (cache, cache.create_tma_tile(tile_rows=16), kv.Buffer[kv.bf16, 1])
    made = kv.compile(read_and_store, *specs, target="sm_90a")
    assert [a.written for a in made.artifact.entry().args] == [False, True, True]
    assert "ld.global.nc.v4" not in made.asm["ptx"]
    assert mnemonics(made)[-3:] == [
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group", "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group.read",
    ]  # fmt: skip


# --- arguments -----------------------------------------------------------------------------------------


def test_an_annotation_may_ask_for_one_descriptor():
    cache = pool().get_key_cache(0)
    wanted, other = cache.create_tma_tile(tile_rows=16), cache.create_tma_tile(tile_rows=8)

    @kv.kernel
    def one(map: kv.TensorMap[wanted.spec]):
        kv.tma.prefetch(map)

    assert kv.compile(one, wanted, target="sm_90a").artifact.entry().args[0].spec == wanted.spec
    with pytest.raises(KernelError, match=r"argument 'map' of one must be TmaSpec\(form='tiled'.*, got TmaSpec"):
        kv.compile(one, other, target="sm_90a")
    with pytest.raises(TypeError, match=r"kv.TensorMap takes the spec of a descriptor"):
        kv.TensorMap[16]


def test_what_is_no_descriptor_is_refused():
    cache = pool().get_key_cache(0)
    with pytest.raises(KernelError, match="'map' of copy_boxes must be a TMA descriptor, got the spec of a paged"):
        kv.compile(kernels.copy_boxes, cache, OUT, kv.Buffer[kv.i32, 2], target="sm_90a")
    with pytest.raises(TypeError, match="must be a cache, an array or a number, got object"):
        kernels.copy_boxes.specs_of((object(), OUT, OUT))


def bind(arg, given):
    return binding.make_binder(arg, "k")(given)


def test_a_launch_takes_the_descriptor_that_the_kernel_is_compiled_for():
    cache = pool().get_key_cache(0)
    map, other = cache.create_tma_tile(tile_rows=16), cache.create_tma_tile(tile_rows=8)
    arg = A.Arg("map", "tensormap", spec=map.spec)
    with pytest.raises(TypeError, match=r"is compiled for TmaSpec.*tile=\(16, 1, 64\).*got .*tile=\(8, 1, 64\)"):
        bind(arg, other)
    with pytest.raises(TypeError, match="be a TMA descriptor, as create_tma_tile of a cache gives it, got PagedKV"):
        bind(arg, cache)
    with pytest.raises(ValueError, match="must describe memory of a GPU, got a TMA descriptor of host memory"):
        bind(arg, map)
    assert map.device == ("cpu", 0)


def test_a_saved_kernel_keeps_what_its_descriptor_says(tmp_path):
    made = kv.compile(kernels.copy_tile, *tile_specs(pool().get_key_cache(0)), target="sm_90a")
    made.save(tmp_path / "tile.kvarn")
    loaded = A.Artifact.load(tmp_path / "tile.kvarn")
    assert loaded.entry() == made.artifact.entry()
    assert isinstance(loaded.entry().args[1].spec, tma_layout.TmaSpec)


PAGED = "paged(bf16, num_heads=2, head_size=64, page_size=16)"


def test_a_descriptor_can_be_named_on_a_command_line():
    spec = pool().get_key_cache(0).spec
    assert parse_spec(f"tma_tiled({PAGED}, rows=16)") == tma_layout.tiled(spec, 16)
    narrow = parse_spec(f"tma_tiled(operand({PAGED}), rows=8, depth=32, swizzle=64, paged=false)")
    assert narrow == tma_layout.tiled(spec, 8, 32, "64B", False)
    assert parse_spec(f"tma_gather4({PAGED}, width=32, dtype=i64, height=8)").dtype is kv.i64
    for text, message in (
        (f"tma_tiled({PAGED})", "missing 1 required positional argument: 'rows'"),
        (f"tma_tiled({PAGED}, rows=16, width=3)", "tma_tiled takes rows, depth, swizzle, paged, got width"),
        (f"tma_tiled({PAGED}, rows=16, swizzle=48)", "swizzle must be one of 16, 32, 64, 128, got 48"),
        ("tma_tiled(bf16, rows=16)", "must have a cache or an operand first"),
        (f"tma_tiled({PAGED}, rows=24)", "must not cross a page of 16 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_spec(text)


# --- misuse in kernels ---------------------------------------------------------------------------------


def misused(body):
    @kv.kernel
    def kernel(cache: kv.PagedKVCache, map: kv.TensorMap, data: kv.Buffer[kv.bf16, 1]):
        body(cache, map, data, kv.shared(4096, kv.bf16, alignment=1024), kv.shared(1, kv.i64))

    cache = pool().get_key_cache(0)
    return kv.compile(kernel, cache, cache.create_tma_tile(tile_rows=16), kv.Buffer[kv.bf16, 1], target="sm_90a")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda c, m, d, s, b: kv.tma.load(m, (0, 0), s, b), r"takes \(page, slot, head, column\), got 2"),
        (lambda c, m, d, s, b: kv.tma.store(m, (0,), s), r"takes \(page, slot, head, column\), got 1"),
        (lambda c, m, d, s, b: kv.tma.load(c, (0, 0), s, b), "annotated with kv.TensorMap.* is needed"),
        (lambda c, m, d, s, b: kv.tma.load(m, (0, 0, 0, 0), d.address(0), b), "the destination must lie in shared"),
        (lambda c, m, d, s, b: kv.tma.wait(3, 0), "the barrier must lie in shared memory"),
        (lambda c, m, d, s, b: kv.tma.load_tile(m, d, 0, 0, 0, s, b), "needs a cache or an operand"),
        (lambda c, m, d, s, b: kv.tma.load_tile(m, c, 0, 0, 0, s, b, tile_rows=24), "a multiple of the box's 16 rows"),
        (lambda c, m, d, s, b: kv.tma.load_tile(m, c, 0, 0, 0, s, b, beyond="wrap"), "beyond must be one of zero,"),
        (lambda c, m, d, s, b: kv.tma.load_tile(m, c, 0, 0, 0, s, b, pair_cta=True), "be a multiple of 32, got 16"),
        (lambda c, m, d, s, b: kv.tma.load_tile(m, c, 0, 0, 0, s, b, tile_rows=d.shape[0]), "known at compile time"),
        (lambda c, m, d, s, b: kv.tma.gather4(m, (0, 1, 2, 3), 0, s, b), "needs a descriptor of a gather, got one of"),
        (lambda c, m, d, s, b: kv.tma.init_barrier(b, 0), "arrivals must be a positive int"),
        (lambda c, m, d, s, b: kv.tma.wait_stores(-1), "pending must be an int known at compile time"),
        (lambda c, m, d, s, b: kv.tma.shared_tile(m, 0), "rows must be a positive int"),
        (lambda c, m, d, s, b: kv.tma.load(m, (0, 0, 0, 0), s, b, cta_group=3), "cta_group must be 1 or 2, got 3"),
    ],
)
def test_misuse_is_refused_with_a_reason(body, message):
    with pytest.raises(KernelError, match=message):
        misused(body)


def test_a_gather_takes_four_rows():
    key = latent().get_key_cache(0)

    @kv.kernel
    def three(map: kv.TensorMap):
        kv.tma.gather4(map, (0, 1, 2), 0, kv.tma.shared_tile(map), kv.shared(1, kv.i64))

    with pytest.raises(KernelError, match=r"kv\.tma\.gather4 takes 4 rows, got 3"):
        kv.compile(three, key.create_gather4_tma_tile(tile_width=64), target="sm_100a")


def test_a_cluster_has_16_blocks_at_most():
    with pytest.raises(ValueError, match=r"cluster must have at most 16 blocks, got \(4, 8\)"):
        kv.kernel(cluster=(4, 8))
    with pytest.raises(ValueError, match="cluster must be one to three positive ints, got 0"):
        kv.kernel(cluster=0)


# --- caches and operands that have no such tile --------------------------------------------------------


def fa3():
    return kv.PagedKVCacheFA3FallbackCollection(
        np.zeros((2, 4, 16, 2, 64), np.float16), np.zeros(1, np.int32), np.zeros((1, 1, 24), np.int32), 1, 16
    ).get_key_cache(0)


def test_caches_without_rows_have_no_tiles():
    for make in (
        lambda c: c.create_tma_tile(tile_rows=16, paged=False),
        lambda c: c.create_ragged_tma_tile(tile_rows=16),
        lambda c: c.create_gather4_tma_tile(tile_width=64),
    ):
        with pytest.raises(ValueError, match="got fa3: a cache of that kind has no rows"):
            make(fa3())
        with pytest.raises(ValueError, match="got scales: scales are read one by one"):
            make(kv.KVCacheScalesMHAOperand(scaled()))


def scaled():
    return pool(dtype="f8e4m3", scale_dtype="f32", granularity=64).get_key_cache(0)


def test_rope_tiles_are_of_paged_caches():
    continuous = pool("continuous", "f8e4m3").get_key_cache(0)
    dense = kv.LayoutTensorMHAOperand(np.zeros((2, 16, 1, 64), kv.f8e4m3.numpy))
    for given, kind in ((continuous, "continuous"), (dense, "dense"), (fa3(), "fa3")):
        with pytest.raises(ValueError, match=f"a rope TMA tile needs a paged cache, got {kind}"):
            given.create_rope_tma_tile(tile_rows=16, rope=16, padded_depth=32)
        with pytest.raises(ValueError, match=f"a rope TMA tile needs a paged cache, got {kind}"):
            given.create_rope_gather4_tma_tile(tile_width=16, padded_depth=32)
    with pytest.raises(ValueError, match="needs one head, got 2"):
        pool(dtype="f8e4m3").get_key_cache(0).create_rope_tma_tile(tile_rows=16, rope=16, padded_depth=32)


def test_scale_tiles_are_of_operands_over_buffers():
    with pytest.raises(ValueError, match="got one over a paged cache, whose scales are in pages: read them with load"):
        kv.KVCacheMHAOperand(scaled()).create_scale_tma_tile(count=16)
    data = np.zeros((2, 18, 1, 64), kv.f8e4m3.numpy)
    with pytest.raises(ValueError, match="needs an operand with scales, got one without"):
        kv.LayoutTensorMHAOperand(data).create_scale_tma_tile(count=16)
    odd = kv.LayoutTensorMHAOperand(data[:, :17], np.zeros((2, 17, 1, 1), np.float32))
    with pytest.raises(ValueError, match="the count of scales must be a multiple of 4, got 34"):
        odd.create_scale_tma_tile(count=16)
    apart = kv.LayoutTensorMHAOperand(data, np.zeros((2, 20, 1, 1), np.float32)[:, :18])
    with pytest.raises(ValueError, match="must be packed to be one row, got sequences 20 scales apart, which have 18"):
        apart.create_scale_tma_tile(count=16)
    with pytest.raises(ValueError, match="multiple of 16 bytes, got 3 x 4 bytes"):
        kv.LayoutTensorMHAOperand(data, np.zeros((2, 18, 1, 1), np.float32)).create_scale_tma_tile(count=3)


def test_a_ragged_tile_needs_memory_before_it():
    c = pool()
    first = c.get_key_cache(0)
    with pytest.raises(ValueError, match="got a view that starts 0 bytes into its buffer, which is 4096 too few"):
        first.create_ragged_tma_tile(tile_rows=16)
    assert first.create_ragged_tma_tile(tile_rows=16, before_is_mapped=True).spec.rows == 16
    assert c.get_value_cache(0).create_ragged_tma_tile(tile_rows=48).spec.rows == 48, "the keys lie before"
    with pytest.raises(ValueError, match="must be mapped memory"):
        kv.KVCacheMHAOperand(first).create_ragged_tma_tile(tile_rows=16)


# --- formulas ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzle", tma_layout.SWIZZLE_BYTES)
@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3", "f32"])
def test_places_in_shared_memory_are_those_of_the_copies(dtype, swizzle):
    """Every element of a tile of several boxes and chunks at one place, where the model of a copy puts it."""
    spec = layout.spec_of("paged", dtype, 2, 128, page_size=16)
    map = tma_layout.tiled(spec, 16, swizzle=swizzle)
    rows = 48
    row, column = np.indices((rows, 128))
    found = tma_layout.shared_offset(map, row, column, rows)
    size = map.dtype.itemsize
    assert sorted(found.ravel().tolist()) == list(range(0, rows * 128 * size, size))
    shape = type("M", (), {"box": map.box, "dtype": map.dtype, "swizzle": swizzle})
    for chunk in range(map.copies):
        for first in range(0, rows, 16):
            start = (chunk * rows + first) * map.row_bytes
            expected = ptx_tma.swizzled(shape, start, 16)[:, ::size]
            width = map.box[-1]
            np.testing.assert_array_equal(found[first : first + 16, chunk * width : (chunk + 1) * width], expected)


def test_unsigned_and_signed_descriptors_are_one():
    """MLIR integers have no sign."""
    spec = tma_layout.TmaSpec("gather4", dtypes.u64, (1, 8), (4, 8))
    assert spec == tma_layout.TmaSpec("gather4", dtypes.i64, (1, 8), (4, 8))
    assert (spec.rows, spec.copies, spec.copy_bytes, spec.load_bytes, spec.tile_bytes) == (4, 1, 256, 256, 256)
