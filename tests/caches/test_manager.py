# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The page manager: tables, sharing, eviction, and what it refuses."""

import numpy as np
import pytest

import kvarn as kv
from kvarn.caches import KVCacheStaticParams
from kvarn.dialect import dtypes
from kvarn.paging.manager import InsufficientBlocksError, PagedKVCacheManager


def manager(pages=8, page_size=4, **options):
    return PagedKVCacheManager(
        params=KVCacheStaticParams(1, 8), num_layers=2, num_pages=pages, page_size=page_size, dtype="f32", **options
    )


def advance(m, *requests, then=()):
    """One step of requests, followed by a known token each."""
    for r in requests:
        m.alloc(r)
    inputs = m.runtime_inputs(requests)
    for r in requests:
        m.extend(r, then)
    m.step(requests)
    m.check()
    return inputs


def test_pool_has_a_null_page_more():
    m = manager(pages=8)
    assert m.blocks.shape == (9, 2, 2, 4, 1, 8)
    assert (m.total_num_pages, m.null_page, m.num_free_pages, m.page_size, m.num_layers) == (8, 8, 8, 4, 2)
    mla = PagedKVCacheManager(params=KVCacheStaticParams(1, 8, True), num_layers=1, num_pages=2, dtype="bf16")
    assert mla.blocks.shape == (3, 1, 1, 128, 1, 8)
    quantized = PagedKVCacheManager(
        params=KVCacheStaticParams(2, 8), num_layers=1, num_pages=2, dtype="f8e4m3", scale_dtype="f32",
        quantization_granularity=4,
    )  # fmt: skip
    assert quantized.scales.shape == (3, 2, 1, 128, 2, 2)
    given = PagedKVCacheManager(m.blocks)
    assert (given.total_num_pages, given.page_size) == (8, 4)


@pytest.mark.parametrize(("pages", "columns"), [(1, 24), (8, 24), (9, 32), (37, 56)])
def test_table_is_padded_with_the_null_page(pages, columns):
    m = manager(pages=40)
    m.claim("a", 4 * pages)
    m.claim("b", 1)
    inputs = advance(m, "a", "b")
    assert inputs.lookup_table.shape == (2, columns)
    assert inputs.lookup_table.dtype == np.uint32
    assert inputs.lookup_table.flags.c_contiguous
    assert inputs.lookup_table[0, :pages].tolist() == list(m.pages("a"))
    assert (inputs.lookup_table[0, pages:] == 40).all()
    assert (inputs.lookup_table[1, 1:] == 40).all()
    assert inputs.null_page == 40


def test_a_life():
    m = manager(table_dtype=np.int32)
    m.claim("r", [1, 2, 3, 4, 5])
    first = advance(m, "r", then=[6])
    assert (m.processed("r"), m.active("r"), len(m.pages("r"))) == (5, 1, 2)
    assert first.cache_lengths.tolist() == [0]
    assert first.row_offsets.tolist() == [0, 5]
    assert (first.max_prompt_length, first.max_cache_length) == (5, 5)
    m.claim("s", [7, 8])
    both = advance(m, "s", "r", then=[9])
    assert both.cache_lengths.tolist() == [0, 5]
    assert both.row_offsets.tolist() == [0, 2, 3]
    assert both.row_offsets.dtype == both.lookup_table.dtype == np.int32
    assert (both.max_prompt_length, both.max_cache_length) == (2, 6)
    assert both.collection.get_key_cache(1).row_idx(1, 5) == m.pages("r")[1] * 16 + 1
    assert both.collection.spec.cache == m.cache_spec
    m.release("r")
    assert m.num_free_pages == 7
    m.check()
    assert "r" not in m
    assert len(m) == 1


