# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Peers that can be imported, on the same rows: FlashInfer, torch, and vLLM's compiled kernels.

Every group is a function from a problem (K and V as separate contiguous tensors) to offers. It raises ``ImportError``
if its library is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from . import vllm_peers
from .cases import Row
from .kvarn_rows import Offer
from .problems import FARTHEST, problem
from .vllm_peers import BF16, FP8, FP8_QUERY, is_fp8, of_8_bits, once

FLASHMLA_PAGE = 64  # tokens: the only supported size
FLEX_PAGE = 128  # tokens: one tile of keys
Group = Callable[[Any], Iterator[Offer]]

# --- FlashInfer ----------------------------------------------------------------------------------


def flashinfer(p: Any) -> Iterator[Offer]:
    """FlashInfer's wrappers, NHD."""
    fi = importlib.import_module("flashinfer")
    workspace = once(
        "flashinfer", lambda: p.arrays.torch.zeros(512 << 20, dtype=p.arrays.torch.uint8, device=p.arrays.device)
    )
    yield from _FLASHINFER[p.row.kind](p, fi, workspace)


def _paged(p: Any) -> tuple[Any, ...]:
    """A plan's arguments for pages, heads and head sizes."""
    shape, pages = p.row.shape, p.cached.pages
    return pages.starts, pages.order, pages.last, shape.query_heads, shape.heads, shape.size, shape.page


def _fi_decode(p: Any, fi: Any, workspace: Any) -> Iterator[Offer]:
    shape, pages, (keys, values) = p.row.shape, p.cached.pages, p.cached.parts
    bf16 = p.arrays.dtype("bf16")

    def wrapper(tensor_cores: bool, backend: str) -> Callable[[int], Any]:
        w = fi.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores, backend=backend)
        left = shape.window - 1 if shape.window else -1
        w.plan(*_paged(p), q_data_type=bf16, kv_data_type=keys.dtype, o_data_type=bf16, window_left=left)
        return lambda layer: w.run(p.query, (keys[layer], values[layer]), out=p.out)

    tolerance = FP8 if is_fp8(p) else BF16
    yield Offer("FlashInfer fa2", lambda: wrapper(True, "fa2"), tolerance)
    if getattr(shape, "prefix", 0):
        yield Offer("FlashInfer cascade", lambda: _fi_cascade(p, fi, workspace), tolerance)
    if shape.query_heads == shape.heads:
        yield Offer("FlashInfer CUDA cores", lambda: wrapper(False, "auto"), tolerance)
    if shape.page < 16 or shape.window:
        return
    for layout in ("HND", "NHD"):  # the same bytes, interpreted in both layouts; HND has a reference of its own

        def xqa(layout: str = layout) -> Callable[[int], Any]:
            run = importlib.import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
            workspace.zero_()
            k, v = keys, values
            if layout == "HND":
                turned = (p.layers, -1, shape.heads, shape.page, shape.size)
                k, v = keys.view(turned), values.view(turned)
            return lambda layer: run(
                p.query,
                (k[layer], v[layer]),
                workspace,
                pages.device_table,
                p.device_lengths,
                p.longest,
                bmm1_scale=p.scale,
                bmm2_scale=1.0,
                kv_layout=layout,
                out=p.out,
            )

        error = (lambda: _error_in_hnd(p)) if layout == "HND" else None
        yield Offer(f"FlashInfer XQA {layout}", xqa, FP8_QUERY if is_fp8(p) else BF16, error)


def _fi_cascade(p: Any, fi: Any, workspace: Any) -> Callable[[int], Any]:
    """Cascade of two levels: the prefix, which all queries share, then the rest of each sequence."""
    shape, pages, (keys, values) = p.row.shape, p.cached.pages, p.cached.parts
    shared, counts = shape.prefix // shape.page, -(-p.lengths // shape.page)
    own = [row[shared:count] for row, count in zip(pages.table, counts, strict=True)]
    integers = p.arrays.integers
    w = fi.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    w.plan(
        [integers(np.array([0, shape.batch])), p.offsets],
        [integers(np.array([0, shared])), integers(np.concatenate([[0], np.cumsum(counts - shared)]))],
        [integers(pages.table[0, :shared]), integers(np.concatenate(own))],
        [integers(np.array([shape.page])), pages.last],
        shape.query_heads, shape.heads, shape.size, shape.page, causal=True, q_data_type=p.query.dtype,
        kv_data_type=keys.dtype,
    )  # fmt: skip

    def call(layer: int) -> None:
        p.out = w.run(p.query, (keys[layer], values[layer]))  # run() allocates the output

    return call


