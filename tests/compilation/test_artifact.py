# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The artifact and its bundle: round trips, and what damaged or foreign files give."""

import json
import subprocess
import sys
import zipfile

import pytest

from kvarn import artifact as A
from kvarn.artifact import bundle
from kvarn.dialect import dtypes, layout

SPEC = layout.spec_of("paged", "bf16", 8, 128, page_size=16)
QUANTIZED = layout.spec_of("paged", "f8e4m3", 8, 128, page_size=16, scale_dtype="f32", granularity=64)


def kernel(target="sm_90a", **changes):
    args = [
        A.Arg("cache", "cache", spec=SPEC, written=True, alignment=16),
        A.Arg("pool", "collection", spec=QUANTIZED),
        A.Arg("q", "operand", spec=SPEC),
        A.Arg("ids", "buffer", dtypes.u32, 2),
        A.Arg("alpha", "scalar", dtypes.bf16),
        A.Arg("flag", "scalar", dtypes.bool_),
    ]
    entry = A.Entry("scale", args, A.flatten(args), [128, 1, 1], 128, 49152, [2, 1, 1], {"programmatic": True})
    code = {"ptx": ".version 8.0\n.target sm_90a\n// å\n", "cubin": bytes(range(256)), "cubin.sm_80": b"\x7fELF"}
    meta = {"stats": {"registers": 40}, "names": ["a", None]}
    return A.Artifact("scale", target, "8.0", code, [entry], meta=meta).replace(**changes)


def program():
    args = [A.Arg("ids", "buffer", dtypes.i32, 1, written=True), A.Arg("n", "scalar", dtypes.i32)]
    entry = A.Entry("fill", args, A.flatten(args), (64, 1, 1))
    grid = [["ceildiv", ["arg", 0, "shape0"], 64], 1, 1]
    steps = [
        A.Step("fill", grid, [64, 1, 1], 0, [["arg", 0], ["add", ["arg", 1, "value"], 1]]),
        A.Step("fill", grid, [64, 1, 1], 0, [["workspace", "scratch"], 7]),
    ]
    scratch = A.Workspace("scratch", ["mul", ["arg", 0, "shape0"], 4], True)
    return A.Artifact("fill", "host", "", {"llvm": "llvm.func @fill()"}, [entry], args, steps, [scratch])


@pytest.mark.parametrize("directory", [False, True])
@pytest.mark.parametrize("make", [kernel, program])
def test_bundle_round_trip_keeps_everything(tmp_path, make, directory):
    a = make()
    path = a.save(tmp_path / "deep" / "k.kvarn", directory=directory)
    b = A.Artifact.load(path)
    assert b == a
    assert b.digest == a.digest
    assert bundle.dumps([a]) == bundle.dumps([b])
    assert b.entries[0].params == A.flatten(a.entries[0].args)
    assert isinstance(b.entries[0].block, tuple)
    assert sorted(p.name for p in path.parent.iterdir()) == ["k.kvarn"], "no temporary file is left"


def test_several_targets_in_one_bundle(tmp_path):
    path = bundle.save(tmp_path / "all", [kernel("sm_80"), kernel("sm_90a")])
    assert [a.target for a in bundle.load(path)] == ["sm_80", "sm_90a"]
    assert A.Artifact.load(path, "sm_80") == kernel("sm_80")
    with pytest.raises(ValueError, match="it has sm_80, sm_90a; give target="):
        A.Artifact.load(path)
    with pytest.raises(ValueError, match="different targets"):
        bundle.save(tmp_path / "twice", [kernel(), kernel()])


def test_digest_sees_abi_and_code_but_not_meta():
    a = kernel()
    assert a.replace(meta={}).digest == a.digest
    assert a.replace(code={**a.code, "ptx": "other"}).digest != a.digest
    assert a.replace(entries=[A.Entry("scale", a.args, a.entries[0].params, (256, 1, 1))]).digest != a.digest


def rewritten(tmp_path, change):
    """A zip bundle of which ``change(files)`` edited the files."""
    path = kernel().save(tmp_path / "k")
    with zipfile.ZipFile(path) as z:
        files = {n: z.read(n) for n in z.namelist()}
    change(files)
    with zipfile.ZipFile(path, "w") as z:
        for name, data in files.items():
            z.writestr(name, data)
    return path


def set_in_manifest(files, **values):
    files["manifest.json"] = json.dumps({**json.loads(files["manifest.json"]), **values}).encode()


@pytest.mark.parametrize(("change", "message"), [
    (lambda f: f.update(ptx=b"evil"), "the checksum of ptx does not match"),
    (lambda f: f.pop("cubin"), "cubin is missing"),
    (lambda f: f.pop("manifest.json"), "has no manifest.json"),
    (lambda f: f.update({"manifest.json": b"{"}), "manifest.json of .* is damaged"),
    (lambda f: f.update({"manifest.json": b"[]"}), "does not declare format"),
    (lambda f: set_in_manifest(f, format="wheel"), "does not declare format"),
    (lambda f: set_in_manifest(f, version=99), "bundle version 99, this kvarn reads 1"),
    (lambda f: set_in_manifest(f, variants=[]), "its checksum does not match"),
])  # fmt: skip
def test_damaged_bundles_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        A.Artifact.load(rewritten(tmp_path, change))


def test_what_is_cut_off_is_refused_and_every_flipped_bit_is_caught_or_harmless():
    whole = bundle.dumps([program()])
    good = bundle.loads(whole)
    for length in (0, 1, 100, len(whole) - 1):
        with pytest.raises(ValueError, match="not a kvarn bundle"):
            bundle.loads(whole[:length])
    for i in range(0, len(whole), 7):
        broken = bytearray(whole)
        broken[i] ^= 0x10
        try:
            assert bundle.loads(bytes(broken)) == good  # a byte of a date or a mode
        except ValueError:
            pass


def test_saving_over_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        kernel().save(tmp_path)
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match="new or empty folder"):
        kernel().save(tmp_path, directory=True)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: A.Arg("x", "tensor"), "kind of argument 'x' must be one of"),
    (lambda: A.Arg("x", "cache"), "must have a spec"),
    (lambda: A.Arg("x", "buffer", dtypes.f32), "rank of at least 1, got 0"),
    (lambda: A.Arg("x", "scalar"), "must have a dtype"),
    (lambda: A.Arg("x", "buffer", dtypes.f32, 1, alignment=12), "power of two, got 12"),
    (lambda: A.Param(0, "value", "u32"), "parameter type must be one of"),
    (lambda: A.Entry("k", [], [A.Param(0, "value", "i32")]), "belongs to argument 0, but the kernel has 0"),
    (lambda: A.Entry("k", [A.Arg("x", "scalar", dtypes.i32)], [A.Param(0, "base", "ptr")]), "has no field 'base'"),
    (lambda: A.Artifact("k", "host"), "at least one entry"),
    (lambda: A.Artifact("k", "host", entries=[A.Entry("a"), A.Entry("b")]), "2 entries and no steps"),
    (lambda: A.Artifact("k", "host", entries=[A.Entry("a")], steps=[A.Step("b", (1, 1, 1), (1, 1, 1))]),
     "launches 'b'"),
    (lambda: A.Artifact("k", "host", entries=[A.Entry("a")], steps=[A.Step("a", (1, 1, 1), (1, 1, 1), 0, (1,))]),
     "gives 1 arguments to 'a', which takes 0"),
])  # fmt: skip
def test_inconsistent_descriptions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_imports_neither_mlir_nor_cuda():
    code = "import sys, kvarn.artifact; print([m for m in sys.modules if m.split('.')[0] in ('mlir', 'cuda', 'numpy')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
