# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What calls are told apart by: classes, places, and everything of an argument but the address."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import kvarn as kv
from kvarn.runtime import signatures

X = np.zeros((2, 3), np.float32)


def test_calls_that_differ_have_signatures_that_differ():
    calls = [
        (), (None,), (X,), (X, None), (None, X), (X, X), (1,), (1.0,), (True,), (0,), (0.0,), (-0.0,), (X[:1],),
        (X[:, :2],), (X.astype(np.float64),), (X.view(np.int32),), ("a",), (1, None), (None, 1), (None, None),
        (np.zeros(7, np.float32)[1:].reshape(2, 3),),  # at no multiple of 16 bytes
    ]  # fmt: skip
    keys = [signatures.signed(args, prefix)[0] for args in calls for prefix in ("p", ("q", 1))]
    for a, b in itertools.combinations(keys, 2):
        assert a != b


def test_the_same_call_has_one_signature_and_the_values_of_now():
    first, second = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    (a, x), (b, y) = (signatures.signed((v, None, 7, 2.5), ("p",)) for v in (first, second))
    assert a == b
    assert x == [first.ctypes.data, (7,), (2.5,)]
    assert y == [second.ctypes.data, (7,), (2.5,)]


def test_an_array_that_changes_its_shape_in_place_is_seen_with_the_new_one():
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    out = np.empty((6, 2), np.float32)
    kv.ops.sliced_add(rows, rows, 6, out)
    np.testing.assert_array_equal(out, 2 * rows)
    rows.shape, out.shape = (3, 4), (3, 4)
    kv.ops.sliced_add(rows, rows, 3, out)
    np.testing.assert_array_equal(out, 2 * rows)
    rows.dtype = np.int32
    with pytest.raises(TypeError, match="b must have dtype i32, got f32"):
        kv.ops.sliced_add(rows, out, 3, out)
