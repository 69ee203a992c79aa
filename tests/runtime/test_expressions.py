# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expressions of a program's steps, against a plain interpreter of the same data."""

import types

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kvarn.artifact import Arg
from kvarn.dialect import dtypes
from kvarn.runtime.expressions import compile_expressions

ARGS = (Arg("x", "buffer", dtypes.f32, 2), Arg("n", "scalar", dtypes.i32))
VALUES = ((4096, 33, 128, 256), (-7,))  # data, shape0, shape1, stride0; value
DEVICE = types.SimpleNamespace(multiprocessors=132, shared_bytes=232448, l2_bytes=60 << 20, warp_size=32)

BINARY = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b, "ceildiv": lambda a, b: (a + b - 1) // b if b > 0 else -(a // -b),
    "mod": lambda a, b: a % b, "min": min, "max": max,
    "lt": lambda a, b: 1 if a < b else 0, "le": lambda a, b: 1 if a <= b else 0, "eq": lambda a, b: 1 if a == b else 0,
    "ge": lambda a, b: 1 if a >= b else 0, "gt": lambda a, b: 1 if a > b else 0,
    "and": lambda a, b: 1 if a and b else 0,
}  # fmt: skip
FIELDS = {(0, "shape0"): 33, (0, "shape1"): 128, (0, "stride0"): 256, (1, "value"): -7}


def interpret(e):
    if isinstance(e, int):
        return e
    op, *rest = e
    if op == "arg":
        return FIELDS[tuple(rest)]
    if op == "device":
        return getattr(DEVICE, rest[0])
    if op == "select":
        return interpret(rest[1]) if interpret(rest[0]) else interpret(rest[2])
    if op == "and" and not interpret(rest[0]):
        return 0
    return BINARY[op](*map(interpret, rest))


leaves = st.one_of(
    st.integers(-(2**40), 2**40),
    st.sampled_from([["arg", *key] for key in FIELDS]),
    st.sampled_from([["device", "multiprocessors"], ["device", "warp_size"]]),
)
expressions = st.recursive(
    leaves,
    lambda e: st.one_of(
        st.tuples(st.sampled_from(sorted(BINARY)), e, e).map(list), st.tuples(st.just("select"), e, e, e).map(list)
    ),
    max_leaves=20,
)


def outcome(f, *args):
    try:
        return f(*args)
    except ZeroDivisionError:
        return "division by zero"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no clock of the wall
@given(st.lists(expressions, max_size=4))
def test_compiled_equals_interpreted(many):
    expected = outcome(lambda: tuple(map(interpret, many)))
    # Twenty leaves nest less than forty deep, so that everything compiles.
    compiled = compile_expressions(many, ARGS)
    assert outcome(compiled, VALUES, DEVICE) == expected


def test_select_evaluates_only_the_branch_it_takes():
    guarded = ["select", ["eq", ["arg", 1, "value"], 0], 0, ["floordiv", 100, ["arg", 1, "value"]]]
    f = compile_expressions([guarded], ARGS)
    assert f((VALUES[0], (0,)), DEVICE) == (0,)
    assert f((VALUES[0], (7,)), DEVICE) == (14,)


def test_depth_of_forty_compiles_and_more_is_refused():
    def nested(n):
        e = 1
        for _ in range(n):
            e = ["ceildiv", e, 1]
        return e

    assert compile_expressions([nested(40)], ())((), DEVICE) == (1,)
    with pytest.raises(ValueError, match="deeper than 40"):
        compile_expressions([nested(41)], ())


@pytest.mark.parametrize(("expression", "message"), [
    ("__import__('os')", "must be a number or a list"),
    (True, "must be a number or a list"),
    (None, "must be a number or a list"),
    ([], "must be a number or a list"),
    ([["add"], 1, 2], "must be a number or a list"),
    (float("nan"), "must be finite"),
    (["pow", 2, 3], "operator must be one of"),
    (["add", 1], "add must have two operands, got 1"),
    (["select", 1, 2], "select must have a condition and two values"),
    (["device", "__class__"], "must name one of multiprocessors"),
    (["arg", 0], r'must be \["arg", index, field\]'),
    (["arg", 2, "value"], "index must be from 0 to 1, got 2"),
    (["arg", -1, "value"], "index must be from 0 to 1, got -1"),
    (["arg", True, "value"], "index must be from 0 to 1, got True"),
    (["arg", 0, "__class__"], "'x' has no field '__class__': it has data, shape0, shape1, stride0"),
    (["arg", 0, "data"], "is an address"),
])  # fmt: skip
def test_malformed_expressions_are_refused(expression, message):
    with pytest.raises(ValueError, match=message):
        compile_expressions([expression], ARGS)
