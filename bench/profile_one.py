# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launch one row's kernels a few times, over different layers, for a profiler:

ncu --clock-control none --set full -k attention_decode -c 1 -s 3 python -m bench.profile_one b128_c2k_fp8
"""

from __future__ import annotations

import sys

from kvarn.measure.arrays import arrays

from .cases import RANGE, TABLE, select
from .kvarn_rows import call_of
from .problems import problem

LAUNCHES = 6


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m bench.profile_one ROW, one of {', '.join(row.name for row in (*TABLE, *RANGE))}")
    found = arrays("cuda")
    (row,) = select("=" + sys.argv[1], (*TABLE, *RANGE))
    data = problem(found, row, split=False)
    call = call_of(data)
    for i in range(LAUNCHES):
        call(i % data.layers)
    found.synchronize()


if __name__ == "__main__":
    main()
