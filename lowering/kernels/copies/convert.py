# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.convert: copy the cached tokens of a cache to another, of any kind and layout.

Blocks of a sequence loop over its tokens. Stored values are copied without conversion if the element types are equal
and neither cache is quantized; otherwise they pass through f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.layout import CacheSpec
from kvarn.lowering.index import Ix

from .. import expands
from ..append.quantize import Quantizer
from ..base import Expansion
from ..common import CachedHead, Work, as_vector, converted, head_and_lane, in_range, single, vector_width, whole_warps

TOKENS = 64  # the most per block


@kv.func
def stored(cache: Any, b: Any, h: Any, t: Any, d: Any, width: int) -> Any:
    """Stored values without conversion, always as a vector."""
    if cache.quantization_enabled:
        x = cache.load_quantized(b, h, t, d, width=width)
    else:
        x = cache.load(b, h, t, d, width=width)
    return as_vector(x)


@dataclass(frozen=True)
class StoredHead(CachedHead):
    """One head of a cached token, with access to stored values."""

    @kv.func
    def stored(self, d: Any, n: int) -> Any:
        """n stored values."""
        return stored(self.cache, self.b, self.head, self.position, d, n)

    @kv.func
    def put(self, d: Any, x: Any) -> None:
        """Store values of the storage type."""
        self.cache.store(self.b, self.head, self.position, d, single(x))


@kv.func
def exists(cache: Any, b: Any, t: Any) -> Any:
    """Whether a token has a slot: the table names a page of the pool, or the region is long enough."""
    page = cache.raw_page(b, t)
    return in_range(cache, t) & (page >= 0) & (page < cache.field("num_blocks"))


def convert_kernel(source_spec: CacheSpec, spec: CacheSpec, work: Work, width: int, quantizer: Quantizer | None) -> Any:
    """``spec`` is the destination's, and ``quantizer`` is given if it has scales."""
    per_head = spec.head_size // width if quantizer is None else quantizer.threads
    exact = source_spec.dtype is spec.dtype and not source_spec.quantized

    @kv.kernel
    def convert(source, destination, blocks: kv.i32):
        slot, first = work.place()
        b = kv.block_id.x // blocks
        start = slot - kv.block_id.x * work.tokens + kv.block_id.x % blocks * work.tokens
        if first < work.items:
            for t in range(start, source.cache_length(b), blocks * work.tokens):
                if exists(source, b, t) & exists(destination, b, t):
                    for item in range(first, work.items, work.step):
                        h, part, active = head_and_lane(item, spec.num_heads, per_head)
                        head = StoredHead(source, b, t, h)
                        if quantizer is not None:
                            held = quantizer.read(head.read, part)
                            quantizer.write(destination, b, h, t, part, active, held, head.read)
                        else:
                            d = part * width
                            x = head.stored(d, width) if exact else head.read(d, width)
                            StoredHead(destination, b, t, h).put(d, converted(x, spec.dtype))

    return convert


@expands("kv.convert")
def convert(op: Any, at: Expansion) -> None:
    source, destination = at.spec(op.source), at.spec(op.destination)
    scaled = [s for s in (source, destination) if s.quantized]
    size = destination.head_size
    width = vector_width(size, *(s.granularity for s in scaled), types=(source.dtype, destination.dtype))
    quantizer = Quantizer.of(destination, width, at) if destination.quantized else None
    heads = destination.num_heads
    items = heads * (size // width) if quantizer is None else whole_warps(at, heads * quantizer.threads)
    work = Work.of(at, items)
    longest, batch = at.field(op.source, "max_cache_length"), at.field(op.source, "batch")
    blocks: Ix = (longest + (TOKENS - 1)) // TOKENS
    kernel = convert_kernel(source, destination, work, width, quantizer)
    at.launch(kernel, [op.source, op.destination, blocks], (batch * blocks, 1, 1), (work.threads, 1, 1))
