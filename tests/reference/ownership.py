# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A small pool, two kernels that read and write a token, and what the suites of ``kv.sanitize`` do with them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import kvarn as kv
from kvarn.sanitizer.ownership import OwnershipError

P, H, D = 4, 2, 16


@kv.kernel
def read(cache: kv.KVCache, b: kv.i32, t: kv.i32, out: kv.Buffer[kv.f32, 1]):
    out[kv.thread_id.x] = cache.load(b, kv.block_id.x, t, kv.thread_id.x)


@kv.kernel
def write(cache: kv.KVCache, b: kv.i32, t: kv.i32):
    cache.store(b, kv.block_id.x, t, kv.thread_id.x, 1.0)


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


class Step:
    """Steps of a manager over a small pool, by the two kernels above."""

    def __init__(self, **options):
        options = {"num_pages": 8, **options}
        self.m = kv.PagedKVCacheManager(
            params=kv.KVCacheStaticParams(H, D), num_layers=2, page_size=P, dtype="f32", **options
        )

    def begin(self, name, tokens):
        self.m.claim(name, tokens)
        self.m.alloc(name)

    def inputs(self, *names):
        inputs = self.m.runtime_inputs(names)
        return inputs.collection.get_value_cache(1), inputs

    def fill(self, *names):
        """Write the tokens of a step, and end it."""
        cache, inputs = self.inputs(*names)
        for b, name in enumerate(names):
            for t in range(int(inputs.cache_lengths[b]), int(inputs.cache_lengths[b]) + self.m.active(name)):
                write[H, D](cache, b, t)
        self.m.step(names)
        return cache

    def more(self, name, token=1):
        self.m.extend(name, [token])
        self.m.alloc(name)


def reads(cache, b, t):
    read[H, D](cache, b, t, np.zeros(D, np.float32))


def emulated():
    """Launches inside run in the emulator."""
    return kv.emulated("sm_90a", races=False, multiprocessors=2)


@contextlib.contextmanager
def reported(kind, *texts, **attributes):
    """The launch inside is reported, as that kind and nothing else."""
    with pytest.raises(OwnershipError) as found:
        yield
    assert {v.kind for v in found.value.violations} == {kind}
    for name, value in attributes.items():
        assert {getattr(v, name) for v in found.value.violations} == {value}, name
    for text in texts:
        assert text in str(found.value)


def vectors(rng, tokens, heads=H):
    return rng.standard_normal((tokens, heads, D)).astype(np.float32)
