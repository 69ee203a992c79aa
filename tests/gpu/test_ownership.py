# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.sanitize on a GPU: the record lies in its memory, and violations are raised at the next step and at a check."""

from __future__ import annotations

import numpy as np
import pytest

import kvarn as kv
from kvarn.sanitizer.ownership import OwnershipError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

P, H, D = 16, 2, 64


def manager(num_pages=32, **options):
    blocks = torch.zeros((num_pages + 1, 2, 2, P, H, D), dtype=torch.bfloat16, device="cuda")
    return kv.PagedKVCacheManager(
        blocks, upload=lambda a: torch.from_numpy(a).cuda(), table_dtype=np.int32, prefix_caching=True, **options
    )


def rows(n, heads=H):
    return torch.randn((n, heads, D), device="cuda", dtype=torch.bfloat16)


def begin(m, *requests):
    for name, tokens in requests:
        m.claim(name, tokens)
        m.alloc(name)
    return m.runtime_inputs([name for name, _ in requests])


@kv.kernel
def read(cache: kv.KVCache, b: kv.i32, t: kv.i32, out: kv.Buffer[kv.f32, 1]):
    out[kv.thread_id.x] = kv.f32(cache.load(b, kv.block_id.x, t, kv.thread_id.x))


def reads(cache, b, t):
    read[H, D](cache, b, t, torch.zeros(D, device="cuda"))


def test_steps_of_a_model_are_not_reported_and_compute_what_they_do_without():
    """Prefill, then decode over a fork and its copied page."""
    outs = []
    for watched in (True, False):
        torch.manual_seed(0)
        m, found = manager(), []

        def run(m=m, found=found):
            inputs = begin(m, ("a", list(range(100))), ("b", list(range(50, 90))))
            for step in range(3):
                c, offsets = inputs.collection, inputs.uploaded_row_offsets
                n = int(inputs.row_offsets[-1])
                for layer in range(2):
                    kv.ops.append(c, layer, rows(n), rows(n), offsets)
                    found.append(kv.ops.attention(c, layer, rows(n, 8), offsets).float().cpu())
                names = [x for x in ("a", "b", "child") if x in m]
                m.step(names)
                if not step:
                    m.fork("a", "child")
                names = [x for x in ("a", "b", "child") if x in m]
                for i, name in enumerate(names):
                    m.extend(name, [i])
                    m.alloc(name)
                inputs = m.runtime_inputs(names)

        def copy_pages(source, destination, m=m):
            m.blocks[torch.from_numpy(destination).long().cuda()] = m.blocks[torch.from_numpy(source).long().cuda()]

        m._copy_pages = copy_pages
        if watched:
            with kv.sanitize(m):
                run()
        else:
            run()
        outs.append(found)
    for with_checks, without in zip(*outs, strict=True):
        torch.testing.assert_close(with_checks, without, rtol=0, atol=0)
        assert torch.isfinite(with_checks).all()


def test_what_was_never_written_is_reported_at_a_check():
    m = manager()
    with kv.sanitize(m) as sanitizer:
        inputs = begin(m, ("a", 20), ("b", 5))
        c, offsets = inputs.collection, inputs.uploaded_row_offsets
        kv.ops.append(c, 0, rows(25), rows(25), offsets)
        reads(c.get_key_cache(0), 1, 4)
        sanitizer.check()
        reads(c.get_key_cache(0), 1, 5)
        with pytest.raises(OwnershipError, match=r"kernel read: reads token 5 of sequence 1 \(request 'b'\)"):
            sanitizer.check()
        kv.ops.attention(c, 1, rows(25, 8), offsets)
        with pytest.raises(OwnershipError, match=r"kv\.attention: reads token 0 of sequence 0"):
            sanitizer.check()
        sanitizer.check()


def test_pages_of_an_ended_request_are_reported_at_the_next_step():
    m = manager(num_pages=3)
    with kv.sanitize(m):
        inputs = begin(m, ("old", 40))
        c, offsets = inputs.collection, inputs.uploaded_row_offsets
        kv.ops.append(c, 0, rows(40), rows(40), offsets)
        m.step(["old"])
        m.release("old")
        kv.ops.attention(c, 0, rows(40, 8), offsets)
        m.claim("new", 40)
        m.alloc("new")
        with pytest.raises(OwnershipError, match=r"after the request has ended: page \d belongs to 'new'"):
            m.runtime_inputs(["new"])


