# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the benchmarks call other libraries: tables, lengths and merges, with stand-ins that compute by torch."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")

from bench import cases, page_peers, pages, peers, vllm_peers  # noqa: E402
from bench.problems import problem  # noqa: E402
from kvarn.measure.arrays import TorchArrays  # noqa: E402


def attend(q: Any, keys: Any, values: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    """Output and log-sum-exp [heads, rows] of queries [n, Hq, D] over keys and values [k, H, D]."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    s = torch.einsum("thd,nhd->htn", q.float(), k) * scale
    if causal:
        rows, count = s.shape[1:]
        s = s.masked_fill(torch.arange(count)[None] > torch.arange(rows)[:, None] + count - rows, float("-inf"))
    return torch.einsum("htn,nhd->thd", s.softmax(-1), v), torch.logsumexp(s, -1)


def fa3(*args: Any) -> tuple[Any, Any, None, None]:
    """The arguments of FA3's functions that the benchmarks give."""
    q, keys, values, out, offsets, lengths, most, longest, table = (args[i] for i in (0, 1, 2, 6, 7, 11, 12, 13, 14))
    scale, causal, metadata = args[23], args[24], args[29]
    assert metadata is not None
    out = torch.full_like(q, float("nan")) if out is None else out
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    for i, n in enumerate(lengths.tolist()):
        rows = slice(int(offsets[i]), int(offsets[i + 1]))
        assert n <= longest
        assert rows.stop - rows.start <= most
        ids = table[i, : -(-n // keys.shape[1])].long()
        k, v = (x[ids].flatten(0, 1)[:n] for x in (keys, values))
        found, lse[:, rows] = attend(q[rows], k, v, scale, causal)
        out[rows] = found.to(out.dtype)
    return out, lse, None, None


def merge(out: Any, out_lse: Any, a: Any, of_a: Any, b: Any, of_b: Any, tokens: Any, scale: Any) -> None:
    both = torch.logaddexp(of_a, of_b)
    parts = ((x.float() * (of_x - both).exp().T[..., None]) for x, of_x in ((a, of_a), (b, of_b)))
    out.copy_(sum(parts).to(out.dtype))


def fa4(q: Any, keys: Any, values: Any, *, cu_seqlens_q: Any, max_seqlen_q: int, max_seqlen_k: int, seqused_k: Any,
        page_table: Any, softmax_scale: float, causal: bool, num_splits: int) -> tuple[Any, None]:  # fmt: skip
    """FlashAttention-4 over pages: an output of its own."""
    assert num_splits in (0, 1)
    out = torch.full_like(q, float("nan"))
    for i, n in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        assert n <= max_seqlen_k
        assert rows.stop - rows.start <= max_seqlen_q
        k, v = (x[page_table[i, : -(-n // keys.shape[1])].long()].flatten(0, 1)[:n] for x in (keys, values))
        out[rows] = attend(q[rows], k, v, softmax_scale, causal)[0].to(out.dtype)
    return out, None


class Decode:
    """FlashInfer's decode over pages."""

    def __init__(self, workspace: Any, layout: str, **options: Any) -> None:
        assert layout == "NHD"

    def plan(self, starts: Any, order: Any, last: Any, query_heads: int, heads: int, size: int, page: int,
             **dtypes: Any) -> None:  # fmt: skip
        self.of_batch = starts, order, last, page

    def run(self, q: Any, parts: Any, out: Any) -> Any:
        starts, order, last, page = self.of_batch
        for i in range(len(last)):
            ids = order[int(starts[i]) : int(starts[i + 1])].long()
            n = (len(ids) - 1) * page + int(last[i])
            k, v = (x[ids].flatten(0, 1)[:n] for x in parts)
            out[i : i + 1] = attend(q[i : i + 1], k, v, q.shape[-1] ** -0.5, True)[0].to(out.dtype)
        return out


class Torch:
    """torch, with vLLM's operators."""

    ops = types.SimpleNamespace(
        _vllm_fa3_C=types.SimpleNamespace(fwd=fa3, get_scheduler_metadata=lambda *args: torch.zeros(len(args))),
        _C=types.SimpleNamespace(merge_attn_states=merge),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> TorchArrays:
    for module in (vllm_peers, page_peers):
        monkeypatch.setattr(module, "vllm_library", lambda pattern: None)
    flashinfer: Any = types.ModuleType("flashinfer")
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = Decode
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    made = TorchArrays("cpu")
    made.torch = Torch()
    return made


def row_named(name: str) -> Any:
    return next(row for row in cases.SMALL if row.name == name)


def test_a_cascade_is_the_attention_over_all_keys(library):
    p = problem(library, row_named("small_decode_prefix"), True)
    call = vllm_peers._fa3_cascade(p)
    p.poison()
    call(0)
    assert p.error() < 0.02


def test_a_decode_by_fa3_reads_the_pages_of_its_table(library):
    p = problem(library, row_named("small_decode"), True)
    (offer,) = vllm_peers.fa3(p)
    assert offer.checked(offer.make(), p) < offer.tolerance


@pytest.mark.parametrize("name", ["small_decode", "small_prefill"])
def test_fa4_reads_the_pages_of_its_table(name, library, monkeypatch):
    interface: Any = types.ModuleType("flash_attn.cute.interface")
    interface.flash_attn_varlen_func = fa4
    for module in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    p = problem(library, row_named(name), True)
    found = list(peers.offers("fa4", p))
    assert [offer.who for offer in found] == ["FA4", "FA4, splits by itself"][: 1 + (name == "small_decode")]
    for offer in found:
        assert offer.checked(offer.make(), p) < offer.tolerance
    assert not peers.takes("fa4", row_named("small_decode_fp8"))


def test_heads_of_listed_pages_are_sequences_of_other_libraries(library):
    row = dataclasses.replace(pages.SMALL[0], shape=dataclasses.replace(pages.SMALL[0].shape, batch=2, context=70))
    found = list(pages.lines(library, row, shares=(0.5,), groups=("fa3", "flashinfer")))
    assert [line["what"] for line in found[-2:]] == [page_peers.PEERS[name][0] for name in ("fa3", "flashinfer")]
    assert all(line["ok"] for line in found[-2:])
