# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments of managers and collections that are no count, dtype or salt are refused by name, with what was got."""

import numpy as np
import pytest

import kvarn as kv

PARAMS = kv.KVCacheStaticParams(2, 16)
LENGTHS, TABLE = np.array([1], np.uint32), np.array([[0, 1]], np.uint32)
NO_COUNTS = [0, -1, -2, 1.5, "x", True, None, 2**40, np.float32(2), [1]]


def manager(**given):
    sizes = {"params": PARAMS, "num_layers": 1, "num_pages": 4, "page_size": 4, "dtype": "f32"}
    return kv.PagedKVCacheManager(**{**sizes, **given})


def collection(granularity):
    blocks, scales = np.zeros((4, 2, 1, 4, 2, 16), np.int8), np.zeros((4, 2, 1, 4, 2, 4), np.float32)
    return kv.PagedKVCacheCollection(blocks, LENGTHS, TABLE, 1, 4, scales, granularity)


COUNTS = {
    "num_pages": lambda n: manager(num_pages=n),
    "num_layers": lambda n: manager(num_layers=n),
    "page_size": lambda n: manager(page_size=n),
    "max_batch_size": lambda n: manager(max_batch_size=n),
    "window": lambda n: manager(window=n),
    "chunk": lambda n: manager(chunk=n),
    "quantization_granularity": collection,
    "the granularity of a manager": lambda n: manager(dtype="i8", scale_dtype="f32", quantization_granularity=n),
    "num_heads": lambda n: kv.KVCacheStaticParams(n, 16),
    "head_size": lambda n: kv.KVCacheStaticParams(2, n),
}
MAY_BE_NONE = ("max_batch_size", "window", "chunk")


@pytest.mark.whole
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_positive_integer(name):
    said = "quantization_granularity" if " " in name else name
    for value in NO_COUNTS:
        if value is None and name in MAY_BE_NONE:
            continue
        with pytest.raises((TypeError, ValueError), match=f"{said} must be|needs blocks, or params, num_layers"):
            COUNTS[name](value)
    COUNTS[name](np.int64(4))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", np.float16, np.dtype("f4"), kv.bf16, "f8e4m3"])
def test_a_dtype_may_be_given_by_any_of_its_names(dtype):
    assert manager(dtype=dtype).cache_spec.dtype.name in ("f16", "bf16", "f32", "f8e4m3")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "nope"}, "dtype must be"),
        ({"dtype": 16}, "dtype must be"),
        ({"dtype": "f64"}, "must be|must have"),
        ({"table_dtype": "nope"}, "table_dtype must be uint32 or int32, got 'nope'"),
        ({"table_dtype": None}, "table_dtype must be uint32 or int32, got None"),
        ({"table_dtype": kv.i32}, "table_dtype must be uint32 or int32"),
        ({"params": "x"}, "params must be KVCacheStaticParams, got str"),
        ({"salt": 3}, "salt must be a str or bytes, got int"),
    ],
)
def test_what_is_no_dtype_salt_or_params_is_refused(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        manager(**given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kv.HybridKVCacheManager(["x"]), "groups must be kv.LayerGroup objects, got a str as group 0"),
        (lambda: kv.HybridKVCacheManager([]), "groups must have a group of layers, got none"),
        (lambda: kv.LayerGroup(3), "layers must be a sequence of int, got 3"),
        (lambda: kv.LayerGroup("01"), "layers must be a sequence of int, got '01'"),
    ],
)
def test_groups_are_of_layers(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
