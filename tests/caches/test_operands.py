# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention operands as kernel arguments: one interface over caches, scales, dense and ragged buffers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reference.operands import KINDS, check_survey, grid, outputs, random_operand, survey

import kvarn as kv
from kvarn.artifact import Artifact
from kvarn.artifact.bundle import dumps, loads
from kvarn.caches import (
    KVCacheMHAOperand,
    KVCacheScalesMHAOperand,
    LayoutTensorMHAOperand,
    PagedKVCacheCollection,
    RaggedMHAOperand,
)
from kvarn.caches.operands import MHAOperand
from kvarn.dialect import dtypes, layout
from kvarn.emulator import grid as ptx
from kvarn.runtime.host import HostKernelError
from kvarn.tools.specs import parse_spec


@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel_reads_every_kind(kind):
    shown = random_operand(np.random.default_rng(1), kind)
    found = outputs(shown)
    survey[grid(shown), 1](shown.operand, *found)
    check_survey(shown, found)


@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel_reads_every_kind_on_a_gpu(kind):
    shown = random_operand(np.random.default_rng(2), kind)
    found = outputs(shown)
    specs = [shown.operand.spec, *(kv.Buffer[dtypes.of(a.dtype), a.ndim] for a in found)]
    made = kv.compile(survey, *specs, target="sm_90a").artifact
    entry = made.entries[0]
    values = [*shown.operand.fields()]
    for a in found:
        values += [a.ctypes.data, *a.shape, *(s // a.itemsize for s in a.strides[:-1])]
    memory = [np.asarray(p if p.base is None else p.base) for p in shown.operand.buffers]
    ptx.launch(made.code["ptx"], entry.name, (*grid(shown), 1), (3, 1, 1), values, [*memory, *found], 0)
    check_survey(shown, found)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 17), min_size=1, max_size=5).filter(any),
    dtype=st.sampled_from(["f32", "f16", "bf16"]), heads=st.sampled_from([1, 3]),
    granules=st.sampled_from([1, 2, 4]), scale_dtype=st.sampled_from(["f32", "f16"]),
)  # fmt: skip
def test_kernel_and_model_agree_on_any_shape(kind, seed, lengths, dtype, heads, granules, scale_dtype):
    shown = random_operand(
        np.random.default_rng(seed), kind, dtype, lengths=tuple(lengths), num_heads=heads, head_size=8 * granules,
        granules=granules, scale_dtype=scale_dtype,
    )  # fmt: skip
    found = outputs(shown)
    survey[grid(shown), 1](shown.operand, *found)
    check_survey(shown, found)
    check_model(shown)


def check_model(shown):
    """The methods on host buffers give what the operand shows."""
    o, facts = shown.operand, shown.facts
    h, d = np.arange(o.num_heads)[:, None], np.arange(o.head_size)
    for b, values in enumerate(shown.loaded):
        n = len(values)
        assert o.cache_length(b) == n
        t = np.arange(n)
        np.testing.assert_array_equal(np.float32(o.load(b, t[:, None, None], h, d)).reshape(values.shape), values)
        if shown.scales is not None:
            got = np.float32(o.load_scale(b, t[:, None, None], h, d)).reshape(values.shape)
            np.testing.assert_array_equal(got, shown.scales[b])
        if shown.rows is not None:
            assert o.row_idx(b, t).tolist() == shown.rows[b].tolist()
        if n:
            assert np.array_equal(o.block_paged_ptr(b, n - 1, o.num_heads - 1)[0], shown.stored[b][n - 1, -1])
    asked = (o.num_kv_rows, o.max_context_length, lambda: o.get_tma_row(5), lambda: o.populate(0, 0, 4).get_row(3))
    for ask, fact in zip(asked, facts, strict=True):
        if fact is None:
            with pytest.raises(TypeError):
                ask()
        else:
            assert ask() == fact


def quantized_cache(scale_dtype=np.float32):
    pool = np.ones((5, 2, 1, 4, 2, 16), np.int8)
    table = np.array([[0, 1, 4, 4], [2, 3, 4, 4]], np.uint32)
    scales = np.ones((5, 2, 1, 4, 2, 4), scale_dtype)
    return PagedKVCacheCollection(pool, np.array([5, 6], np.uint32), table, 1, 8, scales, 4).get_key_cache(0)


