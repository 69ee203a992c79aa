# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""No mistake in a kernel ends the process, or never ends: what is half built goes away, what grows is stopped."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import kvarn as kv
from kvarn.errors import KernelError

F32, I32 = kv.Buffer[kv.f32, 1], kv.Buffer[kv.i32, 1]

# Each is wrong inside a region or a condition that is half traced: MLIR aborted on what was left, or Python on its end.
HALF_BUILT = """
    while y[nothing]:                           # the condition itself
        y[0] = 1
    ---
    k = 0
    while kv.if_((y[kv] if y.shape[0] else k) > 0, lambda: True, lambda: k < 3):
        k += 1
    ---
    l = []
    def grow(v):
        l.append(v)
        return True
    while grow(y[0] + 1) and l[0] > y.nothing:  # keeps a value of what is thrown away
        y[0] = l[0]
    ---
    k = 0
    while k < 3 and (y[k] > 1 or x[y]):
        k += 1
    ---
    for i in range(y[0]):
        while y[i] > 0:
            if y[i] == 3:
                y[i] = x[i]                     # a dtype that does not fit, three regions deep
    ---
    for i in range(y[0]):
        v = (y[i] if y[i + 1] > 0 else y[x[i]]) + 1
    ---
    kv.for_(y[0], body=lambda i, s: s + x.nothing[i], init=0)
    ---
    kv.while_(lambda v: y[v] > y["a"], lambda v: v + 1, init=(0,))
    ---
    y[0] = kv.if_(y[0] > 0, lambda: y[1], lambda: y[x])
    ---
    d = {{}: y[0]}                              # raised outside of any operator or call
    ---
    f = (lambda **k: 0)(**y[0])
    ---
    t = f"{y.shape:z}" + str({y: 1, d: 2})
"""


def test_errors_in_half_built_ir_do_not_end_the_process():
    """In a process of its own, which must come to its end."""
    cases = [textwrap.indent(textwrap.dedent(c), "    ") for c in textwrap.dedent(HALF_BUILT).split("---\n")]
    script = f"""
import gc, linecache
import kvarn as kv
from kvarn.errors import KernelError
for n, body in enumerate({cases!r}):
    text, file = "def f(x, y):\\n" + body + "\\n", f"<case {{n}}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    names = {{"kv": kv}}
    exec(compile(text, file, "exec"), names)
    try:
        kv.kernel(names["f"]).trace([kv.Buffer[kv.f32, 1], kv.Buffer[kv.i32, 1]])
    except KernelError as error:
        assert error.location is not None and error.location.file == file, error
        print("refused", n, flush=True)
    gc.collect()
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert ran.stdout.splitlines() == [f"refused {n}" for n in range(len(cases))], ran.stderr[-2000:]
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_what_the_condition_of_a_compile_time_while_emits_stays_in_the_kernel():
    """It was traced apart and thrown away when the condition turned out to be a Python value."""

    def counted(y, n):
        y[n] = y[n] + 1
        return n < 2

    @kv.kernel
    def kernel(y: I32):
        n = 0
        while counted(y, n):
            n += 1

    y = np.zeros(4, np.int32)
    kernel[1, 1](y)
    assert y.tolist() == [1, 1, 1, 0]


def refused(kernel, message, *specs):
    """Without a bound it is hours, or all memory."""
    with pytest.raises(KernelError, match=message):
        kernel.trace(specs)


def test_a_loop_that_does_not_end_while_tracing_is_refused():
    @kv.kernel
    def emits(x: F32):
        while True is True:
            x[0] = x[0] + 1

    @kv.kernel
    def nested(x: F32, n: int):
        for i in kv.static(range(n)):
            for j in kv.static(range(n)):
                k = i + j  # noqa: F841

    @kv.kernel
    def several(x: F32):
        for i in itertools.count():
            k = i  # noqa: F841

    refused(emits, "traced into more than 100000 operations: loops over Python values are unrolled", F32)
    refused(nested, "takes more than 500000 statements", F32, 90_000)
    refused(several, "exceeds 100000 iterations|takes more than 500000", F32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10 ** 10 ** 10", "a Python integer of a kernel must have at most 65536 bits, this has about"),
        ("1 << (1 << 40)", "a Python integer of a kernel must have at most 65536 bits"),
        ("(1 << 60000) * (1 << 60000)", "a Python integer of a kernel must have at most 65536 bits"),
        ("[0] * 10 ** 10", "a list of a kernel must have at most 100000 items, got 10000000000"),
        ("10 ** 10 * 'ab'", "a str of a kernel must have at most 100000 items, got 20000000000"),
        ("list(range(10 ** 12))", r"has more than 100000 items, which tracing would take one by one"),
        ("sum(i for i in range(10 ** 12))", "has more than 100000 items"),
        ("[*range(10 ** 12)]", "has more than 100000 items"),
        ("max(itertools.count())", "has more than 100000 items"),
        ("kv.static(range(10 ** 12))", "has more than 100000 items"),
        ("x[0] + 10 ** 400", "an integer of 1329 bits does not fit in f32"),
        ("y[0] + 10 ** 6000", "an integer of 19932 bits does not fit in i32: cast the other operand"),
        (
            "kv.vector(kv.f32, 10 ** 9)",
            "a vector must have at most 1024 lanes, got 1000000000: its lanes are registers",
        ),
        ("kv.vector(kv.f32, -1)", "the number of lanes must be a positive int"),
        ("kv.shared((10 ** 12, 10 ** 12), kv.f32)", "shared memory must have less than 2.*31 bytes, got"),
        ("x.load(0, width=10 ** 9, alignment=4)", "a vector must have at most 1024 lanes"),
    ],
)
def test_values_without_end_are_refused(text, message):
    import linecache

    source, file = f"def f(x, y):\n    v = {text}\n    x[0] = 1.0\n", f"<endless {text}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = {"kv": kv, "itertools": itertools}
    exec(compile(source, file, "exec"), names)
    refused(kv.kernel(names["f"]), message, F32, I32)
