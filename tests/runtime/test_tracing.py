# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Timelines: marks cost nothing where nothing is traced, and say where it is what the warps did, in order."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

import kvarn as kv
from kvarn.dialect import trace_layout as at
from kvarn.runtime import timeline
from kvarn.timeline import recording as timelines
from kvarn.tools.cli import main

TABLE = np.tile(np.arange(2, dtype=np.uint32), (2, 12))
LENGTHS = np.array([3, 5], np.uint32)
POOL = kv.PagedKVCacheCollection(np.ones((9, 2, 1, 16, 2, 16), np.float32), LENGTHS, TABLE, 30, 40)


@kv.kernel
def total(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
    b = kv.block_id.x
    x = kv.f32(0.0)
    with kv.trace("sum"):
        for t in range(cache.cache_length(b)):
            with kv.trace("load"):
                x += cache.load(b, 0, t, 0)
    with kv.trace("store"):
        out[b] = x


@kv.kernel
def plain(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
    b = kv.block_id.x
    x = kv.f32(0.0)
    for t in range(cache.cache_length(b)):
        x += cache.load(b, 0, t, 0)
    out[b] = x


def run(kernel=total, threads=1):
    out = np.zeros(2, np.float32)
    kernel[2, threads](POOL.get_key_cache(0), out)
    assert out.tolist() == [3.0, 5.0]


@pytest.mark.parametrize("target", ["sm_90a", "host"])
def test_without_tracing_a_kernel_with_phases_is_the_kernel_without_to_the_byte(target):
    asm = []
    for kernel in (total, plain):
        made = kv.compile(kernel, POOL.get_key_cache(0), kv.Buffer[kv.f32, 1], target=target)
        asm.append(re.sub("total|plain", "k", made.asm["llvm" if target == "host" else "ptx"]))
        assert "trace" not in asm[-1]
    assert asm[0] == asm[1]
    with kv.tracing():
        traced = kv.compile(total, POOL.get_key_cache(0), kv.Buffer[kv.f32, 1], target=target)
    assert at.SYMBOL in traced.asm["llvm" if target == "host" else "ptx"]


def check_phases(spans, launches):
    for launch in range(launches):
        for block, length in enumerate((3, 5)):
            mine = [s for s in spans if (s.launch, s.block) == (launch, block)]
            assert {(s.warp, s.kernel) for s in mine} == {(0, "total")}
            (whole,) = (s for s in mine if s.label == "sum")
            loads = [s for s in mine if s.label == "load"]
            (store,) = (s for s in mine if s.label == "store")
            assert [s.depth for s in (whole, *loads, store)] == [0, *[1] * length, 0]
            ends = [whole.begin, *(time for s in loads for time in (s.begin, s.end)), whole.end, store.begin, store.end]
            assert ends == sorted(ends)


def test_phases_of_the_host_nest_and_follow_one_another():
    with kv.tracing() as traced:
        run()
        run()
    found = traced.timeline
    check_phases(found.spans, 2)
    assert (found.unit, found.dropped, found.overwritten) == ("ns", 0, 0)
    last, first = (f(s.begin for s in found.spans if s.launch == n) for n, f in ((0, max), (1, min)))
    assert 0 < first - last < 60e9
    rows = {label: (times, share) for _, label, times, _, share in found.phases()}
    assert {label: times for label, (times, _) in rows.items()} == {"sum": 4, "load": 16, "store": 4}
    assert 0 < rows["load"][1] < rows["sum"][1] <= 1


def test_phases_of_the_emulator_count_instructions():
    with kv.emulated("sm_90a", races=False, multiprocessors=2), kv.tracing() as traced:
        run(threads=64)
        run(threads=64)
    found = traced.timeline
    assert found.unit == "instructions"
    assert {s.warp for s in found.spans} == {0, 1}
    again = [[s._replace(launch=0) for s in found.spans if (s.launch, s.warp) == (n, 0)] for n in (0, 1)]
    check_phases(again[0], 1)
    assert sorted(again[0]) == sorted(again[1])  # no time but what the program says


def test_a_ring_keeps_the_last_marks_and_records_run_out():
    with kv.tracing(marks=4, warps=3) as traced:
        run()
        run()
    found = traced.timeline
    assert found.dropped == 1
    assert found.overwritten == (6 + 4 - 4) + (10 + 4 - 4) + (6 + 4 - 4)
    assert {(s.launch, s.block) for s in found.spans} == {(0, 0), (0, 1), (1, 0)}
    kept = [s.label for s in found.spans if (s.launch, s.block) == (0, 1)]
    assert sorted(kept) == ["load", "store", "sum"]


def test_threads_that_are_no_first_of_a_warp_leave_no_marks():
    @kv.kernel
    def branch(out: kv.Buffer[kv.i32, 1]):
        i = kv.thread_id.x
        if i % 32 == 1:
            with kv.trace("second thread"):
                out[i] = 1
        if i >= 32:
            with kv.trace("second warp"):
                out[i] = out[i] + 2

    out = np.zeros(64, np.int32)
    with kv.tracing() as traced:
        branch[1, 64](out)
    assert [(s.label, s.warp) for s in traced.timeline.spans] == [("second warp", 1)]
    assert out.sum() == 2 + 64


@pytest.mark.thorough
def test_operations_over_tiles_show_what_their_warps_wait_for():
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((9, 2, 1, 16, 1, 16)).astype(np.float16)
    pool = kv.PagedKVCacheCollection(
        blocks, np.array([20], np.uint32), np.arange(24, dtype=np.uint32)[None] % 8, 64, 84
    )
    query, offsets = rng.standard_normal((64, 1, 16)).astype(np.float16), np.array([0, 64], np.uint32)
    outs = []
    with kv.emulated("sm_90a", races=False, multiprocessors=2):
        outs.append(kv.ops.attention(pool, 0, query, offsets, schedule={"kind": "tile"}))
        with kv.tracing() as traced:
            outs.append(kv.ops.attention(pool, 0, query, offsets, schedule={"kind": "tile"}))
    np.testing.assert_array_equal(*outs)
    found = traced.timeline
    phases = {"wait for keys", "wait for values", "copy keys", "copy values", "softmax"}
    assert phases <= {s.label for s in found.spans}
    copies = {s.warp for s in found.spans if s.label in ("copy keys", "copy values")}
    assert copies.isdisjoint(s.warp for s in found.spans if s.label == "wait for keys")


# --- what is written -------------------------------------------------------------------------------


PROGRAM = """
import sys
import numpy as np
import kvarn as kv

@kv.kernel
def fill(out: kv.Buffer[kv.i32, 1]):
    with kv.trace("fill"):
        out[kv.block_id.x] = 1

if __name__ == "__main__":
    out = np.zeros(int(sys.argv[1]), np.int32)
    fill[len(out), 1](out)
    sys.exit(out.sum() != len(out))
"""


def test_the_command_runs_a_program_and_writes_both(tmp_path, capsys):
    script, out, svg = tmp_path / "p.py", tmp_path / "t.json", tmp_path / "t.svg"
    script.write_text(PROGRAM)
    assert main(["trace", "-o", str(out), "--svg", str(svg), str(script), "3"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"fill +fill +3 ", text)
    assert f"wrote {out} and {svg}" in text
    assert len(json.loads(out.read_text())["traceEvents"]) == 3 + 1 + 3
    texts = [t.text for t in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"block 0 warp 0", "block 2 warp 0", "fill"} <= set(texts)
    assert not re.search(r"(href|src|url)\b", svg.read_text())
    span = timelines.Span(0, "k<&>", "a <b> & c", 0, 0, 0, 0.0, 10.0, 0)
    ElementTree.fromstring(timelines.Timeline((span,)).svg())  # labels are text and no markup
    assert main(["trace", str(tmp_path / "none.py")]) == 1
    assert "the program must be a file" in capsys.readouterr().err


# --- reading ---------------------------------------------------------------------------------------


def record(marks, kernel, block, processor, begin, end, *moments):
    """The words of a record: nanoseconds, of a clock that has two of them each and begins with the last thousand."""
    words = np.zeros(at.record_words(marks), np.int64)
    words[[at.KERNEL, at.BLOCK, at.PROCESSOR, at.COUNT]] = kernel, block, processor, len(moments)
    words[[at.BEGIN_NS, at.BEGIN_CLOCK, at.END_NS, at.END_CLOCK]] = (
        begin, 2 * (begin % 10_000) + 7, end, 2 * (end % 10_000) + 7,
    )  # fmt: skip
    for i, (number, clock) in enumerate(moments):
        words[at.RING + i % marks] = np.int64(((2 * clock + 7) << at.CLOCK_SHIFT) | number)
    return words


def read(*records, marks=4):
    words = np.concatenate([np.zeros(at.RECORDS, np.int64), *records])
    words[at.TAKEN] = words[at.CAPACITY] = len(records)
    return timelines.read([words], [False], marks, [(0, 0), (1, 1)])


def test_clocks_of_a_processor_become_nanoseconds_of_all(monkeypatch):
    monkeypatch.setitem(timeline.kernels, 5, ("k", ("a", "b")))
    t = 1_790_000_000_000_000_000  # of which a float keeps every 256th
    found = read(
        record(4, 5, 0, 3, t + 1000, t + 1400, (0, 1100), (2, 1200), (3, 1250), (1, 1300)),
        record(4, 5, 1, 4, t + 1600, t + 2000, (0, 1700), (1, 1800)),
    )
    assert [(s.label, s.block, s.processor, s.begin, s.end, s.depth) for s in found.spans] == [
        ("a", 0, 3, 0.0, 200.0, 0), ("b", 0, 3, 100.0, 150.0, 1), ("a", 1, 4, 600.0, 700.0, 0),
    ]  # fmt: skip


def test_ends_without_beginnings_and_beginnings_without_ends_are_taken_for_what_is_left(monkeypatch):
    monkeypatch.setitem(timeline.kernels, 5, ("k", ("a", "b")))
    lost_begin = read(record(2, 5, 0, 0, 0, 100, (0, 10), (2, 20), (3, 30), (1, 40)), marks=2)
    assert [(s.label, s.end) for s in lost_begin.spans] == [("b", 0.0), ("a", 10.0)]
    assert lost_begin.overwritten == 2
    left = read(record(4, 5, 0, 0, 0, 100, (0, 10), (2, 20), (1, 40)))
    assert [(s.label, s.begin, s.end) for s in left.spans] == [("a", 0.0, 30.0)]


# --- refusals --------------------------------------------------------------------------------------


def test_what_cannot_be_traced_is_refused():
    for options, message in (({"marks": 48}, "marks must be a power of two"), ({"warps": 0}, "warps must be positive")):
        with pytest.raises(ValueError, match=message), kv.tracing(**options):
            pass
    with kv.tracing() as traced:
        with pytest.raises(ValueError, match=r"kv\.tracing does not nest"), kv.tracing():
            pass
        with pytest.raises(RuntimeError, match=r"after the end of the context of kv\.tracing"):
            _ = traced.timeline

    @kv.kernel
    def unnamed(out: kv.Buffer[kv.i32, 1]):
        with kv.trace(3):
            out[0] = 1

    with pytest.raises(TypeError, match=r"the label of kv\.trace must be a string that is not empty"):
        unnamed[1, 1](np.zeros(1, np.int32))