def dense(**options):
    return LayoutTensorMHAOperand(np.zeros((2, 6, 2, 16), np.float32), **options)


def ragged(dtype=np.float32, **options):
    return RaggedMHAOperand(np.zeros((12, 2, 16), dtype), np.array([0, 5, 12], np.uint32), **options)


def test_operands_have_the_attributes_of_the_interface():
    cache = quantized_cache(np.float16)
    scales = np.ones((2, 6, 2, 4), np.float32)
    of_cache, of_scales = KVCacheMHAOperand(cache), KVCacheScalesMHAOperand(cache)
    of_dense = LayoutTensorMHAOperand(np.zeros((2, 6, 2, 16), np.int8), scales)
    of_ragged = ragged(np.int8, scales=scales.reshape(12, 2, 4))

    def facts(o):
        return (o.dtype, o.scale_dtype, o.page_size, o.quantization_enabled, o.quantization_granularity)

    assert facts(of_cache) == (dtypes.i8, dtypes.f16, 4, True, 4)
    assert facts(of_scales) == (dtypes.f16, dtypes.f16, 4, False, 4)
    assert facts(of_dense) == (dtypes.i8, dtypes.f32, 0, True, 4)
    assert facts(of_ragged) == (dtypes.i8, dtypes.f32, 0, True, 0)
    assert facts(ragged())[:2] == (dtypes.f32, None)
    for o in (of_cache, of_scales, of_dense, of_ragged):
        assert isinstance(o, MHAOperand)
        assert o.readonly
        assert o.batch_size == 2
        assert o.device == ("cpu", 0)
        assert len(o.fields()) == len(layout.operand_fields(o.spec.cache))
        assert o.get_type_name() == type(o).__name__


def test_operands_of_a_cache_are_made_in_a_kernel_too():
    @kv.kernel
    def both(cache: kv.PagedKVCache, out: kv.Buffer[kv.f32, 1]):
        elements, scales = kv.KVCacheMHAOperand(cache), kv.KVCacheScalesMHAOperand(cache)
        out[0] = elements.load(1, 2, 1, 5)
        out[1] = kv.f32(scales.load(1, 2, 1, 5))
        out[2] = kv.f32(elements.load_scale(1, 2, 1, 5)) + kv.f32(scales.load_scale(1, 2, 1, 5))

    cache, out = quantized_cache(), np.zeros(3, np.float32)
    cache.store(1, 1, 2, 5, 7)
    cache.store_scale(1, 1, 2, 5, 0.5)
    both[1, 1](cache, out)
    assert out.tolist() == [3.5, 0.5, 0.5]


def test_a_tile_of_an_operand_goes_to_shared_memory():
    @kv.kernel(block=32)
    def tile(x: kv.MHAOperand, out: kv.Buffer[kv.f16, 2]):
        s = kv.shared((4, 16), kv.f16)
        x.load_tile(0, 1, 4, 3, s.ptr(), kv.thread_id.x, tile_rows=4, num_threads=32, mode="sync")
        kv.barrier()
        if kv.thread_id.x < 16:
            for i in range(4):
                out[i, kv.thread_id.x] = s[i, kv.thread_id.x]

    for kind in ("paged", "dense", "ragged"):
        shown = random_operand(np.random.default_rng(3), kind, "f16")
        out = np.full((4, 16), 9, np.float16)
        made = kv.compile(tile, shown.operand, kv.Buffer[kv.f16, 2], target="sm_80").artifact
        values = [*shown.operand.fields(), out.ctypes.data, 4, 16, 16]
        entry = made.entries[0]
        memory = [*map(np.asarray, shown.operand.buffers), out]
        ptx.launch(made.code["ptx"], entry.name, (1, 1, 1), (32, 1, 1), values, memory, entry.shared_bytes)
        np.testing.assert_array_equal(out[:3], shown.stored[0][4:7, 1])
        assert not out[3].any()


