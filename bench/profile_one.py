# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One decode case launched a few times, for a profiler:

    ncu --clock-control none --set full -k attention_decode -c 1 -s 3 python bench/profile_one.py 128x2k f8e4m3
"""

from __future__ import annotations

import sys

import torch

import kvarn as kv

from decode_sweep import Problem  # isort: skip


def main() -> None:
    problem = Problem(sys.argv[1], sys.argv[2])
    for i in range(6):
        kv.ops.attention(problem.collection, i % problem.layers, problem.query, problem.offsets, out=problem.out)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
