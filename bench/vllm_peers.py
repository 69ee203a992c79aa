# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""vLLM's compiled kernels on the rows: FlashAttention-3, FlashMLA, its cache kernels, its Triton kernels.

The libraries are loaded from an installed vLLM or the folder ``$PEERS_DIR/vllm_so``; the Triton kernels also from
``$PEERS_DIR/vllm_shim``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .cases import Row
from .kvarn_rows import Offer

BF16, FP8, FP8_QUERY = 0.02, 0.06, 0.12  # tolerances; FP8_QUERY if the query is rounded to 8 bits too
_state: dict[str, Any] = {}  # libraries and workspaces, loaded once per process


def once(name: str, make: Callable[[], Any]) -> Any:
    if name not in _state:
        _state[name] = make()
    return _state[name]


def is_fp8(p: Any) -> bool:
    return of_8_bits(p.row)


def of_8_bits(row: Row) -> bool:
    return row.dtype != "bf16"


def vllm_library(pattern: str) -> None:
    """Load one of vLLM's compiled libraries, which registers torch operators."""

    def load() -> bool:
        folders = [Path(os.environ["PEERS_DIR"], "vllm_so")] if os.environ.get("PEERS_DIR") else []
        installed = importlib.util.find_spec("vllm")
        if installed is not None and installed.submodule_search_locations:
            root = Path(next(iter(installed.submodule_search_locations)))
            folders += [root, root / "vllm_flash_attn"]
        found = [path for folder in folders for path in sorted(folder.glob(pattern))]
        if not found:
            raise ImportError(f"vLLM's {pattern} is not here")
        importlib.import_module("torch").ops.load_library(str(found[0]))
        return True

    once(pattern, load)


# --- FlashAttention-3 ------------------------------------------------------------------------------