def test_lengths_and_offsets_never_lead_out_of_the_buffer():
    """What a kernel finds in tables that are wrong stays inside the buffer, whatever they hold."""

    @kv.kernel
    def lengths(x: kv.MHAOperand, out: kv.Buffer[kv.i32, 2]):
        b = kv.block_id.x
        out[b, 0] = x.cache_length(b)
        out[b, 1] = x.page(b, 0)

    offsets = np.array([0, 5, 9, 12], np.uint32)
    o = RaggedMHAOperand(np.zeros((12, 1, 4), np.float32), offsets)
    offsets[:] = [4, 2**31, 3, 2**32 - 1]
    out = np.zeros((3, 2), np.int32)
    lengths[3, 1](o, out)
    assert out.tolist() == [[8, 4], [0, 11], [9, 3]]
    assert [o.cache_length(b) for b in range(3)] == [8, 0, 9]
    given = np.array([3, 2**32 - 1], np.uint32)
    d = LayoutTensorMHAOperand(np.zeros((2, 6, 1, 4), np.float32), lengths=given)
    lengths[2, 1](d, out)
    assert out[:2].tolist() == [[3, 0], [6, 1]]


def test_checked_kernels_say_when_an_access_leaves_an_operand():
    @kv.kernel
    def read(x: kv.MHAOperand, b: kv.i32, t: kv.i32, h: kv.i32, d: kv.i32, out: kv.Buffer[kv.f32, 1]):
        out[0] = kv.f32(x.load(b, t, h, d))

    out = np.zeros(1, np.float32)
    for operand, last, tokens in (
        (dense(), (1, 5, 1, 15), "the token must be in the sequence's region"),
        (ragged(), (1, 6, 1, 15), "the token must be in the sequence's rows"),
        (KVCacheScalesMHAOperand(quantized_cache()), (1, 7, 1, 15), "the token's page must be in the pool|lookup"),
    ):
        made = kv.compile(read, operand, *[kv.i32] * 4, kv.Buffer[kv.f32, 1], target="host", check=True)
        made.launch(1, 1, operand, *last, out)
        messages = ("the sequence must be in the batch", tokens, r"the head must be in \[0, 2\)", "the dim must be in")
        for i, message in enumerate(messages):
            at = [n + (i == k) * (100 if i == 1 else 1) for k, n in enumerate(last)]
            with pytest.raises(HostKernelError, match=message):
                made.launch(1, 1, operand, *at, out)


@pytest.mark.parametrize(
    ("operand", "method", "message"),
    [
        (ragged, lambda x: x.max_context_length(), "a ragged operand has no max_context_length: its longest sequence"),
        (ragged, lambda x: x.load_pages(0, 0, 1), "a ragged operand has no load_pages: it has no lookup table"),
        (dense, lambda x: x.empty_cache(), "a dense operand has no is_empty: it knows nothing of the step"),
        (dense, lambda x: x.max_prompt_length(), "a dense operand has no max_prompt_length"),
        (dense, lambda x: x.cache_lengths_nd(), "a dense operand has no cache_lengths: its lengths need not"),
        (dense, lambda x: x.scales_block_paged_ptr(0, 0, 0), "scales_block_paged_ptr needs a quantized operand"),
        (dense, lambda x: x.load_quantized(0, 0, 0, 0), "load_quantized needs a quantized operand"),
        (lambda: KVCacheScalesMHAOperand(quantized_cache()), lambda x: x.load_quantized(0, 0, 0, 0),
         "a scales operand has no load_raw: the scales are the data"),
        (dense, lambda x: x.store(0, 0, 0, 0, 1.0), "store"),
    ],
)  # fmt: skip
def test_what_an_operand_does_not_have_is_refused_at_the_users_line(operand, method, message):
    @kv.kernel
    def ask(x: kv.MHAOperand):
        method(x)

    with pytest.raises(kv.KernelError, match=message) as error:
        kv.compile(ask, operand(), target="host")
    assert "test_operands.py" in str(error.value)


def test_annotations_name_the_kinds_that_they_take():
    kinds = {
        kv.KVCacheMHAOperand: KVCacheMHAOperand(quantized_cache()),
        kv.KVCacheScalesMHAOperand: KVCacheScalesMHAOperand(quantized_cache()),
        kv.LayoutTensorMHAOperand: dense(), kv.RaggedMHAOperand: ragged(),
    }  # fmt: skip
    for annotation in kinds:

        def read(x: annotation):
            x.cache_length(0)

        kernel = kv.kernel(read)
        for cls, operand in kinds.items():
            if cls is annotation:
                kv.compile(kernel, operand, target="host")
                continue
            with pytest.raises(kv.KernelError, match=f"'x' of read must be the spec of a {annotation.__name__}"):
                kv.compile(kernel, operand, target="host")


