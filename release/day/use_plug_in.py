# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What holds once the package is installed: its passes go by name, its operation is there, on every target."""

from pathlib import Path

import numpy as np

import kvarn as kv
from day.kernels import narrow
from day.norms import norms
from day.token_norm import token_norm

spec, out = kv.CacheSpec("paged", kv.bf16, 2, 64, 16), kv.Buffer[kv.f32, 3]
passes = {"before:hoist-kv-lookups": "widen{max-width=4}"}
made = kv.compile(narrow, spec, kv.Buffer[kv.f32, 2], target="sm_90a", passes=passes)
assert "width = 4" in made.stages["widen"]
blocks = np.random.default_rng(0).standard_normal((5, 2, 1, 16, 2, 64)).astype(kv.bf16.numpy)
table, lengths = np.array([[3, 1], [4, 0]], np.uint32), np.array([20, 5], np.uint32)
keys = kv.PagedKVCacheCollection(blocks, lengths, table, 1, 21).get_key_cache(0)
expected = np.zeros((2, 2, 32), np.float32)
for b, n in enumerate(lengths):
    x = blocks[table[b], 0, 0].reshape(-1, 2, 64)[:n].astype(np.float32)
    expected[b, :, :n] = (x**2).sum(-1).T
found = np.zeros_like(expected)
norms[(2, 2), 32](keys, found)
np.testing.assert_allclose(found, expected, rtol=1e-5)
for target in ("sm_80", "sm_90a", "sm_100a"):
    made = kv.compile(norms, spec, out, target=target)
    assert "ld.global.nc.v4.b32" in made.asm["ptx"], "what a rule makes is planned"
    found[:] = 0
    made.emulate((2, 2), 32, keys, found).check()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@kv.kernel
def wrong(keys: kv.KVCache, x: kv.Buffer[kv.f32, 1]):
    x[0] = token_norm(keys, 0, 0, 0, width=7)


message = ""
try:
    kv.compile(wrong, spec, kv.Buffer[kv.f32, 1], target="sm_90a")
except kv.KernelError as error:
    message = str(error)
assert "'kv.token_norm' op width must divide the head size 64, got 7" in message
Path("norms.mlir").write_text(made.stages["input"])
