# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The PTX interpreter itself: what it computes, and the mistakes of a kernel that it must notice."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from reference.blocks import run_block

import kvarn as kv
from kvarn.emulator import grid as ptx, run


def copy_kernel(pending: int | None) -> Any:
    """A copy that is waited for but for the last ``pending`` groups, of which it is one; None: not at all."""

    @kv.kernel
    def copy(x, y):
        i = kv.thread_id.x
        s = kv.shared(128, kv.f32)
        kv.cp_async(s.ptr(4 * i), x.address(4 * i))
        kv.cp_async_commit()
        if pending is not None:
            kv.cp_async_wait(pending)
        for k in range(4):
            y[4 * i + k] = s[4 * i + k]

    return copy


def test_a_missing_wait_shows():
    x = np.arange(128, dtype=np.float32)
    for order in ptx.ORDERS:
        y = np.zeros_like(x)
        run_block(copy_kernel(0), 32, x, y, order=order)
        np.testing.assert_array_equal(y, x)
    for pending in (None, 1):
        y = np.zeros_like(x)
        run_block(copy_kernel(pending), 32, x, y)
        assert np.isnan(y).all()


def test_an_access_outside_the_buffers_is_an_error():
    @kv.kernel
    def over(x, y):
        y[kv.thread_id.x] = x[kv.thread_id.x + 1]

    y = np.zeros(32, np.float32)
    with pytest.raises(ptx.EmulationError, match="outside the given memory"):
        run_block(over, 32, np.zeros(32, np.float32), y)


def test_lanes_meet_again_before_a_shuffle():
    @kv.kernel
    def meet(x, y):
        i = kv.thread_id.x
        total = kv.f32(0.0)
        for k in range(i % 5):  # lanes leave the loop at different times
            total = total + x[i] * kv.f32(k)
        y[i] = kv.warp_reduce(total, "add")

    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    run_block(meet, 32, x, y)
    np.testing.assert_array_equal(y, sum(x[i] * sum(range(i % 5)) for i in range(32)))