def test_a_compiled_kernel_refuses_an_operand_of_another_kind_or_shape():
    out = np.zeros(1, np.int32)

    @kv.kernel
    def length(x: kv.MHAOperand, out: kv.Buffer[kv.i32, 1]):
        out[0] = x.cache_length(1)

    made = kv.compile(length, dense(), kv.Buffer[kv.i32, 1], target="host")
    made.launch(1, 1, dense(), out)
    assert out[0] == 6
    with pytest.raises(TypeError, match="is compiled for dense f32 num_heads=2 head_size=16, got ragged f32"):
        made.launch(1, 1, ragged(), out)
    with pytest.raises(TypeError, match="is compiled for dense f32"):
        made.launch(1, 1, LayoutTensorMHAOperand(np.zeros((2, 6, 2, 16), np.float16)), out)
    with pytest.raises(TypeError, match="must be an operand"):
        made.launch(1, 1, quantized_cache(), out)


def test_artifacts_keep_the_kind_of_an_operand(tmp_path):
    shown = random_operand(np.random.default_rng(4), "ragged with scales")
    found = outputs(shown)
    made = kv.compile(survey, shown.operand, *(kv.Buffer[dtypes.of(a.dtype), a.ndim] for a in found), target="host")
    read: Artifact = loads(dumps([made.artifact]), "memory")[0]
    assert read.entries[0].args[0].spec == shown.operand.spec.cache
    path = tmp_path / "survey.kv"
    made.save(path)
    kv.load(path).launch(grid(shown), 1, shown.operand, *found)
    check_survey(shown, found)


def test_specs_of_operands_as_text():
    assert parse_spec("dense(f32, num_heads=2, head_size=16, granularity=16)") == dense().spec
    assert parse_spec("ragged(f32, num_heads=2, head_size=16, granularity=16)") == ragged().spec
    text = "scales(i8, num_heads=2, head_size=16, page_size=4, scale_dtype=f32, granularity=4)"
    assert parse_spec(text) == KVCacheScalesMHAOperand(quantized_cache()).spec
    with pytest.raises(ValueError, match="a scales operand must have a scale type"):
        parse_spec("scales(i8, num_heads=2, head_size=16, page_size=4)")
    with pytest.raises(ValueError, match="page_size of a dense operand must be 0, got 4"):
        parse_spec("dense(f32, num_heads=2, head_size=16, page_size=4)")


BUFFER = np.zeros((2, 6, 2, 16), np.float32)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MHAOperand(), TypeError, "MHAOperand is abstract"),
        (lambda: LayoutTensorMHAOperand(BUFFER[0]), ValueError, "buffer must have 4 dimensions"),
        (lambda: LayoutTensorMHAOperand(BUFFER[..., :8]), ValueError, "the last 3 dimensions .* must be packed"),
        (lambda: LayoutTensorMHAOperand(BUFFER.transpose(0, 2, 1, 3)), ValueError, "must be packed"),
        (lambda: LayoutTensorMHAOperand(np.broadcast_to(BUFFER[:1], BUFFER.shape)), ValueError, "must not overlap"),
        (lambda: LayoutTensorMHAOperand(BUFFER.astype(np.float64)), ValueError, "dtype must be f32"),
        (lambda: LayoutTensorMHAOperand(BUFFER, BUFFER[..., :6]), ValueError, "scales: .* must be packed"),
        (lambda: dense(scales=np.ones((2, 6, 2, 7), np.float32)), ValueError, "scales must have the shape of buffer"),
        (lambda: dense(scales=np.ones((2, 5, 2, 4), np.float32)), ValueError, "scales must have the shape of buffer"),
        (lambda: dense(scales=np.ones((2, 6, 2, 4))), ValueError, "scale dtype must be one of"),
        (lambda: dense(lengths=np.array([1, 2, 3], np.uint32)), ValueError, "lengths must have one entry for each of"),
        (lambda: dense(lengths=np.array([1.0, 2.0])), TypeError, "lengths must be uint32 or int32"),
        (lambda: RaggedMHAOperand(BUFFER, np.array([0, 5], np.uint32)), ValueError, "buffer must have 3 dimensions"),
        (lambda: RaggedMHAOperand(BUFFER[0], np.array([0, 7], np.uint32)), ValueError, "nor pass the 6 tokens"),
        (lambda: RaggedMHAOperand(BUFFER[0], np.array([4, 3], np.uint32)), ValueError, "must not decrease"),
        (lambda: RaggedMHAOperand(BUFFER[0], np.array([-1, 3], np.int32)), ValueError, "must not decrease"),
        (lambda: RaggedMHAOperand(BUFFER[0], np.array([], np.uint32)), ValueError, "must have B"),
        (lambda: RaggedMHAOperand(BUFFER[0], [0, 3]), TypeError, "cache_row_offsets"),
        (lambda: KVCacheScalesMHAOperand(BUFFER), TypeError, "must be a cache"),
    ],
)
def test_buffers_are_checked_when_an_operand_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_misaligned_buffer_is_refused():
    raw = np.zeros(2 * 6 * 2 * 16 * 4 + 32, np.uint8)
    start = -raw.ctypes.data % 16 + 4
    data = raw[start : start + 2 * 6 * 2 * 16 * 4].view(np.float32).reshape(2, 6, 2, 16)
    with pytest.raises(ValueError, match="buffer must start at a multiple of 16 bytes"):
        LayoutTensorMHAOperand(data)


