# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn ablate``: what is left out shows in the counts, and every variant gives the same answer."""

from __future__ import annotations

import json
import re

import pytest

from kvarn.tools import ablate
from kvarn.tools.cli import main

KERNELS = """
import kvarn as kv


@kv.kernel
def total(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
    x = kv.f32(0.0)
    for t in range(cache.cache_length(0)):
        v = cache.load(0, 0, t, kv.thread_id.x * 8, width=8, dtype=kv.f32)
        x += v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7]
    out[kv.thread_id.x] = x


@kv.kernel
def first(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
    out[kv.thread_id.x] = cache.load(0, 0, 0, kv.thread_id.x, dtype=kv.f32)
"""
DROPS = '''
"""Reads token 0 where an access has a plan."""
from kvarn.lowering.rewrite import ops_named

def run(module, pass_):
    marked = [op for op in ops_named(module, "kv.load") if "kv.alignment" in op.attributes]
    for op in marked:
        op.operands[3] = op.operands[2]
'''


@pytest.fixture
def command(tmp_path):
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    spec = "cache=paged(f16, num_heads=1, head_size=64, page_size=16)"
    return ["ablate", f"{file}:total", "--spec", spec, "--grid", "1", "--block", "8", "--arg", "out=8"]


def test_a_pass_that_counts_shows(command, capsys, tmp_path):
    """Without plan-kv-access a load is of 2 bytes, and there are eight times as many."""
    found = tmp_path / "found.json"
    assert main([*command, "--passes", "plan-kv-access,skip-kv-rescales", "--json", str(found)]) == 0
    (records,) = json.loads(found.read_text()).values()
    whole, plan, rescales = records
    assert [r["left out"] for r in records] == [ablate.ALL, "plan-kv-access", "skip-kv-rescales"]
    assert plan["instructions"] > 1.2 * whole["instructions"]
    assert plan["sectors"] > 6 * whole["sectors"]
    assert rescales["instructions"] == whole["instructions"]
    # 37 tokens of 128 bytes in whole sectors, 37 look-ups, the length, and 32 bytes of results.
    assert whole["sectors"] == 37 * 4 + 37 + 1 + 1
    assert all(r["problem"] == "" for r in records)
    assert re.search(r"plan-kv-access +[\d,]+ +\d\.\d{3}", capsys.readouterr().out)


def test_another_answer_is_told(command, tmp_path, capsys):
    """A pass of one's own that is right only because of another: it shows when that is left out."""
    (tmp_path / "drops.py").write_text(DROPS)
    loaded = ["--load-pass", str(tmp_path / "drops.py"), "--insert-after", "plan-kv-access=drops"]
    assert main([*command, *loaded, "--passes", "simplify-addresses"]) == 0
    assert main([*command, *loaded, "--passes", "plan-kv-access"]) == 1
    assert re.search(r"plan-kv-access .*WRONG: out: \d of 8 elements differ", capsys.readouterr().out)


def test_what_cannot_be_ablated_is_refused(command, capsys):
    assert main([*command, "--passes", "lower-kv-access"]) == 2
    assert "--passes must be optional passes" in capsys.readouterr().err
    assert main([*command, "--target", "host"]) == 2
    assert "give a GPU target" in capsys.readouterr().err
