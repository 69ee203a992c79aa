# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""QKV projection fused with the append, against a product, then an append: python -m bench.products [--tokens 1,8192]

Columns give µs of ``kv.ops.project_append`` with RoPE (alone, and with ``early``: the weight is already in memory), of
torch's product, of torch's product followed by ``kv.ops.rope_append``, and of a kernel that only reads the weight, in
CUDA graphs over weights outside the L2 cache. ``--forms`` adds: bias and norms, a padded batch, an f8e4m3 cache, an i8
cache with scales. Sequence lengths differ, and one sequence is empty. Before a line is timed, its queries, keys and
values are checked against a float32 product of the same operands, in a pool of random pages that is NaN elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.measure.timing import span

from .report import table

HEADS, SIZE, PAGE, CACHED = 8, 128, 16, 37
TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
SHAPES = "4096:32,8192:64"  # K and query heads of attention in models of 8 and 70 billion parameters
GRANULE = 64  # elements per scale in an i8 cache
ROUNDS, UNCOUNTED = 16, 5
POISON = 0xFF  # byte that gives a NaN in every float type
FORMS = ("rope", "norm", "padded", "f8", "all")
NORMED = ("norm", "all")
TYPES = {"bf16": 16, "f8e4m3": 8, "uint4b8": 4, "mxfp8": 8}  # bits per element of the weight
GROUPS = {"uint4b8": 128, "mxfp8": 32}  # elements of K per scale; x is bf16
EPS = 1e-5
TOLERANCE = 0.02  # of the largest element; f8e4m3 caches round elements by up to 1/16
TOLERANCE_F8 = 0.065
HEAD = "form|tokens|K|columns|kvarn, µs|early|product|product, then append|read|TFLOP/s|TB/s of the weight".split("|")
COLD = 200 << 20  # bytes of weights per graph, several times the L2 cache
CALLS = 32  # calls per graph, at least, to amortise its start; above LONG tokens, one call per weight
LONG = 1024


READ_THREADS, READ_TOGETHER, READ_BLOCKS = 512, 8, 264  # of the reading kernel; two blocks per multiprocessor


@kv.kernel(block=(READ_THREADS, 1, 1))
def read(weight: kv.ReadOnlyBuffer[kv.i32, 1], out: kv.Buffer[kv.i32, 1]):
    """Read all words of a weight: 16 bytes per thread, several accesses in flight."""
    each = READ_THREADS * READ_TOGETHER * 4
    found = kv.i32(0)
    for first in range(kv.block_id.x * each, weight.shape[0], kv.grid_dim.x * each):
        words = []
        for i in kv.static(range(READ_TOGETHER)):
            place = first + (i * READ_THREADS + kv.thread_id.x) * 4
            words.append(weight.load(kv.math.min(place, weight.shape[0] - 4), width=4, alignment=16))
        for w in kv.static(words):
            found = found ^ w[0] ^ w[1] ^ w[2] ^ w[3]
    if found == 0x5EED5EED:  # practically never; the compiler cannot know
        out[kv.thread_id.x] = found


