# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Passes from users' files: ``kv-opt --load-pass=FILE.py``, ``kvarn compile --load-pass FILE.py``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvarn import files
from kvarn.dialect import installed
from kvarn.lowering import registry

from .pass_base import Pass, as_pass
from .pipeline_parser import PipelineError, Step

_MODULE = "kvarn_user_pass_"  # prefix of the module name of a file, before its stem


def load_passes(path: str | Path) -> list[Pass]:
    """Register the passes of a Python file: every function decorated with ``kv_pass``, and the file's own.

    A file's own pass is ``run``, or the function with the name of the file. Its name is the file's stem with ``-`` for
    ``_``; other passes have the names of their functions. A file that is loaded again replaces its old passes, and
    replaces an installed package's pass of the same name with a warning. Raises :class:`PipelineError`.
    """
    path = Path(path)
    loaded = import_file(path, "--load-pass", _MODULE)
    functions, stem = passes_in(loaded), path.stem.replace("-", "_")
    own = next((f for f in (getattr(loaded, name, None) for name in ("run", stem)) if callable(f)), None)
    if own is not None and own not in functions:
        functions.append(own)
    if not functions:
        raise PipelineError(
            f"--load-pass: {path} must define run(module), {stem}(module), or functions decorated with kv_pass"
        )
    try:
        return [
            registry.register(as_pass(f, path.stem.replace("_", "-") if f is own else ""), in_place=True)
            for f in functions
        ]
    except (ValueError, TypeError) as error:
        raise PipelineError(f"--load-pass: {path}: {error}") from None


def passes_in(loaded: Any) -> list[Any]:
    """The functions of a module that are decorated with ``kv_pass``."""
    return [
        f for f in vars(loaded).values() if hasattr(f, "kv_pass") and getattr(f, "__module__", "") == loaded.__name__
    ]


def flags(steps: Iterable[Step]) -> str:
    """The command-line flags that load what a pipeline needs: `` --extend=... --load-pass=FILE.py``, or nothing."""
    functions = [step.kv.function for step in steps if step.kv is not None]
    files = [f.__code__.co_filename for f in functions if getattr(f, "__module__", "").startswith(_MODULE)]
    return "".join(f" --extend={what}" for what in installed.given) + "".join(
        f" --load-pass={file}" for file in dict.fromkeys(files)
    )


def import_file(path: Path, option: str, prefix: str) -> Any:
    """The module of a file, run now, named by a prefix and its stem; PipelineError with ``option`` in front."""
    stem = path.stem.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z]\w*", stem):
        raise PipelineError(f"{option}: a file's stem must be a name such as count_loads, got {path.stem!r}")
    try:
        return files.run_file(path, prefix + stem)
    except files.FileError as error:
        raise PipelineError(f"{option}: {error}") from error.__cause__