def test_chunked_prefill_and_drafts():
    m = manager()
    m.claim("r", 10)
    m.alloc("r", 4)
    assert m.runtime_inputs(["r"]).row_offsets.tolist() == [0, 4]
    m.step(["r"])
    m.alloc("r", 3)
    assert len(m.pages("r")) == 2
    m.step(["r"])
    m.alloc("r")
    m.step(["r"])
    m.extend("r", 1)
    m.alloc("r")
    with pytest.raises(ValueError, match="num_draft = 3"):
        m.runtime_inputs(["r"], num_draft=3)
    m.alloc("r", num_draft=3)
    inputs = m.runtime_inputs(["r"], num_draft=3)
    assert inputs.row_offsets.tolist() == [0, 4]
    assert inputs.max_cache_length == 14
    with pytest.raises(ValueError, match="at most 1"):
        m.step(["r"], {"r": 3})
    m.extend("r", 3)
    m.step(["r"], {"r": 3})  # one real token, two accepted drafts
    assert (m.processed("r"), m.active("r")) == (13, 1)


def test_prefix_is_reused_and_leaves_a_token():
    m = manager(prefix_caching=True)
    prompt = list(range(12))
    m.claim("a", prompt)
    advance(m, "a", then=[99])
    assert m.num_cached_pages == 3
    m.claim("b", prompt)
    assert m.alloc("b") == 8  # not 12: the last token is processed again, for its logits
    assert m.pages("b")[:2] == m.pages("a")[:2]
    assert m.pages("b")[2] != m.pages("a")[2]
    inputs = m.runtime_inputs(["b"])
    assert inputs.cache_lengths.tolist() == [8]
    assert inputs.row_offsets.tolist() == [0, 4]
    m.step(["b"])
    assert m.pages("b") == m.pages("a"), "the third page had the same content: one of the two was given back"
    assert m.num_free_pages == 5
    m.check()
    m.claim("c", [*prompt[:4], 77, *prompt[5:]])
    assert m.alloc("c") == 4
    m.claim("d", prompt, salt="other")
    assert m.alloc("d") == 0


def test_one_active_token_looks_nothing_up():
    m = manager(prefix_caching=True)
    m.claim("a", [1, 2, 3, 4])
    advance(m, "a")
    m.claim("b", [1])
    assert m.alloc("b") == 0
    m.claim("c", [1, 2, 3, 4])
    assert m.alloc("c") == 0, "a hit of the only page would leave nothing to process"


def test_unknown_tokens_are_never_hashed():
    m = manager(prefix_caching=True)
    m.claim("a", [1, 2, 3])
    advance(m, "a", then=1)
    advance(m, "a", then=1)
    assert m.processed("a") == 4
    assert m.num_cached_pages == 0
    m.realise("a", [4])
    assert m.tokens("a") == (1, 2, 3, 4, None)
    advance(m, "a")
    assert m.num_cached_pages == 1
    m.claim("b", [1, 2, 3, 4, 5])
    assert m.alloc("b") == 4
    with pytest.raises(ValueError, match="at most the 1"):
        m.realise("a", [5, 6])


def test_released_pages_stay_cached_until_evicted_least_recent_first():
    m = manager(pages=4, prefix_caching=True)
    m.claim("a", [1] * 8)
    advance(m, "a")
    first, second = m.pages("a")
    m.release("a")
    assert (m.num_free_pages, m.num_cached_pages) == (4, 2)
    m.claim("b", 8)  # the two pages that cache nothing go first
    m.alloc("b")
    assert set(m.pages("b")).isdisjoint({first, second})
    m.claim("c", 4)  # then the tail of what was released
    m.alloc("c")
    assert m.pages("c") == (second,)
    m.check()
    m.release("c")
    m.claim("d", [1] * 8)
    assert m.alloc("d") == 4
    assert m.pages("d")[0] == first
    m.check()


