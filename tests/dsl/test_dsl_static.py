# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Static arguments: a kernel is specialised for their types and bits, wherever it is kept; its places stay its own."""

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest

import kvarn as kv
from kvarn.dsl.identity import identity
from kvarn.runtime.host import HostKernelError


@kv.kernel
def half(x: kv.Buffer[kv.f32, 1], n: tuple):
    inner = n[0][0] if isinstance(n[0], tuple) else n[0]
    # What Python does with the value: an integer keeps i32 division, a bool picks a branch, a zero keeps its sign.
    if isinstance(inner, bool):
        x[0] = 100.0
    elif isinstance(inner, int):
        x[0] = kv.f32(kv.i32(7) // inner) if inner != 0 else 0.0
    else:
        x[0] = 7.0 / inner if inner != 0.0 else 1.0 / kv.f32(inner)


def result(value):
    x = np.zeros(1, np.float32)
    half[1, 1](x, value)
    return x[0]


@pytest.mark.parametrize("wrap", [lambda v: (v,), lambda v: ((v, "x"),)])
def test_a_launch_specialises_for_the_type_and_bits_of_a_static_value(wrap):
    for _ in range(2):  # the second time out of the table
        assert result(wrap(2)) == 3
        assert result(wrap(2.0)) == 3.5
        assert result(wrap(1)) == 7
        assert result(wrap(True)) == 100
        assert result(wrap(0.0)) == np.inf
        assert result(wrap(-0.0)) == -np.inf


@pytest.mark.parametrize("pair", [(3, 3.0), (1, True), (0.0, -0.0), (1.0, np.float64(1)), ((1,), [1]), ("a", None)])
def test_values_that_python_takes_for_equal_have_keys_of_their_own(pair):
    @dataclass(frozen=True)
    class Holder:
        value: object

    for wrap in (lambda v: v, lambda v: (v, 2), lambda v: ((v,),), Holder, lambda v: {"a": v}):
        a, b = wrap(pair[0]), wrap(pair[1])
        assert identity(a) != identity(b)
        assert identity(a) == identity(wrap(pair[0]))
        hash(identity(a))


def test_an_expansion_traces_a_kernel_again_for_another_closure():
    from kvarn.compilation import driver as compiler
    from kvarn.lowering.kernels.base import Expansion, _kernel_identity

    def made(scale):
        @kv.kernel
        def scaled(x: kv.Buffer[kv.f32, 1]):
            x[0] = kv.f32(scale)

        return scaled

    assert _kernel_identity(made(3)) == _kernel_identity(made(3))
    assert _kernel_identity(made(0.0)) != _kernel_identity(made(-0.0))
    assert _kernel_identity(made(1)) != _kernel_identity(made(True))
    module = made(3).trace([kv.Buffer[kv.f32, 1]], context=compiler.context())
    kernels = module.body.operations[0]

    class Op:
        operation = kernels.operation

    expansion = Expansion(Op, kernels.operation, None, {})  # type: ignore[arg-type]
    names = [expansion._trace(made(0.0), [kv.Buffer[kv.f32, 1]], key) for key in (3, 3.0, True, 1, 3)]
    assert names[0] == names[4]
    assert len(set(names)) == 4


SOURCE = """import kvarn as kv

{blank}
@kv.kernel
def read(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
    out[0] = cache.load(0, 0, kv.block_id.x, 0)
"""


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_hit_of_the_compile_cache_keeps_its_own_places(tmp_path, monkeypatch):
    """Kernels of one text in two files: the check of each names its own file and line."""
    monkeypatch.setenv("KVARN_CACHE_DIR", str(tmp_path / "cache"))
    blocks, table = np.zeros((2, 2, 1, 4, 1, 4), np.float32), np.zeros((1, 1), np.uint32)
    cache = kv.PagedKVCacheCollection(blocks, np.array([1], np.uint32), table, 1, 1).get_key_cache(0)
    out = np.zeros(1, np.float32)
    for name, blank in (("first", ""), ("second", "\n\n"), ("first_again", "")):
        path = tmp_path / f"{name}.py"
        path.write_text(SOURCE.format(blank=blank))
        made = kv.compile(imported(path).read, cache, kv.Buffer[kv.f32, 1], target="host", check=True)
        with pytest.raises(HostKernelError, match=f"{name}.py:{6 + len(blank)}:"):
            made.launch(100, 1, cache, out)
