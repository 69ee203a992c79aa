# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""IR for fuzzers: that of the lit tests, that of every stage of compiled kernels, and mutations of both."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import kvarn.dialect.kv  # noqa: F401 (declares the operations)
from kvarn.dialect import effects, named_operands

TESTS = Path(__file__).resolve().parents[1]
TOKEN = re.compile(r"\s+|[%@!#^][\w.$-]+|\"[^\"\n]*\"|\w+|.", re.DOTALL)
FOLDED = ("-1", "-2", "2", "5", "31", "32", "64", "2147483647", "-2147483648", "9223372036854775807")
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
OPERATION = re.compile(f'"({"|".join(map(re.escape, effects.tier_one()))})"')
HEAD = re.compile(r"^!\w+ = .*\n", re.MULTILINE)
FUNCTION = re.compile(r"^func\.func @.*?^}\n", re.MULTILINE | re.DOTALL)


@functools.cache
def valid() -> tuple[str, ...]:
    """Functions of the dialect's lit tests that hold to every rule, one a text; operands by name and by place."""
    found = []
    for path in ("dialect/ops.mlir", "dialect/effects.mlir", "kv-opt/Inputs/kernel.mlir"):
        text = re.sub(r"^\s*//.*\n", "", (TESTS / path).read_text(), flags=re.MULTILINE)
        head = "".join(HEAD.findall(text))
        found += [head + f for f in FUNCTION.findall(text)] or [text]
    return tuple(dict.fromkeys(form for text in found for form in (text, named_operands.positional(text))))


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
    """Texts that break one rule each: of the functions of the dialect's lit tests, whose every refused op is alone."""
    paths = sorted((TESTS / "dialect").glob("invalid*.mlir"))
    chunks = (c for path in paths for c in re.split(r"^// -----$", path.read_text(), flags=re.MULTILINE))
    return tuple(text for chunk in chunks for text in _rules(chunk))


def _rules(chunk: str) -> list[str]:
    """A text for each op of a chunk that is refused, without the others; the chunk itself where it has none."""
    found, head = [], "".join(HEAD.findall(chunk))
    for function in FUNCTION.findall(chunk):
        pieces = re.split(r"^(?=  \S)", function, flags=re.MULTILINE)
        refused = [i for i, piece in enumerate(pieces) if i and "expected-error" in pieces[i - 1]]
        for i in refused:
            others = {*refused, *(j for j, piece in enumerate(pieces) if "expected-" in piece)} - {i}
            found.append(head + "".join(piece for j, piece in enumerate(pieces) if j not in others))
    return found or [chunk]


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


def constant(r: random.Random, tokens: list[str]) -> None:
    """A number that another op takes: folders look at it, and some check less than verifiers do."""
    places = [i for i, t in enumerate(tokens) if t == "constant"]
    numbers = [next((j for j in range(i, min(i + 6, len(tokens))) if tokens[j].isdigit()), None) for i in places]
    found = [j for j in numbers if j is not None]
    if found:
        tokens[r.choice(found)] = r.choice(FOLDED)


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
    drop, repeat, swap, truncate, noise, number, number, number, constant, constant, type_, type_, attribute, attribute,
    name, value, value, value,
)  # fmt: skip


def mutants(seed: int, count: int, seeds: tuple[str, ...]) -> Iterator[str]:
    r = random.Random(seed)
    for _ in range(count):
        tokens = TOKEN.findall(r.choice(seeds))
        for _ in range(r.choice((1, 1, 1, 2, 3, 8))):
            if tokens:
                r.choice(MUTATIONS)(r, tokens)
        yield "".join(tokens)


# --- what kv-opt's fuzzer runs -----------------------------------------------------------------------

TARGETS = ("host", "sm_80", "sm_90a", "sm_100a")
EMITTED = ("mlir", "llvm", "ptx")
UPSTREAM = "verify-kv,canonicalize,cse,loop-invariant-code-motion,verify-kv"


@functools.cache
def stages() -> tuple[tuple[str, str, str], ...]:
    """(target, pass, IR after it) of every other kernel of the lit tests and of attention, for two targets."""
    from kvarn.compilation import driver as compiler
    from kvarn.lowering import pipeline, runner
    from kvarn.lowering.target import by_name

    found = []
    for target in ("host", "sm_90a"):
        for text in (*kernels()[::2], (TESTS / "lowering/Inputs/attention.mlir").read_text()):
            module = compiler.parse(text)
            try:
                with compiler.diagnosed(module.context):
                    runner.run(
                        module,
                        pipeline.steps(by_name(target)),
                        observer=lambda n, m, t=target: found.append((t, n, str(m))),
                    )
            except ValueError:
                continue  # one that this target does not have
    return tuple(found)


def text(seed: int) -> tuple[str, str, str, str]:
    """(IR, pipeline or "" for what is left of the target's, what to emit, target) of a seed."""
    r = random.Random(seed)
    target, emitted = r.choice(TARGETS), r.choice(EMITTED)
    kind = r.random()
    if kind < 0.5:
        target, after, source = r.choice(stages())
        pipeline = r.choice(("after " + after, "none"))
    elif kind < 0.75:
        source, pipeline = r.choice(kernels()), "after nothing"
    else:
        source, pipeline, emitted = r.choice((*valid(), *invalid())), UPSTREAM, "mlir"
    return next(mutants(r.randrange(2**62), 1, (source,))), pipeline, emitted, target
