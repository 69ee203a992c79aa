# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles in kernels: shapes, operators, casts, masks and loops, the operations that they become, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

import kvarn as kv
from kvarn.dialect.layout import CacheSpec
from kvarn.errors import KernelError

VECTOR, MATRIX = kv.Buffer[kv.f32, 1], kv.Buffer[kv.bf16, 2]
CACHE = CacheSpec("paged", kv.bf16, 8, 128, 16)


def traced(function: Any, *specs: Any) -> str:
    """The IR of a kernel; by default of one that takes a buffer of f32."""
    kernel = kv.kernel(block=(128, 1, 1))(function)
    return str(kernel.trace(list(specs or (VECTOR,))))


def shapes_of(text: str, op: str) -> list[str]:
    """The result types of an operation, in the order of the text."""
    return re.findall(rf"{re.escape(op)}.*?(tensor<[^>]*>)$", text, re.M)


# --- what becomes of them ----------------------------------------------------------------------------


def test_a_kernel_with_tiles_is_marked_and_another_is_not():
    def tiles(out: VECTOR):
        out.scatter(kv.tile_index(64), value=kv.full(64, 1.0))

    def scalars(out: VECTOR):
        out[0] = 1.0

    assert "kv.tiled" in traced(tiles)
    assert "kv.tiled" not in traced(scalars)


def test_vectors_broadcast_along_the_dimension_that_none_stands_for():
    def k(out: VECTOR):
        rows, columns = kv.tile_index(64)[:, None], kv.tile_index(32)[None, :]
        seen = columns <= rows
        x = kv.masked(kv.full((64, 32), 0.0), seen)
        out.scatter(kv.tile_index(64), value=x.max(axis=1))

    text = traced(k)
    assert shapes_of(text, "kv.tile_broadcast") == ["tensor<64x32xi32>"] * 2
    assert re.findall(r"dimension = (\d)", text) == ["1", "0"]
    assert 'kv.tile_mask"(' in text


def test_a_scalar_goes_to_every_element():
    def k(out: VECTOR):
        out.scatter(kv.tile_index(64), value=kv.full(64, 1.0) * out[0])

    assert shapes_of(traced(k), "tensor.splat") == ["tensor<64xf32>"]


def test_reductions_leave_the_other_dimension():
    def k(out: VECTOR):
        x = kv.full((64, 32), 1.0)
        out.scatter(kv.tile_index(64), value=x.max(axis=1) + x.sum(axis=1))
        out.scatter(kv.tile_index(32), value=x.min(axis=0))

    assert shapes_of(traced(k), "kv.tile_reduce") == ["tensor<64xf32>", "tensor<64xf32>", "tensor<32xf32>"]


@pytest.mark.parametrize(
    ("cast", "op"), [(kv.bf16, "arith.truncf"), (kv.i32, "arith.fptosi"), (kv.f16, "arith.truncf")], ids=repr
)
def test_casts_take_tiles(cast, op):
    def k(out: VECTOR):
        out.scatter(kv.tile_index(64), value=kv.f32(cast(kv.full(64, 1.0) * out[0])))

    assert shapes_of(traced(k), op), "no conversion of a tile"


def test_math_and_where_take_tiles():
    def k(out: VECTOR):
        x = kv.full(64, 1.0) * out[0]
        x = kv.where(x > 0.5, kv.math.exp2(x), kv.math.max(-x, 0.0))
        out.scatter(kv.tile_index(64), value=x, mask=x < 3.0)

    text = traced(k)
    for op in ("math.exp2", "arith.maxnumf", "arith.negf"):
        assert shapes_of(text, op) == ["tensor<64xf32>"]
    assert "arith.select" in text


def test_positions_are_not_negative_so_that_quotients_are_shifts():
    def k(out: VECTOR):
        at = kv.tile_index(64) // 4 + kv.tile_index(64) % 4
        out.scatter(at, value=kv.full(64, 1.0))

    text = traced(k)
    assert "arith.shr" in text
    assert "arith.andi" in text
    assert "div" not in text


def test_a_loop_carries_tiles():
    def k(out: VECTOR):
        m, o = kv.full(64, 0.0), kv.full((64, 32), 0.0)
        for j in range(0, out.shape[0]):
            m, o = m + kv.f32(j), o * m[:, None]
        out.scatter(kv.tile_index(64), value=m + o.sum(axis=1))

    assert re.search(r"scf.for .* -> \(tensor<64xf32>, tensor<64x32xf32>\)", traced(k))


def test_a_branch_hands_on_tiles():
    def k(out: VECTOR):
        x = kv.full(64, 1.0)
        if out[0] > 0.0:
            x = x * 2.0
        out.scatter(kv.tile_index(64), value=x)

    assert re.search(r"scf.if .* -> \(tensor<64xf32>\)", traced(k))


def test_products_take_transposes_and_accumulators():
    def k(x: MATRIX, out: VECTOR):
        rows = kv.tile_index(64)
        a = x.load_rows(rows, mask=rows < 5, columns=32)
        s = kv.dot(a, a.T)
        o = kv.dot(kv.bf16(s), a, kv.full((64, 32), 0.0))
        out.scatter(rows, value=o.sum(axis=1))

    text = traced(k, MATRIX, VECTOR)
    assert shapes_of(text, '"kv.dot"') == ["tensor<64x64xf32>", "tensor<64x32xf32>"]
    assert re.findall(r"transpose_b = (\w+)", text) == ["true", "false"]
    assert shapes_of(text, "kv.tile_load_rows") == ["tensor<64x32xbf16>"]


