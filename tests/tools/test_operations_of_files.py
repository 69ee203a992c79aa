# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``--op`` of an operation in a file of the current folder, with buffers whose sizes only a command line can say.

What a file declares stays declared, so each call is a child of this process.
"""

from __future__ import annotations

import contextlib
import io

import pytest

from kvarn.tools import cli
from kvarn.tools.apart import apart

FIRST = '''
from typing import Any

import kvarn as kv
from kvarn.dialect import verify
from kvarn.dialect.base import Kv
from kvarn.dialect.effects import ReadsCache, TierOne, WritesMemory
from kvarn.dialect.ext import I32, Operand
from kvarn.dialect.types import CollectionType
from kvarn.dispatch import Operation
from kvarn.lowering.kernels import expands
from kvarn.ops import checks


class FirstOp(Kv.Operation, name="first_elements", traits=[TierOne, ReadsCache, WritesMemory]):
    """found [H, tokens]: the first element of each key of sequence 0, times a factor a head."""

    collection: Operand[CollectionType]
    layer: Operand[I32]
    factor: Operand[Any]
    found: Operand[Any]

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.collection, ("collection",))
        return spec is not None and verify.memref(self, self.found, 2, ("f32",), "found")


@kv.kernel(block=64)
def first_kernel(pool, layer: kv.i32, factor, out):
    h, t = kv.block_id.x, kv.thread_id.x
    keys = pool.get_key_cache(layer)
    if t < keys.cache_length(0):
        out[h, t] = keys.load(0, h, t, 0, dtype=kv.f32) * kv.f32(factor[h])


@expands("kv.first_elements")
def expand_first(op: Any, at: Any) -> None:
    grid = (at.spec(op.collection).num_heads, 1, 1)
    at.launch(first_kernel, [op.collection, op.layer, op.factor, op.found], grid, (64, 1, 1))


_FIRST = Operation("kv.first_elements", {"factor": 1, "found": 2}, lambda seen: None, written=("found",))


def first_elements(collection: Any, layer: int, factor: Any, found: Any, *, stream: Any = None) -> None:
    _FIRST((collection, checks.layer_of(collection, layer, "first_elements"), factor, found), stream=stream)
'''
NAMED = {
    "module": ["--op", "first:first_elements"],
    "both": ["--op", "first.py:first_elements", "--extend", "first.py"],
}
SPECS = ["--spec", "collection=paged(f32, num_heads=2, head_size=64, page_size=16)", "--target", "sm_90a"]
FACTOR = ["--spec", "factor=buffer(i32, (2,))"]
SIZES, TOKENS = ["--spec", "found=buffer(f32, (2, 64))"], ["--spec", "found=buffer(f32, (2, none))"]
COMMANDS = {
    "explain": [*TOKENS, "--emulate", "--lengths", "20", "--new", "3"],
    "bisect": [*SIZES, "--lengths", "20,37", "--new", "3,1"],
}


def called(*arguments: str) -> tuple[int, str, str]:
    """The status, stdout and stderr of a call of the command, in a child."""

    def work() -> tuple[int, str, str]:
        out, told = io.TextIOWrapper(io.BytesIO()), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            status = cli.main(arguments)
            out.flush()
        return status, out.buffer.getvalue().decode(), told.getvalue()

    return tuple(apart(work))


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "first.py").write_text(FIRST)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("how", NAMED)
def test_a_file_of_the_current_folder_is_named_in_any_way(how):
    status, out, told = called("compile", *NAMED[how], *SPECS, *FACTOR, *SIZES)
    assert (status, told) == (0, "")
    assert "first_kernel" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_sizes_that_are_given_are_those_of_every_command(command):
    status, out, told = called(command, "--op", "first.py:first_elements", *SPECS, *FACTOR, *COMMANDS[command])
    assert (status, told) == (0, "")
    assert command != "bisect" or "no pass changed the answer" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("first.py:zork", "first.py has no function 'zork'"),
        ("none.py:zork", "expected a Python file, got none.py"),
        ("nothing:zork", "the module of nothing:FUNCTION cannot be imported: No module named 'nothing'"),
    ],
)
def test_what_is_not_there_is_named(name, message):
    status, out, told = called("compile", "--op", name, *SPECS, *SIZES)
    assert (status, out) == (1, "")
    assert message in told
    assert len(told.splitlines()) == 1
