# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Broken IR gives a diagnostic, each time: never a dead process, an exception or a silent failure.

Texts are made by mutating the IR of the lit tests. Many go to one subprocess, so that a crash is seen and named, and
costs little. The seeds are fixed: a run that fails fails again. `make fuzz` runs more of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import smaller
from fuzz.texts import UPSTREAM, invalid, kernels, mutants, valid
from reference.edges import ALL

WORKER = Path(__file__).parents[1] / "fuzz" / "fuzz_worker.py"


def feed(texts: list[str], pipeline: str) -> list[str]:
    """Outcomes, one a text; the last is ``died`` when the process ended."""
    job = json.dumps({"texts": texts, "pipeline": pipeline})
    environment = os.environ | {"PYTHONFAULTHANDLER": "0"}
    ran = subprocess.run(
        [sys.executable, str(WORKER)],
        input=job,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    outcomes = [line.split(" ", 2)[2] for line in ran.stdout.splitlines() if line.startswith("done ")]
    if ran.returncode != 0:
        outcomes.append(f"died with {ran.returncode}: {ran.stderr[-2000:]}")
    return outcomes


LOWERING = (
    "verify-kv,lower-kv-tiles,expand-kv-tma,hoist-kv-lookups,vectorize-kv-lookups,plan-kv-access,lower-kv-access,"
    "lower-kv-tma,lower-kv-casts,lower-kv-buffers,allocate-kv-shared,flatten-kv-types"
)
CASES = {"valid": (valid, UPSTREAM), "invalid": (invalid, UPSTREAM), "kernels": (kernels, LOWERING)}


@pytest.mark.parametrize("case", CASES)
def test_broken_ir_is_refused_with_a_diagnostic(case: str) -> None:
    seeds, pipeline = CASES[case]
    texts = list(mutants(seed=sum(map(ord, case)), count=600 if ALL else 300, seeds=seeds()))
    outcomes = feed(texts, pipeline)
    bad = [(o, t) for o, t in zip(outcomes, texts, strict=False) if o not in ("ok", "refused")]
    assert not bad, f"{len(bad)} texts; the first: {bad[0][0]}\n{bad[0][1]}"
    assert len(outcomes) == len(texts)
    # Mutations that leave all texts whole, or break all of them, would test little.
    assert outcomes.count("refused") > 100
    assert outcomes.count("ok") > 0


def test_whole_ir_is_accepted() -> None:
    assert len(valid()) > 25
    assert set(feed(list(valid()), UPSTREAM)) == {"ok"}
    assert len(kernels()) > 12
    assert set(feed(list(kernels()), "verify-kv")) == {"ok"}


def test_a_dead_process_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "worker.py"
    dying.write_text("import os\nprint('start 0', flush=True)\nos.abort()\n")
    monkeypatch.setattr(sys.modules[__name__], "WORKER", dying)
    assert feed(["module {}"], "")[-1].startswith("died with -6")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\0",
        "\x00\x01\x02",
        "ML\xefR",
        "//",
        "module",
        "{-#",
        "!a = !a",
        "#a = #a",
        "}" * 2000,
        "(" * 2000,
        "module {" * 200,
        '"' * 3,
    ],
    ids=repr,
)
def test_odd_texts(text: str) -> None:
    assert feed([text], "verify-kv")[-1] in ("ok", "refused")


# --- a seed's IR made smaller ------------------------------------------------------------------------


class Defect:
    """A worker in which IR with a kv.load raises, or ends the process where it has no kernel."""

    made = 0

    def __init__(self, name: str) -> None:
        Defect.made += 1
        self.alive = True

    def ask(self, seed: int, text: str) -> str:
        if '"kv.load"' not in text:
            return "ok"
        self.alive = "gpu.func" in text
        return "raised in 'zork' raised KeyError: " + str(len(text)) if self.alive else "died with -6: " + text

    def stop(self) -> None:
        self.alive = False


def test_ir_of_a_seed_is_reduced_to_what_still_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(t for t in kernels() if '"kv.load"' in t and len(t.splitlines()) > 15)
    monkeypatch.setattr(smaller.texts, "text", lambda seed: (source, "", "", ""))
    found = smaller.reduced(1, Defect)
    assert '"kv.load"' in found
    assert len(found.splitlines()) < len(source.splitlines()) / 2
    monkeypatch.setattr(smaller.texts, "text", lambda seed: ('a\nb\n"kv.load"\nc\n', "", "", ""))
    Defect.made = 0
    assert smaller.reduced(1, Defect) == '"kv.load"\n'
    assert Defect.made > 1, "another worker takes the place of one that died"
    monkeypatch.setattr(smaller.texts, "text", lambda seed: ("a", "", "", ""))
    with pytest.raises(ValueError, match="nothing to reduce: the IR of seed 1 is ok"):
        smaller.reduced(1, Defect)
