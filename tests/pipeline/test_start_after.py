# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pipeline may be entered after every pass, and makes the same PTX and ABI of what it left; also of tiles."""

from __future__ import annotations

import functools

import pytest

import kvarn as kv
from kvarn.lowering import pipeline
from kvarn.tools.operation_source import operation_source

NAMES = [s.name for s in pipeline.default_steps("sm_90a")]
SPEC = kv.CacheSpec("paged", kv.bf16, 2, 64, 16)
SPECS = (SPEC, SPEC, kv.Buffer[kv.bf16, 2], kv.Buffer[kv.f32, 2])


@kv.kernel(block=128)
def weighted(keys: kv.KVCache, values: kv.KVCache, x: kv.Buffer[kv.bf16, 2], out: kv.Buffer[kv.f32, 2]):
    rows = kv.tile_index(64)
    q, o = x.load_rows(rows, columns=64), kv.full((64, 64), 0.0)
    count = keys.cache_length(0)
    for j in range(0, (count + 63) // 64):
        s = kv.dot(q, keys.tile(0, 0, j * 64, count, rows=64).T)
        o = kv.dot(kv.bf16(s), values.tile(0, 0, j * 64, count, rows=64), o)
    out.store_rows(rows, value=o)


def made(kernel):
    artifact = kernel.artifact
    return artifact.entries, artifact.steps, artifact.args, artifact.workspaces, artifact.code


@functools.cache
def kernel_of(what):
    """A kernel over tiles, or attention of a kind."""
    if what == "tiles":
        return kv.compile(weighted, *SPECS, target="sm_90a")
    statics = ["schedule={'max_queries': 1}" if what == "decode" else "schedule={'kind': 'tile'}"]
    specs = ["collection=paged(bf16, num_heads=2, head_size=64, page_size=16)", "query=buffer(bf16, (none, 8, 64))"]
    return kv.compile(operation_source("attention", specs, statics, "sm_90a"), target="sm_90a")


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_over_tiles_may_be_entered_after_every_pass(name):
    entered(kernel_of("tiles"), name)


@pytest.mark.sampled(80)
@pytest.mark.parametrize("what", ["prefill", "decode"])
@pytest.mark.parametrize("name", NAMES[::-1])
def test_attention_may_be_entered_after_every_pass(name, what):
    entered(kernel_of(what), name)


def entered(kernel, name):
    again = kv.compile(kernel.stages[name], target="sm_90a", start_after=name)
    assert made(again) == made(kernel)
    assert again.asm["ptx"]


def test_only_what_is_left_of_the_pipeline_runs():
    again = kv.compile(kernel_of("tiles").stages["lower-kv-tiles"], target="sm_90a", start_after="lower-kv-tiles")
    assert list(again.stages)[1:] == NAMES[NAMES.index("lower-kv-tiles") + 1 :]


def test_a_pipeline_starts_after_a_pass_that_it_has_and_on_ir():
    text = str(weighted.trace(list(SPECS)))
    with pytest.raises(ValueError, match=r"it starts after one of these, got 'zork'"):
        kv.compile(text, target="sm_90a", start_after="zork")
    with pytest.raises(TypeError, match="start_after is for IR"):
        kv.compile(weighted, *SPECS, target="sm_90a", start_after="verify-kv")
