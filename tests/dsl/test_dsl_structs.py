# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels that take a struct of arguments: a frozen dataclass of annotated fields as one parameter."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

import kvarn as kv

BUFFER = kv.Buffer[kv.f32, 1]


@dataclass(frozen=True)
class Scales:
    factor: kv.f32
    bias: kv.Optional[BUFFER] = None


@dataclass(frozen=True)
class Rows:
    cache: kv.KVCache
    scales: Scales
    head: int
    out: kv.Buffer[kv.f32, 2]
    shift: kv.Optional[kv.f32] = None

    @property
    def doubled(self):
        return self.head * 2

    def scaled(self, value, d):
        """Interpreted like any function of the user: control flow over values of the kernel is the kernel's."""
        if d % 2 == 0:
            value = value * self.scales.factor
        return value


@kv.kernel
def gather(a: Rows, more: kv.i32, unused: kv.Optional[BUFFER] = None):
    t, d = kv.block_id.x, kv.thread_id.x
    value = a.scaled(a.cache.load(0, a.head, t, d, dtype=kv.f32), d)
    if a.scales.bias is not None:
        value = value + a.scales.bias[d]
    if a.shift is not None:
        value = value + a.shift
    for _ in range(more):  # a struct is there in loops and branches, too
        if t > 0:
            value = value + a.scales.factor
    a.out[t, d] = value


def caches():
    blocks = np.arange(4 * 2 * 1 * 2 * 2 * 4, dtype=np.float32).reshape(4, 2, 1, 2, 2, 4)
    return kv.PagedKVCacheCollection(blocks, np.array([3], np.uint32), np.array([[2, 1]], np.uint32), 3, 3)


def expected(head, factor, bias, shift, more):
    cache = caches().get_key_cache(0)
    keys = np.array([[cache.load(0, head, t, d) for d in range(4)] for t in range(3)], np.float32)
    keys[:, ::2] *= factor
    keys += (0 if bias is None else bias) + (0 if shift is None else shift)
    keys[1:] += more * factor
    return keys


@pytest.mark.parametrize("bias", [None, np.arange(4, dtype=np.float32) * 10])
@pytest.mark.parametrize("shift", [None, 5.0])
@pytest.mark.parametrize("head", [0, 1])
def test_a_launch_takes_an_instance_whose_fields_are_caches_arrays_and_numbers(head, bias, shift):
    out = np.zeros((3, 4), np.float32)
    gather[3, 4](Rows(caches().get_key_cache(0), Scales(2.0, bias), head, out, shift), 2)
    np.testing.assert_array_equal(out, expected(head, 2.0, bias, shift, 2))
    out[:] = 0
    gather[3, 4](more=0, a=Rows(caches().get_key_cache(0), Scales(3.0), head, out))
    np.testing.assert_array_equal(out, expected(head, 3.0, None, None, 0))


def compiled(**changes):
    cache = caches().get_key_cache(0)
    a = Rows(cache.spec, Scales(kv.f32), 0, kv.Buffer[kv.f32, 2])
    return kv.compile(gather, dataclasses.replace(a, **changes), kv.i32, target="host")


def test_fields_are_arguments_of_the_compiled_kernel_but_for_static_and_absent_ones():
    assert [a.name for a in compiled().artifact.args or compiled().artifact.entries[0].args] == [
        "a.cache", "a.scales.factor", "a.out", "more",
    ]  # fmt: skip
    entry = compiled(scales=Scales(kv.f32, BUFFER), shift=kv.f32).artifact.entries[0]
    assert [a.name for a in entry.args] == [
        "a.cache", "a.scales.factor", "a.scales.bias", "a.out", "a.shift", "more",
    ]  # fmt: skip


def test_static_fields_specialise():
    one, two = (compiled(head=h) for h in (0, 1))
    assert one.asm["kv"] != two.asm["kv"]
    out = np.zeros((3, 4), np.float32)
    cache = caches().get_key_cache(0)
    kernels = {gather.compiled_for((Rows(cache, Scales(2.0), head, out), 1)) for head in (0, 1, 0, 1)}
    assert len(kernels) == 2


def test_a_compiled_kernel_is_launched_with_the_fields_in_order_and_survives_saving(tmp_path):
    path = compiled().save(tmp_path / "gather.kvarn")
    out = np.zeros((3, 4), np.float32)
    for kernel in (compiled(), kv.load(path)):
        out[:] = 0
        kernel.launch(3, 4, caches().get_key_cache(0), 2.0, out, 1)
        np.testing.assert_array_equal(out, expected(0, 2.0, None, None, 1))


def test_a_kernel_hands_a_struct_on_and_makes_one():
    @dataclass(frozen=True)
    class Pair:
        x: BUFFER
        y: BUFFER

    @kv.kernel
    def add(p: Pair):
        p.y[0] = p.x[0] + p.y[0]

    @kv.kernel
    def outer(p: Pair, z: BUFFER):
        add(p)
        add(Pair(p.y, z))

    x, y, z = (np.full(1, n, np.float32) for n in (1, 2, 4))
    outer[1, 1](Pair(x, y), z)
    assert (x[0], y[0], z[0]) == (1, 3, 7)


