# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The memory layout of page ownership records, for the checks in kernels and for the host code that maintains them.

A *registry* lists the watched *regions*. A region is the address range of a pool's elements or scales, divided into
granules of one head's row of one token. It has, per granule, the generation of its page at the last write; per page,
the current generation, which is incremented when the page is handed out, and the number of users; and the lookup tables
of steps, with the page that each entry must name now. The first few violations are recorded.
"""

from __future__ import annotations

from .layout import CacheSpec

# Name of the module variable with the registry's address; 0 turns the checks off. MLIR's JIT looks for this prefix.
SYMBOL = "_mlir_kv_ownership"
ATTRIBUTE = "ownership"  # of an artifact's entry: its numbered accesses

# All fields are 8-byte words. The registry: where violations are written, and the regions.
VIOLATIONS, REGIONS, REGISTRY_WORDS = 0, 1, 2
MOST_REGIONS, MOST_TABLES, MOST_VIOLATIONS = 64, 32, 256
# A region: address range, generation at the last write per granule (i32), pages (i32 generation and users each), page
# count, tables, table count.
LOW, HIGH, WRITTEN, PAGES, NUM_PAGES, TABLES, NUM_TABLES, REGION_WORDS = range(8)
# A lookup table: its address range, and for each entry the page that it must name (i32).
TABLE_LOW, TABLE_HIGH, EXPECTED, TABLE_WORDS = range(4)

# Users of a page: the number of sequences that have it, plus CACHED when the prefix cache has it too. NOBODYS marks the
# null page, which is checked only where a table says whose page is expected.
CACHED, NOBODYS = 1 << 30, -1
# Expected values of entries without a page: ANY_PAGE for a padding sequence of a batch, which is not checked; NO_PAGE
# where a sequence has no page; RELEASED after a sequence has ended. An access through the last two is a violation.
ANY_PAGE, NO_PAGE, RELEASED = -2, -3, -4

# A violation, in words: the access, its kind, where it happened, and the page's expected and actual state.
(ACCESS, KIND, SEQUENCE, TOKEN, HEAD, PAGE, EXPECTED_PAGE, GENERATION, USERS, REGION, TABLE, VIOLATION_WORDS) = range(
    12
)

# Kinds of violations; where several apply, the highest one is reported, since it explains the others.
UNWRITTEN, SHARED, FREE, FOREIGN, BEYOND, ENDED, OUTSIDE = range(1, 8)


def granule(spec: CacheSpec, of_scales: bool) -> int:
    """Bytes of one head's row of a token, in the pool or in its scales."""
    if not of_scales:
        return spec.dtype.bytes_of(spec.head_size)
    assert spec.scale_dtype is not None
    return spec.num_scales * spec.scale_dtype.itemsize