def test_fragments_are_those_of_the_manual():
    @kv.kernel
    def multiply(a, b, c):
        lane = kv.lane_id()
        group, place = lane >> 2, lane & 3
        x = [
            kv.pack_f16x2(
                a[group + 8 * (w % 2), 2 * place + 8 * (w // 2)], a[group + 8 * (w % 2), 2 * place + 1 + 8 * (w // 2)]
            )
            for w in range(4)
        ]
        y = [kv.pack_f16x2(b[2 * place + 8 * w, group], b[2 * place + 1 + 8 * w, group]) for w in range(2)]
        z = kv.mma_m16n8k16(x, y, [kv.f32(1.0)] * 4, kv.f16)
        for w in kv.static(range(4)):
            c[group + 8 * (w // 2), 2 * place + w % 2] = z[w]

    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 8, (16, 16)).astype(np.float32), rng.integers(-8, 8, (16, 8)).astype(np.float32)
    c = np.zeros((16, 8), np.float32)
    run_block(multiply, 32, a, b, c)
    np.testing.assert_array_equal(c, a @ b + 1)


def test_a_minimum_that_is_clipped_at_zero():
    """LLVM makes ``min.relu`` of an index that is brought into a buffer."""

    @kv.kernel
    def clip(x, y):
        i = kv.thread_id.x
        y[i] = kv.math.max(kv.math.min(x[i], x.shape[0] - 27), 0)

    x = np.arange(-16, 16, dtype=np.int32)
    y = np.full_like(x, 77)
    run_block(clip, 32, x, y, target="sm_90a")
    np.testing.assert_array_equal(y, np.clip(x, 0, 5))


def test_packed_products_of_blackwell_are_those_of_their_halves():
    """LLVM makes ``mul.f32x2`` and its kin for sm_100a of what is lane by lane."""

    @kv.kernel
    def squares(x, y):
        i = kv.thread_id.x * 4
        v = x.load(i, width=4)
        y.store(i, value=(v * v + v) - v * 3.0)

    x = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    made = kv.compile(squares, kv.Buffer[kv.f32, 1], kv.Buffer[kv.f32, 1], target="sm_100a")
    assert ".f32x2" in made.asm["ptx"]
    y = np.zeros_like(x)
    run.launch(made, 1, 32, (x, y))
    np.testing.assert_allclose(y, x * x - 2 * x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "element"), [("s32", np.int32), ("s16", np.int16), ("s8", np.int8)])
def test_the_sign_of_what_is_loaded_goes_on_in_a_wider_register(kind, element):
    x, out = np.array([np.iinfo(element).min, -5, 7, np.iinfo(element).max], element), np.full(4, 77, np.int64)
    text = f"""
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 out)
{{
  mov.u32 %tid, %tid.x;
  ld.param.u64 %x, [x];
  ld.param.u64 %out, [out];
  mul.wide.u32 %at, %tid, {x.itemsize};
  add.s64 %from, %x, %at;
  mul.wide.u32 %to, %tid, 8;
  add.s64 %mine, %out, %to;
  ld.global.{kind} %rd1, [%from];
  max.s64 %rd2, %rd1, -2147483647;
  st.global.u64 [%mine], %rd2;
  ret;
}}
"""
    ptx.launch(text, "k", (1, 1, 1), (4, 1, 1), [x.ctypes.data, out.ctypes.data], [x, out])
    np.testing.assert_array_equal(out, np.maximum(x.astype(np.int64), -(2**31) + 1))


@pytest.mark.whole
@pytest.mark.parametrize("literal", ["0x7771U", "0x5410", "12816", "0x9180U", "0xFEDC"])
@pytest.mark.parametrize(
    "instruction", ["prmt.b32 %r4, %r1, %r2, {};", "shl.b32 %r4, %r1, {};", "shr.s32 %r4, %r1, {};"]
)
def test_a_literal_operand_is_a_register_that_holds_it(instruction, literal):
    literal = literal if instruction.startswith("prmt") else f"{int(literal.rstrip('U'), 0) % 41}"  # 32 bits and more
    text = f"""
    .visible .entry both(.param .u64 x) {{
        ld.param.u64 %rd1, [x];
        mov.u32 %r5, %tid.x;
        mad.wide.u32 %rd2, %r5, 16, %rd1;
        ld.global.v2.b32 {{%r1, %r2}}, [%rd2];
        {instruction.format(literal)}
        st.global.b32 [%rd2+8], %r4;
        mov.b32 %r3, {literal};
        {instruction.format("%r3")}
        st.global.b32 [%rd2+12], %r4;
        ret;
    }}"""
    x = np.random.default_rng(0).integers(0, 2**32, (32, 4), dtype=np.uint32)
    ptx.launch(text, "both", (1, 1, 1), (32, 1, 1), [x.ctypes.data], [x])
    np.testing.assert_array_equal(x[:, 2], x[:, 3])


def test_a_field_is_inserted_at_any_bit_and_of_any_length():
    given = np.random.default_rng(0).integers(0, 2**32, (32, 4), np.uint32)
    given[:, 2:] = [(at, n) for at in (0, 3, 16, 31) for n in (0, 1, 8, 16, 29, 31, 32, 33)]
    out = np.zeros(32, np.uint32)
    text = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 out)
{
  mov.u32 %tid, %tid.x;
  ld.param.u64 %x, [x];
  ld.param.u64 %out, [out];
  mul.wide.u32 %at, %tid, 16;
  add.s64 %from, %x, %at;
  mul.wide.u32 %to, %tid, 4;
  add.s64 %mine, %out, %to;
  ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%from];
  bfi.b32 %r5, %r1, %r2, %r3, %r4;
  st.global.u32 [%mine], %r5;
  ret;
}
"""
    ptx.launch(text, "k", (1, 1, 1), (32, 1, 1), [given.ctypes.data, out.ctypes.data], [given, out])
    for found, (field, into, at, n) in zip(out.tolist(), given.tolist(), strict=True):
        bits = [into >> i & 1 if not at <= i < at + n else field >> (i - at) & 1 for i in range(32)]
        assert found == sum(bit << i for i, bit in enumerate(bits)), (at, n)


def test_an_instruction_of_a_form_that_is_not_known_is_named():
    @kv.kernel
    def double(x, y):
        y[kv.thread_id.x] = x[kv.thread_id.x] * 2.0

    made = kv.compile(double, kv.Buffer[kv.f32, 1], kv.Buffer[kv.f32, 1], target="sm_80")
    text = re.sub(r"\b(?:add|mul)\.(?:rn\.)?f32\b", "mul.f128", made.asm["ptx"])
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    values = [word for a in (x, y) for word in (a.ctypes.data, 32, 1)]
    count = len(made.artifact.entries[0].params)
    with pytest.raises(ptx.EmulationError, match=r"unknown form of an instruction: mul\.f128 .*\(PTX line \d+"):
        ptx.launch(text, "double", (1, 1, 1), (32, 1, 1), values[:count], [x, y])
