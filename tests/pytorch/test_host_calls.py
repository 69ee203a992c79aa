# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls with torch tensors take a tensor as it is now, whatever was remembered of calls before."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")

from reference.torch_samples import SAMPLES, Data  # noqa: E402

import kvarn as kv  # noqa: E402


def added(a: torch.Tensor, b: torch.Tensor) -> None:
    """A call is right for the tensors' shapes and memory of now."""
    out = kv.ops.sliced_add(a, b, a.shape[0])
    assert out.equal(a + b), (a.shape, a.stride())


@pytest.fixture
def pair(device):
    made = [torch.randn(8, 64, device=device) for _ in range(2)]
    for _ in range(3):  # remembered
        added(*made)
    return made


def test_a_resized_tensor_is_seen_with_its_new_shape(pair):
    for rows in (3, 8, 5):  # smaller ones stay where they are
        for x in pair:
            x.resize_(rows, 64)
        added(*pair)
    for x in pair:
        x.resize_(4096, 64).normal_()  # moved
    added(*pair)
    for x in pair:
        x.resize_(16, 32)
    added(*pair)


def test_storage_that_is_resized_below_a_tensor_is_followed(pair):
    for x in pair:
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(8 * 64 * 4)
        x.normal_()
    added(*pair)


def test_a_tensor_that_is_given_other_memory_is_followed(pair):
    wide, other = torch.randn(8, 128, device=pair[0].device), torch.randn(8, 64, device=pair[0].device)
    pair[0].set_(wide[:, 64:])
    added(*pair)
    pair[0].data = other
    added(*pair)
    pair[0].as_strided_((8, 64), (0, 1))
    added(*pair)
    for x in pair:
        x.set_(torch.randn(64, 8, device=x.device)).t_()
    with pytest.raises(ValueError, match="a must be contiguous in its last dimension"):
        kv.ops.sliced_add(*pair, 8)


def test_another_tensor_at_the_address_of_one_that_is_gone_is_another(device):
    seen = set()
    for k in range(12):
        shape, dtype = ((8, 64), (16, 32), (4, 128))[k % 3], (torch.float32, torch.int32)[k // 3 % 2]
        a, b = ((torch.randn(shape, device=device) * 99).to(dtype) for _ in range(2))
        added(a, b)
        seen |= {(a.data_ptr(), id(a))}
        del a, b
        gc.collect()
    assert len(seen) <= 24


def test_a_tensor_that_turns_to_another_type_is_refused_as_what_it_is(pair):
    pair[0].data = pair[0].to(torch.float64)
    with pytest.raises(TypeError, match="sliced_add: b must have dtype f64, got f32"):
        kv.ops.sliced_add(*pair, 8)


def test_a_negative_view_is_refused(device):
    x = torch.randn(8, 1, dtype=torch.complex64, device=device)
    plain, negative = torch.zeros(8, 1, device=device), x.conj().imag
    added(plain, plain)
    assert negative.is_neg()
    with pytest.raises((TypeError, ValueError), match="a"):
        kv.ops.sliced_add(negative, negative, 8, torch.empty(8, 1, device=device))


@pytest.mark.parametrize("name", SAMPLES)
def test_no_tensor_is_kept_alive_by_what_is_remembered_of_its_shape(name, device):
    for _ in range(3):
        tensors = Data(device).tensors()
        alive = {n: weakref.ref(x) for n, x in tensors.items()}
        SAMPLES[name](tensors)
        del tensors
        gc.collect()
        assert [n for n, ref in alive.items() if ref() is not None] == []
