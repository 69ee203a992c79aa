# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a compiler researcher does on the first day, without a GPU: python -I research_day.py DAY TUTORIAL

DAY is a copy of ``release/day``, TUTORIAL one of ``docs/tutorial``. Kernels, passes, an operation of one's own, a pass
that is wrong, schedules and a variant of attention, each against NumPy and in the emulator, and the chapters of the
tutorial as they are written. ``make wheels`` runs it in a fresh environment for every Python.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvarn as kv

DAY, TUTORIAL = (Path(argument).resolve() for argument in sys.argv[1:3])
SCRIPTS = Path(sysconfig.get_path("scripts"))
TARGETS = ("sm_80", "sm_90a", "sm_100a")
PAGE, HEADS, SIZE = 16, 2, 64
SPEC = f"keys=paged(bf16, num_heads={HEADS}, head_size={SIZE}, page_size={PAGE})"
LENGTHS = (37, 9)
TABLE = np.array([[3, 1, 5], [4, 0, 6]], np.uint32)
RNG = np.random.default_rng(0)


def command(text: str, folder: Path = DAY, status: int = 0) -> str:
    """What one of the installed commands prints."""
    name, *arguments = shlex.split(text)
    done = subprocess.run([SCRIPTS / name, *arguments], capture_output=True, text=True, cwd=folder)
    if done.returncode != status:
        raise AssertionError(f"{text} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def pool(dtype: Any = kv.bf16, scales: Any = None) -> tuple[kv.PagedKVCacheCollection, list[np.ndarray]]:
    """Two sequences in pages in no order, what no token has NaN; and the keys of each, as they are stored."""
    blocks = np.full((7, 2, 1, PAGE, HEADS, SIZE), np.nan, np.float32)
    for row, length in zip(TABLE, LENGTHS, strict=True):
        for t in range(length):
            blocks[row[t // PAGE], :, 0, t % PAGE] = RNG.standard_normal((2, HEADS, SIZE))
    blocks = blocks.astype(dtype.numpy)
    values, quantized = blocks.astype(np.float32), {}
    if scales is not None:
        quantized = {"scales": scales, "quantization_granularity": SIZE // scales.shape[-1]}
        values *= np.repeat(scales, quantized["quantization_granularity"], -1)
    made = kv.PagedKVCacheCollection(blocks, np.array(LENGTHS, np.uint32), TABLE, 1, 38, **quantized)
    rows = (values[row, 0, 0].reshape(-1, HEADS, SIZE) for row in TABLE)
    return made, [x[:n] for x, n in zip(rows, LENGTHS, strict=True)]


def three_kernels_are_right() -> None:
    """Attention mass, a histogram of norms and a dequantised layer: host, emulator, three targets."""
    from day import kernels

    collection, dense = pool()
    keys, longest = collection.get_key_cache(0), max(LENGTHS)
    query = RNG.standard_normal((2, 2 * HEADS, SIZE)).astype(np.float32) / 8
    scales = RNG.random((7, 2, 1, PAGE, HEADS, 2)).astype(np.float32) + 0.5
    small, exact = pool(kv.f8e4m3, scales)
    wanted: dict[str, Any] = {
        "attention_mass": np.zeros((2, 2 * HEADS, longest), np.float32),
        "norm_histogram": np.zeros((HEADS, 16), np.int32),
        "dequantise": np.zeros((2, longest, HEADS, SIZE), np.float32),
    }
    for b, x in enumerate(dense):
        scores = np.einsum("thd,hgd->hgt", x, query[b].reshape(HEADS, 2, SIZE)).reshape(2 * HEADS, -1)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        wanted["attention_mass"][b, :, : len(x)] = weights / weights.sum(1, keepdims=True)
        for h in range(HEADS):
            wanted["norm_histogram"][h] += np.histogram(np.linalg.norm(x[:, h], axis=-1), 16, (0, 16))[0]
        wanted["dequantise"][b, : len(x)] = exact[b]
    f32, i32 = kv.Buffer[kv.f32, 3], kv.Buffer[kv.i32, 2]
    runs = {
        "attention_mass": ((2, 2 * HEADS), 1, (keys, query, "out"), (keys, f32, f32)),
        "norm_histogram": ((2, HEADS, 2), 32, (keys, "out", 16.0, 16), (keys, i32, kv.f32, 16)),
        "dequantise": ((2, longest), SIZE // 8, (small.get_key_cache(0), "out"),
                       (small.get_key_cache(0), kv.Buffer[kv.f32, 4])),
    }  # fmt: skip
    for name, (grid, block, arguments, specs) in runs.items():
        kernel = getattr(kernels, name)
        for target in ("host", *TARGETS):
            out = np.zeros_like(wanted[name])
            given = [out if isinstance(a, str) else a for a in arguments]
            if target == "host":
                kernel[grid, block](*given)
            else:
                made = kv.compile(kernel, *specs, target=target)
                made.emulate(grid, block, *[a for a in given if not isinstance(a, int)]).check()
                assert f".target {target}" in made.asm["ptx"]
            np.testing.assert_allclose(out, wanted[name], rtol=1e-4, err_msg=f"{name} on {target}")


def passes_count_where_they_run() -> None:
    """Four passes: in kv.compile, in a context, in the commands; what they are worth in the emulator."""
    from day import annotate, give_pages, kernels, widen

    collection, dense = pool()
    keys, out = collection.get_key_cache(0), np.zeros((2, HEADS), np.float32)
    expected = np.stack([(x**2).sum((0, 2)) for x in dense])

    def run(passes: Any) -> Any:
        made = kv.compile(kernels.narrow, keys, kv.Buffer[kv.f32, 2], target="sm_90a", passes=passes)
        report = made.emulate(2, HEADS, keys, out)
        np.testing.assert_allclose(out, expected, rtol=1e-4)
        return made, report

    _, before = run({})
    made, after = run({"before:hoist-kv-lookups": [give_pages.give_pages, widen.run]})
    assert before.sectors["keys.blocks"] == 8 * after.sectors["keys.blocks"]
    assert made.stages["give-pages"].count('"kv.page"') == 1
    assert "width = 8" in made.stages["widen"]
    assert "kv.bytes = 2" in run({"after:hoist-kv-lookups": annotate.run})[0].stages["annotate"]
    with kv.pipeline({"before:hoist-kv-lookups": widen.run}):
        kernels.narrow[2, HEADS](keys, out)
    np.testing.assert_allclose(out, expected, rtol=1e-4)
    common = f"kernels.py:narrow --target sm_90a --spec '{SPEC}' --load-pass widen.py"
    there = "--insert-before hoist-kv-lookups=widen"
    diff = command(f"kvarn explain {common} {there} --diff widen")
    assert "width = 8" in diff
    assert "widened" in command(f"kvarn explain {common} {there} --remarks-filter widen:passed")
    inputs = "--grid 2 --block 2 --lengths 37,9 --arg out=2x2"
    assert "widen " in command(f"kvarn ablate {common} {there} --passes widen {inputs}")


def a_plug_in_is_known_to_everything() -> None:
    """Passes and an operation of an installed package: in kv.compile by name, in kv-opt, on every target."""
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", DAY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "give-pages" in command("kv-opt --list-passes")
    assert "day of day 0.1" in command("kvarn doctor")
    done = subprocess.run([sys.executable, "use_plug_in.py"], cwd=DAY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"kv.page"' in command("kv-opt norms.mlir --hoist-kv-lookups")


def a_wrong_pass_is_found() -> None:
    """By bisection on the host and in the emulator, by kv-opt after each pass, on IR that was made smaller."""
    inputs = "--grid 2 --block 2 --lengths 37,9 --arg out=2x2"
    for target in ("host", "sm_90a"):
        found = command(
            f"kvarn bisect kernels.py:narrow --target {target} --spec '{SPEC}' {inputs} --load-pass hasty.py "
            "--insert-after hoist-kv-lookups=hasty --save found", status=1
        )  # fmt: skip
        assert "hasty is the first pass that changed the answer" in found
        assert "by rewrite 1 of 1: hasty: shift of 'kv.page'" in found
    check = f"--load-pass=hasty.py --hasty --check-semantics-each {inputs.replace(' 2', '=2').replace(' 37', '=37')}"
    check = check.replace("--arg ", "--arg=")
    assert "pass 'hasty' changed the answer" in command(f"kv-opt found.before.mlir {check}", status=1)
    command("kv-reduce found.before.mlir -o small.mlir --interesting='grep -q kv.page'")
    assert len((DAY / "small.mlir").read_text().splitlines()) < 12


def a_schedule_changes_the_code() -> None:
    """And what cannot work is refused, with what would be right."""
    attention = (
        "kvarn compile --op attention --target sm_90a --spec 'collection=paged(bf16, num_heads=8, head_size=128, "
        "page_size=16)' --spec 'query=buffer(bf16, (none, 32, 128))'"
    )
    schedules = ("{}", '{"kind": "tile", "stages": 3, "keys": 64}', '{"kind": "tile", "producer": False}')
    code = [command(f"{attention} --static 'schedule={s}'") for s in schedules]
    assert len(set(code)) == 3
    assert [("setmaxnreg" in ptx) for ptx in code] == [True, True, False]
    for schedule, sentence in (
        ('{"kind": "tile", "keys": 100}', "keys must be a multiple of 16 from 16 to 256, got 100"),
        ('{"kind": "tile", "stages": 9}', "stages must be in [1, 8], got 9"),
        ('{"batch_invarient": True}', "did you mean 'batch_invariant'?"),
        ('{"kind": "tile", "keys": 256, "stages": 8}', "must fit 232448 bytes of shared memory"),
    ):
        assert sentence in command(f"{attention} --static 'schedule={schedule}'", status=1)


def a_variant_of_attention_takes_ten_lines() -> None:
    """A new score and a document mask over a paged fp8 cache with scales; and over lists of pages."""
    documents = np.sort(RNG.integers(0, 3, (2, 64))).astype(np.int32)
    slopes = RNG.random(2 * HEADS).astype(np.float32)

    def far_is_less(score, b, h, q, k, slopes):
        return score - slopes[h] * kv.math.log(1.0 + kv.f32(q - k)) + kv.where((q - k) % 7 == 0, 0.25, 0.0)

    def same_document(b, h, q, k, documents):
        return documents[b, q] == documents[b, k]

    scales = RNG.random((7, 2, 1, PAGE, HEADS, 2)).astype(np.float32) + 0.5
    collection, _ = pool(kv.f8e4m3, scales)
    collection.cache_lengths[:] = [n - 1 for n in LENGTHS]  # of each, one token is new
    query, offsets = RNG.standard_normal((2, 2 * HEADS, SIZE)).astype(kv.bf16.numpy), np.array([0, 1, 2], np.uint32)
    lists = np.array([[[0, 2], [2, 1]], [[0, -1], [0, 9]]], np.int32)

    def attend(**more: Any) -> np.ndarray:
        mask = (kv.masks.causal & same_document, documents)
        return kv.ops.attention(collection, 0, query, offsets, score=(far_is_less, slopes), mask=mask, **more)

    values = collection.blocks.astype(np.float32) * np.repeat(scales, SIZE // 2, -1)
    for more in ({}, {"pages": lists}):
        expected = np.zeros((2, 2 * HEADS, SIZE))
        for b, n in enumerate(LENGTHS):
            key, value = (values[TABLE[b], i, 0].reshape(-1, HEADS, SIZE)[:n] for i in (0, 1))
            far = n - 1 - np.arange(n)
            for h in range(2 * HEADS):
                score = key[:, h // 2] @ query[b, h].astype(np.float32) / 8
                score = score - slopes[h] * np.log(1.0 + far) + np.where(far % 7 == 0, 0.25, 0)
                seen = documents[b, :n] == documents[b, n - 1]
                if more:
                    seen &= np.isin(np.arange(n) // PAGE, lists[b, h // 2])
                if seen.any():
                    weights = np.exp(score[seen] - score[seen].max())
                    expected[b, h] = weights / weights.sum() @ value[seen, h // 2]
        found = [attend(**more)]
        for target in TARGETS:
            with kv.emulated(target, multiprocessors=2) as report:
                found.append(attend(**more))
            report.check()
        for out in found:
            np.testing.assert_allclose(out.astype(np.float32), expected, atol=0.02)


def the_tutorial_runs_as_written() -> None:
    """Its programs, and the commands of chapter 2."""
    for page in sorted(TUTORIAL.glob("*.md")):
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M)
        file = DAY / f"chapter_{page.stem.replace('-', '_')}.py"
        file.write_text("\n".join(blocks))
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, file], cwd=DAY, capture_output=True, text=True)
        assert done.returncode == 0, f"{page.name}: {done.stderr}"
        print(f"    {page.stem} ({time.perf_counter() - begin:.1f} s)", flush=True)
    text = (TUTORIAL / "2-a-pass.md").read_text()
    first, second = re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M)[:2]
    folder = DAY / "chapter_2"
    folder.mkdir()
    imports = "".join(re.findall(r"^(?:import|from) .*\n", first, re.M))
    (folder / "kernels.py").write_text(first.partition("SPECS")[0])
    (folder / "reuse_pages.py").write_text(imports + second)
    commands = re.findall(r"^    (kvarn (?:.*\\\n)*.*)$", text, re.M)
    printed = [command(c.replace("\\\n", ""), folder) for c in commands]
    assert ["+++ after reuse-pages" in printed[0], "left out" in printed[1]] == [True, True]


STEPS = (
    three_kernels_are_right, passes_count_where_they_run, a_wrong_pass_is_found, a_schedule_changes_the_code,
    a_variant_of_attention_takes_ten_lines, the_tutorial_runs_as_written, a_plug_in_is_known_to_everything,
)  # fmt: skip

if __name__ == "__main__":
    sys.path.insert(0, str(DAY.parent))
    for step in STEPS:
        started = time.perf_counter()
        step()
        print(f"  {step.__name__.replace('_', ' ')} ({time.perf_counter() - started:.1f} s)", flush=True)
