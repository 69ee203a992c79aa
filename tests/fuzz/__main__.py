# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``python -m fuzz [frontend|kv_opt] [--seconds N] [--seed N] [--show]``; the exit status is 1 when something died.

``python -m fuzz kv_opt --seed N --reduce`` prints the least IR that still does what the seed's did.
"""

from __future__ import annotations

import argparse
import sys

from . import kernels, loop, smaller, texts

WORKERS = ("frontend", "kv_opt")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Look for input that ends the process.")
    parser.add_argument(
        "worker", nargs="*", choices=[*WORKERS, []], default=WORKERS, help="which fuzzers; default: both"
    )
    parser.add_argument("--seconds", type=float, default=600, help="how long each runs")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, help="how many seeds at most")
    parser.add_argument("--show", action="store_true", help="print the text of the seed, and nothing else")
    parser.add_argument("--reduce", action="store_true", help="make the IR of kv_opt's seed smaller, and print it")
    options = parser.parse_args()
    if options.reduce:
        if options.worker != ["kv_opt"]:
            parser.error("--reduce takes the seeds of kv_opt: their texts are IR")
        print(smaller.reduced(options.seed), end="")
        return 0
    if options.show:
        print(kernels.program(options.seed) if "frontend" in options.worker else "\n".join(texts.text(options.seed)))
        return 0
    found = [bad for worker in options.worker for bad in loop.run(worker, options.seed, options.seconds, options.count)]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
