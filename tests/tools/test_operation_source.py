# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn compile --op``: the IR of an operation is that of a call, and what a command line lacks is named."""

from __future__ import annotations

import re

import numpy as np
import pytest

import kvarn as kv
from kvarn.ops import writes
from kvarn.tools import cli
from kvarn.tools.operation_source import operation_source

CACHE = "paged(bf16, num_heads=2, head_size=64, page_size=16)"
STORE = ["--op=store_ragged", f"--spec=cache={CACHE}", "--spec=x=buffer(bf16, (none, 2, 64))", "--target=sm_90a"]


def pool():
    blocks = np.zeros((2, 2, 1, 16, 2, 64), kv.bf16.numpy)
    return kv.PagedKVCacheCollection(blocks, np.array([3], np.uint32), np.array([[0]], np.uint32), 1, 4)


def test_the_ir_is_that_of_a_call(capsys):
    operands = (pool().get_key_cache(0), np.ones((1, 2, 64), kv.bf16.numpy), np.array([0, 1], np.uint32))
    made = writes._STORE_RAGGED.compile(operands, target="sm_90a")
    assert cli.main(["compile", *STORE, "--emit=kv"]) == 0
    assert capsys.readouterr().out.strip() == made.asm["kv"].strip()
    assert cli.main(["compile", *STORE]) == 0
    assert capsys.readouterr().out.strip() == made.asm["ptx"].strip()


def test_offsets_of_a_chunk_are_made():
    latent = "paged(bf16, num_heads=1, head_size=576, page_size=64, is_mla=True)"
    columns = {"query": 192, "key": 128, "value": 128}
    specs = [f"collection={latent}", *(f"{name}=buffer(bf16, (none, 16, {n}))" for name, n in columns.items())]
    assert "kv.mla_prefill_chunk" in operation_source("mla_prefill_chunk", specs, [], "sm_90a")


@pytest.mark.parametrize(
    ("name", "specs", "statics", "message"),
    [
        ("attention", [f"collection={CACHE}"], [], r"needs query: --spec 'query=buffer\(bf16, \(none, 32, 128\)\)'"),
        ("attention", [], [], "needs collection: --spec 'collection=paged"),
        ("zork", [], [], "an operation must be MODULE:FUNCTION, FILE.py:FUNCTION or one of append, attention"),
        ("append", ["zork=bf16"], [], "append takes collection, layer, key, value, row_offsets"),
        ("append", [f"collection={CACHE}"], ["key=1", "value=1"], "key: must be a NumPy array"),
        ("store_ragged", [f"cache={CACHE}", "x=buffer(bf16, 3)"], [], "a buffer must have a dtype and its extents"),
        ("store_ragged", [f"cache={CACHE}", "x=buffer(bf16, (none, 2, 65))"], [], r"x must have shape \[T, 2, 64\]"),
    ],
)
def test_what_is_wrong_is_named(name, specs, statics, message):
    with pytest.raises((ValueError, TypeError), match=message):
        operation_source(name, specs, statics, "sm_90a")


def test_a_kernel_or_an_operation_is_named_and_not_both(capsys):
    assert cli.main(["compile", "--target=sm_90a"]) == 2
    assert cli.main(["compile", "kernels.py:k", *STORE]) == 2
    assert capsys.readouterr().err.count("give a kernel, FILE.py:KERNEL, or an operation") == 2


def test_explain_shows_both_kernels_of_a_divided_batch(capsys):
    """That of the sequences of few new tokens, and that of the others, with the rule of the launch in their grids."""
    specs = ["--spec=collection=paged(f8e4m3, num_heads=8, head_size=128, page_size=16)",
             "--spec=query=buffer(bf16, (none, 32, 128))"]  # fmt: skip
    schedule = "--static=schedule={'batch_invariant': True}"
    assert cli.main(["explain", "--op=attention", *specs, schedule, "--target=sm_90a"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"step 1: attention_decode over .*step 2: attention over ", said, re.DOTALL)


def test_explain_ablate_and_bisect_take_operations(capsys):
    assert cli.main(["explain", *STORE, "--diff=hoist-kv-lookups"]) == 0
    assert '"kv.raw_page"' in capsys.readouterr().out
    assert cli.main(["ablate", *STORE, "--passes=plan-kv-access", "--lengths=3", "--new=2"]) == 0
    whole, without = (line.split() for line in capsys.readouterr().out.splitlines()[2:4])
    assert whole[0] == "nothing"
    assert int(without[1]) > int(whole[1])
