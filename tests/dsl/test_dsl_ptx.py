# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""PTX intrinsics and what kernels have around them; tests/python/ptx.py has the instruction of each."""

from __future__ import annotations

import re
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from reference.blocks import run_block

import kvarn as kv
from kvarn.dialect.layout import CacheSpec, CollectionSpec
from kvarn.errors import KernelError

BF, F, U, W = kv.Buffer[kv.bf16, 2], kv.Buffer[kv.f32, 2], kv.Buffer[kv.u32, 1], kv.Buffer[kv.i32, 1]


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
    assert kv.compile(k, CollectionSpec(QUANTIZED), F, U, target="sm_90a").artifact.entry().name == "k"


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
    assert kv.compile(widened, W, target=target).artifact.isa == version
