# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Passes of users where they count: in ``kv.compile``, in launches, in ``kv.ops`` and in the commands."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from mlir import ir

import kvarn as kv
from kvarn import dispatch, pipelines
from kvarn.compilation import driver, extensions
from kvarn.lowering import index, loading, pipeline, registry
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import ops_named
from kvarn.ops import writes

F32 = kv.Buffer[kv.f32, 1]
_made = {}


@pytest.fixture
def once(request):
    """Make what a test's cases share, once."""
    return lambda make: _made.get(request.function) or _made.setdefault(request.function, make())


@kv.kernel
def triple(x: kv.Buffer[kv.f32, 1]):
    i = kv.thread_id.x
    x[i] = x[i] * 3.0


def replace(module: ir.Module, old: float, new: float) -> None:
    for op in ops_named(module, "arith.constant"):
        if isinstance(op.attributes["value"], ir.FloatAttr) and op.attributes["value"].value == old:
            op.attributes["value"] = ir.FloatAttr.get(ir.F32Type.get(), new)


def to_five(module):
    """Multiply by five."""
    replace(module, 3.0, 5.0)


def five_to_seven(module):
    replace(module, 5.0, 7.0)


@dataclass(frozen=True)
class Factor:
    factor: int = 3


@kv_pass(Factor)
def to_factor(module, options):
    replace(module, 3.0, options.factor)


def launched(kernel=None):
    x = np.ones(4, np.float32)
    (triple if kernel is None else kernel)[1, 4](x)
    return x[0]


def compiled(passes, **options):
    return kv.compile(triple, F32, target="host", passes=passes, **options)


# --- kv.compile ----------------------------------------------------------------------------------


def test_a_function_runs_after_or_before_a_pass_and_is_a_stage():
    for place in ("after:hoist-kv-lookups", "before:hoist-kv-lookups", "after:simplify-addresses", "before:verify-kv"):
        kernel = compiled({place: to_five})
        assert launched(kernel) == 5
        names = list(kernel.stages)
        where, _, beside = place.partition(":")
        assert names.index("to-five") - names.index(beside) == (1 if where == "after" else -1)
        assert "5.0" in kernel.stages["to-five"]
    assert launched(compiled({})) == 3


def test_several_passes_run_in_their_order():
    assert launched(compiled({"after:verify-kv": [to_five, five_to_seven]})) == 7
    assert launched(compiled({"after:verify-kv": [five_to_seven, to_five]})) == 5
    assert launched(compiled({"after:verify-kv": to_five, "after:to-five": five_to_seven})) == 7


def test_names_options_and_upstream_passes_are_taken():
    with pytest.raises(ValueError, match="'to-factor' does not refer to a registered pass"):
        compiled({"after:verify-kv": "to-factor"})
    registry.register(to_factor.kv_pass)
    try:
        assert launched(compiled({"after:verify-kv": ["cse", "to-factor{factor=9}", "canonicalize"]})) == 9
        assert launched(compiled({"after:verify-kv": "to-factor"}, options={"to-factor": "factor=4"})) == 4
        with pytest.raises(ValueError, match="option of to-factor must be one of factor, got 'zork'"):
            compiled({"after:verify-kv": "to-factor{zork=1}"})
    finally:
        del registry._extra["to-factor"]
    assert launched(compiled({"after:verify-kv": to_factor}, options={"to-factor": "factor=6"})) == 6


