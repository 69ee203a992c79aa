# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scores and masks as functions in calls: which are the same, what is refused, and the code of their page."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import attention as reference
from reference.attention_functions import dilated, document, gemma, problem_of, query_of, run

import kvarn as kv
from kvarn.dsl import functions as registry
from kvarn.ops import functions, reads

# --- which functions are the same ------------------------------------------------------------------------


def named(function: Any, role: str = "score") -> str:
    return functions.given(function, role, "kv.ops.attention")[0]


def test_closures_with_different_numbers_do_not_share_a_kernel():
    assert named(gemma(2.0)) == named(gemma(2.0))
    assert len({named(gemma(cap)) for cap in (2.0, 3.0, 2, True, -0.0, 0.0)}) == 6
    assert named(dilated(5, 3), "mask") != named(dilated(3, 5), "mask")


def test_masks_are_told_apart_by_their_numbers_parts_and_order():
    made = [
        kv.masks.sliding_window(4), kv.masks.sliding_window(5), kv.masks.chunked(4), kv.masks.chunked_causal(4),
        kv.masks.causal, ~kv.masks.causal, kv.masks.causal & kv.masks.chunked(4), kv.masks.causal | kv.masks.chunked(4),
        kv.masks.causal & kv.masks.chunked(5), kv.masks.causal & document, kv.masks.causal & (lambda b, h, q, k: k > 3),
        kv.masks.chunked(4) & ~kv.masks.sliding_window(4), ~kv.masks.chunked(4) & kv.masks.sliding_window(4),
    ]  # fmt: skip
    names = {named((m, np.zeros((2, 9), np.int32)) if m.arrays else m, "mask") for m in made}
    assert len(names) == len(made)
    assert named(kv.masks.sliding_window(4), "mask") in names


def test_masks_are_told_apart_by_what_they_say_of_their_bounds():
    def first(q):
        return q - 3

    def near(b, h, q, k):
        return (k > q - 4) & (k <= q)

    made = [
        kv.masks.Mask(near), kv.masks.Mask(near, first), kv.masks.Mask(near, lambda q: q - 2),
        kv.masks.Mask(near, end=first), kv.masks.Mask(near, first, interval=True),
    ]  # fmt: skip
    assert len({named(m, "mask") for m in made}) == len(made)


@pytest.mark.parametrize("schedule", [{"kind": "decode", "max_queries": 1}, {"kind": "simt"}])
def test_a_mask_by_name_is_the_function_that_it_stands_for(schedule):
    """Kernels have no code for names: of the function that is given in a name's place they are the same."""
    rng, problem = problem_of(18, num_heads=1, new=[1, 1])
    query = query_of(rng, problem, 2)
    operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy())
    texts = []
    for mask, window in (("causal", 24), (kv.masks.sliding_window(24), None)):
        attributes, _ = reads._modified(None, mask, window, None, None, "")
        made = reads._ATTENTION.compile(operands, attributes, schedule, "sm_80")
        texts.append(re.sub("//.*", "", made.asm["ptx"]))
    assert texts[0] == texts[1]


LEVEL = 3.0


def leveled(score, b, h, q, k):
    return score * LEVEL


def test_a_number_of_the_module_that_changed_is_another_function(monkeypatch):
    before = named(leveled)
    monkeypatch.setitem(globals(), "LEVEL", 4.0)
    assert named(leveled) != before
    monkeypatch.setitem(globals(), "LEVEL", 3.0)
    assert named(leveled) == before


