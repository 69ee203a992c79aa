# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The process behind ``kvarn.tools.semantics.Rest``: a line of JSON in, IR and a target; a line out, a bundle.

It lowers by the default pipeline without our optional passes. Upstream's stay: they are not in question.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Sequence

from kvarn import bundle, compiler, extensions
from kvarn.lowering import pipeline
from kvarn.lowering.target import by_name


def lower(text: str, target: str, after: str | None) -> bytes:
    """The bundle of IR, as the pass ``after`` left it, or at any stage."""
    ours = {s.name for s in pipeline.default_steps(target) if s.optional and not s.upstream}
    settings = pipeline.Settings(disable=frozenset(ours), check=False, start_after=after)
    steps = pipeline.steps(target, settings)
    context = compiler.context()
    with compiler.diagnosed(context):
        module = compiler.parse(text)
        return bundle.dumps([compiler.lower(module, by_name(target), steps)])


def main(needed: Sequence[str] = (), path: Sequence[str] = ()) -> None:
    """Answer until stdin ends; ``needed`` are the extensions, which are found under the folders of ``path`` too."""
    sys.path += [folder for folder in path if folder not in sys.path]
    # Whatever a library prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    problem = ""
    try:
        for extension in needed:
            extensions.extend(extension)
    except Exception as error:
        problem = str(error) or type(error).__name__
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if problem:
                raise RuntimeError(problem)
            answer = {"bundle": base64.b64encode(lower(asked["text"], asked["target"], asked["after"])).decode()}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
