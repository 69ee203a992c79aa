# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The worker of kv-opt's fuzzer: mutated IR of every stage through kv-opt's driver, without the process around it."""

from __future__ import annotations

import base64
import io
from collections.abc import Generator

from . import texts
from .loop import serve


def outcomes() -> Generator[str, str, None]:
    """Send a seed, get what came of its text: ``ok``, ``refused``, or ``silent`` and ``raised ...`` for defects.

    A text in base64 after the seed stands in the place of the seed's own.
    """
    from mlir import ir

    from kvarn.dialect import kv
    from kvarn.lowering import pipeline, pipeline_parser, target
    from kvarn.tools.opt_diagnostics import Source
    from kvarn.tools.opt_run import Driver, Settings

    context = kv.make_context()
    texts.stages()
    outcome = "ready"
    while True:
        seed, _, given = (yield outcome).partition(" ")
        source, wanted, emitted, name = texts.text(int(seed))
        source = base64.b64decode(given).decode("utf-8", "surrogatepass") if given else source
        chip = target.by_name(name)
        if emitted == "ptx" and chip.is_host:
            emitted = "llvm"
        err = io.StringIO()
        driver = Driver(Settings(emit=emitted, target=chip), err, context)
        with context, ir.Location.unknown():
            if wanted.startswith("after "):
                whole = pipeline.steps(chip)
                names = [step.name for step in whole]
                after = wanted.removeprefix("after ")
                rest = whole[names.index(after) + 1 if after in names else 0 :]
                driver.steps = [step for group in rest for step in pipeline_parser.parse(group.text)]
            else:
                driver.steps = pipeline_parser.parse("" if wanted == "none" else wanted)
        try:
            done = driver.process(Source("fuzz.mlir", source.encode("utf-8", "surrogatepass")))
        except Exception as error:
            outcome = f"raised {type(error).__name__}: {error}"
            continue
        said = err.getvalue()
        outcome = "ok" if done.ok else "refused" if ": error: " in said else "silent"
        if "raised " in said and "error: pass '" in said:  # caught by the driver, but a defect all the same
            outcome = "raised in " + said.partition("error: pass '")[2].partition("\n")[0]


if __name__ == "__main__":
    serve(outcomes())
