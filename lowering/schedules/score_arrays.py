# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How a score function reads its arrays, determined from the function alone before a schedule is chosen.

The function is traced once for a tile of two by two. An array that is read by query and key at once gives a tile, which
may become a table (``tabulate-kv-scores``); one that is read by only one of them, or by the head, gives a vector.
"""

from __future__ import annotations

import functools
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, i32, u32
from kvarn.dsl import functions
from kvarn.errors import KernelError
from kvarn.lowering.kernels.attention.softmax import arrays_read
from kvarn.lowering.rewrite import ops_named
from kvarn.lowering.tiles.ir import rank

EXTENT = 2


@functools.lru_cache(maxsize=256)
def _reads_pairs(function: Any, elements: tuple[tuple[DType, int], ...]) -> bool:
    @kv.kernel(block=(32, 1, 1))
    def scores(b: kv.i32, h: kv.i32, q: kv.i32, array0=None, array1=None, array2=None, array3=None):
        numbers = kv.tile_index(EXTENT)
        at = (h + numbers)[:, None], (q + numbers)[:, None], numbers[None, :]
        function(kv.full((EXTENT, EXTENT), 0.0), b, *at, *arrays_read(array0, array1, array2, array3))

    arrays = [kv.Buffer[i32 if dtype is u32 else dtype, dimensions] for dtype, dimensions in elements]
    try:
        module = scores.trace([kv.i32, kv.i32, kv.i32, *arrays])
    except (KernelError, TypeError, ValueError, IndexError, AttributeError):
        return True  # errors are reported when the call's kernel is traced
    return any(rank(op.results[0]) == 2 for op in ops_named(module, "kv.tile_gather"))


def reads_pairs(name: str) -> bool:
    """Whether a score function, given by name, may read an array by query and key at once."""
    known = functions.known(name)
    if known is None or len(known.elements) != known.arrays:
        return True
    return known.arrays > 0 and _reads_pairs(known.function, known.elements)
