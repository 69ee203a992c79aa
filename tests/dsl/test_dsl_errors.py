# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Mistakes in kernels are reported at the user's file, line and column, with the line and a caret: those of refused.py,
and what is said around them.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import linecache
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import kvarn as kv
from kvarn.dialect.layout import CacheSpec, CollectionSpec
from kvarn.errors import KernelError, KernelTypeError, UnsupportedError, from_mlir

PAGED = CacheSpec("paged", kv.bf16, 8, 128, 16)
CONTINUOUS = CacheSpec("continuous", kv.bf16, 8, 128)
I32, F32 = kv.Buffer[kv.i32, 1], kv.Buffer[kv.f32, 1]

# --- the mistakes of refused.py ------------------------------------------------------------------------

REFUSED = Path(__file__).with_name("refused.py")
EXPECTED = re.compile(r"# *(\^)? *expected-error(?:@(\w+))? \{\{(\w+): (.*)\}\}")


class Expected(NamedTuple):
    """What a comment of refused.py expects."""

    line: int
    column: int
    target: str | None
    error: str
    message: str


def expected():
    """The expectations, by the kernel that is the first to end at or after the line that is to blame."""
    lines = REFUSED.read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    kernels = [f for f in tree.body if isinstance(f, ast.FunctionDef) and all(a.annotation for a in f.args.args)]
    blamed = 0
    for number, line in enumerate(lines, 1):
        found = EXPECTED.fullmatch(line)
        if found is None:
            blamed = number
            continue
        at = lines[blamed - 1]
        column = line.index("^") if found[1] else len(at) - len(at.lstrip())
        name = next(f.name for f in kernels if f.end_lineno >= blamed)
        yield pytest.param(
            name, Expected(blamed, column + 1, *found.groups()[1:]), id="-".join(filter(None, (name, found[2])))
        )


@pytest.fixture(scope="module")
def mistakes():
    spec = importlib.util.spec_from_file_location("refused", REFUSED)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {}
    for function in vars(module).values():
        if inspect.isfunction(function) and function.__annotations__:
            specs, function.__annotations__ = [*function.__annotations__.values()], {}
            found[function.__name__] = kv.kernel(function), specs
    return found


@pytest.mark.whole
@pytest.mark.parametrize(("name", "expected"), list(expected()))
def test_mistake_is_reported_at_its_line_and_column(mistakes, name, expected):
    kernel, specs = mistakes[name]
    with pytest.raises(KernelError) as caught:
        kernel.trace(specs) if expected.target is None else kv.compile(kernel, *specs, target=expected.target)
    found = caught.value
    assert (type(found).__name__, found.location.file) == (expected.error, str(REFUSED))
    assert (found.location.line, found.location.column) == (expected.line, expected.column)
    assert expected.message in found.message
    # The line stands below the message, and the caret under the column.
    rendered, line = str(found).splitlines(), linecache.getline(str(REFUSED), expected.line)
    assert rendered[0] == f"{REFUSED}:{expected.line}:{expected.column}: error: {found.message}"
    assert rendered[1].strip() == line.strip()
    assert rendered[1][rendered[2].index("^") :] == line[expected.column - 1 :].rstrip()


# --- calls ---------------------------------------------------------------------------------------------


def helper(a, b=2, *, c):
    return a + b + c


def inner(x):
    return x + 0.5


def middle(x):
    return inner(x)


def test_error_in_an_inlined_function_names_every_call():
    @kv.kernel
    def outer(x: kv.Buffer[kv.i32, 1]):
        x[0] = middle(x[0])

    with pytest.raises(KernelTypeError) as caught:
        outer.trace([I32])
    error = caught.value
    text = [linecache.getline(__file__, p.line).strip() for p in (error.location, *error.callers)]
    assert text == ["return x + 0.5", "return inner(x)", "x[0] = middle(x[0])"]
    assert str(error).count("note: called from here") == 2


# --- signatures --------------------------------------------------------------------------------------------


@kv.kernel
def annotated(cache: kv.PagedKVCache, alpha: kv.f32, x: kv.Buffer[kv.i32, 1], width: int = 4):
    if kv.thread_id.x < width:
        x[0] = 1


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            [CONTINUOUS, kv.f32, I32],
            "argument 'cache' of annotated must be the spec of a PagedKVCache, got the spec of a continuous cache",
        ),
        ([PAGED, kv.i32, I32], "argument 'alpha' of annotated must be kv.f32, got kv.i32"),
        ([PAGED, kv.f32, F32], "argument 'x' of annotated must be kv.Buffer[kv.i32, 1], got kv.Buffer[kv.f32, 1]"),
        ([PAGED, kv.f32, kv.Buffer[kv.i32, 2]], "must be kv.Buffer[kv.i32, 1], got kv.Buffer[kv.i32, 2]"),
        (
            [PAGED, kv.f32, I32, 2.5],
            "argument 'width' of annotated must be a Python int, known at compile time, got 2.5",
        ),
        ([PAGED, kv.f32], "annotated(cache, alpha, x, width) takes 4 arguments, got 2"),
        ([PAGED, kv.f32, I32, 1, 2], "takes 4 arguments, got 5"),
        (
            [CollectionSpec(PAGED), kv.f32, I32],
            "must be the spec of a PagedKVCache, got the spec of a paged collection",
        ),
    ],
)
def test_spec_must_match_its_annotation(specs, message):
    with pytest.raises(KernelTypeError, match=re.escape(message)) as caught:
        annotated.trace(specs)
    assert caught.value.location.line == annotated.function.__code__.co_firstlineno


def test_kernel_refuses_star_parameters():
    with pytest.raises(UnsupportedError, match="no parameters like"):

        @kv.kernel
        def k(*buffers):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 2048}, "at most 1024 threads"),
        ({"block": (1, 2, 3, 4)}, "one to three"),
        ({"max_threads": 0}, "positive int"),
    ],
)
def test_kernel_option_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        kv.kernel(**options)(lambda x: None)


def test_unreadable_annotation_is_reported():
    @kv.kernel
    def k(x: kv.Bufer[kv.i32, 1]):
        x[0] = 1

    with pytest.raises(KernelError, match=re.escape("annotation 'kv.Bufer[kv.i32, 1]' of 'x' cannot be read")):
        k.trace([I32])


# --- diagnostics of later passes ------------------------------------------------------------------------------


def test_diagnostic_of_a_pass_points_at_the_user_line():
    from mlir import ir

    from kvarn.dialect.kv import context_diagnostics, make_context

    @kv.kernel
    def k(x: kv.Buffer[kv.i32, 1]):
        x[0] = helper(x[1], c=3)

    context = make_context()
    module = k.trace([I32], context=context)
    with context:
        adds = []
        module.operation.walk(
            lambda op: adds.append(op) or ir.WalkResult.ADVANCE if op.name == "arith.addi" else ir.WalkResult.ADVANCE
        )
        adds[0].location.emit_error("a pass says no")
    error = from_mlir(ir.MLIRError("failed", []), context_diagnostics(context))
    assert error.message == "a pass says no"
    assert linecache.getline(__file__, error.location.line).strip() == "return a + b + c"
    assert [linecache.getline(__file__, p.line).strip() for p in error.callers] == ["x[0] = helper(x[1], c=3)"]
