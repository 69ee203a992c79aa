# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a user does on the first day, on an installation without a GPU: python -I first_day.py KERNELS FOLDER

KERNELS is a copy of ``examples/scale_keys.py``. Each step is a function whose docstring says what it shows; what it
asserts must hold on every machine. Files go to the folder. ``make wheels`` runs it in a fresh environment for every
Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvarn as kv

PASS = """
from mlir import ir

from kvarn.lowering.rewrite import kernels, ops_named


def run(module, pass_):
    for kernel in kernels(module):
        count = len(ops_named(kernel, "kv.load"))
        kernel.attributes["my.loads"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), count)
"""
SPEC = "paged(f32, num_heads=1, head_size=128, page_size=16)"
SCRIPTS = Path(sysconfig.get_path("scripts"))


def command(folder: Path, *arguments: str) -> str:
    """The output of one of the installed commands."""
    done = subprocess.run([SCRIPTS / arguments[0], *arguments[1:]], capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise AssertionError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def pool() -> tuple[np.ndarray, kv.PagedKVCacheCollection]:
    blocks = np.ones((4, 2, 1, 16, 1, 128), np.float32)
    lengths, table = np.array([20, 9], np.uint32), np.array([[2, 0], [1, 3]], np.uint32)
    return blocks, kv.PagedKVCacheCollection(blocks, lengths, table, max_seq_length=1, max_cache_length=21)


def the_package_is_the_installed_one(folder: Path) -> None:
    """kvarn comes from this environment, whole, its native part with it."""
    package = Path(kv.__file__).resolve()
    assert package.is_relative_to(Path(sysconfig.get_path("platlib")).resolve()), package
    from kvarn.dialect import native

    assert native.available() is None, native.available()
    assert "repeated calls are launched in C" in command(folder, "kvarn", "doctor")


def a_kernel_runs_on_the_cpu(folder: Path) -> None:
    """A kernel of a file scales the keys of two sequences, and nothing else."""
    sys.path.insert(0, str(folder))
    from kernels import scale_keys

    blocks, collection = pool()
    scale_keys[(2, 20), 16](collection.get_key_cache(0), 0.5)
    scaled = np.ones_like(blocks)
    for sequence, pages in enumerate([[2, 0], [1]]):
        for t in range([20, 9][sequence]):
            scaled[pages[t // 16], 0, 0, t % 16] = 0.5
    np.testing.assert_array_equal(blocks, scaled)


def it_compiles_for_gpus(folder: Path) -> None:
    """PTX for three architectures, with wide accesses; no toolkit, no GPU."""
    for target in ("sm_80", "sm_90a", "sm_100a"):
        ptx = command(folder, "kvarn", "compile", "kernels.py:scale_keys", "--target", target, "--spec", SPEC)
        assert f".target {target}" in ptx
        assert "ld.global.v" in ptx


def gpu_code_runs_without_a_gpu(folder: Path) -> None:
    """The emulator gives what the CPU gives, and counts."""
    from kernels import scale_keys

    blocks, collection = pool()
    report = scale_keys.emulate((2, 20), 16, collection.get_key_cache(0), 0.5, target="sm_90a")
    assert blocks[2, 0].max() == 0.5
    assert blocks[:, 1].min() == 1
    assert report.traffic["cache.blocks"].written == 29 * 128 * 4
    report.check()


def operations_attend(folder: Path) -> None:
    """Appending and attention over pages, against float64."""
    rng = np.random.default_rng(0)
    blocks, lengths = np.zeros((9, 2, 1, 16, 2, 64), np.float32), np.array([0, 0], np.uint32)
    table, offsets = np.array([[5, 0], [2, 8]], np.uint32), np.array([0, 3, 5], np.uint32)
    collection = kv.PagedKVCacheCollection(blocks, lengths, table, max_seq_length=3, max_cache_length=3)
    key, value = rng.standard_normal((2, 5, 2, 64), np.float32)
    query = rng.standard_normal((5, 4, 64), np.float32)
    kv.ops.append(collection, 0, key, value, offsets)
    out = kv.ops.attention(collection, 0, query, offsets)
    for row, first in ((0, 0), (1, 0), (2, 0), (3, 3), (4, 3)):
        for head in range(4):
            seen = slice(first, row + 1)
            weights = np.exp(key[seen, head // 2].astype(float) @ query[row, head] / 8)
            np.testing.assert_allclose(
                out[row, head], weights @ value[seen, head // 2] / weights.sum(), rtol=1e-4, atol=1e-5
            )


def a_pass_of_ones_own_runs(folder: Path) -> None:
    """In kv-opt, on the IR that the command prints."""
    ir = command(
        folder, "kvarn", "compile", "kernels.py:scale_keys", "--target", "sm_90a", "--spec", SPEC, "--emit", "kv"
    )
    (folder / "kernel.mlir").write_text(ir)
    assert "my.loads = 1" in command(folder, "kv-opt", "--load-pass=my_loads.py", "--my-loads", "kernel.mlir")


def a_page_shows_the_kernel(folder: Path) -> None:
    """`kvarn explain` as text, as a page, and what passes missed as JSON."""
    common = ("kvarn", "explain", "kernels.py:scale_keys", "--target", "sm_90a", "--spec", SPEC)
    assert "hoist-kv-lookups" in command(folder, *common)
    command(folder, *common, "--html", "page.html")
    assert "<!DOCTYPE html>" in (folder / "page.html").read_text()
    assert json.loads(command(folder, *common, "--remarks", "json"))


def a_saved_kernel_is_loaded(folder: Path) -> None:
    """A bundle, and the PTX in it."""
    common = ("kvarn", "compile", "kernels.py:scale_keys", "--target", "sm_90a", "--spec", SPEC)
    command(folder, *common, "--save", "kernel.kvarn")
    assert ".entry scale_keys(" in kv.load(folder / "kernel.kvarn").asm["ptx"]


def the_demo_says_what_it_needs(folder: Path) -> None:
    """Without the packages of the extra `demo`: one line, and a failure."""
    done = subprocess.run([SCRIPTS / "kvarn", "demo"], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 1, done
    assert done.stderr == "kvarn demo: gguf and tokenizers must be installed: pip install 'kvarn[demo]'\n", done.stderr


STEPS: tuple[Callable[[Path], None], ...] = (
    the_package_is_the_installed_one, a_kernel_runs_on_the_cpu, it_compiles_for_gpus, gpu_code_runs_without_a_gpu,
    operations_attend, a_pass_of_ones_own_runs, a_page_shows_the_kernel, a_saved_kernel_is_loaded,
    the_demo_says_what_it_needs,
)  # fmt: skip


def main(kernels: Path, folder: Path) -> None:
    (folder / "kernels.py").write_text(kernels.read_text())
    (folder / "my_loads.py").write_text(PASS)
    for step in STEPS:
        begin = time.perf_counter()
        step(folder)
        print(f"  {step.__name__.replace('_', ' ')} ({time.perf_counter() - begin:.1f} s)", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
