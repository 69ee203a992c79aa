# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows of masks and scores that are functions: documents, T5's bias by distance, trees of drafts.

What others take for them is in function_peers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from kvarn.measure.arrays import Arrays
from kvarn.measure.attention_problem import DecodeProblem

from .cases import Functions, Row, Tree
from .prefill import PrefillProblem

BUCKETS, FARTHEST = 32, 128  # of T5: distances from FARTHEST on are one


def buckets() -> np.ndarray:
    """The bucket of each distance below FARTHEST, by T5's rule for causal attention."""
    distance, exact = np.arange(FARTHEST), BUCKETS // 2
    far = exact + np.log(np.maximum(distance, 1) / exact) / np.log(FARTHEST / exact) * (BUCKETS - exact)
    return np.where(distance < exact, distance, np.minimum(far, BUCKETS - 1)).astype(np.int32)


class FunctionsProblem(PrefillProblem):
    """A :class:`Functions` row: prompts of equal length, cut into documents, with a bias or without."""

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
    """A :class:`Tree` row: the new tokens are a binary tree, of which each sees its ancestors, itself and the cache."""

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
        """Which tokens of a sequence its new ones see."""
        return np.concatenate([np.ones((len(self.tree), length - len(self.tree)), bool), self.tree], axis=1)

    def wanted(self, q: Any, keys: Any, values: Any, b: int, picked: slice) -> Any:
        scores = self.arrays.einsum("thd,nd->htn", q, keys) * self.scale
        return self.attended(scores, self.seen_of(len(keys)), values)


# --- kvarn -----------------------------------------------------------------------------------------


def same_document(b: Any, h: Any, q: Any, k: Any, documents: Any) -> Any:
    return documents[b, q] == documents[b, k]


def by_distance(score: Any, b: Any, h: Any, q: Any, k: Any, bias: Any, buckets: Any) -> Any:
    return score + bias[h, buckets[q - k]]


def call_of(p: Any, schedule: Mapping[str, Any] | None, by_blocks: bool = True) -> Callable[[int], Any]:
    """Attention with the row's functions, the mask by a block mask that is made once, as a step does for its layers."""
    import kvarn as kv

    new = p.queries
    collection = p.cached.collection(p.lengths - new, int(new.max()), p.longest)
    options: dict[str, Any] = {"schedule": schedule}
    if p.row.kind == "tree":
        options["tree"] = p.bits
    else:
        if p.bias is not None:
            options["score"] = (by_distance, p.bias, p.buckets)
        if p.row.shape.documents:
            mask = (kv.masks.causal & same_document, p.documents)
            if by_blocks:
                options["block_mask"] = kv.ops.block_mask(collection, p.query, p.offsets, mask, schedule=schedule)
            else:
                options["mask"] = mask
    return lambda layer: kv.ops.attention(collection, layer, p.query, p.offsets, scale=p.scale, out=p.out, **options)


def more_offers(p: Any) -> Iterator[tuple[str, Callable[[], Callable[[int], Any]]]]:
    """What kvarn offers besides: (its name, what makes the call)."""
    if p.row.kind == "functions" and p.row.shape.documents:
        yield "kvarn, without block_mask=", lambda: call_of(p, None, by_blocks=False)

        def making() -> Callable[[int], Any]:
            import kvarn as kv

            collection = p.cached.collection(p.lengths - p.queries, p.newest, p.longest)
            mask = (kv.masks.causal & same_document, p.documents)
            attend, made = call_of(p, None), kv.ops.block_mask(collection, p.query, p.offsets, mask)

            def call(layer: int) -> None:
                kv.ops.block_mask(collection, p.query, p.offsets, mask, blocks=made.blocks)
                attend(layer)

            return call

        yield "kvarn, with block_mask() itself", making
