# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of a warpgroup: what they compute, by the PTX interpreter, and what they refuse."""

import numpy as np
import pytest
from reference.blocks import run_block
from reference.wgmma_kernels import PRODUCTS, check_product, check_started

import kvarn as kv
from kvarn.errors import KernelError

W = kv.Buffer[kv.i64, 1]


def interpreted(kernel, *arrays):
    run_block(kernel, 128, *arrays, target="sm_90a")
    return arrays[-1]


@pytest.mark.parametrize("dtype", [kv.bf16, kv.f16], ids=lambda d: d.name)
@pytest.mark.parametrize(("rows", "columns", "trans", "registers"), PRODUCTS)
def test_a_product_is_that_of_its_matrices(dtype, rows, columns, trans, registers):
    check_product(interpreted, dtype, rows, columns, trans, registers)


def test_products_of_8_bits_take_both_operands_as_they_lie():
    check_product(interpreted, kv.f8e4m3, 64, 128, False, False)


WORDS = [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, WORDS, 0, [0], kv.bf16), "a multiple of 8 columns up to 256, got 12"),
        ((8, WORDS, 0, [0], kv.f8e4m3, True), "does not transpose f8e4m3"),
        ((264, WORDS, 0, [0], kv.bf16), "a multiple of 8 columns up to 256, got 264"),
        ((8, WORDS, 0, [0, 32], kv.bf16), "4 words of A and an offset in B per k-step, got 1 and 2 steps"),
        ((8, [[0, 0]], 0, [0], kv.bf16), "4 words of A and an offset in B per k-step"),
        ((8, WORDS, 0, [8], kv.bf16), r"steps must be multiples of 16 known at compile time, got \[8\]"),
        ((8, [], 0, [], kv.bf16), "steps must be multiples of 16"),
        ((8, WORDS, 0, [0], kv.f32), "dtype must be one of f16, bf16"),
    ],
)
def test_what_the_tensor_cores_do_not_take_is_refused(arguments, message):
    @kv.kernel(block=128)
    def bad(x: W):
        x[0] = kv.i64(kv.wgmma(*arguments)[0])

    with pytest.raises(KernelError, match=message):
        kv.compile(bad, W, target="sm_90a")


@pytest.mark.parametrize("options", [{"leading": 8}, {"stride": 1 << 18}, {"stride": -16}], ids=str)
def test_a_descriptor_has_whole_chunks_of_16_bytes(options):
    @kv.kernel(block=128)
    def bad(x: W):
        x[0] = kv.wgmma_descriptor(kv.shared(1024, kv.u8, alignment=1024).ptr(), **options)

    with pytest.raises(KernelError, match=rf"{next(iter(options))} must be a multiple of 16 below 2\*\*18"):
        kv.compile(bad, W, target="sm_90a")


def test_a_descriptor_says_where_a_tile_lies():
    @kv.kernel(block=32)
    def describe(x):
        memory = kv.shared(4096, kv.u8, alignment=1024).ptr()
        x[0] = kv.i32(kv.wgmma_descriptor(memory + 2048, leading=8192) - kv.wgmma_descriptor(memory))
        x[1] = kv.i32(kv.wgmma_descriptor(memory, stride=2048) >> 32)

    found = np.zeros(2, np.int32)
    run_block(describe, 32, found, target="sm_90a")
    assert found.tolist() == [(2048 >> 4) + (8192 >> 4 << 16), (2048 >> 4) + (1 << 30)]


@pytest.mark.parametrize("dtype", [kv.bf16, kv.f16], ids=lambda d: d.name)
@pytest.mark.parametrize("columns", [8, 32])
def test_products_under_way_are_waited_for_one_by_one(dtype, columns):
    check_started(interpreted, dtype, columns)


def test_what_cannot_be_under_way_is_refused():
    @kv.kernel(block=128)
    def transposed(x: W):
        x[0] = kv.i64(kv.wgmma_wait(0, kv.wgmma_start(8, WORDS, 0, [0], kv.bf16, trans_a=True))[0][0])

    @kv.kernel(block=128)
    def pending(x: W):
        x[0] = kv.i64(kv.wgmma_wait(-1, kv.wgmma_start(8, WORDS, 0, [0], kv.bf16))[0][0])

    for kernel, message in ((transposed, "transposes A only in shared memory"), (pending, "pending must be an int")):
        with pytest.raises(KernelError, match=message):
            kv.compile(kernel, W, target="sm_90a")
