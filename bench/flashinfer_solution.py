# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn's attention as FlashInfer-Bench calls it; ``bench.solutions`` copies this file into every solution."""

import math

import torch

import kvarn as kv


def paged(*, k_cache, v_cache, sm_scale, kv_indptr, kv_indices, q, qo_indptr=None, kv_last_page_len=None):
    """Attention over the pages of two caches [pages, page size, H, D], in place: the output and its log-sum-exp."""
    step = _Step(q, k_cache.shape[1], qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
    pages = kv.ForeignPages.flashinfer((k_cache, v_cache), step.cached, step.table, **step.bounds)
    return step.done(kv.ops.attention(pages, 0, q, step.offsets, scale=float(sm_scale), return_lse=True))


def ragged(*, q, k, v, qo_indptr, kv_indptr, sm_scale):
    """Causal attention over keys and values [tokens, H, D], the sequences one after another."""
    operands = [kv.RaggedMHAOperand(x, kv_indptr) for x in (k, v)]
    return _base_2(*kv.ops.attention(*operands, q, qo_indptr, scale=float(sm_scale), return_lse=True))


def latent(
    *, q_nope, q_pe, ckv_cache, kpe_cache, sm_scale, kv_indptr, kv_indices, qo_indptr=None, kv_last_page_len=None
):
    """MLA. kvarn's rows are both parts, one after the other, as engines store them; the two caches are copied."""
    rows, query = torch.cat([ckv_cache, kpe_cache], -1), torch.cat([q_nope, q_pe], -1)
    step = _Step(query, rows.shape[1], qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
    pages = kv.ForeignPages.vllm(rows, step.cached, step.table, layout="MLA", **step.bounds)
    size, scale = q_nope.shape[-1], float(sm_scale)
    return step.done(kv.ops.mla_attention(pages, 0, query, step.offsets, value_size=size, scale=scale, return_lse=True))


class _Step:
    """kvarn's tables of a batch: of decodes if there are no offsets of queries."""

    def __init__(self, query, page_size, qo_indptr, kv_indptr, kv_indices, last):
        counts, decode = kv_indptr.diff(), qo_indptr is None
        fewest, longest = torch.stack(torch.aminmax(counts)).tolist()
        columns = torch.arange(max(longest, 1), dtype=torch.int32, device=query.device)
        self.table = kv_indices[(kv_indptr[:-1, None] + columns).clamp(max=kv_indices.shape[0] - 1)]
        total = counts if last is None else (counts - 1) * page_size + last
        self.offsets = torch.arange(len(counts) + 1, dtype=torch.int32, device=query.device) if decode else qo_indptr
        self.cached = (total - self.offsets.diff()).clamp(min=0).int()
        most = 1 if decode else 1 << max(query.shape[0] - 1, 1).bit_length()  # few bounds, so that few programs serve
        self.bounds = {"max_seq_length": most, "max_cache_length": len(columns) * page_size}
        self.without = counts == 0 if decode and fewest == 0 else None  # decodes without keys

    def done(self, found):
        out, lse = found
        if self.without is not None:
            out.masked_fill_(self.without[:, None, None], 0.0)
            lse.masked_fill_(self.without[:, None], -math.inf)
        return _base_2(out, lse)


def _base_2(out, lse):
    """FlashInfer's log-sum-exp is to the base of 2."""
    return out, lse / math.log(2.0)
