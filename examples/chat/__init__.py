# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""SmolLM2-135M-Instruct through the paged cache: what `kvarn demo` runs. An installation has this folder as kvarn.chat.

weights.py and tokenizer.py read the GGUF file, model.py is the transformer, arrays.py says where it computes,
plain_cache.py and paged_cache.py hold its keys and values, scheduler.py batches the requests, check.py compares the two
caches, cli.py puts them together and prints.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with the arguments that follow the program's name (`sys.argv`'s when left out).

    Returns the exit status: 0, 1 when it could not run or `--check` did not agree, 2 for wrong arguments.
    """
    missing = [name for name in ("gguf", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"kvarn demo: {' and '.join(missing)} must be installed: pip install 'kvarn[demo]'", file=sys.stderr)
        return 1
    from .cli import main as run

    return run(sys.argv[1:] if argv is None else argv)
