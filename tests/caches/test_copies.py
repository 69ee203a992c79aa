# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A copy of an object over memory, by ``copy`` or ``pickle``, has memory of its own, or is refused with another way."""

import copy
import pickle

import numpy as np
import pytest

import kvarn as kv
from kvarn.runtime import buffers

N, L, P, H, D = 5, 2, 4, 2, 8
LENGTHS = np.array([3, 5], np.uint32)
TABLE = np.array([[0, 1, 4, 4], [2, 3, 4, 4]], np.uint32)


def filled(*shape, dtype=np.float32):
    return (np.arange(np.prod(shape)) % 97).reshape(shape).astype(dtype)


def paged(**options):
    return kv.PagedKVCacheCollection(filled(N, 2, L, P, H, D), LENGTHS.copy(), TABLE.copy(), 2, 16, **options)


def quantized():
    blocks, scales = filled(N, 2, L, P, H, D, dtype=np.int8), filled(N, 2, L, P, H, 4)
    return kv.PagedKVCacheCollection(blocks, LENGTHS.copy(), TABLE.copy(), 2, 16, scales, 2)


def fa3():
    return kv.PagedKVCacheFA3FallbackCollection(
        filled(2, N, P, H, D), LENGTHS.astype(np.int32), np.stack([TABLE, TABLE]).astype(np.int32), 2, 16
    )


def continuous():
    return kv.ContinuousBatchingKVCacheCollection(
        filled(3, 2, L, 16, H, D), LENGTHS.copy(), np.array([2, 0], np.uint32), 2, 16
    )


def foreign():
    return kv.ForeignPages.flashinfer(filled(N, 2, H, P, D), LENGTHS.copy(), TABLE.copy(), "HND", max_seq_length=2)


def foreign_pair():
    both = filled(2, N, P, H, D)
    return kv.ForeignPages.vllm((both[0], both[1]), LENGTHS.copy(), TABLE.copy(), max_cache_length=16)


def sglang():
    return kv.ForeignPages.sglang((filled(20, H, D), filled(20, H, D)), LENGTHS.copy(), TABLE.copy(), page_size=P)


COLLECTIONS = (paged, quantized, fa3, continuous, foreign, foreign_pair, sglang)
WAYS = (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: pickle.loads(pickle.dumps(x, 2)))


def parts(collection):
    """Every buffer of a collection, as views of its memory."""
    caches = [f(layer) for f in (collection.get_key_cache, collection.get_value_cache) for layer in range(1)]
    found = [cache.blocks for cache in caches]
    found += [cache.scales for cache in caches if cache.scales is not None]
    return [*found, caches[0].cache_lengths, caches[0].lookup_table]


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "pickle", "pickle2"])
@pytest.mark.parametrize("make", COLLECTIONS, ids=lambda f: f.__name__)
def test_a_copied_collection_is_equal_and_shares_no_memory(make, way):
    first = make()
    first.get_key_cache(0)  # which the collection keeps
    second = way(first)
    assert type(second) is type(first)
    assert repr(second) == repr(first)
    assert second.spec == first.spec
    for one, other in zip(parts(first), parts(second), strict=True):
        np.testing.assert_array_equal(one, other)
        assert not np.shares_memory(one, other)
    parts(second)[0][:] = 1
    np.testing.assert_array_equal(parts(first)[0], parts(make())[0])


def test_what_is_copied_together_stays_together():
    first = paged()
    second, blocks = copy.deepcopy((first, first.blocks))
    blocks[:] = 7
    assert (second.get_key_cache(1).blocks == 7).all()
    assert not (first.blocks == 7).all()


def views():
    first = paged()
    yield first.get_key_cache(0)
    yield kv.PagedKVCache(filled(N, P, H, D), LENGTHS, TABLE, 2, 16)
    yield kv.KVCacheMHAOperand(first.get_key_cache(0))
    yield kv.KVCacheScalesMHAOperand(quantized().get_key_cache(0))
    yield first.get_key_cache(0).create_tma_tile(tile_rows=4, swizzle="32B")
    yield buffers.view(first.blocks)


