# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""PTX intrinsics: each becomes its instruction, and a kernel of all of them assembles; tracing is fast."""

from __future__ import annotations

import re
import time
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from reference.blocks import run_block

import kvarn as kv
from kvarn.dialect import kv as dialect
from kvarn.dialect.layout import CacheSpec, CollectionSpec
from kvarn.errors import KernelError

BF, F, U, W = kv.Buffer[kv.bf16, 2], kv.Buffer[kv.f32, 2], kv.Buffer[kv.u32, 1], kv.Buffer[kv.i32, 1]


@kv.kernel(block=128)
def ampere(a: BF, o: F, c: U, n: kv.i32):
    s = kv.shared((4, 16, 64), kv.bf16, alignment=128)
    lane, warp = kv.lane_id, kv.warp_id
    p = s.ptr(warp, lane >> 1, (lane & 1) * 32)
    kv.cp_async(p, a.address(0, 0) + lane * 16)
    kv.cp_async(p + 16, a.address(0, 0) + lane * 16, zero_fill_size=n)
    kv.cp_async(p + 32, a.address(0, 0) + kv.i64(lane) * 4, bytes=4)
    once = kv.l2_policy("evict_first")
    kv.cp_async(p + 48, a.address(0, 0) + lane * 16, l2_policy=once)
    kv.cp_async(p + 64, a.address(0, 0) + lane * 16, zero_fill_size=n, l2_prefetch=128, l2_policy=once)
    kv.cp_async_commit()
    kv.cp_async_wait(2)
    kv.syncwarp()
    x, y = kv.ldmatrix(p, 4), kv.ldmatrix(p, 2, trans=True)
    z = kv.ldmatrix(p, 1)[0]
    acc = [0.0] * 4
    acc = kv.mma_m16n8k16(x, y, acc, kv.bf16)
    acc = kv.mma_m16n8k16(x, y, acc, kv.f16)
    z = kv.movmatrix(kv.pack_bf16x2(acc[0], acc[1])) ^ z
    z = kv.prmt(z, kv.pack_f16x2(acc[2], acc[3]), 0x3120)
    w = kv.bitcast(z, kv.f16)
    v = kv.ex2(acc[2]) + kv.f32(w[0]) + kv.rcp(acc[3]) + kv.tanh_approx(acc[1])
    if kv.shuffle_xor(v > 1.0, 1):
        v += 1.0
    o.store(1, lane * 4, value=kv.bitcast(kv.load_nc(a.address(1, 0)), kv.f32))
    counter = c.address(0)
    old = counter.atomic("add", kv.u32(1), order="acq_rel")
    kv.atomic_add(o, (0, 0), v)
    kv.atomic_add(c, 1, 1)
    r = counter.load(kv.u32, order="acquire")
    counter.store(r + old, order="release")
    counter.atomic("inc", r)
    kv.fence("block")
    kv.named_barrier(1, 64)
    kv.barrier()
    if kv.ballot(v > 0.0) != 0:
        o[kv.block_id.x, kv.thread_id.x] = v + kv.f32(s[1, 2, lane])


@kv.kernel(block=128, cluster=2)
def hopper(a: BF, c: W):
    s = kv.shared((4, 16, 64), kv.bf16, alignment=128)
    bar = kv.shared(2, kv.i64, alignment=16)
    kv.cp_async_bulk_prefetch(a.address(0, 0), 64)
    kv.griddepcontrol_wait()
    if kv.thread_id.x == 0:
        kv.mbarrier_init(bar.ptr(0), 1)
        kv.fence_mbarrier_init()
    kv.barrier()
    if kv.elect():
        kv.mbarrier_arrive_expect_tx(bar.ptr(0), 1024)
        kv.cp_async_bulk(s.ptr(), a.address(0, 0), 1024, bar.ptr(0))
    kv.mbarrier_wait(bar.ptr(0), 0)
    words = kv.cvt_e4m3x4_to_f16x4(c[0]) + kv.cvt_e5m2x4_to_f16x4(c[1])
    words = [kv.cvt_e4m3x2_to_f16x2(words[0]), kv.cvt_e5m2x2_to_f16x2(words[1]), *words[2:]]
    kv.stmatrix(s.ptr(0, kv.lane_id & 15, 0), words)
    kv.fence_proxy_async()
    kv.mbarrier_arrive(bar.ptr(1))
    kv.cluster_barrier()
    c[2] = kv.cluster_rank()
    began = kv.globaltimer()
    kv.nanosleep(500)
    c[3] = kv.i32(kv.globaltimer() - began)
    c[4] = kv.smid()
    kv.griddepcontrol_launch_dependents()


