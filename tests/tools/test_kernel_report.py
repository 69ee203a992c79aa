# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The report of a kernel: what its page shows is what the compiler, the assembler and the emulator say."""

import base64
import gzip
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("mlir", reason="the compiler needs the MLIR bindings")

import kvarn as kv
from kvarn.inspect import machine, source_map, work
from kvarn.tools import cli

SPEC = kv.CacheSpec("paged", kv.bf16, num_heads=2, head_size=64, page_size=16)
SOURCE = Path(__file__).read_text().split("\n")


@kv.kernel
def staged(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
    first = kv.shared(64, kv.f32)
    second = kv.shared(32, kv.f32)
    x = kv.thread_id.x
    total = kv.f32(0)
    for t in range(cache.cache_length(0)):
        total += cache.load(0, 0, t, x, dtype=kv.f32)  # the load
    first[x] = total
    kv.barrier()
    second[x] = first[31 - x] * kv.f32(2)
    kv.barrier()
    out[x] = second[31 - x]


def line_of(text: str) -> int:
    """The line of this file that holds a text."""
    return next(n for n, line in enumerate(SOURCE, 1) if text in line and "line_of" not in line)


@pytest.fixture(scope="module")
def kernel():
    return kv.compile(staged, SPEC, kv.Buffer[kv.f32, 1], target="sm_90a")


@pytest.fixture(scope="module")
def ran(kernel):
    """The report with a run: of 21 tokens, by one warp."""
    blocks = np.ones((4, 2, 1, 16, 2, 64), ml_dtypes.bfloat16)
    lengths, table = np.array([21], np.uint32), np.array([[2, 1]], np.uint32)
    pool = kv.PagedKVCacheCollection(blocks, lengths, table, max_seq_length=1, max_cache_length=21)
    return kernel.explain(kernel.emulate(1, 32, pool.get_key_cache(0), np.zeros(32, np.float32)), threads=32)


@pytest.fixture(scope="module")
def page(ran):
    return ran.html()


def data_of(page: str) -> dict:
    packed = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def codes(lines, line, file=__file__):
    """The lines of code whose innermost place is a line of a file."""
    return [found.text for found in lines if found.chain and found.chain[0] == (file, line)]


# --- lines and their places


def test_a_line_of_python_is_followed_to_ir_ptx_and_machine_code(ran):
    load = line_of("# the load")
    assert any('"kv.load"' in text for text in codes(ran.stages[0].lines, load))
    lowered = next(s for s in ran.stages if s.name == "lower-kv-access")
    assert not any('"kv.load"' in text for text in codes(lowered.lines, load))
    assert any("llvm.load" in text for text in codes(lowered.lines, load))
    assert any("ld.global" in text for text in codes(ran.ptx, load))
    if not ran.no_sass:
        assert any("LDG" in text for text in codes(ran.sass, load))


def test_locations_are_read_with_their_calls_and_regions():
    text = """#loc = loc("a.py":1:1)
module {
  func.func @f(%arg0: i32 loc("a.py":2:7)) {
    %0 = arith.addi %arg0, %arg0 {note = "loc("} : i32 loc(#loc3)
    scf.if %1 {
      "t.x"() ({
      ^bb0(%a: i32 loc(#loc1)):
        t.y loc(#loc5)
      }) : () -> () loc(#loc4)
    } else {
      t.z loc(unknown)
    } loc(#loc1)
  } loc(#loc)
} loc(#loc)
#loc1 = loc("a.py":3:5)
#loc2 = loc("b) \\"c.py":9:1)
#loc3 = loc(callsite(#loc2 at #loc1))
#loc4 = loc("name"(#loc3))
#loc5 = loc(fused<"x">[unknown, #loc2])
"""
    found = {line.text.strip(): line.chain for line in source_map.ir_lines(text)}
    one, two, three = ("a.py", 1), ("a.py", 2), ("a.py", 3)
    other = ('b) "c.py', 9)
    assert found["module {"] == found["func.func @f(%arg0: i32) {"] == (one,)
    assert found['%0 = arith.addi %arg0, %arg0 {note = "loc("} : i32'] == (other, three)
    assert found["scf.if %1 {"] == found["} else {"] == (three,)
    assert found['"t.x"() ({'] == (other, three)
    assert found["t.y"] == (other,)
    assert found["t.z"] == ()
    assert two not in {p for chain in found.values() for p in chain}


# --- figures


def test_shared_memory_says_what_lies_where_and_how_long(ran):
    first, second = ran.shared
    assert (first.offset, first.bytes, first.place) == (0, 256, (__file__, line_of("first = kv.shared")))
    assert (second.offset, second.bytes, second.place) == (256, 128, (__file__, line_of("second = kv.shared")))
    assert {place[1] for _, place in first.uses} == {line_of("first[x] = total"), line_of("second[x] = first")}
    assert first.first < first.last < second.first < second.last < first.length
    assert sum(e.shared_bytes for e in ran.entries) == 384


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared", "expected"),
    [
        ("sm_90a", 128, 168, 0, (3, 12, "registers")),
        ("sm_90a", 128, 32, 100 * 1024, (2, 8, "shared memory")),
        ("sm_90a", 32, 16, 0, (32, 32, "blocks")),
        ("sm_86", 256, 32, 0, (6, 48, "warps")),
        ("sm_86", 32, 16, 0, (16, 16, "blocks")),
        ("sm_89", 128, 32, 40 * 1024, (2, 8, "shared memory")),
        ("sm_80", 1024, 0, 0, (2, 64, "warps")),
    ],
)
def test_what_a_multiprocessor_holds(target, threads, registers, shared, expected):
    found = machine.occupancy(target, threads, registers, shared)
    assert (found.blocks, found.warps, found.limit) == expected


