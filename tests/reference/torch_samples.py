# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A call of every operation with torch tensors: functions of tensors that return what they wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kvarn as kv
from kvarn.ops import functions, masks

PAGES, LAYERS, PAGE, HEADS, SIZE = 9, 2, 4, 2, 64
CACHED, NEW = (3, 0, 9), (2, 3, 1)
TOKENS, BATCH, LONGEST = sum(NEW), len(NEW), 12
CAUSAL, _ = functions.given(kv.masks.causal, "mask", "the samples")
SAMPLES: dict[str, Callable[..., Any]] = {}


class Data:
    """Random tensors of a step; every call of a name gives the same values."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype

    def _new(self, seed: int, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(dtype or self.dtype).to(self.device)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a paged step has, by name."""
        table = [[3, 7, 1], [5, 2, 8], [4, 6, 0]]  # page 0 is referred to as well
        return {
            "blocks": self._new(1, (PAGES, 2, LAYERS, PAGE, HEADS, SIZE)),
            "lengths": self.ints(CACHED), "table": self.ints(table), "offsets": self.ints([0, 2, 5, 6]),
            "query": self._new(2, (TOKENS, 2 * HEADS, SIZE)), "key": self._new(3, (TOKENS, HEADS, SIZE)),
            "value": self._new(4, (TOKENS, HEADS, SIZE)), "freqs": self._new(5, (16, SIZE), torch.float32),
            "gamma": self._new(6, (SIZE,)), "padded": self._new(7, (BATCH, 3, 2 * HEADS, SIZE)),
            "kv": self._new(8, (2 * TOKENS, HEADS * SIZE)), "sequence": self.ints([2, 0]), "pages": self.ints([3, 5]),
            "latent": self._new(9, (PAGES, 1, LAYERS, PAGE, 1, 2 * SIZE)), "other": self.ints([6, 1]),
            "latent_query": self._new(10, (TOKENS, 4, 2 * SIZE)), "counts": self.ints(NEW),
            "groups": self.ints([0, 1, 3]), "shared": self.ints([0, 0]),
            "weight": self._new(11, (4 * HEADS * SIZE, 2 * SIZE)) / 8,
        }  # fmt: skip


def sample(name: str) -> Callable[..., Any]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        SAMPLES[name] = function
        return function

    return keep


def _pool(t: dict[str, Any], **options: Any) -> Any:
    return kv.PagedKVCacheCollection(t["blocks"], t["lengths"], t["table"], 3, LONGEST, **options)


def _latents(t: dict[str, Any]) -> Any:
    return kv.PagedKVCacheCollection(t["latent"], t["lengths"], t["table"], 3, LONGEST)


@sample("append")
def append(t: dict[str, Any]) -> Any:
    kv.ops.append(_pool(t), 1, t["key"], t["value"], t["offsets"])
    return t["blocks"]


@sample("attention")
def attention(t: dict[str, Any]) -> Any:
    return kv.ops.attention(_pool(t), 0, t["query"], t["offsets"], window=5, softcap=20.0, return_lse=True)


@sample("attention_padded")
def attention_padded(t: dict[str, Any]) -> Any:
    return kv.ops.attention_padded(_pool(t), 1, t["padded"], t["counts"], out=t["padded"] * 0)


@sample("block_mask")
def block_mask(t: dict[str, Any]) -> Any:
    """As kv.ops.block_mask and attention call them, with the name of a function: torch does not trace those."""
    blocks, tile = t["counts"].new_zeros((3, 1, 2)), (64, 16)
    made = (("mask", CAUSAL), *zip(("rows", "keys"), tile, strict=True))
    masks._BLOCK_MASK((_pool(t), t["query"], blocks, t["offsets"]), made)
    return torch.where(torch.arange(2, device=blocks.device) <= blocks[:, :, :1], blocks, 0)


@sample("summarize_pages")
def summarize_pages(t: dict[str, Any]) -> Any:
    pool = _pool(t)
    summaries = kv.PageSummaries(pool)
    kv.ops.summarize_pages(pool, 1, summaries, t["offsets"])
    return summaries.data


