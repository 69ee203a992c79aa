# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A kernel that reads the keys and values of an attention, launched before it where page ownership is checked.

Attention reads keys and values through addresses and descriptors, which ``check-kv-ownership`` does not see. This
kernel loads one element per token and head that some query may attend to; the pass adds checks to the loads, which are
then dead and removed.
"""

from __future__ import annotations

from typing import Any

from kvarn import dsl as kv
from kvarn.dialect import verify
from kvarn.dialect.contents import Lengths, new_tokens

from ..base import Expansion
from ..tables.indices import threads_of
from .case import Masking
from .chosen_pages import chosen_pages

BY_ADDRESS = ("kv.attention", "kv.attention_padded", "kv.operand_attention", "kv.mla_attention")
READS_OF = "kv.reads_of"  # attribute of a kernel: the operation whose reads it repeats


def reads_kernel(kind: str, are_offsets: bool, mask: Masking, is_mla: bool, null_page: bool) -> Any:
    """The kernel for a collection's layer or an operand, with one block per sequence and head.

    ``null_page``: skip the null page, which may stand for pages that a mask hides. With lists of pages, only their
    pages are read.
    """

    @kv.kernel
    def reads(handle, layer: kv.i32, new, pages, page_counts):
        b, h = kv.block_id.x, kv.block_id.y
        if b < new.shape[0] - (1 if are_offsets else 0):
            count = new[b + 1] - new[b] if are_offsets else new[b]
            if (count > 0) & (b < handle.batch_size()):
                length = handle.cache_length(b)
                first = mask.first(length)
                caches = [handle]
                if kind == "collection":
                    caches = [handle.get_key_cache(layer)] + ([] if is_mla else [handle.get_value_cache(layer)])
                listed = chosen_pages(handle, pages, page_counts)
                if listed is None:
                    for t in range(first + kv.thread_id.x, length + count, kv.block_dim.x):
                        read(handle, caches, b, h, t)
                else:
                    entries = listed.count(b, h)
                    for i in range(kv.thread_id.x, entries * handle.page_size, kv.block_dim.x):
                        start = listed.first_token(b, h, i // handle.page_size, entries)
                        t = start + i % handle.page_size
                        if (t >= first) & (t < length + count):
                            read(handle, caches, b, h, t)

    @kv.func
    def read(handle, caches, b, h, t):
        if not null_page or caches[0].raw_page(b, t) != handle.field("num_blocks") - 1:
            for n in kv.static(range(len(caches))):
                if kind == "collection":
                    caches[n].load(b, h, t, 0)
                else:
                    caches[n].load(b, t, h, 0)

    return reads


def launch_reads(op: Any, at: Expansion) -> None:
    """Launch the reads for each cache of an operation whose kernels read through addresses."""
    name = op.operation.name
    if name not in BY_ADDRESS or getattr(op, "indices", None) is not None:
        return  # the sequence and token of a pool row are not known
    lists = [getattr(op, n, None) for n in ("pages", "page_counts")]
    for rule in type(op).contents:
        if not isinstance(rule, Lengths):
            continue
        handle = getattr(op, rule.handle)
        spec = at.spec(handle)
        given = new_tokens(rule, {n: 0 for n in rule.new if getattr(op, n) is not None})
        if not spec.of_cache or given is None:
            continue
        kind = "collection" if hasattr(op, "collection") else "operand"
        layer = op.layer if kind == "collection" else at.constant(0)
        mask = Masking(verify.string(op.mask) or "", verify.integer(op.span) or 0)
        new = getattr(op, given)
        is_padded = given.endswith("lengths")
        threads = threads_of(at)
        kernel = reads_kernel(kind, not is_padded, mask, spec.is_mla, mask.evaluated and spec.paged)
        at.launch(
            kernel,
            [handle, layer, new, *lists],
            (at.field(handle, "batch"), spec.num_heads, 1),
            (threads, 1, 1),
            key=(kernel.name, kind, mask),
            attributes={READS_OF: {"operation": name}},
        )
