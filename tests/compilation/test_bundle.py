# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Bundles that were made to do harm: reading one stays in its folder, ends, and has one class of error."""

import contextlib
import copy
import hashlib
import io
import json
import os
import zipfile

import numpy as np
import pytest

import kvarn as kv
from kvarn import artifact as A
from kvarn.artifact import bundle
from kvarn.artifact.bundle import BundleError
from kvarn.dialect import dtypes, layout, tma_layout
from kvarn.runtime.program import load as load_runner

ALL = bool(os.environ.get("KVARN_TEST_ALL"))
SPEC = layout.spec_of("paged", "bf16", 8, 128, page_size=16)
TMA = tma_layout.TmaSpec("tiled", dtypes.bf16, (1, 16, 1, 64), (16, 128), "128B")


def program():
    args = [
        A.Arg("ids", "buffer", dtypes.i32, 1, written=True), A.Arg("n", "scalar", dtypes.i32),
        A.Arg("cache", "cache", spec=SPEC), A.Arg("map", "tensormap", spec=TMA),
    ]  # fmt: skip
    entry = A.Entry("fill", args[:2], A.flatten(args[:2]), (64, 1, 1), cluster=(1, 1, 1))
    grid = [["ceildiv", ["arg", 0, "shape0"], 64], 1, 1]
    steps = [A.Step("fill", grid, [64, 1, 1], 0, [["workspace", "scratch"], ["add", ["arg", 1, "value"], 1]])]
    scratch = A.Workspace("scratch", ["mul", ["arg", 0, "shape0"], 4], True)
    return A.Artifact("fill", "host", "", {"llvm": "llvm.func @fill()"}, [entry], args, steps, [scratch], {"n": 1})


def manifest_of(made):
    with zipfile.ZipFile(io.BytesIO(bundle.dumps([made]))) as z:
        return json.loads(z.read("manifest.json"))


def signed(body):
    """A manifest's text with a right checksum."""
    body = {name: value for name, value in body.items() if name != "sha256"}
    return json.dumps({**body, "sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()})


def places(value, path=()):
    """The path of every value in a document."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def nested(levels):
    found = 1
    for _ in range(levels):
        found = [found]
    return found


NASTY = (
    None, True, -1, 2**31, 10**9, 10**59, 1.5, float("nan"), float("inf"), "", "x", "../x", [], {}, [[]], {"x": 1},
    ["arg", 0], ["arg", 10**6, "value"], ["mul", 1], nested(30), nested(60), nested(300),
)  # fmt: skip


def test_whatever_a_manifest_says_reading_it_gives_artifacts_or_a_bundle_error(tmp_path):
    good = manifest_of(program())
    paths = list(places(good))
    # In make check a third of the values at each place, every value at a third of the places.
    for at, path in enumerate(paths):
        for value in NASTY if ALL else NASTY[at % 3 :: 3]:
            body = copy.deepcopy(good)
            if path:
                holder = body
                for key in path[:-1]:
                    holder = holder[key]
                holder[path[-1]] = value
            else:
                body = value
            text = signed(body) if isinstance(body, dict) and path != ("sha256",) else json.dumps(body)
            (tmp_path / "manifest.json").write_text(text)
            (tmp_path / "llvm").write_text("llvm.func @fill()")
            with contextlib.suppress(BundleError):
                load_runner(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 100_000, "NaN", b"\xff\xfe\x00"])
def test_text_that_a_parser_chokes_on_is_a_bundle_error(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BundleError, match=r"manifest\.json"):
        bundle.load(tmp_path)


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b", "..", ".x", "", "a\nb", "manifest.json", "x" * 200])
def test_names_of_code_stay_in_the_folder(tmp_path, name):
    with pytest.raises(ValueError, match="names of code must be"):
        program().replace(code={"llvm": "", name: "evil"})
    folder = program().save(tmp_path / "folder", directory=True)
    (tmp_path / "evil").write_bytes(b"evil")
    body = manifest_of(program())
    body["variants"][0]["code"]["cubin"] = {"file": name, "text": False}
    body["files"][name] = {"sha256": hashlib.sha256(b"evil").hexdigest(), "bytes": 4}
    (folder / "manifest.json").write_text(signed(body))
    with pytest.raises(BundleError, match="its files must be called like"):
        bundle.load(folder)


@pytest.mark.parametrize("make", [
    lambda path: path.symlink_to(path.parent.parent / "outside"), os.mkfifo, lambda path: path.mkdir(),
])  # fmt: skip
@pytest.mark.parametrize("name", ["llvm", "manifest.json"])
def test_links_fifos_and_folders_are_no_files_of_a_bundle(tmp_path, make, name):
    folder = program().save(tmp_path / "folder", directory=True)
    (folder / name).rename(tmp_path / "outside")
    make(folder / name)
    with pytest.raises(BundleError, match=f"{name} must be a file, not a link or a folder"):
        bundle.load(folder)


def test_a_bundle_that_claims_to_be_huge_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("manifest.json", bytes(100_000))
    with pytest.raises(BundleError, match="at most 1000 bytes, got 100000"):
        bundle.load(tmp_path / "bomb")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)  # of which nothing is there
    with pytest.raises(BundleError, match="at most 1000 bytes, got 1099511627776"):
        bundle.load(tmp_path / "huge")
    monkeypatch.undo()
    folder = program().save(tmp_path / "folder", directory=True)
    with (folder / "llvm").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match=r"llvm must be a file.* of at most 1073741824 bytes"):
        bundle.load(folder)


@pytest.mark.parametrize(("code", "message"), [
    ("no such thing", "must be in MLIR's LLVM dialect"), ('"kv."() : () -> ()', "a part after the dialect's"),
    ("func.func @fill() { return }", "must be in MLIR's LLVM dialect"),
    ("llvm.func @other() { llvm.return }", "does not define 'fill'"),
])  # fmt: skip
def test_host_code_that_is_none_is_a_bundle_error(tmp_path, code, message):
    entry = A.Entry("fill", [A.Arg("x", "buffer", dtypes.f32, 1)])
    path = A.Artifact("fill", "host", "", {"llvm": code}, [entry]).save(tmp_path / "k")
    with pytest.raises(BundleError, match=message):
        kv.load(path)[1, 1](np.zeros(4, np.float32))


def test_a_stage_folder_is_named_without_leaving_the_dump_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVARN_DUMP_TO", str(tmp_path / "dump"))
    text = """module attributes {gpu.container_module} { gpu.module @kernels {
        gpu.func @"../../evil"(%x: memref<?xf32, strided<[1]>, 1>) kernel { gpu.return } } }"""
    kv.compile(text, target="host")
    assert [p.name for p in tmp_path.iterdir()] == ["dump"]
    assert [p.name[:11] for p in (tmp_path / "dump").iterdir()] == ["_._.._evil-"]