def test_failed_alloc_changes_nothing():
    m = manager(pages=4, prefix_caching=True)
    m.claim("a", [1] * 9)
    advance(m, "a")
    m.claim("b", [1] * 16)
    state = (m.pages("a"), m.num_free_pages, m.num_cached_pages)
    with pytest.raises(InsufficientBlocksError, match=r"needs 2 more pages.*1 of 4 are free") as caught:
        m.alloc("b")
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert (m.pages("a"), m.num_free_pages, m.num_cached_pages) == state
    assert m.pages("b") == ()
    assert m.processed("b") == 0
    m.check()
    m.release("a")
    assert m.alloc("b") == 8
    m.claim("c", 17)
    with pytest.raises(InsufficientBlocksError, match="5 pages of 4"):
        m.alloc("c")


def test_fork_copies_on_write():
    m = manager()
    m.claim("a", [1, 2, 3, 4, 5, 6])
    advance(m, "a", then=[7])
    m.blocks[list(m.pages("a"))] = np.arange(2)[:, None, None, None, None, None] + 1
    m.fork("a", "b")
    assert m.pages("b") == m.pages("a")
    assert m.num_free_pages == 6
    m.alloc("b")
    shared, own = m.pages("b")
    assert (shared, own) == (m.pages("a")[0], m.pages("b")[1])
    assert own != m.pages("a")[1]
    assert (m.blocks[own] == 2).all()
    m.check()
    m.alloc("a")  # alone with its page now: no copy
    assert m.num_free_pages == 5
    m.runtime_inputs(["a", "b"])
    m.fork("a", "c")
    with pytest.raises(ValueError, match="call alloc again after a fork"):
        m.runtime_inputs(["a"])
    m.alloc("a")
    m.runtime_inputs(["a"])
    for r in "abc":
        m.release(r)
    assert m.num_free_pages == 8
    m.check()


def test_fork_at_the_end_of_a_page_needs_no_copy():
    m = manager()
    m._copy_pages = None
    m.claim("a", 4)
    advance(m, "a", then=1)
    m.fork("a", "b")
    m.alloc("b")
    m.alloc("a")
    assert m.pages("a")[0] == m.pages("b")[0]
    assert m.pages("a")[1] != m.pages("b")[1]
    advance(m, "a", then=1)
    with pytest.raises(ValueError, match="needs copy_pages"):
        m.fork("a", "c")
    assert "c" not in m


def test_failed_copy_changes_no_request():
    def copy_pages(source, destination):
        raise RuntimeError("device lost")

    m = manager(copy_pages=copy_pages)
    m.claim("a", 3)
    advance(m, "a", then=1)
    m.fork("a", "b")
    with pytest.raises(RuntimeError, match="device lost"):
        m.alloc("b")
    assert m.pages("b") == m.pages("a")
    assert m.num_free_pages == 7
    m.check()


def test_page_that_a_forked_sibling_completed_is_a_hit():
    m = manager(prefix_caching=True, pages=3)
    m.claim("a", [1, 2, 3])
    advance(m, "a", then=[4, 5])
    m.fork("a", "b")
    m.release("b")
    m.alloc("a")
    m.fork("a", "b")  # shares the page that the step of "a" completes
    m.step(["a"])
    m.release("a")
    m.claim("filler", 4)
    m.alloc("filler")
    assert m.num_free_pages == 1
    m.extend("b", [6, 7, 8, 9])
    with pytest.raises(InsufficientBlocksError):
        m.alloc("b")
    m.check()
    assert m.alloc("b", 4) == 1
    m.check()


def test_page_that_a_released_sibling_completed_is_not_written():
    m = manager(prefix_caching=True)
    m.claim("a", [1, 2, 3])
    advance(m, "a", then=[4])
    m.alloc("a")
    m.fork("a", "b")
    m.step(["a"])  # completes and caches the page that "b" still holds
    m.release("a")
    page = m.pages("b")[0]
    m._requests["b"].tokens[3:] = [9, 9]  # sampled otherwise
    m.alloc("b")
    assert m.pages("b")[0] != page
    assert m.num_cached_pages == 1
    m.check()


