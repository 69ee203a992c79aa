# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles in kernels: shapes, operators, casts, masks and loops, the operations that they become, what is refused."""

from __future__ import annotations

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


# --- what becomes of them ----------------------------------------------------------------------------


def test_positions_are_not_negative_so_that_quotients_are_shifts():
    def k(out: VECTOR):
        at = kv.tile_index(64) // 4 + kv.tile_index(64) % 4
        out.scatter(at, value=kv.full(64, 1.0))

    text = traced(k)
    assert "arith.shr" in text
    assert "arith.andi" in text
    assert "div" not in text


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
