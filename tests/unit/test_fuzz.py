# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Broken IR gives a diagnostic, each time: never a dead process, an exception or a silent failure.

Texts are made by mutating the IR of the lit tests. Many go to one subprocess, so that a crash is seen and named, and
costs little. The seeds are fixed: a run that fails fails again.
"""

import functools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvarn.dialect import kv

TESTS = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("fuzz_worker.py")
TOKEN = re.compile(r"\s+|[%@!#^][\w.$-]+|\"[^\"\n]*\"|\w+|.", re.DOTALL)
NUMBERS = (
    "0",
    "-1",
    "1",
    "3",
    "7",
    "16",
    "128",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "99999999999999999999",
)
TYPES = (
    "i1", "i8", "i32", "i64", "index", "f32", "bf16", "f8E4M3FN", "f64", "none", "vector<4xf32>", "vector<0xf32>",
    "vector<4xi32>", "vector<2x2xbf16>", "memref<?xi32>", "memref<4x8x128xbf16>", "memref<*xf32>", "tensor<4xf32>",
    "!llvm.ptr", "!llvm.ptr<1>", "!llvm.ptr<3>", "tuple<>", "complex<f32>",
    '!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>', "!kv.rows<64 : i64, 16 : i64>",
    "!kv.rows<0 : i64, 0 : i64>", "!kv.rows<f32, f32>", '!kv.cache<"paged">', "!kv.zork", "!kv.cache",
    '!kv.operand<"fa3", f16, 1 : i64, 1 : i64, false, 1 : i64, none, 1 : i64>', '!kv.cache<1, 2, 3, 4, 5, 6, 7, 8>',
    '!kv.collection<"paged", i8, 1 : i64, 9 : i64, true, 2 : i64, f16, 4 : i64>',
    '!kv.tma<"x", f32, array<i64>, 3 : i64>',
)  # fmt: skip
ATTRIBUTES = (
    "unit", "true", "[]", "{}", '"zork"', "1.0 : f32", "array<i32>", "array<i32: 1, -1, 1>", "array<i64: 1>",
    "dense<0> : vector<4xi32>", "@symbol", "#kv.zork", "affine_map<(d0) -> (d0)>", "i32", "-5 : i64", "0 : index",
    "3 : i8", "4 : i65", "loc(unknown)",
)  # fmt: skip


# Ops on whole caches: these work outside kernels.
OPERATION = re.compile("|".join(f'"{name}"' for name in kv.effects.tier_one()))
HEAD = re.compile(r"^!\w+ = .*\n", re.MULTILINE)
FUNCTION = re.compile(r"^func\.func @.*?^}\n", re.MULTILINE | re.DOTALL)


@functools.cache
def valid() -> tuple[str, ...]:
    """Functions of the dialect's lit tests that hold to every rule, one a text."""
    found = []
    for path in ("dialect/ops.mlir", "dialect/effects.mlir", "kv-opt/Inputs/kernel.mlir"):
        text = re.sub(r"^\s*//.*\n", "", (TESTS / path).read_text(), flags=re.MULTILINE)
        head = "".join(HEAD.findall(text))
        found += [head + f for f in FUNCTION.findall(text)] or [text]
    return tuple(found)


@functools.cache
def kernels() -> tuple[str, ...]:
    """The valid functions without results, as kernels of a GPU module: what the lowering passes work on."""
    found = []
    for text in valid():
        head, body = "".join(HEAD.findall(text)), "".join(FUNCTION.findall(text))
        if body and "-> " not in body.partition("{\n")[0] and not OPERATION.search(body):
            name, _, rest = body.removeprefix("func.func ").partition("(")
            arguments, _, rest = rest.partition(") {\n")
            body = f"gpu.func {name}({arguments}) kernel {{\n" + rest.replace("\n  return\n", "\n  gpu.return\n")
            found.append(f"{head}module attributes {{gpu.container_module}} {{ gpu.module @kernels {{\n{body}}} }}\n")
    return tuple(found)


@functools.cache
def invalid() -> tuple[str, ...]:
    """Chunks that break one rule each."""
    paths = sorted((TESTS / "dialect").glob("invalid*.mlir"))
    return tuple(c for path in paths for c in re.split(r"^// -----$", path.read_text(), flags=re.MULTILINE))


def drop(r: random.Random, tokens: list[str]) -> None:
    del tokens[r.randrange(len(tokens))]


def repeat(r: random.Random, tokens: list[str]) -> None:
    i = r.randrange(len(tokens))
    tokens.insert(i, tokens[i])


def swap(r: random.Random, tokens: list[str]) -> None:
    i, j = r.randrange(len(tokens)), r.randrange(len(tokens))
    tokens[i], tokens[j] = tokens[j], tokens[i]


def truncate(r: random.Random, tokens: list[str]) -> None:
    del tokens[r.randrange(1, len(tokens) + 1) :]


def _replace(r: random.Random, tokens: list[str], wanted: str, choices: tuple[str, ...]) -> None:
    places = [i for i, t in enumerate(tokens) if re.fullmatch(wanted, t)]
    if places:
        tokens[r.choice(places)] = r.choice(choices)


