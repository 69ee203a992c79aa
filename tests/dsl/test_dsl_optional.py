# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments of kernels that may be absent: one declaration, decided while the kernel is traced."""

import inspect

import numpy as np
import pytest

import kvarn as kv
from kvarn.artifact import Arg
from kvarn.dialect.layout import CacheSpec

SPEC = CacheSpec("continuous", kv.f32, 1, 4)


@kv.kernel
def combine(
    x: kv.Buffer[kv.f32, 1], bias: kv.Optional[kv.Buffer[kv.f32, 1]], factor: kv.Optional[kv.f32],
    out: kv.Buffer[kv.f32, 1], shift: kv.Optional[int] = None, cache: kv.Optional[kv.KVCache] = None,
):  # fmt: skip
    i = kv.block_id.x
    value = x[i]
    if bias is not None:
        value = value + bias[i]
    if factor is not None and i > 0:
        value = value * factor
    if cache is not None:
        value = value + kv.f32(cache.num_heads)
    out[i] = value + (0 if shift is None else shift)


def names(*specs):
    args: tuple[Arg, ...] = kv.compile(combine, *specs, target="host").artifact.entries[0].args
    return [a.name for a in args]


BUFFER = kv.Buffer[kv.f32, 1]


def test_an_absent_argument_is_no_argument_of_the_compiled_kernel():
    assert names(BUFFER, None, None, BUFFER) == ["x", "out"]
    assert names(BUFFER, BUFFER, None, BUFFER) == ["x", "bias", "out"]
    assert names(BUFFER, None, kv.f32, BUFFER, None, SPEC) == ["x", "factor", "out", "cache"]
    assert names(BUFFER, BUFFER, kv.f32, BUFFER, 3, SPEC) == ["x", "bias", "factor", "out", "cache"]


@pytest.mark.parametrize("bias", [None, np.arange(4, dtype=np.float32) * 10])
@pytest.mark.parametrize("factor", [None, 2.0])
@pytest.mark.parametrize("shift", [None, 5])
def test_every_set_of_optional_arguments_gives_its_result(bias, factor, shift):
    x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    combine[4, 1](x, bias, factor, out, shift)
    expected = x if bias is None else x + bias
    expected = np.where(np.arange(4) > 0, expected * (1 if factor is None else factor), expected)
    np.testing.assert_array_equal(out, expected + (shift or 0))


def test_an_absent_argument_can_be_left_out_where_it_has_the_default_none():
    x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    combine[4, 1](x, None, None, out)
    np.testing.assert_array_equal(out, x)
    combine[4, 1](x=x, bias=None, factor=3.0, out=out)
    np.testing.assert_array_equal(out, 3 * x)


def test_a_compiled_kernel_is_launched_with_the_arguments_that_are_there():
    x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    made = kv.compile(combine, BUFFER, None, kv.f32, BUFFER, target="host")
    made.launch(4, 1, x, 3.0, out)
    np.testing.assert_array_equal(out, 3 * x)


def test_a_kernel_inlined_into_another_may_get_none():
    @kv.kernel
    def outer(x: BUFFER, out: BUFFER):
        combine(x, None, None, out)

    x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    outer[4, 1](x, out)
    np.testing.assert_array_equal(out, x)


def test_none_is_refused_where_an_argument_must_be_there():
    x = np.zeros(4, np.float32)
    with pytest.raises(kv.KernelError, match=r"argument 'x' of combine must be kv.Buffer\[kv.f32, 1\], got None"):
        kv.compile(combine, None, None, None, BUFFER, target="host")
    with pytest.raises(kv.KernelError, match=r"argument 'bias' of combine must be kv.Buffer\[kv.f32, 1\], got kv.i32"):
        kv.compile(combine, BUFFER, kv.i32, None, BUFFER, target="host")
    with pytest.raises(TypeError, match="argument 'out' of kernel 'combine'"):
        combine[4, 1](x, None, None, None)


def test_annotations_in_quotes_may_be_optional():
    def quoted(x: "kv.Optional[kv.Buffer[kv.f32, 1]]", out: "kv.Buffer[kv.i32, 1]"):
        out[0] = 0 if x is None else 1

    kernel, out = kv.kernel(quoted), np.full(1, 9, np.int32)
    kernel[1, 1](None, out)
    assert out[0] == 0
    kernel[1, 1](np.zeros(1, np.float32), out)
    assert out[0] == 1


def test_command_lines_write_none():
    from kvarn.tools.specs import parse_spec

    assert parse_spec("none") is None
    assert "none" in inspect.getdoc(inspect.getmodule(parse_spec))