def test_an_inserted_pass_can_be_left_out_and_run_twice():
    assert launched(compiled({"after:verify-kv": to_five}, disable=["to-five"])) == 3
    twice = compiled({"after:verify-kv": to_five, "after:plan-kv-access": to_five})
    assert [name for name in twice.stages if name.startswith("to-five")] == ["to-five", "to-five#2"]


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ({"hoist-kv-lookups": to_five}, 'must be "after:PASS" or "before:PASS", got \'hoist-kv-lookups\''),
        ({"after:": to_five}, 'must be "after:PASS" or "before:PASS"'),
        ({"after:zork": to_five}, "a pass can run before or after one of verify-kv, .*got 'zork'"),
        ({"after:allocate-kv-shared": to_five}, "a pass can run after one of .*got 'allocate-kv-shared'"),
        ({"after:verify-kv": lambda module: None}, "pass name must be letters.*got '<lambda>'"),
        ({"after:verify-kv": "zork"}, "'zork' does not refer to a registered pass"),
        ({"after:verify-kv": 3}, "a pass must be a function"),
        ({"after:verify-kv": lambda: None}, "must be a function of "),
    ],
)  # fmt: skip
def test_what_cannot_be_inserted_is_refused(passes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        compiled(passes)


def test_a_function_may_not_have_the_name_of_another_pass():
    def cse(module): ...
    def verify_kv(module): ...

    with pytest.raises(ValueError, match="'cse' is taken by a pass of MLIR"):
        compiled({"after:verify-kv": cse})
    with pytest.raises(ValueError, match="'verify-kv' is taken"):
        compiled({"after:verify-kv": verify_kv})


def test_an_exception_names_the_passs_own_file_and_line_and_is_the_cause():
    def broken(module):
        ops_named(module, "gpu.func")[0].no_such_thing  # noqa: B018

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(kv.KernelError) as caught:
        compiled({"after:verify-kv": broken})
    assert "pass 'broken' raised AttributeError: " in caught.value.message
    assert f"({__file__}:{line})" in caught.value.message
    assert isinstance(caught.value.__cause__, AttributeError)


# --- kv.pipeline ---------------------------------------------------------------------------------


def test_a_context_applies_to_launches_inside_it_and_to_none_outside():
    assert launched() == 3
    with kv.pipeline({"after:verify-kv": to_five}):
        assert launched() == 5
        with kv.pipeline({"after:to-five": five_to_seven}):
            assert launched() == 7
        with kv.pipeline(disable=["to-five"]):
            assert launched() == 3
        assert launched(kv.compile(triple, F32, target="host")) == 5
        assert launched() == 5
    assert launched() == 3


def test_a_context_applies_to_operations():
    blocks = np.zeros((2, 2, 1, 16, 1, 24), np.float32)
    pool = kv.PagedKVCacheCollection(blocks, np.array([0], np.uint32), np.array([[0]], np.uint32), 1, 4)
    x, offsets = np.ones((1, 1, 24), np.float32), np.array([0, 1], np.uint32)
    ran = []

    def nothing_stored(module):
        ran.append("pass")
        for op in ops_named(module, "kv.store"):
            op.erase()

    def stored():
        blocks[:] = 0
        kv.ops.store_ragged(pool.get_key_cache(0), x, offsets)
        return blocks.any()

    assert stored()
    with kv.pipeline({"before:plan-kv-access": nothing_stored}):
        assert not stored()
        assert not stored()
    assert stored()


def test_a_context_is_of_its_thread():
    found = []
    with kv.pipeline({"after:verify-kv": to_five}):
        thread = threading.Thread(target=lambda: found.append((pipelines.current().inserted, launched())))
        thread.start()
        thread.join()
    assert found == [((), 3)]


# --- loading files -------------------------------------------------------------------------------

TWO = '''
"""Two passes."""
from kvarn.lowering.pass_base import kv_pass
from mlir import ir

@kv_pass()
def {first}(module):
    "The first."
    module.operation.attributes["kv.first"] = ir.StringAttr.get("{value}")

@kv_pass()
def {second}(module, handle):
    module.operation.attributes["kv.second"] = ir.UnitAttr.get()
'''


@pytest.fixture
def file(tmp_path):
    before = dict(registry._extra)
    yield tmp_path / "mine.py"
    registry._extra.clear()
    registry._extra.update(before)


def test_a_file_may_have_several_passes_and_an_edited_file_may_be_loaded_again(file, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for value in ("one", "two"):
        file.write_text(TWO.format(first="mark_first", second="mark_second", value=value))
        os.utime(file, (0, 0))  # edited within a second, to a text of the same size: what Python's bytecode goes by
        assert [p.name for p in loading.load_passes(file)] == ["mark-first", "mark-second"]
        kernel = compiled({"after:verify-kv": ["mark-first", "mark-second"]})
        assert f'kv.first = "{value}"' in kernel.stages["mark-first"]
        assert "kv.second" in kernel.stages["mark-second"]
    assert registry.find("mark-first").summary == "The first."


# --- the disk cache ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["compile", "operation"])
def test_an_inserted_pass_runs_whenever_something_is_compiled(way, monkeypatch):
    """Also when the cache on disk has code without it: what a pass prints or counts is its work."""
    ran = []

    def looks(module):
        ran.append(len(ops_named(module, "gpu.func")))

    blocks = np.zeros((2, 2, 1, 16, 1, 64), np.float32)
    pool = kv.PagedKVCacheCollection(blocks, np.array([3], np.uint32), np.array([[0]], np.uint32), 1, 4)
    operands = pool.get_key_cache(0), np.ones((1, 1, 64), np.float32), np.array([0, 1], np.uint32)

    def compiles(passes=None):
        with kv.pipeline(passes):
            if way == "compile":
                return kv.compile(triple, F32, target="host").artifact
            return dispatch.artifact(writes._STORE_RAGGED.specialised(operands, (), None, None))

    before = compiles()  # which leaves it in the cache
    made = [compiles({"after:verify-kv": looks}) for _ in range(3)]
    assert len(ran) == 3
    assert all(m.code == before.code for m in made)
    monkeypatch.setattr(driver, "lower", None)  # nothing may be compiled now
    assert compiles().code == before.code


USES = """
import sys
import numpy as np
import kvarn as kv

{code}

@kv.kernel
def touch(cache: kv.KVCache, x: kv.Buffer[kv.f32, 1]):
    x[0] = kv.f32(cache.max_context_length())

blocks = np.zeros((2, 2, 1, 16, 1, 64), np.float32)
pool = kv.PagedKVCacheCollection(blocks, np.array([3], np.uint32), np.array([[0]], np.uint32), 1, 4)
x = np.zeros(1, np.float32)
touch[1, 1](pool.get_key_cache(0), x)
print(x[0])
"""
PATCH = """
from kvarn.lowering.passes.kv import lower_kv_access
def length(op, options):
    from kvarn.lowering.index import const
    return const(HELD)
HELD = {value}
lower_kv_access.RULES.table["kv.max_context_length"] = length
"""


def run(folder: Path, code: str) -> str:
    text = USES.replace("{code}", code)
    command = [sys.executable, "-"]
    environment = {"PATH": "/usr/bin:/bin", "KVARN_CACHE_DIR": str(folder / "cache"), "HOME": str(folder)}
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_code_without_source_counts_by_what_it_does_and_reads(tmp_path):
    """As in a notebook or read from stdin; the globals that it reads count too."""
    for value in (31, 32):
        assert run(tmp_path, PATCH.format(value=value)) == f"{value}.0"
    assert run(tmp_path, "") == "4.0"


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial, functools.cache, functools.wraps(index.const)])
def test_what_stands_in_the_place_of_kvarns_is_found_however_it_is_wrapped(monkeypatch, wrap):
    def mine(*args): ...

    monkeypatch.setattr(index, "const", wrap(mine))
    monkeypatch.setattr(index.Ix, "wide", mine)
    found = dict(extensions.registered())
    assert set(found) == {"kvarn.lowering.index.const", "kvarn.lowering.index.Ix.wide"}
    digest = extensions.digest_of(found.items())
    assert digest
    # The same code elsewhere is something else.
    assert extensions.digest_of([("kvarn.lowering.index.pointer", index.const)]) != digest


