# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn explain and kvarn compile on a kernel of a file."""

import re
from collections import Counter

import pytest

pytest.importorskip("mlir", reason="the compiler needs the MLIR bindings")

from kvarn import artifact as A
from kvarn.dialect import dtypes
from kvarn.inspect import describe, explain
from kvarn.runtime import assemble
from kvarn.tools import cli

PAGED = "paged(bf16, num_heads=8, head_size=128, page_size=16)"
FILE = """
import kvarn as kv

@kv.kernel
def scale_keys(cache: kv.PagedKVCache, alpha: kv.f32):
    b, t = kv.block_id.x, kv.block_id.y
    if t < cache.cache_length(b):
        for h in range(cache.num_heads):
            d = kv.thread_id.x * 8
            cache.store(b, h, t, d, cache.load(b, h, t, d, width=8) * kv.bf16(alpha))

@kv.kernel
def wrong(cache: kv.PagedKVCache):
    cache.lode(0, 0, 0, 0)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(FILE)
    return path


def run(capsysbinary, *arguments):
    status = cli.main([str(a) for a in arguments])
    out, err = capsysbinary.readouterr()
    return status, out.decode(), err.decode()


def test_explain_names_every_pass_and_what_comes_out(file, capsysbinary):
    status, out, err = run(capsysbinary, "explain", f"{file}:scale_keys", "--target", "sm_90a", "--spec", PAGED)
    assert (status, err) == (0, "")
    table, abi, code = out.split("\n\n")[1:4]
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert "verify-kv" in rows
    assert "nothing" in rows["verify-kv"]
    assert "+1 kv.page" in rows["hoist-kv-lookups"]
    assert int(rows["input"].split()[2]) < int(rows["lower-kv-access"].split()[2])
    assert abi.startswith("scale_keys: any block\n  cache (cache, written, 16-byte aligned): base: ptr, stride0: i64")
    assert "alpha (scalar): value: f32" in abi
    assert re.search(r"PTX ISA \d\.\d for sm_90a: \d+ instructions", code)
    if assemble.nvjitlink() is not None:
        assert re.search(r"scale_keys: \d+ registers, 0 \+ 0 bytes spilled", code)


def test_explain_shows_one_pass_and_its_difference(file, capsysbinary):
    common = [f"{file}:scale_keys", "--target", "sm_80", "--spec", PAGED]
    _, out, _ = run(capsysbinary, "explain", *common, "--pass", "hoist-kv-lookups")
    assert out.startswith(("module", "builtin.module"))
    assert "kv.page" in out
    _, out, _ = run(capsysbinary, "explain", *common, "--diff", "hoist-kv-lookups")
    assert any(line.startswith("+") and "kv.page" in line for line in out.splitlines())


def test_a_value_that_only_has_another_number_is_no_difference():
    before = ["%0 = a", "%1 = b(%0)", "%2 = c(%1)", "%3 = d(%1, %2)", "e(%3)", "%4 = f(%0)", "g(%4)"]
    after = ["%0 = a", "%1 = new", "%2 = b(%0)", "%3 = c(%2)", "%4 = d(%3, %3)", "e(%4)", "%5 = f(%0)", "g(%5)"]
    found = explain.difference("\n".join(before) + "\n", "\n".join(after) + "\n", "p", context=1)
    assert "".join(found) == (
        "--- before p\n+++ after p\n@@ -1,5 +1,6 @@\n %0 = a\n+%1 = new\n %2 = b(%0)\n %3 = c(%2)\n"
        "-%3 = d(%1, %2)\n+%4 = d(%3, %3)\n e(%4)\n"
    )
    assert not list(explain.difference("%0 = a\nb(%0)\n", "%7 = a\nb(%7)\n", "p"))


def test_a_misspelt_spec_or_operation_is_told_what_was_meant(file, capsysbinary):
    spec = PAGED.replace("num_heads", "num_head")
    _, _, err = run(capsysbinary, "compile", f"{file}:scale_keys", "--spec", spec)
    assert "got 'num_head'; did you mean 'num_heads'?" in err
    _, _, err = run(capsysbinary, "compile", "--op", "atention")
    assert "got 'atention'; did you mean 'attention'?" in err


def test_compile_prints_a_stage_or_writes_it(file, tmp_path, capsysbinary):
    common = [f"{file}:scale_keys", "--target", "sm_90a", "--spec", PAGED]
    _, ptx, _ = run(capsysbinary, "compile", *common)
    assert ".entry scale_keys(" in ptx
    status, out, _ = run(capsysbinary, "compile", *common, "-o", tmp_path / "k.ptx")
    assert (status, out) == (0, "")
    assert (tmp_path / "k.ptx").read_text().strip() == ptx.strip()
    status, _, err = run(capsysbinary, "compile", *common, "--save", tmp_path / "k.kvarn")
    assert status == 0
    assert A.Artifact.load(tmp_path / "k.kvarn").target == "sm_90a"
    assert "saved" in err


def test_errors_name_the_kernels_line(file, capsysbinary):
    status, out, err = run(capsysbinary, "compile", f"{file}:wrong", "--target", "sm_90a", "--spec", PAGED)
    assert (status, out) == (1, "")
    assert err.startswith(f"{file}:14:")
    assert "cache.lode(0, 0, 0, 0)" in err
    assert "Traceback" not in err


def test_instruction_mix_counts_what_tells():
    lines = {
        ".reg .b32 %r<3>;": "",
        "ld.global.v4.b32 {%r1, %r2}, [%rd1];": "ld.global.v4.b32",
        "@%p1 st.global.b16 [%rd1], %rs1;": "st.global.b16",
        "// ld.global.b32 %r1, [%rd1];": "",
        "add.s32 %r1, %r1, 1;": "arithmetic of integers and bits",
        "LABEL:": "",
        "{ wgmma.fence.sync.aligned; }": "wgmma.fence.sync.aligned",
        "fma.rn.f32 %f1, %f1, %f1, %f1;": "arithmetic of floats",
        "@!%p2 mbarrier.arrive.shared.b64 _, [%r1];": "mbarrier.arrive.shared.b64",
        "clz.x %r1;": "other",
    }
    assert describe.instruction_mix("\n".join(lines)) == Counter(name for name in lines.values() if name)


def test_programs_are_described_as_people_write():
    arg = A.Arg("x", "buffer", dtypes.f32, 1)
    entry = A.Entry("k", [arg], A.flatten([arg]), cluster=(2, 1, 1), shared_bytes=64)
    grid = [("ceildiv", ("arg", 0, "shape0"), 128), ("device", "multiprocessors"), 1]
    step = A.Step("k", grid, [128, 1, 1], 0, [("arg", 0)])
    program = A.Artifact("p", "sm_90a", "8.0", {}, [entry], [arg], [step], [A.Workspace("w", ("mul", 4, 8), True)])
    lines = list(describe.describe_abi(program))
    assert lines[0] == "k: any block, 64 bytes of dynamic shared memory, clusters of 2x1x1"
    assert lines[-2] == "step 1: k over grid (ceildiv(x.shape0, 128), multiprocessors, 1)"
    assert lines[-1] == "scratch w: (4 * 8) bytes, zeroed"