def test_a_name_is_the_same_in_another_process(tmp_path):
    """So that the cache on disk has it, and never for another function."""
    text = "def f(size):\n    return lambda b, h, q, k: (k <= q) & (q - k < size)\n"
    (tmp_path / "windows_of_mine.py").write_text(text)
    code = (
        "import windows_of_mine as w, kvarn as kv; from kvarn.ops.functions import given\n"
        "print([given(m, 'mask', '')[0] for m in (w.f(3), w.f(4), kv.masks.chunked(7) & w.f(3))])"
    )
    lines = {
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(lines) == 1
    assert len(set(eval(lines.pop()))) == 3


def test_what_has_no_digest_stays_out_of_the_cache_on_disk():
    opaque = object()

    def score(score, b, h, q, k):
        return score if opaque else -score

    with pytest.warns(RuntimeWarning, match="the compile cache is not used"):
        name = named(score)
    assert not registry.registered(name).portable
    assert not registry.are_portable(["causal", name])
    assert named(score) == name


# --- as users call it --------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "attention-functions.md"


def test_code_of_the_page_runs(tmp_path):
    blocks = re.findall(r"```python sketch\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    found = runpy.run_path(str(tmp_path / "page.py"))
    pool, bias, buckets, ids = (found[name] for name in ("pool", "bias", "buckets", "documents"))
    want, _ = reference.attention(
        pool, 0, found["query"], found["offsets"],
        score=lambda x, b, h, q, k: x + bias[h, buckets[np.maximum(q - k, 0)]],
        mask=lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]),
    )  # fmt: skip
    np.testing.assert_allclose(found["out"].astype(np.float64), want, rtol=4e-3, atol=4e-3)
    want, _ = reference.attention(
        pool, 0, found["query"], found["offsets"],
        mask=lambda b, h, q, k: (k <= q) & (q - k < 24) & ((q - k) % 3 == 0),
    )  # fmt: skip
    np.testing.assert_allclose(found["dilated"].astype(np.float64), want, rtol=4e-3, atol=4e-3)


# --- what is refused ---------------------------------------------------------------------------------------


def refusal(**options: Any) -> str:
    rng, problem = problem_of(17, num_heads=1)
    with pytest.raises((TypeError, ValueError)) as caught:
        run(problem, query_of(rng, problem, 2), **options)
    return str(caught.value)


def both(b, h, q, k):
    return k <= q and q - k < 5


def between(b, h, q, k):
    return 0 <= q - k < 5


def branching(score, b, h, q, k):
    if q > k:
        return score
    return 0.0


