# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kv.prefetch_page``: prefetches a cache line of a token's page into the L2 cache, in kernels (tier 2)."""

from typing import Any

from mlir import ir
from mlir.dialects import nvvm

import kvarn as kv
from kvarn.dialect import ops, types, verify
from kvarn.dialect.base import Kv
from kvarn.dialect.effects import LooksUpPage, WritesMemory
from kvarn.dialect.ext import I32, Operand
from kvarn.dsl.values import i32_value
from kvarn.lowering.index import Ix, offset
from kvarn.lowering.passes.kv import lower_kv_access
from kvarn.lowering.target import by_name

LINE = 128  # bytes per prefetch instruction


# The op does not change memory; the write effect keeps upstream passes from dropping or merging it.
class PrefetchPageOp(Kv.Operation, name="prefetch_page", traits=[LooksUpPage, WritesMemory]):
    """Prefetch line ``line`` (128 bytes) of the page of a token; past the end of the page, its last line."""

    cache: Operand[Any]
    batch: Operand[I32]
    token: Operand[I32]
    line: Operand[I32]
    page: Operand[I32] | None = None

    def verify_invariants(self) -> bool:
        spec = verify.handle(self, self.cache)
        if spec is None:
            return False
        return spec.paged or verify.fail(self, f"needs a cache with pages, got a {spec.kind} one")


@kv.intrinsic
def prefetch_page(cache: Any, b: Any, t: Any, line: Any) -> None:
    """Prefetch a line of the page of token ``t`` of sequence ``b``, in a kernel."""
    PrefetchPageOp(cache.ir, i32_value(b), i32_value(t), i32_value(line))


@lower_kv_access.RULES.lowers(PrefetchPageOp)
def lower_prefetch_page(op: Any, options: lower_kv_access.Options) -> None:
    """Compute the page's address with the rule of ``kv.block_ptr``, and emit one instruction."""
    if by_name(options.target).is_host:
        return  # the host needs no hint
    spec = types.spec_of(op.cache.type)
    first = (Ix(op.token) // spec.page_size * spec.page_size).value
    start = ops.block_ptr(op.cache, op.batch, first, 0, 0, page=op.page)
    lines = -(-spec.page_span * spec.dtype.itemsize // LINE)
    at = Ix(op.line).least(lines - 1) * LINE
    address = offset(start, at, ir.IntegerType.get_signless(8))
    nvvm.prefetch(address, cache_level=nvvm.PrefetchCacheLevel.L2)