def test_a_union_with_none_is_an_optional_argument():
    @kv.kernel
    def kernel(out: BUFFER, cache: kv.PagedKVCache | None, n: int | None):
        out[0] = -1 if n is None else n
        if cache is not None:
            out[0] = kv.f32(cache.num_heads)

    out = np.zeros(1, np.float32)
    for cache, n, value in ((None, None, -1), (None, 3, 3), (caches().get_key_cache(0), None, 2)):
        kernel[1, 1](out, cache, n)
        assert out[0] == value


def test_what_is_wrong_with_a_struct_is_said():
    @dataclass
    class Changeable:
        x: BUFFER

    @dataclass(frozen=True)
    class Computed:
        x: BUFFER
        y: int = dataclasses.field(init=False, default=1)

    @dataclass(frozen=True)
    class Endless:
        inner: "Endless"

    @dataclass(frozen=True)
    class Unknown:
        x: "kv.Bufer[kv.f32, 1]"

    def kernel_of(cls):
        def kernel(p: cls):
            pass

        return kv.kernel(kernel)

    for cls, message in (
        (Changeable, "Changeable, the struct of 'p', must be frozen: @dataclass"),
        (Computed, "Computed, the struct of 'p', must take all of its fields as arguments"),
        (Endless, "nested too deeply: structs of arguments hold 8 levels"),
        (Unknown, "the annotation 'kv.Bufer.* of 'p.x' cannot be read: .*Bufer"),
    ):
        with pytest.raises(kv.KernelError, match=message):
            kv.compile(kernel_of(cls), None, target="host")

    out = np.zeros((3, 4), np.float32)
    with pytest.raises(kv.KernelError, match="gather: 'a' must be a Rows, whose fields are the arguments, got None"):
        kv.compile(gather, None, kv.i32, target="host")
    with pytest.raises(TypeError, match="'a' must be a Rows, whose fields are the arguments, got ndarray"):
        gather[3, 4](out, 1)
    with pytest.raises(kv.KernelError, match=r"argument 'a.out' of gather must be kv.Buffer\[kv.f32, 2\], got kv.f32"):
        compiled(out=kv.f32)
    with pytest.raises(kv.KernelError, match=r"argument 'a.head' of gather must be a Python int"):
        compiled(head=1.5)
    with pytest.raises(ValueError, match=r"argument 'a.out' of kernel 'gather' must have 2 dimensions"):
        gather[3, 4](Rows(caches().get_key_cache(0), Scales(2.0), 0, out[0]), 1)


def test_a_field_of_a_struct_cannot_be_set_in_a_kernel():
    @kv.kernel
    def kernel(s: Scales, out: BUFFER):
        s.factor = kv.f32(3)

    with pytest.raises(kv.KernelError, match=r"FrozenInstanceError: cannot assign to field 'factor'"):
        kv.compile(kernel, Scales(kv.f32), BUFFER, target="host")


def test_command_lines_name_fields_and_give_static_values(tmp_path):
    from kvarn.tools import cli

    spec = "paged(f32, num_heads=2, head_size=4, page_size=2)"
    found = cli.complete_specs(gather, [f"a.cache={spec}"], ["a.head=1"])
    assert found[0] == Rows(caches().get_key_cache(0).spec, Scales(kv.f32, None), 1, kv.Buffer[kv.f32, 2], None)
    assert found[1:] == [kv.i32, None]
    with pytest.raises(cli.UsageError, match=r"--static is needed for a.head, such as --static 'a.head=16'"):
        cli.complete_specs(gather, [spec])
    with pytest.raises(cli.UsageError, match=r"--static takes NAME=VALUE of a static argument \(a.head\), got 'b=3'"):
        cli.complete_specs(gather, [spec], ["b=3"])
    with pytest.raises(cli.UsageError, match=r"a.head is a Python value: --static a.head=3"):
        cli.complete_specs(gather, [spec, "a.head=3"])
    path = tmp_path / "k.py"
    path.write_text(
        "import kvarn as kv\n@kv.kernel\ndef fill(x: kv.Buffer[kv.i32, 1], n: int, t: tuple, s: str = 'no'):\n"
        "    for i in kv.static(range(n)):\n        x[i] = t[1]\n"
    )
    output = tmp_path / "out"
    command = ["compile", f"{path}:fill", "--static", "n=3", "--static", "t=(1, 77)", "--static", "s=yes", "--emit=kv"]
    assert cli.main([*command, "--target=host", "-o", str(output)]) == 0
    assert output.read_text().count("memref.store") == 3
    assert "77 : i32" in output.read_text()
    assert cli.main(["compile", f"{path}:fill", "--static", "n=[", "--static", "t=1"]) == 2