def number(r: random.Random, tokens: list[str]) -> None:
    _replace(r, tokens, r"\d+", NUMBERS)


def type_(r: random.Random, tokens: list[str]) -> None:
    _replace(r, tokens, r"[if]\d+|bf16|index|!\w+", TYPES)


def attribute(r: random.Random, tokens: list[str]) -> None:
    places = [i for i, t in enumerate(tokens) if t == "=" and i + 2 < len(tokens)]
    if places:
        i = r.choice(places)
        tokens[i + 1 : i + 3] = [" ", r.choice(ATTRIBUTES)]


def name(r: random.Random, tokens: list[str]) -> None:
    names = tuple(t for t in tokens if t.startswith('"kv.')) or ('"kv.load"',)
    _replace(
        r, tokens, r'"[^"]*"', (*names, '"kv.zork"', '"scf.for"', '"builtin.module"', '"func.return"', '""', '"kv."')
    )


def value(r: random.Random, tokens: list[str]) -> None:
    _replace(r, tokens, r"%\w+", (*(t for t in tokens if t.startswith("%")), "%zork", "%0"))


def noise(r: random.Random, tokens: list[str]) -> None:
    tokens.insert(
        r.randrange(len(tokens)),
        r.choice(["\0", "\x80", "\u00e9", "{", ")", "<", '"', "//", "#", "\n", "^bb0:", "?", "::"]),
    )


# Those that leave the syntax whole come more often: they reach verifiers and passes.
MUTATIONS: tuple[Callable[[random.Random, list[str]], None], ...] = (
    drop, repeat, swap, truncate, noise, number, number, number, type_, type_, attribute, attribute, name,
    value, value, value,
)  # fmt: skip


def mutants(seed: int, count: int, seeds: tuple[str, ...]) -> Iterator[str]:
    r = random.Random(seed)
    for _ in range(count):
        tokens = TOKEN.findall(r.choice(seeds))
        for _ in range(r.choice((1, 1, 1, 2, 3, 8))):
            if tokens:
                r.choice(MUTATIONS)(r, tokens)
        yield "".join(tokens)


def feed(texts: list[str], pipeline: str) -> list[str]:
    """Outcomes, one a text; the last is ``died`` when the process ended."""
    job = json.dumps({"texts": texts, "pipeline": pipeline})
    environment = os.environ | {"PYTHONFAULTHANDLER": "0"}
    ran = subprocess.run(
        [sys.executable, str(WORKER)],
        input=job,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    outcomes = [line.split(" ", 2)[2] for line in ran.stdout.splitlines() if line.startswith("done ")]
    if ran.returncode != 0:
        outcomes.append(f"died with {ran.returncode}: {ran.stderr[-2000:]}")
    return outcomes


UPSTREAM = "verify-kv,canonicalize,cse,loop-invariant-code-motion,verify-kv"
LOWERING = (
    "verify-kv,lower-kv-tiles,expand-kv-tma,hoist-kv-lookups,vectorize-kv-lookups,plan-kv-access,lower-kv-access,"
    "lower-kv-tma,lower-kv-casts,lower-kv-buffers,allocate-kv-shared,flatten-kv-types"
)
CASES = {"valid": (valid, UPSTREAM), "invalid": (invalid, UPSTREAM), "kernels": (kernels, LOWERING)}


@pytest.mark.parametrize("case", CASES)
def test_broken_ir_is_refused_with_a_diagnostic(case: str) -> None:
    seeds, pipeline = CASES[case]
    texts = list(mutants(seed=sum(map(ord, case)), count=600, seeds=seeds()))
    outcomes = feed(texts, pipeline)
    bad = [(o, t) for o, t in zip(outcomes, texts, strict=False) if o not in ("ok", "refused")]
    assert not bad, f"{len(bad)} texts; the first: {bad[0][0]}\n{bad[0][1]}"
    assert len(outcomes) == len(texts)
    # Mutations that leave all texts whole, or break all of them, would test little.
    assert outcomes.count("refused") > 100
    assert outcomes.count("ok") > 10


def test_whole_ir_is_accepted() -> None:
    assert len(valid()) > 25
    assert set(feed(list(valid()), UPSTREAM)) == {"ok"}
    assert len(kernels()) > 12
    assert set(feed(list(kernels()), "verify-kv")) == {"ok"}


def test_a_dead_process_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "worker.py"
    dying.write_text("import os\nprint('start 0', flush=True)\nos.abort()\n")
    monkeypatch.setattr(sys.modules[__name__], "WORKER", dying)
    assert feed(["module {}"], "")[-1].startswith("died with -6")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\0",
        "\x00\x01\x02",
        "ML\xefR",
        "//",
        "module",
        "{-#",
        "!a = !a",
        "#a = #a",
        "}" * 2000,
        "(" * 2000,
        "module {" * 200,
        '"' * 3,
    ],
    ids=repr,
)
def test_odd_texts(text: str) -> None:
    assert feed([text], "verify-kv")[-1] in ("ok", "refused")
