# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""SmolLM2-135M-Instruct on a paged cache: the code of `kvarn demo`. An installation has this folder as kvarn.chat.

weights.py and tokenizer.py read the GGUF file, model.py is the transformer, arrays.py has the NumPy and torch backends,
plain_cache.py and paged_cache.py store keys and values, scheduler.py batches the requests, check.py compares the two
caches, and cli.py is the command line.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command-line arguments (default: `sys.argv`'s).

    Returns the exit status: 0; 1 if it could not run or `--check` failed; 2 for wrong arguments.
    """
    missing = [name for name in ("gguf", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"kvarn demo: {' and '.join(missing)} must be installed: pip install 'kvarn[demo]'", file=sys.stderr)
        return 1
    from .cli import main as run

    return run(sys.argv[1:] if argv is None else argv)
