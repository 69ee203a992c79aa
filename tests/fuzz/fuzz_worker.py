# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Run in a process of its own by test_fuzz.py: feed broken IR to kv-opt's driver and report what comes of each text.

Reads a JSON object ``{"texts": [...], "pipeline": "..."}`` from stdin. Writes ``start N`` before each text and
``done N <outcome>`` after it, so that the parent knows which text ended the process. Outcomes: ``ok``,
``refused`` (with a diagnostic), ``silent`` (refused without one), ``raised <exception>``.
"""

import io
import json
import sys


def main() -> None:
    from mlir import ir

    from kvarn.dialect import kv
    from kvarn.lowering import pipeline_parser
    from kvarn.tools.opt_diagnostics import Source
    from kvarn.tools.opt_run import Driver, Settings

    job = json.load(sys.stdin)
    context = kv.make_context()
    with context, ir.Location.unknown():
        steps = pipeline_parser.parse(job["pipeline"])
    for number, text in enumerate(job["texts"]):
        print("start", number, flush=True)
        err = io.StringIO()
        driver = Driver(Settings(), err, context)
        driver.steps = steps
        try:
            outcome = driver.process(Source("fuzz.mlir", text.encode("utf-8", "surrogatepass")))
        except Exception as error:
            print("done", number, "raised", f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
            continue
        state = "ok" if outcome.ok else "refused" if ": error: " in err.getvalue() else "silent"
        # A pass that raises is caught by the driver, but it is a defect all the same.
        if "raised " in err.getvalue() and "error: pass '" in err.getvalue():
            state = "raised " + err.getvalue().partition("error: pass '")[2].partition("\n")[0]
        print("done", number, state, flush=True)


if __name__ == "__main__":
    main()
