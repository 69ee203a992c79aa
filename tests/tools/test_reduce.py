# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kv-reduce``: what is left is small, valid, and still interesting."""

from __future__ import annotations

import re

import pytest

import kvarn as kv
from kvarn.compilation import driver as compiler
from kvarn.lowering.rewrite import walk
from kvarn.tools.reduce import Reducer, command_of, main


@kv.kernel
def busy(cache: kv.KVCache, x: kv.Buffer[kv.f32, 1], unused: kv.f32, wanted: kv.f32):
    b = kv.block_id.x
    for t in range(cache.cache_length(b)):
        v = cache.load(b, 0, t, 0, width=8, dtype=kv.f32)
        if t % 17 == 3:
            x[t] = v[3] + kv.math.exp(v[2] * wanted)
        else:
            cache.store(b, 0, t, 0, v)


SPEC = kv.CacheSpec("paged", kv.f32, num_heads=2, head_size=64, page_size=16)


@pytest.fixture(scope="module")
def text():
    with compiler.diagnosed(compiler.context()):
        return str(compiler.as_module(busy, (SPEC, kv.Buffer[kv.f32, 1], kv.f32, kv.f32), compiler.context()))


def count(text):
    return len(walk(compiler.parse(text)))


def test_what_the_command_does_not_look_at_goes(text):
    reducer = Reducer(text, lambda t: "math.exp" in t)
    small = reducer.run()
    assert "math.exp" in small
    assert count(text) > 30
    assert count(small) <= 7  # two modules, a kernel, a constant, the op, a return
    assert "scf." not in small
    assert "kv.load" not in small
    assert "%arg" not in small  # no argument is left


def test_what_depends_on_each_other_stays(text):
    """The load's value reaches the exponential."""

    def interesting(t):
        loads = re.findall(r'(%\w+) = "kv.load"', t)
        exps = re.findall(r"math.exp (%\w+)", t)
        return bool(loads and exps) and "vector" in t

    small = Reducer(text, interesting).run()
    assert '"kv.load"' in small
    assert "math.exp" in small
    assert "scf.if" not in small


def test_every_candidate_is_valid(text):
    asked = []

    def interesting(t):
        compiler.parse(t).operation.verify()
        asked.append(t)
        return "kv.store" in t

    Reducer(text, interesting).run()
    assert len(asked) == len(set(asked)), "a text was asked for twice"
    assert len(asked) < 150


def test_a_command_is_given_the_file(tmp_path):
    assert command_of("grep -q wanted", 10)("is wanted\n")
    assert not command_of("grep -q wanted", 10)("is not\n")
    assert command_of("test -s {} && true", 10)("x")
    assert not command_of("sleep 5; true", 0.2)("x")


def test_the_smallest_so_far_is_written_at_every_step(tmp_path, text):
    """A reduction that is stopped has its result so far; what is there is always whole."""
    file, out, seen = tmp_path / "busy.mlir", tmp_path / "made" / "small.mlir", tmp_path / "seen"
    file.write_text(text)
    # The command itself looks at what is there, and writes down how long it is.
    command = f"cat {{}} | grep -q kv.store && (wc -c < {out} || echo none) >> {seen} 2>&1"
    assert main([str(file), f"--interesting={command}", "-o", str(out), "--quiet"]) == 0
    sizes = [int(line) for line in seen.read_text().split() if line.isdigit()]
    assert len(sizes) > 3
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] > out.stat().st_size
    assert [p.name for p in out.parent.iterdir()] == ["small.mlir"]


def test_the_command_line(tmp_path, capsys, text):
    """A kv-opt in the command that says what is interesting is answered by one process."""
    file, out = tmp_path / "busy.mlir", tmp_path / "small.mlir"
    file.write_text(text)
    command = "command -v kv-opt | grep -q /kv-opt-[^/]*/kv-opt && kv-opt --canonicalize {} | grep -q kv.store"
    assert main([str(file), f"--interesting={command}", "-o", str(out), "--timeout", "600"]) == 0
    assert count(out.read_text()) < 12
    assert "kv-reduce: operations: " in capsys.readouterr().err
    assert main([str(file), "--interesting=false"]) == 1
    assert "kv-reduce: error: the input is not interesting" in capsys.readouterr().err
    assert main([str(tmp_path / "none.mlir"), "--interesting=true"]) == 1
    file.write_text("nonsense(")
    assert main([str(file), "--interesting=true"]) == 1
