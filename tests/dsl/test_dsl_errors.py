# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Mistakes in kernels are reported at the user's file, line and column, with the line and a caret.

The marked line of each case ends with ``# HERE`` and the caret must stand under the text given as ``at``.
"""

from __future__ import annotations

import inspect
import linecache
import re

import pytest

import kvarn as kv
from kvarn.dialect.layout import CacheSpec, CollectionSpec
from kvarn.errors import KernelError, KernelTypeError, UnsupportedError, from_mlir

PAGED = CacheSpec("paged", kv.bf16, 8, 128, 16)
QUANTIZED = CacheSpec("paged", kv.f8e4m3, 8, 128, 16, scale_dtype=kv.f32, granularity=128)
CONTINUOUS = CacheSpec("continuous", kv.bf16, 8, 128)
MLA = CacheSpec("paged", kv.bf16, 1, 576, 16, is_mla=True)
I32, F32, B = kv.Buffer[kv.i32, 1], kv.Buffer[kv.f32, 1], kv.Buffer[kv.bf16, 2]

CASES = []


def case(specs, message, at, error=KernelError):
    """Register a kernel that must be refused."""

    def add(function):
        CASES.append(pytest.param(kv.kernel(function), specs, message, at, error, id=function.__name__))
        return function

    return add


# --- types -------------------------------------------------------------------------------------------


@case(
    [F32, B],
    "* of f32 and bf16: float types do not mix, write kv.f32(x) around the bf16",
    "x[0] * y[0, 0]",
    KernelTypeError,
)
def floats_do_not_mix(x, y):
    x[0] = x[0] * y[0, 0]  # HERE


@case([I32, F32], "+ of i32 and f32: write kv.f32(x) around the i32", "x[0] + y[0]", KernelTypeError)
def int_and_float_do_not_mix(x, y):
    y[0] = x[0] + y[0]  # HERE


@case([I32], "* of i32 and the float 0.5: write kv.f32(x) around the i32", "x[0] * 0.5", KernelTypeError)
def int_times_float_literal(x):
    x[0] = x[0] * 0.5  # HERE


@case([I32], "/ does not take i32: use // for integers, or kv.f32(x)", "x[0] / 2", KernelTypeError)
def true_division_of_ints(x):
    x[0] = x[0] / 2  # HERE


@case([I32, kv.Buffer[kv.u32, 1]], "< of i32 and u32: signs do not mix", "x[0] < y[0]", KernelTypeError)
def signs_do_not_mix(x, y):
    if x[0] < y[0]:  # HERE
        x[0] = 1


@case(
    [F32], "what is stored in a kv.Buffer[kv.f32, 1] must be f32, got i32: write kv.f32(...)", "x[0]", KernelTypeError
)
def stored_type_must_match(x):
    x[0] = kv.thread_id.x  # HERE


@case([F32], "the index must be an integer, got a value of type f32", "x[x[0]]", KernelTypeError)
def float_index(x):
    x[0] = x[x[0]]  # HERE


@case([F32], "a buffer of rank 1 needs 1 indices, got 2", "x[0, 1]", KernelTypeError)
def wrong_rank(x):
    x[0] = x[0, 1]  # HERE


@case([kv.Buffer[kv.f8e4m3, 1]], "+ on f8e4m3: 8-bit floats only convert", "x[0] + x[1]", KernelTypeError)
def arithmetic_on_f8(x):
    x[0] = x[0] + x[1]  # HERE


@case([I32], "1099511627776 does not fit in i32", "x[0] + (1 << 40)")
def literal_out_of_range(x):
    x[0] = x[0] + (1 << 40)  # HERE


@case([I32], "'v' has no one type after a run-time condition", "v", KernelTypeError)
def branches_disagree(x):
    if x[0] > 0:
        v = kv.i64(1)
    else:
        v = kv.f32(1)
    x[0] = v  # HERE


@case([I32, F32], "'s' is i32 when an iteration starts and f32 when it ends", "for", KernelTypeError)
def loop_changes_a_type(x, y):
    s = x[0]
    for i in range(3):  # HERE
        s = y[i]
    x[0] = s


@case([I32], "'k' is set in one branch of a run-time condition only", "k", KernelTypeError)
def set_in_one_branch(x):
    if x[0] > 0:
        k = 1
    x[0] = k  # HERE


@case([I32], "'i' is the variable of a run-time loop", "i", KernelTypeError)
def loop_variable_after_the_loop(x):
    for i in range(x[0]):
        x[i] = 0
    x[0] = i  # HERE


@case([I32], "an index of a list must be known at compile time", "acc[i]", KernelTypeError)
def list_with_a_run_time_index(x):
    acc = [0, 0, 0]
    for i in range(3):
        x[i] = acc[i]  # HERE


@case([I32], "changes its length in a run-time loop", "for", KernelTypeError)
def list_grows_in_a_loop(x):
    acc = [0]
    for i in range(3):  # HERE
        acc.append(x[i])
    x[0] = acc[0]


@case([I32], "vectors of 4 and 8 lanes", "kv.vector(kv.f32, 4) + kv.vector(kv.f32, 8)", KernelTypeError)
def lanes_must_match(x):
    v = kv.vector(kv.f32, 4) + kv.vector(kv.f32, 8)  # HERE
    x[0] = kv.i32(v[0])


@case([I32], "lane must be in [0, 4), got 4", "v[4]")
def lane_out_of_range(x):
    v = kv.vector(kv.i32, 4)
    x[0] = v[4]  # HERE


@case([I32], "variable 'later' has no value yet", "later")
def used_before_assignment(x):
    x[0] = later  # noqa: F821  # HERE
    later = 1  # noqa: F841


@case([I32], "name 'missing' is not defined", "missing")
def undefined_name(x):
    x[0] = missing  # noqa: F821  # HERE


@case([I32], "kv.math.exp needs f32, f64, f16 or bf16, got i32", "kv.math.exp(x[0])", KernelTypeError)
def math_of_an_int(x):
    kv.math.exp(x[0])  # HERE


@case([F32], "range takes integers, got a f32 value", "range(x[0])", KernelTypeError)
def range_of_a_float(x):
    for i in range(x[0]):  # HERE
        x[i] = 0.0


# --- constructs ----------------------------------------------------------------------------------------


@case([I32], "kernels do not support try", "try", UnsupportedError)
def try_statement(x):
    try:  # HERE
        x[0] = 1
    except ValueError:
        pass


@case([I32], "kernels do not support global", "global", UnsupportedError)
def global_statement(x):
    global CASES  # HERE
    x[0] = 1


@case([I32], "kernels do not support class", "class", UnsupportedError)
def class_statement(x):
    class C:  # HERE
        pass

    x[0] = 1


@case([I32], "kernels do not support import", "import", UnsupportedError)
def import_statement(x):
    import os  # noqa: F401  # HERE

    x[0] = 1


@case([I32], "print(): use kv.printf", "print(x[0])", UnsupportedError)
def print_call(x):
    print(x[0])  # HERE


@case([I32], "yield", "yield x[0]", UnsupportedError)
def generator(x):
    x[0] = yield x[0]  # HERE


@case([I32], "with over 3", "with", UnsupportedError)
def with_statement(x):
    with 3:  # HERE
        x[0] = 1


@case([I32], "for ... else", "for", UnsupportedError)
def for_else(x):
    for i in range(3):  # HERE
        x[i] = 1
    else:
        x[0] = 2


@case([I32], "while ... else", "while", UnsupportedError)
def while_else(x):
    while x[0] > 3:  # HERE
        x[0] = 1
    else:
        x[0] = 2


@case([I32], "assert on a value of the kernel: use kv.device_assert", "assert", UnsupportedError)
def run_time_assert(x):
    assert x[0] > 3  # HERE


@case([I32], "assertion failed: 1 + 1 == 3", "assert")
def compile_time_assert(x):
    assert 1 + 1 == 3  # HERE


@case([I32], "values of the kernel in an f-string", 'f"{x[0]}"', UnsupportedError)
def run_time_f_string(x):
    kv.printf(f"{x[0]}")  # HERE


@case([I32], "a comprehension with a condition on a value of the kernel", "x[j] > 0", UnsupportedError)
def run_time_comprehension(x):
    x[0] = sum([x[j] for j in range(4) if x[j] > 0])  # HERE


@case([I32], "kv.static needs values known at compile time", "kv.static(range(x[0]))", KernelTypeError)
def static_of_a_run_time_range(x):
    for i in kv.static(range(x[0])):  # HERE
        x[i] = 1


def calls_itself(n):
    return calls_itself(n - 1)  # recursion


@case([I32], "calls_itself() calls itself: kernels do not support recursion", "calls_itself(n - 1)", KernelTypeError)
def recursion(x):
    x[0] = calls_itself(x[0])


def finds(x):
    for i in range(10):
        if x[i] > 3:
            return i  # value out of a loop
    return -1


@case([I32], "return of a value inside a run-time loop: assign it to a variable and break", "for", UnsupportedError)
def value_returned_from_a_loop(x):
    x[0] = finds(x)


def sometimes(x):
    if x[0] > 3:
        return 1


@case([I32], "sometimes() returns a value on some paths only", "def sometimes")
def value_on_some_paths(x):
    x[0] = sometimes(x)


@case([I32], "a kernel returns nothing: write results to a buffer", "def kernel_with_a_result")
def kernel_with_a_result(x):
    return x[0]


# --- calls ---------------------------------------------------------------------------------------------


def helper(a, b=2, *, c):
    return a + b + c


@case([I32], "helper() needs c, which the call does not give", "helper(x[0])", KernelTypeError)
def missing_argument(x):
    x[0] = helper(x[0])  # HERE


@case([I32], "helper() takes 2 arguments, got 3", "helper(1, 2, 3, c=4)", KernelTypeError)
def too_many_arguments(x):
    x[0] = helper(1, 2, 3, c=4)  # HERE


@case([I32], "helper() has no parameter 'd'", "helper(1, c=1, d=2)", KernelTypeError)
def unknown_keyword(x):
    x[0] = helper(1, c=1, d=2)  # HERE


@case([I32], "the format 'a %d %d' of kv.printf takes 2 values, got 1", 'kv.printf("a %d %d", x[0])', KernelTypeError)
def printf_arity(x):
    kv.printf("a %d %d", x[0])  # HERE


@case([I32], "%f of kv.printf does not print i32", 'kv.printf("%f", x[0])', KernelTypeError)
def printf_type(x):
    kv.printf("%f", x[0])  # HERE


@case([I32], "module 'kvarn' has no attribute 'thread_idx'", "kv.thread_idx")
def misspelt_name(x):
    x[0] = kv.thread_idx.x  # HERE


@case([I32], "cannot unpack 3 values into 2 variables", "a, b")
def unpacking(x):
    a, b = x[0], x[1], x[2]  # noqa: F841  # HERE


@case([I32], "mma_m16n8k16 takes fragments of 4, 2 and 4, got 2, 2 and 4", "kv.mma_m16n8k16(f, f, [0.0] * 4)")
def fragments(x):
    f = [x[0], x[1]]
    kv.mma_m16n8k16(f, f, [0.0] * 4)  # HERE


# --- caches ----------------------------------------------------------------------------------------------


@case(
    [PAGED],
    "what is stored in a cache must be bf16, got f32: write kv.bf16(...)",
    "cache.store(0, 0, 0, 0, kv.f32(1))",
    KernelTypeError,
)
def stored_element(cache):
    cache.store(0, 0, 0, 0, kv.f32(1))  # HERE


@case([PAGED], "load_scale needs a quantized cache", "cache.load_scale(0, 0, 0, 0)", KernelTypeError)
def scale_of_a_plain_cache(cache):
    cache.load_scale(0, 0, 0, 0)  # HERE


@case(
    [CollectionSpec(MLA)],
    "get_value_cache needs a collection with values",
    "collection.get_value_cache(0)",
    KernelTypeError,
)
def values_of_mla(collection):
    collection.get_value_cache(0)  # HERE


@case([PAGED], "populate: tile rows and page size must divide one another, got 24 and 16", "cache.populate(0, 0, 24)")
def populate_tile(cache):
    cache.populate(0, 0, 24)  # HERE


@case([PAGED], "'Cache' object has no attribute 'lookup'", "cache.lookup")
def unknown_method(cache):
    cache.lookup(0)  # HERE


@case([PAGED], "missing 2 required positional arguments", "cache.load(0, 0)", KernelTypeError)
def method_arity(cache):
    cache.load(0, 0)  # HERE


@case([PAGED, PAGED], "'c' differs between the branches of a run-time condition", "c", KernelTypeError)
def cache_chosen_at_run_time(a, b):
    if kv.thread_id.x > 3:
        c = a
    else:
        c = b
    c.cache_length(0)  # HERE


@case([CollectionSpec(PAGED)], "a run-time loop carries numbers, vectors, pointers", "for", KernelTypeError)
def cache_carried_by_a_loop(collection):
    c = collection.get_key_cache(0)
    for i in range(4):  # HERE
        c.cache_length(0)
        c = collection.get_key_cache(i)


@pytest.mark.parametrize(("kernel", "specs", "message", "at", "error"), CASES)
def test_mistake_is_reported_at_its_line_and_column(kernel, specs, message, at, error):
    with pytest.raises(error) as caught:
        kernel.trace(specs)
    found = caught.value
    assert message in found.message
    lines, first = inspect.getsourcelines(kernel.function)
    marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# HERE")]
    assert found.location.file == __file__
    if marked:
        assert found.location.line == marked[0]
    line = linecache.getline(__file__, found.location.line)
    assert line[found.location.column - 1 :].startswith(at)
    rendered = str(found).splitlines()
    assert rendered[0].startswith(f"{__file__}:{found.location.line}:{found.location.column}: error: ")
    source, caret = (
        rendered[-1 - 2 * len(found.callers) - 1 : len(rendered) - 2 * len(found.callers)]
        if not found.callers
        else rendered[1:3]
    )
    assert source.strip() == line.strip()
    assert source[caret.index("^") :].startswith(at)


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


def test_any_cache_annotation_takes_every_kind():
    @kv.kernel
    def k(cache: kv.KVCache, out: kv.Buffer[kv.i32, 1]):
        out[0] = cache.cache_length(0)

    for spec in (PAGED, CONTINUOUS, QUANTIZED):
        k.trace([spec, I32])


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


def test_ops_carry_the_column_of_their_expression():
    @kv.kernel
    def k(x: kv.Buffer[kv.i32, 1]):
        x[0] = x[1] + x[2] * 3

    module = k.trace([I32])
    text = module.operation.get_asm(enable_debug_info=True)
    line, first = next(
        (t, i)
        for i, t in enumerate(inspect.getsourcelines(k.function)[0], k.function.__code__.co_firstlineno)
        if "x[2] * 3" in t
    )
    for op, at in (("arith.muli", "x[2] * 3"), ("arith.addi", "x[1] + x[2] * 3"), ("memref.store", "x[0] =")):
        name = re.search(rf"{op}.* loc\((#loc\d*)\)", text).group(1)
        assert f'{name} = loc("{__file__}":{first}:{line.index(at) + 1})' in text
