# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Solutions of FlashInfer-Bench by kvarn: python -m bench.solutions DATASET

Reads ``DATASET/definitions/**/*.json`` of the FlashInfer-Bench data set, and writes a solution of each that kvarn's
attention covers to ``DATASET/solutions/kvarn/OP_TYPE/DEFINITION/``, where ``flashinfer-bench run`` finds it; those that
it does not cover are named. A solution needs kvarn installed beside flashinfer-bench.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kvarn

SOURCE = Path(__file__).with_name("flashinfer_solution.py")
# The beginning of a definition's name, the function that solves it, and the type of its tensors.
FAMILIES = {
    "gqa_paged_decode_": "paged",
    "gqa_paged_prefill_causal_": "paged",
    "gqa_ragged_prefill_causal_": "ragged",
    "mla_paged_decode_": "latent",
    "mla_paged_prefill_causal_": "latent",
}
INPUTS = {
    "paged": {"q", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "sm_scale"},
    "ragged": {"q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale"},
    "latent": {
        "q_nope", "q_pe", "ckv_cache", "kpe_cache", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len",
        "sm_scale",
    },
}  # fmt: skip


def not_covered(definition: Mapping[str, Any]) -> str:
    """Why kvarn has no solution of a definition; empty if it has one."""
    function = next((f for name, f in FAMILIES.items() if definition["name"].startswith(name)), None)
    if function is None:
        return f"no operation of kvarn is an {definition.get('op_type', 'operation')} of this kind"
    if unknown := sorted(set(definition["inputs"]) - INPUTS[function]):
        return f"inputs {', '.join(unknown)}"
    wide = {name: x["dtype"] for name, x in definition["inputs"].items() if name.startswith(("q", "k", "v", "c"))}
    if wrong := sorted({f"{n} of {t}" for n, t in wide.items() if t not in ("bfloat16", "float16", "int32")}):
        return f"inputs {', '.join(wrong)}"
    if list(definition["outputs"]) != ["output", "lse"]:
        return f"outputs {', '.join(definition['outputs'])}"
    return ""


def solution(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The solution of a definition, as JSON."""
    name, inputs = definition["name"], list(definition["inputs"])
    function = next(f for start, f in FAMILIES.items() if name.startswith(start))
    given = ", ".join(f"{x}={x}" for x in inputs)
    main = (
        f"from kvarn_attention import {function}\n\n\ndef run({', '.join(inputs)}):\n    return {function}({given})\n"
    )
    return {
        "name": f"kvarn_{name}",
        "definition": name,
        "author": "kvarn",
        "description": f"kv.ops of kvarn {kvarn.__version__}, an MLIR dialect lowered to PTX in the process.",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda"],
            "entry_point": "main.py::run",
            "dependencies": [f"kvarn>={kvarn.__version__}"],
            "destination_passing_style": False,
        },
        "sources": [
            {"path": "main.py", "content": main},
            {"path": "kvarn_attention.py", "content": SOURCE.read_text()},
        ],
    }


def write(dataset: Path) -> tuple[list[Path], dict[str, str]]:
    """Write the solutions of a data set; returns their files, and why the other definitions have none."""
    written, without = [], {}
    for file in sorted((dataset / "definitions").rglob("*.json")):
        definition = json.loads(file.read_text())
        name = definition["name"]
        if reason := not_covered(definition):
            without[name] = reason
            continue
        folder = dataset / "solutions" / "kvarn" / definition["op_type"] / name
        folder.mkdir(parents=True, exist_ok=True)
        written.append(folder / f"kvarn_{name}.json")
        written[-1].write_text(json.dumps(solution(definition), indent=2) + "\n")
    return written, without


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="the folder of a FlashInfer-Bench data set, with definitions/ in it")
    dataset = parser.parse_args(argv).dataset
    if not (dataset / "definitions").is_dir():
        parser.error(f"{dataset} has no folder definitions")
    written, without = write(dataset)
    for name, reason in without.items():
        print(f"not covered: {name}: {reason}")
    print(f"{len(written)} solutions in {dataset / 'solutions' / 'kvarn'}, {len(without)} definitions without one")
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
