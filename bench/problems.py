# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Data of the rows: kvarn.measure.attention_problem has decode attention, this module the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarn.dialect import dtypes
from kvarn.measure.arrays import Arrays
from kvarn.measure.attention_problem import AttentionProblem, Cached, DecodeProblem, Pages, Problem, layers_for

from .cases import Append, Functions, Gather, Mla, Prefill, Row, Sources, Tree

BUCKETS, FARTHEST = 32, 128  # T5's relative bias: distances from FARTHEST on share the last bucket


class SourcesProblem(DecodeProblem):
    """A :class:`Sources` row: every query sees a memory, then its sequence's own keys."""

    def __init__(self, arrays: Arrays, row: Row, split: bool) -> None:
        shape = row.shape
        assert isinstance(shape, Sources)
        super().__init__(arrays, row, split)
        self.own, self.memory_tokens = self.lengths, shape.memory
        self.seen = np.full(shape.batch, shape.memory)
        self.memory = Cached(arrays, row, Pages(self.seen, shape.page, arrays, seed=6), self.layers, split)
        self.no_keys = arrays.integers(np.zeros(shape.batch + 1, np.int64))
        self.lengths = self.own + shape.memory
        item = dtypes.by_name(row.dtype).itemsize
        self.bytes += 2 * shape.batch * shape.memory * shape.heads * shape.size * item
        self.flops += 4 * shape.batch * shape.memory * shape.query_heads * shape.size

    def keys_of(self, b: int) -> tuple[Any, Any]:
        parts = [
            (self.memory.rows(b, self.memory_tokens, half), self.cached.rows(b, int(self.own[b]), half))
            for half in range(2)
        ]
        return tuple(self.arrays.concatenate([x.swapaxes(0, 2) for x in pair]).swapaxes(0, 2) for pair in parts)  # type: ignore[return-value]