# --- entering the pipeline -----------------------------------------------------------------------


@kv.kernel
def scaled(cache: kv.KVCache, alpha: kv.f32):
    shared = kv.shared(64, kv.f32)
    shared[0] = alpha
    for t in range(cache.cache_length(0)):
        x = cache.load(0, 0, t, 0, width=8, dtype=kv.f32)
        cache.store(0, 0, t, 0, cache.dtype(x * shared[0]))


SPEC = kv.CacheSpec("paged", kv.bf16, 2, 64, 16)


@pytest.mark.parametrize("name", ["input", *(s.name for s in pipeline.default_steps("host"))])
def test_the_pipeline_of_the_host_may_be_entered_at_every_stage(name, once):
    """Its code is the same but for the order of constants: here the results are."""
    kernel = once(lambda: kv.compile(scaled, SPEC, kv.f32, target="host"))
    again = kv.compile(kernel.stages[name], target="host")
    assert again.artifact.entries == kernel.artifact.entries
    blocks = np.ones((2, 2, 1, 16, 2, 64), kv.bf16.numpy)
    pool = kv.PagedKVCacheCollection(blocks, np.array([3], np.uint32), np.array([[1]], np.uint32), 1, 4)
    again[1, 1](pool.get_key_cache(0), 2.0)
    assert blocks.astype(np.float32).sum() == blocks.size + 3 * 8
