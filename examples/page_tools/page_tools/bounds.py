# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kv.page_bounds``: minimum and maximum of each page's keys, by which sparse attention selects pages (tier 1)."""

from types import SimpleNamespace
from typing import Any

import kvarn as kv
from kvarn.dialect import verify
from kvarn.dialect.base import Kv
from kvarn.dialect.effects import ReadsCache, TierOne, WritesMemory
from kvarn.dialect.ext import I32, Operand
from kvarn.dialect.types import CollectionType
from kvarn.dispatch import Operation
from kvarn.lowering.kernels import expands
from kvarn.lowering.kernels.base import Expansion
from kvarn.ops import checks

from .prefetch import prefetch_page


class PageBoundsOp(Kv.Operation, name="page_bounds", traits=[TierOne, ReadsCache, WritesMemory]):
    """least, largest [B, pages, H, D]: elementwise minimum and maximum of the cached keys of each page, in f32.

    Pages without cached tokens leave the buffers unchanged.
    """

    collection: Operand[CollectionType]
    layer: Operand[I32]
    least: Operand[Any]
    largest: Operand[Any]

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.collection, ("collection",))
        if spec is None or not (spec.paged or verify.fail(self, f"needs pages, got a {spec.kind} cache")):
            return False
        return all(
            verify.memref(self, value, 4, ("f32",), name)
            and verify.static_dim(self, value, 2, spec.num_heads, name)
            and verify.static_dim(self, value, 3, spec.head_size, name)
            for value, name in ((self.least, "least"), (self.largest, "largest"))
        )


# --- the kernel ------------------------------------------------------------------------------------


@kv.kernel
def page_bounds_kernel(pool, layer: kv.i32, least, largest):
    """One block per page, one thread per dimension of every head."""
    keys = pool.get_key_cache(layer)
    b, page, d = kv.block_id.y, kv.block_id.x, kv.thread_id.x
    first, tokens = page * keys.page_size, keys.cache_length(b)
    if first < tokens:
        prefetch_page(keys, b, first, d)
        for h in range(keys.num_heads):
            low = keys.load(b, h, first, d, dtype=kv.f32)
            high = low
            for t in range(first + 1, min(first + keys.page_size, tokens)):
                x = keys.load(b, h, t, d, dtype=kv.f32)
                low, high = min(low, x), max(high, x)
            least[b, page, h, d], largest[b, page, h, d] = low, high


@expands("kv.page_bounds")
def expand_page_bounds(op: Any, at: Expansion) -> None:
    args = [op.collection, op.layer, op.least, op.largest]
    grid = (at.dim(op.least, 1), at.dim(op.least, 0), 1)
    at.launch(page_bounds_kernel, args, grid, (at.spec(op.collection).head_size, 1, 1))


# --- the call --------------------------------------------------------------------------------------


def _check(seen: SimpleNamespace) -> None:
    spec, title = checks.spec_of(seen), "page_bounds"
    shape = (seen.collection.batch_size, "pages", spec.num_heads, spec.head_size)
    for name in ("least", "largest"):
        view = getattr(seen, name)
        checks.has_dtype(view, ("f32",), f"{title}: {name}")
        checks.has_shape(view, shape, f"{title}: {name}")


# data buffers, with the first dimension whose extent specialises the code
_PAGE_BOUNDS = Operation("kv.page_bounds", {"least": 2, "largest": 2}, _check, written=("least", "largest"))


def page_bounds(collection: Any, layer: int, least: Any, largest: Any, *, stream: Any = None) -> None:
    """Write the elementwise minimum and maximum of each page's keys.

    Parameters
    ----------
    collection : KV cache collection
    layer : int
    least, largest : f32 array-like [B, pages, H, D]
        Outputs; unchanged for pages without cached tokens.
    stream
        As in the functions of ``kv.ops``.
    """
    layer = checks.layer_of(collection, layer, "page_bounds")
    _PAGE_BOUNDS((collection, layer, least, largest), stream=stream)