@pytest.fixture(scope="module")
def code():
    """The PTX of both kernels, and what the assembler says of them."""
    kernels = {
        "ampere": kv.compile(ampere, BF, F, U, kv.i32, target="sm_80"),
        "hopper": kv.compile(hopper, BF, W, target="sm_90a"),
    }
    return {name: k.asm["ptx"] for name, k in kernels.items()}


EXPECTED = {
    "ampere": {
        r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 16;": 1,
        r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 16, %r\d+;": 1,
        r"cp\.async\.ca\.shared\.global \[[^]]*\], \[[^]]*\], 4;": 1,
        r"createpolicy\.fractional\.L2::evict_first\.b64 %rd\d+": 1,
        r"cp\.async\.cg\.shared\.global\.L2::cache_hint \[to\], \[[^]]*\], 16, %rd\d+;": 1,
        r"cp\.async\.cg\.shared\.global\.L2::cache_hint\.L2::128B \[to\], \[[^]]*\], 16, %r\d+, %rd\d+;": 1,
        r"cp\.async\.commit_group": 1,
        r"cp\.async\.wait_group\s+2": 1,
        r"bar\.warp\.sync": 1,
        r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16": 1,
        r"ldmatrix\.sync\.aligned\.m8n8\.x2\.trans\.shared\.b16": 1,
        r"ldmatrix\.sync\.aligned\.m8n8\.x1\.shared\.b16": 1,
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32": 1,
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32": 1,
        r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16": 1,
        r"prmt\.b32 %r\d+, %r\d+, %r\d+, 0x3120": 1,
        r"cvt\.rn\.bf16x2\.f32": 1,
        r"cvt\.rn\.f16x2\.f32": 1,
        r"ex2\.approx\.ftz\.f32": 1,
        r"rcp\.approx\.ftz\.f32": 1,
        r"tanh\.approx\.f32": 1,
        r"ld\.global\.nc\.v4\.b32": 1,
        r"fence\.acq_rel\.gpu": 2,
        r"fence\.acq_rel\.cta": 1,
        r"atom\.global\.add\.u32": 2,
        r"atom\.global\.add\.f32": 1,
        r"atom\.global\.inc\.u32": 1,
        r"ld\.acquire\.gpu\.global\.b32": 1,
        r"st\.release\.gpu\.global\.b32": 1,
        r"shfl\.sync\.bfly\.b32": 1,
        r"vote\.sync\.ballot\.b32": 1,
        r"bar\.sync\s+0": 1,
        r"bar\.sync\s+1, 64": 1,
    },
    "hopper": {
        r"griddepcontrol\.wait": 1,
        r"mov\.u64 %rd\d+, %globaltimer": 2,
        r"nanosleep\.u32 500": 1,
        r"mov\.u32 %r\d+, %smid": 1,
        r"griddepcontrol\.launch_dependents": 1,
        r"mbarrier\.init\.shared\.b64": 1,
        r"fence\.mbarrier_init": 1,
        r"elect\.sync": 1,
        r"mbarrier\.arrive\.expect_tx\.shared\.b64": 1,
        r"cp\.async\.bulk\.prefetch\.L2\.global": 1,
        r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes": 1,
        r"mbarrier\.try_wait\.parity\.shared\.b64": 1,
        r"cvt\.rn\.f16x2\.e4m3x2": 3,
        r"cvt\.rn\.f16x2\.e5m2x2": 3,
        r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16": 1,
        r"fence\.proxy\.async\.shared::cta": 1,
        r"mbarrier\.arrive\.shared\.b64": 1,
        r"barrier\.cluster\.arrive\.aligned": 1,
        r"barrier\.cluster\.wait\.aligned": 1,
        r"mov\.u32 %r\d+, %cluster_ctarank": 1,
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_function_is_its_instruction(code, name):
    found = {pattern: len(re.findall(pattern, code[name])) for pattern in EXPECTED[name]}
    assert found == EXPECTED[name]


@pytest.mark.parametrize(
    ("kernel", "specs", "target"), [(ampere, (BF, F, U, kv.i32), "sm_80"), (hopper, (BF, W), "sm_90a")]
)
def test_kernel_assembles(kernel, specs, target):
    pytest.importorskip("cuda.bindings.nvjitlink")
    compiled = kv.compile(kernel, *specs, target=target)
    assert len(compiled.asm["cubin"]) > 1000


def test_machine_function_does_not_compile_for_the_host():
    @kv.kernel
    def k(x: W):
        x[0] = kv.movmatrix(x[0])

    with pytest.raises(KernelError, match=r"movmatrix|inline_asm|host"):
        kv.compile(k, W, target="host")


def test_options_reach_the_function():
    @kv.kernel(block=(64, 2), max_threads=256, min_blocks=3, max_registers=96)
    def k(x: W):
        x[0] = 1

    text = str(k.trace([W]))
    assert "kv.block = array<i32: 64, 2, 1>" in text
    for option in ("kv.max_threads = 256", "kv.min_blocks = 3", "kv.max_registers = 96"):
        assert f"{option} : i32" in text


def test_known_block_makes_lane_and_warp_cheap():
    def body(x):
        x[0] = kv.lane_id + kv.warp_id

    known = str(kv.kernel(block=64)(body).trace([W]))
    unknown = str(kv.kernel(body).trace([W]))
    assert "gpu.block_dim" not in known
    assert "gpu.block_dim" in unknown


# --- caches --------------------------------------------------------------------------------------------------

QUANTIZED = CacheSpec("paged", kv.f8e4m3, 4, 64, 16, scale_dtype=kv.f32, granularity=32)


def test_every_method_of_a_cache_is_its_op():
    @kv.kernel
    def k(collection: kv.PagedKVCacheCollection, out: F, rows: U):
        cache = collection.get_key_cache(1)
        values = collection.get_value_cache(kv.block_id.x)
        b, h, t, d = kv.block_id.x, kv.block_id.y, kv.thread_id.x, 32
        assert (cache.num_heads, cache.head_size, cache.page_size, cache.max_tile_size) == (4, 64, 16, 16)
        assert (cache.quantization_enabled, cache.quantization_granularity, cache.is_mla) == (True, 32, False)
        assert isinstance(cache, kv.PagedKVCache)
        assert not isinstance(cache, kv.ContinuousBatchingKVCache)
        page = cache.page(b, t)
        x = cache.load(b, h, t, d, width=8, page=page)
        out.store(0, 0, value=x + kv.f32(cache.load(b, h, t, d, width=8, dtype=kv.bf16)))
        values.store(b, h, t, d, cache.load_quantized(b, h, t, d, width=8), oob="trap", page=cache.raw_page(b, t))
        values.store_scale(b, h, t, d, cache.load_scale(b, h, t, d))
        rows[0] = cache.row_idx(b, t) + cache.num_kv_rows()
        rows[1] = kv.u32(cache.get_tma_row(t))
        tile = cache.populate(b, 0, 64, base_alignment=64)
        rows[2] = tile.get_row(t) + tile.get_row(3)
        rows[3] = kv.u32(cache.load_pages(b, 0, 4)[1])
        out[1, 0] = kv.f32(cache.block_paged_ptr(b, t, h, tile=16).load(kv.f8e4m3))
        out[1, 1] = cache.scales_block_paged_ptr(b, t, h, d).load(kv.f32) + cache.scales_raw_ptr().load(kv.f32)
        if not cache.empty_cache():
            out[1, 2] = kv.f32(cache.cache_length(b) + cache.max_prompt_length() + cache.max_context_length())
        rows[4] = cache.cache_lengths_nd().load(kv.u32) + kv.u32(collection.cache_length(b))
        operand = kv.KVCacheMHAOperand(cache)
        rows[5] = operand.row_idx(b, t)
        out[1, 3] = operand.load_scale(b, t, h, d)
        s = kv.shared((16, 64), kv.f8e4m3)
        cache.load_tile(b, h, 0, 16, s.ptr(), t, tile_rows=16, num_threads=32, mode="sync")
        values.store_tile(b, h, 0, 16, s.ptr(), t, tile_rows=16, num_threads=32)

    text = str(k.trace([CollectionSpec(QUANTIZED), F, U]))
    found = Counter(re.findall(r'"kv\.(\w+)"', text))
    once = [
        "key_cache", "value_cache", "page", "raw_page", "load_raw", "store", "store_scale", "num_rows", "tma_row",
        "populate", "load_pages", "block_ptr", "scale_block_ptr", "scales_base", "is_empty", "max_prompt_length",
        "max_context_length", "cache_lengths", "make_operand", "load_tile", "store_tile", "alloc_shared",
    ]  # fmt: skip
    assert {name: found[name] for name in once} == dict.fromkeys(once, 1)
    assert (found["load"], found["load_scale"], found["row_index"], found["get_row"], found["cache_length"]) == (
        2,
        2,
        2,
        2,
        2,
    )
    compiled = kv.compile(k, CollectionSpec(QUANTIZED), F, U, target="sm_90a")
    assert ".entry k(" in compiled.asm["ptx"]


def test_operand_scales_take_the_token_before_the_head():
    @kv.kernel
    def k(cache: kv.PagedKVCache, operand: kv.KVCacheMHAOperand, out: kv.Buffer[kv.f32, 1]):
        out[0] = cache.load_scale(0, 1, 2, 0) + operand.load_scale(0, 2, 1, 0)

    from kvarn.dialect.layout import OperandSpec

    text = str(k.trace([QUANTIZED, OperandSpec(QUANTIZED), kv.Buffer[kv.f32, 1]]))
    constants = dict(re.findall(r"(%c\w+) = arith.constant (\d+) : i32", text))
    orders = [[constants[v] for v in m.split(", ")[1:]] for m in re.findall(r'"kv.load_scale"\(([^)]*)\)', text)]
    assert orders == [["0", "1", "2", "0"]] * 2


# --- speed -----------------------------------------------------------------------------------------------------


def test_tracing_takes_less_than_60_ms_for_1500_ops():
    def step(acc, x, i, j):
        for u in kv.static(range(4)):
            acc[u] = acc[u] * x[u] + kv.f32(i + j * u)

    @kv.kernel
    def k(x: kv.Buffer[kv.f32, 1], out: kv.Buffer[kv.f32, 1]):
        acc = [0.0] * 4
        for i in range(x.shape[0]):
            v = [x[i * 4 + u] for u in range(4)]
            for j in kv.static(range(90)):
                step(acc, v, i, j)
        out[0] = sum(acc)

    context = dialect.make_context()
    spec = kv.Buffer[kv.f32, 1]
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        module = k.trace([spec, spec], context=context)
        best = min(best, time.perf_counter() - start)
    assert str(module).count("\n") > 1500
    assert best < 0.06


def test_loop_body_is_traced_once_for_a_list_that_a_helper_changes():
    count = []

    def native(x):
        count.append(1)
        return x

    native.__module__ = "kvarn.tests"  # called, not interpreted

    def change(acc):
        acc[0] = native(acc[0] + 1)

    @kv.kernel
    def k(out: W):
        acc = [kv.i32(0)]
        for _ in range(4):
            for _ in range(4):
                change(acc)
        out[0] = acc[0]

    out = np.zeros(1, np.int32)
    k.trace([W])
    assert len(count) == 1
    k[1, 1](out)
    assert out[0] == 16


@kv.func
def _use(instruction):
    if instruction == "fence_proxy_async":
        kv.fence_proxy_async()
    elif instruction == "fence_mbarrier_init":
        kv.fence_mbarrier_init()
    elif instruction == "setmaxnreg":
        kv.setmaxnreg(40, "decrease")
    elif instruction == "cluster_barrier":
        kv.cluster_barrier()
    elif instruction == "griddepcontrol_wait":
        kv.griddepcontrol_wait()
    elif kv.elect():
        kv.griddepcontrol_launch_dependents()


@kv.kernel(block=128)
def one(instruction: str):
    _use(instruction)


NEWER = ("fence_proxy_async", "fence_mbarrier_init", "setmaxnreg", "cluster_barrier", "griddepcontrol_wait", "elect")


@pytest.mark.parametrize("instruction", NEWER)
def test_what_a_target_does_not_have_is_refused_at_its_line(instruction):
    needed = "sm_90a" if instruction == "setmaxnreg" else "sm_90"
    with pytest.raises(KernelError, match=rf"'nvvm\.[\w.]+' op needs {needed} or later, got target sm_80"):
        kv.compile(one, instruction, target="sm_80")
    kv.compile(one, instruction, target="sm_90a" if instruction == "setmaxnreg" else "sm_90")


def test_a_barrier_after_a_condition_stays_one():
    """LLVM must not copy it into both branches: threads of a warp would wait at different ones."""

    @kv.kernel(block=64, cluster=2)
    def conditions(out: W):
        if kv.thread_id.x == 0:
            out[0] = kv.cluster_rank()
        kv.cluster_barrier()
        if kv.thread_id.x == 0:
            out[1] = kv.cluster_rank()
        kv.named_barrier(1, 64)
        if kv.thread_id.x == 0:
            out[2] = 1
        kv.named_barrier_arrive(2, 128)
        if kv.thread_id.x == 0:
            out[3] = 1

    text = kv.compile(conditions, W, target="sm_90a").asm["ptx"]
    assert text.count("barrier.cluster.arrive") == text.count("barrier.cluster.wait") == 1
    assert len(re.findall(r"\bbar(?:rier)?\.sync", text)) == len(re.findall(r"\bbar(?:rier)?\.arrive", text)) == 1


def test_every_e4m3_becomes_the_bf16_of_its_value():
    @kv.kernel(block=64)
    def convert(x, y):
        word = x[kv.thread_id.x]
        for k, pair in kv.static(enumerate(kv.cvt_e4m3x4_to_bf16x4(word))):
            y[kv.thread_id.x, k] = pair

    words = np.arange(256, dtype=np.uint8).view(np.int32)
    found = np.zeros((64, 2), np.int32)
    run_block(convert, 64, words, found, target="sm_90")
    wanted = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    wanted[[127, 255]] = 480.0, -480.0  # the NaNs
    np.testing.assert_array_equal(found.reshape(-1).view(ml_dtypes.bfloat16).astype(np.float32), wanted)


@kv.kernel(block=1)
def widened(a: W):
    a[0] = kv.cvt_e4m3x4_to_f16x4(a[0])[0]


@pytest.mark.parametrize(("target", "version"), [("sm_89", "8.1"), ("sm_90", "7.8")])
def test_a_chip_that_got_an_instruction_later_has_the_isa_that_it_needs(target, version):
    """sm_89 converts 8-bit floats since PTX 8.1, sm_90 since 7.8."""
    assert f"\n.version {version}\n" in kv.compile(widened, W, target=target).asm["ptx"]