PTX = """.visible .entry f()
{
  ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
$L1:
  .loc 1 7 0
  cp.async.cg.shared.global [%r1], [%rd1], 16;
$L2:
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
  fma.rn.f32 %f1, %f2, %f3, %f4;
  @%p1 bra $L2;
  mov.b32 %r9, 4096;
  { .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%r1], %r9; }
  mbarrier.arrive.expect_tx.shared.b64 _, [%r1], %r8;
$L3:
  mbarrier.try_wait.parity.shared.b64 %p3, [%r1], %r2;
  @!%p3 bra $L3;
  st.global.b16 [%rd1], %rs1;
  @%p2 bra $L1;
  ret;
}
	.file	1 "/where/k.py"
"""


def test_loops_are_told_apart_with_the_work_of_an_iteration():
    from kvarn.emulator import ptx_parser as text

    (outer, inner, waiting), outside = work.loops_of(text.parse(PTX, "f"))
    assert (outer.depth, inner.depth, waiting.depth, outer.source) == (1, 2, 2, "k.py:7")
    assert [loop.waits for loop in (outer, inner, waiting)] == [False, False, True]
    assert outer.work.unknown == 1  # a size in a register of which nothing is known
    assert (outside.read, outside.instructions) == (32 * 16, 2)
    assert (outer.work.read, outer.work.written, outer.work.flops) == (32 * 16 + 4096, 32 * 2, 0)
    assert (inner.work.tensor, inner.work.vector, inner.work.bytes) == (2 * 16 * 8 * 16, 64, 0)
    assert outer.work.intensity is None


# --- a run


def test_counts_of_a_run_stand_at_their_lines(ran, page):
    data = data_of(page)
    assert sum(run[0] for run in data["runs"].values()) == ran.report.instructions
    elements = [str(line.number) for line in ran.ptx if re.search(r"ld\.global\S*\.b16", line.text)]
    loads = [data["runs"][number] for number in elements if number in data["runs"]]
    assert sum(run[0] for run in loads) == 21  # a token, by one warp, however often the loop is unrolled
    assert sum(run[1] for run in loads) == ran.report.sectors["cache.blocks"]


# --- the page


def test_the_page_opens_on_the_code_of_the_kernel(page, tmp_path):
    """Of an operation too, whose input has no kernel: at its expansion, on the file of its first kernel."""
    spec = "--spec=collection=paged(bf16, num_heads=1, head_size=64, page_size=16)"
    rows = [f"--spec={name}=buffer(bf16, (none, 1, 64))" for name in ("key", "value")]
    assert cli.main(["explain", "--op=append", "--target=sm_80", spec, *rows, f"--html={tmp_path / 'a.html'}"]) == 0
    for text, file, stage in (
        (page, "test_kernel_report.py", "input"),
        ((tmp_path / "a.html").read_text(), "append.py", "expand-kv-operations"),
    ):
        data = data_of(text)
        assert [data["files"][data["opens"][0]]["name"], data["stages"][data["opens"][1]]["name"]] == [file, stage]


def test_the_page_fetches_nothing_and_has_its_sections(page):
    assert re.findall(r'(?:src|srcset|href|action|data)="(?!#)[^"]*"', page) == []
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org)|\bfetch\(|XMLHttpRequest|\bimport\(", page)


def test_explain_runs_and_writes(tmp_path, capsys):
    file = tmp_path / "k.py"
    body = "def f(out: kv.Buffer[kv.f32, 1]):\n    out[kv.thread_id.x] = kv.f32(1)  # </script><b>\n"
    file.write_text(f"import kvarn as kv\n\n@kv.kernel\n{body}")
    common = ["explain", f"{file}:f", *"--target sm_80 --emulate --grid 1 --block 32 --arg out=32".split()]
    assert cli.main([*common, "--html", str(tmp_path / "f.html")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'f.html'}\n"
    page = (tmp_path / "f.html").read_text()
    assert "A run in the emulator" in page
    assert "</script><b>" not in page, "what a user writes cannot become markup"
    assert cli.main(common) == 0
    assert "emulated for sm_80: f (1 block)" in capsys.readouterr().out
    assert cli.main([*common[:3], "host", *common[4:]]) == 2


def test_no_line_of_the_text_is_longer_than_160_characters(capsys):
    """Grids and scratch memory of fused operations are formulas, and passes change many kinds of operations."""
    pool = "collection=collection(paged(bf16, num_heads=8, head_size=128, page_size=16))"
    options = ["--target", "sm_90a", "--spec", pool, "--spec", "query=buffer(bf16, (none, 32, 128))"]
    assert cli.main(["explain", "--op", "attention", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("distribute-kv-tiles") for line in lines)
    assert any(line.startswith("scratch workspace0") for line in lines)
    assert max(map(len, lines)) <= 160