@pytest.mark.parametrize(
    ("gap", "start", "message"),
    [(0, 1, "scales must start at a multiple of 16 bytes"),
     (2, 0, "multiples of 16 bytes .the 4 scales of a token and head .* got 50 elements of 4 bytes for sequences")],
)  # fmt: skip
def test_scales_that_vectors_cannot_read_are_refused(gap, start, message):
    raw = np.zeros(2 * (6 * 2 * 4 + gap) + 8, np.float32)
    first = -raw.ctypes.data // 4 % 4 + start
    apart = raw[first : first + 2 * (6 * 2 * 4 + gap)].reshape(2, -1)
    scales = np.lib.stride_tricks.as_strided(apart, (2, 6, 2, 4), (apart.strides[0], 32, 16, 4))
    with pytest.raises(ValueError, match=message):
        LayoutTensorMHAOperand(np.zeros((2, 6, 2, 16), np.int8), scales)


def test_buffers_without_tokens_are_operands_too():
    empty = RaggedMHAOperand(np.zeros((0, 2, 16), np.float32), np.zeros(4, np.uint32))
    none = LayoutTensorMHAOperand(np.zeros((3, 0, 2, 16), np.float32))
    for o in (empty, none):
        assert [o.cache_length(b) for b in range(3)] == [0, 0, 0]
        assert o.num_kv_rows() == 0


def test_methods_on_device_buffers_say_so():
    """A buffer in device memory, as __cuda_array_interface__ shows one: nothing of it is read."""

    def on_gpu(shape, typestr="<f4"):
        return SimpleNamespace(
            __cuda_array_interface__={"shape": shape, "typestr": typestr, "data": (1 << 20, False), "version": 3},
            __dlpack_device__=lambda: (2, 0),
        )

    d = LayoutTensorMHAOperand(on_gpu((2, 6, 2, 16)))
    r = RaggedMHAOperand(on_gpu((12, 2, 16)), on_gpu((3,), "<i4"))
    assert d.device == r.device == ("cuda", 0)
    assert (d.num_kv_rows(), d.max_context_length(), r.batch_size, r.num_kv_rows()) == (12, 6, 2, 12)
    for call in (lambda: d.load(0, 0, 0), lambda: r.cache_length(0), lambda: r.row_idx(0, 1)):
        with pytest.raises(TypeError, match="needs buffers in host memory"):
            call()
    with pytest.raises(ValueError, match=r"buffer must span fewer than 2\*\*31 rows"):
        LayoutTensorMHAOperand(on_gpu((2, 2**30, 2, 16)))
    with pytest.raises(ValueError, match="all buffers must be on one device"):
        RaggedMHAOperand(on_gpu((12, 2, 16)), np.array([0, 12], np.uint32))
