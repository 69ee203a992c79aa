# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Run in a process of its own by test_bounds.py: operations on the host over tables that hold anything.

Takes how many draws, and families by line; prints what it is at, so that the parent knows which draw ended the process,
and "done" at the end of a family.
"""

import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reference import hostile
from reference.places import Unchecked

if __name__ == "__main__":
    faulthandler.enable()
    place = Unchecked()
    with place.active():
        for line in sys.stdin:
            family = line.strip()
            for kind, seed, side in hostile.draws(family, int(sys.argv[1])):
                print(f"{kind}, seed {seed}, side {side}", flush=True)
                hostile.run(place, family, kind, seed, side)
            print("done", flush=True)
