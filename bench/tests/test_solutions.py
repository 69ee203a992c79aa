# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Solutions of FlashInfer-Bench: which definitions have one, and that they compute what the definitions say."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
solutions = importlib.import_module("bench.solutions")

PAGED, LATENT = ["kv_indptr", "kv_indices"], ["q_nope", "q_pe", "ckv_cache", "kpe_cache"]
KINDS = {
    "gqa_paged_decode_h4_kv2_d64_ps1": ["q", "k_cache", "v_cache", *PAGED, "sm_scale"],
    "gqa_paged_decode_h5_kv1_d64_ps16": ["q", "k_cache", "v_cache", *PAGED, "kv_last_page_len", "sm_scale"],
    "gqa_paged_prefill_causal_h4_kv2_d64_ps1": ["q", "k_cache", "v_cache", "qo_indptr", *PAGED, "sm_scale"],
    "gqa_paged_prefill_causal_h4_kv2_d64_ps16": [
        "q", "k_cache", "v_cache", "qo_indptr", *PAGED, "kv_last_page_len", "sm_scale",
    ],
    "gqa_ragged_prefill_causal_h4_kv2_d64": ["q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale"],
    "mla_paged_decode_h4_ckv512_kpe64_ps16": [*LATENT, *PAGED, "kv_last_page_len", "sm_scale"],
    "mla_paged_prefill_causal_h4_ckv512_kpe64_ps1": [*LATENT, "qo_indptr", *PAGED, "sm_scale"],
}  # fmt: skip


def definition(name, inputs, dtype="bfloat16"):
    types = {
        x: {"dtype": "float32" if x == "sm_scale" else "int32" if "_i" in x or "len" in x else dtype} for x in inputs
    }
    return {"name": name, "op_type": name[:9], "inputs": types, "outputs": {"output": {}, "lse": {}}}


def test_every_definition_that_is_covered_gets_a_solution(tmp_path, capsys):
    others = {
        "rmsnorm_h128": definition("rmsnorm_h128", ["hidden_states"]),
        "gqa_paged_decode_h4_kv2_d64_ps1_x": definition("gqa_paged_decode_h4_kv2_d64_ps1_x", ["q", "window_left"]),
        "gqa_ragged_prefill_causal_h4_fp8": definition(
            "gqa_ragged_prefill_causal_h4_fp8", KINDS["gqa_ragged_prefill_causal_h4_kv2_d64"], "float8_e4m3fn"
        ),
    }
    for name, what in {**others, **{name: definition(name, inputs) for name, inputs in KINDS.items()}}.items():
        folder = tmp_path / "definitions" / what["op_type"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(what))
    assert solutions.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "not covered: rmsnorm_h128: no operation of kvarn" in out
    assert "not covered: gqa_paged_decode_h4_kv2_d64_ps1_x: inputs window_left" in out
    assert "not covered: gqa_ragged_prefill_causal_h4_fp8: inputs k of float8_e4m3fn" in out
    assert f"{len(KINDS)} solutions in" in out
    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "solutions").rglob("*.json")}
    assert sorted(written) == sorted(f"kvarn_{name}" for name in KINDS)
    for name, inputs in KINDS.items():
        made = written[f"kvarn_{name}"]
        assert made["definition"] == name
        assert f"def run({', '.join(inputs)}):" in made["sources"][0]["content"]
        assert made["spec"]["entry_point"].split("::")[0] in [source["path"] for source in made["sources"]]


@pytest.mark.parametrize("name", KINDS)
def test_a_solution_computes_what_the_definition_says(name, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")
    for source in solutions.solution(definition(name, KINDS[name]))["sources"]:
        (tmp_path / source["path"]).write_text(source["content"])
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("main", "kvarn_attention"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    run = importlib.import_module("main").run
    for module in ("main", "kvarn_attention"):
        monkeypatch.delitem(sys.modules, module)
    torch.manual_seed(0)
    latent, size = name.startswith("mla"), 16 if name.endswith("ps16") else 1
    heads, query_heads = 1 if latent or "_kv1_" in name else 2, 5 if "_h5_" in name else 4
    kv, new = torch.tensor([21, 5, 0, 33]), torch.tensor([1, 1, 1, 1] if "decode" in name else [7, 5, 0, 2])
    counts = -(-kv // size)
    order = 1 + torch.randperm(int(counts.sum())).int()

    def bounds(x):
        return torch.cat([torch.zeros(1), x.cumsum(0)]).int()

    def normal(*shape):
        return torch.randn(*shape).bfloat16()

    given = {
        "qo_indptr": bounds(new), "kv_indptr": bounds(counts), "kv_indices": order, "sm_scale": 0.11,
        "kv_last_page_len": (kv - (counts - 1) * size).int(),
    }  # fmt: skip
    widths = (512, 64) if latent else (64,)
    query = normal(int(new.sum()), query_heads, sum(widths))
    pool = normal(len(order) + 1, size, heads, sum(widths))
    values = pool[..., : widths[0]] if latent else normal(*pool.shape)
    if latent:
        given |= {"q_nope": query[..., :512], "q_pe": query[..., 512:]}
        given |= {"ckv_cache": pool[:, :, 0, :512].contiguous(), "kpe_cache": pool[:, :, 0, 512:].contiguous()}
    elif "ragged" in name:
        pool, values = normal(int(kv.sum()), 1, heads, 64), normal(int(kv.sum()), 1, heads, 64)
        order = torch.arange(len(pool))
        given |= {"q": query, "k": pool[:, 0], "v": values[:, 0]}
    else:
        given |= {"q": query, "k_cache": pool, "v_cache": values}
    out, lse = run(*(given[x] for x in KINDS[name]))
    at, starts = bounds(counts), bounds(new)
    for b in range(4):
        ids = order[at[b] : at[b + 1]].long()
        keys, held = (x[ids].reshape(-1, heads, x.shape[-1])[: kv[b]].float() for x in (pool, values))
        keys, held = (x.repeat_interleave(query_heads // heads, 1) for x in (keys, held))
        rows = slice(int(starts[b]), int(starts[b + 1]))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * 0.11
        seen = torch.arange(int(kv[b])) <= torch.arange(int(new[b]))[:, None] + kv[b] - new[b]
        scores.masked_fill_(~seen, -math.inf)
        wanted = scores.logsumexp(-1).T / math.log(2.0)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), held) if kv[b] else torch.zeros(out[rows].shape)
        torch.testing.assert_close(out[rows].float(), expected, atol=0.02, rtol=0.02)
        torch.testing.assert_close(lse[rows], wanted, atol=0.01, rtol=0.01)