@dataclass
class Fa3:
    """Calls of FA3 over pages, with at most ``most`` query rows per sequence and ``longest`` keys.

    ``left``: keys that a window has before each query. ``scales``: of the query, keys and values. ``content``: columns
    of a latent query whose keys are also the values.
    """

    query: Any
    offsets: Any
    lengths: Any
    table: Any
    most: int
    longest: int
    page: int
    scale: float
    causal: bool = True
    left: int = -1
    scales: Any = None
    content: Any = None
    metadata: Any = None

    def plan(self, ops: Any, heads: int) -> None:
        """Compute FA3's scheduler metadata once, before the launches."""
        size = self.query.shape[-1]
        value_size = size if self.content is None else self.content.shape[-1]
        self.metadata = ops._vllm_fa3_C.get_scheduler_metadata(
            self.lengths.shape[0], self.most, self.longest, self.query.shape[1], heads, size, value_size,
            self.query.dtype, self.lengths, self.offsets, None, None, None, None, self.page, 0, self.causal, self.left,
            -1, False, 0, None, 0,
        )  # fmt: skip

    def run(self, ops: Any, keys: Any, values: Any, out: Any = None) -> Any:
        """(output, log-sum-exp [Hq, T], ...) over a layer's keys and values [pages, page, H, D]."""
        return ops._vllm_fa3_C.fwd(
            self.query, keys, values, None, None, self.content, out, self.offsets, None, None, None, self.lengths,
            self.most, self.longest, self.table, None, None, None, None, None, self.scales, self.scales, self.scales,
            self.scale, self.causal, self.left, -1, 0.0, True, self.metadata, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip


def fa3(p: Any) -> Iterator[Offer]:
    """FlashAttention-3 of vLLM, paged."""
    vllm_library("_vllm_fa3_C*.so")
    if p.row.kind == "mla":
        yield from _fa3_mla(p)
        return
    shape, (keys, values), decode = p.row.shape, p.cached.parts, p.row.kind == "decode"
    query = p.query.to(keys.dtype) if is_fp8(p) else p.query
    ones = p.arrays.torch.ones(len(p.lengths), shape.heads, device=p.arrays.device) if is_fp8(p) else None
    most = 1 if decode else p.newest
    left = shape.window - 1 if decode and shape.window else -1

    def prepare(planned: bool) -> Callable[[int], Any]:
        ops, table = p.arrays.torch.ops, p.cached.pages.device_table
        whole = Fa3(query, p.offsets, p.device_lengths, table, most, p.longest, shape.page, p.scale, True, left, ones)
        if planned:
            whole.plan(ops, shape.heads)
        return lambda layer: whole.run(ops, keys[layer], values[layer], p.out)

    tolerance = FP8_QUERY if is_fp8(p) else BF16
    yield Offer("FA3 of vLLM", lambda: prepare(decode), tolerance, lambda: p.error(query))
    if p.row.kind == "mixed":
        yield Offer("FA3 of vLLM, planned", lambda: prepare(True), tolerance, lambda: p.error(query))
    if getattr(shape, "prefix", 0):
        yield Offer("vLLM cascade", lambda: _fa3_cascade(p), BF16)


def _fa3_cascade(p: Any) -> Callable[[int], Any]:
    """vLLM's ``cascade_attention`` for a prefix that all requests share: FA3 over it, FA3 over the rest, and a merge.

    The scheduler metadata of both parts is computed once, before the launches.
    """
    vllm_library("_C_stable_libtorch*.so")
    ops, (keys, values), shape = p.arrays.torch.ops, p.cached.parts, p.row.shape
    table, integers = p.cached.pages.device_table, p.arrays.integers
    prefix, own = shape.prefix, p.longest - shape.prefix
    parts = [
        Fa3(p.query, integers(np.array([0, shape.batch])), integers(np.array([prefix])), table[:1], shape.batch, prefix,
            shape.page, p.scale, causal=False),
        Fa3(p.query, p.offsets, integers(p.lengths - prefix), table[:, prefix // shape.page :], 1, own, shape.page,
            p.scale),
    ]  # fmt: skip
    for part in parts:
        part.plan(ops, shape.heads)

    def call(layer: int) -> None:
        found = [part.run(ops, keys[layer], values[layer])[:2] for part in parts]
        ops._C.merge_attn_states(p.out, None, *found[0], *found[1], None, None)

    return call


def _fa3_mla(p: Any) -> Iterator[Offer]:
    """vLLM's implementation for latent rows on Hopper."""
    shape, (cache,) = p.row.shape, p.cached.parts
    split, rows = shape.value_size, cache.view(p.layers, -1, shape.page, 1, shape.size)

    def prepare() -> Callable[[int], Any]:
        ops, table = p.arrays.torch.ops, p.cached.pages.device_table
        whole = Fa3(
            p.query[..., split:], p.offsets, p.device_lengths, table, 1, p.longest, shape.page, p.scale,
            content=p.query[..., :split],
        )  # fmt: skip
        whole.plan(ops, 1)
        return lambda layer: whole.run(ops, rows[layer][..., split:], rows[layer][..., :split], p.out)

    yield Offer("FA3 of vLLM", prepare, BF16)


def flashmla(p: Any) -> Iterator[Offer]:
    """FlashMLA, dense; over 8-bit rows, the query is 8-bit too."""
    shape, (cache,), torch = p.row.shape, p.cached.parts, p.arrays.torch
    vllm_library("_flashmla_extension_C*.so" if is_fp8(p) else "_flashmla_C*.so")

    def prepare() -> Callable[[int], Any]:
        ops, plan = torch.ops._flashmla_C, [None, None]

        def call(layer: int) -> None:
            out, _, *plan[:] = ops.dense_decode_fwd(
                p.query.unsqueeze(1),
                cache[layer],
                shape.value_size,
                p.device_lengths,
                p.cached.pages.device_table,
                p.scale,
                False,
                *plan,
                None,
            )
            p.out = out.view(p.out.shape)  # the function allocates its output

        return call

    def prepare_fp8() -> Callable[[int], Any]:
        ops, one = torch.ops._flashmla_extension_C, torch.ones(1, device=p.arrays.device)
        plan = ops.get_mla_decoding_metadata_dense_fp8(p.device_lengths, shape.query_heads, 1)

        def call(layer: int) -> None:
            out, *_ = ops.fwd_kvcache_mla_fp8(
                p.query.unsqueeze(1), cache[layer], shape.value_size, p.device_lengths, p.cached.pages.device_table,
                p.scale, False, *plan, one, one,
            )  # fmt: skip
            p.out = out.view(p.out.shape)

        return call

    yield Offer("FlashMLA", prepare_fp8, FP8) if is_fp8(p) else Offer("FlashMLA", prepare, BF16)


def vllm_cache(p: Any) -> Iterator[Offer]:
    """vLLM's cache kernels: append, rotary embedding then append, gather."""
    vllm_library("_C_stable_libtorch*.so")
    torch, shape = p.arrays.torch, p.row.shape
    if p.row.kind == "gather":
        keys = p.cached.parts[0]
        bounds = p.offsets * shape.context
        flat = p.out.view(-1, shape.heads * shape.size)
        rows = keys.view(p.layers, -1, shape.page, shape.heads * shape.size)
        run = torch.ops._C_cache_ops.cp_gather_cache
        yield Offer(
            "vLLM",
            lambda: lambda layer: run(rows[layer], flat, p.cached.pages.device_table, bounds, shape.sequences, None),
            0.5,
        )
        return
    keys, values = (x.view(torch.uint8) if is_fp8(p) else x for x in p.cached.parts)
    one, kind = torch.ones(1, device=p.arrays.device), "fp8" if is_fp8(p) else "auto"

    def plain() -> Callable[[int], Any]:
        run = torch.ops._C_cache_ops.reshape_and_cache_flash
        return lambda layer: run(
            p.key[layer], p.value[layer], keys[layer], values[layer], p.device_slots, kind, one, one
        )

    def rotated() -> Callable[[int], Any]:
        append, rotate = torch.ops._C_cache_ops.reshape_and_cache_flash, torch.ops._C.rotary_embedding
        # The rotation is in place: it works on copies, which the second check restores.
        query, key, at = p.query.clone(), p.key.clone(), p.at.long()
        angles = torch.cat([p.cos, p.sin], -1).to(p.key.dtype)

        def call(layer: int) -> None:
            rotate(
                at, query[layer].view(p.tokens, -1), key[layer].view(p.tokens, -1), shape.size, angles, True, 0, False
            )
            append(key[layer], p.value[layer], keys[layer], values[layer], p.device_slots, kind, one, one)

        call.restore = lambda: (query.copy_(p.query), key.copy_(p.key))  # type: ignore[attr-defined]
        return call

    if p.rope:
        yield Offer("vLLM, two launches", rotated, FP8, lambda: p.error(check_query=False))
    else:
        yield Offer("vLLM", plain, FP8)


def triton(p: Any) -> Iterator[Offer]:
    """vLLM's unified attention, written in Triton."""
    shim = os.environ.get("PEERS_DIR") and os.path.join(os.environ["PEERS_DIR"], "vllm_shim")
    if shim and os.path.isdir(shim) and shim not in sys.path:
        sys.path.insert(0, shim)
    unified = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    modes = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
    torch, shape, pages, (keys, values) = p.arrays.torch, p.row.shape, p.cached.pages, p.cached.parts

    def prepare() -> Callable[[int], Any]:
        most, segments = max(1, 128 // shape.heads), 16
        options: dict[str, Any] = {}
        scale = torch.ones(len(p.lengths), shape.heads, device=p.arrays.device) if is_fp8(p) else None
        if p.row.kind == "decode":
            options = {
                "seq_threshold_3D": most,
                "num_par_softmax_segments": segments,
                "softmax_segm_output": torch.empty(
                    most, shape.query_heads, segments, shape.size, device=p.arrays.device
                ),
                "softmax_segm_max": torch.empty(most, shape.query_heads, segments, device=p.arrays.device),
                "softmax_segm_expsum": torch.empty(most, shape.query_heads, segments, device=p.arrays.device),
                "kv_quant_mode": modes.FP8_PER_TENSOR if is_fp8(p) else modes.NONE,
            }
        return lambda layer: unified(
            q=p.query,
            k=keys[layer],
            v=values[layer],
            out=p.out,
            cu_seqlens_q=p.offsets,
            max_seqlen_q=1 if p.row.kind == "decode" else p.newest,
            seqused_k=p.device_lengths,
            max_seqlen_k=p.longest,
            softmax_scale=p.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=pages.device_table,
            softcap=0.0,
            q_descale=None,
            k_descale=scale,
            v_descale=scale,
            **options,
        )

    yield Offer("Triton of vLLM", prepare, FP8 if is_fp8(p) else BF16)