@sample("select_pages")
def select_pages(t: dict[str, Any]) -> Any:
    pool = _pool(t)
    summaries = kv.PageSummaries(pool, "mean", t["blocks"][:, 0, :, :1].transpose(2, 3).contiguous())
    pages, counts = kv.ops.select_pages(pool, 0, t["query"], t["offsets"], summaries, 2)
    return pages, counts, kv.ops.attention(pool, 0, t["query"], t["offsets"], pages=pages, page_counts=counts)


@sample("index_scores")
def index_scores(t: dict[str, Any]) -> Any:
    weights = t["latent_query"][:, :, 0].float().contiguous()
    return kv.ops.index_scores(_latents(t), 1, t["latent_query"], weights, t["offsets"])


@sample("select_tokens")
def select_tokens(t: dict[str, Any]) -> Any:
    return kv.ops.select_tokens(t["query"][:, 0].float().contiguous(), 7)


@sample("operand_attention")
def operand_attention(t: dict[str, Any]) -> Any:
    pool = _pool(t)
    keys, values = (kv.KVCacheMHAOperand(c) for c in (pool.get_key_cache(1), pool.get_value_cache(1)))
    return kv.ops.attention(keys, values, t["query"], t["offsets"])


@sample("rope_append")
def rope_append(t: dict[str, Any]) -> Any:
    found = kv.ops.rope_append(_pool(t), 0, t["query"], t["key"], t["value"], t["offsets"], t["freqs"])
    return found, t["blocks"]


@sample("project_append")
def project_append(t: dict[str, Any]) -> Any:
    x, weight = t["key"].reshape(TOKENS, HEADS * SIZE), t["weight"]
    found = kv.ops.project_append(_pool(t), 0, x, weight, t["offsets"], freqs_cis=t["freqs"])
    return found, t["blocks"]


@sample("project_append_padded")
def project_append_padded(t: dict[str, Any]) -> Any:
    x = t["padded"].reshape(BATCH, 3, 4 * SIZE)[:, :, : 2 * SIZE].contiguous()
    return kv.ops.project_append_padded(_pool(t), 1, x, t["weight"], t["counts"]), t["blocks"]


@sample("store_ragged")
def store_ragged(t: dict[str, Any]) -> Any:
    kv.ops.store_ragged(_pool(t).get_value_cache(1), t["key"], t["offsets"])
    return t["blocks"]


@sample("store_padded")
def store_padded(t: dict[str, Any]) -> Any:
    kv.ops.store_padded(_pool(t).get_key_cache(0), t["padded"][:, :, :HEADS].contiguous(), t["counts"])
    return t["blocks"]


@sample("gather")
def gather(t: dict[str, Any]) -> Any:
    ids = t["counts"].new_zeros((TOKENS, 2))
    ids[:, 1] = 1
    return kv.ops.gather(_pool(t).get_key_cache(1), ids, t["offsets"])


@sample("copy_pages")
def copy_pages(t: dict[str, Any]) -> Any:
    kv.ops.copy_pages(_pool(t), t["pages"], t["other"])
    return t["blocks"]


@sample("commit")
def commit(t: dict[str, Any]) -> Any:
    kv.ops.commit(_pool(t), None, t["offsets"].new_tensor([[0, 1], [0, 2], [-1, 0]]), t["offsets"])
    return t["blocks"]


@sample("transfer_pages")
def transfer_pages(t: dict[str, Any]) -> Any:
    copy = t["blocks"] * 2
    kv.ops.transfer_pages(_pool(t), _pool({**t, "blocks": copy}), t["pages"], t["other"], 1)
    return copy


@sample("convert")
def convert(t: dict[str, Any]) -> Any:
    half = t["blocks"].to(torch.float16)
    kv.ops.convert(_pool(t).get_key_cache(1), _pool({**t, "blocks": half}).get_value_cache(0))
    return half


@sample("cache_row_offsets")
def cache_row_offsets(t: dict[str, Any]) -> Any:
    return kv.ops.cache_row_offsets(t["offsets"], t["lengths"])


@sample("split_prefixes")
def split_prefixes(t: dict[str, Any]) -> Any:
    c = _pool(t)
    shared = kv.SharedPrefixes(t["groups"], t["shared"])
    shared.plan(c, t["offsets"])
    return kv.ops.attention(c, 0, t["query"], t["offsets"], shared=shared)