def test_pages_without_content_are_evicted_before_cached_ones():
    m = manager(pages=4, prefix_caching=True)
    m.claim("a", [1] * 9)
    advance(m, "a")
    *cached, partial = m.pages("a")
    m.claim("b", 4)
    m.alloc("b")
    last = m.pages("b")[0]
    m.release("a")
    m.release("b")
    m.claim("c", 8)
    m.alloc("c")
    assert set(m.pages("c")) == {partial, last}
    assert m.num_cached_pages == len(cached)


def test_a_hit_that_saves_nothing_is_left_alone():
    m = manager(prefix_caching=True)
    m.claim("late", 8)
    advance(m, "late", then=[7, 7])
    m.claim("a", [1] * 5)
    advance(m, "a")
    m.realise("late", [1] * 8)
    own = m.pages("late")
    assert m.alloc("late") == 0
    assert m.processed("late") == 8
    assert m.pages("late")[:2] == own
    m.step(["late"])
    assert m.pages("late")[0] == m.pages("a")[0]
    m.check()


def test_evicted_content_is_forgotten():
    m = manager(pages=2, prefix_caching=True)
    m.claim("a", [1] * 8)
    advance(m, "a")
    m.release("a")
    m.claim("b", [2] * 8)
    advance(m, "b")
    m.release("b")
    assert m.num_cached_pages == 2
    m.claim("c", [1] * 8)
    assert m.alloc("c") == 0
    m.check()


def test_free_pages_that_are_hits_are_not_free_for_the_rest():
    m = manager(pages=3, prefix_caching=True)
    m.claim("a", [1] * 8)
    advance(m, "a")
    m.release("a")
    m.claim("b", [1] * 13)
    with pytest.raises(InsufficientBlocksError, match=r"needs 2 more pages.*but 1 of 3 are free"):
        m.alloc("b")
    assert m.alloc("b", 1) == 8


def test_dummy_requests_own_the_null_page():
    m = manager(max_batch_size=3)
    m.claim("a", 3)
    m.claim("pad", dummy=True)
    m.claim("pad2", dummy=True)
    inputs = advance(m, "a", "pad", "pad2")
    assert inputs.row_offsets.tolist() == [0, 3, 4, 5]
    assert inputs.cache_lengths.tolist() == [0, 0, 0]
    assert (inputs.lookup_table[1:] == m.null_page).all()
    assert m.num_free_pages == 7
    advance_again = m.runtime_inputs(["pad"])
    assert advance_again.cache_lengths.tolist() == [0]
    m.release("pad")
    m.check()
    with pytest.raises(ValueError, match="dummy"):
        m.fork("pad2", "x")


def test_upper_bounds_for_graphs():
    m = manager()
    m.claim("a", 3)
    m.alloc("a")
    inputs = m.runtime_inputs(["a"], max_prompt_length=8, max_cache_length=32)
    assert (inputs.max_prompt_length, inputs.max_cache_length) == (8, 32)
    assert inputs.lookup_table.shape == (1, 24)
    assert inputs.row_offsets.tolist() == [0, 3]
    for option, match in (({"max_prompt_length": 2}, "at least the step's 3"), ({"max_cache_length": 2}, "at least"),
                          ({"max_cache_length": 33}, "fit the pool's 32 tokens")):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            m.runtime_inputs(["a"], **option)


def test_upload_gets_fresh_arrays():
    seen = []
    m = manager(upload=lambda array: seen.append(array) or array.copy())
    m.claim("a", 3)
    inputs = advance(m, "a", then=1)
    again = advance(m, "a")
    assert len(seen) == 6
    assert not any(np.shares_memory(x, y) for x in seen[:3] for y in seen[3:])
    assert inputs.collection.lookup_table is not inputs.lookup_table
    assert again.uploaded_row_offsets.tolist() == [0, 1]