class PrefillProblem(AttentionProblem):
    """A :class:`Prefill` row, of one layer: compute takes far longer than the reads."""

    def __init__(self, arrays: Arrays, row: Row, split: bool) -> None:
        shape = row.shape
        assert isinstance(shape, Prefill)
        self.arrays, self.row = arrays, row
        self.queries, self.lengths = (np.array(x) for x in zip(*shape.lengths, strict=True))
        pages = Pages(self.lengths, shape.page, arrays)
        self.cached = Cached(arrays, row, pages, 1, split)
        tokens = int(self.queries.sum())
        self.query = arrays.normal((tokens, shape.query_heads, shape.size), "bf16")
        self.out = arrays.empty(self.query.shape, "bf16")
        self.scale = shape.size**-0.5
        pairs = sum(n * (k - n) + n * (n + 1) // 2 for n, k in shape.lengths)
        self.flops = 4 * pairs * shape.query_heads * shape.size
        item = dtypes.by_name(row.dtype).itemsize
        self.bytes = (
            4 * tokens * shape.query_heads * shape.size + 2 * int(self.lengths.sum()) * shape.heads * shape.size * item
        )
        self.offsets = arrays.integers(np.concatenate([[0], self.queries.cumsum()]))
        self.device_lengths = arrays.integers(self.lengths)
        self.longest, self.newest = int(self.lengths.max()), int(self.queries.max())

    def sequences(self) -> list[int]:
        return sorted({0, len(self.lengths) - 1})

    def heads_of(self, heads: int) -> list[tuple[slice, int]]:
        """One query head at a time, since a long prompt has many scores."""
        group = self.query.shape[1] // heads
        last = self.query.shape[1] - 1
        return [(slice(0, 1), 0), (slice(last, last + 1), last // group)]

    keys_of = DecodeProblem.keys_of


def buckets() -> np.ndarray:
    """The bucket of each distance below FARTHEST, by T5's rule for causal attention."""
    distance, exact = np.arange(FARTHEST), BUCKETS // 2
    far = exact + np.log(np.maximum(distance, 1) / exact) / np.log(FARTHEST / exact) * (BUCKETS - exact)
    return np.where(distance < exact, distance, np.minimum(far, BUCKETS - 1)).astype(np.int32)


class FunctionsProblem(PrefillProblem):
    """A :class:`Functions` row: equal prompts divided into documents, optionally with a bias."""

    def __init__(self, arrays: Arrays, row: Row, split: bool) -> None:
        super().__init__(arrays, row, split)
        shape = row.shape
        assert isinstance(shape, Functions)
        document = np.arange(self.longest, dtype=np.int32) // (shape.documents or self.longest)
        self.ids = np.tile(document, (len(self.lengths), 1))
        self.documents = arrays.integers(self.ids)
        self.bias = arrays.normal((shape.query_heads, BUCKETS), "f32") if shape.t5 else None
        self.bucket_of, self.buckets = buckets(), arrays.integers(buckets())
        each = np.bincount(self.ids[0])
        pairs = len(self.lengths) * int((each * (each + 1) // 2).sum())
        self.flops = 4 * pairs * shape.query_heads * shape.size

    def wanted(self, q: Any, keys: Any, values: Any, b: int, picked: slice) -> Any:
        at, key = np.arange(len(keys) - len(q), len(keys))[:, None], np.arange(len(keys))[None]
        scores = self.arrays.einsum("thd,nd->htn", q, keys) * self.scale
        if self.bias is not None:
            near = self.arrays.index(self.bucket_of[np.clip(at - key, 0, FARTHEST - 1)])
            scores = scores + self.bias[picked][:, near]
        return self.attended(scores, (key <= at) & (self.ids[b][at] == self.ids[b][key]), values)


class TreeProblem(DecodeProblem):
    """A :class:`Tree` row: the new tokens are a binary tree; each sees the cache, its ancestors and itself."""

    def __init__(self, arrays: Arrays, row: Row, split: bool) -> None:
        super().__init__(arrays, row, split)
        shape = row.shape
        assert isinstance(shape, Tree)
        seen = np.eye(shape.new, dtype=bool)
        for node in range(1, shape.new):
            seen[node] |= seen[(node - 1) // 2]
        self.tree = seen
        words = np.packbits(seen, axis=1, bitorder="little")
        words = np.pad(words, ((0, 0), (0, -words.shape[1] % 4))).view(np.int32)
        self.bits = arrays.integers(np.tile(words, (shape.batch, 1)))

    def seen_of(self, length: int) -> np.ndarray:
        """The mask of a sequence's new tokens over all its tokens."""
        return np.concatenate([np.ones((len(self.tree), length - len(self.tree)), bool), self.tree], axis=1)

    def wanted(self, q: Any, keys: Any, values: Any, b: int, picked: slice) -> Any:
        scores = self.arrays.einsum("thd,nd->htn", q, keys) * self.scale
        return self.attended(scores, self.seen_of(len(keys)), values)


class MlaProblem(AttentionProblem):
    """An :class:`Mla` row."""

    def __init__(self, arrays: Arrays, row: Row, split: bool) -> None:
        shape = row.shape
        assert isinstance(shape, Mla)
        self.arrays, self.row = arrays, row
        self.lengths, self.queries = np.full(shape.batch, shape.context), np.ones(shape.batch, np.int64)
        pages = Pages(self.lengths, shape.page, arrays)
        cached = shape.batch * shape.context * shape.stored_size * dtypes.by_name(row.dtype).itemsize
        self.layers = layers_for(cached, arrays)
        self.cached = Cached(arrays, row, pages, self.layers, split, halves=1)
        if shape.rope and not split:
            self.pack_rows(shape)
        self.query = arrays.normal((shape.batch, shape.query_heads, shape.size), shape.query)
        self.out = arrays.empty((shape.batch, shape.query_heads, shape.value_size), "bf16")
        self.scale = shape.size**-0.5
        of_head = shape.size * dtypes.by_name(shape.query).itemsize + 2 * shape.value_size
        self.bytes = cached + shape.batch * shape.query_heads * of_head + 4 * pages.total
        self.flops = 2 * shape.batch * shape.context * shape.query_heads * (shape.size + shape.value_size)
        self.offsets = arrays.integers(np.arange(shape.batch + 1))
        self.device_lengths = arrays.integers(self.lengths)
        self.longest = shape.context

    def pack_rows(self, shape: Mla) -> None:
        """Write valid scales and bf16 keys after the 8-bit elements of each row."""
        blocks, content = self.cached.blocks, shape.size - shape.rope
        rope = content + 4 * shape.scales
        self.arrays.put_bytes(
            blocks, rope, shape.stored_size, self.arrays.normal((*blocks.shape[:-1], shape.rope), "bf16")
        )
        if shape.scales:
            scales = abs(self.arrays.normal((*blocks.shape[:-1], shape.scales), "f32")) + 0.5
            self.arrays.put_bytes(blocks, content, rope, scales)

    def keys_of(self, b: int) -> tuple[Any, Any]:
        shape, length = self.row.shape, int(self.lengths[b])
        if not shape.rope:
            keys = self.cached.rows(b, length, 0)
        else:
            ids = self.arrays.index(self.cached.pages.table[b, : -(-length // shape.page)])
            rows = self.cached.blocks[ids, 0, 0].reshape(-1, 1, shape.stored_size)[:length]
            content = shape.size - shape.rope
            keys, behind = self.arrays.f32(rows[..., :content]), content + 4 * shape.scales
            if shape.scales:
                scales = self.arrays.view(rows[..., content:behind], "f32")
                keys = (keys.reshape(length, 1, shape.scales, -1) * scales[..., None]).reshape(length, 1, content)
            keys = self.arrays.concatenate((keys, self.arrays.f32(self.arrays.view(rows[..., behind:], "bf16"))))
        return keys, keys[..., : self.out.shape[2]]


class AppendProblem(Problem):
    """An :class:`Append` row; with ``rope``, queries and keys are rotated (half-split), and the query is an output."""

    def __init__(self, arrays: Arrays, row: Row, split: bool) -> None:
        shape = row.shape
        assert isinstance(shape, Append)
        self.arrays, self.row, self.rope = arrays, row, shape.rope
        draw = np.random.default_rng(5)
        tokens = self.tokens = shape.sequences * shape.each
        item = dtypes.by_name(row.dtype).itemsize
        one = tokens * shape.heads * shape.size * 2 * (2 + item)
        self.layers = max(2, layers_for(one, arrays))
        pages = Pages(np.full(shape.sequences, shape.room), shape.page, arrays)
        self.cached = Cached(arrays, row, pages, self.layers, split)
        # A prompt starts at position 0; a step's token is at a random position.
        before = (
            draw.integers(0, shape.room, shape.sequences) if shape.each == 1 else np.zeros(shape.sequences, np.int64)
        )
        self.before = before
        self.positions = (before[:, None] + np.arange(shape.each)).reshape(-1)
        owner = np.repeat(np.arange(shape.sequences), shape.each)
        self.slots = np.concatenate([pages.slots(b, self.positions[owner == b]) for b in range(shape.sequences)])
        self.key, self.value = (arrays.normal((self.layers, tokens, shape.heads, shape.size), "bf16") for _ in range(2))
        self.offsets = arrays.integers(np.arange(shape.sequences + 1) * shape.each)
        self.longest = int(before.max()) + shape.each
        self.bytes = one + 8 * tokens
        if shape.rope:
            self.query = arrays.normal((self.layers, tokens, shape.query_heads, shape.size), "bf16")
            self.query_out = arrays.empty(self.query.shape, "bf16")
            self.cos, self.sin = self._angles(max(self.longest, 2048), shape.size)
            # kvarn's table has (cos, sin) pairs; the peers' has a row of cosines, then one of sines.
            self.freqs = arrays.stack((self.cos, self.sin)).reshape(self.cos.shape[0], shape.size)
            self.bytes += 4 * tokens * shape.query_heads * shape.size
        # Further arguments of the peers.
        self.owner, self.at = arrays.integers(owner), arrays.integers(self.positions)
        ends = before + shape.each
        self.last = arrays.integers((ends - 1) % shape.page + 1)
        self.device_slots = arrays.index(self.slots)

    def _angles(self, positions: int, size: int) -> tuple[Any, Any]:
        rates = 10000.0 ** (-np.arange(0, size, 2) / size)
        angles = np.arange(positions)[:, None] * rates
        made = [self.arrays.empty(angles.shape, "f32") for _ in range(2)]
        for array, values in zip(made, (np.cos(angles), np.sin(angles)), strict=True):
            array[...] = values if not hasattr(self.arrays, "torch") else self.arrays.torch.as_tensor(values)
        return made[0], made[1]

    def rotated(self, x: Any) -> Any:
        """Rows rotated by their positions, in float32."""
        at = self.arrays.index(self.positions)
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        x = self.arrays.f32(x)
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return self.arrays.concatenate((a * cos - b * sin, b * cos + a * sin))

    def poison(self) -> None:
        for array in self.cached.parts if self.cached.split else (self.cached.blocks,):
            self.arrays.poison(array)
        if self.rope:
            self.arrays.poison(self.query_out)

    def error(self, check_query: bool = True) -> float:
        """The error of keys, values and queries of layer 0; NaN if a token is missing or an old one was overwritten."""
        cached, worst = self.cached, []
        shape = (-1, cached.heads, cached.size)
        wanted = (self.rotated(self.key[0]) if self.rope else self.key[0], self.value[0])
        for half in range(2):
            layer = cached.parts[half][0] if cached.split else cached.blocks[:, half, 0]
            if self.arrays.count_numbers(layer) != self.tokens * cached.heads * cached.size:
                return float("nan")
            worst.append(self.arrays.relative_error(layer.reshape(shape)[self.device_slots], wanted[half]))
        if self.rope and check_query:
            worst.append(self.arrays.relative_error(self.query_out[0], self.rotated(self.query[0])))
        return float("nan") if any(e != e for e in worst) else max(worst)


class GatherProblem(Problem):
    """A :class:`Gather` row: all tokens of one layer's keys, in order."""

    def __init__(self, arrays: Arrays, row: Row, split: bool) -> None:
        shape = row.shape
        assert isinstance(shape, Gather)
        self.arrays, self.row = arrays, row
        self.lengths = np.full(shape.sequences, shape.context)
        pages = Pages(self.lengths, shape.page, arrays)
        rows = shape.sequences * shape.context
        moved = 2 * rows * shape.heads * shape.size * dtypes.by_name(row.dtype).itemsize
        self.layers = layers_for(moved, arrays)
        self.cached = Cached(arrays, row, pages, self.layers, split, halves=1 if split else 2)
        self.out = arrays.empty((shape.sequences, shape.context, shape.heads, shape.size), row.dtype)
        self.ids = arrays.integers(np.tile(np.arange(shape.context), (shape.sequences, 1)))
        self.offsets = arrays.integers(np.arange(shape.sequences + 1))
        self.bytes = moved + 4 * pages.total
        self.longest = shape.context

    def poison(self) -> None:
        self.arrays.poison(self.out)

    def error(self) -> float:
        """0 if every bit is right, else 1."""
        pages, cached = self.cached.pages, self.cached
        ids = self.arrays.index(pages.table)
        layer = cached.parts[0][0] if cached.split else cached.blocks[:, 0, 0]
        wanted = layer[ids].reshape(self.out.shape)
        return 0.0 if self.arrays.equal(self.out, wanted) else 1.0


_PROBLEMS = {
    "decode": DecodeProblem,
    "sources": SourcesProblem,
    "append": AppendProblem,
    "gather": GatherProblem,
    "mla": MlaProblem,
    "prefill": PrefillProblem,
    "mixed": PrefillProblem,
    "functions": FunctionsProblem,
    "tree": TreeProblem,
}


def problem(arrays: Arrays, row: Row, split: bool) -> Any:
    """A row's data: with ``split``, K and V are separate (for peers); else in kvarn's layout."""
    return _PROBLEMS[row.kind](arrays, row, split)
