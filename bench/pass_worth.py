# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which optional passes change which programs: python -m bench.pass_worth [--write] [--only REGEX]

Compiles programs of ``bench.identity``, one or more per family of kernels, for sm_90a: with all passes, and without
each optional pass that transforms code. A pass changes a program if its PTX differs. ``--write`` writes
``pass_worth.json``, from which ``make docs`` makes the table of docs/reference/passes.md, and which
``tests/lowering/test_optional_passes.py`` reads. No GPU is needed; the run takes minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kvarn as kv
from kvarn import dispatch
from kvarn.compilation.specialisation import Specialisation
from kvarn.env import OWNERSHIP
from kvarn.lowering import pipeline

from . import identity
from .identity_programs import Make, programs

TARGET, FILE = "sm_90a", Path(__file__).with_name("pass_worth.json")
# Titles of the table's columns, and the programs of bench.identity.
PROGRAMS = {
    "prefill": "attention, no mask 0:kv.attention",
    "prefill, window": "attention, window 0:kv.attention",
    "prefill, mask and score": "attention, mask and score 0:kv.attention",
    "prefill, block mask": "attention, block mask 1:kv.attention",
    "prefill, 8 bits": "attention, f8, alibi 0:kv.attention",
    "prefill, 8-bit query": "attention, f8 x f8 0:kv.attention",
    "prefill of a small model": "small_prefill",
    "decode": "attention, no mask, few 0:kv.attention",
    "decode, 8 bits": "attention, f8, few 0:kv.attention",
    "MLA, 128 heads": "mla bf16, 128 heads, plain 0:kv.mla_attention",
    "MLA, 16 heads": "mla bf16, 16 heads, plain 0:kv.mla_attention",
    "MLA, 16 heads, by tiles": "mla bf16, 16 heads, tile 0:kv.mla_attention",
    "MLA, chunk": "mla chunk, 128 heads 0:kv.mla_prefill_chunk",
    "projection": "projection bf16,  0:kv.project_append",
    "append": "append 0:kv.append",
    "rope and append": "rope_append {'interleaved': False} 0:kv.rope_append",
    "indexer": "index_scores 0:kv.index_scores",
    "gather": "gather 0:kv.gather",
    "a user's kernel": "kernel negate",
    "a user's tiles of rows": "kernel first_rows",
}


def passes() -> list[str]:
    """The optional passes that transform code, in their order."""
    steps = [s for target in (TARGET, "host") for s in pipeline.default_steps(target, OWNERSHIP, 1)]
    return list(dict.fromkeys(s.name for s in steps if s.optional and s.purpose == "transform"))


def makers() -> dict[str, Make]:
    """The functions that make the programs of ``bench.identity``, by name."""
    return {name: make for name, _, make in programs()}


def ptx_of(make: Make, without: Sequence[str] = ()) -> str:
    """A program's PTX, as ``bench.identity`` compares it, compiled without some passes."""
    with kv.pipeline(disable=without):
        what = make(TARGET)
        if isinstance(what, Specialisation):
            artifact = dispatch.compile_operation(what).artifact
        else:
            artifact = kv.compile(*what, target=TARGET).artifact
    return identity.plain(str(artifact.code["ptx"]), "", on_host=False)


def instructions(ptx: str) -> int:
    """The number of instructions in PTX."""
    return sum(line.endswith(";") and not line.startswith(".") for line in ptx.splitlines())


def compared(only: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Per program: its instructions, and by pass that changes it the instructions without the pass."""
    made = makers()
    for title, name in PROGRAMS.items():
        if re.search(only, title):
            whole, without = ptx_of(made[name]), {}
            for left_out in passes():
                found = ptx_of(made[name], (left_out,))
                if found != whole:
                    without[left_out] = instructions(found)
            yield title, {"program": name, "instructions": instructions(whole), "without": without}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--only", default="", metavar="REGEX", help="only programs whose titles match")
    options = parser.parse_args(argv)
    os.environ.update(KVARN_ALWAYS_COMPILE="1", KVARN_CACHE_SIZE="0")
    found: dict[str, Any] = {}
    for title, record in compared(options.only):
        found[title] = record
        print(f"{title}: {record['instructions']} instructions; {record['without']}", flush=True)
    if options.write:
        before = json.loads(FILE.read_text(encoding="utf-8")) if options.only and FILE.is_file() else {}
        merged = {**before, **found}
        text = json.dumps({title: merged[title] for title in PROGRAMS if title in merged}, indent=1)
        FILE.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