class Step:
    """Operands and expected results of one projection.

    Attributes
    ----------
    type : str
        One of TYPES. For weights with group scales, torch multiplies the values in bf16.
    form : str
        ``rope``; ``norm``: also a bias and RMS norms; ``padded``: the last sequence is short; ``f8``: an f8e4m3 cache;
        ``all``: bias, norms and an i8 cache with scales.
    """

    def __init__(
        self, torch: Any, tokens: int, k: int, heads: int, type: str, form: str, schedule: Any, kv_heads: int = HEADS
    ) -> None:
        self.torch, self.type, self.form, self.schedule, self.heads = torch, type, form, schedule, heads
        self.kv_heads = kv_heads
        draw = np.random.default_rng(7)
        new = lengths_of(tokens, form, draw)
        pages = -(-(CACHED + new) // PAGE)
        order = draw.permutation(pages.sum() + 2) + 1
        entries = np.zeros((len(new), pages.max()), np.int32)
        for b, end in enumerate(np.cumsum(pages)):
            entries[b, : pages[b]] = order[end - pages[b] : end]
        self.table = torch.from_numpy(entries).cuda()
        dtype = {"f8": torch.float8_e4m3fn, "all": torch.int8}.get(form, torch.bfloat16)
        self.blocks = torch.empty((len(order) + 1, 2, 1, PAGE, kv_heads, SIZE), dtype=dtype, device="cuda")
        self.scales = None
        if form == "all":
            self.scales = torch.empty((*self.blocks.shape[:-1], SIZE // GRANULE), device="cuda")
        lengths = torch.full((len(new),), CACHED, dtype=torch.int32, device="cuda")
        width = tokens // len(new) if form == "padded" else int(new.max())
        longest = CACHED + width
        quantized = () if self.scales is None else (self.scales, GRANULE)
        self.collection = kv.PagedKVCacheCollection(self.blocks, lengths, self.table, width, longest, *quantized)
        rows = np.full(len(new), width) if form == "padded" else new
        ends = np.concatenate([[0], np.cumsum(rows)])
        self.offsets = torch.from_numpy(ends.astype(np.int32)).cuda()
        self.counts = torch.from_numpy(new.astype(np.int32)).cuda()
        self.sequence = torch.from_numpy(np.repeat(np.arange(len(new)), rows)).cuda()
        step = np.concatenate([np.arange(n) for n in rows])
        self.position = torch.from_numpy(CACHED + step).cuda()
        self.kept = torch.from_numpy(step < np.repeat(new, rows)).cuda()
        turns = torch.rand((longest, SIZE // 2), device="cuda") * 6.28
        self.freqs = torch.stack([turns.cos(), turns.sin()], -1).reshape(longest, SIZE)
        self.out = torch.empty((tokens, heads, SIZE), dtype=torch.bfloat16, device="cuda")
        self.scratch = torch.zeros((READ_THREADS,), dtype=torch.int32, device="cuda")
        self.bias, self.gammas = None, {}
        if form in NORMED:
            self.bias = torch.randn((self.columns,), device="cuda").bfloat16()
            self.gammas = {name: torch.rand((SIZE,), device="cuda") + 0.5 for name in ("q_gamma", "k_gamma")}
        x = torch.randn((tokens, k), device="cuda")
        copies = max(2, COLD // (self.columns * k * TYPES[type] // 8))
        self.x, self.x_scale, _ = self.operand(x, "bf16" if type in GROUPS else type)
        self.weights = [
            self.operand(torch.randn((self.columns, k), device="cuda") / k**0.5, type) for _ in range(copies)
        ]  # fmt: skip

    @property
    def columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * SIZE

    @property
    def tolerance(self) -> float:
        """Tolerance of :meth:`error`."""
        return TOLERANCE_F8 if self.form == "f8" else TOLERANCE

    @property
    def calls(self) -> int:
        """Calls per graph, a multiple of the number of weights."""
        copies = len(self.weights)
        return copies if len(self.x) > LONG else copies * -(-CALLS // copies)

    def operand(self, values: Any, type: str) -> tuple[Any, Any, Any]:
        """Elements, their scales or None, and the values in bf16 if scales are per group."""
        torch = self.torch
        if type == "bf16":
            return values.bfloat16(), None, None
        if type == "f8e4m3":
            scale = values.abs().amax(1, keepdim=True) / 448
            return (values / scale).to(torch.float8_e4m3fn), scale, None
        groups = values.unflatten(1, (-1, GROUPS[type]))
        most = groups.abs().amax(2, keepdim=True)
        if type == "mxfp8":
            scale = (most / 448).log2().ceil().exp2()
            elements = (groups / scale).to(torch.float8_e4m3fn)
            value = (elements.float() * scale).flatten(1).bfloat16()
            return elements.flatten(1), scale.flatten(1).to(torch.float8_e8m0fnu), value
        scale = (most / 7).bfloat16()
        codes = (groups / scale.float()).round().clamp(-8, 7)
        value = (codes * scale.float()).flatten(1).bfloat16()
        codes = (codes.flatten(1) + 8).to(torch.uint8)
        return codes[:, ::2] | (codes[:, 1::2] << 4), scale.flatten(1), value

    def product(self, weight: tuple[Any, Any, Any]) -> Any:
        """torch's product, in bf16."""
        if self.type == "f8e4m3":
            scales = {"scale_a": self.x_scale, "scale_b": weight[1].t(), "bias": self.bias}
            return self.torch._scaled_mm(self.x, weight[0].t(), out_dtype=self.torch.bfloat16, **scales)
        multiplied = (weight[0] if weight[2] is None else weight[2]).t()
        if self.bias is not None:
            return self.torch.addmm(self.bias, self.x, multiplied)
        return self.torch.mm(self.x, multiplied)

    @property
    def turned(self) -> dict[str, Any]:
        """Arguments common to both forms of the operation."""
        return {"interleaved": False, "eps": EPS, **self.gammas}

    def project(self, weight: tuple[Any, Any, Any]) -> None:
        given = {
            "bias": self.bias, "x_scale": self.x_scale, "weight_scale": weight[1], "freqs_cis": self.freqs,
            "weight_format": "uint4b8" if self.type == "uint4b8" else "plain", "schedule": self.schedule, **self.turned,
        }  # fmt: skip
        if self.form == "padded":
            batch = len(self.counts)
            x, out = self.x.view(batch, -1, self.x.shape[1]), self.out.view(batch, -1, self.heads, SIZE)
            kv.ops.project_append_padded(self.collection, 0, x, weight[0], self.counts, query_out=out, **given)
        else:
            kv.ops.project_append(
                self.collection, 0, self.x, weight[0], self.offsets, query_out=self.out, **given
            )  # fmt: skip

    def two_steps(self, weight: tuple[Any, Any, Any]) -> None:
        """torch's product, then the append; in a padded batch it also writes the padding's rows, at little cost."""
        q, k, v = self.heads_of(self.product(weight))
        kv.ops.rope_append(
            self.collection, 0, q, k, v, self.offsets, self.freqs, query_out=self.out, **self.turned
        )  # fmt: skip

    def read(self, weight: tuple[Any, Any, Any]) -> None:
        """Only read the weight: a lower bound for a product with few tokens."""
        read[(READ_BLOCKS, 1, 1), (READ_THREADS, 1, 1)](weight[0].view(self.torch.int32).flatten(), self.scratch)

    def heads_of(self, products: Any) -> list[Any]:
        """Queries, keys and values."""
        parts = products.split([self.heads * SIZE, self.kv_heads * SIZE, self.kv_heads * SIZE], 1)
        return [part.unflatten(1, (-1, SIZE)) for part in parts]

    def error(self) -> float:
        """The largest error of the outputs, relative to the largest element; infinite if other bytes changed."""
        pools = [self.blocks] if self.scales is None else [self.blocks, self.scales]
        pools = [pool.view(self.torch.uint8) for pool in pools]
        for pool in pools:
            pool.fill_(POISON)
        self.out.fill_(float("nan"))
        self.project(self.weights[0])
        (w, w_scale, value), x = self.weights[0], self.x.float()
        w = value.float() if value is not None else w.float() if w_scale is None else w.float() * w_scale
        x = x if self.x_scale is None else x * self.x_scale
        product = x @ w.t()
        if self.bias is not None:
            product += self.bias.float()
        q, k, v = (part.float() for part in self.heads_of(product.bfloat16()))
        cos, sin = (self.freqs[self.position][:, None, i::2] for i in (0, 1))
        for part, gamma in ((q, self.gammas.get("q_gamma")), (k, self.gammas.get("k_gamma"))):
            if gamma is not None:
                part *= (part.square().mean(-1, keepdim=True) + EPS).rsqrt() * gamma
            re, im = part[..., : SIZE // 2].clone(), part[..., SIZE // 2 :].clone()
            part[..., : SIZE // 2], part[..., SIZE // 2 :] = re * cos - im * sin, re * sin + im * cos
        pages, slots = self.table[self.sequence, self.position // PAGE].long(), self.position % PAGE
        pages, slots, k, v = pages[self.kept], slots[self.kept], k[self.kept], v[self.kept]
        found = [self.out.float(), *(self.blocks[pages, i, 0, slots].float() for i in (0, 1))]
        if self.scales is not None:
            for i in (0, 1):
                found[i + 1] *= self.scales[pages, i, 0, slots].repeat_interleave(GRANULE, -1)
        worst = max(((f - w).abs().max() / w.abs().max()).item() for f, w in zip(found, (q, k, v), strict=True))
        for pool in pools:
            pool[pages, :, 0, slots] = POISON
        elsewhere = any((pool != POISON).any().item() for pool in pools)
        return float("inf") if elsewhere or worst != worst else worst

    def graph(self, call: Callable[[tuple[Any, Any, Any]], Any]) -> Any:
        """A CUDA graph of ``calls`` calls, cycling over the weights."""
        cuda = self.torch.cuda
        call(self.weights[0])
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            for i in range(self.calls):
                call(self.weights[i % len(self.weights)])
        return graph

    def times(self, graphs: Sequence[Any]) -> list[float]:
        """µs per call of each graph, interleaved, so that no graph alone runs first on an idle device."""
        rounds = [[span(graph.replay, self.torch) / self.calls for graph in graphs] for _ in range(ROUNDS)]
        return [float(np.median(found)) for found in zip(*rounds[UNCOUNTED:], strict=True)]


def lengths_of(tokens: int, form: str, draw: np.random.Generator) -> Any:
    """New tokens of each sequence: one sequence is empty, and in a padded batch the last one lacks a token."""
    batch = min(tokens, 8)
    if form == "padded":
        new = np.full(batch, tokens // batch)
        new[-1] -= 1 if batch > 1 else 0
        return new
    if tokens < 16:
        return np.full(batch, tokens // batch)
    ends = np.sort(draw.choice(np.arange(1, tokens), batch - 2, replace=False))
    return np.diff(np.concatenate([[0], ends[:3], ends[2:], [tokens]]))


def line(
    torch: Any, tokens: int, k: int, heads: Sequence[int], type: str, form: str, schedule: Any = None
) -> list[str]:
    """One line of the table."""
    step = Step(torch, tokens, k, heads[0], type, form, schedule, *heads[1:])
    first = [form, f"{tokens}", f"{k}", f"{step.columns}"]
    own = []
    for early in (False, True):
        step.schedule = {**(schedule or {}), **({"early": True} if early else {})} or None
        error = step.error()
        if not error < step.tolerance:
            return [*first, "wrong", f"{error:.3g}", "", "", "", "", ""]
        own.append(step.graph(step.project))
    *own, product, both, least = step.times([*own, *(step.graph(c) for c in (step.product, step.two_steps, step.read))])
    flops, size = 2 * tokens * step.columns * k, step.columns * k * TYPES[type] // 8
    times, own = [f"{t:.1f}" for t in (*own, product, both, least)], own[0]
    return [*first, *times, f"{flops / own / 1e6:.0f}", f"{size / own / 1e6:.2f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.products", description=__doc__)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="tokens per step, comma-separated")
    parser.add_argument("--shapes", default=SHAPES, help="K:query heads[:KV heads], comma-separated")
    parser.add_argument(
        "--types", default="bf16,f8e4m3", help=f"element types of the weight, comma-separated: {', '.join(TYPES)}"
    )
    parser.add_argument("--forms", default="rope", help=f"comma-separated: {', '.join(FORMS)}")
    parser.add_argument("--schedule", type=json.loads, help="schedule entries of project_append, as JSON")
    given = parser.parse_args(arguments)
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        print("bench.products needs torch and a GPU", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("bench.products needs a GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    shapes = [tuple(int(n) for n in shape.split(":")) for shape in given.shapes.split(",")]
    for name in given.types.split(","):
        lines = [
            line(torch, int(tokens), k, heads, name, form, given.schedule)
            for form in given.forms.split(",") for k, *heads in shapes
            for tokens in given.tokens.split(",")
        ]  # fmt: skip
        print(f"\n{name}, {torch.cuda.get_device_name()}\n")
        print(table([HEAD, *lines], markdown=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
