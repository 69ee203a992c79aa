# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a type checker says of kernels: nothing of a right one, and where a wrong one is wrong."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvarn as kv

STUB = Path(__file__).resolve().parents[2] / "python" / "kvarn" / "__init__.pyi"
RIGHT = """
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvarn as kv


@dataclass(frozen=True)
class Arguments:
    cache: kv.PagedKVCache
    out: kv.Buffer[kv.f32, 2]
    bias: kv.Optional[kv.Buffer[kv.f32, 1]] = None
    n: int = 3


@kv.kernel(block=128)
def scale_keys(
    cache: kv.KVCache, alpha: kv.f32, out: kv.Buffer[kv.f32, 2], head: int, c: kv.PagedKVCacheCollection,
    bias: kv.Optional[kv.Buffer[kv.f32, 1]] = None, flag: kv.bool | None = None,
):
    b, t = kv.block_id.x, kv.block_id.y
    if t < cache.cache_length(b):
        for h in range(cache.num_heads):
            d = kv.thread_id.x * 8
            x = cache.load(b, h, t, d, width=8, dtype=kv.f32)
            y = x * alpha
            z = y.reduce("add")
            cache.store(b, h, t, d, cache.dtype(y))
            out[b, t] = z
            v = out.load(b, t, width=4)
            if bias is not None:
                out[b, t] = bias[h] + z + v[0]
    total = 0.0
    for i in range(out.shape[0]):
        total += out[i, 0]
    for i in range(kv.i32(alpha)):
        total = max(total, out[i, 1])
    s = kv.shared((16, 64), kv.bf16)
    s[0, 0] = kv.bf16(1.0)
    kv.barrier()
    key = c.get_key_cache(t)
    page = key.page(b, t)
    out[0, 0] = key.load(b, 0, t, 0, page=page, dtype=kv.f32) + kv.math.exp(total) + kv.warp_reduce(total, "add")
    w = kv.vector(kv.f32, 4)
    w[0] = alpha
    out.store(0, 0, value=w)
    while kv.lane_id < head and out[0, 0] > 1:
        kv.atomic_add(out, (0, 0), 1.0)


@kv.kernel
def structured(a: Arguments, more: kv.i32, x: kv.ReadOnlyBuffer[kv.f32, 1]):
    if a.bias is not None:
        a.out[0, 0] = a.bias[0] + kv.f32(more) + a.cache.load(0, 0, 0, 0, dtype=kv.f32) + a.n + x[0]


blocks, one = np.ones((2, 2, 1, 4, 1, 8), np.float32), np.array([1], np.uint32)
keys = kv.PagedKVCacheCollection(blocks, one, one.reshape(1, 1), 1, 1)
cache: kv.PagedKVCache = keys.get_key_cache(0)
array: Any = np.zeros((1, 1), np.float32)  # a field annotated with kv.Buffer takes what is typed as Any
structured[1, 1](Arguments(cache, array), 2, array[0])
scale_keys[(2, 20), 16](cache, 0.5)
spec = kv.CacheSpec("paged", kv.bf16, 8, 128, 16)
compiled = kv.compile(scale_keys, spec, kv.f32, kv.Buffer[kv.f32, 2], target="sm_90a")
text: str = compiled.asm["ptx"]
figures = compiled.stats["registers"] + 1
kv.ops.append(keys, 0, blocks, blocks, one)
"""
WRONG = """
import kvarn as kv


@kv.kernel
def mistakes(cache: kv.KVCache, pool: kv.PagedKVCacheCollection, out: kv.Buffer[kv.f32, 1], alpha: kv.f32):
    cache.laod(0, 0, 0, 0)
    out.laod(0)
    kv.barier()
    pool.get_key_cahce(0)
    alpha.too(kv.f32)


compiled = kv.compile(mistakes, target="sm_90a")
compiled.regs()
kv.compile(mistakes, targte="sm_90a")
compiled.asm.ptx
"""


def test_a_right_kernel_has_no_error_and_misspelt_names_and_parameters_are_found(tmp_path):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("needs pyright: pip install pyright")
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "right.py", "wrong.py"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=600)
    found = [d for d in json.loads(ran.stdout)["generalDiagnostics"] if d["severity"] == "error"]
    assert {Path(d["file"]).name for d in found} == {"wrong.py"}
    assert all("attribute" in d["message"] or "parameter" in d["message"] for d in found)
    lines = WRONG.splitlines()
    assert [lines[d["range"]["start"]["line"]].strip() for d in found] == [
        "cache.laod(0, 0, 0, 0)", "out.laod(0)", "kv.barier()", "pool.get_key_cahce(0)", "alpha.too(kv.f32)",
        "compiled.regs()", 'kv.compile(mistakes, targte="sm_90a")', "compiled.asm.ptx",
    ]  # fmt: skip


def test_what_needs_torch_is_no_attribute_without_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "kvarn.parallel", raising=False)
    with pytest.raises(AttributeError, match=r"kv.parallel needs torch.distributed: pip install 'kvarn\[torch\]'"):
        _ = kv.parallel
    assert "ops" in dict(inspect.getmembers(kv))


def test_the_stub_has_the_names_of_the_package():
    """A name that is missing there is an error for every user with a type checker; one too many fails at run time."""
    names: set[str] = set()
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module != "typing" and node.module != "collections.abc":
            names |= {a.asname for a in node.names if a.asname}
            if node.names[0].name == "*":
                names |= {*importlib.import_module(str(node.module)).__all__}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    names -= {*kv._INNER, *kv._ABOVE}  # through which methods reach the layers above theirs
    assert {n for n in names if not n.startswith("_")} | {"Optional", "__version__"} == set(dir(kv))


def test_modules_of_the_language_complete_to_what_kernels_call():
    for module in (kv.math, kv.tma):
        assert set(dir(module)) == set(module.__all__)
