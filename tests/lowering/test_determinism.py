# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Passes make the same IR of the same kernel in every process: nothing follows the order of addresses in memory."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import hashlib
import numpy as np
import kvarn as kv
from kvarn import dispatch
from kvarn.ops import reads

pool = np.zeros((4, 2, 1, 16, 2, 64), kv.bf16.numpy)
cache = kv.PagedKVCacheCollection(pool, np.zeros(2, np.uint32), np.zeros((2, 2), np.uint32), 4, 32)
query, offsets = np.zeros((4, 4, 64), kv.bf16.numpy), np.zeros(3, np.int32)
near = lambda b, h, q, k: (k <= q) & (q - k < 40) & ((k + h) % 3 != 0)
found = []
build = dispatch.compile_operation
dispatch.compile_operation = lambda *a, **k: found.append(build(*a, **k)) or found[-1]
with kv.emulated("sm_90a"):
    kv.ops.attention(cache, 0, query, offsets, mask=near, out=np.zeros_like(query), schedule={"kind": "tile"})
for stage, text in found[0].stages.items():
    print(stage, hashlib.sha256(text.encode()).hexdigest()[:16])
"""


def test_every_stage_of_a_kernel_is_the_same_text_in_every_process():
    runs = [subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [run.communicate()[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert "split-kv-loops" in texts[0]
    assert texts[0] == texts[1]