def test_caches_and_buffers_give_tiles():
    def k(cache: kv.PagedKVCache, table: kv.Buffer[kv.i32, 1], out: MATRIX):
        rows = kv.tile_index(64)
        at = table.gather(rows, mask=rows < table.shape[0])
        x = cache.tile(0, 0, 0, 100, rows=64, columns=64)
        out.store_rows(at, value=x, mask=at >= 0)

    text = traced(k, CACHE, kv.Buffer[kv.i32, 1], MATRIX)
    assert shapes_of(text, '"kv.tile_load"') == ["tensor<64x64xbf16>"]
    assert 'tail = "zero"' in text
    assert shapes_of(text, '"kv.tile_gather"') == ["tensor<64xi32>"]
    assert "kv.tile_store_rows" in text


def test_an_index_that_is_a_tile_gathers_and_scatters():
    def written(out: VECTOR):
        i = kv.tile_index(64)
        out[i] = out[i + 1] * 2.0

    def spelled_out(out: VECTOR):
        i = kv.tile_index(64)
        out.scatter(i, value=out.gather(i + 1) * 2.0)

    assert traced(written).replace("written", "spelled_out") == traced(spelled_out)


# --- what is refused ---------------------------------------------------------------------------------


def _matrix(*shape: int, dtype: Any = kv.f32) -> Any:
    return kv.full(shape, 1.0, dtype)


REFUSED: dict[str, tuple[Any, str]] = {
    "extents of one": (lambda out: kv.full((64, 1), 1.0), "one or two extents of at least 2, known at compile time"),
    "three dimensions": (lambda out: kv.full((4, 4, 4), 1.0), "one or two extents"),
    "extents of run time": (lambda out: kv.full((out.shape[0], 32), 1.0), "known at compile time"),
    "positions of one": (lambda out: kv.tile_index(1), "one or two extents of at least 2"),
    "two shapes": (lambda out: _matrix(64, 32) + _matrix(32, 64), r"\+ of tiles of shapes \(64, 32\) and"),
    "a vector beside a matrix": (lambda out: _matrix(64, 32) * kv.full(64, 1.0), r"write x\[:, None\] or x\[None, :\]"),
    "a vector of the wrong length": (lambda out: kv.full(64, 1.0)[None, :] + _matrix(32, 32), "the shapes must match"),
    "two types": (lambda out: _matrix(64, 32) * kv.tile_index(64)[:, None], r"write kv.f32\(x\) around the i32"),
    "what a thread holds": (lambda out: kv.full(64, 1.0) + kv.vector(kv.f32, 4), "does not mix with tiles"),
    "a reduction of a vector": (lambda out: kv.full(64, 1.0).max(axis=1), "reductions take a matrix and axis 0 or 1"),
    "a reduction of a column": (lambda out: kv.full(64, 1.0)[:, None].max(axis=1), "reductions take a matrix"),
    "an axis that is none": (lambda out: _matrix(64, 32).sum(axis=2), "axis 0 or 1, got .* and 2"),
    "an element": (lambda out: _matrix(64, 32)[0], r"indexed as x\[:, None\] or x\[None, :\] of a vector only"),
    "a row of a matrix": (lambda out: _matrix(64, 32)[:, None], "of a vector only"),
    "iteration": (lambda out: list(kv.full(64, 1.0)), "cannot be iterated: its elements lie in many threads"),
    "the transpose of a vector": (lambda out: kv.full(64, 1.0).T, "only a matrix has a transpose"),
    "a product's inner extents": (lambda out: kv.dot(_matrix(64, 32), _matrix(64, 32)), "inner extents must match"),
    "a product of two types": (lambda out: kv.dot(_matrix(64, 32), _matrix(64, 32, dtype=kv.bf16).T), "one float type"),
    "a product of integers": (lambda out: kv.dot(*[kv.full((32, 32), 1, kv.i32)] * 2), "one float type, got i32"),
    "a product of a vector": (lambda out: kv.dot(kv.full(64, 1.0), _matrix(64, 32)), "must be a matrix tile"),
    "a product's accumulator": (
        lambda out: kv.dot(_matrix(64, 32), _matrix(64, 32).T, _matrix(64, 32)), r"f32 tile of shape \(64, 64\)"
    ),
    "a mask of a vector": (lambda out: kv.masked(_matrix(64, 32), kv.tile_index(64) < 3), r"write x\[:, None\]"),
    "a mask of numbers": (lambda out: kv.masked(_matrix(64, 32), _matrix(64, 32)), "a mask must be a bool tile"),
    "masked integers": (lambda out: kv.masked(kv.full((64, 32), 1, kv.i32), True), "kv.masked takes a float tile"),
    "a tile in place of an element": (
        lambda out: out.__setitem__(0, kv.full(64, 1.0)), r"got a f32 tile of shape \(64,\): use .scatter"
    ),
    "a tile as an index of an element": (lambda out: out.store(kv.tile_index(64), value=kv.vector(kv.f32, 4)),
        r"the index must be an integer, got a i32 tile of shape \(64,\)"),
    "more values than places": (
        lambda out: out.scatter(kv.tile_index(32), value=kv.full(64, 1.0)), r"shapes \(32,\) and \(64,\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_must_hold(name):
    body, message = REFUSED[name]

    def k(out: VECTOR):
        body(out)

    with pytest.raises(KernelError, match=message):
        traced(k)
