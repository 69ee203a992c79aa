# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The process of ``kvarn.tools.semantics.ReferenceLowering``: reads lines with IR and a target, answers with bundles.

It lowers by the default pipeline without kvarn's optional passes. Upstream passes stay, since they are not under test.
Trace marks of a traced pipeline are dropped.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# MLIR is imported on demand: this process may be a fork of one without it.


def lower(text: str, target: str, after: str | None) -> bytes:
    """The bundle of IR after the pass ``after``, or at any stage."""
    from kvarn.artifact import bundle
    from kvarn.compilation import driver as compiler
    from kvarn.lowering import pipeline
    from kvarn.lowering.target import by_name
    from kvarn.tools.stages import TRACE, Stages

    stages = Stages(target)
    ours = {s.name for s in pipeline.default_steps(target, trace=TRACE) if s.optional and not s.upstream}
    settings = pipeline.Settings(
        disable=frozenset(ours),
        options={"lower-kv-trace": "marks=0"},
        check=False,
        trace=TRACE,
        start_after=stages.without_checks(after),
    )
    steps = pipeline.steps(target, settings)
    context = compiler.context()
    with compiler.diagnosed(context):
        module = compiler.parse(text)
        return bundle.dumps([compiler.lower(module, by_name(target), steps)])


def load(needed: Sequence[str], path: Sequence[str]) -> str:
    """Load extensions, which are also searched in the folders of ``path``; returns an error message, or ""."""
    from kvarn.compilation import extensions

    sys.path += [folder for folder in path if folder not in sys.path]
    try:
        for extension in needed:
            extensions.extend(extension)
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def main(needed: Sequence[str] | None = None, path: Sequence[str] = ()) -> None:
    """Serve requests until stdin ends; ``needed`` are the extensions to load, or come with the first request."""
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    problem = load(needed, path) if needed is not None else None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if problem is None:
                problem = load(asked["needed"], asked["path"])
            if problem:
                raise RuntimeError(problem)
            answer = {"bundle": base64.b64encode(lower(asked["text"], asked["target"], asked["after"])).decode()}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