def test_a_store_to_a_shared_page_is_reported_in_a_replayed_graph():
    """The record is the one of the replay, not that of the capture."""
    m = manager()
    with kv.sanitize(m) as sanitizer:
        inputs = begin(m, ("a", list(range(40))))
        c, offsets = inputs.collection, inputs.uploaded_row_offsets
        key, value = rows(40), rows(40)
        kv.ops.append(c, 0, key, value, offsets)
        sanitizer.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kv.ops.append(c, 0, key, value, offsets)
        graph.replay()
        sanitizer.check()
        m.step(["a"])  # the first two pages are kept as a prefix
        m.extend("a", [7])
        m.alloc("a")
        m.runtime_inputs(["a"])
        graph.replay()
        with pytest.raises(OwnershipError) as found:
            sanitizer.check()
        assert {v.kind for v in found.value.violations} == {"shared"}


def test_attention_with_checks_is_right():
    """Against the model, with the pages that nobody has full of NaNs."""
    m = manager()
    m.blocks[:] = float("nan")
    with kv.sanitize(m):
        inputs = begin(m, ("a", 77), ("b", 3))
        c, offsets = inputs.collection, inputs.uploaded_row_offsets
        key, value, query = (rows(80) for _ in range(3))
        kv.ops.append(c, 0, key, value, offsets)
        out = kv.ops.attention(c, 0, query, offsets).float().cpu().numpy()
    first = 0
    for n in (77, 3):
        q, k, v = (x[first : first + n].float().cpu().numpy().astype(np.float64) for x in (query, key, value))
        for h in range(H):
            scores = q[:, h] @ k[:, h].T / np.sqrt(D)
            scores[np.triu_indices(n, 1)] = -np.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            np.testing.assert_allclose(
                out[first : first + n, h], weights / weights.sum(1, keepdims=True) @ v[:, h], rtol=2e-2, atol=2e-2
            )
        first += n


@kv.kernel
def read_by_address(cache: kv.KVCache, b: kv.i32, t: kv.i32, rows: kv.i32, out: kv.Buffer[kv.f32, 1]):
    start = cache.block_paged_ptr(b, t, kv.block_id.x, 0)
    at = start + (rows * cache.num_heads * cache.head_size + kv.thread_id.x) * 2
    out[kv.thread_id.x] = kv.f32(at.load(kv.bf16))


def test_loads_through_addresses_and_lists_of_pages_are_reported():
    m, out = manager(), torch.zeros(D, device="cuda")
    with kv.sanitize(m) as sanitizer:
        inputs = begin(m, ("a", 40))
        c = inputs.collection
        kv.ops.append(c, 0, rows(40), rows(40), inputs.uploaded_row_offsets)
        m.step(["a"])
        m.extend("a", [1])
        m.alloc("a")
        inputs = m.runtime_inputs(["a"])
        c, offsets = inputs.collection, inputs.uploaded_row_offsets
        keys = c.get_key_cache(0)
        read_by_address[H, D](keys, 0, 33, 6, out)
        sanitizer.check()
        read_by_address[H, D](keys, 0, 33, 7, out)
        with pytest.raises(OwnershipError, match="load by address of kernel read_by_address: reads token 40"):
            sanitizer.check()
        lists = torch.tensor([[[0, 1], [1, 0]]], dtype=torch.int32, device="cuda")
        kv.ops.attention(c, 0, rows(1, 8), offsets, pages=lists)
        sanitizer.check()
        lists[0, 1, 1] = 2  # whose last token has not been appended yet
        kv.ops.attention(c, 0, rows(1, 8), offsets, pages=lists)
        with pytest.raises(OwnershipError) as found:
            sanitizer.check()
        assert {(v.kind, v.token, v.head) for v in found.value.violations} == {("unwritten", 40, 1)}


def test_an_fa3_pool_is_held_to_the_rows_of_its_layers():
    blocks = torch.zeros((2, 8, P, H, D), dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[[2, 7], [4, 0]], [[1, 6], [5, 0]]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([P + 3, 5], dtype=torch.int32, device="cuda")
    c = kv.PagedKVCacheFA3FallbackCollection(blocks, lengths, table, 1, P + 4)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    with kv.sanitize(c) as sanitizer:
        kv.ops.append(c, 1, rows(2), rows(2), offsets)
        kv.ops.attention(c, 1, rows(2, 8), offsets)
        sanitizer.check()
        reads(c.get_value_cache(0), 1, 5)
        with pytest.raises(OwnershipError, match="was not written"):
            sanitizer.check()
        table[1, 1, 0] = 2
        kv.ops.attention(c, 1, rows(2, 8), offsets)
        with pytest.raises(OwnershipError, match="its page there is 5"):
            sanitizer.check()
