# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``python -m fuzz [WORKER ...] [--seconds N] [--seed N] [--show]``; the exit status is 1 when something died.

``frontend`` and ``kv_opt`` look for input that ends the process. ``answers`` runs random programs of attention on
``--place`` against the float64 model, and ``functions`` the same with numbers at the ends of i32 and f32.
``torch_inputs`` calls operations with odd tensors, and needs torch.
``python -m fuzz kv_opt --seed N --reduce`` prints the least IR that still does what the seed's did.
"""

from __future__ import annotations

import argparse
import sys

from . import answers, kernels, loop, smaller, texts

WORKERS = ("frontend", "kv_opt", "answers", "functions")
WITH_TORCH = "torch_inputs"  # not among the default ones


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Look for input that ends the process.")
    parser.add_argument(
        "worker",
        nargs="*",
        choices=[*WORKERS, WITH_TORCH, []],
        default=WORKERS,
        help="which fuzzers; default: all but torch_inputs",
    )
    parser.add_argument("--seconds", type=float, default=600, help="how long each runs")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, help="how many seeds at most")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes of each")
    parser.add_argument("--place", choices=answers.PLACES, default="host", help="where answers and functions run")
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
    commands = {"answers": f"answers {options.place}", "functions": f"answers {options.place} extreme"}
    found = []
    for worker in options.worker:
        found += loop.run(commands.get(worker) or worker, options.seed, options.seconds, options.count, options.jobs)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
