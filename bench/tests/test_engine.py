# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The suite of layers as vLLM calls them, without vLLM: its rows, and its page. Its layers: integrations/vllm/tests."""

import importlib
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
engine_rows = importlib.import_module("bench.engine_rows")
suites = importlib.import_module("bench.suites")


def test_the_rows_span_what_engines_ask_for():
    rows = engine_rows.ROWS
    assert len({row.name for row in rows}) == len({row.title for row in rows}) == len(rows) == 24
    assert {row.dtype for row in rows} == {"bf16", "fp8"}
    assert {len(row.lengths) for row in rows} >= {1, 4, 8, 16, 64, 128, 256}
    assert {total for row in rows if row.decodes for _, total in row.lengths} >= {1024, 4096, 32768}
    assert {row.decodes for row in rows} == {True, False}
    assert all(1 <= new <= total for row in rows for new, total in row.lengths)
    assert all(sum(new for new, _ in row.lengths) <= 8192 for row in rows)


def _record(row, who, us, **more):
    return {"kind": "engine", "case": row, "who": who, "ok": True, "us": us, "error": 0.001, "metadata_us": 7, **more}


def test_the_page_has_the_ratios_and_the_failures(tmp_path):
    records = [
        {"kind": "machine", "device": "a GPU", "torch": "2", "kvarn": "0", "sm_mhz": 1980, "memory_mhz": 3201},
        _record("b64_c4k_fp8", "kvarn", 50.0),
        _record("b64_c4k_fp8", "FLASH_ATTN", 100.0),
        _record("b64_c4k_fp8", "FLASHINFER", 80.0),
        _record("b4_prompts_bf16", "kvarn", 30.0),
        _record("b4_prompts_bf16", "FLASH_ATTN", 20.0),
        _record("b1_c1k_fp8", "kvarn", 1.0, ok=False),
        _record("b1_c1k_fp8", "FLASH_ATTN", 2.0),
        {"kind": "engine", "case": "b4_prompts_bf16", "who": "FLASHINFER", "ok": False, "note": "ImportError: none"},
    ]
    document = {"date": "2026-01-02", "commit": "c0ffee", "vllm": "0.26.0", "records": records}
    (tmp_path / "engine.json").write_text(json.dumps(document))
    ((path, text),) = suites.regenerated(tmp_path).items()
    assert path == tmp_path / "engine.md"
    assert "commit c0ffee" in text
    assert "clocks after warming up: multiprocessors 1980 MHz" in text
    line = re.search(r"^\| 64 × 4k, fp8 .*$", text, re.M)[0]
    assert [cell.strip() for cell in line.strip("|").split("|")][1:6] == ["50.00", "100.00", "80.00", "", "0.625"]
    assert re.search(r"^\| 4 prompts of 2k, bf16 \| 30.00 \| 20.00 \|  \|  \| 1.500 \|", text, re.M)
    assert "at most 1.01 of the fastest peer's time: 1 of 2 steps" in text  # a wrong result has no ratio
    assert "geometric mean: 0.625, goal" in text  # of decodes over fp8 caches alone
    assert "- b1_c1k_fp8: kvarn: the result is wrong" in text
    assert "- b4_prompts_bf16: FLASHINFER: ImportError: none" in text