def test_life_cycle_mistakes():
    m = manager(max_batch_size=1)
    m.claim("a", 2)
    with pytest.raises(ValueError, match="claimed twice"):
        m.claim("a")
    for call in (lambda: m.release("x"), lambda: m.alloc("x"), lambda: m.runtime_inputs(["x"]), lambda: m.step(["x"]),
                 lambda: m.extend("x", [1]), lambda: m.fork("x", "y"), lambda: m.pages("x")):  # fmt: skip
        with pytest.raises(ValueError, match="'x' must be claimed first"):
            call()
    with pytest.raises(ValueError, match="call alloc before"):
        m.runtime_inputs(["a"])
    m.alloc("a")
    with pytest.raises(ValueError, match="differ from one another"):
        m.runtime_inputs(["a", "a"])
    m.claim("b", 1)
    m.alloc("b")
    with pytest.raises(ValueError, match="max_batch_size = 1"):
        m.runtime_inputs(["a", "b"])
    m.step(["a"])
    with pytest.raises(ValueError, match="no token to process"):
        m.alloc("a")
    with pytest.raises(ValueError, match="claimed twice"):
        m.fork("a", "b")
    with pytest.raises(TypeError, match="max_new must be an integer"):
        m.alloc("b", 1.5)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, ValueError, "needs blocks, or params"),
        ({"blocks": np.zeros((1, 2, 1, 4, 1, 8), np.float32)}, ValueError, "besides the null page"),
        ({"blocks": np.zeros((3, 2, 1, 4, 1, 8), np.float32), "num_pages": 2}, ValueError, "are given by blocks"),
        ({"blocks": np.zeros((3, 2, 4, 1, 8), np.float32)}, ValueError, "6 dimensions"),
        ({"blocks": np.zeros((3, 2, 1, 4, 1, 8), np.float32), "table_dtype": np.int64}, TypeError, "uint32 or int32"),
        ({"blocks": np.zeros((3, 2, 1, 4, 1, 8), np.int8), "scales": np.zeros((3, 2, 1, 4, 1, 3), np.float32),
          "quantization_granularity": 3}, ValueError, "must divide the head size 8, got 3"),
        ({"blocks": np.zeros((3, 2, 1, 4, 1, 8), np.float32), "max_batch_size": 0}, ValueError, "must be positive"),
    ],
)  # fmt: skip
def test_constructor_refuses(options, error, match):
    with pytest.raises(error, match=match):
        PagedKVCacheManager(**options)


def test_storage_types():
    for name in ("bf16", "f8e4m3", "i8"):
        m = PagedKVCacheManager(params=KVCacheStaticParams(2, 16), num_layers=1, num_pages=2, dtype=name)
        assert m.blocks.dtype == dtypes.of(name).numpy


