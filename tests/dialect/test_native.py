# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The native part, on a toy IRDL dialect: what upstream passes do once effects are attached."""

import subprocess
import sys
from typing import NamedTuple

import pytest

ir = pytest.importorskip("mlir.ir")
from mlir.dialects import irdl  # noqa: E402
from mlir.passmanager import PassManager  # noqa: E402

native = pytest.importorskip("kvarn.dialect.native")
from kvarn.lowering import rewrite  # noqa: E402

pytestmark = pytest.mark.skipif(native.available() is not None, reason=str(native.available()))

TOY = """
irdl.dialect @toy {
  irdl.operation @lookup { %i = irdl.is i32 irdl.operands(a: %i) irdl.results(r: %i) }
  irdl.operation @load   { %i = irdl.is i32 irdl.operands(a: %i) irdl.results(r: %i) }
  irdl.operation @store  { %i = irdl.is i32 irdl.operands(a: %i) }
  irdl.operation @alloc  { %i = irdl.is i32 irdl.results(r: %i) }
  irdl.operation @opaque { %i = irdl.is i32 irdl.operands(a: %i) irdl.results(r: %i) }
}
"""


class Effect(NamedTuple):
    kind: str
    resource: str = "cache"
    operand: int | None = None


class Effects(NamedTuple):
    effects: tuple
    speculatable: bool = False


EFFECTS = {
    "toy.lookup": Effects((), True),
    "toy.load": Effects((Effect("read"),)),
    "toy.store": Effects((Effect("write"),)),
    "toy.alloc": Effects((Effect("allocate", "memory"),)),
}


@pytest.fixture
def context():
    with ir.Context() as made, ir.Location.unknown():
        irdl.load_dialects(ir.Module.parse(TOY))
        yield made


def run(body: str, pipeline: str) -> str:
    module = ir.Module.parse(f"func.func @f(%i: i32, %c: i1, %n: index) -> i32 {{\n{body}\n}}")
    PassManager.parse(f"builtin.module({pipeline})").run(module.operation)
    assert module.operation.verify()
    return str(module)


def test_unused_reads_and_pure_ops_are_dropped_and_writes_are_not(context):
    assert native.attach(context, EFFECTS)
    body = """
      %0 = "toy.lookup"(%i) : (i32) -> i32
      %1 = "toy.load"(%0) : (i32) -> i32
      %2 = "toy.alloc"() : () -> i32
      %3 = "toy.opaque"(%i) : (i32) -> i32
      "toy.store"(%i) : (i32) -> ()
      return %i : i32"""
    text = run(body, "canonicalize")
    assert [n for n in ("lookup", "load", "alloc", "opaque", "store") if f"toy.{n}" in text] == ["opaque", "store"]


@pytest.mark.parametrize(("between", "loads"), [("", 1), ('"toy.store"(%i) : (i32) -> ()', 2)])
def test_reads_are_merged_only_when_no_write_lies_between(context, between, loads):
    native.attach(context, EFFECTS)
    body = f"""
      %0 = "toy.load"(%i) : (i32) -> i32
      {between}
      %1 = "toy.load"(%i) : (i32) -> i32
      %2 = arith.addi %0, %1 : i32
      return %2 : i32"""
    assert run(body, "cse").count("toy.load") == loads


def test_attach_wants_a_context():
    with pytest.raises(TypeError, match=r"mlir\.ir\.Context"):
        native.attach(object(), EFFECTS)


def test_contexts_do_not_share_effects(context):
    native.attach(context, EFFECTS)
    with ir.Context(), ir.Location.unknown():
        irdl.load_dialects(ir.Module.parse(TOY))
        assert "toy.load" in run('%0 = "toy.load"(%i) : (i32) -> i32\nreturn %i : i32', "canonicalize")


def test_many_contexts_come_and_go():
    body = '%0 = "toy.load"(%i) : (i32) -> i32\n%1 = "toy.load"(%i) : (i32) -> i32\nreturn %i : i32'
    for _ in range(20):
        with ir.Context() as made, ir.Location.unknown():
            irdl.load_dialects(ir.Module.parse(TOY))
            native.attach(made, EFFECTS)
            assert "toy.load" not in run(body, "cse")


@pytest.mark.parametrize(
    ("effects", "error", "message"),
    [
        ({"toy.missing": Effects(())}, ValueError, "not registered"),
        ({"arith.addi": Effects(())}, ValueError, "not registered|not belong"),
        ({"toy.load": Effects((Effect("peek"),))}, ValueError, "read, write, allocate, free"),
        ({"toy.load": Effects((Effect("read", "disk"),))}, ValueError, "memory, cache"),
        ({"toy.load": Effects((Effect("read", "cache", -2),))}, TypeError, "index or None"),
        ({"toy.load": Effects((Effect("read"),) * 9)}, ValueError, "at most 8"),
    ],
)
def test_a_wrong_declaration_is_refused(context, effects, error, message):
    context.load_all_available_dialects()
    with pytest.raises(error, match=message):
        native.attach(context, effects)


WALKED = """
  %0 = "toy.lookup"(%i) : (i32) -> i32
  scf.if %c {
    "toy.store"(%0) : (i32) -> ()
  }
  %1 = "toy.lookup"(%0) : (i32) -> i32
  return %1 : i32"""


@pytest.mark.skipif(native.walker() is None, reason="it was built without Python's headers")
@pytest.mark.parametrize("names", [None, (), ("toy.lookup",), ("scf.if", "toy.store", "toy.lookup", "func.return")])
def test_the_native_walk_finds_what_the_walk_of_the_bindings_finds(context, names, monkeypatch):
    module = ir.Module.parse(f"func.func @f(%i: i32, %c: i1) -> i32 {{{WALKED}\n}}")
    asked = []

    def match(name):
        asked.append(name)
        return name in names

    found = rewrite.walk(module, None if names is None else match)
    assert len(asked) == len(set(asked))  # once per name
    monkeypatch.setattr(native, "walker", lambda: None)
    assert found == rewrite.walk(module, None if names is None else names.__contains__)
    assert len(found) == {None: 8, (): 0, ("toy.lookup",): 2}.get(names, 5)


@pytest.mark.skipif(native.walker() is None, reason="it was built without Python's headers")
def test_the_native_walk_ends_with_the_error_of_its_callback(context):
    with pytest.raises(ZeroDivisionError):
        rewrite.walk(ir.Module.parse("func.func private @f()"), lambda name: 1 / 0)


def test_the_llvm_symbols_stay_private_to_the_bindings():
    """A global load of the library (or of the bindings) would make LLVM's symbols visible to every package."""
    code = (
        "import ctypes; from kvarn.dialect import native; assert native.available() is None, native.available();"
        "own = ctypes.CDLL(None);"
        "assert not hasattr(own, 'mlirContextCreate'); assert not hasattr(own, 'LLVMContextCreate');"
        "assert not hasattr(own, 'kvarn_attach_effects')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
