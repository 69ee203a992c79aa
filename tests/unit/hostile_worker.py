# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Run in a process of its own by test_bounds.py: operations on the host over tables that hold anything.

Takes a family and how many draws; prints what it is at, so that the parent knows which draw ended the process.
"""

import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reference import hostile
from reference.places import Unchecked

if __name__ == "__main__":
    faulthandler.enable()
    family, draws = sys.argv[1], int(sys.argv[2])
    with Unchecked().active():
        for kind in hostile.KINDS[:1] if family in hostile.OF_ONE_KIND else hostile.KINDS:
            for seed in range(draws):
                print(kind, seed, flush=True)
                hostile.run(family, kind, seed)
    print("done")