@pytest.mark.parametrize("way", [copy.copy, *WAYS], ids=["copy", "deepcopy", "pickle", "pickle2"])
@pytest.mark.parametrize("number", range(6))
def test_a_view_of_a_pool_has_no_copies(number, way):
    with pytest.raises(TypeError, match=r"has no copies and cannot be pickled, since it .*(copy|copied|anew)"):
        way(list(views())[number])


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "pickle", "pickle2"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: kv.LayoutTensorMHAOperand(filled(2, 6, H, D)),
        lambda: kv.LayoutTensorMHAOperand(filled(2, 6, H, D), None, LENGTHS.copy()),
        lambda: kv.LayoutTensorMHAOperand(filled(2, 6, H, D, dtype=np.int8), filled(2, 6, H, 4), LENGTHS.copy()),
        lambda: kv.RaggedMHAOperand(filled(6, H, D), np.array([0, 2, 6], np.uint32)),
        lambda: kv.RaggedMHAOperand(filled(6, H, D, dtype=np.int8), np.array([0, 2, 6], np.uint32), filled(6, H, 4)),
    ],
    ids=["dense", "lengths", "scales", "ragged", "ragged scales"],
)
def test_a_copied_operand_over_buffers_is_equal_and_shares_no_memory(make, way):
    first = make()
    second = way(first)
    assert repr(second) == repr(first)
    assert second.spec == first.spec
    assert not np.shares_memory(first.buffer, second.buffer)
    np.testing.assert_array_equal(first.buffer, second.buffer)
    assert [second.cache_length(b) for b in range(2)] == [first.cache_length(b) for b in range(2)]


class Exported:
    """Memory that is known by its protocol alone, so that a copy of the object is over the same memory."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "pickle", "pickle2"])
def test_a_collection_over_memory_that_a_copy_may_share_is_not_copied(way):
    pool = Exported(filled(N, 2, L, P, H, D))
    with pytest.raises(TypeError, match="got memory of Exported, whose copies may be the same memory"):
        way(kv.PagedKVCacheCollection(pool, LENGTHS, TABLE, 2, 16))


def managers():
    params = kv.KVCacheStaticParams(H, D)
    sizes = {"params": params, "num_pages": 8, "page_size": P, "dtype": "f32"}
    yield kv.PagedKVCacheManager(num_layers=L, prefix_caching=True, **sizes)
    groups = [kv.LayerGroup([0], **sizes), kv.LayerGroup([1], window=4, **sizes)]
    yield kv.HybridKVCacheManager(groups, prefix_caching=True)


def stepped(manager, request, tokens):
    """The pages of a request that a step has filled with its tokens."""
    manager.claim(request, tokens)
    manager.alloc(request)
    manager.step([request])
    pools = manager.managers if hasattr(manager, "managers") else (manager,)
    for m in pools:
        for page in set(m.pages(request)) - {m.null_page}:
            m.blocks[page] = tokens[0]
    return [m.pages(request) for m in pools]


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "pickle", "pickle2"])
@pytest.mark.parametrize("number", range(2))
def test_a_copied_manager_goes_on_over_a_pool_of_its_own(number, way):
    first = list(managers())[number]
    before = stepped(first, "a", [1] * 9)
    second = way(first)
    pools = [m.managers if hasattr(m, "managers") else (m,) for m in (first, second)]
    assert stepped(second, "b", [2] * 9) == stepped(first, "c", [3] * 9)  # both take the same free pages
    for one, other, pages in zip(*pools, before, strict=True):
        assert not np.shares_memory(one.blocks, other.blocks)
        assert other.pages("a") == pages
        assert "c" not in other
        assert "b" not in one
        one.check()
        other.check()
        page = one.pages("c")[-1]
        assert (one.blocks[page] == 3).all()
        assert (other.blocks[page] == 2).all()
    if number == 0:  # what copies pages is bound to the pool of the copy
        second.fork("a", "d")
        second.extend("d", [5])
        second.alloc("d")
        assert (second.blocks[second.pages("d")[-1]] == 1).all()


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "pickle", "pickle2"])
@pytest.mark.parametrize("name", ["copy_pages", "upload"])
def test_a_manager_with_a_function_of_its_callers_is_not_copied(name, way):
    bound = {name: lambda *arrays: arrays[0]}
    manager = kv.PagedKVCacheManager(filled(N, 2, L, P, H, D), **bound)
    with pytest.raises(TypeError, match=f"while {name} is bound to its memory: make another manager"):
        way(manager)


@pytest.mark.parametrize(
    "make", [*COLLECTIONS, lambda: next(managers()), lambda: list(managers())[1], lambda: kv.PageSummaries(paged())]
)
def test_a_shallow_copy_is_refused(make):
    with pytest.raises(TypeError, match=r"has no shallow copies.*use the object itself, or copy.deepcopy"):
        copy.copy(make())


def test_page_summaries_copied_have_memory_of_their_own():
    first = kv.PageSummaries(paged())
    second = copy.deepcopy(first)
    second.data[:] = 1
    assert not first.data.any()
    assert second.kind == first.kind