@pytest.mark.parametrize("page_size", [4, 16])
def test_one_path_of_a_tree_of_drafts_is_kept_also_by_forks(page_size):
    """What the pool holds of a token is its number, so that every token can be found again."""
    m = kv.PagedKVCacheManager(
        params=kv.KVCacheStaticParams(1, 2), num_layers=2, num_pages=20, page_size=page_size, dtype="f32"
    )

    def write(inputs, numbers):
        rows = np.repeat(np.array(numbers, np.float32)[:, None, None], 2, axis=2)
        for layer in range(2):
            kv.ops.append(inputs.collection, layer, rows, -rows, inputs.row_offsets)

    def held(name):
        places = [(m.pages(name)[t // page_size], t % page_size) for t in range(m.processed(name))]
        keys, values = ([m.blocks[p, half, 1, slot, 0, 1] for p, slot in places] for half in (0, 1))
        assert [-v for v in values] == keys
        return keys

    m.claim("a", [0, 1, 2])
    m.alloc("a")
    write(m.runtime_inputs(["a"]), [0, 1, 2])
    m.step(["a"])
    m.fork("a", "b")
    for name in "ab":
        m.extend(name, [3])
        m.alloc(name, num_draft=5)
    inputs = m.runtime_inputs(["a", "b"], num_draft=5)
    write(inputs, [3, 10, 11, 12, 13, 14, 3, 20, 21, 22, 23, 24])  # the sampled token, and a tree below it
    with pytest.raises(ValueError, match="must ascend within its 6 new tokens"):
        m.commit(inputs, ["a", "b"], {"a": [0, 6]})
    with pytest.raises(ValueError, match="must ascend"):
        m.commit(inputs, ["a", "b"], {"b": [0, 3, 3]})
    with pytest.raises(ValueError, match="at most 1"):
        m.commit(inputs, ["a", "b"], {"a": [0, 2, 5]})
    m.extend("a", [11, 14, 30])
    m.commit(inputs, ["a", "b"], {"a": [0, 2, 5]})
    assert held("a") == [0, 1, 2, 3, 11, 14]
    assert held("b") == [0, 1, 2, 3]
    assert (m.active("a"), m.active("b")) == (1, 0)
    m.fork("a", "c")
    for name, drafts in (("a", [30, 40, 41]), ("c", [30, 50, 51])):
        m.alloc(name, num_draft=2)
        inputs = m.runtime_inputs([name], num_draft=2)
        write(inputs, drafts)
        m.extend(name, [drafts[2]])
        m.commit(inputs, [name], {name: [0, 2]})
    assert held("a") == [0, 1, 2, 3, 11, 14, 30, 41]
    assert held("c") == [0, 1, 2, 3, 11, 14, 30, 51]
    m.check()


@pytest.mark.parametrize("path", [[1, 2], [], [0], [0, 1, 4], [0, 2, 3], [0, 3, 4]])
def test_a_path_begins_with_the_tokens_that_are_no_drafts(path):
    """Else the rows of others would be taken for those of the prompt, and shared as its pages."""
    m = kv.PagedKVCacheManager(
        params=kv.KVCacheStaticParams(1, 2), num_layers=1, num_pages=20, page_size=2, dtype="f32", prefix_caching=True
    )
    m.claim("r", [1, 2, 3])
    m.alloc("r", num_draft=2)
    inputs = m.runtime_inputs(["r"], num_draft=2)
    rows = np.arange(5, dtype=np.float32)[:, None, None] * np.ones((1, 1, 2), np.float32)
    kv.ops.append(inputs.collection, 0, rows, rows, inputs.row_offsets)
    before = m.blocks.copy(), m.pages("r"), m.processed("r"), m.tokens("r")
    with pytest.raises(ValueError, match="must start with the 3 tokens that were allocated"):
        m.commit(inputs, ["r"], {"r": iter(path)})
    np.testing.assert_array_equal(m.blocks, before[0])
    assert (m.pages("r"), m.processed("r"), m.tokens("r")) == before[1:]
    with pytest.raises(ValueError, match="paths must belong to requests of the step, got a path of 'other'"):
        m.commit(inputs, ["r"], {"other": [0]})
    m.check()
    m.extend("r", [9])
    m.commit(inputs, iter(["r"]), {"r": iter([0, 1, 2, 4])})
    assert m.processed("r") == 4
    with pytest.raises(ValueError, match="must start with the 0 tokens that were allocated"):
        m.commit(inputs, ["r"], {"r": [0]})
    m.claim("s", [1, 2, 3, 4])
    assert m.alloc("s") == 2
    m.check()


def test_tokens_may_come_from_an_iterator():
    m = kv.PagedKVCacheManager(params=kv.KVCacheStaticParams(1, 2), num_layers=1, num_pages=20, page_size=2)
    m.claim("r", iter([1, 2]))
    m.extend("r", (n for n in (3, 4)))
    m.extend("r", 2)
    m.realise("r", iter([5, 6]))
    assert m.tokens("r") == (1, 2, 3, 4, 5, 6)
    m.claim("d", iter(()), dummy=True)
    with pytest.raises(ValueError, match="a dummy request takes no tokens"):
        m.claim("e", iter([1]), dummy=True)
    assert "e" not in m
