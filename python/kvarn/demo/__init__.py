# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""SmolLM2-135M-Instruct through the paged cache: what `kvarn demo` and `python -m kvarn.demo` run.

weights.py and tokenizer.py read the GGUF file, model.py is the transformer, plain_cache.py and paged_cache.py hold its
keys and values, scheduler.py batches the requests, display.py prints, check.py compares the two caches, cli.py puts
them together.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the program's name; ``sys.argv[1:]`` when left out.

    Returns
    -------
    int
        0 when it ran (and, with ``--check``, agreed), 1 when it could not run or did not agree, 2 for bad arguments.
    """
    from .cli import main as run  # kept out of `import kvarn.demo`: it needs NumPy and reads the terminal

    return run(argv)