def _error_in_hnd(p: Any) -> float:
    """The error of a decode whose pages are read as [head, token, dim]."""
    shape, plain = p.row.shape, p.cached.rows

    def turned(b: int, length: int, half: int) -> Any:
        ids = p.arrays.index(p.cached.pages.table[b, : -(-length // shape.page)])
        found = p.cached.parts[half][0][ids].view(-1, shape.heads, shape.page, shape.size).transpose(1, 2)
        return found.float().reshape(-1, shape.heads, shape.size)[:length]

    p.cached.rows = turned
    try:
        return p.error()
    finally:
        p.cached.rows = plain


def _fi_append(p: Any, fi: Any, workspace: Any) -> Iterator[Offer]:
    pages, (keys, values), fp8 = p.cached.pages, p.cached.parts, p.arrays.dtype("f8e4m3")

    def plain() -> Callable[[int], Any]:
        def call(layer: int) -> None:
            k, v = p.key[layer], p.value[layer]
            if is_fp8(p):
                k, v = k.to(fp8), v.to(fp8)
            fi.append_paged_kv_cache(
                k, v, p.owner, p.at, (keys[layer], values[layer]), pages.order, pages.starts, p.last, "NHD"
            )

        return call

    def rotated() -> Callable[[int], Any]:
        torch = p.arrays.torch
        run = importlib.import_module("flashinfer.rope").rope_quantize_fp8_append_paged_kv_cache
        angles = torch.cat([p.cos, p.sin], -1)
        query = torch.empty(p.query.shape, dtype=fp8, device=p.arrays.device)
        nothing = torch.empty((*p.query.shape[:3], 0), dtype=fp8, device=p.arrays.device)

        def call(layer: int) -> None:
            run(
                p.query[layer],
                p.key[layer],
                None,
                None,
                p.value[layer],
                angles,
                p.at,
                (keys[layer], values[layer]),
                pages.order,
                pages.starts,
                p.owner,
                p.at,
                is_neox=True,
                quantize_dtype=fp8,
                page_size=p.row.shape.page,
                kv_layout="NHD",
                q_rope_out=query[layer],
                q_nope_out=nothing[layer],
            )

        return call

    if not p.rope:
        yield Offer("FlashInfer" + " + 2 casts" * is_fp8(p), plain, FP8)
    elif is_fp8(p):
        yield Offer("FlashInfer, fp8 query out", rotated, FP8, lambda: p.error(check_query=False))


def _fi_prefill(p: Any, fi: Any, workspace: Any) -> Iterator[Offer]:
    keys, values = p.cached.parts

    def wrapper(backend: str) -> Callable[[int], Any]:
        w = fi.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        w.plan(p.offsets, *_paged(p), causal=True, q_data_type=p.query.dtype, kv_data_type=keys.dtype)
        return lambda layer: w.run(p.query, (keys[layer], values[layer]), out=p.out)

    if not is_fp8(p):  # its kernels for Hopper take 8-bit keys with queries of 8 bits alone
        yield Offer("FlashInfer fa3", lambda: wrapper("fa3"), BF16)
    if p.row.kind == "mixed":
        yield Offer("FlashInfer fa2", lambda: wrapper("fa2"), FP8 if is_fp8(p) else BF16)
        yield Offer("FlashInfer BatchAttention", lambda: _fi_mixed(p, fi), FP8 if is_fp8(p) else BF16)


def _fi_mixed(p: Any, fi: Any) -> Callable[[int], Any]:
    """The persistent kernel for batches of decodes and prompts, planned once."""
    shape, pages, (keys, values) = p.row.shape, p.cached.pages, p.cached.parts
    attention = fi.BatchAttention("NHD", p.arrays.device)
    attention.plan(
        p.offsets, pages.starts, pages.order, p.device_lengths, shape.query_heads, shape.heads, shape.size, shape.size,
        shape.page, causal=True, sm_scale=p.scale, q_data_type=p.query.dtype, kv_data_type=keys.dtype,
    )  # fmt: skip
    return lambda layer: attention.run(p.query, (keys[layer], values[layer]), out=p.out, logits_soft_cap=0.0)


def _fi_mla(p: Any, fi: Any, workspace: Any) -> Iterator[Offer]:
    shape, pages, (cache,) = p.row.shape, p.cached.pages, p.cached.parts
    split = shape.value_size

    def wrapper() -> Callable[[int], Any]:
        w = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        w.plan(
            qo_indptr=p.offsets,
            kv_indptr=pages.starts,
            kv_indices=pages.order,
            kv_len_arr=p.device_lengths,
            num_heads=shape.query_heads,
            head_dim_ckv=split,
            head_dim_kpe=shape.size - split,
            page_size=shape.page,
            causal=False,
            sm_scale=p.scale,
            q_data_type=p.query.dtype,
            kv_data_type=cache.dtype,
        )
        rows = cache.view(p.layers, -1, shape.page, shape.size)
        return lambda layer: w.run(
            q_nope=p.query[..., :split],
            q_pe=p.query[..., split:],
            ckv_cache=rows[layer][..., :split],
            kpe_cache=rows[layer][..., split:],
            out=p.out,
        )

    yield Offer("FlashInfer fa3", wrapper, BF16)


def _fi_functions(p: Any, fi: Any, workspace: Any) -> Iterator[Offer]:
    """A custom mask over pages: one bit per (query, key), packed by the plan."""
    keys, values = p.cached.parts

    def make() -> Callable[[int], Any]:
        w = fi.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        w.plan(p.offsets, *_paged(p), custom_mask=_seen(p), q_data_type=p.query.dtype, kv_data_type=keys.dtype)
        return lambda layer: w.run(p.query, (keys[layer], values[layer]), out=p.out)

    yield Offer("FlashInfer, custom mask", make, BF16)


# --- FlashAttention-4 ------------------------------------------------------------------------------


def fa4(p: Any) -> Iterator[Offer]:
    """FlashAttention-4 in CuTe, whose kernels for Hopper read pages of any size by cp.async."""
    run = importlib.import_module("flash_attn.cute.interface").flash_attn_varlen_func
    (keys, values), found = p.cached.parts, {}
    most = 1 if p.row.kind == "decode" else p.newest

    def make(splits: int) -> Callable[[int], Any]:
        def call(layer: int) -> None:
            made = run(
                p.query, keys[layer], values[layer], cu_seqlens_q=p.offsets, max_seqlen_q=most, max_seqlen_k=p.longest,
                seqused_k=p.device_lengths, page_table=p.cached.pages.device_table, softmax_scale=p.scale, causal=True,
                num_splits=splits,
            )  # fmt: skip
            found["out"] = made[0] if isinstance(made, tuple) else made  # the function allocates its output

        return call

    def error() -> float:
        p.out = found["out"]
        return p.error()

    yield Offer("FA4", lambda: make(1), BF16, error)
    if p.row.kind == "decode":
        yield Offer("FA4, splits by itself", lambda: make(0), BF16, error)


# --- torch ---------------------------------------------------------------------------------------


def torch_(p: Any) -> Iterator[Offer]:
    """torch's index operations."""
    if p.row.kind == "gather":
        torch, (keys,) = p.arrays.torch, p.cached.parts
        ids = p.cached.pages.order.long()
        out = p.out.view(-1, *keys.shape[2:])
        yield Offer("torch index_select", lambda: lambda layer: torch.index_select(keys[layer], 0, ids, out=out), 0.5)
    else:
        shape = p.row.shape
        keys, values = (x.view(p.layers, -1, shape.heads, shape.size) for x in p.cached.parts)

        def call(layer: int) -> None:
            for cache, new in ((keys[layer], p.key[layer]), (values[layer], p.value[layer])):
                if is_fp8(p):
                    bits = p.arrays.torch.uint8
                    cache.view(bits).index_copy_(0, p.device_slots, new.to(cache.dtype).view(bits))
                else:
                    cache.index_copy_(0, p.device_slots, new)

        yield Offer("torch index_copy_", lambda: call, FP8)


def flex(p: Any) -> Iterator[Offer]:
    """torch's flex attention over physical pages of 128 tokens, the only size it supports."""
    if p.row.kind == "functions":
        yield from _flex_functions(p)
        return
    shape = p.row.shape
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    torch = p.arrays.torch
    again = problem(p.arrays, replace(p.row, shape=replace(shape, page=128)), True)
    pages, (keys, values) = again.cached.pages, again.cached.parts

    def prepare() -> Callable[[int], Any]:
        width = shape.context // 128
        ids = torch.zeros(shape.batch, 1, 1, pages.total, dtype=torch.int32, device=p.arrays.device)
        ids[:, 0, 0, :width] = pages.device_table
        none = torch.zeros(shape.batch, 1, 1, dtype=torch.int32, device=p.arrays.device)
        mask = attention.BlockMask.from_kv_blocks(
            none,
            ids,
            none + width,
            ids,
            BLOCK_SIZE=(128, 128),
            mask_mod=attention.noop_mask,
            seq_lengths=(1, pages.total * 128),
            compute_q_blocks=False,
        )
        run = torch.compile(attention.flex_attention, dynamic=False)
        flat = [
            x.view(again.layers, 1, -1, shape.heads, shape.size).transpose(2, 3).contiguous() for x in (keys, values)
        ]
        query = again.query.unsqueeze(2)

        def call(layer: int) -> None:
            again.out = run(
                query, flat[0][layer], flat[1][layer], block_mask=mask, enable_gqa=True, scale=again.scale
            ).squeeze(2)

        return call

    yield Offer("torch flex, page 128", prepare, BF16, lambda: again.error())


def _seen(p: Any) -> Any:
    """The mask of each query over its sequence's keys, bools, flattened."""
    torch = p.arrays.torch
    if p.row.kind == "tree":
        each = [p.seen_of(int(length)).reshape(-1) for length in p.lengths]
        return torch.as_tensor(np.concatenate(each), device=p.arrays.device)
    at = torch.arange(p.longest, device=p.arrays.device)
    same = p.documents[:, :, None] == p.documents[:, None, :]
    return (same & (at[:, None] >= at[None])).flatten()


def _flex_functions(p: Any) -> Iterator[Offer]:
    """torch's flex attention, compiled, over dense keys and values: the rows of each head, concatenated."""
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    torch, shape, batch, length = p.arrays.torch, p.row.shape, len(p.lengths), p.longest
    ids, bias, buckets = p.documents, p.bias, p.buckets
    found: dict[str, Any] = {}

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (ids[b, q] == ids[b, k])

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + bias[h, buckets[(q - k).clamp(0, FARTHEST - 1)]]

    def dense(rows: Any, heads: int) -> Any:
        return rows.reshape(batch, -1, heads, shape.size)[:, :length].transpose(1, 2).contiguous()

    def make() -> Callable[[int], Any]:
        mask = seen if shape.documents else causal
        tiles = attention.create_block_mask(
            mask, batch if shape.documents else None, None, length, length, device=p.arrays.device
        )
        run = torch.compile(attention.flex_attention, dynamic=False)
        query = dense(p.query, shape.query_heads)
        table = p.cached.pages.device_table.long()
        parts = [dense(part[0][table], shape.heads) for part in p.cached.parts]
        options = {} if bias is None else {"score_mod": biased}

        def call(layer: int) -> None:
            found["out"] = run(query, *parts, block_mask=tiles, enable_gqa=True, scale=p.scale, **options)

        return call

    def error() -> float:
        p.out = found["out"].transpose(1, 2).reshape(p.out.shape)
        return p.error()

    yield Offer("torch flex, dense", make, BF16, error)
    yield Offer("torch flex, pages of 128", lambda: _flex_over_pages(p, seen, causal, biased, found), BF16, error)


def _flex_over_pages(p: Any, seen: Any, causal: Any, biased: Any, found: dict[str, Any]) -> Callable[[int], Any]:
    """Flex attention over pages, with masks and scores converted as in torch's experimental ``PagedAttention``.

    Pages are as long as tiles of keys; keys and values are [1, heads, all slots, size].
    """
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    paged = importlib.import_module("torch.nn.attention.experimental._paged_attention").PagedAttention
    torch, shape, batch, length = p.arrays.torch, p.row.shape, len(p.lengths), p.longest
    count = -(-length // FLEX_PAGE)
    pages = paged(batch * count, FLEX_PAGE, batch, device=p.arrays.device)
    order = torch.as_tensor(np.random.default_rng(8).permutation(batch * count), device=p.arrays.device)
    pages.page_table[:, :count] = order.view(batch, count)
    numbers = torch.arange(count, device=p.arrays.device)
    for b in range(batch):
        pages.physical_to_logical[b, pages.page_table[b, :count]] = numbers
    table = p.cached.pages.device_table.long()

    def stored(part: Any) -> Any:
        of = {"dtype": part.dtype, "device": p.arrays.device}
        rows = torch.zeros(batch, count * FLEX_PAGE, shape.heads, shape.size, **of)
        rows[:, :length] = part[0][table].reshape(batch, -1, shape.heads, shape.size)[:, :length]
        made = torch.empty(batch * count, FLEX_PAGE, shape.heads, shape.size, **of)
        made[order] = rows.view(made.shape)
        return made.view(1, -1, shape.heads, shape.size).transpose(1, 2).contiguous()

    mask = attention.create_block_mask(
        seen if shape.documents else causal, batch, None, length, length, device=p.arrays.device
    )
    lengths = torch.full((batch,), length, device=p.arrays.device)
    options = {"block_mask": pages.convert_logical_block_mask(mask, kv_len=lengths)}
    if p.bias is not None:
        options["score_mod"] = pages.get_score_mod(biased, kv_len=lengths)
    run, parts = torch.compile(attention.flex_attention, dynamic=False), [stored(part) for part in p.cached.parts]
    query = p.query.view(batch, length, shape.query_heads, shape.size).transpose(1, 2).contiguous()

    def call(layer: int) -> None:
        found["out"] = run(query, *parts, enable_gqa=True, scale=p.scale, **options)

    return call


_FLASHINFER: dict[str, Callable[..., Iterator[Offer]]] = {
    "decode": _fi_decode, "append": _fi_append, "prefill": _fi_prefill, "mixed": _fi_prefill, "mla": _fi_mla,
    "functions": _fi_functions, "tree": _fi_functions,
}  # fmt: skip
GROUPS: dict[str, Group] = {
    "flashinfer": flashinfer,
    "fa3": vllm_peers.fa3,
    "fa4": fa4,
    "flashmla": vllm_peers.flashmla,
    "vllm": vllm_peers.vllm_cache,
    "triton": vllm_peers.triton,
    "torch": torch_,
    "flex": flex,
}
_TAKES: dict[str, Callable[[Row], bool]] = {
    "flashinfer": lambda row: (
        row.kind in _FLASHINFER
        and not (row.kind == "mla" and of_8_bits(row))
        and not (row.kind == "functions" and not row.shape.documents)  # a custom score needs a custom kernel
    ),
    "fa3": lambda row: row.kind in ("decode", "prefill", "mixed") or (row.kind == "mla" and not of_8_bits(row)),
    "fa4": lambda row: (
        row.kind in ("decode", "prefill", "mixed") and not of_8_bits(row) and not getattr(row.shape, "window", 0)
    ),
    "flashmla": lambda row: (
        row.kind == "mla" and row.shape.page == FLASHMLA_PAGE and not row.shape.rope and row.shape.query == row.dtype
    ),
    "vllm": lambda row: row.kind in ("append", "gather"),
    "triton": lambda row: row.kind in ("decode", "prefill", "mixed") and not getattr(row.shape, "window", 0),
    "torch": lambda row: row.kind == "gather" or (row.kind == "append" and not row.shape.rope),
    "flex": lambda row: row.kind == "functions" or row.name in ("b16_c8k", "b64_c4k"),
}


def takes(group: str, row: Row) -> bool:
    """Whether a group supports a row."""
    return _TAKES[group](row)


def offers(group: str, p: Any) -> Iterator[Offer]:
    """A group's offers for a problem."""
    if takes(group, p.row):
        yield from GROUPS[group](p)


def available() -> list[str]:
    """The groups whose libraries are found, without importing them."""

    def has(module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    folder = os.environ.get("PEERS_DIR")
    libraries = has("vllm") or bool(folder and Path(folder, "vllm_so").is_dir())
    kernels = has("vllm") or bool(folder and Path(folder, "vllm_shim").is_dir())
    there = {
        "flashinfer": has("flashinfer"),
        "fa3": libraries,
        "fa4": has("flash_attn") and has("flash_attn.cute") and has("cutlass"),
        "flashmla": libraries,
        "vllm": libraries,
        "triton": kernels and has("triton"),
        "torch": has("torch"),
        "flex": has("torch") and has("triton"),
    }
    return [name for name in GROUPS if there[name]]