TABLE = np.zeros((2, 60), np.int32)
MISTAKES = [
    ({"score": lambda s, b, h, q: s}, "score: <lambda> must have parameters (score, b, h, q, k) and then one"),
    ({"score": lambda *x: x[0]}, "score: <lambda> must have parameters"),
    ({"mask": lambda s, b, h: s}, "mask: <lambda> must have parameters (b, h, q, k) and then one parameter"),
    ({"mask": document}, "mask takes 1 arrays, got 0"),
    ({"mask": (kv.masks.causal, TABLE)}, "mask takes 0 arrays, got 1"),
    ({"mask": ("causal", TABLE)}, "arrays go with a mask that is a function, got 'causal' with 1"),
    ({"mask": 3}, "mask must be a name or a function, or a tuple of one and its arrays, got int"),
    ({"score": 3}, "score must be a function, or a tuple of one and its arrays, got int"),
    ({"score": "softcap"}, "score must be a function, or a tuple of one and its arrays, got 'softcap'"),
    ({"score": kv.masks.causal}, "which goes to mask="),
    ({"score": np.tanh}, "a function of positions must be made by def or lambda, got a ufunc"),
    ({"mask": (document, TABLE.astype(np.int64))}, "array 0 of the score and the mask must have dtype"),
    ({"mask": (document, TABLE[:, :0])}, "array 0 of the score and the mask must have at least one element"),
    ({"mask": (document, TABLE[0])}, "an array of 1 dimensions needs 1 indices, got 2"),
    ({"score": lambda s, b, h, q, k: k <= q}, "a score function must return the new score, an f32, got a bool tile"),
    ({"mask": both}, "of tiles write a & b, a | b, ~a"),
    ({"mask": between}, "return 0 <= q - k < 5"),
    ({"score": branching}, "kv.where for if"),
    ({"score": lambda s, b, h, q, k: s.max(axis=1)}, "write x[:, None] or x[None, :] around the vector"),
    ({"score": lambda s, b, h, q, k: None}, "a score function must return the new score, an f32, got None"),
    ({"mask": lambda b, h, q, k: q - k}, "a mask function must return a bool, got a i32 tile"),
    ({"score": lambda s, b, h, q, k: s + (q - k)}, "write kv.f32(x) around the i32"),
    ({"score": lambda s, b, h, q, k: s + TABLE[q]}, "'TABLE' is an array, which must be a parameter"),
    ({"score": (lambda s, b, h, q, k, u, v, w, x, y: s, *[TABLE] * 5)}, "at most 4 arrays together, got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[m[:40] for _, m in MISTAKES])
def test_a_mistake_is_refused_and_named(options, message):
    assert message in refusal(**options)


def test_an_error_inside_of_a_function_has_its_line():
    def crooked(score, b, h, q, k):
        return score.nothing

    assert "return score.nothing" in refusal(score=crooked)
    assert f"{__file__}:" in refusal(score=crooked)


def test_a_mistake_in_a_function_is_told_at_its_file_whatever_is_known_of_its_text():
    pair = (lambda s, b, h, q, k: s + b, lambda s, b, h, q, k: s + h)  # on one line
    line = sys._getframe().f_lineno - 1
    assert re.search(rf"{re.escape(__file__)}:{line}:\d+: error: \+ of f32 and i32", refusal(score=pair[1]))
    scope: dict[str, Any] = {}
    exec(compile("def made(s, b, h, q, k):\n    return s + b", "generated.py", "exec"), scope)
    assert "generated.py:2:1: error: + of f32 and i32" in refusal(score=scope["made"])
    for options in ({"score": lambda s, b, h, q, k: (s, s)}, {"mask": lambda b, h, q, k: q}):
        assert re.search(rf"must return .*, got .* from <lambda> of {re.escape(__file__)}:\d+", refusal(**options))


def test_a_window_beside_a_function_is_refused():
    with pytest.raises(ValueError, match="window and chunk must be None for a mask that is a function"):
        reads._modified(None, kv.masks.causal, 4, None, None, "kv.ops.attention")


def test_targets_without_wgmma_have_functions_in_tiles_and_decodes():
    rng, problem = problem_of(18, num_heads=1)
    query = query_of(rng, problem, 2)
    attributes, _ = reads._modified(None, kv.masks.causal, None, None, None, "")
    operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy())
    for target, schedule, kernel in (
        ("sm_80", None, "attention("), ("sm_100a", None, "attention("),
        ("sm_80", {"max_queries": 4, "max_batch": 4}, "attention_decode"),
    ):  # fmt: skip
        assert f".entry {kernel}" in reads._ATTENTION.compile(operands, attributes, schedule, target).asm["ptx"]
    with pytest.raises(ValueError, match="kind tile needs a GPU with wgmma, got sm_80"):
        reads._ATTENTION.compile(operands, attributes, {"kind": "tile", "instruction": "wgmma"}, "sm_80")


def test_ir_names_a_function_that_only_its_own_process_expands():
    rng, problem = problem_of(19, num_heads=1)
    query = query_of(rng, problem, 2)
    attributes, _ = reads._modified(gemma(2.0), kv.masks.causal, None, None, None, "")
    operands = (problem.collection, 1, query, problem.row_offsets, 0.1, query.copy())
    made = reads._ATTENTION.compile(operands, attributes, None, "sm_90a")
    text = made.asm["kv"]
    assert 'mask = "_causal@' in text
    assert 'score = "lambda@' in text
    assert "wgmma.mma_async" in made.asm["ptx"]
    with pytest.raises(ValueError, match="must have been given to an operation in this process"):
        kv.compile(text.replace('mask = "_causal@', 'mask = "_other@'), target="sm_90a")