@sample("increment_cache_lengths")
def increment_cache_lengths(t: dict[str, Any]) -> Any:
    kv.ops.increment_cache_lengths(t["lengths"], t["offsets"])
    return t["lengths"]


@sample("remap_sparse_indices")
def remap_sparse_indices(t: dict[str, Any]) -> Any:
    logical = t["counts"].new_zeros((TOKENS, 4)) + 1
    return kv.ops.remap_sparse_indices(logical, t["offsets"], t["table"], PAGE, PAGES)


@sample("mla_prefill_plan")
def mla_prefill_plan(t: dict[str, Any]) -> Any:
    return tuple(kv.ops.mla_prefill_plan(t["offsets"], t["lengths"], 8, 3))


@sample("mla_attention")
def mla_attention(t: dict[str, Any]) -> Any:
    return kv.ops.mla_attention(
        _latents(t), 1, t["latent_query"], t["offsets"], value_size=SIZE, window=5, kv_offsets=t["offsets"]
    )


@sample("mla_decompress")
def mla_decompress(t: dict[str, Any]) -> Any:
    out = t["latent"].new_zeros((24, 2 * SIZE))
    plan = kv.ops.mla_prefill_plan(t["offsets"], t["lengths"], 24, 1)
    return kv.ops.mla_decompress(_latents(t).get_key_cache(0), plan.buffer_row_offsets[0], plan.cache_offsets[0], out)


@sample("mla_prefill_chunk")
def mla_prefill_chunk(t: dict[str, Any]) -> Any:
    plan = kv.ops.mla_prefill_plan(t["offsets"], t["lengths"], 24, 1)
    expanded = t["latent"].flatten()[: 24 * 4 * SIZE].view(24, 4, SIZE)
    return kv.ops.mla_prefill_chunk(
        _latents(t), 0, t["latent_query"], t["offsets"], expanded, expanded * 2, plan.buffer_row_offsets[0],
        plan.cache_offsets[0],
    )  # fmt: skip


@sample("merge_attention")
def merge_attention(t: dict[str, Any]) -> Any:
    lse = t["query"].float().sum(-1)
    return kv.ops.merge_attention(t["query"], lse, t["query"] * 2, lse * 0.5)


@sample("merge_ragged")
def merge_ragged(t: dict[str, Any]) -> Any:
    rows = t["kv"][:TOKENS]
    return kv.ops.merge_ragged(rows, t["offsets"], rows * 2, t["offsets"])


@sample("shift_tokens")
def shift_tokens(t: dict[str, Any]) -> Any:
    return kv.ops.shift_tokens(t["offsets"].new_zeros(TOKENS) + 7, t["offsets"], t["counts"])


@sample("sliced_add")
def sliced_add(t: dict[str, Any]) -> Any:
    return kv.ops.sliced_add(t["kv"], t["kv"] * 3, 5)


@sample("rope")
def rope(t: dict[str, Any]) -> Any:
    return kv.ops.rope(_pool(t), 1, t["query"], t["offsets"], t["freqs"], interleaved=False), t["blocks"]


@sample("rope_padded")
def rope_padded(t: dict[str, Any]) -> Any:
    out = t["padded"] * 0
    return kv.ops.rope_padded(_pool(t), 1, t["padded"], t["counts"], t["freqs"], query_out=out), t["blocks"]


@sample("qk_norm")
def qk_norm(t: dict[str, Any]) -> Any:
    return kv.ops.qk_norm(_pool(t), 0, t["query"], t["offsets"], t["gamma"], t["gamma"]), t["blocks"]


@sample("rms_norm")
def rms_norm(t: dict[str, Any]) -> Any:
    kv.ops.rms_norm(_pool(t).get_key_cache(0), t["gamma"], 1e-6, t["offsets"])
    return t["blocks"]


@sample("radd")
def radd(t: dict[str, Any]) -> Any:
    kv.ops.radd(_pool(t), 0, t["kv"][:TOKENS].repeat(1, 2), t["offsets"])
    return t["blocks"]


@sample("iadd_2m")
def iadd_2m(t: dict[str, Any]) -> Any:
    kv.ops.iadd_2m(_pool(t), 1, t["kv"], t["offsets"])
    return t["blocks"]
