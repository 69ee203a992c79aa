# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Timelines of launches on a GPU: phases in the order of the kernel, of as many warps as ran, in time."""

from __future__ import annotations

import time

import pytest

import kvarn as kv

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@kv.kernel(block=(64, 1, 1))
def waits(out: kv.Buffer[kv.i32, 1], ns: kv.i32):
    with kv.trace("outer"):
        with kv.trace("wait"):
            began = kv.globaltimer()
            while kv.globaltimer() - began < ns:
                pass
        out[kv.block_id.x * 64 + kv.thread_id.x] = 1


def test_phases_last_as_long_as_they_take():
    out = torch.zeros(64 * 4, dtype=torch.int32, device="cuda")
    with kv.tracing() as traced:
        for ns in (20_000, 60_000):
            waits[4, 64](out, ns)
    spans = traced.timeline.spans
    assert traced.timeline.unit == "ns"
    assert {(s.launch, s.block, s.warp) for s in spans} == {(n, b, w) for n in (0, 1) for b in range(4) for w in (0, 1)}
    for s in spans:
        least = (20_000, 60_000)[s.launch]
        assert s.depth == (s.label == "wait")
        assert 0.9 * least < s.end - s.begin < least + 40_000, s
    first, second = (min(s.begin for s in spans if s.launch == n) for n in (0, 1))
    assert second - first > 18_000
    assert bool((out == 1).all())


def test_attention_computes_what_it_does_untraced_and_shows_its_phases():
    blocks = torch.randn((40, 2, 1, 16, 2, 64), device="cuda").to(torch.bfloat16)
    table = torch.randperm(39, device="cuda", dtype=torch.int32)[:24].reshape(1, 24)
    for cached, new, kind in ((300, 1, {"kind": "decode", "max_queries": 1}), (100, 200, {"kind": "tile"})):
        lengths, offsets = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([cached], [0, new]))
        pool = kv.PagedKVCacheCollection(blocks, lengths, table, new, cached + new)
        query = torch.randn((new, 8, 64), device="cuda").to(torch.bfloat16)
        plain = kv.ops.attention(pool, 0, query, offsets, schedule=kind)
        began = time.time_ns()
        with kv.tracing() as traced:
            out = kv.ops.attention(pool, 0, query, offsets, schedule=kind)
        torch.testing.assert_close(out, plain, rtol=0, atol=0)
        spans = traced.timeline.spans
        phases = {"wait for copies", "products and softmax"} if new == 1 else {"wait for keys", "start product"}
        assert phases <= {s.label for s in spans}
        assert max(s.end for s in spans) - min(s.begin for s in spans) < time.time_ns() - began
        assert all(s.end >= s.begin for s in spans)
        assert not traced.timeline.dropped
