# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the record of who owns a pool's pages lies in memory, for the checks in kernels and for those who keep it.

A *registry* names the *regions* that are watched: a pool's elements or its scales, a range of addresses cut into
granules of one head's row of one token. A region has, for each granule, the generation of its page when it was last
written; for each page its generation, which grows when the page is handed out, and how many use it; and the lookup
tables of steps, with what each entry must be at this moment. Violations are written down, the first few.
"""

from __future__ import annotations

from .layout import CacheSpec

# The variable of a kernel's module with the registry's address; 0: nothing is watched. MLIR's JIT finds what is
# prefixed so.
SYMBOL = "_mlir_kv_ownership"
ATTRIBUTE = "ownership"  # of an artifact's entry: its accesses, by number

# Words of 8 bytes. The registry: where violations are written, and the regions.
VIOLATIONS, REGIONS, REGISTRY_WORDS = 0, 1, 2
MOST_REGIONS, MOST_TABLES, MOST_VIOLATIONS = 64, 32, 256
# A region: its addresses, the generations that its granules were written in (i32), its pages (i32 generation and
# users), how many; its tables, how many.
LOW, HIGH, WRITTEN, PAGES, NUM_PAGES, TABLES, NUM_TABLES, REGION_WORDS = range(8)
# A lookup table: its addresses, and for each of its entries the page that it must name (i32).
TABLE_LOW, TABLE_HIGH, EXPECTED, TABLE_WORDS = range(4)

# Users of a page: how many sequences have it, CACHED added where its content is known by its tokens; of the null page,
# which is checked only where a table says whose it is, NOBODYS.
CACHED, NOBODYS = 1 << 30, -1
# What is expected of an entry that names no page: of a sequence that fills up a batch anything goes, where a sequence
# has no page and once it has ended no access does.
ANY_PAGE, NO_PAGE, RELEASED = -2, -3, -4

# A violation, in words: the access, what is wrong, where, and who was there.
(ACCESS, KIND, SEQUENCE, TOKEN, HEAD, PAGE, EXPECTED_PAGE, GENERATION, USERS, REGION, TABLE, VIOLATION_WORDS) = range(
    12
)

# Kinds of violations, those that explain others later.
UNWRITTEN, SHARED, FREE, FOREIGN, BEYOND, ENDED, OUTSIDE = range(1, 8)


def granule(spec: CacheSpec, of_scales: bool) -> int:
    """Bytes of one head's row of a token, in the pool or in its scales."""
    if not of_scales:
        return spec.head_size * spec.dtype.itemsize
    assert spec.scale_dtype is not None
    return spec.num_scales * spec.scale_dtype.itemsize
